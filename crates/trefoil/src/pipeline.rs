//! The main job, one model: prepare → profile → plan with refinement → compare in fresh processes → guard → run the winner.
//! Every step is a function of its own crate; this module puts them in order and keeps what they found.

use crate::cli::{MeasureArgs, ModelArgs, PlanningArgs, ShowArgs};
use crate::contenders::{baseline_units, fastest_plan, same_placement, sequential_plan, single_plan};
use crate::context::{self, ProgressLine};
use crate::error::CliError;
use crate::several::{self, Energy};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;
use trefoil_core::{Granularity, HostTensor, OperatorGraph, Plan, Profile, Timeline, Unit, UnitAddress};
use trefoil_plan::PlanRequest;
use trefoil_profile::{Lineup, LineupTimes, PreparedModel, ProfileError};
use trefoil_run::{
    CompareOptions, Comparison, Contender, Executor, ExecutorOptions, ExtractedSegments, MemoryReport, PreparedSource,
    Verdict, Verification, Verify, WorkerCommand,
};

/// Name of the refined plan among the contenders.
pub const PLAN: &str = "plan";
/// Name of the plan with the shortest time among the contenders, where the refined one is for energy.
pub const FASTEST: &str = "fastest plan";
/// Name of BIDENT's plan from isolated costs among the contenders.
pub const SEQUENTIAL: &str = "sequential";

/// What to do with one model.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Name to show.
    pub name: String,
    /// The model and how to read it.
    pub model: ModelArgs,
    /// Units.
    pub units: Vec<UnitAddress>,
    /// How to measure.
    pub measure: MeasureArgs,
    /// What to plan for.
    pub planning: PlanningArgs,
    /// What to show and check.
    pub show: ShowArgs,
    /// A profile to use instead of measuring.
    pub profile: Option<PathBuf>,
    /// A plan to use instead of planning.
    pub plan: Option<PathBuf>,
}

