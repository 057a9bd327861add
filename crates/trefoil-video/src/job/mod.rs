//! A job: many clips in a folder, and a file there that says what they are and which are finished.
//!
//! Clips appear whole or not at all, and the file is written anew after each of them, so a job that was stopped in any way goes on
//! where it was. The folder belongs to the job: another process is kept out while one works, and what a killed one left unfinished
//! is removed.

mod identity;
mod state;

pub use identity::{identity_of_files, identity_of_tensor};
pub use state::{Finished, JobClip, JobState, clip_stem};

use crate::output::{ClipWriter, TEMPORARY};
use crate::tensors::write_atomically;
use state::VERSION;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// Name of the file.
pub const JOB_FILE: &str = "job.json";

/// What can be wrong with a job's folder.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// The operating system refused a file operation.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file or folder.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The folder's job is not the one asked for.
    #[error("{} holds another job: {difference}; name another folder, or remove {} to start anew", folder.display(), folder.display())]
    Differs {
        /// Folder.
        folder: PathBuf,
        /// The first difference.
        difference: String,
    },
    /// A folder that is no job's.
    #[error("{}: {reason}", path.display())]
    Foreign {
        /// Folder or file.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// Another process works in it.
    #[error("another process is working in {}; wait for it, or name another folder", folder.display())]
    Busy {
        /// Folder.
        folder: PathBuf,
    },
}

impl JobError {
    fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> JobError {
        let path = path.to_path_buf();
        move |source| JobError::Io { action, path, source }
    }
}

/// A job in its folder, which is this process's until it is dropped.
#[derive(Debug)]
pub struct Job {
    folder: PathBuf,
    state: JobState,
    /// Holds the folder's lock.
    _lock: File,
}

impl Job {
    /// Begins the job in `folder`, which is created where it is missing, or goes on with it. With `may_grow` the number of clips may be
    /// another than before.
    ///
    /// # Errors
    /// A folder that cannot be written, that holds something else, another job, or one that another process works on.
    pub fn open(folder: &Path, wanted: JobState, may_grow: bool) -> Result<Job, JobError> {
        std::fs::create_dir_all(folder).map_err(JobError::io("create", folder))?;
        let lock = File::open(folder).map_err(JobError::io("open", folder))?;
        let locked = rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive);
        // Any other answer is that of a file system without locks.
        if locked == Err(rustix::io::Errno::WOULDBLOCK) {
            return Err(JobError::Busy { folder: folder.to_path_buf() });
        }
        let file = folder.join(JOB_FILE);
        // Clips that an earlier run of this very job may have made: only their files can be its work.
        let mut known = 0;
        let state = match std::fs::read(&file) {
            Ok(text) => {
                let unreadable = |reason: String| JobError::Foreign {
                    path: file.clone(),
                    reason: format!("{reason}; name another folder, or remove {} to start anew", folder.display()),
                };
                let mut found: JobState = serde_json::from_slice(&text)
                    .map_err(|error| unreadable(format!("no job of this program can be read from it ({error})")))?;
                if found.version() != VERSION {
                    return Err(unreadable(format!(
                        "it has version {}, this program writes {VERSION}",
                        found.version()
                    )));
                }
                match found.difference(&wanted, may_grow) {
                    None => {
                        known = found.clips.len();
                        found.clips.extend(wanted.clips.into_iter().skip(found.clips.len()));
                        found
                    }
                    // Nothing is lost where nothing was made.
                    Some(_) if !found.clips.iter().any(|clip| folder.join(&clip.file).exists()) => wanted,
                    Some(difference) => return Err(JobError::Differs { folder: folder.to_path_buf(), difference }),
                }
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let mut entries = std::fs::read_dir(folder).map_err(JobError::io("list", folder))?;
                if entries.any(|entry| entry.is_ok_and(|entry| !is_temporary(&entry.file_name()))) {
                    let reason = format!("it is not empty and holds no {JOB_FILE}; name a new folder");
                    return Err(JobError::Foreign { path: folder.to_path_buf(), reason });
                }
                wanted
            }
            Err(source) => return Err(JobError::io("read", &file)(source)),
        };
        let mut job = Job { folder: folder.to_path_buf(), state, _lock: lock };
        job.check_strangers(known)?;
        job.tidy()?;
        job.look()?;
        job.write()?;
        Ok(job)
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What its file says.
    pub fn state(&self) -> &JobState {
        &self.state
    }

