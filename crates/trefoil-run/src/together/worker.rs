//! The body of a process that runs one arrangement: a job file in, a result file out, as [`crate::run_worker_main`] does it
//! for one model.

use super::linked::sequential_outputs;
use super::rounds::{LoopLimit, LoopReport, Rounds, closed_loop, solo_outputs};
use super::serve::{Arrivals, ServeOptions, ServeReport, Server};
use super::slowdown::{SlowdownReport, slowdown};
use super::{Arrangement, ModelInputs};
use crate::executor::{ExecutorOptions, FindUnit};
use crate::source::ExtractedSegments;
use crate::worker::write_json;
use crate::{RunError, RunRequest, RunSampling, registry_units};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use trefoil_core::{HostTensor, OperatorGraph, Timeline};
use trefoil_profile::TraceStore;
use trefoil_units::SubModel;

/// Version of job and result files; parent and worker must agree.
pub const TOGETHER_VERSION: u32 = 2;

/// What to do with an arrangement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case")]
pub enum Activity {
    /// Round after round.
    Rounds {
        /// How many.
        sampling: RunSampling,
    },
    /// Requests at fixed rates.
    Serve {
        /// By model.
        arrivals: Vec<Arrivals>,
        /// How long they arrive, in milliseconds.
        duration_ms: f64,
        /// Most requests of a model that wait.
        limit: usize,
        /// How long what waits at the end may take, in milliseconds.
        grace_ms: f64,
    },
    /// Every model alone and all at once, in turn, batch by batch: how much they slow each other down.
    Slowdown {
        /// Milliseconds for each model alone, for all of them each again and again, and for all started at one moment.
        ms: f64,
    },
}

/// What a worker process is to run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TogetherJob {
    /// [`TOGETHER_VERSION`].
    pub version: u32,
    /// How the models share the machine.
    pub arrangement: Arrangement,
    /// Graphs, in the order of the plan's models.
    pub graphs: Vec<OperatorGraph>,
    /// The plan's segments' sub-models, in order.
    pub segments: Vec<SubModel>,
    /// Per model, the folder of a tensor store that holds its inputs by name.
    pub inputs: Vec<PathBuf>,
    /// Folder for compiled blobs.
    pub cache: Option<PathBuf>,
    /// How long lanes that wait for others spin, in microseconds.
    pub spin_us: u64,
    /// What to do.
    pub activity: Activity,
    /// Whether outputs are compared with those of each model alone.
    pub verify: bool,
}

/// What a worker found.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TogetherResult {
    /// [`TOGETHER_VERSION`].
    pub version: u32,
    /// Process id.
    pub pid: u32,
    /// Milliseconds to compile and bind everything.
    pub prepare_ms: f64,
    /// Milliseconds of each counted round.
    pub samples_ms: Vec<f64>,
    /// Of [`Activity::Rounds`].
    pub rounds: Option<LoopReport>,
    /// Of [`Activity::Serve`].
    pub serve: Option<ServeReport>,
    /// Of [`Activity::Slowdown`].
    pub slowdown: Option<SlowdownReport>,
    /// What happened in the last round.
    pub trace: Option<Timeline>,
    /// Why there is nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// Body of a worker process: reads the request from standard input and serves it with the units of the registry. The `trefoil`