/// Everything found out about one model.
#[derive(Debug)]
pub struct Job {
    /// Name to show.
    pub name: String,
    /// Its operators.
    pub graph: OperatorGraph,
    /// Measurements, refinement included.
    pub profile: Profile,
    /// The plan before refinement: BIDENT's, from isolated costs.
    pub sequential: Option<Plan>,
    /// The plan.
    pub plan: Plan,
    /// Whether refinement ended with every segment measured; `None` when it did not take place.
    pub refined: Option<bool>,
    /// Whether all replaced estimates were lower bounds.
    pub lower_bounds: bool,
    /// Times in fresh processes.
    pub comparison: Comparison,
    /// What is used, and why.
    pub verdict: Verdict,
    /// The plan that was executed.
    pub executed: Plan,
    /// Its trace.
    pub trace: Timeline,
    /// Its memory.
    pub memory: MemoryReport,
    /// Its outputs.
    pub outputs: Vec<HostTensor>,
    /// Comparison with the reference values.
    pub verification: Option<Verification>,
    /// Joules of the contenders, and where their watts come from, when energy was asked for.
    pub energy: Option<(Vec<Energy>, &'static str)>,
    /// The plan with the shortest time, when energy was asked for and it is another one.
    pub fastest: Option<Plan>,
    /// What did not happen as asked, and other remarks.
    pub notes: Vec<String>,
}

/// What is going to be run may use modes of the units: nobody asks on about their operators.
pub fn run_options(planning: &PlanningArgs) -> trefoil_plan::PlanOptions {
    trefoil_plan::PlanOptions { modes: true, ..planning.options() }
}

/// Measures (or reads) a profile and refines it. `quiet` shows no progress.
pub fn measure(settings: &Settings, prepared: &PreparedModel, quiet: bool) -> Result<Measured, CliError> {
    let line = ProgressLine::new(&settings.name, quiet);
    let stop = context::stop_flag();
    let options = context::profile_options(&settings.model, &settings.measure, settings.show.strict)?;
    let mut profile = if let Some(path) = &settings.profile {
        let profile = trefoil_profile::load_profile(path)?;
        trefoil_profile::check_machine(&profile, &trefoil_units::machine())?;
        profile
    } else {
        let units = context::resolve_units(&settings.units)?;
        trefoil_profile::profile(prepared, &units, &options, &mut |progress| line.show(&progress), stop)?
    };
    // The fingerprint holds shapes and constants, so another model or other shapes are told here.
    let graph = profile.model(Some(prepared.prepared.fingerprint()))?.clone();
    let simulated = profile.units.iter().any(|unit| unit.simulated);
    let refine = !settings.measure.no_refine && settings.plan.is_none() && settings.profile.is_none() && !simulated;
    if !refine {
        return Ok(Measured { graph, profile, plan: None, refined: None, lower_bounds: true });
    }
    let planning = &settings.planning;
    let mut propose = |profile: &Profile| {
        let request = PlanRequest {
            profile,
            graph: &graph,
            units: settings.units.clone(),
            objective: planning.objective().into(),
            pins: planning.pins.clone(),
        };
        trefoil_plan::plan_with(&planning.method, &request, &run_options(planning))
    };
    // A question that cannot be planned at all is a planner's error, not one of refinement.
    propose(&profile)?;
    let (processes, inputs) = (compare_options(settings)?, sample_inputs(prepared));
    let mut timer = |lineup: &Lineup, turn: u32| time_lineup(lineup, &graph, &inputs, &processes, turn);
    let refinement = trefoil_profile::refine(
        prepared,
        &graph,
        &mut profile,
        &options,
        Duration::from_secs_f64(settings.measure.refine_budget.clamp(0.0, 1e6)),
        &mut propose,
        Some(&mut timer),
        &mut |progress| line.show(&progress),
        stop,
    )?;
    Ok(Measured {
        graph,
        profile,
        plan: Some(refinement.plan),
        refined: Some(refinement.finished),
        lower_bounds: refinement.estimates_were_lower_bounds,
    })
}

/// The inputs that comparisons run on: the model's own sample data.
fn sample_inputs(prepared: &PreparedModel) -> Vec<HostTensor> {
    prepared.prepared.inputs().iter().filter_map(|info| prepared.trace.load(&info.name)).collect()
}

/// [`trefoil_run::time_lineup`] as profiling wants it.
pub fn time_lineup(
    lineup: &Lineup,
    graph: &OperatorGraph,
    inputs: &[HostTensor],
    options: &CompareOptions,
    turn: u32,
) -> Result<LineupTimes, ProfileError> {
    let inputs: Vec<&HostTensor> = inputs.iter().collect();
    trefoil_run::time_lineup(lineup, graph, &inputs, options, turn)
        .map_err(|error| ProfileError::Settling { reason: error.to_string() })
}

/// How fresh processes are started and how often each runs its plan: one rule for predictions and comparisons.
fn compare_options(settings: &Settings) -> Result<CompareOptions, CliError> {
    process_options(&settings.measure, settings.show.rounds, compiled_cache(settings))
}

/// The same from its parts; `compiled` is the folder for compiled models.
pub fn process_options(measure: &MeasureArgs, rounds: u32, compiled: PathBuf) -> Result<CompareOptions, CliError> {
    Ok(CompareOptions {
        rounds: rounds.max(1),
        most_rounds: rounds.max(1).saturating_mul(trefoil_run::MORE_ROUNDS),
        sampling: context::run_sampling(measure),
        cache: Some(compiled),
        spin: ExecutorOptions::default().spin,
        timeout: Duration::from_mins(10),
        command: WorkerCommand::this_program(["worker-run"])?,
    })
}

/// A profile, and the plan that refinement ended with.
pub struct Measured {
    /// Operators.
    pub graph: OperatorGraph,
    /// The profile.
    pub profile: Profile,
    /// The refined plan.
    pub plan: Option<Plan>,
    /// Whether refinement finished.
    pub refined: Option<bool>,
    /// Whether estimates were lower bounds.
    pub lower_bounds: bool,
}

/// Does the whole job.
pub fn run(settings: &Settings, quiet: bool) -> Result<Job, CliError> {
    let options = context::prepare_options(&settings.model)?;
    let prepared = trefoil_profile::prepare_model(&settings.model.model, &options, context::stop_flag())?;
    let given = settings.plan.as_deref().map(crate::commands::plan::load_plan).transpose()?;
    let (measured, plan) = match given {
        Some(plan) if settings.profile.is_none() => (planned_only(settings, &prepared, &plan)?, plan),
        Some(plan) => (measure(settings, &prepared, quiet)?, plan),
        None => {
            let mut measured = measure(settings, &prepared, quiet)?;
            let plan = match measured.plan.take() {
                Some(plan) => plan,
                None => trefoil_plan::plan_with(
                    &settings.planning.method,
                    &request(settings, &measured),
                    &run_options(&settings.planning),
                )?,
            };
            (measured, plan)
        }
    };
    plan.check(&[&measured.graph])?;
    if settings.profile.is_some() {
        plan.check_costs(&measured.profile.index())?;
    }
    finish(settings, &prepared, measured, plan, quiet)
}

fn request<'a>(settings: &Settings, measured: &'a Measured) -> PlanRequest<'a> {
    PlanRequest {
        profile: &measured.profile,
        graph: &measured.graph,
        units: settings.units.clone(),
        objective: settings.planning.objective().into(),
        pins: settings.planning.pins.clone(),
    }
}

