//! A timeline's wall-clock time cut into parts that add up.

use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use trefoil_core::{Origin, SpanKind, Timeline};

/// How one lane's times were got: a `sim:` unit's are simulated, whatever the rest of the timeline is.
pub fn lane_origin(timeline: &Timeline, lane: &str) -> Origin {
    if timeline.origin == Origin::Measured && lane.starts_with("sim:") { Origin::Simulated } else { timeline.origin }
}

/// How a timeline's end and totals were got: measured only if every lane is.
pub fn timeline_origin(timeline: &Timeline) -> Origin {
    let mut origins = timeline.lanes.iter().map(|lane| lane_origin(timeline, &lane.name));
    origins.find(|origin| *origin != timeline.origin).unwrap_or(timeline.origin)
}

/// A part of a total.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TotalRow {
    /// What the machine was doing.
    pub name: String,
    /// The unit it concerns, when it is exactly one.
    pub unit: Option<String>,
    /// Milliseconds.
    pub ms: f64,
    /// How that was got.
    pub origin: Origin,
}

/// A timeline's wall-clock time cut into disjoint parts, so that the parts add up to the total.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Totals {
    /// How the total was got.
    pub origin: Origin,
    /// Parts; the last, `other`, is what nothing was recorded for.
    pub rows: Vec<TotalRow>,
    /// The total in milliseconds.
    pub total_ms: f64,
}

impl Totals {
    /// Cuts `timeline`. At every moment the time belongs to the set of lanes that compute; if none does, to the
    /// transfers; if none, to recorded waits; else to `other`. `wall_ms` is the run's duration as its caller saw it; the
    /// timeline's end when `None`. O(spans · log spans + spans · lanes).
    pub fn of(timeline: &Timeline, wall_ms: Option<f64>) -> Self {
        const RANK: [SpanKind; 3] = [SpanKind::Compute, SpanKind::Transfer, SpanKind::Wait];
        let mut edges = Vec::new();
        for (lane, spans) in timeline.lanes.iter().enumerate() {
            for span in spans.spans.iter().filter(|span| span.end_ms > span.start_ms) {
                let rank = RANK.iter().position(|kind| *kind == span.kind).unwrap_or(0);
                edges.push((span.start_ms, 1_i32, rank, lane));
                edges.push((span.end_ms, -1, rank, lane));
            }
        }
        edges.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut active = vec![[0_i32; 3]; timeline.lanes.len()];
        let mut parts: BTreeMap<(usize, BTreeSet<usize>), f64> = BTreeMap::new();
        for (index, &(at, change, rank, lane)) in edges.iter().enumerate() {
            active[lane][rank] += change;
            let Some(next) = edges.get(index + 1).map(|edge| edge.0).filter(|&next| next > at) else { continue };
            let busy = (0..3).find_map(|rank| {
                let lanes: BTreeSet<_> = (0..active.len()).filter(|&lane| active[lane][rank] > 0).collect();
                (!lanes.is_empty()).then_some((rank, lanes))
            });
            if let Some(key) = busy {
                *parts.entry(key).or_insert(0.0) += next - at;
            }
        }
        let total_ms = wall_ms.unwrap_or_else(|| timeline.end_ms());
        let covered: f64 = parts.values().sum();
        let mut rows: Vec<_> = parts
            .into_iter()
            .map(|((rank, lanes), ms)| {
                let names: Vec<_> = lanes.iter().map(|&lane| timeline.lanes[lane].name.as_str()).collect();
                let joined = names.join(" + ");
                TotalRow {
                    name: match (rank, names.len()) {
                        (0, 1) => format!("compute on {joined} alone"),
                        (0, _) => format!("compute on {joined} at once"),
                        (1, _) => format!("transfer on {joined}, nothing computing"),
                        _ => format!("waiting on {joined}"),
                    },
                    unit: (names.len() == 1).then(|| joined.clone()),
                    ms,
                    origin: names
                        .iter()
                        .map(|name| lane_origin(timeline, name))
                        .find(|origin| *origin != timeline.origin)
                        .unwrap_or(timeline.origin),
                }
            })
            .collect();
        let origin = timeline_origin(timeline);
        rows.push(TotalRow { name: "other".to_owned(), unit: None, ms: total_ms - covered, origin });
        Self { origin, rows, total_ms }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trefoil_core::{Lane, Span, TaskId};

    fn lane(name: &str, spans: &[(f64, f64, SpanKind)]) -> Lane {
        let span = |&(start_ms, end_ms, kind)| Span { task: TaskId(0), label: String::new(), kind, start_ms, end_ms };
        Lane { name: name.into(), spans: spans.iter().map(span).collect() }
    }

    #[test]
    fn totals_are_disjoint_and_add_up() {
        let timeline = Timeline {
            origin: Origin::Measured,
            lanes: vec![
                lane("a", &[(0.0, 4.0, SpanKind::Compute), (6.0, 8.0, SpanKind::Compute)]),
                lane(
                    "b",
                    &[(3.0, 5.0, SpanKind::Compute), (5.0, 5.5, SpanKind::Transfer), (7.0, 7.5, SpanKind::Transfer)],
                ),
            ],
        };
        let totals = Totals::of(&timeline, Some(9.0));
        let get = |name: &str| totals.rows.iter().find(|row| row.name == name).map(|row| row.ms);
        assert_eq!(get("compute on a alone"), Some(5.0));
        assert_eq!(get("compute on a + b at once"), Some(1.0));
        assert_eq!(get("compute on b alone"), Some(1.0));
        assert_eq!(get("transfer on b, nothing computing"), Some(0.5));
        assert_eq!(get("other"), Some(1.5));
        assert!((totals.rows.iter().map(|row| row.ms).sum::<f64>() - 9.0).abs() < 1e-12);
    }

    #[test]
    fn an_empty_timeline_is_all_other() {
        let totals = Totals::of(&Timeline { origin: Origin::Predicted, lanes: Vec::new() }, Some(2.0));
        assert_eq!(totals.rows, [TotalRow { name: "other".into(), unit: None, ms: 2.0, origin: Origin::Predicted }]);
    }
}
