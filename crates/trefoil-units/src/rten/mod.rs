//! The embedded backend: [`rten`](https://docs.rs/rten), a pure-Rust ONNX runtime. Nothing to install.
//!
//! What it does and does not:
//! - It computes every float in `f32`. `f16` and `f64` models run, widened or narrowed at load and at the ports, so
//!   an `f64` model is computed to `f32` accuracy.
//! - `i64` and `bool` tensors are `i32` inside. An `i64` input outside the `i32` range is an error of the run; an
//!   intermediate value outside it wraps or saturates silently, which profiling catches as a wrong result.
//! - Other element types at a port (`bf16`, `i16`, `u16`, `u32`, `u64`) are refused at compile time.
//! - Inputs of `f32`, `i32`, `i8` and `u8` are read in place. rten allocates its own outputs (it has no variant that
//!   writes into given memory), so outputs are copied; and its `run` takes its inputs as a `Vec` by value, which is
//!   the one allocation per call that is ours.
//! - It reports times per node only as text on standard output, so [`crate::Compiled::node_times`] is `None`.
//! - A unit has its own pool of threads, one per core, pinned to the unit's cores, with denormals flushed. A call
//!   from another thread is handed to that pool and back (two thread switches); a caller inside
//!   [`crate::Backend::run_inside`] is on a pool thread already and pays nothing.

mod compiled;
mod onnx_file;
mod pool;
mod ports;
mod wire;

use crate::{Availability, Backend, CompileOptions, Compiled, SubModel, UnitError, core_resources};
use compiled::RtenCompiled;
use std::collections::BTreeMap;
use trefoil_core::{Precision, Unit, UnitAddress, UnitKind, UnitLimits};

/// Version of the embedded crate; a test compares it with `Cargo.lock`.
const RTEN_VERSION: &str = "0.27.0";

/// rten, compiled into this library. One device, `CPU`.
#[derive(Debug, Clone, Copy, Default)]
pub struct RtenBackend;

impl Backend for RtenBackend {
    fn name(&self) -> &'static str {
        "rten"
    }

    fn check(&self) -> Availability {
        Availability::Available { version: RTEN_VERSION.to_owned(), library: None }
    }

    fn units(&self) -> Vec<(Unit, Availability)> {
        match self.unit(&UnitAddress::new("rten", "CPU")) {
            Ok(unit) => vec![(unit, self.check())],
            Err(_) => Vec::new(),
        }
    }

    fn unit(&self, address: &UnitAddress) -> Result<Unit, UnitError> {
        if address.device != "CPU" {
            return Err(UnitError::UnknownDevice {
                backend: "rten".to_owned(),
                device: address.device.clone(),
                have: "CPU".to_owned(),
            });
        }
        if let Some(precision) = address.precision
            && precision != Precision::F32
        {
            return Err(UnitError::Unavailable {
                unit: address.to_string(),
                reason: format!("rten computes floats in f32, not {precision}"),
                fix: format!("leave out `+{precision}`"),
            });
        }
        Ok(Unit {
            address: address.clone(),
            kind: UnitKind::Cpu,
            resources: core_resources(address)?,
            limits: UnitLimits { precisions: vec![Precision::F32], ..UnitLimits::default() },
            simulated: false,
            description: Some("rten, embedded".to_owned()),
        })
    }

    fn compile(&self, model: &SubModel, unit: &Unit, options: &CompileOptions) -> Result<Box<dyn Compiled>, UnitError> {
        Ok(Box::new(RtenCompiled::load(model, unit, options)?))
    }

    fn versions(&self) -> BTreeMap<String, String> {
        BTreeMap::from([("rten".to_owned(), RTEN_VERSION.to_owned())])
    }

    fn run_inside(&self, unit: &Unit, body: &mut (dyn FnMut() + Send)) -> Result<(), UnitError> {
        pool::pool_of(unit)?.run(body);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_is_the_locked_one() {
        let lock = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.lock")).unwrap();
        let entry = format!("name = \"rten\"\nversion = \"{RTEN_VERSION}\"");
        assert!(lock.contains(&entry), "RTEN_VERSION is {RTEN_VERSION}, Cargo.lock has another");
    }

    #[test]
    fn refuses_what_it_has_not() {
        let unit = |text: &str| RtenBackend.unit(&text.parse().unwrap()).map_err(|error| error.to_string());
        assert_eq!(unit("rten:GPU").unwrap_err(), "backend rten has no device `GPU`; it has CPU");
        assert!(unit("rten:CPU+f16").unwrap_err().contains("computes floats in f32"));
        assert!(unit("rten:CPU@4095").unwrap_err().contains("may not use"));
        assert!(!unit("rten:CPU").unwrap().resources.is_empty());
    }
}
