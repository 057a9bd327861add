//! Execution provider plugins, profiles and caches.

use crate::bound::Bound;
use crate::own_models::OwnModel;
use crate::unit_or_skip;
use std::fs;
use trefoil_core::{NodeTime, Resource, Unit, UnitKind};
use trefoil_units::{CompileOptions, PortMemory, UnitError, enter_unit, resolve};

fn bind(model: OwnModel, unit: &Unit, options: &CompileOptions) -> Result<(Bound, OwnModel), UnitError> {
    let infos = model.output_infos();
    let OwnModel { path, inputs, expected } = model;
    let bound = Bound::new(&path, inputs, &infos, unit, options)?;
    Ok((bound, OwnModel { path, inputs: Vec::new(), expected }))
}

fn assert_right(bound: &Bound, model: &OwnModel) {
    for (output, expected) in bound.outputs.iter().zip(&model.expected) {
        let error = output.error_to_peak(expected);
        assert!(error < 1e-3, "{}: off by {error}", model.path.display());
    }
}

/// Runs where a GPU driver or a software adapter is set up; required where the tests were asked to set one up.
#[test]
fn webgpu_computes_rightly_and_never_falls_back() {
    let unit = match resolve(&"ort:WebGPU".parse().unwrap()) {
        Ok(unit) => unit,
        Err(error) => {
            let is_required = std::env::var_os("TREFOIL_TEST_WEBGPU").is_some_and(|value| value == "1");
            assert!(!is_required, "TREFOIL_TEST_WEBGPU=1 asks for a software adapter: {error}");
            eprintln!("skipped: {error}");
            return;
        }
    };
    assert_eq!(unit.kind, UnitKind::Gpu);
    let software = unit.resources.iter().any(|resource| matches!(resource, Resource::Core(_)));
    eprintln!("WebGPU on {:?}, resources {:?}, software {software}", unit.description, unit.resources);
    let _thread = enter_unit(&unit).unwrap();
    for name in ["add_broadcast", "conv_3x3", "matmul", "softmax_last", "layer_normalization"] {
        let (mut bound, model) = bind(OwnModel::load(name), &unit, &CompileOptions::default()).unwrap();
        assert!(bound.compiled.ports().inputs.iter().all(|port| port.memory == PortMemory::Copied));
        for _ in 0..3 {
            bound.run().unwrap();
        }
        assert_right(&bound, &model);
    }
    // Double precision is nothing that WebGPU has; the CPU must not step in silently.
    let error = bind(OwnModel::load("add_f64"), &unit, &CompileOptions::default()).map(drop).unwrap_err();
    assert!(matches!(error, UnitError::Compile { .. }), "{error}");
    eprintln!("{error}");
}

fn profile(address: &str) -> Option<(Bound, Vec<NodeTime>)> {
    let unit = unit_or_skip(address)?;
    let _thread = enter_unit(&unit).unwrap();
    let options = CompileOptions { profiling: true, ..CompileOptions::default() };
    let (mut bound, model) = bind(OwnModel::load("conv_3x3"), &unit, &options).unwrap();
    bound.run().unwrap();
    bound.run().unwrap();
    let nodes = bound.compiled.node_times().expect("this backend reports node times");
    assert_right(&bound, &model);
    eprintln!("{address}: {nodes:?}");
    assert!(nodes.iter().any(|node| node.kind.starts_with("Conv")), "{nodes:?}");
    assert!(nodes.iter().all(|node| node.ms >= 0.0 && node.ms.is_finite() && !node.name.is_empty()), "{nodes:?}");
    Some((bound, nodes))
}

#[test]
fn openvino_reports_node_times() {
    profile("openvino:CPU");
}

#[test]
fn ort_reports_node_times_again_and_again() {
    if let Some((mut bound, first)) = profile("ort:CPU") {
        bound.run().unwrap();
        let again = bound.compiled.node_times().unwrap();
        let names = |nodes: &[NodeTime]| nodes.iter().map(|node| node.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&again), names(&first));
    }
}

#[test]
fn openvino_fills_and_reuses_a_cache() {
    let Some(unit) = unit_or_skip("openvino:CPU") else { return };
    let _thread = enter_unit(&unit).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let options = CompileOptions { cache: Some(folder.path().to_path_buf()), ..CompileOptions::default() };
    let blobs = || {
        let mut found = Vec::new();
        for key in fs::read_dir(folder.path().join("openvino")).unwrap().flatten() {
            found.extend(fs::read_dir(key.path()).unwrap().flatten().map(|entry| entry.path()));
        }
        found
    };
    let mut seen = Vec::new();
    for round in 0..2 {
        let (mut bound, model) = bind(OwnModel::load("conv_3x3"), &unit, &options).unwrap();
        bound.run().unwrap();
        assert_right(&bound, &model);
        if round == 0 {
            seen = blobs();
            assert!(!seen.is_empty(), "no blob was written");
        }
    }
    assert_eq!(blobs(), seen, "the second compile wrote again");
}

#[test]
fn a_precision_that_the_device_lacks_is_refused() {
    for address in ["openvino:CPU+f16", "ort:CPU+f16"] {
        match resolve(&address.parse().unwrap()) {
            // Some CPUs have it.
            Ok(unit) => assert_eq!(unit.address.to_string(), address),
            Err(error) => assert!(matches!(error, UnitError::Unavailable { .. }), "{error}"),
        }
    }
}
