//! Linked stages: a pipeline file's models, prepared on what earlier stages really give them, and profiled.

mod file;

pub use file::{InputEntry, PipelineFile};

use crate::context;
use crate::error::CliError;
use crate::several::{Reading, Ready, model_args, profiled};
use std::path::{Path, PathBuf};
use trefoil_core::{HostTensor, OperatorGraph, TensorId, TensorInfo};
use trefoil_onnx::{Model, ModelPort, OnnxError, npz};
use trefoil_plan::StageLink;
use trefoil_profile::sample_data::{Integers, sample_tensor};
use trefoil_profile::{Launcher, PrepareOptions, PreparedModel};

/// Stages ready to be planned.
#[derive(Debug)]
pub struct Stages {
    /// Models, in the file's order, named by stage.
    pub ready: Vec<Ready>,
    /// What they hand on.
    pub links: Vec<StageLink>,
    /// Executions of each within one inference.
    pub repeats: Vec<u32>,
}

/// Prepares and profiles the stages on the units. A stage that reads from others is prepared on what these gave in their traced
/// run, so that every operator is measured on the data that it will see.
pub fn make_stages(
    file: &PipelineFile,
    units: &[trefoil_core::UnitAddress],
    reading: &Reading<'_>,
) -> Result<Stages, CliError> {
    let units = context::resolve_units(units)?;
    if let Some(unit) = units.iter().find(|unit| unit.simulated) {
        return Err(CliError::Usage(format!(
            "{} is simulated: a pipeline can be run on real units only",
            unit.address
        )));
    }
    let order = file.order().map_err(CliError::Usage)?;
    let mut prepared: Vec<Option<(PreparedModel, Model)>> = file.stages.iter().map(|_| None).collect();
    for &stage in &order {
        prepared[stage] = Some(prepare(file, stage, &prepared, reading)?);
    }
    let mut ready = Vec::new();
    for (entry, slot) in file.stages.iter().zip(prepared) {
        let Some((prepared, _)) = slot else { continue };
        let args = model_args(&file.resolve(&entry.model), reading);
        ready.push(profiled(entry.name.clone(), prepared, &units, &args, reading)?);
    }
    let links = links(file, &ready)?;
    Ok(Stages { ready, links, repeats: file.stages.iter().map(|stage| stage.repeat).collect() })
}

/// Prepares a stage whose sources are prepared.
fn prepare(
    file: &PipelineFile,
    stage: usize,
    prepared: &[Option<(PreparedModel, Model)>],
    reading: &Reading<'_>,
) -> Result<(PreparedModel, Model), CliError> {
    let entry = &file.stages[stage];
    let path = file.resolve(&entry.model);
    let mut model = Model::load(&path).map_err(|error| file.wrong(stage, "model", error))?;
    let ports = model.inputs();
    let names: Vec<String> = ports.iter().map(|port| port.name.clone()).collect();
    for name in entry.inputs.keys().chain(entry.shapes.keys()) {
        if !names.contains(name) {
            let key = if entry.inputs.contains_key(name) { "inputs" } else { "shapes" };
            let what = format!("the model has no such input; it has {}", names.join(", "));
            return Err(file.wrong(stage, &format!("{key}.{name}"), what));
        }
    }
    for port in &ports {
        let Some(extents) = entry.shapes.get(&port.name) else { continue };
        crate::shapes::refuse_empty(port, extents)
            .map_err(|what| file.wrong(stage, &format!("shapes.{}", port.name), what))?;
    }
    let mut given: Vec<HostTensor> = Vec::new();
    for (input, source) in &entry.inputs {
        if let Some(tensor) = known_tensor(file, stage, (input, source), prepared)? {
            given.push(tensor);
        }
    }
    let mut shapes = entry.shapes.clone();
    for tensor in &given {
        shapes.entry(tensor.info().name.clone()).or_insert_with(|| tensor.info().shape.clone());
    }
    model.fix_shapes(&shapes).map_err(|error| match error {
        // The flags that its message names are not for a pipeline.
        OnnxError::SymbolicDims { open, .. } => file.wrong(stage, "shapes", unfixed(&open)),
        error => file.wrong(stage, "shapes", error),
    })?;
    let updates: Vec<_> =
        entry.inputs.iter().filter_map(|(input, source)| Some(source.next.as_ref()?.update(input))).collect();
    for update in &updates {
        let key = format!("inputs.{}.next", update.input);
        model.add_update(update).map_err(|error| file.wrong(stage, &key, error))?;
    }
    let cache = context::cache_dir(reading.cache);
    let path = if updates.iter().all(trefoil_onnx::Update::is_plain) { path } else { saved(&model, &cache)? };
    for port in model.inputs() {
        let Some(info) = port.info() else { continue };
        if given.iter().any(|tensor| tensor.info().name == info.name) {
            continue;
        }
        let source = entry.inputs.get(&info.name).cloned().unwrap_or_default();
        given.push(
            made_tensor(&info, &source).map_err(|what| file.wrong(stage, &format!("inputs.{}", info.name), what))?,
        );
    }
    let mut options = PrepareOptions::new(Launcher::discover()?, cache);
    options.shapes = shapes;
    options.inputs = Some(given);
    let ready = trefoil_profile::prepare_model(&path, &options, context::stop_flag()).map_err(|error| match error {
        interrupted @ trefoil_profile::ProfileError::Interrupted { .. } => interrupted.into(),
        error => file.wrong(stage, "inputs", error),
    })?;
    Ok((ready, model))
}