/// A plan without a profile: its units are all that is known.
fn planned_only(settings: &Settings, prepared: &PreparedModel, plan: &Plan) -> Result<Measured, CliError> {
    let granularity = plan.models.first().map_or(Granularity::Fused, |model| model.granularity);
    if granularity == Granularity::Backend {
        return Err(CliError::Usage(
            "a plan of granularity `backend` needs its profile, which holds the kernels; give --profile too".to_owned(),
        ));
    }
    let graph = prepared.graph(granularity, &[])?;
    let mut profile = Profile::new(trefoil_units::machine());
    let used: BTreeSet<_> =
        plan.segments.iter().map(|segment| segment.unit.clone()).chain(settings.units.iter().cloned()).collect();
    profile.units = context::resolve_units(&used.into_iter().collect::<Vec<_>>())?;
    profile.models.push(graph.clone());
    Ok(Measured { graph, profile, plan: None, refined: None, lower_bounds: true })
}

fn finish(
    settings: &Settings,
    prepared: &PreparedModel,
    measured: Measured,
    plan: Plan,
    quiet: bool,
) -> Result<Job, CliError> {
    let Measured { graph, profile, refined, lower_bounds, .. } = measured;
    let used = plan.units_used();
    if let Some(unit) = profile.units.iter().find(|unit| unit.simulated && used.contains(&unit.address)) {
        let message = format!("{} is simulated: it can be planned for but not run; see `trefoil plan`", unit.address);
        return Err(CliError::Usage(message));
    }
    let sequential = sequential_plan(settings, &profile, &graph, &plan);
    let source = PreparedSource::new(&prepared.prepared, &graph, prepared.segments_dir(graph.granularity));
    let sample_inputs = sample_inputs(prepared);
    let inputs: Vec<&HostTensor> = sample_inputs.iter().collect();

    let mut notes = plan.notes.clone();
    let mut plans: Vec<(String, Plan, bool)> = Vec::new();
    for unit in baseline_units(&profile, &graph, &plan) {
        plans.push((unit.address.to_string(), single_plan(&profile, &graph, &unit), true));
    }
    let whole = |plan: &Plan| plan.segments.len() == 1;
    if !whole(&plan) || !plans.iter().any(|(name, ..)| *name == plan.segments[0].unit.to_string()) {
        plans.push((PLAN.to_owned(), plan.clone(), false));
    }
    if let Some(sequential) =
        sequential.as_ref().filter(|sequential| !whole(sequential) && !same_placement(sequential, &plan))
    {
        plans.push((SEQUENTIAL.to_owned(), sequential.clone(), false));
    }
    let for_energy = settings.planning.objective() == crate::cli::ObjectiveArg::Energy;
    let fastest = if for_energy { fastest_plan(settings, &profile, &graph, &plan) } else { None };
    if let Some(fastest) = fastest.as_ref().filter(|fastest| !whole(fastest)) {
        plans.push((FASTEST.to_owned(), fastest.clone(), false));
    }
    let comparison = compare(settings, prepared, &profile, &plans, &source, &graph, &sample_inputs, quiet)?;
    let mut verdict = trefoil_run::guard(&comparison);
    let mut energy = None;
    if for_energy {
        let mut units: Vec<Unit> = Vec::new();
        for unit in plans.iter().flat_map(|(_, plan, _)| &plan.units) {
            if !units.iter().any(|known| known.address == unit.address) {
                units.push(unit.clone());
            }
        }
        let known = several::known_powers(&[&profile], &units)?;
        let plan_of = |name: &str| plans.iter().find(|(known, ..)| known == name).map(|(_, plan, _)| plan);
        let energies = several::of_contenders(&comparison, plan_of, &known);
        if let Some((choice, message)) = several::least_of(&comparison, &energies, known.origin) {
            notes.push(format!("planned for energy, so the latency comparison does not decide ({})", verdict.message));
            verdict.uses_plan = plans.iter().any(|(name, _, baseline)| *name == choice && !baseline);
            (verdict.choice, verdict.message) = (Some(choice), message);
        }
        notes.extend(known.notes);
        energy = Some((energies, known.origin));
    }
    let Some(choice) = verdict.choice.clone() else { return Err(CliError::Failed(verdict.message)) };
    let (_, executed, _) = plans
        .iter()
        .find(|(name, ..)| *name == choice)
        .ok_or_else(|| CliError::Failed(format!("contender `{choice}` has no plan")))?;

    let options = ExecutorOptions {
        cache: Some(compiled_cache(settings)),
        strict: settings.show.strict,
        ..ExecutorOptions::default()
    };
    let mut executor = Executor::new(executed.clone(), &[&graph], &source, &trefoil_run::registry_units, &options)?;
    executor.load(&inputs)?;
    for _ in 0..3 {
        executor.run_bound()?;
    }
    let outputs = collect_outputs(prepared, &graph, &mut executor);
    notes.extend(executor.notes().iter().cloned());
    let verification =
        settings.show.verify.then(|| verify(settings, prepared, &graph, &source, executed, &inputs)).transpose()?;
    Ok(Job {
        name: settings.name.clone(),
        sequential,
        refined,
        lower_bounds,
        comparison,
        verdict,
        trace: executor.trace(),
        memory: executor.memory().clone(),
        executed: executed.clone(),
        outputs,
        verification,
        energy,
        fastest,
        notes,
        graph,
        profile,
        plan,
    })
}

