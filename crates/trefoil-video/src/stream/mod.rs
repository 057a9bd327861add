//! A stream of clips through a two-stage pipeline (HeteroVDiff 4.3, 5): the first lane runs the prefix of the next clip while the
//! second finishes the present one and hands it to the last stage (decoding, or writing the latent).
//!
//! The last stage belongs to the second lane, as in the paper's equation 4: it runs on that lane's thread and counts as its work.
//! A lane never waits for a slot that it has work for: one clip may lie between the lanes. A stream that stops early keeps every
//! clip that was finished, and its report.

mod forecast;
mod last_stage;
mod parallel;
mod report;

pub use forecast::{Cost, Division, Forecast, LaneCosts, forecast};
pub use last_stage::{LastStageRate, measure_last_stage, time_decoding};
pub use parallel::{LastStageOn, run_data_parallel, run_data_parallel_with};
pub use report::{ClipReport, FailedClip, Span, StreamReport, Work};

use crate::VideoError;
use crate::denoise::{Clip, ClipState, Event, Lane, handoff};
use crate::tensors::Tensor;
use crate::threads::panicked;
use serde::Serialize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

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

/// What a stream needs to know between clips.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Observed {
    /// Mean milliseconds of a block of the last clip on the first lane.
    pub first_ms: Option<f64>,
    /// The same on the second lane.
    pub second_ms: Option<f64>,
    /// Milliseconds of the last stage of the last clip.
    pub last_stage_ms: Option<f64>,
}

/// A denoised clip, as the last stage gets it.
#[derive(Debug)]
pub struct Denoised<'a> {
    /// Its number.
    pub number: usize,
    /// Where it was cut.
    pub cut: usize,
    /// The lane whose work the last stage is.
    pub lane: usize,
    /// Its conditions.
    pub clip: &'a Clip,
    /// Its state after the last execution.
    pub state: &'a ClipState,
}

/// Asked before each clip, with the rates observed so far and the clip's block executions: where to cut.
pub type ChooseCut<'a> = dyn FnMut(&Observed, usize) -> usize + Send + 'a;
/// The last stage.
pub type LastStage<'a> = dyn FnMut(&Denoised<'_>) -> Result<(), VideoError> + Send + 'a;
/// Sees every block of every lane, with the clip's number, and may stop the stream.
pub type Watch<'a> = dyn Fn(usize, &Event<'_>) -> Result<(), VideoError> + Sync + 'a;

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
/// The first error of a lane, of `finish` or of `watch`; clips finished before it have been given to `finish`. A clip that became NaN, once
/// the others are finished.
pub fn run_stream(
    lanes: &mut [Lane],
    items: impl Iterator<Item = StreamItem> + Send,
    cut: &mut ChooseCut<'_>,
    finish: &mut (dyn FnMut(usize, &Clip, &ClipState) -> Result<(), VideoError> + Send),
    watch: &Watch<'_>,
) -> Result<StreamReport, VideoError> {
    let mut last = |done: &Denoised<'_>| finish(done.number, done.clip, done.state);
    match run_stream_reporting(lanes, items, cut, &mut last, watch) {
        (report, None) => match report.failed.first() {
            None => Ok(report),
            Some(FailedClip { item, reason }) => {
                Err(VideoError::Input { what: format!("clip {}", item + 1), reason: reason.clone() })
            }
        },
        (_, Some(error)) => Err(error),
    }
}

/// As [`run_stream`], with the report of what was done also where the stream stopped early, and why it did. Clips that became NaN are in
/// the report and stop nothing.
pub fn run_stream_reporting(
    lanes: &mut [Lane],
    items: impl Iterator<Item = StreamItem> + Send,
    cut: &mut ChooseCut<'_>,
    finish: &mut LastStage<'_>,
    watch: &Watch<'_>,
) -> (StreamReport, Option<VideoError>) {
    let record = Record::new(lanes);
    let outcome = match lanes {
        [lane] => one_lane(lane, items, finish, watch, &record),
        [first, second] => two_lanes(first, second, items, cut, finish, watch, &record),
        other => {
            let reason = format!("{} engines; a stream has one or two", other.len());
            Err(VideoError::Engine { engine: "stream".to_string(), reason })
        }
    };
    let mut report = record.report.into_inner().unwrap_or_else(PoisonError::into_inner);
    report.summarise();
    (report, outcome.err())
}

/// What both lanes write down.
struct Record {
    origin: Instant,
    report: Mutex<StreamReport>,
    observed: Mutex<Observed>,
    /// Raised where the second lane ended before its time, so that the first does not work in vain.
    has_ended: AtomicBool,
}

impl Record {
    fn new(lanes: &[Lane]) -> Record {
        Record {
            origin: Instant::now(),
            report: Mutex::new(StreamReport::empty(lanes)),
            observed: Mutex::default(),
            has_ended: AtomicBool::new(false),
        }
    }

    fn now(&self) -> f64 {
        self.origin.elapsed().as_secs_f64() * 1e3
    }

    fn learn(&self, change: impl FnOnce(&mut Observed)) {
        change(&mut self.observed.lock().unwrap_or_else(PoisonError::into_inner));
    }

