//! Models prepared and profiled, and the units that they may share.

use crate::cli::{GranularityArg, MeasureArgs, ModelArgs, Shape};
use crate::commands::profile::model_name;
use crate::context::{self, ProgressLine};
use crate::error::CliError;
use std::path::{Path, PathBuf};
use trefoil_core::{HostTensor, OperatorGraph, Profile, Unit, UnitAddress, UnitKind};
use trefoil_profile::PreparedModel;

/// A model, prepared and profiled.
#[derive(Debug)]
pub struct Ready {
    /// Name to show, distinct among the models.
    pub name: String,
    /// The prepared model.
    pub prepared: PreparedModel,
    /// Its measurements.
    pub profile: Profile,
    /// Its operators.
    pub graph: OperatorGraph,
}

impl Ready {
    /// Its sample inputs.
    pub fn inputs(&self) -> Vec<HostTensor> {
        let names = self.graph.inputs.iter().map(|&tensor| &self.graph.tensor(tensor).name);
        names.filter_map(|name| self.prepared.trace.load(name)).collect()
    }
}

/// How models are read.
#[derive(Debug, Clone)]
pub struct Reading<'a> {
    /// Static shapes, each for the models that have such an input.
    pub shapes: &'a [Shape],
    /// How nodes are grouped.
    pub granularity: GranularityArg,
    /// The cache folder, as given.
    pub cache: Option<&'a Path>,
    /// How to measure.
    pub measure: &'a MeasureArgs,
    /// Whether what did not happen as asked is an error.
    pub strict: bool,
    /// Whether progress is hidden.
    pub quiet: bool,
    /// Whether a line on standard error tells of every model that is ready, also where no terminal shows progress.
    pub log: bool,
}

/// Prepares and profiles every model on the units.
pub fn make_ready(paths: &[PathBuf], units: &[UnitAddress], reading: &Reading<'_>) -> Result<Vec<Ready>, CliError> {
    let units = context::resolve_units(units)?;
    if let Some(unit) = units.iter().find(|unit| unit.simulated) {
        let message =
            format!("{} is simulated: models can be planned for it but not run; see `trefoil plan`", unit.address);
        return Err(CliError::Usage(message));
    }
    check_shapes(paths, reading.shapes)?;
    let mut ready: Vec<Ready> = Vec::new();
    for path in paths {
        let stem = model_name(path);
        let same =
            ready.iter().filter(|other| other.name == stem || other.name.starts_with(&format!("{stem}~"))).count();
        let name = if same == 0 { stem } else { format!("{stem}~{}", same + 1) };
        let began = std::time::Instant::now();
        let model = model_args(path, reading)?;
        let stop = context::stop_flag();
        let prepared = trefoil_profile::prepare_model(path, &context::prepare_options(&model)?, stop)?;
        let options = context::profile_options(&model, reading.measure, reading.strict)?;
        let line = ProgressLine::new(&name, reading.quiet);
        let profile =
            trefoil_profile::profile(&prepared, &units, &options, &mut |progress| line.show(&progress), stop)?;
        let mut graph = profile.model(Some(prepared.prepared.fingerprint()))?.clone();
        graph.model.clone_from(&name);
        if reading.log {
            let took = began.elapsed().as_secs_f64();
            eprintln!("[{}/{}] {name}: measured in {took:.1} s", ready.len() + 1, paths.len());
        }
        ready.push(Ready { name, prepared, profile, graph });
    }
    Ok(ready)
}

/// The model's own part of the flags.
pub fn model_args(path: &Path, reading: &Reading<'_>) -> Result<ModelArgs, CliError> {
    let mut shapes = Vec::new();
    if !reading.shapes.is_empty() {
        let inputs = trefoil_onnx::Model::load(path)?.inputs();
        let has = |shape: &&Shape| inputs.iter().any(|input| input.name == shape.input);
        shapes = reading.shapes.iter().filter(has).cloned().collect();
    }
    Ok(ModelArgs {
        model: path.to_owned(),
        shapes,
        granularity: reading.granularity,
        input: "random".to_owned(),
        cache: reading.cache.map(Path::to_owned),
    })
}

/// Every shape must be for some model.
fn check_shapes(paths: &[PathBuf], shapes: &[Shape]) -> Result<(), CliError> {
    if shapes.is_empty() {
        return Ok(());
    }
    let mut known = Vec::new();
    for path in paths {
        known.extend(trefoil_onnx::Model::load(path)?.inputs().into_iter().map(|input| input.name));
    }
    match shapes.iter().find(|shape| !known.contains(&shape.input)) {
        Some(shape) => Err(CliError::Usage(format!(
            "--shape names input `{}`, which none of the models has; they have {}",
            shape.input,
            known.join(", ")
        ))),
        None => Ok(()),
    }
}

/// Units that plans may use, and those that baselines may. A CPU unit without cores stands for its backend on every single core
/// and on all of them; one with cores for just these. Baselines may always use all cores and every core of each CPU backend.
pub fn candidate_units(asked: &[UnitAddress]) -> Result<(Vec<Unit>, Vec<Unit>), CliError> {
    let asked = context::resolve_units(asked)?;
    let (mut plans, mut baselines): (Vec<Unit>, Vec<Unit>) = (Vec::new(), Vec::new());
    let add = |list: &mut Vec<Unit>, unit: &Unit| {
        if !list.iter().any(|known| known.address == unit.address) {
            list.push(unit.clone());
        }
    };
    let allowed = trefoil_units::allowed_cores();
    for unit in &asked {
        add(&mut plans, unit);
        add(&mut baselines, unit);
        if unit.kind != UnitKind::Cpu {
            continue;
        }
        let all = UnitAddress { cores: Vec::new(), ..unit.address.clone() };
        let single = allowed.iter().map(|&core| all.clone().with_cores([core]));
        for address in std::iter::once(all.clone()).chain(single) {
            // A backend may refuse single cores; then it is a unit on all of them only.
            let Ok(mode) = trefoil_units::resolve(&address) else { continue };
            add(&mut baselines, &mode);
            if unit.address.cores.is_empty() {
                add(&mut plans, &mode);
            }
        }
    }
    Ok((plans, baselines))
}
