//! `trefoil bench pairs`: every pair of models together, against what everybody does.

use crate::cli::BenchPairsArgs;
use crate::commands::run_several_output::speed_up;
use crate::context::{self, print, print_json, width};
use crate::error::CliError;
use crate::several::{self, BASELINES, Found, Question, Reading, Ready, candidate_units, make_ready};
use serde_json::json;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;
use trefoil_plan::{PlanOptions, PlanRequest};
use trefoil_report::{PairRow, PairsInput, Ratio, TableFormat, format, geometric_mean, pairs_csv, pairs_html};

/// A slowdown above this is worth telling as the reason of a small gain.
const SLOWED: f64 = 1.1;
/// A prediction that is off by more is worth telling, too.
const OFF: f64 = 0.1;
/// Worst pairs to tell.
const WORST: usize = 5;

/// Runs the command.
pub fn run(args: &BenchPairsArgs) -> Result<(), CliError> {
    let csv_path = args.report.as_ref().map(|path| path.with_extension("csv"));
    context::check_writable(args.report.as_deref())?;
    context::check_writable(csv_path.as_deref())?;
    context::check_distinct(&[args.report.as_deref(), csv_path.as_deref()], &args.models)?;
    let (units, baseline_units) = candidate_units(&args.units)?;
    let reading = Reading {
        shapes: &[],
        granularity: args.granularity,
        cache: args.cache.as_deref(),
        measure: &args.measure,
        strict: false,
        quiet: args.json,
    };
    let mut ready = make_ready(&args.models, &args.units, &reading)?;
    let question = Question {
        method: "auto".to_owned(),
        options: PlanOptions::default(),
        given: None,
        asked: args.units.clone(),
        units,
        baseline_units,
        items: args.items,
        arrivals: None,
        duration: Duration::ZERO,
        rounds: args.rounds,
        measure: args.measure.clone(),
        cache: context::cache_dir(args.cache.as_deref()),
        strict: false,
        quiet: args.json,
    };
    let mut pairs = Vec::new();
    let count = ready.len() * (ready.len() - 1) / 2;
    'pairs: for first in 0..ready.len() {
        for second in first + 1..ready.len() {
            let title = format!("[{}/{count}] {} + {}", pairs.len() + 1, ready[first].name, ready[second].name);
            let outcome = several::decide(&mut ready, &[first, second], &question, &title);
            // What Ctrl-C cut short counts for nothing; what was finished does.
            if context::stop_flag().load(Ordering::SeqCst) {
                break 'pairs;
            }
            pairs.push(match outcome {
                Ok(found) => row(&ready, (first, second), &question, &found),
                // One pair that fails does not keep the others from running.
                Err(error) => failed((first, second), error.to_string()),
            });
        }
    }
    let command: Vec<_> = std::env::args().skip(1).collect();
    let input = PairsInput {
        models: ready.iter().map(|model| model.name.clone()).collect(),
        notes: notes(&ready, &pairs, count),
        pairs,
        machine: trefoil_units::machine(),
        command: format!("trefoil {}", command.join(" ")),
        generated_at: trefoil_profile::now_utc(),
    };
    if let (Some(path), Some(csv)) = (&args.report, &csv_path) {
        context::write_text(path, &pairs_html(&input))?;
        context::write_text(csv, &pairs_csv(&input))?;
    }
    if args.json {
        print_json(&to_json(&input, args))?;
    } else {
        print(&describe(&input, args.report.as_deref()))?;
    }
    match input.pairs.iter().find(|pair| pair.measured.is_none()) {
        Some(pair) if input.pairs.iter().all(|pair| pair.measured.is_none()) => {
            Err(CliError::Failed(format!("no pair could be run; the first: {}", pair.reason)))
        }
        _ => Ok(()),
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
    let reason = reason(ready, models, found, &best.0, plan.as_ref().map(|plan| plan.0.as_str()), error);
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

/// Why a pair gains what it gains, from what was measured.
fn reason(
    ready: &[Ready],
    models: (usize, usize),
    found: &Found,
    baseline: &str,
    plan: Option<&str>,
    error: Option<f64>,
) -> String {
    let mut parts = Vec::new();
    match plan {
        None => parts.push(format!("planning ends with `{baseline}` or its like: nothing else promises a gain")),
        Some(plan) if found.verdict.uses_plan => {
            parts.push(format!("{plan} fills cores that `{baseline}` leaves idle"));
        }
        Some(plan) => parts.push(format!("{plan} does not beat `{baseline}` beyond noise")),
    }
    if let Some(slowdown) = &found.slowdown {
        for (model, (alone, beside)) in
            [models.0, models.1].into_iter().zip(slowdown.alone_ms.iter().zip(&slowdown.beside_ms))
        {
            if *alone > 0.0 && beside / alone > SLOWED {
                parts.push(format!("{} takes {:.2}× its time beside the other", ready[model].name, beside / alone));
            }
        }
    }
    if let Some(error) = error.filter(|error| error.abs() > OFF) {
        parts.push(format!("its prediction was off by {}", format::signed_percent(error)));
    }
    parts.join("; ")
}

fn notes(ready: &[Ready], pairs: &[PairRow], count: usize) -> Vec<String> {
    let mut notes = Vec::new();
    let measured = || pairs.iter().filter_map(|pair| pair.measured.map(|ratio| ratio.median));
    let all = measured().count();
    if all > 0 {
        let mean = |values: Option<f64>| values.map_or_else(|| format::ABSENT.to_owned(), format::ratio);
        notes.push(format!(
            "geometric mean over {}: {} planned, {} of what is used; {} strictly faster than the best baseline, {} strictly \
             slower and therefore not used",
            format::plural(all, "pair"),
            mean(geometric_mean(measured())),
            mean(geometric_mean(pairs.iter().filter_map(PairRow::effective))),
            pairs.iter().filter(|pair| pair.used && pair.measured.is_some_and(|ratio| ratio.low > 1.0)).count(),
            pairs.iter().filter(|pair| pair.measured.is_some_and(|ratio| ratio.high < 1.0)).count(),
        ));
        let mut errors: Vec<f64> = pairs.iter().filter_map(|pair| pair.error.map(f64::abs)).collect();
        errors.sort_by(f64::total_cmp);
        if let Some(median) = errors.get(errors.len() / 2) {
            notes.push(format!("median prediction error in fresh processes: {}", format::percent(*median)));
        }
    }
    let mut worst: Vec<&PairRow> = pairs.iter().filter(|pair| pair.measured.is_some()).collect();
    worst.sort_by(|one, other| {
        let of = |pair: &PairRow| pair.measured.map_or(f64::INFINITY, |ratio| ratio.median);
        of(one).total_cmp(&of(other))
    });
    for pair in worst.into_iter().take(WORST) {
        let ratio = pair.measured.map_or(0.0, |ratio| ratio.median);
        let (first, second) = (&ready[pair.models.0].name, &ready[pair.models.1].name);
        notes.push(format!("among the worst: {first} + {second} at {}: {}", format::ratio(ratio), pair.reason));
    }
    for pair in pairs.iter().filter(|pair| pair.measured.is_none()) {
        let (first, second) = (&ready[pair.models.0].name, &ready[pair.models.1].name);
        notes.push(format!("failed: {first} + {second}: {}", pair.reason));
    }
    if pairs.len() < count {
        notes.push(format!("interrupted after {} of {count} pairs", pairs.len()));
    }
    notes
}

fn describe(input: &PairsInput, report: Option<&Path>) -> String {
    let headings = [
        "models",
        "best baseline",
        ">its time (measured)",
        "plan",
        ">its time (measured)",
        "speed-up, interval",
        ">predicted",
        ">error",
        ">over serial",
        ">cap",
        "used",
    ];
    let headings: Vec<String> = headings.map(str::to_owned).to_vec();
    let absent = || format::ABSENT.to_owned();
    let rows = input.pairs.iter().map(|pair| {
        let (first, second) = (&input.models[pair.models.0], &input.models[pair.models.1]);
        let side = |side: &Option<(String, f64)>| {
            side.as_ref().map_or_else(|| [absent(), absent()], |(name, ms)| [name.clone(), format::time(*ms)])
        };
        let mut cells = vec![format!("{first} + {second}")];
        cells.extend(side(&pair.baseline));
        cells.extend(side(&pair.plan));
        cells.push(pair.measured.map_or_else(absent, |ratio| {
            format!("{} ({})", format::ratio(ratio.median), format::interval(ratio.low, ratio.high))
        }));
        cells.push(pair.predicted.map_or_else(absent, format::ratio));
        cells.push(pair.error.map_or_else(absent, format::signed_percent));
        cells.push(pair.over_serial.map_or_else(absent, format::ratio));
        cells.push(pair.cap.map_or_else(absent, format::ratio));
        cells.push(if pair.used { "yes" } else { "no" }.to_owned());
        cells.into_iter().map(|cell| (cell, pair.used)).collect()
    });
    let mut text = trefoil_report::text_table("Pairs", &headings, rows.collect()).render(TableFormat::Text, width());
    for note in &input.notes {
        let _ = writeln!(text, "{note}");
    }
    text += "cap: what any overlap could give over running one after the other, under isolated operator costs\n";
    if let Some(path) = report {
        let _ = writeln!(text, "heat map: {}, table: {}", path.display(), path.with_extension("csv").display());
    }
    text
}

fn to_json(input: &PairsInput, args: &BenchPairsArgs) -> serde_json::Value {
    let measured = || input.pairs.iter().filter_map(|pair| pair.measured.map(|ratio| ratio.median));
    json!({
        "models": input.models,
        "items": args.items,
        "pairs": input.pairs.iter().map(|pair| json!({
            "first": input.models[pair.models.0],
            "second": input.models[pair.models.1],
            "baseline": pair.baseline.as_ref().map(|side| json!({ "name": side.0, "ms": side.1 })),
            "plan": pair.plan.as_ref().map(|side| json!({ "name": side.0, "ms": side.1 })),
            "speed_up": pair.measured,
            "predicted": pair.predicted,
            "prediction_error": pair.error,
            "over_serial": pair.over_serial,
            "cap": pair.cap,
            "used": pair.used,
            "effective": pair.effective(),
            "reason": pair.reason,
        })).collect::<Vec<_>>(),
        "geometric_mean": geometric_mean(measured()),
        "geometric_mean_used": geometric_mean(input.pairs.iter().filter_map(PairRow::effective)),
        "machine": input.machine,
        "notes": input.notes,
    })
}
