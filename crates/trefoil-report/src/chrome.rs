//! Timelines as a Chrome trace (Trace Event Format, JSON object form), which Perfetto and `chrome://tracing` open.
//!
//! Process 1 is the plan, process 2 the run; each lane is a thread. Times are microseconds with nanosecond digits.
//! A dependency between lanes is a flow arrow from the end of one task to the start of the other.

use crate::planned::TaskDetail;
use crate::totals::{lane_origin, timeline_origin};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use trefoil_core::{Span, SpanKind, TaskId, Timeline};

/// What a trace says about itself, and what its spans refer to.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct TraceMeta {
    /// Model or plan name.
    pub title: String,
    /// Free facts: machine, versions, command.
    pub facts: BTreeMap<String, String>,
    /// Details of the plan's tasks, in task order; may be empty.
    pub tasks: Vec<TaskDetail>,
}

#[derive(Serialize)]
struct Event {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    cat: Option<&'static str>,
    ph: &'static str,
    pid: u32,
    tid: u32,
    ts: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bp: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    args: Option<Value>,
}

/// The trace of a prediction and a run, either of which may be absent. Spans that are not finite are left out and
/// counted in `otherData`.
pub fn chrome_trace(predicted: Option<&Timeline>, measured: Option<&Timeline>, meta: &TraceMeta) -> String {
    let mut events = Vec::new();
    let mut dropped = 0;
    let mut flow = 0;
    for (pid, role, timeline) in [(1, "plan", predicted), (2, "run", measured)] {
        if let Some(timeline) = timeline {
            push_timeline(&mut events, pid, role, timeline, meta, &mut flow, &mut dropped);
        }
    }
    let rank = |event: &Event| match event.ph {
        "M" => 0,
        "X" => 1,
        _ => 2,
    };
    // Metadata first, then by time; of spans that start together the longer encloses the others.
    events.sort_by(|a, b| {
        (rank(a) > 0)
            .cmp(&(rank(b) > 0))
            .then(a.ts.total_cmp(&b.ts))
            .then(rank(a).cmp(&rank(b)))
            .then(b.dur.unwrap_or(0.0).total_cmp(&a.dur.unwrap_or(0.0)).then((a.pid, a.tid).cmp(&(b.pid, b.tid))))
    });
    let mut other = json!({ "title": meta.title, "facts": meta.facts });
    if dropped > 0 {
        other["spans without a finite time"] = json!(dropped);
    }
    // One event a line: readable, and diffs of snapshots stay small.
    let lines: Vec<_> = events.iter().map(|event| json!(event).to_string()).collect();
    format!("{{\"displayTimeUnit\":\"ms\",\"otherData\":{other},\"traceEvents\":[\n{}\n]}}\n", lines.join(",\n"))
}

fn push_timeline(
    events: &mut Vec<Event>,
    pid: u32,
    role: &str,
    timeline: &Timeline,
    meta: &TraceMeta,
    flow: &mut u32,
    dropped: &mut usize,
) {
    let metadata = |name: &str, tid: u32, args: Value| Event {
        name: name.to_owned(),
        cat: None,
        ph: "M",
        pid,
        tid,
        ts: 0.0,
        dur: None,
        id: None,
        bp: None,
        args: Some(args),
    };
    events.push(metadata("process_name", 0, json!({ "name": format!("{role} ({})", timeline_origin(timeline)) })));
    events.push(metadata("process_sort_index", 0, json!({ "sort_index": pid })));
    // First span of each task on its lane, where flows start and end.
    let mut places: BTreeMap<TaskId, (u32, f64, f64)> = BTreeMap::new();
    for (lane, tid) in timeline.lanes.iter().zip(1_u32..) {
        events.push(metadata("thread_name", tid, json!({ "name": lane.name })));
        events.push(metadata("thread_sort_index", tid, json!({ "sort_index": tid })));
        for span in &lane.spans {
            if !(span.start_ms.is_finite() && span.end_ms.is_finite()) {
                *dropped += 1;
                continue;
            }
            let (start, end) = (microseconds(span.start_ms), microseconds(span.end_ms.max(span.start_ms)));
            if span.kind != SpanKind::Wait {
                places.entry(span.task).or_insert((tid, start, end));
            }
            events.push(Event {
                name: if span.label.is_empty() { format!("task {}", span.task.0) } else { span.label.clone() },
                cat: Some(kind_name(span.kind)),
                ph: "X",
                pid,
                tid,
                ts: start,
                dur: Some(microseconds(span.end_ms.max(span.start_ms) - span.start_ms)),
                id: None,
                bp: None,
                args: Some(span_args(span, &lane.name, timeline, meta)),
            });
        }
    }
    for (&task, &(tid, start, _)) in &places {
        for before in meta.tasks.get(task.0 as usize).map_or(&[][..], |detail| &detail.after) {
            let Some(&(from_tid, from_start, from_end)) = places.get(before).filter(|place| place.0 != tid) else {
                continue;
            };
            *flow += 1;
            let arrow = |ph, tid, ts, bp| Event {
                name: "dependency".to_owned(),
                cat: Some("flow"),
                ph,
                pid,
                tid,
                ts,
                dur: None,
                id: Some(*flow),
                bp,
                args: None,
            };
            // A flow binds to the span that encloses its time: a nanosecond before the end is still inside.
            let inside = microseconds((from_end - 0.001).max(from_start) / 1e3);
            events.push(arrow("s", from_tid, inside.min(start), None));
            events.push(arrow("f", tid, start, Some("e")));
        }
    }
}

