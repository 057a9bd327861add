//! Files that users name: only regular ones are read, and what is written appears whole or not at all.
//!
//! Errors are [`std::io::Error`]s in the system's words or in ours, without a path: whoever calls names the path that the user gave,
//! never a temporary one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read as _};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// What the names of everything unfinished begin with: whoever owns a folder may remove such files of a process that was killed.
pub const TEMPORARY: &str = ".trefoil-";

/// Opens a regular file for reading: a named pipe is not waited for, a device is not touched.
///
/// # Errors
/// What the system refuses; anything but a regular file, by what it is.
pub fn open_regular(path: &Path) -> io::Result<File> {
    // Looked at before it is opened: opening a pipe waits, and opening a device may do something.
    let about = fs::metadata(path)?;
    if about.is_file() { File::open(path) } else { Err(no_regular_file(about.file_type())) }
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

fn no_regular_file(of: fs::FileType) -> io::Error {
    io::Error::other(format!("it is {}; name a regular file", kind(of)))
}

#[cfg(unix)]
fn kind(of: fs::FileType) -> &'static str {
    use std::os::unix::fs::FileTypeExt as _;
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

/// The folder that a file lies in; `.` for a bare name.
pub fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A file written beside its place under another name; dropped without [`NewFile::commit`], nothing remains of it.
#[derive(Debug)]
pub struct NewFile {
    file: NamedTempFile,
    path: PathBuf,
}

impl NewFile {
    /// Starts a file that will be `path`. A link there goes on pointing to what is replaced.
    ///
    /// # Errors
    /// A path that is no regular file's, a folder that is not there or takes no files, and what the system refuses.
    pub fn create(path: &Path) -> io::Result<Self> {
        if path.as_os_str().as_encoded_bytes().last().is_none_or(|&byte| byte == b'/') {
            return Err(io::Error::new(ErrorKind::InvalidInput, "it is no file's name; name a file"));
        }
        let path = match fs::metadata(path) {
            Ok(about) if about.is_file() => fs::canonicalize(path)?,
            Ok(about) => return Err(no_regular_file(about.file_type())),
            Err(error) if error.kind() == ErrorKind::NotFound => path.to_owned(),
            // A part of the path that is no folder is told as such, with its name.
            Err(error) if error.kind() == ErrorKind::NotADirectory => path.to_owned(),
            Err(error) => return Err(error),
        };
        let file = temporary_in(folder_of(&path))?;
        Ok(Self { file, path })
    }

    /// The file, to write to.
    pub fn as_file(&self) -> &File {
        self.file.as_file()
    }

    /// Where it will be.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Puts the file in its place.
    ///
    /// # Errors
    /// What the system refuses; nothing remains of the file then.
    pub fn commit(self) -> io::Result<()> {
        self.file.persist(&self.path).map(drop).map_err(|error| error.error)
    }
}

/// Creates `path`, or replaces it, with what `write` writes. On any error `path` is left as it was.
///
/// # Errors
/// As [`NewFile::create`]; those of `write`.
pub fn write_atomically(path: &Path, write: impl FnOnce(&File) -> io::Result<()>) -> io::Result<()> {
    let file = NewFile::create(path)?;
    write(file.as_file())?;
    file.commit()
}

/// Whether `path` could be written now, for commands that work long before they write. A device or a pipe is not touched.
///
/// # Errors
/// As [`NewFile::create`].
pub fn check_writable(path: &Path) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(about) if !about.is_file() && !about.is_dir() => Ok(()),
        _ => NewFile::create(path).map(drop),
    }
}

/// Whether new files and folders can be put into `folder`.
///
/// # Errors
/// A folder that is not there or takes no files, and what the system refuses.
pub fn check_folder(folder: &Path) -> io::Result<()> {
    temporary_in(folder).map(drop)
}

/// Whether files can be put into `folder`, which is made with its parents where it is not there yet.
///
/// # Errors
/// As [`check_folder`], of the folder or the first of its parents that is there.
pub fn check_new_folder(folder: &Path) -> io::Result<()> {
    let named = folder.ancestors().map(|one| if one.as_os_str().is_empty() { Path::new(".") } else { one });
    for one in named {
        match fs::metadata(one) {
            Ok(_) => return check_folder(one),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {}
            Err(error) => return Err(error),
        }
    }
    check_folder(Path::new("."))
}

/// A file of a temporary name. It is opened here and not by the library, whose errors name it. Others may read it, as any file that a
/// program writes; the umask still applies.
fn temporary_in(folder: &Path) -> io::Result<NamedTempFile> {
    check_is_folder(folder)?;
    let open = |place: &Path| OpenOptions::new().read(true).write(true).create_new(true).open(place);
    tempfile::Builder::new().prefix(TEMPORARY).make_in(folder, open).map_err(|error| {
        // The folder is there, as was just seen: some, like those of /proc, know only files of their own.
        let takes_none = error.kind() == ErrorKind::NotFound;
        if takes_none { io::Error::new(error.kind(), refused(folder, "takes no new files")) } else { error }
    })
}