    /// Where clip `index` is, or will be.
    pub fn path(&self, index: usize) -> PathBuf {
        self.folder.join(&self.state.clips[index].file)
    }

    /// Where the strips of clips are kept.
    fn strips(&self) -> PathBuf {
        self.folder.join("strips")
    }

    /// Where the strip of clip `index` is, or will be. Its folder is made where it is missing.
    ///
    /// # Errors
    /// A folder that cannot be made.
    pub fn strip(&self, index: usize) -> Result<PathBuf, JobError> {
        let folder = self.strips();
        std::fs::create_dir_all(&folder).map_err(JobError::io("create", &folder))?;
        let stem = Path::new(&self.state.clips[index].file).file_stem().unwrap_or_default();
        Ok(folder.join(format!("{}.png", stem.to_string_lossy())))
    }

    /// Whether clip `index` is there.
    pub fn is_done(&self, index: usize) -> bool {
        self.state.clips[index].done.is_some()
    }

    /// Writes down that clip `index` is finished; its file must be in its place.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn finish(&mut self, index: usize, finished: Finished) -> Result<(), JobError> {
        let bytes = size_of_path(&self.path(index)).unwrap_or(0);
        let clip = &mut self.state.clips[index];
        clip.done = Some(Finished { bytes, trefoil: Some(env!("CARGO_PKG_VERSION").to_string()), ..finished });
        clip.failed = None;
        self.write()
    }

    /// Writes down why clip `index` could not be made.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn fail(&mut self, index: usize, reason: String) -> Result<(), JobError> {
        self.state.clips[index].failed = Some(reason);
        self.write()
    }

    /// Removes what a killed process left unfinished.
    fn tidy(&self) -> Result<(), JobError> {
        for folder in [self.folder.clone(), self.strips()] {
            for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
                if is_temporary(&entry.file_name()) {
                    let path = entry.path();
                    let removed =
                        if path.is_dir() { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
                    removed.map_err(JobError::io("remove", &path))?;
                }
            }
        }
        Ok(())
    }

    /// Refuses a folder where something lies in the place of a clip that no run of this job can have made: clips from `known` on.
    fn check_strangers(&self, known: usize) -> Result<(), JobError> {
        let mut places = (known..self.state.clips.len()).map(|index| self.path(index));
        match places.find(|path| path.symlink_metadata().is_ok()) {
            None => Ok(()),
            Some(path) => {
                let reason = format!(
                    "{} does not say that it is a clip of this job; move it away, or name another folder",
                    self.folder.join(JOB_FILE).display()
                );
                Err(JobError::Foreign { path, reason })
            }
        }
    }

    /// Compares what is written down with what is there: files appear whole, so one that is there is finished, and one that is gone
    /// or has another size is to be made again. Damaged ones go before that is written down: otherwise the next run would find
    /// them without a mark and take them for finished.
    fn look(&mut self) -> Result<(), JobError> {
        for index in 0..self.state.clips.len() {
            let path = self.path(index);
            let clip = &mut self.state.clips[index];
            let is_folder = clip.is_folder();
            let there = std::fs::metadata(&path).ok().filter(|about| about.is_dir() == is_folder);
            let there = there.and_then(|_| size_of_path(&path));
            clip.done = match (clip.done.take(), there) {
                (Some(done), Some(bytes)) if done.bytes == bytes => Some(done),
                (None, Some(bytes)) => Some(Finished { bytes, ..Finished::default() }),
                _ => None,
            };
            if clip.done.is_none() {
                clear(&path)?;
            }
        }
        Ok(())
    }

    /// Writes the file anew, as after each clip.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write(&self) -> Result<(), JobError> {
        let path = self.folder.join(JOB_FILE);
        let mut text = serde_json::to_vec_pretty(&self.state)
            .map_err(|error| JobError::io("write", &path)(io::Error::other(error)))?;
        text.push(b'\n');
        write_atomically(&path, &text).map_err(|error| match error {
            crate::VideoError::Io { action, path, source } => JobError::Io { action, path, source },
            other => JobError::io("write", &path)(io::Error::other(other)),
        })
    }
}

