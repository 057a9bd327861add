//! Arrangements against each other: each in fresh processes, interleaved, as [`crate::compare()`] does it for one model.

use super::serve::ServeReport;
use super::slowdown::SlowdownReport;
use super::worker::{Activity, TOGETHER_VERSION, TogetherJob, TogetherResult};
use super::{Arrangement, Equality, LatencySummary};
use crate::compare::{Comparison, ContenderResult, Ratio};
use crate::guard::{Reason, Verdict, guard};
use crate::process::call;
use crate::stats::median_interval;
use crate::worker::write_json;
use crate::{CompareProgress, RunError, RunRequest, WorkerCommand};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use trefoil_core::{OperatorGraph, Samples, Timeline};
use trefoil_units::SubModel;

/// Something to time.
#[derive(Debug, Clone)]
pub struct Entrant {
    /// Name in results.
    pub name: String,
    /// How the models share the machine.
    pub arrangement: Arrangement,
    /// Its plan's segments' sub-models, in order.
    pub segments: Vec<SubModel>,
    /// Whether it is one of the arrangements to beat.
    pub baseline: bool,
}

/// What a round of the contest measures.
pub type Measure = Activity;

/// How to hold a contest.
#[derive(Debug, Clone)]
pub struct ContestOptions<'a> {
    /// Rounds; in each every entrant runs in a process of its own. Six are needed for a 95 % interval, five give 94 %.
    pub rounds: u32,
    /// Folder for compiled blobs, shared by all rounds.
    pub cache: Option<PathBuf>,
    /// How long lanes that wait for others spin ([`crate::ExecutorOptions::spin`]).
    pub spin: Duration,
    /// After what time a process is given up, compiling included.
    pub timeout: Duration,
    /// What to start: a program that calls [`super::run_together_worker_main`].
    pub command: WorkerCommand,
    /// Ends the contest; rounds that were finished count.
    pub stop: &'a AtomicBool,
    /// Leave an entrant out of further rounds once it took this fraction more than the round's best baseline in each of at
    /// least two rounds, and end the contest when no plan is left. What is left out keeps its times. `None` has every entrant
    /// run in every round.
    pub give_up: Option<f64>,
}

/// What one process gave.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ProcessFigures {
    /// Rounds or responses a second.
    pub per_second: f64,
    /// By unit, the fraction of the time in which it was busy.
    pub utilisation: BTreeMap<String, f64>,
}

/// What came of one entrant, over all rounds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EntrantResult {
    /// Its name.
    pub name: String,
    /// By model, median over rounds of each figure.
    pub models: Vec<LatencySummary>,
    /// Rounds or responses a second; median over rounds.
    pub per_second: f64,
    /// By unit, the fraction of the time in which it was busy; mean over rounds.
    pub utilisation: BTreeMap<String, f64>,
    /// Of each round's process.
    #[serde(default)]
    pub processes: Vec<ProcessFigures>,
    /// Fraction of requests that missed their deadline, of each round; empty for closed loops.
    pub miss_rates: Vec<f64>,
    /// Requests that missed their deadline by model, over all rounds.
    pub missed: Vec<u64>,
    /// Comparison of outputs with each model alone (in the first round).
    pub equality: Equality,
}

/// The result of a contest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Contest {
    /// Times and ratios. A closed loop's time is a round's; that of serving is the mean response time, what was not answered
    /// counting as the whole time served.
    pub comparison: Comparison,
    /// What else was found, in the same order.
    pub entrants: Vec<EntrantResult>,
}