/// program calls it for its hidden subcommand `worker-together`.
pub fn run_together_worker_main() -> ExitCode {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        // Nobody reads the result of a worker whose parent is gone.
        let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    }
    let mut line = String::new();
    let call = std::io::stdin()
        .read_line(&mut line)
        .map_err(|error| error.to_string())
        .and_then(|_| serde_json::from_str::<RunRequest>(&line).map_err(|error| error.to_string()));
    let outcome = match call {
        Ok(call) => serve_call(&call, &registry_units),
        Err(reason) => Err(RunError::Start { what: "a worker".to_owned(), reason: format!("no request: {reason}") }),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

fn serve_call(call: &RunRequest, find: &FindUnit<'_>) -> Result<(), RunError> {
    let text = std::fs::read(&call.job).map_err(|error| RunError::io(&call.job, &error))?;
    let job: TogetherJob = serde_json::from_slice(&text)
        .map_err(|error| RunError::Io { path: call.job.clone(), reason: format!("no job: {error}") })?;
    let mut result = if job.version == TOGETHER_VERSION {
        perform(&job, find)
            .unwrap_or_else(|error| TogetherResult { failure: Some(error.to_string()), ..TogetherResult::default() })
    } else {
        let failure = format!("job version {} is not {TOGETHER_VERSION}: two builds of Trefoil are mixed", job.version);
        TogetherResult { failure: Some(failure), ..TogetherResult::default() }
    };
    result.version = TOGETHER_VERSION;
    result.pid = std::process::id();
    write_json(&call.result, &result)
}

fn perform(job: &TogetherJob, find: &FindUnit<'_>) -> Result<TogetherResult, RunError> {
    let graphs: Vec<&OperatorGraph> = job.graphs.iter().collect();
    let source = ExtractedSegments(job.segments.clone());
    let options = ExecutorOptions {
        cache: job.cache.clone(),
        spin: Duration::from_micros(job.spin_us),
        ..ExecutorOptions::default()
    };
    let inputs = load_inputs(&graphs, &job.inputs)?;
    let inputs: Vec<ModelInputs<'_>> = inputs.iter().map(|all| all.iter().collect()).collect();
    let plan = &job.arrangement.plan;
    let linked = !plan.links.is_empty();
    let reference = if linked { sequential_outputs } else { solo_outputs };
    let expected = if job.verify { Some(reference(plan, &graphs, &source, find, &options, &inputs)?) } else { None };
    let began = Instant::now();
    let never = AtomicBool::new(false);
    let mut result = TogetherResult::default();
    let prepared = |began: Instant| began.elapsed().as_secs_f64() * 1e3;
    match &job.activity {
        Activity::Rounds { sampling } => {
            let mut rounds = Rounds::new(&job.arrangement, &graphs, &source, find, &options, &inputs)?;
            result.prepare_ms = prepared(began);
            let limit = LoopLimit {
                warmup: sampling.warmup,
                rounds: u64::from(sampling.runs),
                time: Duration::from_secs_f64(sampling.cap_ms.clamp(0.0, 1e9) / 1e3),
                stop: &never,
            };
            let samples = &mut result.samples_ms;
            let report = closed_loop(&mut rounds, graphs.len(), expected.as_ref(), &limit, &mut |ms| samples.push(ms))?;
            result.rounds = Some(report);
            result.trace = Some(rounds.trace());
        }
        Activity::Serve { arrivals, duration_ms, limit, grace_ms } => {
            let mut server = if linked {
                Server::linked(plan, &graphs, &source, find, &options, &inputs)?
            } else {
                Server::new(plan, job.arrangement.ordered, &graphs, &source, find, &options, &inputs)?
            };
            result.prepare_ms = prepared(began);
            server.warm_up()?;
            let seconds = |ms: f64| Duration::from_secs_f64(ms.clamp(0.0, 1e9) / 1e3);
            let options = ServeOptions {
                duration: seconds(*duration_ms),
                limit: *limit,
                grace: seconds(*grace_ms),
                stop: &never,
            };
            result.serve = Some(server.serve(arrivals, expected.as_ref(), &options)?);
        }
        Activity::Slowdown { ms } => {
            let mut executors = super::rounds::each_alone(plan, &graphs, &source, find, &options, &inputs)?;
            result.prepare_ms = prepared(began);
            result.slowdown = Some(slowdown(&mut executors, Duration::from_secs_f64(ms.clamp(1.0, 1e6) / 1e3))?);
        }
    }
    Ok(result)
}

/// Each model's inputs from its store.
fn load_inputs(graphs: &[&OperatorGraph], stores: &[PathBuf]) -> Result<Vec<Vec<HostTensor>>, RunError> {
    let mut inputs = Vec::new();
    for (model, graph) in graphs.iter().enumerate() {
        let folder = stores.get(model).ok_or_else(|| RunError::plan(format!("model {model} has no inputs")))?;
        let store = TraceStore::open(folder)
            .map_err(|error| RunError::Io { path: folder.clone(), reason: error.to_string() })?;
        let names = graph.inputs.iter().map(|&tensor| &graph.tensor(tensor).name);
        inputs.push(names.filter_map(|name| store.load(name)).collect());
    }
    Ok(inputs)
}
