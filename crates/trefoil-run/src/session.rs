//! The whole job in a few lines, for programs that use Trefoil as a library.
//!
//! ```no_run
//! use trefoil_run::Session;
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     trefoil_run::serve_if_worker(); // measuring happens in processes of their own: this very program
//!     let input = trefoil_core::HostTensor::from_f32("x", [1, 4], &[1.0, 2.0, 3.0, 4.0]);
//!     let mut session = Session::plan("model.onnx", &["openvino:CPU", "ort:CPU"])?;
//!     println!("{}", session.verdict().message);
//!     let outputs = session.run(&[&input])?;
//!     println!("{:?}", outputs[0].to_f64());
//!     Ok(())
//! }
//! ```

use crate::{
    CompareOptions, Comparison, Contender, Executor, ExecutorOptions, ExtractedSegments, MORE_ROUNDS, PreparedSource,
    RunError, RunSampling, Verdict, WorkerCommand, compare, guard, registry_units, run_worker_main, time_lineup,
};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use thiserror::Error;
use trefoil_core::cost::measurement_cost;
use trefoil_core::{
    CoreError, HostTensor, OperatorGraph, Origin, Plan, Profile, Subject, TensorInfo, Unit, UnitAddress,
};
use trefoil_plan::{PlanError, PlanOptions, PlanRequest, plan_with};
use trefoil_profile::cache::CacheUse;
use trefoil_profile::{
    Launcher, Lineup, PrepareOptions, PreparedModel, ProfileError, ProfileOptions, prepare_model, profile, refine,
    worker_main,
};
use trefoil_units::UnitError;

/// What a program is started with to measure.
const MEASURE: &str = "--trefoil-worker=measure";
/// What a program is started with to time a plan.
const RUN: &str = "--trefoil-worker=run";