impl Contest {
    /// What to use. Fewer missed deadlines win, if they are fewer in most rounds; else it is what the shorter time says
    /// ([`guard`]). An entrant whose outputs differ from those of each model alone is never used.
    pub fn verdict(&self) -> Verdict {
        let (Some(plan), Some(baseline)) = (self.comparison.best_plan(), self.comparison.best_baseline()) else {
            return worded(guard(&self.comparison));
        };
        let of = |name: &str| self.entrants.iter().find(|entrant| entrant.name == name);
        if let Some(entrant) = of(&plan.name).filter(|entrant| entrant.equality.compared > 0 && !entrant.equality.ok())
        {
            return Verdict {
                choice: Some(baseline.name.clone()),
                uses_plan: false,
                reason: Reason::PlanFailed,
                message: format!("{} is used: of {}, {}", baseline.name, plan.name, entrant.equality.summary()),
            };
        }
        // The baseline with the fewest misses is the one to beat, not the one with the shortest responses.
        let misses = |entrant: &EntrantResult| entrant.miss_rates.iter().sum::<f64>();
        let running = |baseline: bool| {
            let ran = self.comparison.contenders.iter().zip(&self.entrants);
            ran.filter(move |(one, _)| one.baseline == baseline && one.failure.is_none()).map(|(_, entrant)| entrant)
        };
        let fewest = |one: &&EntrantResult, other: &&EntrantResult| misses(one).total_cmp(&misses(other));
        if let (Some(ours), Some(theirs)) = (running(false).min_by(fewest), running(true).min_by(fewest)) {
            let rounds = ours.miss_rates.len().min(theirs.miss_rates.len());
            let pairs = || ours.miss_rates.iter().zip(&theirs.miss_rates);
            let (fewer, more) = (pairs().filter(|(a, b)| a < b).count(), pairs().filter(|(a, b)| a > b).count());
            let percent = |entrant: &EntrantResult| 100.0 * misses(entrant) / entrant.miss_rates.len().max(1) as f64;
            let figures =
                format!("{:.2} % of deadlines missed, {:.2} % with {}", percent(ours), percent(theirs), theirs.name);
            if fewer * 2 > rounds {
                return Verdict {
                    choice: Some(ours.name.clone()),
                    uses_plan: true,
                    reason: Reason::PlanFaster,
                    message: format!("{}: {figures}", ours.name),
                };
            }
            if more * 2 > rounds {
                return Verdict {
                    choice: Some(theirs.name.clone()),
                    uses_plan: false,
                    reason: Reason::PlanSlower,
                    message: format!("{} is best here: {} has {figures}", theirs.name, ours.name),
                };
            }
        }
        worded(guard(&self.comparison))
    }
}

/// The guard speaks of single units, which are `alone`; arrangements are not.
fn worded(verdict: Verdict) -> Verdict {
    Verdict { message: verdict.message.replace(" alone", ""), ..verdict }
}

/// Times every entrant; `inputs` are the folders of each model's tensor store.
///
/// # Errors
/// [`RunError::Compare`] without entrants, rounds, or with equal names, [`RunError::Io`] when files cannot be written,
/// [`RunError::Start`] when processes cannot be started at all. An entrant that fails, crashes or hangs is a result.
pub fn contest(
    entrants: &[Entrant],
    graphs: &[&OperatorGraph],
    inputs: &[PathBuf],
    measure: &Measure,
    options: &ContestOptions<'_>,
    progress: &mut dyn FnMut(CompareProgress<'_>),
) -> Result<Contest, RunError> {
    let refuse = |reason: &str| Err(RunError::Compare { reason: reason.to_owned() });
    if entrants.is_empty() || options.rounds == 0 {
        return refuse("no arrangement or no round; ask for at least one of each");
    }
    if (1..entrants.len()).any(|index| entrants[..index].iter().any(|other| other.name == entrants[index].name)) {
        return refuse("two arrangements have the same name");
    }
    let folder = tempfile::Builder::new()
        .prefix("trefoil-contest-")
        .tempdir()
        .map_err(|error| RunError::io(std::env::temp_dir(), &error))?;
    let mut found: Vec<Vec<TogetherResult>> = vec![Vec::new(); entrants.len()];
    let mut failures: Vec<Option<String>> = vec![None; entrants.len()];
    let mut beaten = vec![false; entrants.len()];
    let mut held = 0;
    'rounds: for round in 0..options.rounds {
        if let Some(margin) = options.give_up.filter(|_| round >= FEWEST_ROUNDS) {
            beaten = clearly_beaten(entrants, &found, margin);
            let left = |at: usize| !entrants[at].baseline && failures[at].is_none() && !beaten[at];
            if !(0..entrants.len()).any(left) {
                break;
            }
        }
        held = round + 1;
        for place in 0..entrants.len() {
            // ABBA…, so that a machine that slows down or speeds up over time favours nobody.
            let index = if round % 2 == 0 { place } else { entrants.len() - 1 - place };
            if failures[index].is_some() || beaten[index] {
                continue;
            }
            if options.stop.load(Ordering::Relaxed) {
                break 'rounds;
            }
            let entrant = &entrants[index];
            progress(CompareProgress { round, rounds: options.rounds, contender: &entrant.name });
            // Once is enough: rounds differ in time, not in what is computed.
            let job = job_of(entrant, graphs, inputs, measure, options, round == 0);
            match perform(entrant, &job, &folder.path().join(format!("{index}-{round}")), options) {
                Ok(TogetherResult { failure: Some(reason), .. }) => failures[index] = Some(reason),
                Ok(result) if result.version != TOGETHER_VERSION => {
                    failures[index] = Some("it is another build of Trefoil".to_owned());
                }
                Ok(result) => found[index].push(result),
                // Ctrl-C reaches the workers too.
                Err(RunError::Worker { .. }) if options.stop.load(Ordering::Relaxed) => break 'rounds,
                Err(error @ RunError::Worker { .. }) => failures[index] = Some(error.to_string()),
                Err(error) => return Err(error),
            }
        }
    }
    Ok(summarise(entrants, held, &found, failures))
}