/// Removes what is left of a clip: a file, or a folder that holds nothing but a clip's pictures. Anything else is somebody's.
fn clear(path: &Path) -> Result<(), JobError> {
    let Ok(about) = path.symlink_metadata() else { return Ok(()) };
    if !about.is_dir() {
        return std::fs::remove_file(path).map_err(JobError::io("remove", path));
    }
    for entry in std::fs::read_dir(path).map_err(JobError::io("list", path))?.flatten() {
        if !ClipWriter::is_part(&entry.file_name()) {
            let reason = format!(
                "a clip should be here, and {} is none of its pictures; move the folder away",
                Path::new(&entry.file_name()).display()
            );
            return Err(JobError::Foreign { path: path.to_path_buf(), reason });
        }
    }
    std::fs::remove_dir_all(path).map_err(JobError::io("remove", path))
}

fn is_temporary(name: &std::ffi::OsStr) -> bool {
    name.to_string_lossy().starts_with(TEMPORARY)
}

/// Bytes of a file, or of all files of a folder; `None` where there is nothing, or an empty folder.
fn size_of_path(path: &Path) -> Option<u64> {
    let about = std::fs::metadata(path).ok()?;
    if about.is_file() {
        return Some(about.len());
    }
    let files = std::fs::read_dir(path).ok()?.flatten();
    let sizes: Vec<u64> = files.filter_map(|entry| Some(entry.metadata().ok()?.len())).collect();
    (!sizes.is_empty()).then(|| sizes.iter().sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::collections::BTreeMap;

    fn state(prompts: &[&str]) -> JobState {
        let clips = prompts.iter().enumerate().map(|(index, prompt)| {
            let file = format!("{}.gif", clip_stem(index + 1, prompt));
            JobClip::new(file, (*prompt).to_string(), 5 + index as u32)
        });
        JobState::new(BTreeMap::from([("frames".to_string(), json!(17))]), clips.collect())
    }

    fn finished() -> Finished {
        Finished { frames: Some(17), ..Finished::default() }
    }

    #[test]
    fn a_job_goes_on_and_says_what_differs() {
        let space = tempfile::tempdir().unwrap();
        let folder = space.path().join("new/job");
        let mut job = Job::open(&folder, state(&["a b", "c"]), false).unwrap();
        assert!(matches!(Job::open(&folder, state(&["a b", "c"]), false), Err(JobError::Busy { .. })));
        std::fs::write(job.path(0), b"clip").unwrap();
        job.finish(0, finished()).unwrap();
        // Not written down, but there; and something half-written.
        std::fs::write(job.path(1), b"other").unwrap();
        std::fs::write(folder.join(".trefoil-abc"), b"half").unwrap();
        drop(job);
        let job = Job::open(&folder, state(&["a b", "c"]), false).unwrap();
        assert!(job.is_done(0) && job.is_done(1) && !folder.join(".trefoil-abc").exists());
        assert_eq!(job.state().clips[0].done.as_ref().map(|done| (done.bytes, done.frames)), Some((4, Some(17))));
        // Gone, or another size: to be made again.
        std::fs::remove_file(job.path(1)).unwrap();
        std::fs::write(job.path(0), b"clipped").unwrap();
        drop(job);
        let job = Job::open(&folder, state(&["a b", "c"]), false).unwrap();
        assert!(!job.is_done(0) && !job.is_done(1) && !job.path(0).exists());
        drop(job);
        // Nothing is made, so nothing is lost.
        drop(Job::open(&folder, state(&["other"]), false).unwrap());
        let mut job = Job::open(&folder, state(&["a b", "c"]), false).unwrap();
        std::fs::write(job.path(1), b"clip").unwrap();
        job.finish(1, finished()).unwrap();
        drop(job);

        let differs = |wanted: JobState| Job::open(&folder, wanted, false).unwrap_err().to_string();
        let message = differs(state(&["a b", "d"]));
        assert!(
            message.contains("its prompt 2 is \"c\", this one's is \"d\"; name another folder, or remove"),
            "{message}"
        );
        assert!(differs(state(&["a b"])).contains("it has 2 prompts, this one has 1"));
        let mut other = state(&["a b", "c"]);
        other.settings.insert("frames".to_string(), json!(5));
        assert!(differs(other).contains("its frames is 17, this one's is 5"));
        let mut other = state(&["a b", "c"]);
        other.clips[0].seed = 1;
        assert!(differs(other).contains("its clip 1 has seed 5, this one's has 1"));
        assert_eq!(Job::open(&folder, state(&["a b", "c", "e"]), true).unwrap().state().clips.len(), 3);
    }

    #[test]
    fn a_damaged_clip_stays_damaged_until_it_is_made_again() {
        let space = tempfile::tempdir().unwrap();
        let mut pictures = state(&["a"]);
        pictures.clips[0].file = "0001-a".to_string();
        for (name, wanted) in [("file", state(&["a"])), ("pictures", pictures)] {
            let folder = space.path().join(name);
            let open = || Job::open(&folder, wanted.clone(), false);
            let mut job = open().unwrap();
            let clip = job.path(0);
            if name == "file" {
                std::fs::write(&clip, b"clip").unwrap();
            } else {
                std::fs::create_dir(&clip).unwrap();
                std::fs::write(clip.join("frame_00001.png"), b"1").unwrap();
                std::fs::write(clip.join("frame_00002.png"), b"2").unwrap();
            }
            job.finish(0, finished()).unwrap();
            drop(job);
            let damaged = if name == "file" { clip.clone() } else { clip.join("frame_00002.png") };
            std::fs::write(damaged, b"").unwrap();
            // The first run sees the damage and makes nothing; neither does the next take it for finished.
            for _ in 0..3 {
                assert!(!open().unwrap().is_done(0) && !clip.exists(), "{name}");
            }
        }
    }

    #[test]
    fn what_is_in_the_place_of_a_clip_and_is_none_is_told() {
        let space = tempfile::tempdir().unwrap();
        let folder = space.path().join("job");
        let open = |prompts: &[&str]| Job::open(&folder, state(prompts), true);
        let mut job = open(&["a"]).unwrap();
        let clip = job.path(0);
        std::fs::write(&clip, b"clip").unwrap();
        job.finish(0, finished()).unwrap();
        drop(job);
        // An empty folder is nothing; one with something in it is somebody's.
        std::fs::remove_file(&clip).unwrap();
        std::fs::create_dir(&clip).unwrap();
        assert!(!open(&["a"]).unwrap().is_done(0) && !clip.exists());
        std::fs::create_dir(&clip).unwrap();
        std::fs::write(clip.join("letter.txt"), b"dear").unwrap();
        let error = open(&["a"]).unwrap_err().to_string();
        assert!(error.contains("letter.txt is none of its pictures; move the folder away"), "{error}");
        std::fs::remove_dir_all(&clip).unwrap();
        // A file in the place of a clip that the job did not have.
        let other = folder.join("0002-b.gif");
        std::fs::write(&other, b"mine").unwrap();
        for prompts in [&["a", "b"][..], &["c", "b"]] {
            let error = open(prompts).unwrap_err().to_string();
            assert!(error.contains("0002-b.gif: ") && error.contains("move it away"), "{error}");
            assert_eq!(std::fs::read(&other).unwrap(), b"mine");
        }
        let error = Job::open(&folder, state(&["c", "b"]), false).unwrap_err().to_string();
        assert!(error.contains("move it away"), "{error}");
    }

    #[test]
    fn folders_of_others_are_left_alone() {
        let space = tempfile::tempdir().unwrap();
        std::fs::write(space.path().join("letter.txt"), b"dear").unwrap();
        let error = Job::open(space.path(), state(&["a"]), false).unwrap_err().to_string();
        assert!(error.contains("not empty and holds no job.json"), "{error}");
        std::fs::write(space.path().join(JOB_FILE), b"{}").unwrap();
        let error = Job::open(space.path(), state(&["a"]), false).unwrap_err().to_string();
        assert!(error.contains("no job of this program can be read") && !error.contains('\n'), "{error}");
        let inside = space.path().join("letter.txt/job");
        let error = Job::open(&inside, state(&["a"]), false).unwrap_err().to_string();
        assert!(error.starts_with("cannot create "), "{error}");
    }
}
