//! A job: many clips in a folder, and a file there that says what they are and which are finished.
//!
//! Clips appear whole or not at all, and the file is written anew after each of them, so a job that was stopped in any way goes on
//! where it was. The folder belongs to the job: another process is kept out while one works, and what a killed one left unfinished
//! is removed.

use crate::output::TEMPORARY;
use crate::tensors::write_atomically;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// Name of the file.
pub const JOB_FILE: &str = "job.json";
/// Version of its contents.
const VERSION: u32 = 1;
/// Longest part of a prompt in a file name, in characters.
const SLUG_CHARACTERS: usize = 40;

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

/// How a clip was made.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Finished {
    /// Size of its file or folder.
    pub bytes: u64,
    /// Frames; absent for latents.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frames: Option<usize>,
    /// Plan that ran, in one line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plan: Option<String>,
    /// Numeric path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub numeric_path: Option<String>,
    /// What is wrong with its frames.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
    /// Version of the program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trefoil: Option<String>,
}

/// A clip of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobClip {
    /// Name of its file or folder.
    pub file: String,
    /// Prompt, or the name of its text states.
    pub prompt: String,
    /// Seed of its noise.
    pub seed: u32,
    /// Present once it is finished.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub done: Option<Finished>,
}

/// What the file says.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct JobState {
    version: u32,
    /// Version of the program that began the job.
    trefoil: String,
    /// Everything besides prompts and seeds that the clips depend on.
    pub settings: BTreeMap<String, Value>,
    /// Clips in order.
    pub clips: Vec<JobClip>,
}

impl JobState {
    /// A job with nothing done.
    pub fn new(settings: BTreeMap<String, Value>, clips: Vec<JobClip>) -> JobState {
        JobState { version: VERSION, trefoil: env!("CARGO_PKG_VERSION").to_string(), settings, clips }
    }

    /// The first thing in which `wanted` differs from this job; clips may be fewer or more with `may_grow`.
    fn difference(&self, wanted: &JobState, may_grow: bool) -> Option<String> {
        let nothing = Value::Null;
        let keys: std::collections::BTreeSet<&String> = self.settings.keys().chain(wanted.settings.keys()).collect();
        for key in keys {
            let (was, is) = (self.settings.get(key).unwrap_or(&nothing), wanted.settings.get(key).unwrap_or(&nothing));
            if was != is {
                return Some(format!("its {} is {was}, this one's is {is}", key.replace('_', " ")));
            }
        }
        for (number, (was, is)) in self.clips.iter().zip(&wanted.clips).enumerate() {
            let number = number + 1;
            if was.prompt != is.prompt {
                return Some(format!("its prompt {number} is {:?}, this one's is {:?}", was.prompt, is.prompt));
            }
            if was.seed != is.seed {
                return Some(format!("its clip {number} has seed {}, this one's has {}", was.seed, is.seed));
            }
        }
        let (was, is) = (self.clips.len(), wanted.clips.len());
        (was != is && !may_grow).then(|| format!("it has {was} prompts, this one has {is}"))
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
        let state = match std::fs::read(&file) {
            Ok(text) => {
                let unreadable = |reason: String| JobError::Foreign {
                    path: file.clone(),
                    reason: format!("{reason}; name another folder, or remove {} to start anew", folder.display()),
                };
                let mut found: JobState = serde_json::from_slice(&text)
                    .map_err(|error| unreadable(format!("no job of this program can be read from it ({error})")))?;
                if found.version != VERSION {
                    return Err(unreadable(format!("it has version {}, this program writes {VERSION}", found.version)));
                }
                match found.difference(&wanted, may_grow) {
                    None => {
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
        job.tidy()?;
        job.look();
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
        self.state.clips[index].done =
            Some(Finished { bytes, trefoil: Some(env!("CARGO_PKG_VERSION").to_string()), ..finished });
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

    /// Compares what is written down with what is there: files appear whole, so one that is there is finished, and one that is gone
    /// or has another size is to be made again.
    fn look(&mut self) {
        for index in 0..self.state.clips.len() {
            let there = size_of_path(&self.path(index));
            let clip = &mut self.state.clips[index];
            clip.done = match (clip.done.take(), there) {
                (Some(done), Some(bytes)) if done.bytes == bytes => Some(done),
                (None, Some(bytes)) => Some(Finished { bytes, ..Finished::default() }),
                _ => None,
            };
        }
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

/// `0007-a-red-circle-moves-left`: a clip's number, from 1, and the beginning of its prompt, in letters and digits of any script.
pub fn clip_stem(number: usize, prompt: &str) -> String {
    let mut slug = String::new();
    for character in prompt.chars().flat_map(char::to_lowercase) {
        if character.is_alphanumeric() {
            slug.push(character);
        } else if !slug.is_empty() && !slug.ends_with('-') {
            slug.push('-');
        }
    }
    let mut short: String = slug.chars().take(SLUG_CHARACTERS).collect();
    // A word that was cut goes, where others are left.
    if slug.len() > short.len()
        && !slug[short.len()..].starts_with('-')
        && let Some(end) = short.rfind('-')
    {
        short.truncate(end);
    }
    format!("{number:04}-{}", short.trim_end_matches('-')).trim_end_matches('-').to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn state(prompts: &[&str]) -> JobState {
        let clips = prompts.iter().enumerate().map(|(index, prompt)| JobClip {
            file: format!("{}.gif", clip_stem(index + 1, prompt)),
            prompt: (*prompt).to_string(),
            seed: 5 + index as u32,
            done: None,
        });
        JobState::new(BTreeMap::from([("frames".to_string(), json!(17))]), clips.collect())
    }

    fn finished() -> Finished {
        Finished { frames: Some(17), ..Finished::default() }
    }

    #[test]
    fn stems_are_short_and_safe() {
        assert_eq!(clip_stem(7, "A red circle, moves LEFT!"), "0007-a-red-circle-moves-left");
        assert_eq!(clip_stem(12, "../../etc/passwd"), "0012-etc-passwd");
        assert_eq!(clip_stem(1, "Ein Hund läuft; 犬"), "0001-ein-hund-läuft-犬");
        assert_eq!(clip_stem(1, "!?"), "0001");
        assert_eq!(clip_stem(1, &"word ".repeat(30)), "0001-word-word-word-word-word-word-word-word");
        assert_eq!(clip_stem(1, &"x".repeat(90)), format!("0001-{}", "x".repeat(40)));
        assert_eq!(clip_stem(1, "two wwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwwww"), "0001-two");
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
        assert!(!job.is_done(0) && !job.is_done(1));
        std::fs::remove_file(job.path(0)).unwrap();
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