    fn report(&self, change: impl FnOnce(&mut StreamReport)) {
        change(&mut self.report.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// A span of `lane` that ends now; returns its milliseconds.
    fn span(&self, item: usize, lane: usize, work: Work, start_ms: f64, blocks: usize) -> f64 {
        let end_ms = self.now();
        self.report(|report| report.spans.push(Span { item, lane, work, start_ms, end_ms, blocks }));
        end_ms - start_ms
    }

    /// Whether a clip's blocks are done: `false` where its latent became NaN, which is written down and costs no other clip.
    fn is_sound(&self, item: usize, ran: Result<(), VideoError>) -> Result<bool, VideoError> {
        match ran {
            Ok(()) => Ok(true),
            Err(error @ VideoError::NonFinite { .. }) => {
                self.report(|report| report.failed.push(FailedClip { item, reason: error.to_string() }));
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// The last stage of a clip on `lane`, and the clip's end.
    fn finish(&self, flight: &InFlight, lane: usize, finish: &mut LastStage<'_>) -> Result<(), VideoError> {
        let begun = self.now();
        let InFlight { number, cut, ref clip, ref state, .. } = *flight;
        finish(&Denoised { number, cut, lane, clip, state })?;
        let ms = self.span(number, lane, Work::Last, begun, 0);
        self.learn(|observed| observed.last_stage_ms = Some(ms));
        let end_ms = begun + ms;
        self.report(|report| {
            report.handoffs += usize::from(flight.handoff_bytes > 0);
            report.clips.push(flight.done(end_ms));
        });
        Ok(())
    }
}

fn one_lane(
    lane: &mut Lane,
    items: impl Iterator<Item = StreamItem>,
    finish: &mut LastStage<'_>,
    watch: &Watch<'_>,
    record: &Record,
) -> Result<(), VideoError> {
    for item in items {
        let begun = record.now();
        let mut flight = begin(lane, &item, begun)?;
        let blocks = flight.clip.trajectory().blocks();
        flight.cut = blocks;
        record.report(|report| report.blocks = blocks);
        let ran = lane.run(&flight.clip, &mut flight.state, blocks, &mut |event| watch(item.number, event));
        if !record.is_sound(item.number, ran)? {
            continue;
        }
        let ms = record.span(item.number, 0, Work::Blocks, begun, blocks);
        record.learn(|observed| observed.first_ms = Some(ms / blocks as f64));
        record.finish(&flight, 0, finish)?;
    }
    Ok(())
}

fn two_lanes(
    first: &mut Lane,
    second: &mut Lane,
    items: impl Iterator<Item = StreamItem> + Send,
    cut: &mut ChooseCut<'_>,
    finish: &mut LastStage<'_>,
    watch: &Watch<'_>,
    record: &Record,
) -> Result<(), VideoError> {
    let (sender, receiver) = sync_channel::<InFlight>(1);
    std::thread::scope(|scope| {
        let stage = scope.spawn(move || prefixes(first, items, cut, watch, record, &sender));
        // Moved in, so that a panic of the last stage closes the channel too.
        let receiver = receiver;
        let finished = suffixes(second, &receiver, finish, watch, record);
        record.has_ended.store(finished.is_err(), Ordering::Release);
        // Lets a first stage that waits for the channel see that nobody listens.
        drop(receiver);
        let began = stage.join().unwrap_or_else(|cause| Err(panicked("stream", &*cause)));
        // Where both stopped, the second lane's reason is the first in time: the other stopped because of it.
        finished.and(began)
    })
}

/// The first lane: executions before the cut, clip after clip.
fn prefixes(
    lane: &mut Lane,
    items: impl Iterator<Item = StreamItem>,
    cut: &mut ChooseCut<'_>,
    watch: &Watch<'_>,
    record: &Record,
    sender: &SyncSender<InFlight>,
) -> Result<(), VideoError> {
    for item in items {
        let begun = record.now();
        let mut flight = begin(lane, &item, begun)?;
        let blocks = flight.clip.trajectory().blocks();
        record.report(|report| report.blocks = blocks);
        let known = *record.observed.lock().unwrap_or_else(PoisonError::into_inner);
        flight.cut = cut(&known, blocks).min(blocks);
        let until = flight.cut;
        let ran = lane.run(&flight.clip, &mut flight.state, until, &mut |event| {
            if record.has_ended.load(Ordering::Acquire) {
                return Err(VideoError::Interrupted { done: 0, blocks });
            }
            watch(item.number, event)
        });
        if !record.is_sound(item.number, ran)? {
            continue;
        }
        if until > 0 {
            let ms = record.span(item.number, 0, Work::Blocks, begun, until);
            record.learn(|observed| observed.first_ms = Some(ms / until as f64));
        }
        if until > 0 && until < blocks {
            let handoff = handoff(&flight.clip, &flight.state);
            flight.handoff_bytes = handoff.hidden_bytes + handoff.latent_bytes + handoff.extra_bytes;
        }
        if sender.send(flight).is_err() {
            // The second stage ended; it has the reason.
            break;
        }
    }
    Ok(())
}

/// The second lane: the rest of each clip, and the last stage.
fn suffixes(
    lane: &mut Lane,
    receiver: &Receiver<InFlight>,
    finish: &mut LastStage<'_>,
    watch: &Watch<'_>,
    record: &Record,
) -> Result<(), VideoError> {
    for mut flight in receiver {
        let (number, begun) = (flight.number, record.now());
        let blocks = flight.clip.trajectory().blocks();
        let count = blocks - flight.state.next();
        if count > 0 {
            let ran = lane.run(&flight.clip, &mut flight.state, blocks, &mut |event| watch(number, event));
            if !record.is_sound(number, ran)? {
                continue;
            }
            let ms = record.span(number, 1, Work::Blocks, begun, count);
            record.learn(|observed| observed.second_ms = Some(ms / count as f64));
        }
        record.finish(&flight, 1, finish)?;
    }
    Ok(())
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
