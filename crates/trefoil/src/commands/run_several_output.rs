//! What `trefoil run` prints of several models.

use super::run_several::{Ran, Run};
use crate::commands::units::unit_rows;
use crate::context::{self, width};
use crate::error::CliError;
use crate::several::{self, Candidate, Found, Question, Ready};
use serde_json::{Value, json};
use std::fmt::Write as _;
use std::path::Path;
use trefoil_core::Origin;
use trefoil_report::{
    ContenderKind, ContenderRow, ModelReport, ModelRow, Ratio, ReportInput, Table, TableFormat, format,
};
use trefoil_run::together::{Adaptation, LatencySummary};

/// Speed-up of a plan over the best baseline, from paired rounds.
pub fn speed_up(found: &Found, name: &str) -> Option<Ratio> {
    let interval = found.contest.comparison.ratio(name)?.interval;
    Some(Ratio { median: 1.0 / interval.median, low: 1.0 / interval.high, high: 1.0 / interval.low })
}

fn contender_rows(found: &Found) -> Vec<ContenderRow> {
    let contenders = found.contest.comparison.contenders.iter().map(|contender| {
        let chosen = found.verdict.choice.as_deref() == Some(contender.name.as_str());
        let kind = if contender.baseline { ContenderKind::Single } else { ContenderKind::Plan };
        let name = contender.name.clone();
        let mut row = match (&contender.measured, &contender.failure) {
            (Some(samples), _) => ContenderRow::new(name, kind, Origin::Measured, samples),
            (None, reason) => ContenderRow::failed(name, kind, reason.clone().unwrap_or_default()),
        };
        let candidate = found.candidates.iter().find(|candidate| candidate.entrant.name == contender.name);
        row.predicted_ms = predicted_ms(candidate, contender.predicted_ms);
        row.crossings = candidate.map(|candidate| candidate.entrant.arrangement.plan.crossings());
        row.ratio = if contender.baseline { None } else { speed_up(found, &contender.name) };
        row.winner = chosen;
        row
    });
    contenders.collect()
}

/// Of serving the predicted mean response, of rounds the predicted round.
fn predicted_ms(candidate: Option<&Candidate>, round_ms: f64) -> Option<f64> {
    match candidate.and_then(|candidate| candidate.served.as_ref()) {
        Some(served) => Some(served.mean_response_ms),
        None => Some(round_ms).filter(|&ms| ms > 0.0 && candidate.is_some_and(|one| one.entrant.arrangement.ordered)),
    }
}

/// Everything in tables and sentences.
pub fn describe(ready: &[Ready], question: &Question, found: &Found, run: &Run) -> String {
    let mut text = arrangements(question, found).render(TableFormat::Text, width());
    text += "\n";
    text += &by_model(ready, found).render(TableFormat::Text, width());
    if let Some((energies, origin)) = &found.energy {
        text += "\n";
        text += &energy_table(found, energies, origin).render(TableFormat::Text, width());
    }
    let _ = writeln!(text, "\n{}", found.verdict.message);
    if let Some(slowed) = &found.slowdown {
        let factors: Vec<_> = slowed.iter().map(|one| format!("{} {:.2}×", one.model, one.factor.median)).collect();
        let stored = slowed.iter().filter(|one| one.stored).map(|one| one.taken_at.as_str()).min();
        let when = stored.map_or_else(String::new, |when| format!(" on {when}"));
        let _ = writeln!(text, "slowdown one per core (measured{when}): {}", factors.join(", "));
    }
    if let Ok(chosen) = found.chosen() {
        let _ = writeln!(text, "{}", placement(ready, chosen));
    }
    text += "\n";
    text += &run_table(ready, run).render(TableFormat::Text, width());
    let _ = writeln!(text, "{}", run_line(question, run));
    let _ = writeln!(text, "verify: {}", run.equality().summary());
    for adaptation in run.adaptations.iter().flatten() {
        let _ = writeln!(text, "{}", adapted(adaptation));
    }
    for note in &found.notes {
        let _ = writeln!(text, "note: {note}");
    }
    text
}

