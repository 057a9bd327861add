//! Files and folders that appear whole or not at all.

use super::OutputError;
use std::fs::File;
use std::path::{Path, PathBuf};
use tempfile::{NamedTempFile, TempDir};

/// What the names of everything unfinished begin with: whoever owns a folder may remove such files of a process that was killed.
pub(crate) const TEMPORARY: &str = ".trefoil-";

/// The folder of a path, `.` where it names none.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A file written beside its place under another name; dropped without [`AtomicFile::commit`], nothing remains.
#[derive(Debug)]
pub(crate) struct AtomicFile {
    file: NamedTempFile,
    path: PathBuf,
}

impl AtomicFile {
    /// Starts a file that will be `path`. A link there goes on pointing to what is replaced.
    pub(crate) fn create(path: &Path) -> Result<AtomicFile, OutputError> {
        if path.is_dir() {
            return Err(OutputError::format(path, "there is a folder of this name; name a file"));
        }
        // A device or a pipe would be replaced, not written.
        if path.metadata().is_ok_and(|about| !about.is_file()) {
            return Err(OutputError::format(path, "it is no ordinary file; name another"));
        }
        let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
        let file = tempfile::Builder::new()
            .prefix(TEMPORARY)
            .tempfile_in(folder_of(&path))
            .map_err(OutputError::io("write", &path))?;
        Ok(AtomicFile { file, path })
    }

    /// A second handle on the file, for encoders that keep what they write to.
    pub(crate) fn handle(&self) -> Result<File, OutputError> {
        self.file.as_file().try_clone().map_err(OutputError::io("write", &self.path))
    }

    /// Where the file will be.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Puts the file in its place.
    pub(crate) fn commit(self) -> Result<(), OutputError> {
        // Temporary files are private; results are not.
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = std::fs::Permissions::from_mode(0o644);
            self.file.as_file().set_permissions(mode).map_err(OutputError::io("write", &self.path))?;
        }
        self.file.persist(&self.path).map_err(|error| OutputError::io("write", &self.path)(error.error))?;
        Ok(())
    }
}

/// A folder filled beside its place under another name.
#[derive(Debug)]
pub(crate) struct AtomicFolder {
    folder: TempDir,
    path: PathBuf,
}

impl AtomicFolder {
    /// Starts a folder that will be `path`, which must not exist or be empty.
    pub(crate) fn create(path: &Path) -> Result<AtomicFolder, OutputError> {
        let in_use = || OutputError::format(path, "it is there and not empty; name another folder or remove it");
        match std::fs::read_dir(path) {
            Ok(mut entries) => {
                if entries.next().is_some() {
                    return Err(in_use());
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(OutputError::io("write", path)(error)),
        }
        // `a/b/` has the file name `b` too.
        let path: PathBuf = path.components().collect();
        let folder = tempfile::Builder::new()
            .prefix(".trefoil-frames-")
            .tempdir_in(folder_of(&path))
            .map_err(OutputError::io("write", &path))?;
        Ok(AtomicFolder { folder, path })
    }

    /// A file in it.
    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Where the folder will be.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Puts the folder in its place.
    pub(crate) fn commit(self) -> Result<(), OutputError> {
        let fail = OutputError::io("write", &self.path);
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = std::fs::Permissions::from_mode(0o755);
            std::fs::set_permissions(self.folder.path(), mode).map_err(OutputError::io("write", &self.path))?;
        }
        if self.path.is_dir() {
            std::fs::remove_dir(&self.path).map_err(OutputError::io("write", &self.path))?;
        }
        std::fs::rename(self.folder.path(), &self.path).map_err(fail)?;
        // It is no longer temporary: nothing to remove.
        let _ = self.folder.keep();
        Ok(())
    }
}
