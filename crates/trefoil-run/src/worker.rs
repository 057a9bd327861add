//! Timing one plan in a process of its own.
//!
//! The parent writes a job file (plan, graphs, extracted segments, inputs, sampling), starts the process, and writes one
//! line of JSON to its standard input: `{"job":"…/plan.json","result":"…/plan.3.json"}`. The process answers by writing
//! the result file (under a temporary name, then renamed) and exits with 0, also when the plan fails: then the result
//! says why. What libraries print is nobody's business: standard output is not used.

use crate::executor::{Executor, ExecutorOptions, FindUnit, MemoryReport};
use crate::source::ExtractedSegments;
use crate::{RunError, registry_units};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use trefoil_core::{HostTensor, OperatorGraph, Plan, Timeline};
use trefoil_profile::TraceStore;
use trefoil_units::SubModel;

/// Version of job and result files; parent and worker must agree.
pub const WORKER_VERSION: u32 = 2;

/// Most samples that [`RunSampling::span_ms`] asks for.
const MOST_SAMPLES: usize = 20_000;

/// How often a plan is run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct RunSampling {
    /// Inferences before the first sample; at least one, and fewer if they alone would take a third of the cap.
    pub warmup: u32,
    /// Samples, at least.
    pub runs: u32,
    /// More samples until they span so many milliseconds, and a third of that before the first one: the speed of a shared
    /// machine changes within tens of milliseconds, so a thousand samples of one such moment tell less than a few of many.
    #[serde(default)]
    pub span_ms: f64,
    /// Wall-clock cap of warm-up and samples in milliseconds; at least three samples are taken whatever it says.
    pub cap_ms: f64,
}

impl RunSampling {
    /// A first look.
    pub const QUICK: Self = Self { warmup: 5, runs: 40, span_ms: 150.0, cap_ms: 600.0 };

    /// What decides: at least `runs` samples within `cap_ms` (a second if that is less).
    pub fn thorough(runs: u32, cap_ms: f64) -> Self {
        Self { warmup: 20, runs, span_ms: 300.0, cap_ms: cap_ms.max(1000.0) }
    }
}

impl Default for RunSampling {
    fn default() -> Self {
        Self { warmup: 5, runs: 30, span_ms: 0.0, cap_ms: 3000.0 }
    }
}

/// What a worker process is to run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RunJob {
    /// [`WORKER_VERSION`].
    pub version: u32,
    /// The plan.
    pub plan: Plan,
    /// Its graphs, in the order of [`Plan::models`].
    pub graphs: Vec<OperatorGraph>,
    /// Its segments' sub-models, in order.
    pub segments: Vec<SubModel>,
    /// Folder of a tensor store holding the inputs by name.
    pub inputs: PathBuf,
    /// Folder for compiled blobs.
    pub cache: Option<PathBuf>,
    /// How long lanes that wait for others spin, in microseconds.
    pub spin_us: u64,
    /// Samples.
    pub sampling: RunSampling,
    /// Whether to tell the times of tasks too ([`RunResult::task_samples_ms`]).
    #[serde(default)]
    pub tasks: bool,
}

/// The line on a worker's standard input.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RunRequest {
    /// File of the [`RunJob`].
    pub job: PathBuf,
    /// File to write the [`RunResult`] to.
    pub result: PathBuf,
}

/// What a worker found.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct RunResult {
    /// [`WORKER_VERSION`].
    pub version: u32,
    /// Process id.
    pub pid: u32,
    /// Milliseconds of each timed inference, inputs in place to outputs in place.
    pub samples_ms: Vec<f64>,
    /// Per task, in the schedule's order, its milliseconds in each timed inference, if the job asked for them: the first
    /// task's begin with the caller's request, the last one's end when the caller has the result.
    #[serde(default)]
    pub task_samples_ms: Vec<Vec<f64>>,
    /// Milliseconds to compile and bind everything.
    pub prepare_ms: f64,
    /// Milliseconds of the very first inference.
    pub first_ms: f64,
    /// What happened in the last inference.
    pub trace: Option<Timeline>,
    /// Arena bytes, with and without reuse.
    pub arena_bytes: (u64, u64),
    /// Why there are no samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}

