//! Layout of the cache folder. Everything in it can be deleted at any time; it is made again.
//!
//! ```text
//! CACHE/
//!   journal.jsonl                      finished measurements, see `journal`
//!   models/<fingerprint>/<inputs>/     one prepared model: file contents and shapes, then input data (or its seed)
//!     prepared/                        trefoil-onnx's prepared model
//!     trace/                           tensor store: every boundary value of the traced run
//!     reference.json                   which backend traced what
//!     segments/<granularity>/          extracted sub-models, as profiled
//!   transfer/                          the trivial operators that transfers are measured with
//!   compiled/                          backends' compiled blobs
//!   lock                               held by every process that uses the folder, see [`CacheUse`]
//! ```
//!
//! A folder `<inputs>` is built under a temporary name and renamed when it is complete, so two processes that prepare
//! the same model at once both end with the one that was faster. `segments` grows later; its files are renamed into
//! place one by one and hold the same bytes whoever wrote them.

mod limit;

pub use limit::{CacheUse, DEFAULT_LIMIT, LIMIT_VARIABLE, Trimmed, parse_limit};

use std::path::{Path, PathBuf};

/// The cache folder that programs use when not told otherwise: `$TREFOIL_CACHE`, `$XDG_CACHE_HOME/trefoil`,
/// `~/.cache/trefoil`, or a folder in the system's temporary one.
pub fn default_cache_dir() -> PathBuf {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("TREFOIL_CACHE")
        .or_else(|| variable("XDG_CACHE_HOME").map(|path| path.join("trefoil")))
        .or_else(|| variable("HOME").map(|path| path.join(".cache/trefoil")))
        .unwrap_or_else(|| std::env::temp_dir().join("trefoil"))
}

/// The journal's file.
pub fn journal_path(cache: &Path) -> PathBuf {
    cache.join("journal.jsonl")
}

/// Folder of a prepared model.
pub fn model_path(cache: &Path, fingerprint: &str, inputs: &str) -> PathBuf {
    models_path(cache).join(fingerprint).join(inputs)
}

/// Folder of all prepared models.
pub fn models_path(cache: &Path) -> PathBuf {
    cache.join("models")
}

/// Folder of compiled blobs.
pub fn compiled_path(cache: &Path) -> PathBuf {
    cache.join("compiled")
}

/// Folder of the operators that transfers are measured with.
pub fn transfer_path(cache: &Path) -> PathBuf {
    cache.join("transfer")
}
