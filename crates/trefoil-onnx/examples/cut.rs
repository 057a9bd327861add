//! Cuts a model into segments, without any backend: what `trefoil` does between a traced run and the backends.
//!
//! ```text
//! cut trace MODEL OUT.onnx [name=1,3,224,224 …]    writes the traced model, to be run by whatever runs ONNX models
//! cut MODEL VALUES.npz DIR fused|node PIECES SEED   VALUES: the traced run's inputs and outputs, by name
//! ```
//!
//! The second form prints one JSON line per segment, in an order in which they can run.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use trefoil_core::{Granularity, HostTensor, OperatorId};
use trefoil_onnx::{Model, OnnxError, Prepared, npz};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments.as_slice() {
        ["trace", model, out, shapes @ ..] => trace(Path::new(model), Path::new(out), shapes),
        [model, values, dir, granularity, pieces, seed] => {
            let granularity = if *granularity == "node" { Granularity::Node } else { Granularity::Fused };
            let (pieces, seed) = (pieces.parse().unwrap_or(1), seed.parse().unwrap_or(0));
            cut(Path::new(model), Path::new(values), &PathBuf::from(dir), granularity, pieces, seed)
        }
        _ => {
            eprintln!("usage: cut trace MODEL OUT.onnx [shape…] | cut MODEL VALUES.npz DIR fused|node PIECES SEED");
            return ExitCode::FAILURE;
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn load(path: &Path, shapes: &[&str]) -> Result<Model, OnnxError> {
    let mut model = Model::load(path)?;
    let shapes: BTreeMap<String, Vec<u64>> = shapes
        .iter()
        .filter_map(|text| text.split_once('='))
        .map(|(name, dims)| (name.to_owned(), dims.split(',').filter_map(|dim| dim.parse().ok()).collect()))
        .collect();
    model.fix_shapes(&shapes)?;
    Ok(model)
}

fn trace(path: &Path, out: &Path, shapes: &[&str]) -> Result<(), OnnxError> {
    load(path, shapes)?.traced()?.save(out)
}

fn cut(
    path: &Path,
    values: &Path,
    dir: &Path,
    granularity: Granularity,
    pieces: usize,
    seed: u64,
) -> Result<(), OnnxError> {
    let values: BTreeMap<String, HostTensor> =
        npz::read_npz(values)?.into_iter().map(|tensor| (tensor.info().name.clone(), tensor)).collect();
    let mut model = Model::load(path)?;
    let given: BTreeMap<String, Vec<u64>> = model
        .inputs()
        .into_iter()
        .filter_map(|port| values.get(&port.name).map(|tensor| (port.name, tensor.info().shape.clone())))
        .collect();
    model.fix_shapes(&given)?;
    Prepared::new(model, &values)?.save(dir)?;
    // Read back, so that the cached form is what gets cut.
    let prepared = Prepared::load(dir)?;
    let graph = prepared.operator_graph(granularity, &[])?;
    let whole = prepared.whole(dir)?;
    let classes = graph.operators.iter().map(|operator| operator.kind.as_str()).collect::<BTreeSet<_>>();
    let summary = serde_json::json!({
        "whole": whole.path, "inputs": names(&whole.inputs), "outputs": names(&whole.outputs),
        "nodes": prepared.model().node_count(), "operators": graph.len(), "distinct": graph.distinct(), "kinds": classes,
    });
    println!("{summary}");
    // Runs of a topological order are convex; which run an operator falls into is drawn, monotonically.
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
    let mut draw = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let cuts: BTreeSet<u32> = (1..pieces).map(|_| (draw() % graph.len().max(1) as u64) as u32).collect();
    let mut start = 0;
    for end in cuts.into_iter().chain([graph.len() as u32]) {
        if end > start {
            let set: BTreeSet<OperatorId> = (start..end).map(OperatorId).collect();
            let piece = prepared.extract(&graph, &set, dir)?;
            let line = serde_json::json!({
                "path": piece.path, "inputs": names(&piece.inputs), "outputs": names(&piece.outputs), "operators": end - start,
            });
            println!("{line}");
        }
        start = end;
    }
    Ok(())
}

fn names(infos: &[trefoil_core::TensorInfo]) -> Vec<&str> {
    infos.iter().map(|info| info.name.as_str()).collect()
}
