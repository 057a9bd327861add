//! `trefoil bench pairs`: every pair of models together, against what everybody does.

mod finished;
mod output;
mod reason;

use crate::cli::BenchPairsArgs;
use crate::commands::run_several_output::speed_up;
use crate::context::{self, print, print_json};
use crate::error::CliError;
use crate::several::{self, BASELINES, Found, Question, Reading, Ready, candidate_units, make_ready};
use finished::{FinishedPairs, Key};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use trefoil_plan::{PlanOptions, PlanRequest};
use trefoil_report::{PairRow, PairsInput, Ratio, format, pairs_csv, pairs_html, pairs_png};
use trefoil_run::RunSampling;

/// An arrangement that takes this fraction more than the best baseline in every round so far, and in two at least, is not
/// run in further rounds: five rounds would not turn that around.
const GIVE_UP: f64 = 0.15;
/// Most seconds to spend on measuring segments of one pair.
const MOST_REFINING: f64 = 20.0;

/// Where the report goes.
struct Files {
    html: PathBuf,
    csv: PathBuf,
    png: PathBuf,
}

impl Files {
    fn beside(report: &std::path::Path) -> Self {
        let with = |extension: &str| report.with_extension(extension);
        Self { html: report.to_owned(), csv: with("csv"), png: with("png") }
    }

    fn write(&self, input: &PairsInput) -> Result<(), CliError> {
        context::write_text(&self.html, &pairs_html(input))?;
        context::write_text(&self.csv, &pairs_csv(input))?;
        let picture =
            pairs_png(input).map_err(|error| CliError::Failed(format!("cannot draw the heat map: {error}")))?;
        context::write_bytes(&self.png, &picture)
    }
}

/// Runs the command.
pub fn run(args: &BenchPairsArgs) -> Result<(), CliError> {
    let files = args.report.as_deref().map(Files::beside);
    if let Some(Files { html, csv, png }) = &files {
        let outputs = [html, csv, png].map(|path| Some(path.as_path()));
        context::check_outputs(&outputs, &args.models)?;
    }
    if !args.pair_ms.is_finite() || args.pair_ms < 1.0 {
        return Err(CliError::Usage(format!("--pair-ms {} is no number of milliseconds from 1 on", args.pair_ms)));
    }
    let (units, baseline_units) = candidate_units(&args.units)?;
    let shapes = crate::shapes::of_models(&args.models, &args.shapes)?;
    let reading = Reading {
        granularity: args.granularity,
        cache: args.cache.as_deref(),
        measure: &args.measure,
        strict: false,
        quiet: args.json,
        log: true,
    };
    let mut ready = make_ready(&args.models, &shapes, &args.units, &reading)?;
    let mut measure = args.measure.clone();
    measure.cap_ms = measure.cap_ms.min(args.pair_ms);
    measure.refine_budget = measure.refine_budget.min(MOST_REFINING);
    let question = Question {
        method: "auto".to_owned(),
        options: PlanOptions::default(),
        given: None,
        asked: args.units.clone(),
        units,
        baseline_units,
        items: args.items,
        energy: false,
        arrivals: None,
        duration: Duration::ZERO,
        rounds: args.rounds,
        // As many rounds as the time allows: short ones need many, long ones have few.
        sampling: RunSampling { warmup: 20, runs: 5000, span_ms: 0.0, cap_ms: args.pair_ms },
        give_up: Some(GIVE_UP),
        measure,
        cache: context::cache_dir(args.cache.as_deref()),
        strict: false,
        quiet: args.json,
    };
    let mut bench = Bench::new(args, files, &question.cache)?;
    let names = ready.iter().map(|model| model.name.clone()).collect();
    'pairs: for first in 0..ready.len() {
        for second in first + 1..ready.len() {
            if bench.known(&ready, (first, second)) {
                continue;
            }
            let title = format!(
                "[{}/{}] {} + {}",
                bench.pairs.len() + 1,
                pair_count(&ready),
                ready[first].name,
                ready[second].name
            );
            let began = Instant::now();
            let outcome = several::decide(&mut ready, &[first, second], &question, &title);
            // What Ctrl-C cut short counts for nothing; what was finished does.
            if context::stop_flag().load(Ordering::SeqCst) {
                break 'pairs;
            }
            let row = match outcome {
                Ok(found) => row(&ready, (first, second), &question, &found),
                // One pair that fails does not keep the others from running.
                Err(error) => failed((first, second), error.to_string()),
            };
            bench.add(&ready, row, &title, began.elapsed())?;
        }
    }
    let input = bench.input(&ready, names);
    if let Some(files) = &bench.files {
        files.write(&input)?;
    }
    if args.json {
        print_json(&output::to_json(&input, args))?;
    } else {
        print(&output::describe(&input, args.report.as_deref()))?;
    }
    match input.pairs.iter().find(|pair| pair.measured.is_none()) {
        Some(pair) if input.pairs.iter().all(|pair| pair.measured.is_none()) => {
            Err(CliError::Failed(format!("no pair could be run; the first: {}", pair.reason)))
        }
        _ => Ok(()),
    }
}

/// Pairs of so many models.
fn pair_count(ready: &[Ready]) -> usize {
    ready.len() * ready.len().saturating_sub(1) / 2
}

/// Pairs that are done, and what is left.
struct Bench<'a> {
    args: &'a BenchPairsArgs,
    files: Option<Files>,
    finished: FinishedPairs,
    machine: trefoil_core::Machine,
    pairs: Vec<PairRow>,
    /// When the oldest of those taken from the cache was measured, and how many there are.
    stored: Option<(String, usize)>,
    /// Time spent on the pairs measured here.
    spent: Duration,
    measured: u32,
}

