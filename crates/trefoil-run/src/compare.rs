//! Measuring a plan against single units in fresh processes, interleaved.
//!
//! In every round each contender runs in a new process of its own; rounds alternate in order (ABBA…), so that a machine
//! that slows down or speeds up over time favours nobody. A contender's figure of a round is the median of its samples;
//! its result is the median over rounds. Two contenders are compared by their ratios within rounds, with an interval
//! that assumes no distribution ([`crate::stats`]). The best baseline is chosen by the same rounds, which errs in the
//! baselines' favour.
//!
//! A plan that leads where the rounds are too few to be sure gets more of them, and so do the baselines near it. Each look at
//! the rounds is one more chance to be wrong: with looks after 5, 10 and 15 rounds a plan that is no faster is taken for faster
//! in at most 3.1 + 1.1 + 1.8 = 6 % of cases, were its lead the same in all of them.

use crate::RunError;
use crate::guard::undecided;
use crate::stats::{Interval, median_interval};
use crate::worker::{RunJob, RunRequest, RunResult, RunSampling, WORKER_VERSION, write_json};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;
use trefoil_core::{HostTensor, OperatorGraph, Plan, Samples, Timeline};
use trefoil_profile::StoreWriter;
use trefoil_units::SubModel;

/// How many times the rounds asked for are run at most where a plan leads and more rounds would tell: the usual
/// [`CompareOptions::most_rounds`] over [`CompareOptions::rounds`].
pub const MORE_ROUNDS: u32 = 3;

/// Something to time.
#[derive(Debug, Clone)]
pub struct Contender {
    /// Name in results: a unit address for a baseline.
    pub name: String,
    /// The plan.
    pub plan: Plan,
    /// Its segments' sub-models, in order.
    pub segments: Vec<SubModel>,
    /// Whether it is a single unit that the plan has to beat.
    pub baseline: bool,
}

/// The command that runs [`crate::run_worker_main`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerCommand {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
}

impl WorkerCommand {
    /// This very program with the given arguments.
    ///
    /// # Errors
    /// [`RunError::Start`] when the operating system does not tell which file that is.
    pub fn this_program<A: Into<OsString>>(arguments: impl IntoIterator<Item = A>) -> Result<Self, RunError> {
        let program = std::env::current_exe()
            .map_err(|error| RunError::Start { what: "this program again".to_owned(), reason: error.to_string() })?;
        Ok(Self { program, arguments: arguments.into_iter().map(Into::into).collect() })
    }
}

/// How to compare.
#[derive(Debug, Clone)]
pub struct CompareOptions {
    /// Rounds. Six are needed for a 95 % interval, five give 94 %.
    pub rounds: u32,
    /// Rounds at most. Where a plan leads after [`CompareOptions::rounds`] and the guard is not sure of it, as many again are
    /// run of it and of the baselines near it ([`crate::guard::undecided`]), until it is sure or these are used up.
    pub most_rounds: u32,
    /// Samples per process.
    pub sampling: RunSampling,
    /// Folder for compiled blobs, shared by all rounds.
    pub cache: Option<PathBuf>,
    /// How long lanes that wait for others spin ([`crate::ExecutorOptions::spin`]).
    pub spin: Duration,
    /// After what time a process is given up, compiling included.
    pub timeout: Duration,
    /// What to start.
    pub command: WorkerCommand,
}

/// Told before each process starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompareProgress<'a> {
    /// Round, from 0.
    pub round: u32,
    /// Rounds in all.
    pub rounds: u32,
    /// Who is next.
    pub contender: &'a str,
}

