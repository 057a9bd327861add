//! Errors of kernel calls. Shapes are checked before anything is written.

use std::io;

/// What can be wrong with a kernel call or with setting one up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelError {
    /// Two arguments do not fit each other.
    #[error("{operator}: {left} is {left_shape} but {right} is {right_shape}; {rule}")]
    Shapes {
        /// Operator called.
        operator: &'static str,
        /// Name of one argument.
        left: &'static str,
        /// Its shape.
        left_shape: String,
        /// Name of the other argument.
        right: &'static str,
        /// Its shape.
        right_shape: String,
        /// What must hold.
        rule: &'static str,
    },
    /// A buffer is too short for the matrix it should hold.
    #[error("{what} of {rows}×{columns} with row stride {stride} needs {need} elements but the buffer has {have}")]
    Buffer {
        /// Name of the argument.
        what: &'static str,
        /// Rows.
        rows: usize,
        /// Columns.
        columns: usize,
        /// Elements from one row to the next.
        stride: usize,
        /// Elements needed.
        need: usize,
        /// Elements there.
        have: usize,
    },
    /// A value outside what the kernel computes rightly.
    #[error("{operator}: {what} is {value}; {rule}")]
    Value {
        /// Operator called.
        operator: &'static str,
        /// Which value.
        what: &'static str,
        /// The value.
        value: String,
        /// What must hold.
        rule: &'static str,
    },
    /// An instruction set that this processor lacks.
    #[error("this processor does not have {isa}; it has {available}")]
    IsaUnavailable {
        /// Instruction set asked for.
        isa: crate::Isa,
        /// What can be asked for.
        available: String,
    },
    /// A name that is no instruction set.
    #[error("unknown instruction set `{name}`; choose one of {known}")]
    IsaUnknown {
        /// Name given.
        name: String,
        /// Names known.
        known: String,
    },
    /// A set of cores that no pool can be made of.
    #[error("cannot use cores {cores:?}: {reason}")]
    Cores {
        /// Cores asked for.
        cores: Vec<usize>,
        /// Why not.
        reason: String,
    },
    /// The thread's floating-point environment would change results.
    #[error(
        "this thread flushes subnormal numbers or does not round to nearest, so results would differ from other machines'; set the kernels up in a thread whose floating-point environment no library changed"
    )]
    Environment,
    /// A worker thread could not be started or pinned.
    #[error("cannot {action} a worker thread on core {core}: {source}")]
    Worker {
        /// What was tried.
        action: &'static str,
        /// Core.
        core: usize,
        /// The system's answer.
        source: io::Error,
    },
}

impl KernelError {
    /// Two shapes that do not fit.
    #[allow(clippy::needless_pass_by_value, reason = "formatted once, on the error path")]
    pub(crate) fn shapes(
        operator: &'static str,
        (left, left_shape): (&'static str, impl ToString),
        (right, right_shape): (&'static str, impl ToString),
        rule: &'static str,
    ) -> KernelError {
        KernelError::Shapes {
            operator,
            left,
            left_shape: left_shape.to_string(),
            right,
            right_shape: right_shape.to_string(),
            rule,
        }
    }

    /// A bad value.
    #[allow(clippy::needless_pass_by_value, reason = "formatted once, on the error path")]
    pub(crate) fn value(
        operator: &'static str,
        what: &'static str,
        value: impl ToString,
        rule: &'static str,
    ) -> KernelError {
        KernelError::Value { operator, what, value: value.to_string(), rule }
    }
}
