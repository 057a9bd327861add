//! Errors of reading a VAE and of decoding with it.

use std::path::{Path, PathBuf};
use trefoil_kernels::KernelError;
use trefoil_kernels::opencl::OpenClError;
use trefoil_weights::WeightsError;

/// What can be wrong with a VAE checkpoint, a latent or a decoder call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VaeError {
    /// The checkpoint's files.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// A kernel call.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    /// A call of a device.
    #[error(transparent)]
    OpenCl(#[from] OpenClError),
    /// A file that could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// A `config.json` that describes no decoder of this kind.
    #[error("{}: {reason}", path.display())]
    Config {
        /// File.
        path: PathBuf,
        /// What is wrong and what to do.
        reason: String,
    },
    /// Files that are no VAE of this kind.
    #[error("{} holds no Wan VAE decoder: {reason}", path.display())]
    Foreign {
        /// Checkpoint.
        path: PathBuf,
        /// What is missing.
        reason: String,
    },
    /// A tensor that is missing or has another shape or type.
    #[error("VAE tensor `{name}` {reason}, but the config asks for {expected:?}; is it the VAE of this config?")]
    Tensor {
        /// Name as in the checkpoint.
        name: String,
        /// What is there instead.
        reason: String,
        /// Shape needed.
        expected: Vec<usize>,
    },
    /// A latent that this VAE cannot decode.
    #[error("latent {what}: {reason}")]
    Latent {
        /// Which.
        what: String,
        /// What is wrong and what to do.
        reason: String,
    },
    /// The caller asked to stop.
    #[error("decoding was stopped; nothing was written")]
    Stopped,
    /// Bands that a decoder or a latent cannot be cut into.
    #[error("{bands} bands: {reason}")]
    Bands {
        /// How many were asked for.
        bands: usize,
        /// Why not, and what to do.
        reason: String,
    },
    /// Tiles that do not cover a frame.
    #[error("tiles of {size} latent pixels every {stride}: {reason}")]
    Tiles {
        /// Side of a tile.
        size: usize,
        /// Distance from one tile to the next.
        stride: usize,
        /// What is wrong.
        reason: &'static str,
    },
}

impl VaeError {
    /// A config problem.
    pub(super) fn config(path: &Path, reason: impl Into<String>) -> VaeError {
        VaeError::Config { path: path.to_path_buf(), reason: reason.into() }
    }
}
