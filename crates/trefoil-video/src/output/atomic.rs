//! Files and folders that appear whole or not at all.

use super::OutputError;
use std::fs::File;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
pub(crate) use trefoil_files::TEMPORARY;
use trefoil_files::{NewFile, check_folder, folder_of};

/// A file written beside its place under another name; dropped without [`AtomicFile::commit`], nothing remains.
#[derive(Debug)]
pub(crate) struct AtomicFile {
    file: NewFile,
    path: PathBuf,
}

impl AtomicFile {
    /// Starts a file that will be `path`. A link there goes on pointing to what is replaced.
    pub(crate) fn create(path: &Path) -> Result<AtomicFile, OutputError> {
        let file = NewFile::create(path).map_err(OutputError::io("write", path))?;
        Ok(AtomicFile { file, path: path.to_path_buf() })
    }

    /// A second handle on the file, for encoders that keep what they write to.
    pub(crate) fn handle(&self) -> Result<File, OutputError> {
        self.file.as_file().try_clone().map_err(OutputError::io("write", &self.path))
    }

    /// The name that was asked for.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Puts the file in its place.
    pub(crate) fn commit(self) -> Result<(), OutputError> {
        self.file.commit().map_err(OutputError::io("write", &self.path))
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
            // What is wrong with the way to it is told below.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(OutputError::io("write", path)(error)),
        }
        // `a/b/` has the file name `b` too.
        let path: PathBuf = path.components().collect();
        // Tried with a file first, because the errors of temporary folders name them.
        check_folder(folder_of(&path)).map_err(OutputError::io("write", &path))?;
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
