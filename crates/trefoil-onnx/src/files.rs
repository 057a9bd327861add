//! Writing files so that nobody ever sees half of one.

use crate::OnnxError;
use std::fs::{self, File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Creates `path` by writing a temporary file in the same folder and renaming it. On any error the temporary file is
/// removed and `path` is left as it was.
pub(crate) fn write_atomically(
    path: &Path,
    fill: impl FnOnce(&mut BufWriter<File>) -> Result<(), OnnxError>,
) -> Result<(), OnnxError> {
    let temporary = temporary_name(path);
    let attempt = (|| {
        let created = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&temporary)
            .map_err(|error| OnnxError::io(&temporary, &error))?;
        // Large slices bypass the buffer, so mapped weights are written straight from the map.
        let mut writer = BufWriter::with_capacity(1 << 16, created);
        fill(&mut writer)?;
        writer.flush().map_err(|error| OnnxError::io(&temporary, &error))?;
        drop(writer);
        fs::rename(&temporary, path).map_err(|error| OnnxError::io(path, &error))
    })();
    if attempt.is_err() {
        // Best effort: the error that matters is already in hand.
        let _ = fs::remove_file(&temporary);
    }
    attempt
}

/// Creates `path` with these bytes, atomically.
pub(crate) fn write_bytes(path: &Path, bytes: &[u8]) -> Result<(), OnnxError> {
    write_atomically(path, |writer| writer.write_all(bytes).map_err(|error| OnnxError::io(path, &error)))
}

/// The folder a file lies in; `.` for a bare name.
pub(crate) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Creates a folder and its parents.
pub(crate) fn create_folder(folder: &Path) -> Result<(), OnnxError> {
    fs::create_dir_all(folder).map_err(|error| OnnxError::io(folder, &error))
}

fn temporary_name(path: &Path) -> PathBuf {
    // Unique per process and call, so that workers that prepare the same model at once do not collide.
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let count = COUNTER.fetch_add(1, Ordering::Relaxed);
    let name = path.file_name().map_or_else(|| "file".into(), |name| name.to_string_lossy().into_owned());
    parent(path).join(format!(".{name}.{}-{count}.tmp", std::process::id()))
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
