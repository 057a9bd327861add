//! Folders that several processes pack into, and what killed ones leave there.

use crate::VideoError;
use crate::output::TEMPORARY;
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::path::Path;
use std::time::Duration;

/// How often, and after which pauses, a locked folder is tried again.
const TRIES: u32 = 50;
const PAUSE: Duration = Duration::from_millis(10);

/// A folder that this process packs into. As long as it is held, nobody tidies there; the system lets go of it when a process is killed.
#[derive(Debug)]
pub struct PackingFolder {
    _lock: File,
}

impl PackingFolder {
    /// Says that something unfinished will lie in `folder`.
    ///
    /// # Errors
    /// A folder that cannot be opened.
    pub fn join(folder: &Path) -> Result<PackingFolder, VideoError> {
        let lock = File::open(folder).map_err(VideoError::io("open", folder))?;
        // Whoever tidies is done in a moment. A folder that stays locked is a job's, where nobody tidies for packing; and where the file system
        // has no locks nobody gets the one to tidy with either.
        for _ in 0..TRIES {
            if flock(&lock, FlockOperation::NonBlockingLockShared) != Err(rustix::io::Errno::WOULDBLOCK) {
                break;
            }
            std::thread::sleep(PAUSE);
        }
        Ok(PackingFolder { _lock: lock })
    }

    /// As [`PackingFolder::join`], and removes what killed processes left unfinished, unless another one is packing there now.
    ///
    /// # Errors
    /// As there.
    pub fn tidied(folder: &Path) -> Result<PackingFolder, VideoError> {
        let lock = File::open(folder).map_err(VideoError::io("open", folder))?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
                let is_left = entry.file_name().to_string_lossy().starts_with(TEMPORARY);
                if is_left && entry.file_type().is_ok_and(|kind| kind.is_file()) {
                    // One that cannot be removed costs space, not the packing.
                    let _ = std::fs::remove_file(entry.path());
                }
            }
        }
        drop(lock);
        PackingFolder::join(folder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_process_left_goes_and_what_a_living_one_writes_stays() {
        let space = tempfile::tempdir().unwrap();
        let (left, whole) = (space.path().join(".trefoil-left"), space.path().join("a.trefoil"));
        let write = || [&left, &whole].map(|file| std::fs::write(file, b"x").unwrap());
        write();
        let living = PackingFolder::tidied(space.path()).unwrap();
        assert!(!left.exists() && whole.exists());
        write();
        let other = PackingFolder::tidied(space.path()).unwrap();
        assert!(left.exists(), "somebody is packing here");
        drop((living, other));
        drop(PackingFolder::tidied(space.path()).unwrap());
        assert!(!left.exists());
        assert!(PackingFolder::join(&space.path().join("none")).is_err());
        // A job's folder does not hold up packing for good.
        let job = File::open(space.path()).unwrap();
        flock(&job, FlockOperation::NonBlockingLockExclusive).unwrap();
        PackingFolder::join(space.path()).unwrap();
    }
}
