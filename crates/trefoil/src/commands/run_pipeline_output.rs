//! What `trefoil run` prints of a pipeline.

use super::run_pipeline::Ran;
use crate::commands::run_several_output::{arrangement_json, arrangements, baseline_times, headings, quantiles};
use crate::context::width;
use crate::error::CliError;
use crate::several::{Candidate, Found, Question};
use crate::stages::{PipelineFile, Stages};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use trefoil_core::{Plan, SpanKind, TaskId, Timeline, Work};
use trefoil_report::{Table, TableFormat, format};
use trefoil_run::together::Equality;

/// Everything there is to show.
pub struct Shown<'a> {
    /// The file.
    pub file: &'a PipelineFile,
    /// Its stages.
    pub stages: &'a Stages,
    /// What was asked.
    pub question: &'a Question,
    /// What was found.
    pub found: &'a Found,
    /// How it was run.
    pub ran: &'a Ran,
}

impl Shown<'_> {
    /// Comparison of outputs with the stages run plainly one by one.
    pub fn equality(&self) -> &Equality {
        match self.ran {
            Ran::Loop(run) => &run.equality,
            Ran::Served(run) => &run.equality,
        }
    }

    /// What happened in a typical round of the arrangement of choice, in a fresh process.
    fn trace(&self, chosen: &Candidate) -> Option<&Timeline> {
        let contenders = &self.found.contest.comparison.contenders;
        contenders.iter().find(|contender| contender.name == chosen.entrant.name)?.trace.as_ref()
    }
}

/// Times of a stage, over all its executions.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct StageTime {
    /// Milliseconds in which its segments ran.
    busy: f64,
    /// When, in milliseconds from the inference's start.
    begins: f64,
    ends: f64,
}

/// Per model, from a timeline of the plan.
fn stage_times(plan: &Plan, timeline: &Timeline) -> BTreeMap<u32, StageTime> {
    let model_of = |task: TaskId| match plan.tasks.get(task.0 as usize)?.work {
        Work::Segment { segment } => plan.segments.get(segment.0 as usize).map(|segment| segment.model),
        _ => None,
    };
    let mut times: BTreeMap<u32, StageTime> = BTreeMap::new();
    for span in timeline.lanes.iter().flat_map(|lane| &lane.spans).filter(|span| span.kind == SpanKind::Compute) {
        let Some(model) = model_of(span.task) else { continue };
        let fresh = StageTime { busy: 0.0, begins: f64::INFINITY, ends: 0.0 };
        let time = times.entry(model).or_insert(fresh);
        time.busy += span.end_ms - span.start_ms;
        time.begins = time.begins.min(span.start_ms);
        time.ends = time.ends.max(span.end_ms);
    }
    times
}

/// `ort:CPU@0`, or how many operators are where.
fn places(plan: &Plan, model: u32, operators: usize) -> String {
    let segments = plan.segments.iter().filter(|segment| segment.model == model);
    let part = |segment: &trefoil_core::Segment| {
        if segment.operators.len() == operators {
            return segment.unit.to_string();
        }
        format!("{} on {}", format::plural(segment.operators.len(), "operator"), segment.unit)
    };
    let parts: Vec<_> = segments.map(part).collect();
    let (shown, rest) = parts.split_at(parts.len().min(3));
    let more = if rest.is_empty() { String::new() } else { format!(", … ({} segments)", parts.len()) };
    shown.join(", ") + &more
}

/// Everything in tables and sentences.
pub fn describe(shown: &Shown<'_>) -> Result<String, CliError> {
    let chosen = shown.found.chosen()?;
    let mut text = arrangements(shown.question, shown.found).render(TableFormat::Text, width());
    text += "\n";
    text += &stage_table(shown, chosen).render(TableFormat::Text, width());
    let _ = writeln!(text, "\n{}", shown.found.verdict.message);
    text += "\n";
    text += &run_table(shown).render(TableFormat::Text, width());
    let _ = writeln!(text, "{}", run_line(shown.ran));
    let summary = shown.equality().summary().replace("each model alone", "the stages run plainly one after another");
    let _ = writeln!(text, "verify: {summary}");
    for note in &shown.found.notes {
        let _ = writeln!(text, "note: {note}");
    }
    Ok(text)
}

fn stage_table(shown: &Shown<'_>, chosen: &Candidate) -> Table {
    let plan = &chosen.entrant.arrangement.plan;
    let predicted = stage_times(plan, &plan.timeline);
    let measured = shown.trace(chosen).map(|trace| stage_times(plan, trace)).unwrap_or_default();
    let names = ["stage", ">executions", "where", ">predicted", ">measured", ">begins (measured)", ">ends (measured)"];
    let rows = shown.stages.ready.iter().enumerate().map(|(at, ready)| {
        let (planned, ran) = (predicted.get(&(at as u32)), measured.get(&(at as u32)));
        let cells = [
            ready.name.clone(),
            shown.stages.repeats[at].to_string(),
            places(plan, at as u32, ready.graph.len()),
            format::optional_time(planned.map(|time| time.busy)),
            format::optional_time(ran.map(|time| time.busy)),
            format::optional_time(ran.map(|time| time.begins)),
            format::optional_time(ran.map(|time| time.ends)),
        ];
        cells.into_iter().map(|cell| (cell, false)).collect()
    });
    let title = format!("Stages of {} as {} runs them (a typical inference)", shown.file.name, chosen.entrant.name);
    trefoil_report::text_table(&title, &headings(&names), rows.collect())
}