/// Body of a worker process: reads the request from standard input and serves it with the units of the registry.
/// The `trefoil` program calls it for its hidden subcommand `worker-run`.
pub fn run_worker_main() -> ExitCode {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    {
        // Nobody reads the result of a worker whose parent is gone.
        let _ = rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL));
    }
    let mut line = String::new();
    let request = std::io::stdin()
        .read_line(&mut line)
        .map_err(|error| error.to_string())
        .and_then(|_| serde_json::from_str::<RunRequest>(&line).map_err(|error| error.to_string()));
    let outcome = match request {
        Ok(request) => serve(&request, &registry_units),
        Err(reason) => {
            Err(RunError::Start { what: "a run worker".to_owned(), reason: format!("no request: {reason}") })
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

/// Serves one request with the given units.
///
/// # Errors
/// [`RunError::Io`] when the job cannot be read or the result not written; a plan that fails is a result.
pub fn serve(request: &RunRequest, find: &FindUnit<'_>) -> Result<(), RunError> {
    let text = std::fs::read(&request.job).map_err(|error| RunError::io(&request.job, &error))?;
    let job: RunJob = serde_json::from_slice(&text)
        .map_err(|error| RunError::Io { path: request.job.clone(), reason: format!("no run job: {error}") })?;
    let mut result = if job.version == WORKER_VERSION {
        time_plan(job, find)
            .unwrap_or_else(|error| RunResult { failure: Some(error.to_string()), ..RunResult::default() })
    } else {
        let failure = format!("job version {} is not {WORKER_VERSION}: two builds of Trefoil are mixed", job.version);
        RunResult { failure: Some(failure), ..RunResult::default() }
    };
    result.version = WORKER_VERSION;
    result.pid = std::process::id();
    write_json(&request.result, &result)
}

/// Writes JSON under a temporary name, then renames.
pub(crate) fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<(), RunError> {
    let text =
        serde_json::to_vec(value).map_err(|error| RunError::Io { path: path.to_owned(), reason: error.to_string() })?;
    let temporary = path.with_extension(format!("tmp{}", std::process::id()));
    let written = std::fs::write(&temporary, text).and_then(|()| std::fs::rename(&temporary, path));
    written.map_err(|error| {
        let _ = std::fs::remove_file(&temporary);
        RunError::io(path, &error)
    })
}

fn time_plan(job: RunJob, find: &FindUnit<'_>) -> Result<RunResult, RunError> {
    let graphs: Vec<&OperatorGraph> = job.graphs.iter().collect();
    let options = ExecutorOptions {
        cache: job.cache.clone(),
        spin: Duration::from_micros(job.spin_us),
        ..ExecutorOptions::default()
    };
    let began = Instant::now();
    let mut executor = Executor::new(job.plan, &graphs, &ExtractedSegments(job.segments), find, &options)?;
    let prepare_ms = milliseconds(began);
    let store = TraceStore::open(&job.inputs)
        .map_err(|error| RunError::Io { path: job.inputs.clone(), reason: error.to_string() })?;
    let given: Vec<HostTensor> = store.names().filter_map(|name| store.load(name)).collect();
    executor.load(&given.iter().collect::<Vec<_>>())?;
    let mut task_samples_ms: Vec<Vec<f64>> = Vec::new();
    let (first_ms, samples_ms) = sample_with(&mut executor, job.sampling, &mut |executor, total_ms| {
        if job.tasks {
            let times = executor.timings();
            task_samples_ms.resize(times.len(), Vec::new());
            let last = times.len().saturating_sub(1);
            for (index, (time, samples)) in times.iter().zip(&mut task_samples_ms).enumerate() {
                let start = if index == 0 { 0.0 } else { time.start_ms };
                let end = if index == last { total_ms.max(time.end_ms) } else { time.end_ms };
                samples.push(end - start);
            }
        }
    })?;
    let MemoryReport { arena_bytes, bytes_without_reuse, .. } = *executor.memory();
    Ok(RunResult {
        samples_ms,
        task_samples_ms,
        prepare_ms,
        first_ms,
        trace: Some(executor.trace()),
        arena_bytes: (arena_bytes as u64, bytes_without_reuse as u64),
        ..RunResult::default()
    })
}

/// Warms up and times; returns the first inference's time and the samples.
///
/// # Errors
/// Those of [`Executor::run_bound`].
pub fn sample(executor: &mut Executor, sampling: RunSampling) -> Result<(f64, Vec<f64>), RunError> {
    sample_with(executor, sampling, &mut |_, _| {})
}

/// As [`sample`]; after each sample `look` may see the executor and the sample's milliseconds.
fn sample_with(
    executor: &mut Executor,
    sampling: RunSampling,
    look: &mut dyn FnMut(&Executor, f64),
) -> Result<(f64, Vec<f64>), RunError> {
    fn once(executor: &mut Executor) -> Result<f64, RunError> {
        let began = Instant::now();
        executor.run_bound()?;
        Ok(milliseconds(began))
    }
    let began = Instant::now();
    let first_ms = once(executor)?;
    let mut warm = 1;
    while (warm < sampling.warmup || milliseconds(began) < sampling.span_ms / 3.0)
        && milliseconds(began) <= sampling.cap_ms / 3.0
    {
        once(executor)?;
        warm += 1;
    }
    let mut samples = Vec::with_capacity(sampling.runs as usize);
    let first = Instant::now();
    while samples.len() < sampling.runs.max(1) as usize
        || (milliseconds(first) < sampling.span_ms && samples.len() < MOST_SAMPLES)
    {
        if samples.len() >= 3 && milliseconds(began) > sampling.cap_ms {
            break;
        }
        let sample = once(executor)?;
        look(executor, sample);
        samples.push(sample);
    }
    Ok((first_ms, samples))
}

fn milliseconds(began: Instant) -> f64 {
    began.elapsed().as_secs_f64() * 1e3
}
