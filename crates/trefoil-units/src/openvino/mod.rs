//! The OpenVINO backend: `openvino:CPU`, `openvino:GPU`, `openvino:NPU`.
//!
//! `library` loads OpenVINO's C interface (`ffi`), `backend` tells its devices, `compiled` runs sub-models on them (with `properties`, through `handles`),
//! `workers` keeps its threads on the unit's cores.

mod backend;
mod compiled;
mod ffi;
mod handles;
mod library;
mod properties;
mod workers;

pub use backend::OpenVino;

use crate::discovery::LibrarySpec;
use std::path::PathBuf;

pub(crate) const LIBRARY: LibrarySpec =
    LibrarySpec { variable: "TREFOIL_OPENVINO_LIB", stem: "openvino_c", package_folder: "openvino/libs", system: true };

/// What to do about a missing library.
const FIX: &str = "pip install openvino==2026.4.1";

/// Where the library was found, if it has been loaded.
pub(crate) fn library_path() -> Option<PathBuf> {
    library::path_if_loaded()
}
