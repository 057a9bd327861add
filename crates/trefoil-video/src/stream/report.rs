//! What a stream did: spans, ends of clips, and the numbers that follow from them.

use super::Observed;
use crate::denoise::Lane;
use serde::Serialize;
use trefoil_core::{Origin, SpanKind, TaskId, Timeline};

/// What a span was spent on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Work {
    /// Block executions, with the host's work around them.
    Blocks,
    /// The last stage: decoding and writing, or what stands in for it.
    Last,
}

/// A busy span of one lane, in milliseconds since the stream began.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Span {
    /// Clip.
    pub item: usize,
    /// Lane: 0 or 1.
    pub lane: usize,
    /// What was done.
    pub work: Work,
    /// Begin.
    pub start_ms: f64,
    /// End.
    pub end_ms: f64,
    /// Block executions in it.
    pub blocks: usize,
}

/// One finished clip, in milliseconds since the stream began.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ClipReport {
    /// Its number.
    pub item: usize,
    /// Its cut.
    pub cut: usize,
    /// When its first lane began it.
    pub start_ms: f64,
    /// When everything about it was done.
    pub end_ms: f64,
    /// Bytes that crossed between the lanes.
    pub handoff_bytes: usize,
}

impl ClipReport {
    /// From its beginning to its end.
    pub fn latency_ms(&self) -> f64 {
        self.end_ms - self.start_ms
    }
}

/// A clip whose latent became NaN or infinite. It says nothing about the other clips, which go on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FailedClip {
    /// Its number.
    pub item: usize,
    /// Why, in one line.
    pub reason: String,
}

/// What a stream did.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StreamReport {
    /// Engines, in order.
    pub engines: Vec<String>,
    /// Block executions of a clip.
    pub blocks: usize,
    /// Finished clips, in order.
    pub clips: Vec<ClipReport>,
    /// Busy spans of the lanes, in order of their end.
    pub spans: Vec<Span>,
    /// From the first clip's beginning to its end: the pipeline fills.
    pub fill_ms: Option<f64>,
    /// Mean time between ends of clips after the first; absent with fewer than two.
    pub period_ms: Option<f64>,
    /// Share of the time between the first and the last end that each lane was not busy; absent with fewer than two clips.
    pub idle: Option<Vec<f64>>,
    /// Handoffs between lanes.
    pub handoffs: usize,
    /// Clips that could not be made, while the others were.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub failed: Vec<FailedClip>,
}

impl StreamReport {
    pub(super) fn empty(lanes: &[Lane]) -> StreamReport {
        StreamReport {
            engines: lanes.iter().map(|lane| lane.engine().name().to_string()).collect(),
            blocks: 0,
            clips: Vec::new(),
            spans: Vec::new(),
            fill_ms: None,
            period_ms: None,
            idle: None,
            handoffs: 0,
            failed: Vec::new(),
        }
    }

    /// Period, fill and idle from spans and ends.
    pub(super) fn summarise(&mut self) {
        self.spans.sort_by(|a, b| a.end_ms.total_cmp(&b.end_ms));
        let (Some(first), Some(last)) = (self.clips.first(), self.clips.last()) else { return };
        self.fill_ms = Some(first.latency_ms());
        if self.clips.len() < 2 {
            return;
        }
        let (from, to) = (first.end_ms, last.end_ms);
        self.period_ms = Some((to - from) / (self.clips.len() - 1) as f64);
        let busy = |lane: usize| -> f64 {
            let inside = |span: &Span| (span.end_ms.min(to) - span.start_ms.max(from)).max(0.0);
            self.spans.iter().filter(|span| span.lane == lane).map(inside).sum()
        };
        self.idle = Some((0..self.engines.len()).map(|lane| 1.0 - busy(lane) / (to - from)).collect());
    }