impl<'a> Bench<'a> {
    fn new(args: &'a BenchPairsArgs, files: Option<Files>, cache: &std::path::Path) -> Result<Self, CliError> {
        Ok(Self {
            args,
            files,
            finished: FinishedPairs::open(cache)?,
            machine: trefoil_units::machine(),
            pairs: Vec::new(),
            stored: None,
            spent: Duration::ZERO,
            measured: 0,
        })
    }

    fn key(&self, ready: &[Ready], models: (usize, usize)) -> Key {
        Key::new(&self.machine, &ready[models.0], &ready[models.1], self.args)
    }

    /// Takes a pair from the cache if it is there.
    fn known(&mut self, ready: &[Ready], models: (usize, usize)) -> bool {
        if self.args.measure.fresh {
            return false;
        }
        let Some(found) = self.finished.get(&self.key(ready, models)) else { return false };
        let (row, when) = (PairRow { models, ..found.row.clone() }, found.taken_at.clone());
        let (oldest, count) = self.stored.take().unwrap_or_else(|| (when.clone(), 0));
        self.stored = Some((oldest.min(when), count + 1));
        self.pairs.push(row);
        true
    }

    /// Keeps a pair, says so, and brings the report up to date.
    fn add(&mut self, ready: &[Ready], row: PairRow, title: &str, took: Duration) -> Result<(), CliError> {
        self.spent += took;
        self.measured += 1;
        if row.measured.is_some() {
            self.finished.put(self.key(ready, row.models), &row)?;
        }
        self.pairs.push(row);
        let left = pair_count(ready).saturating_sub(self.pairs.len()) as u32;
        let row = &self.pairs[self.pairs.len() - 1];
        eprintln!("{title}: {}", output::progress(row, took, self.spent / self.measured * left, left));
        if let Some(files) = &self.files {
            files.write(&self.input(ready, ready.iter().map(|model| model.name.clone()).collect()))?;
        }
        Ok(())
    }

    fn input(&self, ready: &[Ready], models: Vec<String>) -> PairsInput {
        let mut notes = output::notes(ready, &self.pairs, pair_count(ready));
        if let Some((oldest, count)) = &self.stored {
            notes.push(format!(
                "{} taken from earlier invocations, the oldest of {oldest}; --fresh measures anew",
                format::plural(*count, "pair")
            ));
        }
        PairsInput {
            models,
            notes,
            pairs: self.pairs.clone(),
            machine: self.machine.clone(),
            command: context::command_line(),
            generated_at: trefoil_profile::now_utc(),
        }
    }
}

fn failed(models: (usize, usize), reason: String) -> PairRow {
    PairRow {
        models,
        baseline: None,
        plan: None,
        measured: None,
        predicted: None,
        error: None,
        cap: None,
        over_serial: None,
        used: false,
        reason,
    }
}

fn row(ready: &[Ready], models: (usize, usize), question: &Question, found: &Found) -> PairRow {
    let comparison = &found.contest.comparison;
    let Some(baseline) = comparison.best_baseline() else { return failed(models, found.verdict.message.clone()) };
    let ms = |name: &str| {
        let contender = comparison.contenders.iter().find(|contender| contender.name == name)?;
        contender.measured.as_ref().map(|samples| samples.median)
    };
    let best = (baseline.name.clone(), ms(&baseline.name).unwrap_or(0.0));
    let plan = comparison.best_plan().map(|plan| (plan.name.clone(), ms(&plan.name).unwrap_or(0.0)));
    // Where planning ends with a baseline the plan is that baseline, or whichever of them is best.
    let measured = match &plan {
        Some((name, _)) => speed_up(found, name),
        None => Some(Ratio { median: 1.0, low: 1.0, high: 1.0 }),
    };
    let predicted_of = |name: &str| {
        let candidate = found.candidates.iter().find(|candidate| candidate.entrant.name == name)?;
        Some(candidate.entrant.arrangement.plan.simulated_ms).filter(|&ms| ms > 0.0)
    };
    let predicted_best = BASELINES.iter().filter_map(|name| predicted_of(name)).fold(f64::INFINITY, f64::min);
    let predicted = match &plan {
        Some((name, _)) => predicted_of(name).map(|ms| predicted_best / ms).filter(|ratio| ratio.is_finite()),
        None => Some(1.0),
    };
    let (name, plan_ms) = plan.as_ref().unwrap_or(&best);
    let error = predicted_of(name).filter(|_| *plan_ms > 0.0).map(|predicted| predicted / plan_ms - 1.0);
    let request = |model: usize| PlanRequest {
        units: question.asked.clone(),
        ..PlanRequest::new(&ready[model].profile, &ready[model].graph)
    };
    let cap = trefoil_plan::pair_cap_of(&request(models.0), &request(models.1)).ok().map(|cap| cap.speedup);
    let over_serial = ms(BASELINES[0]).filter(|_| *plan_ms > 0.0).map(|serial| serial / plan_ms);
    let reason =
        reason::reason(ready, [models.0, models.1], found, &best.0, plan.as_ref().map(|plan| plan.0.as_str()), error);
    PairRow {
        models,
        used: found.verdict.uses_plan,
        measured,
        predicted,
        error,
        cap,
        over_serial,
        reason,
        plan: Some(plan.unwrap_or_else(|| best.clone())),
        baseline: Some(best),
    }
}
