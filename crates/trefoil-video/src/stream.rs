//! A stream of clips through a two-stage pipeline (HeteroVDiff 4.3, 5): the first lane runs the prefix of the next clip while the
//! second finishes the present one and hands it to the last stage (decoding, or writing the latent).
//!
//! A lane never waits for a slot that it has work for: one clip may lie between the lanes. Each clip's outcome is given to `finish` on
//! the second lane's thread, so a stream that stops early keeps every clip that was finished.

use crate::VideoError;
use crate::denoise::{Clip, ClipState, Event, Lane, handoff};
use crate::tensors::Tensor;
use serde::Serialize;
use std::sync::mpsc::sync_channel;
use std::time::Instant;
use trefoil_core::{Origin, SpanKind, TaskId, Timeline};

/// A clip to make.
#[derive(Debug, Clone)]
pub struct StreamItem {
    /// Its number, which names its outputs.
    pub number: usize,
    /// Starting latent.
    pub noise: Tensor,
    /// Prompt.
    pub text: Tensor,
    /// The other branch's text, with guidance.
    pub negative: Option<Tensor>,
}

/// A busy span of one lane, in milliseconds since the stream began.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Span {
    /// Clip.
    pub item: usize,
    /// Lane: 0 or 1.
    pub lane: usize,
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
}

/// What a stream needs to know between clips.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Observed {
    /// Mean milliseconds of a block of the last clip on the first lane.
    pub first_ms: Option<f64>,
    /// The same on the second lane.
    pub second_ms: Option<f64>,
    /// Milliseconds of the last stage of the last clip.
    pub last_stage_ms: Option<f64>,
}

/// A clip between the lanes.
struct InFlight {
    number: usize,
    clip: Clip,
    state: ClipState,
    cut: usize,
    start_ms: f64,
    handoff_bytes: usize,
}

