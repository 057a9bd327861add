//! What can go wrong between a checkpoint and a finished latent.

use std::io;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Errors of this crate: lowercase, one line, naming file, tensor, engine or block and what to do next.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VideoError {
    /// Reading, packing or mapping weights.
    #[error(transparent)]
    Weights(#[from] trefoil_weights::WeightsError),
    /// A kernel call or a set of cores.
    #[error(transparent)]
    Kernel(#[from] trefoil_kernels::KernelError),
    /// A call of the OpenCL library, or a device that cannot do what was asked.
    #[error(transparent)]
    OpenCl(#[from] trefoil_kernels::opencl::OpenClError),
    /// A VAE or a latent.
    #[error(transparent)]
    Vae(#[from] crate::vae::VaeError),
    /// A clip's file.
    #[error(transparent)]
    Output(#[from] crate::output::OutputError),
    /// A job's folder.
    #[error(transparent)]
    Job(#[from] crate::job::JobError),
    /// The operating system refused a file operation.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried (`open`, `read`, `write`, …).
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A model configuration that this crate cannot run.
    #[error("model configuration{}: {reason}", at(path.as_deref()))]
    Config {
        /// The file, where there is one.
        path: Option<PathBuf>,
        /// Which key, its value and what is supported.
        reason: String,
    },
    /// Tensors that are missing, have another shape than the configuration asks for, or belong to nothing known.
    #[error("{}: {reason}", path.display())]
    Tensors {
        /// Checkpoint or artefact.
        path: PathBuf,
        /// Names and shapes, several at once.
        reason: String,
    },
    /// A sampler that contradicts itself or the model.
    #[error("sampler{}: {reason}", at(path.as_deref()))]
    Sampler {
        /// The file, where there is one.
        path: Option<PathBuf>,
        /// What is wrong.
        reason: String,
    },
    /// An artefact of other weights: packed without the video commands, or by another version of them.
    #[error("{}: {reason}", path.display())]
    Artefact {
        /// Artefact.
        path: PathBuf,
        /// What is missing and what to do.
        reason: String,
    },
    /// Weights in the wrong form for a numeric path.
    #[error("path {path} cannot run from {}: {reason}", model.display())]
    Path {
        /// `f32`, `w8a16`, `w8a8`.
        path: &'static str,
        /// Checkpoint or artefact.
        model: PathBuf,
        /// Why and what to give instead.
        reason: String,
    },
    /// An input tensor that does not fit the model.
    #[error("{what}: {reason}")]
    Input {
        /// `noise`, `text`, …, with its file and key where they are known.
        what: String,
        /// Shapes and what must hold.
        reason: String,
    },
    /// Calibration that is missing or belongs to something else.
    #[error("calibration of {}: {reason}", path.display())]
    Calibration {
        /// Artefact.
        path: PathBuf,
        /// What does not fit and what to do.
        reason: String,
    },
    /// An engine that does not exist, or cannot do what was asked.
    #[error("engine `{engine}`: {reason}")]
    Engine {
        /// As given.
        engine: String,
        /// Why not.
        reason: String,
    },
    /// A cut outside the trajectory.
    #[error("cut {cut} does not lie in 0..={blocks}: the trajectory has {blocks} block executions")]
    Cut {
        /// Index asked for.
        cut: usize,
        /// Block executions of a clip.
        blocks: usize,
    },
    /// The state became NaN or infinite.
    #[error("{value} in {what} after step {step}: {reason}")]
    NonFinite {
        /// The value.
        value: f32,
        /// `the latent`, ….
        what: &'static str,
        /// Step index, from 0.
        step: usize,
        /// What probably caused it.
        reason: &'static str,
    },
    /// Someone asked to stop.
    #[error("interrupted after {done} of {blocks} block executions")]
    Interrupted {
        /// Executions done.
        done: usize,
        /// Executions of the clip.
        blocks: usize,
    },
}

fn at(path: Option<&Path>) -> String {
    path.map_or_else(String::new, |path| format!(" {}", path.display()))
}

impl VideoError {
    /// A [`VideoError::Io`] with its place; used as `.map_err(VideoError::io("open", path))`.
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> VideoError {
        let path = path.to_path_buf();
        move |source| VideoError::Io { action, path, source }
    }

    /// A [`VideoError::Config`] without a file.
    pub(crate) fn config(reason: impl Into<String>) -> VideoError {
        VideoError::Config { path: None, reason: reason.into() }
    }

    /// A [`VideoError::Sampler`] without a file.
    pub(crate) fn sampler(reason: impl Into<String>) -> VideoError {
        VideoError::Sampler { path: None, reason: reason.into() }
    }

    /// Names the file of a configuration or sampler error that has none yet.
    pub(crate) fn in_file(self, file: &Path) -> VideoError {
        match self {
            VideoError::Config { path: None, reason } => VideoError::Config { path: Some(file.to_path_buf()), reason },
            VideoError::Sampler { path: None, reason } => {
                VideoError::Sampler { path: Some(file.to_path_buf()), reason }
            }
            other => other,
        }
    }
}