fn span_args(span: &Span, lane: &str, timeline: &Timeline, meta: &TraceMeta) -> Value {
    let mut args = json!({ "task": span.task.0, "origin": lane_origin(timeline, lane).to_string() });
    match meta.tasks.get(span.task.0 as usize) {
        Some(detail) => {
            args["segment"] = json!(detail.what);
            args["unit"] = json!(detail.unit);
            if !detail.operators.is_empty() {
                args["operators"] = json!(detail.operators);
            }
            args["cost in the plan"] = json!(detail.origin.to_string());
        }
        None => args["unit"] = json!(lane),
    }
    args
}

fn kind_name(kind: SpanKind) -> &'static str {
    match kind {
        SpanKind::Compute => "compute",
        SpanKind::Transfer => "transfer",
        SpanKind::Wait => "wait",
    }
}

/// Milliseconds to microseconds, rounded to a nanosecond.
fn microseconds(ms: f64) -> f64 {
    // Adding 0.0 turns -0.0 into 0.0.
    (ms * 1e6).round() / 1e3 + 0.0
}

/// What [`check_chrome_trace`] found wrong.
#[derive(Debug, thiserror::Error)]
pub enum TraceCheckError {
    /// Not JSON.
    #[error("trace is not JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// JSON, but not a valid trace.
    #[error("trace event {index}: {reason}")]
    Event {
        /// Index in `traceEvents`.
        index: usize,
        /// What is wrong.
        reason: String,
    },
    /// There is no array of events.
    #[error("trace has no `traceEvents` array")]
    NoEvents,
}

/// Checks a trace: required fields per phase, no negative or non-finite time, metadata before events, events sorted by
/// time, every flow with a start and an end in order. Returns the number of `X` events.
///
/// # Errors
/// [`TraceCheckError`] naming the first bad event.
pub fn check_chrome_trace(text: &str) -> Result<usize, TraceCheckError> {
    let value: Value = serde_json::from_str(text)?;
    let events = value["traceEvents"].as_array().ok_or(TraceCheckError::NoEvents)?;
    let mut last = f64::NEG_INFINITY;
    let mut complete = 0;
    let mut flows: BTreeMap<u64, (bool, bool)> = BTreeMap::new();
    for (index, event) in events.iter().enumerate() {
        let fail = |reason: String| Err(TraceCheckError::Event { index, reason });
        let Some(phase) = event["ph"].as_str() else { return fail("no `ph`".to_owned()) };
        for field in ["pid", "tid"] {
            if !event[field].is_u64() {
                return fail(format!("no `{field}`"));
            }
        }
        if event["name"].as_str().is_none_or(str::is_empty) {
            return fail("no `name`".to_owned());
        }
        if phase == "M" {
            if last.is_finite() {
                return fail("metadata after events".to_owned());
            }
            if event["args"]["name"].as_str().is_none() && !event["args"]["sort_index"].is_u64() {
                return fail("metadata without `args`".to_owned());
            }
            continue;
        }
        let Some(at) = event["ts"].as_f64().filter(|at| at.is_finite()) else { return fail("no `ts`".to_owned()) };
        if at < last {
            return fail(format!("starts at {at} after one at {last}"));
        }
        last = at;
        match phase {
            "X" => {
                if event["dur"].as_f64().is_none_or(|duration| duration < 0.0) {
                    return fail("no `dur`, or a negative one".to_owned());
                }
                if event["args"]["origin"].as_str().is_none() {
                    return fail("no origin in `args`".to_owned());
                }
                complete += 1;
            }
            "s" | "f" => {
                let Some(id) = event["id"].as_u64() else { return fail("flow without `id`".to_owned()) };
                let seen = flows.entry(id).or_default();
                match phase {
                    "s" => seen.0 = true,
                    _ if !seen.0 => return fail(format!("flow {id} ends before it starts")),
                    _ => seen.1 = true,
                }
            }
            other => return fail(format!("unknown phase `{other}`")),
        }
    }
    match flows.iter().find(|(_, seen)| **seen != (true, true)) {
        Some((id, _)) => {
            Err(TraceCheckError::Event { index: events.len(), reason: format!("flow {id} is incomplete") })
        }
        None => Ok(complete),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_refuses_bad_traces() {
        let trace = |events: &str| format!("{{\"traceEvents\":[{events}]}}");
        let span = r#"{"name":"a","ph":"X","pid":1,"tid":1,"ts":5.0,"dur":1.0,"args":{"origin":"measured"}}"#;
        assert_eq!(check_chrome_trace(&trace(span)).unwrap(), 1);
        for (bad, words) in [
            (span.replace("\"dur\":1.0,", ""), "no `dur`"),
            (span.replace("\"dur\":1.0", "\"dur\":-1.0"), "negative"),
            (span.replace("\"pid\":1,", ""), "no `pid`"),
            (format!("{span},{}", span.replace("5.0", "4.0")), "after one at 5"),
            (r#"{"name":"d","ph":"s","pid":1,"tid":1,"ts":0.0,"id":1}"#.to_owned(), "incomplete"),
        ] {
            let error = check_chrome_trace(&trace(&bad)).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        assert!(check_chrome_trace("{}").is_err() && check_chrome_trace("nonsense").is_err());
    }
}
