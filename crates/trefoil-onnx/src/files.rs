//! Writing files so that nobody ever sees half of one.

use crate::OnnxError;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::Path;
use trefoil_files::NewFile;
pub(crate) use trefoil_files::folder_of as parent;

/// Creates `path` by writing a temporary file in the same folder and renaming it. On any error the temporary file is
/// removed and `path` is left as it was.
pub(crate) fn write_atomically(
    path: &Path,
    fill: impl FnOnce(&mut BufWriter<&File>) -> Result<(), OnnxError>,
) -> Result<(), OnnxError> {
    let io = |error: io::Error| OnnxError::io(path, &error);
    let created = NewFile::create(path).map_err(io)?;
    // Large slices bypass the buffer, so mapped weights are written straight from the map.
    let mut writer = BufWriter::with_capacity(1 << 16, created.as_file());
    fill(&mut writer)?;
    writer.flush().map_err(io)?;
    drop(writer);
    created.commit().map_err(io)
}

/// Creates `path` with these bytes, atomically.
pub(crate) fn write_bytes(path: &Path, bytes: &[u8]) -> Result<(), OnnxError> {
    write_atomically(path, |writer| writer.write_all(bytes).map_err(|error| OnnxError::io(path, &error)))
}

/// Creates a folder and its parents.
pub(crate) fn create_folder(folder: &Path) -> Result<(), OnnxError> {
    fs::create_dir_all(folder).map_err(|error| OnnxError::io(folder, &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.bin");
        fs::write(&path, b"old").unwrap();
        let result = write_atomically(&path, |writer| {
            writer.write_all(b"half").unwrap();
            Err(OnnxError::Malformed { reason: "stop".into() })
        });
        assert!(result.is_err());
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
