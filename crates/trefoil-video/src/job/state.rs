//! What a job's file says.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Version of the file's contents.
pub(super) const VERSION: u32 = 1;
/// Longest part of a prompt in a file name, in characters.
const SLUG_CHARACTERS: usize = 40;

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
    /// What its text states are, where they were given instead of a prompt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// Present once it is finished.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub done: Option<Finished>,
    /// Why it could not be made, where the last try failed; the next run of the job tries again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failed: Option<String>,
}

impl JobClip {
    /// A clip that is still to be made.
    pub fn new(file: String, prompt: String, seed: u32) -> JobClip {
        JobClip { file, prompt, seed, text: None, done: None, failed: None }
    }

    /// The same with text states, by their [`identity_of_tensor`](super::identity_of_tensor).
    #[must_use]
    pub fn with_text(self, text: String) -> JobClip {
        JobClip { text: Some(text), ..self }
    }

    /// Whether it is a folder of pictures: those have no extension.
    pub(super) fn is_folder(&self) -> bool {
        Path::new(&self.file).extension().is_none()
    }
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

    /// Version of its contents.
    pub(super) fn version(&self) -> u32 {
        self.version
    }

    /// The first thing in which `wanted` differs from this job; clips may be fewer or more with `may_grow`.
    pub(super) fn difference(&self, wanted: &JobState, may_grow: bool) -> Option<String> {
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
            if was.text != is.text {
                return Some(format!("its clip {number} has other text states ({:?})", was.prompt));
            }
            if was.seed != is.seed {
                return Some(format!("its clip {number} has seed {}, this one's has {}", was.seed, is.seed));
            }
        }
        let (was, is) = (self.clips.len(), wanted.clips.len());
        (was != is && !may_grow).then(|| format!("it has {was} prompts, this one has {is}"))
    }
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
}
