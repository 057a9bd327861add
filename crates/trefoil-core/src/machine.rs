//! What machine numbers were taken on.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A machine as far as costs depend on it. Profiles are refused on another machine unless asked otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// CPU model name as the operating system tells it.
    pub cpu: String,
    /// Cores this process may use.
    pub cores: Vec<u32>,
    /// Physical memory in bytes.
    pub memory_bytes: u64,
    /// Operating system and kernel.
    pub os: String,
    /// Instruction-set features that change kernels (`avx2`, `avx512f`, `avx512_vnni`, `neon`).
    pub features: Vec<String>,
    /// Versions of Trefoil and every backend library, by name.
    pub versions: BTreeMap<String, String>,
}