fn check_is_folder(folder: &Path) -> io::Result<()> {
    match fs::metadata(folder) {
        Ok(about) if about.is_dir() => Ok(()),
        Ok(_) => Err(io::Error::new(ErrorKind::NotADirectory, refused(folder, "is a file"))),
        // Somewhere on the way.
        Err(error) if error.kind() == ErrorKind::NotADirectory => check_is_folder(folder_of(folder)),
        Err(error) if error.kind() == ErrorKind::NotFound => {
            Err(io::Error::new(error.kind(), format!("folder {} does not exist; create it", folder.display())))
        }
        Err(error) => Err(error),
    }
}

fn refused(folder: &Path, what: &str) -> String {
    format!("{} {what}; name another folder", folder.display())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    #[test]
    #[cfg(unix)]
    fn what_is_no_file_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        let socket = folder.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        for (path, what) in [
            (folder.path(), "a folder"),
            (&pipe, "a named pipe"),
            (&socket, "a socket"),
            (Path::new("/dev/zero"), "a device"),
        ] {
            let wanted = format!("it is {what}; name a regular file");
            assert_eq!(read_regular(path).unwrap_err().to_string(), wanted);
            assert_eq!(NewFile::create(path).unwrap_err().to_string(), wanted);
        }
        let file = folder.path().join("file");
        fs::write(&file, b"contents").unwrap();
        assert_eq!(read_regular(&file).unwrap(), b"contents");
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        assert_eq!(read_regular(&link).unwrap(), b"contents", "a link to a file is that file");
        assert_eq!(open_regular(&folder.path().join("none")).unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn a_file_appears_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.bin");
        let files = || fs::read_dir(folder.path()).unwrap().count();
        write_atomically(&path, |mut file| file.write_all(b"old")).unwrap();
        let failed = write_atomically(&path, |mut file| {
            file.write_all(b"half")?;
            assert_eq!(files(), 2);
            Err(io::Error::other("stop"))
        });
        assert_eq!(failed.unwrap_err().to_string(), "stop");
        assert_eq!((fs::read(&path).unwrap(), files()), (b"old".to_vec(), 1));
        check_writable(&path).unwrap();
        assert_eq!((fs::read(&path).unwrap(), files()), (b"old".to_vec(), 1));
        // Made a folder meanwhile: it stays, and nothing is left beside it.
        let other = folder.path().join("other");
        let file = NewFile::create(&other).unwrap();
        fs::create_dir(&other).unwrap();
        assert!(file.commit().is_err());
        assert_eq!(files(), 2);
    }

    #[test]
    #[cfg(unix)]
    fn a_link_goes_on_pointing_to_what_is_replaced_and_others_may_read_it() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, b"old").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write_atomically(&link, |mut file| file.write_all(b"new")).unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read(&file).unwrap(), b"new");
        // As the process would create any file.
        fs::write(folder.path().join("plain"), b"").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&file), mode(&folder.path().join("plain")));
    }

    #[test]
    fn errors_name_no_temporary_file() {
        let space = tempfile::tempdir().unwrap();
        fs::write(space.path().join("file"), b"").unwrap();
        for (path, wanted) in [
            ("no/such/out", "folder SPACE/no/such does not exist; create it"),
            ("file/out", "SPACE/file is a file; name another folder"),
            ("file/deep/out", "SPACE/file is a file; name another folder"),
            ("out/", "it is no file's name; name a file"),
        ] {
            let path = space.path().join(path);
            let told = |error: io::Error| error.to_string().replace(&space.path().display().to_string(), "SPACE");
            assert_eq!(told(check_writable(&path).unwrap_err()), wanted, "{}", path.display());
            assert_eq!(told(NewFile::create(&path).unwrap_err()), wanted, "{}", path.display());
        }
        let told = |path: &str| check_new_folder(&space.path().join(path)).map_err(|error| error.to_string());
        assert_eq!((told(""), told("new"), told("new/deep")), (Ok(()), Ok(()), Ok(())));
        for path in ["file", "file/deep/er"] {
            assert!(told(path).unwrap_err().contains("file is a file; name another folder"), "{path}");
        }
        assert_eq!(check_writable(Path::new("")).unwrap_err().kind(), ErrorKind::InvalidInput);
        let long = space.path().join("x".repeat(300));
        let message = check_writable(&long).unwrap_err().to_string();
        assert!(!message.contains(TEMPORARY), "{message}");
        if cfg!(target_os = "linux") {
            let message = check_writable(Path::new("/proc/out")).unwrap_err().to_string();
            assert!(!message.contains(TEMPORARY) && !message.is_empty(), "{message}");
        }
        assert_eq!(fs::read_dir(space.path()).unwrap().count(), 1);
        assert_eq!(folder_of(Path::new("bare")), Path::new("."));
    }
}
