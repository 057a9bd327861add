//! Errors of writing clips.

use std::io;
use std::path::{Path, PathBuf};

/// What can be wrong with writing a clip.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OutputError {
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
    /// A name that says no format, or a format that cannot hold the clip.
    #[error("{}: {reason}", path.display())]
    Format {
        /// File asked for.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// An encoder's refusal.
    #[error("cannot encode {}: {reason}", path.display())]
    Encode {
        /// File.
        path: PathBuf,
        /// What the encoder said.
        reason: String,
    },
    /// Frames other than announced.
    #[error("{}: {reason}", path.display())]
    Frames {
        /// File.
        path: PathBuf,
        /// What was announced and what came.
        reason: String,
    },
}

impl OutputError {
    /// For `map_err`.
    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> OutputError {
        let path = path.to_path_buf();
        move |source| OutputError::Io { action, path, source }
    }

    pub(super) fn encode(path: &Path, error: impl std::fmt::Display) -> OutputError {
        OutputError::Encode { path: path.to_path_buf(), reason: error.to_string() }
    }

    pub(super) fn format(path: &Path, reason: impl Into<String>) -> OutputError {
        OutputError::Format { path: path.to_path_buf(), reason: reason.into() }
    }
}
