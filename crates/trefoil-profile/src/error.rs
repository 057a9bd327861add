//! Errors of preparing, profiling and refining. One line each; they name what was tried and what to do next.

use std::path::PathBuf;
use thiserror::Error;
use trefoil_core::CoreError;
use trefoil_onnx::OnnxError;
use trefoil_units::UnitError;

/// What can go wrong between a model file and its profile. A unit that cannot run an operator is not an error but a
/// finding ([`trefoil_core::Outcome::Failed`]).
#[derive(Debug, Error)]
pub enum ProfileError {
    /// A file could not be read or written.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was tried: `read`, `write`, `create`, …
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's words.
        source: std::io::Error,
    },
    /// A file of ours does not say what it should.
    #[error("{path} is no {what}: {reason}")]
    Format {
        /// The file.
        path: PathBuf,
        /// What it should be: `trefoil profile`, `tensor store`, …
        what: &'static str,
        /// What is wrong, one line.
        reason: String,
    },
    /// Inconsistent vocabulary values.
    #[error(transparent)]
    Core(#[from] CoreError),
    /// A unit or backend problem outside any single measurement.
    #[error(transparent)]
    Unit(#[from] UnitError),
    /// The model cannot be read, prepared or cut.
    #[error(transparent)]
    Onnx(#[from] OnnxError),
    /// Worker processes cannot be started or do not speak the protocol.
    #[error("worker process `{command}`: {reason}")]
    Worker {
        /// The command.
        command: String,
        /// What happened, one line.
        reason: String,
    },
    /// Given inputs do not fit the model.
    #[error("model input `{name}`: {reason}")]
    Input {
        /// Input name.
        name: String,
        /// What is wrong, with shapes.
        reason: String,
    },
    /// No backend is there to trace the model on.
    #[error("no backend can trace the model: {reasons}")]
    NoReference {
        /// Per backend, why not.
        reasons: String,
    },
    /// A node runs on no backend at all.
    #[error("node `{node}` ({kind}) runs on no backend here: {reasons}")]
    Untraceable {
        /// Node name or its first output.
        node: String,
        /// Node type.
        kind: String,
        /// Per backend, why not.
        reasons: String,
    },
    /// Stopped by the caller; what was measured is kept and a re-run resumes.
    #[error("interrupted after {done} of {total} measurements; they are kept, run the same command again to resume")]
    Interrupted {
        /// Measurements done.
        done: usize,
        /// Measurements planned.
        total: usize,
    },
    /// `strict` was asked for and something did not run where it was asked.
    #[error("strict: {what}")]
    Strict {
        /// The first such thing.
        what: String,
    },
    /// A profile of another machine.
    #[error("the profile was taken on another machine ({difference}); profile again here")]
    OtherMachine {
        /// What differs.
        difference: String,
    },
    /// Refinement's planner failed.
    #[error("planning during refinement failed: {reason}")]
    Planner {
        /// Its message.
        reason: String,
    },
    /// Plans could not be timed in fresh processes.
    #[error("timing a plan in fresh processes failed: {reason}")]
    Settling {
        /// What happened, one line.
        reason: String,
    },
    /// A unit or option that profiling cannot use.
    #[error("{what}")]
    Options {
        /// One line, with what to do.
        what: String,
    },
}

impl ProfileError {
    /// An [`ProfileError::Io`] builder for `map_err`.
    pub fn io(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }
}
