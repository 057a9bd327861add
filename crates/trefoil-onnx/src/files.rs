//! Writing files so that nobody ever sees half of one; opening only what is a file.

use crate::OnnxError;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Opens a regular file for reading: a named pipe is not waited for, a device is not touched.
///
/// # Errors
/// What the system refuses; anything but a regular file, by what it is.
pub fn open_regular(path: &Path) -> io::Result<File> {
    // Looked at before it is opened: opening a pipe waits, and opening a device may do something.
    let about = fs::metadata(path)?;
    if about.is_file() {
        return File::open(path);
    }
    Err(io::Error::other(format!("it is {}; name a regular file", kind(about.file_type()))))
}

/// All bytes of a regular file.
///
/// # Errors
/// As [`open_regular`].
pub fn read_regular(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular(path)?.read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(unix)]
fn kind(of: fs::FileType) -> &'static str {
    use std::os::unix::fs::FileTypeExt;
    match of {
        kind if kind.is_dir() => "a folder",
        kind if kind.is_fifo() => "a named pipe",
        kind if kind.is_socket() => "a socket",
        kind if kind.is_char_device() || kind.is_block_device() => "a device",
        _ => "no regular file",
    }
}

#[cfg(not(unix))]
fn kind(of: fs::FileType) -> &'static str {
    if of.is_dir() { "a folder" } else { "no regular file" }
}

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
    #[cfg(unix)]
    fn what_is_no_file_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        for (path, what) in [(folder.path(), "a folder"), (&socket, "a socket"), (Path::new("/dev/zero"), "a device")] {
            let message = read_regular(path).unwrap_err().to_string();
            assert_eq!(message, format!("it is {what}; name a regular file"));
        }
        let file = folder.path().join("file");
        fs::write(&file, b"contents").unwrap();
        assert_eq!(read_regular(&file).unwrap(), b"contents");
        assert_eq!(open_regular(&folder.path().join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
    }

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