/// `at 2.1 s: ort:CPU@0 2.0× slower than normal; planned anew in 0.1 ms, switched in 12 ms to ort:CPU@1`.
fn adapted(adaptation: &Adaptation) -> String {
    let slow = adaptation.slow.iter().map(|(unit, factor)| format!("{unit} takes {factor:.1}× its normal time"));
    let lost = adaptation.lost.iter().map(|unit| format!("{unit} failed"));
    let forgiven = adaptation.forgiven.iter().map(|unit| format!("{unit} may be fast again"));
    let why = lost.chain(slow).chain(forgiven).collect::<Vec<_>>().join(", ");
    let what = match adaptation.switch_ms {
        Some(ms) => format!("switched in {} to {}", format::time(ms), adaptation.units.join(", ")),
        None => "nothing promises to be faster".to_owned(),
    };
    let planned = format::time(adaptation.plan_ms);
    format!("adapt: at {:.1} s: {why}; planned anew in {planned}, {what}", adaptation.at_seconds)
}

/// Headings of a table.
pub fn headings(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// All arrangements with what was measured and predicted of them.
pub fn arrangements(question: &Question, found: &Found) -> Table {
    let rates = question.arrivals.is_some();
    let time = if rates { ">mean response (measured)" } else { ">round (measured)" };
    let mut names =
        vec!["arrangement", time, ">predicted", ">error", "× best baseline, interval", ">per second", "utilisation"];
    if rates {
        names.insert(5, ">deadlines missed");
    }
    let absent = || format::ABSENT.to_owned();
    let rows = contender_rows(found).into_iter().zip(&found.contest.entrants).map(|(row, entrant)| {
        let ratio = row.ratio.map_or_else(absent, |ratio| {
            format!("{} ({})", format::ratio(ratio.median), format::interval(ratio.low, ratio.high))
        });
        let error =
            row.predicted_ms.zip(row.ms).filter(|(_, ms)| *ms > 0.0).map(|(predicted, ms)| predicted / ms - 1.0);
        let busy: Vec<_> =
            entrant.utilisation.iter().map(|(unit, share)| format!("{unit} {}", format::percent(*share))).collect();
        let mut cells = vec![
            row.name.clone(),
            row.ms.map_or_else(|| row.note.clone().unwrap_or_else(absent), format::time),
            row.predicted_ms.map_or_else(absent, format::time),
            error.map_or_else(absent, format::signed_percent),
            ratio,
            if row.ms.is_some() { format!("{:.1}", entrant.per_second) } else { absent() },
            busy.join(", "),
        ];
        if rates {
            let rounds = entrant.miss_rates.len().max(1) as f64;
            cells.insert(5, format::percent(entrant.miss_rates.iter().sum::<f64>() / rounds));
        }
        cells.into_iter().map(|cell| (cell, row.winner)).collect()
    });
    trefoil_report::text_table("Arrangements", &headings(&names), rows.collect())
}

/// Joules beside times.
fn energy_table(found: &Found, energies: &[several::Energy], origin: &str) -> Table {
    let names = [
        "arrangement",
        ">round (measured)",
        &format!(">energy ({origin} watts, measured times)"),
        ">predicted",
        ">× least",
    ];
    let least = energies.iter().map(|energy| energy.joules).fold(f64::INFINITY, f64::min);
    let rows = energies.iter().map(|energy| {
        let best = found.verdict.choice.as_deref() == Some(energy.name.as_str());
        let cells = [
            energy.name.clone(),
            format::optional_time(measured_ms(found, &energy.name)),
            format::joules(energy.joules),
            energy.predicted.map_or_else(|| format::ABSENT.to_owned(), format::joules),
            format::ratio(energy.joules / least),
        ];
        cells.into_iter().map(|cell| (cell, best)).collect()
    });
    trefoil_report::text_table("Energy of a round", &headings(&names), rows.collect())
}

fn by_model(ready: &[Ready], found: &Found) -> Table {
    let names = ["model", "arrangement", ">p50", ">p95", ">p99", ">largest"];
    let mut rows = Vec::new();
    for (model, ready) in ready.iter().enumerate() {
        for entrant in &found.contest.entrants {
            let Some(summary) = entrant.models.get(model) else { continue };
            let best = found.verdict.choice.as_deref() == Some(entrant.name.as_str());
            let mut cells = vec![ready.name.clone(), entrant.name.clone()];
            cells.extend(quantiles(summary));
            rows.push(cells.into_iter().map(|cell| (cell, best)).collect());
        }
    }
    trefoil_report::text_table(
        "Response times by model (measured, medians over fresh processes)",
        &headings(&names),
        rows,
    )
}

/// Median, 95th and 99th percentile and the largest.
pub fn quantiles(summary: &LatencySummary) -> [String; 4] {
    [summary.p50_ms, summary.p95_ms, summary.p99_ms, summary.max_ms].map(format::time)
}

/// `a on ort:CPU@0; b: 12 operators on ort:CPU@1, 30 on ort:CPU`.
fn placement(ready: &[Ready], chosen: &Candidate) -> String {
    let plan = &chosen.entrant.arrangement.plan;
    let models = ready.iter().enumerate().map(|(model, ready)| {
        let segments = plan.segments.iter().filter(|segment| segment.model as usize == model);
        let parts: Vec<_> = segments
            .map(|segment| {
                if segment.operators.len() == ready.graph.len() {
                    return segment.unit.to_string();
                }
                format!("{} on {}", format::plural(segment.operators.len(), "operator"), segment.unit)
            })
            .collect();
        format!("{}: {}", ready.name, parts.join(", "))
    });
    format!("{}: {}", chosen.entrant.name, models.collect::<Vec<_>>().join("; "))
}

fn run_table(ready: &[Ready], run: &Run) -> Table {
    let rows = |cells: Vec<Vec<String>>| {
        cells.into_iter().map(|row| row.into_iter().map(|cell| (cell, false)).collect()).collect::<Vec<_>>()
    };
    match &run.ran {
        Ran::Served(serve) => {
            let names = [
                "model",
                ">arrived",
                ">answered",
                ">failed",
                ">turned away",
                ">given up",
                ">missed",
                ">p50",
                ">p95",
                ">p99",
                ">largest",
            ];
            let cells = ready.iter().zip(&serve.streams).map(|(model, stream)| {
                let counts = [
                    stream.arrived,
                    stream.completed,
                    stream.failed,
                    stream.turned_away,
                    stream.unfinished,
                    stream.missed,
                ];
                let mut row = vec![model.name.clone()];
                row.extend(counts.map(format::count));
                row.extend(quantiles(&stream.response));
                row
            });
            trefoil_report::text_table("Served (measured)", &headings(&names), rows(cells.collect()))
        }
        Ran::Rounds(rounds) => {
            let names = ["model", ">inferences", ">p50", ">p95", ">p99", ">largest"];
            let cells = ready.iter().zip(&rounds.models).map(|(model, summary)| {
                let mut row = vec![model.name.clone(), format::count(summary.count)];
                row.extend(quantiles(summary));
                row
            });
            trefoil_report::text_table("Ran (measured)", &headings(&names), rows(cells.collect()))
        }
    }
}

fn run_line(question: &Question, run: &Run) -> String {
    let (seconds, per_second, what, utilisation, resident, stopped) = match &run.ran {
        Ran::Rounds(ran) => {
            let what =
                if question.items > 1 { format!("rounds of {} each", question.items) } else { "rounds".to_owned() };
            (ran.seconds, ran.rounds_per_second, what, &ran.utilisation, ran.resident_bytes, ran.stopped)
        }
        Ran::Served(ran) => {
            let what = "responses".to_owned();
            (ran.seconds, ran.responses_per_second, what, &ran.utilisation, ran.resident_bytes, ran.stopped)
        }
    };
    let busy: Vec<_> = utilisation.iter().map(|(unit, share)| format!("{unit} {}", format::percent(*share))).collect();
    let memory = resident.map_or_else(String::new, |[before, after]| {
        format!("; memory {} at the start, {} at the end", format::bytes(before), format::bytes(after))
    });
    let stopped = if stopped { ", interrupted" } else { "" };
    format!("{per_second:.1} {what} a second over {seconds:.1} s{stopped}; busy: {}{memory}", busy.join(", "))
}

/// Writes the HTML report.
pub fn write_report(
    path: &Path,
    title: &str,
    ready: &[Ready],
    which: &[usize],
    found: &Found,
    run: &Run,
) -> Result<(), CliError> {
    let chosen = found.chosen()?;
    let graphs = several::graphs(ready, which);
    let row = ModelRow {
        model: title.to_owned(),
        operators: graphs.iter().map(|graph| graph.len()).sum(),
        distinct: graphs.iter().map(|graph| graph.distinct()).sum(),
        contenders: contender_rows(found),
    };
    let plan = &chosen.entrant.arrangement.plan;
    let mut report = ModelReport::new(row).with_plan(plan, 0, &graphs, run.trace.as_ref());
    for (model, graph) in graphs.iter().enumerate().skip(1) {
        report.segments.extend(trefoil_report::segment_rows(plan, model as u32, graph, run.trace.as_ref()));
        report.transfers.extend(trefoil_report::transfer_rows(plan, model as u32, graph, run.trace.as_ref()));
    }
    report.notes.insert(0, found.verdict.message.clone());
    report.notes.push(format!("verify: {}", run.equality().summary()));
    report.notes.push(placement(ready, chosen));
    report.notes.extend(found.notes.iter().cloned());
    let input = ReportInput {
        title: title.to_owned(),
        command: Some(context::command_line()),
        generated_at: Some(trefoil_profile::now_utc()),
        banner: None,
        machine: Some(trefoil_units::machine()),
        units: unit_rows(),
        models: vec![report],
        notes: Vec::new(),
    };
    context::write_text(path, &trefoil_report::html(&input))
}

/// Milliseconds of each baseline.
pub fn baseline_times(found: &Found) -> serde_json::Map<String, Value> {
    let baselines = found.contest.comparison.contenders.iter().filter(|contender| contender.baseline);
    baselines.map(|contender| (contender.name.clone(), json!(measured_ms(found, &contender.name)))).collect()
}

fn measured_ms(found: &Found, name: &str) -> Option<f64> {
    let contender = found.contest.comparison.contenders.iter().find(|contender| contender.name == name)?;
    contender.measured.as_ref().map(|samples| samples.median)
}

/// One arrangement as JSON.
pub fn arrangement_json(ready: &[Ready], found: &Found, candidate: &Candidate) -> Value {
    let plan = &candidate.entrant.arrangement.plan;
    let name = &candidate.entrant.name;
    let segments = plan.segments.iter().map(|segment| {
        json!({
            "model": ready[segment.model as usize].name,
            "unit": segment.unit,
            "operators": segment.operators.len(),
            "predicted_ms": segment.cost.ms,
            "origin": segment.cost.origin,
            "measurements": segment.cost.measurements,
        })
    });
    let (predicted, measured) = (predicted_ms(Some(candidate), plan.simulated_ms), measured_ms(found, name));
    let error = predicted.zip(measured).filter(|(_, ms)| *ms > 0.0).map(|(predicted, ms)| predicted / ms - 1.0);
    json!({
        "name": name,
        "method": plan.method,
        "baseline": candidate.entrant.baseline,
        "ordered": candidate.entrant.arrangement.ordered,
        "predicted_ms": predicted,
        "predicted_miss_rate": candidate.served.as_ref().map(|served| served.miss_rate),
        "measured_ms": measured,
        "prediction_error": error,
        "speed_up": speed_up(found, name).map(|ratio| json!({ "median": ratio.median, "low": ratio.low, "high": ratio.high })),
        "segments": segments.collect::<Vec<_>>(),
    })
}

/// The JSON of `run A B --json`.
pub fn to_json(ready: &[Ready], question: &Question, found: &Found, run: &Run) -> Value {
    let arrangement = |candidate: &Candidate| arrangement_json(ready, found, candidate);
    json!({
        "models": ready.iter().map(|model| json!({
            "name": model.name,
            "fingerprint": model.graph.fingerprint,
            "operators": model.graph.len(),
        })).collect::<Vec<_>>(),
        "items": question.items,
        "arrivals": question.arrivals,
        "baselines": baseline_times(found),
        "plan": found.plan().map(arrangement),
        "arrangements": found.candidates.iter().map(arrangement).collect::<Vec<_>>(),
        "slowdown": found.slowdown,
        "energy": found.energy.as_ref().map(|(energies, origin)| json!({ "watts": origin, "arrangements": energies })),
        "winner": found.verdict.choice,
        "verdict": found.verdict,
        "contest": found.contest,
        "run": match &run.ran {
            Ran::Rounds(rounds) => json!(rounds),
            Ran::Served(served) => json!(served),
        },
        "adaptations": run.adaptations,
        "repeated_rounds": run.repeated,
        "verify": { "ok": run.equality().ok(), "equality": run.equality() },
        "machine": trefoil_units::machine(),
        "notes": found.notes,
    })
}