/// Rounds before anything is left out.
const FEWEST_ROUNDS: u32 = 2;

/// Which entrants took `margin` more than the best baseline of the round in every round that they ran.
fn clearly_beaten(entrants: &[Entrant], found: &[Vec<TogetherResult>], margin: f64) -> Vec<bool> {
    let rounds = found.iter().map(Vec::len).max().unwrap_or(0);
    let best = |round: usize| {
        let baselines = entrants.iter().zip(found).filter(|(entrant, _)| entrant.baseline);
        let figures = baselines.filter_map(|(_, results)| figure(results.get(round)?));
        figures.min_by(f64::total_cmp)
    };
    let best: Vec<Option<f64>> = (0..rounds).map(best).collect();
    let beaten = |results: &Vec<TogetherResult>| {
        let slower = |(result, best): (&TogetherResult, &Option<f64>)| {
            figure(result).zip(*best).is_some_and(|(ms, best)| ms > best * (1.0 + margin))
        };
        results.len() >= FEWEST_ROUNDS as usize && results.iter().zip(&best).all(slower)
    };
    found.iter().map(beaten).collect()
}

fn job_of(
    entrant: &Entrant,
    graphs: &[&OperatorGraph],
    inputs: &[PathBuf],
    activity: &Activity,
    options: &ContestOptions<'_>,
    verify: bool,
) -> TogetherJob {
    TogetherJob {
        version: TOGETHER_VERSION,
        arrangement: entrant.arrangement.clone(),
        graphs: graphs.iter().map(|graph| (*graph).clone()).collect(),
        segments: entrant.segments.clone(),
        inputs: inputs.to_vec(),
        cache: options.cache.clone(),
        spin_us: options.spin.as_micros() as u64,
        activity: activity.clone(),
        verify,
    }
}

fn perform(
    entrant: &Entrant,
    job: &TogetherJob,
    path: &Path,
    options: &ContestOptions<'_>,
) -> Result<TogetherResult, RunError> {
    let files = RunRequest { job: path.with_extension("job.json"), result: path.with_extension("result.json") };
    write_json(&files.job, job)?;
    call(&entrant.name, &files, &options.command, options.timeout)
}

/// Measures in a fresh process how much the models of an arrangement slow each other down, each on its own units. Only models
/// whose units share nothing should be asked about.
///
/// # Errors
/// [`RunError::Worker`] when the process fails, [`RunError::Io`], [`RunError::Start`].
pub fn slowdown(
    entrant: &Entrant,
    graphs: &[&OperatorGraph],
    inputs: &[PathBuf],
    ms: f64,
    options: &ContestOptions<'_>,
) -> Result<SlowdownReport, RunError> {
    let folder = tempfile::Builder::new()
        .prefix("trefoil-slowdown-")
        .tempdir()
        .map_err(|error| RunError::io(std::env::temp_dir(), &error))?;
    let job = job_of(entrant, graphs, inputs, &Activity::Slowdown { ms }, options, false);
    let result = perform(entrant, &job, &folder.path().join("slowdown"), options)?;
    result.slowdown.ok_or_else(|| RunError::Worker {
        contender: entrant.name.clone(),
        reason: result.failure.unwrap_or_else(|| "it measured no slowdown".to_owned()),
    })
}

