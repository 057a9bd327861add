//! Models prepared and profiled, and the units that they may share.

use super::Question;
use crate::cli::{GranularityArg, MeasureArgs, ModelArgs};
use crate::commands::profile::model_name;
use crate::context::{self, ProgressLine};
use crate::error::CliError;
use crate::pipeline::{process_options, time_lineup};
use crate::shapes::Shapes;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use trefoil_core::{Granularity, HostTensor, OperatorGraph, Profile, Unit, UnitAddress, UnitKind};
use trefoil_profile::{Lineup, PreparedModel, ProfileOptions, Progress};

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
    /// When [`settle`] last timed it.
    pub settled: Option<Instant>,
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

/// Prepares and profiles every model on the units. `shapes` are those of each model ([`crate::shapes::of_models`]).
pub fn make_ready(
    paths: &[PathBuf],
    shapes: &[Shapes],
    units: &[UnitAddress],
    reading: &Reading<'_>,
) -> Result<Vec<Ready>, CliError> {
    let units = measurable(units)?;
    // All of them before the first is measured: what is wrong with the last one is told in the first seconds.
    let mut prepared = Vec::new();
    for (path, shapes) in paths.iter().zip(shapes) {
        let options = context::prepare_with(&model_args(path, reading), shapes.clone())?;
        prepared.push(trefoil_profile::prepare_model(path, &options, context::stop_flag())?);
    }
    let mut ready: Vec<Ready> = Vec::new();
    for (path, prepared) in paths.iter().zip(prepared) {
        let stem = model_name(path);
        let same =
            ready.iter().filter(|other| other.name == stem || other.name.starts_with(&format!("{stem}~"))).count();
        let name = if same == 0 { stem } else { format!("{stem}~{}", same + 1) };
        let began = Instant::now();
        let one = profiled(name, prepared, &units, &model_args(path, reading), reading)?;
        if reading.log {
            let took = began.elapsed().as_secs_f64();
            eprintln!("[{}/{}] {}: measured in {took:.1} s", ready.len() + 1, paths.len(), one.name);
        }
        ready.push(one);
    }
    Ok(ready)
}

/// The units, all of which can be measured.
///
/// # Errors
/// One that is not here, or only described.
pub fn measurable(units: &[UnitAddress]) -> Result<Vec<Unit>, CliError> {
    let units = context::resolve_units(units)?;
    match units.iter().find(|unit| unit.simulated) {
        Some(unit) => Err(CliError::Usage(format!(
            "{} is simulated: models can be planned for it but not run; see `trefoil plan`",
            unit.address
        ))),
        None => Ok(units),
    }
}

/// Profiles a prepared model on the units.
pub fn profiled(
    name: String,
    prepared: PreparedModel,
    units: &[Unit],
    model: &ModelArgs,
    reading: &Reading<'_>,
) -> Result<Ready, CliError> {
    let options = context::profile_options(model, reading.measure, reading.strict)?;
    let line = ProgressLine::new(&name, reading.quiet);
    let mut show = |progress: Progress| line.show(&progress);
    let profile = trefoil_profile::profile(&prepared, units, &options, &mut show, context::stop_flag())?;
    let mut graph = profile.model(Some(prepared.prepared.fingerprint()))?.clone();
    graph.model.clone_from(&name);
    Ok(Ready { name, prepared, profile, graph, settled: None })
}

/// The model's own part of the flags.
pub fn model_args(path: &Path, reading: &Reading<'_>) -> ModelArgs {
    ModelArgs {
        model: path.to_owned(),
        shapes: Vec::new(),
        granularity: reading.granularity,
        input: "random".to_owned(),
        cache: reading.cache.map(Path::to_owned),
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

/// After so long a machine may run at another speed, and what was settled is timed anew.
const SETTLED_FOR: Duration = Duration::from_mins(1);

/// Times what arrangements of a model rest on as they will run it, right before they are planned and compared: a loop around the
/// backend's call leaves out what a caller waits for, and the machine may have changed its speed since.
pub fn settle(ready: &mut Ready, question: &Question, line: &ProgressLine) -> Result<(), CliError> {
    if question.measure.no_refine || ready.settled.is_some_and(|when| when.elapsed() < SETTLED_FOR) {
        return Ok(());
    }
    let options = segment_options(&question.measure, &question.cache, question.strict, ready.graph.granularity)?;
    let compiled = trefoil_profile::cache::compiled_path(&question.cache);
    let (processes, inputs) = (process_options(&question.measure, 1, compiled)?, ready.inputs());
    let Ready { prepared, profile, graph, settled, .. } = ready;
    let mut timer = |lineup: &Lineup, turn: u32| time_lineup(lineup, graph, &inputs, &processes, turn);
    let mut show = |progress: Progress| line.show(&progress);
    trefoil_profile::settle_whole(prepared, graph, profile, &options, &mut timer, &mut show, context::stop_flag())?;
    *settled = Some(Instant::now());
    Ok(())
}

/// How parts of a prepared model are measured; `cache` is the cache folder.
pub fn segment_options(
    measure: &MeasureArgs,
    cache: &Path,
    strict: bool,
    granularity: Granularity,
) -> Result<ProfileOptions, CliError> {
    let model = ModelArgs {
        model: PathBuf::new(),
        shapes: Vec::new(),
        granularity: GranularityArg::Fused,
        input: "random".to_owned(),
        cache: Some(cache.to_owned()),
    };
    Ok(ProfileOptions { granularity, ..context::profile_options(&model, measure, strict)? })
}