fn run_table(shown: &Shown<'_>) -> Table {
    let (names, cells): (Vec<&str>, Vec<String>) = match shown.ran {
        Ran::Loop(run) => {
            let mut cells = vec![format::count(run.rounds)];
            cells.extend(quantiles(&run.round));
            (vec![">inferences", ">p50", ">p95", ">p99", ">largest"], cells)
        }
        Ran::Served(run) => {
            let stream = run.streams.first().cloned().unwrap_or_default();
            let counts = [stream.arrived, stream.completed, stream.failed, stream.turned_away + stream.unfinished];
            let mut cells: Vec<String> = counts.map(format::count).to_vec();
            cells.push(format::count(stream.missed));
            cells.extend(quantiles(&stream.response));
            let names =
                vec![">arrived", ">answered", ">failed", ">given up", ">missed", ">p50", ">p95", ">p99", ">largest"];
            (names, cells)
        }
    };
    let row = cells.into_iter().map(|cell| (cell, false)).collect();
    trefoil_report::text_table("Ran (measured)", &headings(&names), vec![row])
}

fn run_line(ran: &Ran) -> String {
    let (seconds, per_second, utilisation, resident, stopped) = match ran {
        Ran::Loop(run) => (run.seconds, run.rounds_per_second, &run.utilisation, run.resident_bytes, run.stopped),
        Ran::Served(run) => (run.seconds, run.responses_per_second, &run.utilisation, run.resident_bytes, run.stopped),
    };
    let busy: Vec<_> = utilisation.iter().map(|(unit, share)| format!("{unit} {}", format::percent(*share))).collect();
    let memory = resident.map_or_else(String::new, |[before, after]| {
        format!("; memory {} at the start, {} at the end", format::bytes(before), format::bytes(after))
    });
    let stopped = if stopped { ", interrupted" } else { "" };
    format!("{per_second:.1} inferences a second over {seconds:.1} s{stopped}; busy: {}{memory}", busy.join(", "))
}

/// The JSON of `run PIPELINE.json --json`.
pub fn to_json(shown: &Shown<'_>) -> Result<Value, CliError> {
    let chosen = shown.found.chosen()?;
    let plan = &chosen.entrant.arrangement.plan;
    let predicted = stage_times(plan, &plan.timeline);
    let measured = shown.trace(chosen).map(|trace| stage_times(plan, trace)).unwrap_or_default();
    let stages: Vec<_> = shown.stages.ready.iter().enumerate().map(|(at, ready)| {
        let segments = plan.segments.iter().filter(|segment| segment.model as usize == at);
        let (planned, ran) = (predicted.get(&(at as u32)), measured.get(&(at as u32)));
        json!({
            "name": ready.name,
            "fingerprint": ready.graph.fingerprint,
            "operators": ready.graph.len(),
            "executions": shown.stages.repeats[at],
            "segments": segments.map(|segment| json!({ "unit": segment.unit, "operators": segment.operators.len() })).collect::<Vec<_>>(),
            "predicted_ms": planned.map(|time| time.busy),
            "measured_ms": ran.map(|time| time.busy),
            "begins_ms": ran.map(|time| time.begins),
            "ends_ms": ran.map(|time| time.ends),
        })
    }).collect();
    let name = |(stage, tensor): (usize, trefoil_core::TensorId)| {
        let ready = &shown.stages.ready[stage];
        json!([ready.name, ready.graph.tensor(tensor).name])
    };
    let links: Vec<_> =
        shown.stages.links.iter().map(|link| json!({ "from": name(link.from), "to": name(link.to) })).collect();
    let found = shown.found;
    let arrangement = |candidate: &Candidate| arrangement_json(&shown.stages.ready, found, candidate);
    Ok(json!({
        "pipeline": shown.file.name,
        "stages": stages,
        "links": links,
        "arrivals": shown.question.arrivals.as_ref().and_then(|all| all.first()),
        "baselines": baseline_times(found),
        "plan": found.plan().map(arrangement),
        "arrangements": found.candidates.iter().map(arrangement).collect::<Vec<_>>(),
        "winner": found.verdict.choice,
        "verdict": found.verdict,
        "contest": found.contest,
        "run": match shown.ran {
            Ran::Loop(run) => json!(run),
            Ran::Served(run) => json!(run),
        },
        "verify": { "ok": shown.equality().ok(), "equality": shown.equality() },
        "machine": trefoil_units::machine(),
        "notes": found.notes,
    }))
}