fn verify(
    settings: &Settings,
    prepared: &PreparedModel,
    graph: &OperatorGraph,
    source: &PreparedSource<'_>,
    plan: &Plan,
    inputs: &[&HostTensor],
) -> Result<Verification, CliError> {
    Ok(trefoil_run::verify(&Verify {
        plan,
        graphs: &[graph],
        source,
        find: &trefoil_run::registry_units,
        inputs,
        reference: trefoil_run::Reference::Values(&[&prepared.trace]),
        cache: Some(compiled_cache(settings)),
    })?)
}

fn compiled_cache(settings: &Settings) -> PathBuf {
    trefoil_profile::cache::compiled_path(&context::cache_dir(settings.model.cache.as_deref()))
}

#[allow(clippy::too_many_arguments)] // everything about the job, none of it grouped anywhere else
fn compare(
    settings: &Settings,
    prepared: &PreparedModel,
    profile: &Profile,
    plans: &[(String, Plan, bool)],
    source: &PreparedSource<'_>,
    graph: &OperatorGraph,
    inputs: &[HostTensor],
    quiet: bool,
) -> Result<Comparison, CliError> {
    let mut contenders = Vec::with_capacity(plans.len());
    for (name, plan, baseline) in plans {
        let segments = ExtractedSegments::of(plan, source)?.0;
        contenders.push(Contender { name: name.clone(), plan: plan.clone(), segments, baseline: *baseline });
    }
    let options = compare_options(settings)?;
    let line = ProgressLine::new(&settings.name, quiet);
    let mut show = |progress: trefoil_run::CompareProgress<'_>| {
        line.step(&format!(
            "fresh process, round {} of {}: {}",
            progress.round + 1,
            progress.rounds,
            progress.contender
        ));
    };
    // What a prediction rests on is timed again before each round, so that its error can be told apart from the machine's
    // drift.
    let plan = plans.iter().find(|(name, ..)| name == PLAN).or(plans.first()).map(|(_, plan, _)| plan);
    let measure = context::profile_options(&settings.model, &settings.measure, settings.show.strict)?;
    let mut timer = |lineup: &Lineup, turn: u32| time_lineup(lineup, graph, inputs, &options, turn);
    let mut calibrate = |round: u32| -> Result<BTreeMap<String, f64>, CliError> {
        let Some(plan) = plan.filter(|_| !profile.measurements.is_empty()) else { return Ok(BTreeMap::new()) };
        line.step(&format!("fresh process, round {}: the prediction's parts", round + 1));
        let fresh = trefoil_profile::remeasure(prepared, graph, plan, profile, &measure, round, &mut timer)?;
        let mut predictions: BTreeMap<String, f64> =
            fresh.whole.iter().filter_map(|(unit, ms)| Some((unit.to_string(), (*ms)?))).collect();
        predictions.extend(repriced(plan, &fresh).map(|ms| (PLAN.to_owned(), ms)));
        Ok(predictions)
    };
    let inputs: Vec<&HostTensor> = inputs.iter().collect();
    trefoil_run::compare_calibrated(&contenders, &[graph], &inputs, &options, &mut show, &mut calibrate)
}

