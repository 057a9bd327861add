//! The ONNX Runtime backend: `ort:CPU` and one unit per execution provider plugin (`ort:WebGPU`, …).
//!
//! `library` loads ONNX Runtime's C interface, `backend` tells its units, `providers` finds plugins, `session` runs
//! sub-models, `trace` reads its profiling files. The raw interface is used throughout: caller memory on both sides of `Run`,
//! and no allocation of ours per call.

mod backend;
mod library;
mod providers;
mod session;
mod trace;

pub use backend::OnnxRuntime;

use crate::discovery::LibrarySpec;
use std::path::PathBuf;

pub(crate) const LIBRARY: LibrarySpec =
    LibrarySpec { variable: "TREFOIL_ORT_LIB", stem: "onnxruntime", package_folder: "onnxruntime/capi", system: true };

/// What to do about a missing library.
const FIX: &str = "pip install onnxruntime==1.32.0";

/// Where the library was found, if it has been loaded.
pub(crate) fn library_path() -> Option<PathBuf> {
    library::path_if_loaded()
}