    /// Mean milliseconds of a block on either lane, and of the last stage, over all clips but the first: in a pipeline with two
    /// lanes, what they cost while both run.
    pub fn observed(&self) -> Observed {
        let first = self.clips.first().map(|clip| clip.item);
        let mean = |lane: usize, work: Work| {
            let spans = || {
                let counts = |span: &&Span| span.lane == lane && span.work == work && Some(span.item) != first;
                self.spans.iter().filter(counts)
            };
            let count: usize = spans().map(|span| if work == Work::Blocks { span.blocks } else { 1 }).sum();
            (count > 0).then(|| spans().map(|span| span.end_ms - span.start_ms).sum::<f64>() / count as f64)
        };
        let last_lane = self.engines.len().saturating_sub(1);
        Observed {
            first_ms: mean(0, Work::Blocks),
            second_ms: if last_lane > 0 { mean(1, Work::Blocks) } else { None },
            last_stage_ms: mean(last_lane, Work::Last),
        }
    }

    /// The lanes on one time axis, for a trace: for each clip a span of blocks on each lane and one of the last stage.
    pub fn timeline(&self, origin: Origin) -> Timeline {
        let lanes = self.engines.iter().enumerate().map(|(number, name)| {
            let mut spans: Vec<trefoil_core::Span> = self
                .spans
                .iter()
                .filter(|span| span.lane == number && span.end_ms > span.start_ms)
                .map(|span| trefoil_core::Span {
                    task: TaskId(span.item as u32),
                    label: match span.work {
                        Work::Blocks => format!("clip {}, {} blocks", span.item + 1, span.blocks),
                        Work::Last => format!("clip {}, last stage", span.item + 1),
                    },
                    kind: SpanKind::Compute,
                    start_ms: span.start_ms,
                    end_ms: span.end_ms,
                })
                .collect();
            spans.sort_by(|a, b| a.start_ms.total_cmp(&b.start_ms));
            trefoil_core::Lane { name: format!("{number}: {name}"), spans }
        });
        Timeline { origin, lanes: lanes.collect() }
    }

    /// Share of clips whose latency is at most `deadline_ms`; absent without clips.
    pub fn attainment(&self, deadline_ms: f64) -> Option<f64> {
        let met = self.clips.iter().filter(|clip| clip.latency_ms() <= deadline_ms).count();
        (!self.clips.is_empty()).then(|| met as f64 / self.clips.len() as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn period_fill_idle_and_rates_come_from_the_spans() {
        let clip = |item, start_ms, end_ms| ClipReport { item, cut: 1, start_ms, end_ms, handoff_bytes: 8 };
        let span = |item, lane, work, start_ms, end_ms| Span {
            item,
            lane,
            work,
            start_ms,
            end_ms,
            blocks: usize::from(work == Work::Blocks),
        };
        let mut report = StreamReport {
            engines: vec!["a".to_string(), "b".to_string()],
            blocks: 2,
            failed: Vec::new(),
            clips: vec![clip(0, 0.0, 30.0), clip(1, 10.0, 50.0), clip(2, 20.0, 70.0)],
            spans: vec![
                span(0, 0, Work::Blocks, 0.0, 10.0),
                span(1, 0, Work::Blocks, 10.0, 20.0),
                span(2, 0, Work::Blocks, 30.0, 40.0),
                span(0, 1, Work::Blocks, 10.0, 22.0),
                span(0, 1, Work::Last, 22.0, 30.0),
                span(1, 1, Work::Blocks, 30.0, 42.0),
                span(1, 1, Work::Last, 42.0, 50.0),
                span(2, 1, Work::Blocks, 50.0, 66.0),
                span(2, 1, Work::Last, 66.0, 70.0),
            ],
            fill_ms: None,
            period_ms: None,
            idle: None,
            handoffs: 3,
        };
        report.summarise();
        assert_eq!((report.fill_ms, report.period_ms), (Some(30.0), Some(20.0)));
        assert_eq!(report.idle, Some(vec![0.75, 0.0]));
        assert_eq!(report.attainment(40.0), Some(2.0 / 3.0));
        let observed = report.observed();
        assert_eq!(
            (observed.first_ms, observed.second_ms, observed.last_stage_ms),
            (Some(10.0), Some(14.0), Some(6.0))
        );
        let timeline = report.timeline(Origin::Measured);
        let counts: Vec<usize> = timeline.lanes.iter().map(|lane| lane.spans.len()).collect();
        assert_eq!((counts, timeline.end_ms()), (vec![3, 6], 70.0));
        assert_eq!(timeline.lanes[1].spans[1].label, "clip 1, last stage");
    }
}
