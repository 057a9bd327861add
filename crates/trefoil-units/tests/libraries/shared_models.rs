//! Every small model of the shared folder against its expected outputs, where that folder lies beside the repository.

use crate::bound::Bound;
use crate::{npz, unit_or_skip};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use trefoil_core::{HostTensor, TensorInfo};
use trefoil_units::{CompileOptions, allowed_cores, cores_text, enter_unit};

#[derive(Deserialize)]
struct Manifest {
    models: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    name: String,
    file: PathBuf,
    expected: PathBuf,
    inputs: Vec<Named>,
    outputs: Vec<Named>,
    rtol_to_peak: f64,
}

#[derive(Deserialize)]
struct Named {
    name: String,
}

/// Models that a library does not compile or computes differently (versions 2026.4.1 and 1.32.0), as their own Python
/// interfaces confirm.
const OPENVINO_FAILS: [&str; 7] = [
    "hyena_rfft_tiny_fp16",
    "hyena_rfft_tiny_fp32",
    "test_causal_conv_with_state_basic",
    "test_dft_irfft",
    "test_dft_rfft",
    "test_dft_rfft_opset19",
    "test_dynamicquantizelinear",
];
const ORT_FAILS: [&str; 2] = ["test_dequantizelinear_axis", "test_quantizelinear_axis"];

fn folder() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models");
    folder.join("MANIFEST.json").is_file().then_some(folder)
}

fn check(folder: &Path, entry: &Entry, unit: &trefoil_core::Unit) -> Result<(), String> {
    let mut arrays: BTreeMap<String, HostTensor> = npz::read(&folder.join(&entry.expected))?
        .into_iter()
        .map(|tensor| (tensor.info().name.clone(), tensor))
        .collect();
    let mut take = |prefix: &str, names: &[Named]| -> Result<Vec<HostTensor>, String> {
        names
            .iter()
            .map(|named| {
                let key = format!("{prefix}{}", named.name);
                let mut tensor = arrays.remove(&key).ok_or_else(|| format!("no array `{key}`"))?;
                tensor.set_name(&named.name);
                Ok(tensor)
            })
            .collect()
    };
    let (inputs, expected) = (take("in_", &entry.inputs)?, take("out_", &entry.outputs)?);
    let infos: Vec<TensorInfo> = expected.iter().map(|tensor| tensor.info().clone()).collect();
    let options = CompileOptions::default();
    let mut bound = Bound::new(&folder.join(&entry.file), inputs, &infos, unit, &options).map_err(|e| e.to_string())?;
    bound.run().map_err(|error| error.to_string())?;
    for (output, expected) in bound.outputs.iter().zip(&expected) {
        let error = output.error_to_peak(expected);
        if error > entry.rtol_to_peak {
            return Err(format!("output `{}` is off by {error:.1e} of its peak", expected.info().name));
        }
    }
    Ok(())
}

#[test]
fn all_models_give_their_expected_outputs() {
    let Some(folder) = folder() else {
        eprintln!("skipped: no shared/models beside the repository");
        return;
    };
    let text = std::fs::read_to_string(folder.join("MANIFEST.json")).unwrap();
    let manifest: Manifest = serde_json::from_str(&text).unwrap();
    let core_sets: Vec<&[u32]> = if allowed_cores().len() > 1 {
        vec![&allowed_cores()[..1], &allowed_cores()[..2]]
    } else {
        vec![allowed_cores()]
    };
    let mut surprises = Vec::new();
    for (backend, known) in [("openvino", OPENVINO_FAILS.as_slice()), ("ort", ORT_FAILS.as_slice())] {
        for cores in &core_sets {
            let address = format!("{backend}:CPU@{}", cores_text(cores));
            let Some(unit) = unit_or_skip(&address) else { continue };
            let _thread = enter_unit(&unit).unwrap();
            let mut failed = 0;
            for entry in &manifest.models {
                if let Err(reason) = check(&folder, entry, &unit) {
                    failed += 1;
                    eprintln!("{address} {}: {reason}", entry.name);
                    if !known.contains(&entry.name.as_str()) {
                        surprises.push(format!("{address} {}: {reason}", entry.name));
                    }
                }
            }
            eprintln!("{address}: {} passed, {failed} failed", manifest.models.len() - failed);
        }
    }
    assert!(surprises.is_empty(), "{}", surprises.join("\n"));
}