/// What can go wrong before a session runs.
#[derive(Debug, Error)]
pub enum SessionError {
    /// Reading, preparing or measuring the model.
    #[error(transparent)]
    Profile(#[from] ProfileError),
    /// Planning.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Compiling, comparing or running.
    #[error(transparent)]
    Run(#[from] RunError),
    /// Units.
    #[error(transparent)]
    Unit(#[from] UnitError),
    /// An address that is none, or a profile without the model.
    #[error(transparent)]
    Core(#[from] CoreError),
    /// A unit that only plans can use.
    #[error("{unit} is simulated: it can be planned for but not run; name a real unit")]
    Simulated {
        /// The unit.
        unit: String,
    },
    /// Neither a plan nor a single unit runs the model.
    #[error("{reason}")]
    NothingRuns {
        /// What was tried and why it failed.
        reason: String,
    },
}

/// How a session is made.
#[derive(Debug, Clone)]
pub struct SessionOptions {
    /// Static shapes of inputs whose extents are symbolic.
    pub shapes: BTreeMap<String, Vec<u64>>,
    /// Folder for prepared models, measurements and compiled segments; a second session finds most of its work done.
    pub cache: PathBuf,
    /// A first look: fewer samples. Off, measuring takes minutes instead of seconds and decides closer calls.
    pub quick: bool,
    /// Most time for measuring segments whole.
    pub refine: Duration,
    /// Rounds of fresh processes in which plan and single units are timed. Where a plan leads and they are too few to be
    /// sure, up to three times as many are run; fewer than five in all never decide for a plan.
    pub rounds: u32,
    /// What a worker process is: a program, and its arguments for measuring and for timing. `None` is this very program,
    /// which then calls [`serve_if_worker`] first.
    pub workers: Option<(Launcher, WorkerCommand)>,
}

impl Default for SessionOptions {
    fn default() -> Self {
        Self {
            shapes: BTreeMap::new(),
            cache: trefoil_profile::cache::default_cache_dir(),
            quick: true,
            refine: Duration::from_mins(1),
            rounds: 5,
            workers: None,
        }
    }
}

/// Call this first in `main`: a process that was started to measure for a [`Session`] does that here and ends. In any other
/// process it does nothing.
pub fn serve_if_worker() {
    match std::env::args_os().nth(1) {
        Some(argument) if argument == MEASURE => worker_main(),
        Some(argument) if argument == RUN => {
            let code = run_worker_main();
            // An `ExitCode` cannot be asked which it is; zero is the only one that means success.
            std::process::exit(i32::from(code != std::process::ExitCode::SUCCESS));
        }
        _ => {}
    }
}

/// A model, planned for units and ready to run: measured, planned, compared with every single unit in fresh processes, and
/// compiled. What runs is the plan only if it was measured to be faster.
#[derive(Debug)]
pub struct Session {
    executor: Executor,
    verdict: Verdict,
    comparison: Comparison,
    outputs: Vec<TensorInfo>,
    constants: BTreeMap<String, HostTensor>,
}

impl Session {
    /// Plans the ONNX model at `model` for units by address (`openvino:CPU`, `ort:CPU@0`, …) with default options.
    ///
    /// # Errors
    /// [`SessionError`]; a program that does not call [`serve_if_worker`] is told so by the measuring that fails.
    pub fn plan(model: impl AsRef<Path>, units: &[&str]) -> Result<Self, SessionError> {
        Self::with(model, units, &SessionOptions::default())
    }

    /// As [`Session::plan`], with options.
    ///
    /// # Errors
    /// As [`Session::plan`].
    pub fn with(model: impl AsRef<Path>, units: &[&str], options: &SessionOptions) -> Result<Self, SessionError> {
        let addresses: Vec<UnitAddress> = units.iter().map(|unit| unit.parse()).collect::<Result<_, _>>()?;
        let units: Vec<Unit> = addresses.iter().map(trefoil_units::resolve).collect::<Result<_, _>>()?;
        if let Some(unit) = units.iter().find(|unit| unit.simulated) {
            return Err(SessionError::Simulated { unit: unit.address.to_string() });
        }
        let (launcher, command) = if let Some(workers) = &options.workers {
            workers.clone()
        } else {
            let command = WorkerCommand::this_program([RUN])?;
            (Launcher::new(command.program.clone(), vec![MEASURE.into()]), command)
        };
        // Nobody removes what this session has made before it is through.
        let _in_use = CacheUse::begin(&options.cache).ok();
        let never = AtomicBool::new(false);
        let mut reading = PrepareOptions::new(launcher.clone(), options.cache.clone());
        reading.shapes.clone_from(&options.shapes);
        let prepared = prepare_model(model.as_ref(), &reading, &never)?;
        let mut measuring = ProfileOptions::new(launcher, options.cache.clone());
        measuring.quick = options.quick;
        let mut measured = profile(&prepared, &units, &measuring, &mut |_| {}, &never)?;
        let graph = measured.model(Some(prepared.prepared.fingerprint()))?.clone();
        let mut propose = |profile: &Profile| {
            let request = PlanRequest { units: addresses.clone(), ..PlanRequest::new(profile, &graph) };
            plan_with("auto", &request, &PlanOptions { modes: true, ..PlanOptions::default() })
        };
        propose(&measured)?;
        let comparing = CompareOptions {
            rounds: options.rounds.max(1),
            most_rounds: options.rounds.max(1).saturating_mul(MORE_ROUNDS),
            sampling: if options.quick { RunSampling::QUICK } else { RunSampling::thorough(200, 2000.0) },
            cache: Some(trefoil_profile::cache::compiled_path(&options.cache)),
            spin: ExecutorOptions::default().spin,
            timeout: Duration::from_mins(10),
            command,
        };
        let inputs: Vec<HostTensor> = load(&prepared, prepared.prepared.inputs().iter());
        let given: Vec<&HostTensor> = inputs.iter().collect();
        let mut timer = |lineup: &Lineup, turn: u32| {
            time_lineup(lineup, &graph, &given, &comparing, turn)
                .map_err(|error| ProfileError::Settling { reason: error.to_string() })
        };
        let refined = refine(
            &prepared,
            &graph,
            &mut measured,
            &measuring,
            options.refine,
            &mut propose,
            Some(&mut timer),
            &mut |_| {},
            &never,
        )?;
        Self::decide(&prepared, &graph, &measured, &refined.plan, &given, &comparing)
    }

    /// Times the plan against every unit of the profile, and compiles what wins.
    fn decide(
        prepared: &PreparedModel,
        graph: &OperatorGraph,
        profile: &Profile,
        plan: &Plan,
        given: &[&HostTensor],
        comparing: &CompareOptions,
    ) -> Result<Self, SessionError> {
        let folder = prepared.segments_dir(graph.granularity);
        let source = PreparedSource::new(&prepared.prepared, graph, folder);
        let mut contenders = Vec::new();
        for unit in profile.units.iter().chain(&profile.modes) {
            let plan = alone(profile, graph, unit);
            let segments = ExtractedSegments::of(&plan, &source)?.0;
            contenders.push(Contender { name: unit.address.to_string(), plan, segments, baseline: true });
        }
        let is_one = |known: &Contender| plan.segments.len() == 1 && plan.segments[0].unit.to_string() == known.name;
        if !contenders.iter().any(is_one) {
            let segments = ExtractedSegments::of(plan, &source)?.0;
            contenders.push(Contender { name: "plan".to_owned(), plan: plan.clone(), segments, baseline: false });
        }
        let comparison = compare(&contenders, &[graph], given, comparing, &mut |_| {})?;
        let verdict = guard(&comparison);
        let chosen = contenders.iter().find(|contender| verdict.choice.as_deref() == Some(contender.name.as_str()));
        let Some(chosen) = chosen else { return Err(SessionError::NothingRuns { reason: verdict.message }) };
        let running = ExecutorOptions { cache: comparing.cache.clone(), ..ExecutorOptions::default() };
        let executor = Executor::new(chosen.plan.clone(), &[graph], &source, &registry_units, &running)?;
        let outputs = prepared.prepared.outputs();
        // An output that depends on no input is nobody's to compute: the traced run has it.
        let computed: Vec<&str> = executor.output_infos().map(|info| info.name.as_str()).collect();
        let constant = outputs.iter().filter(|info| !computed.contains(&info.name.as_str()));
        let constants: BTreeMap<String, HostTensor> =
            load(prepared, constant).into_iter().map(|tensor| (tensor.info().name.clone(), tensor)).collect();
        Ok(Self { executor, verdict, comparison, outputs, constants })
    }

    /// Runs one inference on the given tensors (by name, in any order); outputs are in the model's order.
    ///
    /// # Errors
    /// Those of [`Executor::run`].
    pub fn run(&mut self, inputs: &[&HostTensor]) -> Result<Vec<HostTensor>, RunError> {
        let mut made: Vec<HostTensor> = self.executor.run(inputs)?;
        let mut outputs = Vec::with_capacity(self.outputs.len());
        for wanted in &self.outputs {
            let tensor = match made.iter().position(|tensor| tensor.info().name == wanted.name) {
                Some(at) => made.swap_remove(at),
                None => self.constants.get(&wanted.name).map(HostTensor::duplicate).ok_or_else(|| {
                    RunError::plan(format!("neither a segment nor the traced run has the output `{}`", wanted.name))
                })?,
            };
            outputs.push(tensor);
        }
        Ok(outputs)
    }

    /// Names, types and shapes of the inputs.
    pub fn inputs(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.executor.input_infos()
    }

    /// What is used and why, in a line and in data.
    pub fn verdict(&self) -> &Verdict {
        &self.verdict
    }

    /// Times in fresh processes.
    pub fn comparison(&self) -> &Comparison {
        &self.comparison
    }

    /// The executor, for runs without copies ([`Executor::input_mut`], [`Executor::run_bound`], [`Executor::output`]).
    pub fn executor(&mut self) -> &mut Executor {
        &mut self.executor
    }
}

fn load<'a>(prepared: &PreparedModel, infos: impl Iterator<Item = &'a TensorInfo>) -> Vec<HostTensor> {
    infos.filter_map(|info| prepared.trace.load(&info.name)).collect()
}

/// The whole model on one unit, priced by its whole-model measurement.
fn alone(profile: &Profile, graph: &OperatorGraph, unit: &Unit) -> Plan {
    let subject = Subject::WholeModel { model: graph.fingerprint.clone() };
    let record = profile.index().newest(&subject, std::slice::from_ref(&unit.address));
    let (ms, ids) = record.and_then(measurement_cost).map_or((0.0, Vec::new()), |cost| (cost.ms, cost.ids));
    Plan::whole(graph, unit, ms, ids, Origin::Measured)
}
