//! What can go wrong between a plan and its results.

use std::path::PathBuf;
use thiserror::Error;
use trefoil_core::{CoreError, TensorInfo};
use trefoil_units::UnitError;

/// Which part of a plan an error is about, in words: segment index, unit, operators.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Index of the segment in the plan.
    pub segment: u32,
    /// Address of the unit.
    pub unit: String,
    /// The segment's operators: names of the first few and how many more.
    pub operators: String,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "segment {} on {} (operators {})", self.segment, self.unit, self.operators)
    }
}

/// An error of this crate. One line each; says where and what to do next.
#[derive(Debug, Clone, PartialEq, Error)]
pub enum RunError {
    /// The plan does not fit the graph, or is inconsistent by itself.
    #[error(transparent)]
    Core(#[from] CoreError),
    /// A backend or unit cannot be used.
    #[error(transparent)]
    Unit(#[from] UnitError),
    /// The plan cannot be executed as it stands.
    #[error("the plan cannot be executed: {reason}; plan again")]
    Plan {
        /// What is wrong, with task and segment numbers.
        reason: String,
    },
    /// A segment could not be cut out of the model.
    #[error("cannot extract {what}: {reason}")]
    Extract {
        /// Segment or operator.
        what: String,
        /// Why.
        reason: String,
    },
    /// A segment did not compile or bind.
    #[error("{place} is not ready to run: {source}")]
    Prepare {
        /// Which segment.
        place: Box<Place>,
        /// The backend's error.
        source: UnitError,
    },
    /// A segment failed while running. The executor stays usable.
    #[error("{place} failed: {source}")]
    Segment {
        /// Which segment.
        place: Box<Place>,
        /// The backend's error.
        source: UnitError,
    },
    /// A backend panicked. The executor is poisoned: later runs return [`RunError::Poisoned`].
    #[error("{place} panicked: {message}; this is a defect of the backend's adapter, please report it")]
    Panicked {
        /// Which segment.
        place: Box<Place>,
        /// The panic's message.
        message: String,
    },
    /// The executor had a panic before and does not run again.
    #[error("this executor does not run again after `{first}`; make a new one")]
    Poisoned {
        /// The error that poisoned it.
        first: String,
    },
    /// `strict` found something that did not happen as asked.
    #[error("strict: {reason}")]
    Strict {
        /// What.
        reason: String,
    },
    /// Model inputs were not given.
    #[error("the model needs input {missing}, which was not given; given: {given}")]
    MissingInput {
        /// The missing inputs with type and shape.
        missing: String,
        /// Names that were given.
        given: String,
    },
    /// A tensor was given that is no model input.
    #[error("`{extra}` is no input of the model; its inputs are {have}")]
    UnknownInput {
        /// The name given.
        extra: String,
        /// The model's inputs with type and shape.
        have: String,
    },
    /// The same input was given twice.
    #[error("input `{name}` is given twice")]
    DuplicateInput {
        /// Its name.
        name: String,
    },
    /// An input has another type or shape than the model's.
    #[error(
        "input `{}` must be {} {:?} but is {} {:?}{hint}", want.name, want.dtype, want.shape, have.dtype, have.shape
    )]
    InputMismatch {
        /// The model's name, type and shape.
        want: Box<TensorInfo>,
        /// The given ones.
        have: Box<TensorInfo>,
        /// What to do, starting with `; `.
        hint: &'static str,
    },
    /// A file could not be read or written.
    #[error("{path}: {reason}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The operating system's message.
        reason: String,
    },
    /// A thread or process could not be started.
    #[error("cannot start {what}: {reason}")]
    Start {
        /// What.
        what: String,
        /// The operating system's message.
        reason: String,
    },
    /// A process that was to time a contender did not answer.
    #[error("timing {contender} in its own process: {reason}")]
    Worker {
        /// Name of the contender.
        contender: String,
        /// What happened: exit status, signal, timeout, and the last line the process wrote.
        reason: String,
    },
    /// Nothing to compare.
    #[error("nothing to compare: {reason}")]
    Compare {
        /// Why.
        reason: String,
    },
}

impl RunError {
    pub(crate) fn io(path: impl Into<PathBuf>, error: &std::io::Error) -> Self {
        Self::Io { path: path.into(), reason: error.to_string() }
    }

    pub(crate) fn plan(reason: impl Into<String>) -> Self {
        Self::Plan { reason: reason.into() }
    }
}
