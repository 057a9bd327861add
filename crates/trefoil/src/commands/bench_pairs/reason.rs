//! Why a pair gains what it gains, and where its prediction was off, from what was measured.

use crate::several::{Found, Ready};
use std::collections::BTreeMap;
use trefoil_core::{Plan, SpanKind, TaskId, Timeline, Work};
use trefoil_report::format;

/// A slowdown above this is worth telling as the reason of a small gain.
const SLOWED: f64 = 1.1;
/// A prediction that is off by more is worth telling, too.
const OFF: f64 = 0.1;

/// One line. `which` are the models' indices, `error` is predicted over measured time of `plan`, less 1.
pub fn reason(
    ready: &[Ready],
    which: [usize; 2],
    found: &Found,
    baseline: &str,
    plan: Option<&str>,
    error: Option<f64>,
) -> String {
    let mut parts = Vec::new();
    let slower = plan
        .and_then(|plan| found.contest.comparison.ratio(plan))
        .is_some_and(|ratio| ratio.interval.low > 1.0 && ratio.per_round.len() > 1);
    match plan {
        None => parts.push(format!("planning ends with `{baseline}` or its like: nothing else promises a gain")),
        Some(plan) if found.verdict.uses_plan => {
            parts.push(format!("{plan} fills cores that `{baseline}` leaves idle"));
        }
        Some(plan) if slower => parts.push(format!("{plan} is slower than `{baseline}`")),
        Some(plan) => parts.push(format!("{plan} does not beat `{baseline}` beyond noise")),
    }
    for slowed in found.slowdown.iter().flatten().filter(|slowed| slowed.factor.median > SLOWED) {
        parts.push(format!("{} takes {} its time beside the other", slowed.model, format::ratio(slowed.factor.median)));
    }
    if let Some(error) = error.filter(|error| error.abs() > OFF) {
        let mut text = format!("its prediction was off by {}", format::signed_percent(error));
        let name = plan.unwrap_or(baseline);
        let contender = found.contest.comparison.contenders.iter().find(|contender| contender.name == name);
        let candidate = found.candidates.iter().find(|candidate| candidate.entrant.name == name);
        if let (Some(candidate), Some(trace)) = (candidate, contender.and_then(|contender| contender.trace.as_ref()))
            && let Some(part) = mispredicted(&candidate.entrant.arrangement.plan, trace)
        {
            text.push_str(", most of it in ");
            text.push_str(&part.describe(ready, which));
        }
        parts.push(text);
    }
    parts.join("; ")
}

/// The part of a plan whose time differs most from its prediction.
#[derive(Debug, Clone, PartialEq)]
struct Mispredicted {
    /// Model's index in the plan, number of operators, unit; `None` for time in which nothing ran.
    segment: Option<(u32, usize, String)>,
    predicted_ms: f64,
    measured_ms: f64,
}

impl Mispredicted {
    fn describe(&self, ready: &[Ready], which: [usize; 2]) -> String {
        let (predicted, measured) = (format::time(self.predicted_ms), format::time(self.measured_ms));
        let Some((model, operators, unit)) = &self.segment else {
            return format!("waiting between segments ({measured}, predicted {predicted})");
        };
        let model = which.get(*model as usize).and_then(|&at| ready.get(at));
        let (name, part) = model.map_or_else(
            || ("a model".to_owned(), String::new()),
            |model| {
                let whole = model.graph.len() == *operators;
                (model.name.clone(), if whole { String::new() } else { format!(", {operators} operators,") })
            },
        );
        format!("{name}{part} on {unit} ({measured}, predicted {predicted})")
    }
}

/// Compares the predicted timeline, which holds the slowdowns, with what happened in a typical round.
fn mispredicted(plan: &Plan, trace: &Timeline) -> Option<Mispredicted> {
    let (planned, ran) = (computing(&plan.timeline), computing(trace));
    let mut found: Vec<Mispredicted> = Vec::new();
    for (task, &(start, end)) in &ran {
        let Some(&(from, to)) = planned.get(task) else { continue };
        let described = plan.tasks.get(task.0 as usize)?;
        let Work::Segment { segment } = described.work else { continue };
        let segment = plan.segments.get(segment.0 as usize)?;
        found.push(Mispredicted {
            segment: Some((segment.model, segment.operators.len(), segment.unit.to_string())),
            predicted_ms: to - from,
            measured_ms: end - start,
        });
    }
    let idle = |spans: &BTreeMap<TaskId, (f64, f64)>| {
        let end = spans.values().map(|span| span.1).fold(0.0, f64::max);
        (end - covered(spans)).max(0.0)
    };
    found.push(Mispredicted { segment: None, predicted_ms: idle(&planned), measured_ms: idle(&ran) });
    let off = |part: &Mispredicted| (part.measured_ms - part.predicted_ms).abs();
    found.into_iter().max_by(|one, other| off(one).total_cmp(&off(other))).filter(|part| off(part) > 0.0)
}

/// Start and end of each task's computing.
fn computing(timeline: &Timeline) -> BTreeMap<TaskId, (f64, f64)> {
    let spans = timeline.lanes.iter().flat_map(|lane| &lane.spans);
    let computing = spans.filter(|span| span.kind == SpanKind::Compute);
    computing.map(|span| (span.task, (span.start_ms, span.end_ms))).collect()
}

/// Time in which at least one task computes.
fn covered(spans: &BTreeMap<TaskId, (f64, f64)>) -> f64 {
    let mut sorted: Vec<(f64, f64)> = spans.values().copied().collect();
    sorted.sort_by(|one, other| one.0.total_cmp(&other.0));
    let (mut sum, mut until) = (0.0, 0.0f64);
    for (start, end) in sorted {
        sum += (end - start.max(until)).max(0.0);
        until = until.max(end);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_work_is_counted_once() {
        let spans =
            |list: &[(f64, f64)]| list.iter().enumerate().map(|(at, &span)| (TaskId(at as u32), span)).collect();
        assert!((covered(&spans(&[(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.2, 5.4)])) - 4.0).abs() < 1e-12);
        assert!(covered(&spans(&[])).abs() < 1e-12);
    }
}
