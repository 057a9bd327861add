//! Properties of a compile call: latency, cores, precision, profiling, cache.

use super::ffi::MAX_PROPERTIES;
use crate::affinity::unit_cores;
use crate::{CompileOptions, SubModel, cache};
use std::ffi::{CString, c_char};
use std::ptr;
use trefoil_core::{Precision, Unit, UnitKind};

/// Properties of a compile call, in the order given.
pub(super) struct Properties(Vec<(CString, CString)>);

impl Properties {
    fn new() -> Self {
        Self(Vec::new())
    }

    fn set(&mut self, key: &str, value: &str) {
        debug_assert!(self.0.len() < MAX_PROPERTIES);
        if let (Ok(key), Ok(value)) = (CString::new(key), CString::new(value)) {
            self.0.push((key, value));
        }
    }

    /// Number of keys and values.
    pub(super) fn count(&self) -> usize {
        2 * self.0.len()
    }

    /// Key and value pointers, padded with nulls: a variadic call has a fixed number of arguments, and OpenVINO reads as
    /// many as it is told.
    pub(super) fn pointers(&self) -> [*const c_char; 2 * MAX_PROPERTIES] {
        let mut pointers = [ptr::null(); 2 * MAX_PROPERTIES];
        for (slot, (key, value)) in pointers.chunks_exact_mut(2).zip(&self.0) {
            slot.copy_from_slice(&[key.as_ptr(), value.as_ptr()]);
        }
        pointers
    }
}

/// What OpenVINO is told when it compiles `model` for `unit`.
pub(super) fn properties(model: &SubModel, unit: &Unit, options: &CompileOptions) -> Properties {
    let mut properties = Properties::new();
    properties.set("PERFORMANCE_HINT", "LATENCY");
    properties.set("NUM_STREAMS", "1");
    if unit.kind == UnitKind::Cpu {
        properties.set("INFERENCE_NUM_THREADS", &unit_cores(unit).len().max(1).to_string());
        // We pin; OpenVINO would choose cores of its own.
        properties.set("ENABLE_CPU_PINNING", "NO");
        properties.set("CPU_DENORMALS_OPTIMIZATION", "YES");
    }
    let precision = match (unit.address.precision, unit.kind) {
        (Some(Precision::F32), _) => Some("f32"),
        (Some(Precision::F16), _) => Some("f16"),
        (Some(Precision::BF16), _) => Some("bf16"),
        // Results of units are compared, so nobody computes in less than the model says unless asked to. NPUs have no f32.
        (None, UnitKind::Npu) => None,
        (None, _) => {
            properties.set("EXECUTION_MODE_HINT", "ACCURACY");
            Some("f32")
        }
    };
    if let Some(precision) = precision {
        properties.set("INFERENCE_PRECISION_HINT", precision);
    }
    if options.profiling {
        properties.set("PERF_COUNT", "YES");
    }
    if let Some(folder) = &options.cache
        // A reference is compiled afresh, and an unreadable file is reported better by OpenVINO itself.
        && !options.reference
        && let Ok(key) = cache::model_key(&model.path, &[])
        && let Some(folder) = folder.join("openvino").join(key).to_str()
    {
        properties.set("CACHE_DIR", folder);
    }
    properties
}