/// The figure of one process, in milliseconds.
fn figure(result: &TogetherResult) -> Option<f64> {
    match &result.serve {
        Some(serve) => Some(serve.mean_response_ms()),
        None => median_interval(&mut result.samples_ms.clone()).map(|interval| interval.median),
    }
}

fn summarise(
    entrants: &[Entrant],
    rounds: u32,
    found: &[Vec<TogetherResult>],
    failures: Vec<Option<String>>,
) -> Contest {
    let (mut contenders, mut results) = (Vec::new(), Vec::new());
    for ((entrant, runs), failure) in entrants.iter().zip(found).zip(failures) {
        let round_medians: Vec<f64> = runs.iter().filter_map(figure).collect();
        let failure = failure.or_else(|| round_medians.is_empty().then(|| "it was not run".to_owned()));
        let measured = if failure.is_none() { Samples::from_values(&mut round_medians.clone()) } else { None };
        let predicted_ms = entrant.arrangement.plan.simulated_ms;
        let served = runs.iter().any(|run| run.serve.is_some());
        contenders.push(ContenderResult {
            name: entrant.name.clone(),
            baseline: entrant.baseline,
            predicted_ms,
            measured,
            samples: runs.iter().map(|run| run.samples_ms.len() as u64).sum(),
            prepare_ms: middle(runs.iter().map(|run| run.prepare_ms)),
            prediction_error: measured
                .filter(|measured| !served && measured.median > 0.0 && predicted_ms > 0.0)
                .map(|measured| (measured.median - predicted_ms).abs() / measured.median),
            round_predictions: Vec::new(),
            paired_error: None,
            trace: typical(runs, measured.map(|measured| measured.median)),
            round_medians,
            failure,
        });
        results.push(entrant_result(&entrant.name, runs));
    }
    let mut comparison = Comparison { rounds, contenders, ratios: Vec::new() };
    if let Some(baseline) = comparison.best_baseline() {
        let plans = comparison.contenders.iter().filter(|contender| !contender.baseline && contender.failure.is_none());
        comparison.ratios = plans.filter_map(|plan| ratio(plan, baseline)).collect();
    }
    Contest { comparison, entrants: results }
}

fn middle(values: impl Iterator<Item = f64>) -> Option<f64> {
    median_interval(&mut values.collect::<Vec<_>>()).map(|interval| interval.median)
}

/// The trace of the round that is closest to the median of all.
fn typical(runs: &[TogetherResult], median: Option<f64>) -> Option<Timeline> {
    let median = median?;
    let off = |run: &&TogetherResult| figure(run).map_or(f64::INFINITY, |ms| (ms - median).abs());
    runs.iter().min_by(|one, other| off(one).total_cmp(&off(other)))?.trace.clone()
}

/// Paired by round.
fn ratio(plan: &ContenderResult, baseline: &ContenderResult) -> Option<Ratio> {
    let pairs = plan.round_medians.iter().zip(&baseline.round_medians);
    let per_round: Vec<f64> = pairs.filter(|(_, base)| **base > 0.0).map(|(plan, base)| plan / base).collect();
    let interval = median_interval(&mut per_round.clone())?;
    Some(Ratio { of: plan.name.clone(), to: baseline.name.clone(), interval, per_round })
}

