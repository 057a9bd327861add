//! OpenVINO and ONNX Runtime as they really are: numbers of the shared models, threads on their cores, caches, profiles.
//!
//! Tests that need a library print `skipped: …` where it is absent, or fail if `TREFOIL_REQUIRE_BACKENDS=1`.

mod bound;
mod devices;
mod npz;
mod own_models;
mod shared_models;

use trefoil_core::Unit;
use trefoil_units::resolve;

/// The unit, or `None` with a message where its library is absent.
pub fn unit_or_skip(address: &str) -> Option<Unit> {
    match resolve(&address.parse().unwrap()) {
        Ok(unit) => Some(unit),
        Err(error) => {
            assert!(std::env::var_os("TREFOIL_REQUIRE_BACKENDS").is_none_or(|value| value != "1"), "{error}");
            eprintln!("skipped: {error}");
            None
        }
    }
}
