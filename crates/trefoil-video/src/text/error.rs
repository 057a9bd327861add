//! Errors of reading a text encoder and of encoding with it.

use std::path::{Path, PathBuf};
use trefoil_kernels::KernelError;
use trefoil_weights::WeightsError;

/// What can be wrong with a text encoder, a tokenizer or a prompt.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The checkpoint's files.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A kernel call.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A tokenizer that is missing or unreadable.
    #[error("tokenizer {}: {reason}", path.display())]
    Tokenizer {
        /// File looked for.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A `config.json` that describes no umT5 encoder.
    #[error("{}: {reason}", path.display())]
    Config {
        /// File.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// A tensor that is missing or has another shape or type.
    #[error("text encoder tensor `{name}` {reason}")]
    Tensor {
        /// Name as in the checkpoint.
        name: String,
        /// What is there, and what should be.
        reason: String,
    },
    /// A prompt or a list of token ids that cannot be encoded.
    #[error("prompt {number}: {reason}")]
    Prompt {
        /// Position in the list, from 1.
        number: usize,
        /// What is wrong.
        reason: String,
    },
}

impl TextError {
    /// A config problem.
    pub(super) fn config(path: &Path, reason: impl Into<String>) -> TextError {
        TextError::Config { path: path.to_path_buf(), reason: reason.into() }
    }
}
