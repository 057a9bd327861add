//! The data-parallel baseline: whole clips from one queue.

use super::{Denoised, InFlight, Record, StreamItem, StreamReport, Watch, Work, begin};
use crate::VideoError;
use crate::denoise::{Clip, ClipState, Event, Lane};
use crate::threads::panicked;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};

/// Whose work the last stage is where every lane makes whole clips.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LastStageOn {
    /// Each lane's own clips are its own work.
    Each,
    /// The last lane's: it takes the others' clips as they arrive, between two of its blocks. So it is in the paper, where one engine alone
    /// can decode (HeteroVDiff 6.1).
    Last,
}

/// The last stage of a lane that does not know which it is.
type Finish<'a> = dyn Fn(&Denoised<'_>) -> Result<(), VideoError> + Sync + 'a;

/// Data-parallel baseline: every lane makes whole clips from one queue, each with a working set of its own. Spans and clips are those of
/// [`super::run_stream`]; a clip's cut is B.
///
/// # Errors
/// The first error of a lane, of `finish` or of `watch`.
pub fn run_data_parallel(
    lanes: &mut [Lane],
    items: impl Iterator<Item = StreamItem> + Send,
    finish: &(dyn Fn(usize, &Clip, &ClipState) -> Result<(), VideoError> + Sync),
    watch: &Watch<'_>,
) -> Result<StreamReport, VideoError> {
    let finish = |done: &Denoised<'_>| finish(done.number, done.clip, done.state);
    run_data_parallel_with(lanes, items, LastStageOn::Each, &finish, watch)
}

/// As [`run_data_parallel`], with a last stage that knows its lane, on each lane or on the last one alone.
///
/// # Errors
/// As there.
pub fn run_data_parallel_with(
    lanes: &mut [Lane],
    items: impl Iterator<Item = StreamItem> + Send,
    last_stage: LastStageOn,
    finish: &Finish<'_>,
    watch: &Watch<'_>,
) -> Result<StreamReport, VideoError> {
    let record = Record::new(lanes);
    let queue = Mutex::new(items);
    let next = || {
        // A poisoned queue means that another lane panicked; its join reports that.
        queue.lock().ok().and_then(|mut queue| queue.next())
    };
    let last = lanes.len().saturating_sub(1);
    let (sender, receiver) = channel();
    let mut receiver = Some(receiver);
    let outcomes: Vec<Result<(), VideoError>> = std::thread::scope(|scope| {
        let workers: Vec<_> = lanes
            .iter_mut()
            .enumerate()
            .map(|(number, lane)| {
                let ends = match last_stage {
                    LastStageOn::Last if number < last => Ends::Elsewhere(sender.clone()),
                    LastStageOn::Last => receiver.take().map_or(Ends::Here, Ends::HereForAll),
                    LastStageOn::Each => Ends::Here,
                };
                let arm = Arm { number, record: &record, finish, watch, ends };
                let next = &next;
                scope.spawn(move || arm.run(lane, next))
            })
            .collect();
        // The last lane waits for clips until nobody is left who could send one.
        drop(sender);
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or_else(|cause| Err(panicked("stream", &*cause))))
            .collect()
    });
    outcomes.into_iter().collect::<Result<(), _>>()?;
    let mut report = record.report.into_inner().unwrap_or_else(PoisonError::into_inner);
    report.clips.sort_by(|a, b| a.end_ms.total_cmp(&b.end_ms));
    report.summarise();
    Ok(report)
}

/// Where a lane's clips get their last stage.
enum Ends {
    Here,
    /// Here, and those of other lanes too.
    HereForAll(Receiver<InFlight>),
    Elsewhere(Sender<InFlight>),
}

/// A lane of the baseline.
struct Arm<'a> {
    number: usize,
    record: &'a Record,
    finish: &'a Finish<'a>,
    watch: &'a Watch<'a>,
    ends: Ends,
}

impl Arm<'_> {
    fn run(self, lane: &mut Lane, next: &(dyn Fn() -> Option<StreamItem> + Sync)) -> Result<(), VideoError> {
        while let Some(item) = next() {
            let begun = self.record.now();
            let mut flight = begin(lane, &item, begun)?;
            let blocks = flight.clip.trajectory().blocks();
            flight.cut = blocks;
            self.record.report(|report| report.blocks = blocks);
            // What its span of blocks began with, and how many are in it.
            let (mut begun, mut count) = (begun, 0);
            lane.run(&flight.clip, &mut flight.state, blocks, &mut |event| {
                if let Event::Blocks { piece, .. } = event {
                    count += piece.blocks.len();
                    while let Ends::HereForAll(receiver) = &self.ends
                        && let Ok(other) = receiver.try_recv()
                    {
                        if count > 0 {
                            self.record.span(item.number, self.number, Work::Blocks, begun, count);
                        }
                        self.end(&other)?;
                        (begun, count) = (self.record.now(), 0);
                    }
                }
                (self.watch)(item.number, event)
            })?;
            if count > 0 {
                self.record.span(item.number, self.number, Work::Blocks, begun, count);
            }
            match &self.ends {
                Ends::Elsewhere(sender) => {
                    if sender.send(flight).is_err() {
                        // The last lane ended; it has the reason.
                        return Ok(());
                    }
                }
                Ends::Here | Ends::HereForAll(_) => self.end(&flight)?,
            }
        }
        if let Ends::HereForAll(receiver) = &self.ends {
            for other in receiver {
                self.end(&other)?;
            }
        }
        Ok(())
    }

    fn end(&self, flight: &InFlight) -> Result<(), VideoError> {
        self.record.finish(flight, self.number, &mut |done: &Denoised<'_>| (self.finish)(done))
    }
}
