//! What `trefoil bench pairs` prints.

use crate::cli::BenchPairsArgs;
use crate::context::width;
use crate::several::Ready;
use serde_json::json;
use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;
use trefoil_report::{PairRow, PairsInput, TableFormat, format, geometric_mean};

/// Worst pairs to tell.
const WORST: usize = 5;
/// A prediction that is off by more is told.
const OFF: f64 = 0.1;

/// `1.12× over serial (tail-cut, used), 24 s; about 22 min left`.
pub fn progress(row: &PairRow, took: Duration, left: Duration, pairs_left: u32) -> String {
    let result = match (&row.measured, &row.baseline, &row.plan) {
        (Some(ratio), Some((baseline, _)), Some((plan, _))) if plan != baseline => {
            let used = if row.used { "used" } else { "not used" };
            format!("{} over {baseline} ({plan}, {used})", format::ratio(ratio.median))
        }
        (Some(_), Some((baseline, _)), _) => format!("{baseline} is best"),
        _ => format!("failed: {}", row.reason),
    };
    let eta = match (pairs_left, left.as_secs()) {
        (0, _) => String::new(),
        (_, seconds @ 0..90) => format!("; about {seconds} s left"),
        (_, seconds) => format!("; about {} min left", seconds.div_ceil(60)),
    };
    format!("{result}, {:.1} s{eta}", took.as_secs_f64())
}

/// Sentences about all pairs.
pub fn notes(ready: &[Ready], pairs: &[PairRow], count: usize) -> Vec<String> {
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
    worst.truncate(WORST);
    for pair in &worst {
        let ratio = pair.measured.map_or(0.0, |ratio| ratio.median);
        let (first, second) = (&ready[pair.models.0].name, &ready[pair.models.1].name);
        notes.push(format!("among the worst: {first} + {second} at {}: {}", format::ratio(ratio), pair.reason));
    }
    let mut off: Vec<(&PairRow, f64)> = pairs.iter().filter_map(|pair| Some((pair, pair.error?.abs()))).collect();
    off.retain(|(pair, error)| *error > OFF && !worst.iter().any(|told| told.models == pair.models));
    off.sort_by(|one, other| other.1.total_cmp(&one.1));
    for (pair, _) in off.into_iter().take(WORST) {
        let (first, second) = (&ready[pair.models.0].name, &ready[pair.models.1].name);
        notes.push(format!("among the worst predicted: {first} + {second}: {}", pair.reason));
    }
    for pair in pairs.iter().filter(|pair| pair.measured.is_none()) {
        let (first, second) = (&ready[pair.models.0].name, &ready[pair.models.1].name);
        notes.push(format!("failed: {first} + {second}: {}", pair.reason));
    }
    if pairs.len() < count {
        notes.push(format!("so far {} of {count} pairs; the same command goes on from here", pairs.len()));
    }
    notes
}

/// Tables and sentences.
pub fn describe(input: &PairsInput, report: Option<&Path>) -> String {
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
        let beside = |extension: &str| path.with_extension(extension).display().to_string();
        let _ = writeln!(text, "heat map: {} and {}, table: {}", path.display(), beside("png"), beside("csv"));
    }
    text
}

/// The JSON of `--json`.
pub fn to_json(input: &PairsInput, args: &BenchPairsArgs) -> serde_json::Value {
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
