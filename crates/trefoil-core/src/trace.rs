//! Timelines: a plan's predicted lanes and a run's real ones, in one shape.

use crate::{Origin, TaskId};
use serde::{Deserialize, Serialize};

/// What a span is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SpanKind {
    /// A segment or block computing.
    Compute,
    /// A tensor made available to another unit.
    Transfer,
    /// Waiting for another lane, where somebody recorded it.
    Wait,
}

/// One thing a lane did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// The plan's task.
    pub task: TaskId,
    /// Human-readable label.
    pub label: String,
    /// Kind.
    pub kind: SpanKind,
    /// Start in milliseconds from the timeline's origin.
    pub start_ms: f64,
    /// End in milliseconds.
    pub end_ms: f64,
}

/// Everything one unit did, by start time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Lane {
    /// Unit address or lane name.
    pub name: String,
    /// Spans, ascending by start.
    pub spans: Vec<Span>,
}

/// Lanes on one time axis. A **trace** is a timeline whose origin is [`Origin::Measured`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Timeline {
    /// How the times were got.
    pub origin: Origin,
    /// Lanes.
    pub lanes: Vec<Lane>,
}

impl Timeline {
    /// Latest end of any span, in milliseconds; 0 if there is none.
    pub fn end_ms(&self) -> f64 {
        self.lanes.iter().flat_map(|lane| &lane.spans).fold(0.0, |end, span| end.max(span.end_ms))
    }
}