/// Which inputs have open extents, and how to write them down.
fn unfixed(open: &[ModelPort]) -> String {
    let dims = |port: &ModelPort| port.dims_text().replace("of unknown rank", "[…]");
    let list = open.iter().map(|port| format!("`{}` {}", port.name, dims(port))).collect::<Vec<_>>().join(", ");
    let wanted = open.iter().map(|port| format!("\"{}\": {}", port.name, dims(port))).collect::<Vec<_>>().join(", ");
    format!("the model leaves extents open: {list}; write \"shapes\": {{{wanted}}} (numbers for names)")
}

/// The model with its updates, in the cache.
fn saved(model: &Model, cache: &Path) -> Result<PathBuf, CliError> {
    let folder = cache.join("pipelines").join(model.fingerprint());
    let path = folder.join(format!("{}.onnx", model.name()));
    if !path.exists() {
        model.save(&path)?;
    }
    Ok(path)
}

/// An input whose shape is not the model's to say: from another stage, or a file.
fn known_tensor(
    file: &PipelineFile,
    stage: usize,
    (input, source): (&String, &InputEntry),
    prepared: &[Option<(PreparedModel, Model)>],
) -> Result<Option<HostTensor>, CliError> {
    let fail = |what: String| file.wrong(stage, &format!("inputs.{input}"), what);
    if let (Some(from), Some(output)) = (&source.from, &source.output) {
        let maker = file.stage(from).and_then(|at| prepared[at].as_ref());
        let (maker, model) = maker.ok_or_else(|| fail(format!("stage `{from}` is not prepared")))?;
        let outputs: Vec<_> = model.outputs().into_iter().map(|port| port.name).collect();
        if !outputs.contains(output) {
            return Err(fail(format!("stage `{from}` has no output `{output}`; it has {}", outputs.join(", "))));
        }
        let mut tensor = maker
            .trace
            .load(output)
            .ok_or_else(|| fail(format!("output `{output}` of stage `{from}` is no tensor that can be handed on")))?;
        tensor.set_name(input.clone());
        return Ok(Some(tensor));
    }
    let Some(path) = &source.file else { return Ok(None) };
    let path = file.resolve(path);
    let mut tensor = if path.extension().is_some_and(|extension| extension == "npy") {
        npz::read_npy(&path).map_err(|error| fail(error.to_string()))?
    } else {
        let name = source.tensor.as_ref().unwrap_or(input);
        let all = npz::read_npz(&path).map_err(|error| fail(error.to_string()))?;
        let names: Vec<_> = all.iter().map(|tensor| tensor.info().name.clone()).collect();
        let wanted = |tensor: &HostTensor| {
            let found = &tensor.info().name;
            found == name || found.strip_prefix("in_").is_some_and(|rest| rest == name)
        };
        all.into_iter()
            .find(wanted)
            .ok_or_else(|| fail(format!("{} has no tensor `{name}`; it has {}", path.display(), names.join(", "))))?
    };
    tensor.set_name(input.clone());
    Ok(Some(tensor))
}

/// An input made of numbers of the file, or at random.
fn made_tensor(info: &TensorInfo, source: &InputEntry) -> Result<HostTensor, String> {
    let values = match (&source.values, source.fill) {
        (Some(values), _) => values.clone(),
        (None, Some(value)) => vec![value; info.elements() as usize],
        (None, None) => return Ok(sample_tensor(info, source.random.unwrap_or(0), Integers::Small)),
    };
    if values.len() as u64 != info.elements() {
        return Err(format!("{} values are given for {info}, which has {}", values.len(), info.elements()));
    }
    HostTensor::from_f64(info.clone(), &values).ok_or_else(|| format!("a value is none of type {}", info.dtype))
}

/// What the stages hand on, by tensors of their graphs.
fn links(file: &PipelineFile, ready: &[Ready]) -> Result<Vec<StageLink>, CliError> {
    let mut links = Vec::new();
    for (stage, entry) in file.stages.iter().enumerate() {
        for (input, source) in &entry.inputs {
            let fail = |what: String| file.wrong(stage, &format!("inputs.{input}"), what);
            let to = input_of(&ready[stage].graph, input)
                .ok_or_else(|| fail("nothing in the model depends on it".to_owned()))?;
            let mut link = |from: usize, output: &str| {
                let tensor = output_of(&ready[from].graph, output).ok_or_else(|| {
                    fail(format!(
                        "`{output}` of stage `{}` is no output that an operator makes",
                        file.stages[from].name
                    ))
                })?;
                links.push(StageLink { from: (from, tensor), to: (stage, to) });
                Ok::<_, CliError>(())
            };
            if let (Some(from), Some(output)) =
                (source.from.as_deref().and_then(|from| file.stage(from)), &source.output)
            {
                link(from, output)?;
            }
            if let Some(next) = &source.next {
                link(stage, &next.update(input).next())?;
            }
        }
    }
    Ok(links)
}

fn input_of(graph: &OperatorGraph, name: &str) -> Option<TensorId> {
    graph.inputs.iter().copied().find(|&tensor| graph.tensor(tensor).name == name)
}

fn output_of(graph: &OperatorGraph, name: &str) -> Option<TensorId> {
    let made = |tensor: &TensorId| graph.tensor(*tensor).name == name && graph.tensor(*tensor).producer.is_some();
    graph.outputs.iter().copied().find(made)
}
