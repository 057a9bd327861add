//! Errors of the OpenCL kernels.

use crate::KernelError;
use opencl3::error_codes::{CL_DEVICE_NOT_FOUND, CL_PLATFORM_NOT_FOUND_KHR, ClError, DLOPEN_RUNTIME_LOAD_FAILED};
use std::fmt::Write as _;

/// What can go wrong with an OpenCL device or a call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenClError {
    /// No OpenCL library on this machine.
    #[error(
        "cannot load the OpenCL library (libOpenCL.so.1); install the GPU vendor's driver, or `pocl-opencl-icd` to run on the CPU"
    )]
    Library,
    /// The library has no devices.
    #[error("OpenCL has no device; install the GPU vendor's driver, or `pocl-opencl-icd` to run on the CPU")]
    NoDevice,
    /// An index past the last device.
    #[error("there is no OpenCL device {index}; the devices are {known}")]
    DeviceIndex {
        /// Index asked for.
        index: usize,
        /// What there is.
        known: String,
    },
    /// A device that cannot give the results that every engine gives.
    #[error("OpenCL device {device} cannot run these kernels: {reason}")]
    Device {
        /// Name of the device.
        device: String,
        /// What it lacks.
        reason: String,
    },
    /// Cores were asked for too late, or in a way that cannot work.
    #[error("cannot run OpenCL on cores {cores:?}: {reason}")]
    Cores {
        /// Cores asked for.
        cores: Vec<usize>,
        /// Why not.
        reason: String,
    },
    /// A variant that the device does not have.
    #[error("OpenCL device {device} does not have the variant {variant}; it has {available}")]
    VariantUnavailable {
        /// Name of the device.
        device: String,
        /// Variant asked for.
        variant: super::Variant,
        /// What can be asked for.
        available: String,
    },
    /// A name that is no variant.
    #[error("unknown OpenCL variant `{name}`; choose one of {known}")]
    VariantUnknown {
        /// Name given.
        name: String,
        /// Names known.
        known: String,
    },
    /// The kernels did not compile.
    #[error("the {variant} kernels do not compile on OpenCL device {device}: {log}")]
    Build {
        /// Name of the device.
        device: String,
        /// Variant.
        variant: super::Variant,
        /// The compiler's words, one line.
        log: String,
    },
    /// A buffer that the device cannot use as it lies.
    #[error("cannot share {bytes} bytes of host memory with OpenCL device {device}: {reason}")]
    Share {
        /// Name of the device.
        device: String,
        /// Bytes.
        bytes: usize,
        /// Why not.
        reason: String,
    },
    /// A call of the library failed.
    #[error("OpenCL cannot {action}: {}", code_name(*code))]
    Call {
        /// What was tried.
        action: &'static str,
        /// The library's error code.
        code: i32,
    },
    /// Arguments that do not fit each other, as in the CPU kernels.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// `CL_OUT_OF_RESOURCES (-5)`.
fn code_name(code: i32) -> String {
    let mut name = opencl3::error_codes::error_text(code).to_string();
    let _ = write!(name, " ({code})");
    name
}

/// Turns the library's error codes into errors that say what was tried.
pub(super) trait During<T> {
    /// `action` completes "cannot …".
    fn during(self, action: &'static str) -> Result<T, OpenClError>;
}

impl<T> During<T> for Result<T, ClError> {
    fn during(self, action: &'static str) -> Result<T, OpenClError> {
        self.map_err(|ClError(code)| match code {
            DLOPEN_RUNTIME_LOAD_FAILED => OpenClError::Library,
            CL_PLATFORM_NOT_FOUND_KHR | CL_DEVICE_NOT_FOUND => OpenClError::NoDevice,
            code => OpenClError::Call { action, code },
        })
    }
}

/// The first lines of a compiler's log, joined, so that the error stays one line.
pub(super) fn one_line(log: &str) -> String {
    const MOST: usize = 600;
    let mut line = log.split('\n').map(str::trim).filter(|part| !part.is_empty()).collect::<Vec<_>>().join("; ");
    if let Some((at, _)) = line.char_indices().nth(MOST) {
        line.truncate(at);
        line.push('…');
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_one_line_and_say_what_to_do() {
        let error = Err::<(), _>(ClError(DLOPEN_RUNTIME_LOAD_FAILED)).during("list the platforms").unwrap_err();
        assert!(error.to_string().contains("pocl-opencl-icd"), "{error}");
        let error = Err::<(), _>(ClError(-5)).during("run gemm_w8a8").unwrap_err();
        assert_eq!(error.to_string(), "OpenCL cannot run gemm_w8a8: CL_OUT_OF_RESOURCES (-5)");
        let log = one_line(&format!("a\n\n  b\n{}", "c".repeat(1000)));
        assert!(log.starts_with("a; b; ccc") && log.ends_with('…') && log.chars().count() == 601);
    }
}