/// What came of one contender.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ContenderResult {
    /// Its name.
    pub name: String,
    /// Whether it is a baseline.
    pub baseline: bool,
    /// What its plan predicted ([`Plan::simulated_ms`]), in milliseconds; 0 for a plan made without costs.
    pub predicted_ms: f64,
    /// Over the medians of the rounds; `None` if it failed.
    pub measured: Option<Samples>,
    /// Median of each round, in milliseconds.
    pub round_medians: Vec<f64>,
    /// Number of samples over all rounds.
    pub samples: u64,
    /// Median over rounds of the time to compile and bind, in milliseconds.
    pub prepare_ms: Option<f64>,
    /// `|measured − predicted| / measured`; `None` if it failed or nothing was predicted.
    pub prediction_error: Option<f64>,
    /// Per round that ran, what the cost model said from measurements taken right before that round, in milliseconds;
    /// empty without [`compare_calibrated`].
    #[serde(default)]
    pub round_predictions: Vec<Option<f64>>,
    /// Median over rounds of `predicted / measured − 1`, both of the same round: the cost model's own error, without the
    /// drift of the machine since the profile was taken. `None` without [`compare_calibrated`].
    #[serde(default)]
    pub paired_error: Option<f64>,
    /// What happened in the last inference of the round whose median is the median of all.
    pub trace: Option<Timeline>,
    /// Why it failed; it is left out of later rounds.
    pub failure: Option<String>,
}

/// Time of one contender over the time of the best baseline; below 1 it is faster.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// The contender.
    pub of: String,
    /// The best baseline.
    pub to: String,
    /// Median and interval over rounds.
    pub interval: Interval,
    /// The ratio of each round.
    pub per_round: Vec<f64>,
}

/// The result of a comparison.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// Rounds.
    pub rounds: u32,
    /// In the order given.
    pub contenders: Vec<ContenderResult>,
    /// One per contender that is no baseline and did not fail, if some baseline did not fail.
    pub ratios: Vec<Ratio>,
}

impl Comparison {
    /// The baseline with the smallest median, if any ran.
    pub fn best_baseline(&self) -> Option<&ContenderResult> {
        best(self.contenders.iter().filter(|contender| contender.baseline))
    }

    /// The contender that is no baseline with the smallest median, if any ran.
    pub fn best_plan(&self) -> Option<&ContenderResult> {
        best(self.contenders.iter().filter(|contender| !contender.baseline))
    }

    /// The ratio of a contender to the best baseline.
    pub fn ratio(&self, name: &str) -> Option<&Ratio> {
        self.ratios.iter().find(|ratio| ratio.of == name)
    }
}

fn best<'a>(contenders: impl Iterator<Item = &'a ContenderResult>) -> Option<&'a ContenderResult> {
    contenders
        .filter_map(|contender| contender.measured.map(|measured| (measured.median, contender)))
        .min_by(|one, other| one.0.total_cmp(&other.0))
        .map(|(_, contender)| contender)
}

