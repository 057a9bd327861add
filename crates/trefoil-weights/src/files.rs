//! Checkpoints and artefacts as files: opened only if they are regular ones, and noticed when they change.

use crate::WeightsError;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::SystemTime;

/// Opens a regular file for reading. A named pipe is not waited for, and a device is not touched.
///
/// # Errors
/// What the system refuses; anything but a regular file, by what it is.
pub fn open_regular(path: &Path) -> Result<File, WeightsError> {
    trefoil_files::open_regular(path).map_err(WeightsError::io("open", path))
}

/// Reads `len` bytes from byte `start` on, in memory of their own: a file that another process cuts short meanwhile is an error, where a
/// mapping would end this process.
pub(crate) fn read_at(path: &Path, file: &File, start: u64, len: usize) -> Result<Vec<u8>, WeightsError> {
    let mut bytes = vec![0; len];
    match file.read_exact_at(&mut bytes, start) {
        Ok(()) => Ok(bytes),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Err(WeightsError::Changed { path: path.to_path_buf(), how: "became shorter" })
        }
        Err(error) => Err(WeightsError::io("read", path)(error)),
    }
}

/// How a file was when it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    bytes: u64,
    modified: Option<SystemTime>,
}

impl Stamp {
    /// How it is now.
    pub(crate) fn of(path: &Path, file: &File) -> Result<Stamp, WeightsError> {
        let about = file.metadata().map_err(WeightsError::io("inspect", path))?;
        Ok(Stamp { bytes: about.len(), modified: about.modified().ok() })
    }

    /// Bytes of the file.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether the open file is as it was: nobody wrote to it or cut it. Another file under its name does not matter, for this one is
    /// still the old one.
    pub(crate) fn check(&self, path: &Path, file: &File) -> Result<(), WeightsError> {
        let now = Stamp::of(path, file)?;
        let how = match now {
            now if now == *self => return Ok(()),
            now if now.bytes < self.bytes => "became shorter",
            now if now.bytes > self.bytes => "became longer",
            _ => "was written to",
        };
        Err(WeightsError::Changed { path: path.to_path_buf(), how })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::time::Duration;

    #[test]
    fn a_file_that_changes_is_noticed_and_one_that_is_replaced_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        std::fs::write(&path, [7; 100]).unwrap();
        let file = open_regular(&path).unwrap();
        let stamp = Stamp::of(&path, &file).unwrap();
        assert_eq!(read_at(&path, &file, 90, 10).unwrap(), [7; 10]);
        stamp.check(&path, &file).unwrap();
        let told = |error: WeightsError| error.to_string().replace(&path.display().to_string(), "F");
        let writer = File::options().write(true).open(&path).unwrap();
        let later = stamp.modified.unwrap() + Duration::from_secs(1);
        // Same length, other bytes; the clock of file systems is coarse, so the time is set.
        (&writer).write_all(&[8; 3]).unwrap();
        writer.set_modified(later).unwrap();
        let want = "F was written to while it was read; leave it as it is until the command ends, and start again";
        assert_eq!(told(stamp.check(&path, &file).unwrap_err()), want);
        writer.set_len(200).unwrap();
        assert!(told(stamp.check(&path, &file).unwrap_err()).contains("became longer"));
        writer.set_len(95).unwrap();
        assert!(told(stamp.check(&path, &file).unwrap_err()).contains("became shorter"));
        assert!(told(read_at(&path, &file, 90, 10).unwrap_err()).contains("became shorter"));
        // Another file under the name: this one is what it was.
        let stamp = Stamp::of(&path, &file).unwrap();
        std::fs::write(folder.path().join("new"), "y").unwrap();
        std::fs::rename(folder.path().join("new"), &path).unwrap();
        stamp.check(&path, &file).unwrap();
    }
}
