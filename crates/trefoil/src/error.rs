//! Errors of the program: one clear line and an exit code.

use std::path::{Path, PathBuf};
use thiserror::Error;

/// What ends a command early.
#[derive(Debug, Error)]
pub enum CliError {
    /// Reading, preparing or measuring a model.
    #[error(transparent)]
    Profile(#[from] trefoil_profile::ProfileError),
    /// Reading or writing a model or tensors.
    #[error(transparent)]
    Onnx(#[from] trefoil_onnx::OnnxError),
    /// Units.
    #[error(transparent)]
    Unit(#[from] trefoil_units::UnitError),
    /// Planning.
    #[error(transparent)]
    Plan(#[from] trefoil_plan::PlanError),
    /// Executing or comparing.
    #[error(transparent)]
    Run(#[from] trefoil_run::RunError),
    /// Packed weights and regions.
    #[error(transparent)]
    Weights(#[from] trefoil_weights::WeightsError),
    /// Video models and clips.
    #[error(transparent)]
    Video(#[from] trefoil_video::VideoError),
    /// A VAE or a latent.
    #[error(transparent)]
    Vae(#[from] trefoil_video::vae::VaeError),
    /// A text encoder, a tokenizer or a prompt.
    #[error(transparent)]
    Text(#[from] trefoil_video::text::TextError),
    /// A clip's file.
    #[error(transparent)]
    Output(#[from] trefoil_video::output::OutputError),
    /// A job's folder.
    #[error(transparent)]
    Job(#[from] trefoil_video::job::JobError),
    /// A stream that stopped; what is finished stays.
    #[error("{source}; {done} of {all} clips are finished, the same command makes the rest")]
    Stream {
        /// Why.
        source: Box<trefoil_video::VideoError>,
        /// Clips in the job's folder.
        done: usize,
        /// Clips of the job.
        all: usize,
    },
    /// Vocabulary.
    #[error(transparent)]
    Core(#[from] trefoil_core::CoreError),
    /// A file.
    #[error("cannot {action} {}: {source}", path.display())]
    File {
        /// `read`, `write`.
        action: &'static str,
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Anything the user said that cannot be done, in one line.
    #[error("{0}")]
    Usage(String),
    /// Something failed while running, in one line.
    #[error("{0}")]
    Failed(String),
    /// `--verify` found a difference.
    #[error("{0}")]
    Differs(String),
}

impl CliError {
    /// A [`CliError::File`] with its place; used as `.map_err(CliError::file("read", path))`.
    pub fn file(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { action, path, source }
    }

    /// Process exit code; see `trefoil --help`.
    pub fn exit_code(&self) -> u8 {
        use trefoil_profile::ProfileError;
        use trefoil_run::RunError;
        use trefoil_video::VideoError;
        use trefoil_video::vae::VaeError;
        use trefoil_weights::WeightsError;
        match self {
            Self::Profile(ProfileError::Interrupted { .. })
            | Self::Video(VideoError::Interrupted { .. } | VideoError::Weights(WeightsError::Stopped))
            | Self::Weights(WeightsError::Stopped)
            | Self::Vae(VaeError::Stopped) => 130,
            Self::Stream { source, .. } if matches!(**source, VideoError::Interrupted { .. }) => 130,
            Self::Profile(ProfileError::Strict { .. }) | Self::Run(RunError::Strict { .. }) => 4,
            Self::Differs(_) => 3,
            Self::Run(
                RunError::Start { .. }
                | RunError::Worker { .. }
                | RunError::Panicked { .. }
                | RunError::Poisoned { .. }
                | RunError::Segment { .. }
                | RunError::Io { .. },
            )
            | Self::Profile(ProfileError::Worker { .. })
            | Self::Video(VideoError::NonFinite { .. })
            | Self::Stream { .. }
            | Self::Failed(_)
            | Self::File { action: "print", .. } => 1,
            _ => 2,
        }
    }
}