/// Times every contender; `graphs` and `inputs` (by name) are the same for all.
///
/// # Errors
/// [`RunError::Compare`] without contenders, rounds or with equal names, [`RunError::Io`] when files cannot be written,
/// [`RunError::Start`] when processes cannot be started at all. A contender that fails, crashes or hangs is a result.
pub fn compare(
    contenders: &[Contender],
    graphs: &[&OperatorGraph],
    inputs: &[&HostTensor],
    options: &CompareOptions,
    progress: &mut dyn FnMut(CompareProgress<'_>),
) -> Result<Comparison, RunError> {
    compare_calibrated(contenders, graphs, inputs, options, progress, &mut |_| Ok(BTreeMap::new()))
}

/// As [`compare`], with fresh predictions: `calibrate` is called before each round and tells, by contender, what the
/// cost model predicts from measurements taken just then ([`ContenderResult::paired_error`]).
///
/// # Errors
/// As [`compare`], and the first error of `calibrate`.
pub fn compare_calibrated<E: From<RunError>>(
    contenders: &[Contender],
    graphs: &[&OperatorGraph],
    inputs: &[&HostTensor],
    options: &CompareOptions,
    progress: &mut dyn FnMut(CompareProgress<'_>),
    calibrate: &mut dyn FnMut(u32) -> Result<BTreeMap<String, f64>, E>,
) -> Result<Comparison, E> {
    let refuse = |reason: &str| Err(RunError::Compare { reason: reason.to_owned() }.into());
    if contenders.is_empty() || options.rounds == 0 {
        return refuse("no contender or no round; ask for at least one of each");
    }
    if (1..contenders.len()).any(|index| contenders[..index].iter().any(|other| other.name == contenders[index].name)) {
        return refuse("two contenders have the same name");
    }
    let folder = tempfile::Builder::new()
        .prefix("trefoil-compare-")
        .tempdir()
        .map_err(|error| RunError::io(std::env::temp_dir(), &error))?;
    let jobs = write_jobs(folder.path(), contenders, graphs, inputs, options, false)?;
    let mut found: Vec<Vec<RunResult>> = vec![Vec::new(); contenders.len()];
    let mut failures: Vec<Option<String>> = vec![None; contenders.len()];
    let mut predictions: Vec<Vec<Option<f64>>> = vec![Vec::new(); contenders.len()];
    let mut running = vec![true; contenders.len()];
    let (mut round, mut rounds) = (0, options.rounds);
    loop {
        if round == rounds {
            let so_far = summarise(contenders, rounds, &found, predictions.clone(), failures.clone());
            let further = options.most_rounds.saturating_sub(rounds).min(options.rounds);
            let near = undecided(&so_far).filter(|_| further > 0);
            let Some(near) = near else { return Ok(so_far) };
            // Who has been left out of a round stays out: ratios pair the rounds of two contenders by their place.
            for (runs, contender) in running.iter_mut().zip(contenders) {
                *runs &= near.contains(&contender.name);
            }
            let runs =
                |baseline: bool| running.iter().zip(contenders).any(|(&runs, one)| runs && one.baseline == baseline);
            if !runs(true) || !runs(false) {
                return Ok(so_far);
            }
            rounds += further;
        }
        let fresh = calibrate(round)?;
        let forward = round % 2 == 0;
        for place in 0..contenders.len() {
            let index = if forward { place } else { contenders.len() - 1 - place };
            if failures[index].is_some() || !running[index] {
                continue;
            }
            let name = &contenders[index].name;
            progress(CompareProgress { round, rounds, contender: name });
            let request =
                RunRequest { job: jobs[index].clone(), result: folder.path().join(format!("{index}.{round}.json")) };
            match run_process(name, &request, options) {
                Ok(RunResult { failure: Some(reason), .. }) => failures[index] = Some(reason),
                Ok(result) => {
                    found[index].push(result);
                    predictions[index].push(fresh.get(name).copied());
                }
                Err(error @ RunError::Worker { .. }) => failures[index] = Some(error.to_string()),
                Err(error) => return Err(error.into()),
            }
        }
        round += 1;
    }
}

/// Writes one job file per contender into `folder`; `tasks` asks for the times of tasks too.
pub(crate) fn write_jobs(
    folder: &Path,
    contenders: &[Contender],
    graphs: &[&OperatorGraph],
    inputs: &[&HostTensor],
    options: &CompareOptions,
    tasks: bool,
) -> Result<Vec<PathBuf>, RunError> {
    let store = folder.join("inputs");
    write_inputs(&store, inputs)?;
    let mut jobs = Vec::with_capacity(contenders.len());
    for (index, contender) in contenders.iter().enumerate() {
        let path = folder.join(format!("{index}.job.json"));
        let job = RunJob {
            version: WORKER_VERSION,
            plan: contender.plan.clone(),
            graphs: graphs.iter().map(|graph| (*graph).clone()).collect(),
            segments: contender.segments.clone(),
            inputs: store.clone(),
            cache: options.cache.clone(),
            spin_us: options.spin.as_micros() as u64,
            sampling: options.sampling,
            tasks,
        };
        write_json(&path, &job)?;
        jobs.push(path);
    }
    Ok(jobs)
}

fn write_inputs(store: &Path, inputs: &[&HostTensor]) -> Result<(), RunError> {
    let failed =
        |error: trefoil_profile::ProfileError| RunError::Io { path: store.to_owned(), reason: error.to_string() };
    let mut writer = StoreWriter::create(store).map_err(failed)?;
    for input in inputs {
        writer.push(input).map_err(failed)?;
    }
    writer.finish().map(|_| ()).map_err(failed)
}

/// Starts one worker, hands it the request, waits, reads the result.
pub(crate) fn run_process(name: &str, request: &RunRequest, options: &CompareOptions) -> Result<RunResult, RunError> {
    let result: RunResult = crate::process::call(name, request, &options.command, options.timeout)?;
    if result.version != WORKER_VERSION {
        let reason = "it is another build of Trefoil".to_owned();
        return Err(RunError::Worker { contender: name.to_owned(), reason });
    }
    Ok(result)
}

fn summarise(
    contenders: &[Contender],
    rounds: u32,
    found: &[Vec<RunResult>],
    predictions: Vec<Vec<Option<f64>>>,
    failures: Vec<Option<String>>,
) -> Comparison {
    let mut results = Vec::with_capacity(contenders.len());
    for (((contender, runs), round_predictions), failure) in contenders.iter().zip(found).zip(predictions).zip(failures)
    {
        let round_medians: Vec<f64> = runs
            .iter()
            .filter_map(|run| median_interval(&mut run.samples_ms.clone()).map(|interval| interval.median))
            .collect();
        let failure = failure.or_else(|| round_medians.is_empty().then(|| "no samples".to_owned()));
        let measured = if failure.is_none() { Samples::from_values(&mut round_medians.clone()) } else { None };
        let predicted_ms = contender.plan.simulated_ms;
        let trace = measured.and_then(|measured| {
            let off = |index: usize| (round_medians[index] - measured.median).abs();
            let typical = (0..runs.len()).min_by(|&one, &other| off(one).total_cmp(&off(other)))?;
            runs[typical].trace.clone()
        });
        results.push(ContenderResult {
            name: contender.name.clone(),
            baseline: contender.baseline,
            predicted_ms,
            measured,
            samples: runs.iter().map(|run| run.samples_ms.len() as u64).sum(),
            prepare_ms: median_interval(&mut runs.iter().map(|run| run.prepare_ms).collect::<Vec<_>>())
                .map(|interval| interval.median),
            prediction_error: measured
                .filter(|measured| measured.median > 0.0 && predicted_ms > 0.0)
                .map(|measured| (measured.median - predicted_ms).abs() / measured.median),
            paired_error: paired_error(&round_predictions, &round_medians),
            round_predictions,
            round_medians,
            trace,
            failure,
        });
    }
    let mut comparison = Comparison { rounds, contenders: results, ratios: Vec::new() };
    if let Some(baseline) = comparison.best_baseline() {
        let plans = comparison.contenders.iter().filter(|contender| !contender.baseline && contender.failure.is_none());
        comparison.ratios = plans.filter_map(|plan| ratio(plan, baseline)).collect();
    }
    comparison
}

/// Median over rounds of `predicted / measured − 1`.
fn paired_error(predictions: &[Option<f64>], medians: &[f64]) -> Option<f64> {
    if predictions.len() != medians.len() {
        // A round without samples would shift the pairs.
        return None;
    }
    let pairs = predictions.iter().zip(medians).filter(|(_, measured)| **measured > 0.0);
    let mut ratios: Vec<f64> = pairs.filter_map(|(predicted, measured)| Some((*predicted)? / measured - 1.0)).collect();
    median_interval(&mut ratios).map(|interval| interval.median)
}

/// Paired by round.
fn ratio(plan: &ContenderResult, baseline: &ContenderResult) -> Option<Ratio> {
    let pairs = plan.round_medians.iter().zip(&baseline.round_medians);
    let per_round: Vec<f64> =
        pairs.filter(|(_, baseline)| **baseline > 0.0).map(|(plan, baseline)| plan / baseline).collect();
    let interval = median_interval(&mut per_round.clone())?;
    Some(Ratio { of: plan.name.clone(), to: baseline.name.clone(), interval, per_round })
}