/// The plan's predicted time with its segments' costs as measured anew.
fn repriced(plan: &Plan, fresh: &trefoil_profile::Remeasured) -> Option<f64> {
    if let [segment] = plan.segments.as_slice() {
        return *fresh.whole.get(&segment.unit)?;
    }
    let mut plan = plan.clone();
    for task in &mut plan.tasks {
        if let trefoil_core::Work::Segment { segment } = task.work {
            task.cost.ms = (*fresh.segments.get(segment.0 as usize)?)?;
        }
    }
    Some(trefoil_plan::simulate(&plan, &trefoil_plan::SimulationModel::default()).ok()?.makespan_ms)
}

/// Outputs in model order; one that is an input or a constant comes from the trace.
fn collect_outputs(prepared: &PreparedModel, graph: &OperatorGraph, executor: &mut Executor) -> Vec<HostTensor> {
    let infos: Vec<_> = executor.output_infos().cloned().collect();
    let mut outputs = Vec::new();
    for wanted in prepared.prepared.outputs() {
        let at = infos.iter().position(|info| info.name == wanted.name);
        let tensor = at.and_then(|index| HostTensor::from_bytes(infos[index].clone(), executor.output(index)).ok());
        outputs.extend(tensor.or_else(|| prepared.trace.load(&wanted.name)));
    }
    debug_assert!(outputs.len() >= graph.outputs.len().min(1));
    outputs
}