fn entrant_result(name: &str, runs: &[TogetherResult]) -> EntrantResult {
    let models_of = |run: &TogetherResult| -> Vec<LatencySummary> {
        match (&run.serve, &run.rounds) {
            (Some(serve), _) => serve.streams.iter().map(|stream| stream.response).collect(),
            (None, Some(rounds)) => rounds.models.clone(),
            (None, None) => Vec::new(),
        }
    };
    let all: Vec<Vec<LatencySummary>> = runs.iter().map(models_of).collect();
    let models = (0..all.first().map_or(0, Vec::len)).map(|model| {
        let of = |get: fn(&LatencySummary) -> f64| {
            middle(all.iter().filter_map(|run| run.get(model)).map(get)).unwrap_or(0.0)
        };
        LatencySummary {
            count: all.iter().filter_map(|run| run.get(model)).map(|summary| summary.count).sum(),
            mean_ms: of(|summary| summary.mean_ms),
            p50_ms: of(|summary| summary.p50_ms),
            p95_ms: of(|summary| summary.p95_ms),
            p99_ms: of(|summary| summary.p99_ms),
            max_ms: of(|summary| summary.max_ms),
        }
    });
    let per_second = |run: &TogetherResult| match (&run.serve, &run.rounds) {
        (Some(serve), _) => serve.responses_per_second,
        (None, Some(rounds)) => rounds.rounds_per_second,
        (None, None) => 0.0,
    };
    let utilisation_of = |run: &TogetherResult| match (&run.serve, &run.rounds) {
        (Some(serve), _) => serve.utilisation.clone(),
        (None, Some(rounds)) => rounds.utilisation.clone(),
        (None, None) => BTreeMap::new(),
    };
    let mut utilisation: BTreeMap<String, f64> = BTreeMap::new();
    for (unit, share) in runs.iter().flat_map(utilisation_of) {
        *utilisation.entry(unit).or_insert(0.0) += share / runs.len() as f64;
    }
    let mut equality = Equality::default();
    let served = runs.iter().filter_map(|run| run.serve.as_ref()).map(|serve| &serve.equality);
    for found in served.chain(runs.iter().filter_map(|run| run.rounds.as_ref()).map(|rounds| &rounds.equality)) {
        equality.merge(found);
    }
    let served: Vec<&ServeReport> = runs.iter().filter_map(|run| run.serve.as_ref()).collect();
    let mut missed: Vec<u64> = Vec::new();
    for report in &served {
        missed.resize(report.streams.len(), 0);
        missed.iter_mut().zip(&report.streams).for_each(|(sum, stream)| *sum += stream.missed);
    }
    EntrantResult {
        name: name.to_owned(),
        models: models.collect(),
        per_second: middle(runs.iter().map(per_second)).unwrap_or(0.0),
        utilisation,
        processes: runs
            .iter()
            .map(|run| ProcessFigures { per_second: per_second(run), utilisation: utilisation_of(run) })
            .collect(),
        miss_rates: served.iter().map(|report| report.miss_rate()).collect(),
        missed,
        equality,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trefoil_core::{Origin, Plan, Unit, UnitKind, UnitLimits};

    fn entrant(name: &str, baseline: bool) -> Entrant {
        let unit = Unit {
            address: "rten:CPU@0".parse().unwrap(),
            kind: UnitKind::Cpu,
            resources: [trefoil_core::Resource::Core(0)].into(),
            limits: UnitLimits::default(),
            simulated: false,
            description: None,
        };
        let graph = OperatorGraph {
            model: "m".to_owned(),
            fingerprint: "f".to_owned(),
            granularity: trefoil_core::Granularity::Fused,
            tensors: Vec::new(),
            operators: Vec::new(),
            inputs: Vec::new(),
            outputs: Vec::new(),
        };
        let plan = Plan::whole(&graph, &unit, 1.0, Vec::new(), Origin::Predicted);
        Entrant {
            name: name.to_owned(),
            arrangement: Arrangement { plan, ordered: true },
            segments: Vec::new(),
            baseline,
        }
    }

    fn rounds(times: &[f64]) -> Vec<TogetherResult> {
        times.iter().map(|&ms| TogetherResult { samples_ms: vec![ms], ..TogetherResult::default() }).collect()
    }

    #[test]
    fn only_what_loses_every_round_is_given_up() {
        let entrants = [entrant("a", true), entrant("b", true), entrant("plan", false), entrant("late", false)];
        // The baseline to beat is the best of the round, whichever that is.
        let found = [rounds(&[1.0, 1.4]), rounds(&[1.3, 1.0]), rounds(&[1.2, 1.2]), rounds(&[1.2])];
        assert_eq!(clearly_beaten(&entrants, &found, 0.15), [false, false, true, false]);
        // 1.2 is not 25 % more than 1.
        assert_eq!(clearly_beaten(&entrants, &found, 0.25), [false; 4]);
        // One round decides nothing, and the best baseline never beats itself.
        let found = [rounds(&[1.0]), rounds(&[9.0]), rounds(&[9.0]), rounds(&[9.0])];
        assert_eq!(clearly_beaten(&entrants, &found, 0.15), [false; 4]);
        let found = [rounds(&[1.0, 1.0]), rounds(&[9.0, 9.0]), rounds(&[]), rounds(&[1.0, 9.0])];
        assert_eq!(clearly_beaten(&entrants, &found, 0.15), [false, true, false, false]);
    }
}
