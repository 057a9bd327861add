//! Any bytes: reading, fixing shapes, tracing, preparing and grouping return errors, never panic.

#![no_main]

use libfuzzer_sys::fuzz_target;
use std::collections::BTreeMap;
use std::path::Path;
use trefoil_core::{DataType, Granularity, TensorInfo};
use trefoil_onnx::{Model, Prepared};

fuzz_target!(|bytes: &[u8]| {
    let Ok(mut model) = Model::decode(bytes.to_vec().into(), Path::new("fuzz.onnx")) else { return };
    let _ = model.fix_shapes(&BTreeMap::new());
    let _ = model.traced();
    let mut values = BTreeMap::new();
    for node in 0..model.node_count() {
        let Some((_, writes)) = model.node_values(node) else { continue };
        for name in writes {
            values.insert(name.to_owned(), TensorInfo::new(name, DataType::F32, [2u64, 4]));
        }
    }
    if let Ok(prepared) = Prepared::new(model, &values) {
        for granularity in [Granularity::Node, Granularity::Fused] {
            if let Ok(graph) = prepared.operator_graph(granularity, &[]) {
                graph.validate().expect("a valid graph");
            }
        }
    }
});
