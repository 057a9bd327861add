//! Errors of backends and discovery.

use thiserror::Error;

/// What can go wrong between a unit address and an executed sub-model. One line each; the backend's own words are kept.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum UnitError {
    /// No backend of that name.
    #[error("no backend `{backend}` (of unit {unit}); there are {have}")]
    UnknownBackend {
        /// The unit asked for.
        unit: String,
        /// Its backend part.
        backend: String,
        /// Names of all backends.
        have: String,
    },
    /// The backend has no such device.
    #[error("backend {backend} has no device `{device}`; it has {have}")]
    UnknownDevice {
        /// Backend name.
        backend: String,
        /// Device asked for.
        device: String,
        /// Devices it has.
        have: String,
    },
    /// Backend or device cannot be used here.
    #[error("{unit} is not available here: {reason}; {fix}")]
    Unavailable {
        /// Unit or backend.
        unit: String,
        /// Why.
        reason: String,
        /// What would fix it.
        fix: String,
    },
    /// A core set that this process cannot use.
    #[error("{unit} asks for cores this process may not use; it may use {allowed}")]
    Cores {
        /// Unit.
        unit: String,
        /// Allowed cores.
        allowed: String,
    },
    /// The backend refused to compile a sub-model.
    #[error("{unit} does not compile {model}: {reason}")]
    Compile {
        /// Unit.
        unit: String,
        /// File.
        model: String,
        /// The backend's message, one line.
        reason: String,
    },
    /// A port does not match.
    #[error("{unit}, port `{port}` of {model}: {reason}")]
    Port {
        /// Unit.
        unit: String,
        /// File.
        model: String,
        /// Port name or position.
        port: String,
        /// What is wrong, with shapes.
        reason: String,
    },
    /// An execution failed.
    #[error("{unit} failed to run {model}: {reason}")]
    Run {
        /// Unit.
        unit: String,
        /// File.
        model: String,
        /// The backend's message, one line.
        reason: String,
    },
    /// A machine description of a simulated unit cannot be read.
    #[error("{what}: {reason}")]
    Description {
        /// File or name.
        what: String,
        /// What is wrong.
        reason: String,
    },
}

/// Folds a backend's message into one line of at most 400 characters.
pub fn one_line(message: &str) -> String {
    let mut line = message.split_whitespace().collect::<Vec<_>>().join(" ");
    if line.chars().count() > 400 {
        line = line.chars().take(399).collect::<String>() + "…";
    }
    line
}