/// Runs all items. `cut` is asked before each clip, with the rates observed so far; `finish` is the last stage; `watch` sees every block
/// of every lane (with the clip's number) and may stop the stream.
///
/// # Errors
/// The first error of a lane, of `finish` or of `watch`; clips finished before it have been given to `finish`.
pub fn run_stream(
    lanes: &mut [Lane],
    items: impl Iterator<Item = StreamItem> + Send,
    cut: &mut (dyn FnMut(&Observed, usize) -> usize + Send),
    finish: &mut (dyn FnMut(usize, &Clip, &ClipState) -> Result<(), VideoError> + Send),
    watch: &(dyn Fn(usize, &Event<'_>) -> Result<(), VideoError> + Sync),
) -> Result<StreamReport, VideoError> {
    let origin = Instant::now();
    let now = || origin.elapsed().as_secs_f64() * 1e3;
    let mut report = StreamReport::empty(lanes);
    let observed = std::sync::Mutex::new(Observed::default());
    let learn = |change: &dyn Fn(&mut Observed)| {
        if let Ok(mut observed) = observed.lock() {
            change(&mut observed);
        }
    };
    match lanes {
        [lane] => {
            for item in items {
                let mut flight = begin(lane, &item, now())?;
                report.blocks = flight.clip.trajectory().blocks();
                flight.cut = report.blocks;
                let begun = now();
                lane.run(&flight.clip, &mut flight.state, report.blocks, &mut |event| watch(item.number, event))?;
                report.spans.push(Span {
                    item: item.number,
                    lane: 0,
                    start_ms: begun,
                    end_ms: now(),
                    blocks: report.blocks,
                });
                finish(item.number, &flight.clip, &flight.state)?;
                report.clips.push(flight.done(now()));
            }
        }
        [first, second] => {
            let (sender, receiver) = sync_channel::<InFlight>(1);
            let (blocks, outcome) = std::thread::scope(|scope| {
                let (learn, observed, now) = (&learn, &observed, &now);
                let stage = scope.spawn(move || -> Result<(Vec<Span>, usize), VideoError> {
                    let (mut spans, mut blocks) = (Vec::new(), 0);
                    for item in items {
                        let mut flight = begin(first, &item, now())?;
                        blocks = flight.clip.trajectory().blocks();
                        let known = observed.lock().map(|observed| *observed).unwrap_or_default();
                        flight.cut = cut(&known, blocks).min(blocks);
                        let start_ms = flight.start_ms;
                        first
                            .run(&flight.clip, &mut flight.state, flight.cut, &mut |event| watch(item.number, event))?;
                        if flight.cut > 0 {
                            let span = Span { item: item.number, lane: 0, start_ms, end_ms: now(), blocks: flight.cut };
                            let each = (span.end_ms - span.start_ms) / flight.cut as f64;
                            learn(&|observed| observed.first_ms = Some(each));
                            spans.push(span);
                        }
                        if flight.cut > 0 && flight.cut < blocks {
                            let handoff = handoff(&flight.clip, &flight.state);
                            flight.handoff_bytes = handoff.hidden_bytes + handoff.latent_bytes + handoff.extra_bytes;
                        }
                        if sender.send(flight).is_err() {
                            // The second stage ended; it has the reason.
                            break;
                        }
                    }
                    Ok((spans, blocks))
                });
                let mut finish_all = || -> Result<(), VideoError> {
                    for mut flight in &receiver {
                        let (number, begun) = (flight.number, now());
                        let blocks = flight.clip.trajectory().blocks();
                        let count = blocks - flight.state.next();
                        second.run(&flight.clip, &mut flight.state, blocks, &mut |event| watch(number, event))?;
                        let ran = now();
                        if count > 0 {
                            learn(&|observed| observed.second_ms = Some((ran - begun) / count as f64));
                        }
                        finish(number, &flight.clip, &flight.state)?;
                        let end = now();
                        learn(&|observed| observed.last_stage_ms = Some(end - ran));
                        report.spans.push(Span { item: number, lane: 1, start_ms: begun, end_ms: end, blocks: count });
                        report.handoffs += usize::from(flight.handoff_bytes > 0);
                        report.clips.push(flight.done(end));
                    }
                    Ok(())
                };
                let finished = finish_all();
                // Lets a first stage that waits for the channel see that nobody listens.
                drop(receiver);
                let first_stage = stage.join().unwrap_or_else(|_| {
                    Err(VideoError::Engine {
                        engine: "stream".to_string(),
                        reason: "the first stage panicked".to_string(),
                    })
                });
                match (first_stage, finished) {
                    (Ok((spans, blocks)), Ok(())) => (blocks, Ok(spans)),
                    (_, Err(error)) | (Err(error), Ok(())) => (0, Err(error)),
                }
            });
            report.blocks = blocks;
            report.spans.extend(outcome?);
            report.spans.sort_by(|a, b| a.end_ms.total_cmp(&b.end_ms));
        }
        other => {
            let reason = format!("{} engines; a stream has one or two", other.len());
            return Err(VideoError::Engine { engine: "stream".to_string(), reason });
        }
    }
    report.summarise();
    Ok(report)
}

/// Data-parallel baseline: every lane makes whole clips from one queue, each with a working set of its own. Spans and clips are those of
/// [`run_stream`]; a clip's cut is B.
///
/// # Errors
/// The first error of a lane, of `finish` or of `watch`.
pub fn run_data_parallel(
    lanes: &mut [Lane],
    items: impl Iterator<Item = StreamItem> + Send,
    finish: &(dyn Fn(usize, &Clip, &ClipState) -> Result<(), VideoError> + Sync),
    watch: &(dyn Fn(usize, &Event<'_>) -> Result<(), VideoError> + Sync),
) -> Result<StreamReport, VideoError> {
    let origin = Instant::now();
    let now = || origin.elapsed().as_secs_f64() * 1e3;
    let mut report = StreamReport::empty(lanes);
    let queue = std::sync::Mutex::new(items);
    let done = std::sync::Mutex::new((Vec::new(), Vec::new(), 0usize));
    let outcomes: Vec<Result<(), VideoError>> = std::thread::scope(|scope| {
        let workers: Vec<_> = lanes
            .iter_mut()
            .enumerate()
            .map(|(number, lane)| {
                let (queue, done, now) = (&queue, &done, &now);
                scope.spawn(move || -> Result<(), VideoError> {
                    loop {
                        // A poisoned queue means that another lane panicked; its join reports that.
                        let Some(item) = queue.lock().ok().and_then(|mut queue| queue.next()) else { return Ok(()) };
                        let mut flight = begin(lane, &item, now())?;
                        flight.cut = flight.clip.trajectory().blocks();
                        lane.run(&flight.clip, &mut flight.state, flight.cut, &mut |event| watch(item.number, event))?;
                        finish(item.number, &flight.clip, &flight.state)?;
                        let (start_ms, end_ms, blocks) = (flight.start_ms, now(), flight.cut);
                        if let Ok(mut done) = done.lock() {
                            done.0.push(flight.done(end_ms));
                            done.1.push(Span { item: item.number, lane: number, start_ms, end_ms, blocks });
                            done.2 = blocks;
                        }
                    }
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().unwrap_or_else(|_| Err(panicked()))).collect()
    });
    outcomes.into_iter().collect::<Result<(), _>>()?;
    if let Ok((clips, spans, blocks)) = done.into_inner() {
        (report.clips, report.spans, report.blocks) = (clips, spans, blocks);
    }
    report.clips.sort_by(|a, b| a.end_ms.total_cmp(&b.end_ms));
    report.summarise();
    Ok(report)
}

fn panicked() -> VideoError {
    VideoError::Engine { engine: "stream".to_string(), reason: "a lane's thread panicked".to_string() }
}

fn begin(lane: &mut Lane, item: &StreamItem, start_ms: f64) -> Result<InFlight, VideoError> {
    let model = std::sync::Arc::clone(lane.model());
    let clip = Clip::new(lane.host_mut(), &model, &item.noise, &item.text, item.negative.as_ref())?;
    let state = clip.start(&item.noise)?;
    Ok(InFlight { number: item.number, clip, state, cut: 0, start_ms, handoff_bytes: 0 })
}

impl InFlight {
    fn done(&self, end_ms: f64) -> ClipReport {
        let InFlight { number, cut, start_ms, handoff_bytes, .. } = *self;
        ClipReport { item: number, cut, start_ms, end_ms, handoff_bytes }
    }
}

impl StreamReport {
    fn empty(lanes: &[Lane]) -> StreamReport {
        StreamReport {
            engines: lanes.iter().map(|lane| lane.engine().name().to_string()).collect(),
            blocks: 0,
            clips: Vec::new(),
            spans: Vec::new(),
            fill_ms: None,
            period_ms: None,
            idle: None,
            handoffs: 0,
        }
    }

    /// Period, fill and idle from spans and ends.
    fn summarise(&mut self) {
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

    /// The lanes on one time axis, for a trace: one span per clip and lane.
    pub fn timeline(&self, origin: Origin) -> Timeline {
        let lanes = self.engines.iter().enumerate().map(|(number, name)| {
            let mut spans: Vec<trefoil_core::Span> = self
                .spans
                .iter()
                .filter(|span| span.lane == number && span.end_ms > span.start_ms)
                .map(|span| trefoil_core::Span {
                    task: TaskId(span.item as u32),
                    label: format!("clip {}, {} blocks", span.item, span.blocks),
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
    fn period_fill_and_idle_come_from_the_spans() {
        let clip = |item, start_ms, end_ms| ClipReport { item, cut: 1, start_ms, end_ms, handoff_bytes: 8 };
        let span = |item, lane, start_ms, end_ms| Span { item, lane, start_ms, end_ms, blocks: 1 };
        let mut report = StreamReport {
            engines: vec!["a".to_string(), "b".to_string()],
            blocks: 2,
            clips: vec![clip(0, 0.0, 30.0), clip(1, 10.0, 50.0), clip(2, 20.0, 70.0)],
            spans: vec![
                span(0, 0, 0.0, 10.0),
                span(1, 0, 10.0, 20.0),
                span(2, 0, 30.0, 40.0),
                span(0, 1, 10.0, 30.0),
                span(1, 1, 30.0, 50.0),
                span(2, 1, 50.0, 70.0),
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
        let timeline = report.timeline(Origin::Measured);
        let counts: Vec<usize> = timeline.lanes.iter().map(|lane| lane.spans.len()).collect();
        assert_eq!((counts, timeline.end_ms()), (vec![3, 3], 70.0));
    }
}
