//! What a stream of so many clips will take, from rates that were measured before: both lanes on one time axis, each at its co-run rate
//! while the other works and at its own while the other waits.
//!
//! Equation 4 of HeteroVDiff is the period of an endless stream. One of a few clips also fills and drains, and whoever is left over works
//! without a neighbour; what is measured of it is compared with what is forecast for just as many clips.

use super::{LastStageOn, Span, Work};
use crate::denoise::Clip;
use crate::rates::EngineRate;
use crate::schedule::Trajectory;
use serde::Serialize;
use std::collections::VecDeque;

/// Milliseconds of some work.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Cost {
    /// While the other lane waits.
    pub solo: f64,
    /// While it works.
    pub corun: f64,
}

impl Cost {
    /// The same whatever the other lane does.
    pub fn always(ms: f64) -> Cost {
        Cost { solo: ms, corun: ms }
    }
}

/// What the parts of a clip cost on a lane.
#[derive(Debug, Clone, PartialEq)]
pub struct LaneCosts {
    /// A clip's conditions (text contexts, timesteps), for the lane that begins it.
    pub conditions: Cost,
    /// Every block execution in the order of the trajectory, the host's work before and after it included.
    pub blocks: Vec<Cost>,
    /// The last stage.
    pub last: Cost,
}

impl LaneCosts {
    /// From the rates of a lane: each execution at the rate of its expert. `host_ms` is the host's work around the blocks of one branch,
    /// which its first block (patch embedding) and its last (head, sampler's step) share; it is small, and that of the lane alone.
    pub fn of(rate: &EngineRate, clip: &Clip, host_ms: f64, conditions: Cost, last: Cost) -> LaneCosts {
        let trajectory: Trajectory = clip.trajectory();
        let execution = |index: usize| {
            let place = trajectory.place(index);
            let Cost { solo, corun } = rate.block(clip.expert(place.step));
            let ends = usize::from(place.block == 0) + usize::from(place.block + 1 == trajectory.layers);
            let host = host_ms / 2.0 * ends as f64;
            Cost { solo: solo + host, corun: corun + host }
        };
        let blocks = (0..trajectory.blocks()).map(execution).collect();
        LaneCosts { conditions, blocks, last }
    }
}

/// Who does what of each clip.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Division {
    /// One lane makes them all.
    Alone,
    /// The first lane executes blocks up to this one, the second the rest and the last stage ([`super::run_stream`]).
    Cut(usize),
    /// Either lane takes whole clips from one queue ([`super::run_data_parallel_with`]).
    Whole(LastStageOn),
}

/// When clips begin and end, in milliseconds since the stream began.
#[derive(Debug, Clone, PartialEq)]
pub struct Forecast {
    /// Begin and end of every clip, in the order of their ends.
    pub clips: Vec<[f64; 2]>,
    /// What the lanes do, as in a [`super::StreamReport`]; clips are numbered in the order of their beginnings.
    pub spans: Vec<Span>,
}

impl Forecast {
    /// Mean time between ends of clips after the first, as [`super::StreamReport::period_ms`]; absent with fewer than two.
    pub fn period_ms(&self) -> Option<f64> {
        let [[_, first], .., [_, last]] = self.clips.as_slice() else { return None };
        Some((last - first) / (self.clips.len() - 1) as f64)
    }

    /// When the last clip ends.
    pub fn end_ms(&self) -> f64 {
        self.clips.last().map_or(0.0, |&[_, end]| end)
    }
}

/// Plays `clips` clips through lanes of these costs: one with [`Division::Alone`], else two. Lanes that a division has no use for wait.
pub fn forecast(lanes: &[LaneCosts], division: Division, clips: usize) -> Forecast {
    let mut play = Play {
        lanes,
        division,
        clips,
        begun: Vec::new(),
        between: VecDeque::new(),
        ready: None,
        ended: Vec::new(),
        spans: Vec::new(),
        open: [None; 2],
        work: [VecDeque::new(), VecDeque::new()],
        now: 0.0,
    };
    while play.step() {}
    Forecast { clips: play.ended, spans: play.spans }
}

/// What a piece of work is followed by.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Then {
    /// More of the same clip.
    More,
    /// The clip goes to the other lane.
    HandOver(usize),
    /// The clip, which this lane made or went on with, is there.
    End(usize),
    /// A clip of the other lane is there, whose last stage is this one's work.
    EndForOther(usize),
}

/// Work of a lane; costs are what is left of it.
#[derive(Debug, Clone, Copy)]
struct Task {
    left: Cost,
    is_block: bool,
    /// When the lane turned to it.
    begun: Option<f64>,
    then: Then,
}

impl Task {
    fn new(left: Cost, then: Then) -> Task {
        Task { left, is_block: false, begun: None, then }
    }
}

/// Blocks of a clip that a lane is busy with.
#[derive(Debug, Clone, Copy)]
struct OpenSpan {
    clip: usize,
    start_ms: f64,
    blocks: usize,
}

struct Play<'a> {
    lanes: &'a [LaneCosts],
    division: Division,
    clips: usize,
    /// When each clip began.
    begun: Vec<f64>,
    /// Clips between the lanes.
    between: VecDeque<usize>,
    /// A clip that the first lane of a cut cannot hand over, because there is one between the lanes already.
    ready: Option<usize>,
    ended: Vec<[f64; 2]>,
    spans: Vec<Span>,
    open: [Option<OpenSpan>; 2],
    work: [VecDeque<Task>; 2],
    now: f64,
}

impl Play<'_> {
    /// Goes on to the next end of a piece of work; false where nothing is left to do.
    fn step(&mut self) -> bool {
        // What one lane takes may free the other.
        for _ in 0..2 {
            for lane in 0..self.lanes.len().min(2) {
                self.take(lane);
            }
        }
        for work in &mut self.work {
            if let Some(task) = work.front_mut() {
                task.begun.get_or_insert(self.now);
            }
        }
        let both = self.work.iter().all(|work| !work.is_empty());
        let left = |task: &Task| if both { task.left.corun } else { task.left.solo };
        let Some(next) = self.work.iter().filter_map(|work| work.front()).map(left).min_by(f64::total_cmp) else {
            return false;
        };
        self.now += next;
        for lane in 0..2 {
            let Some(task) = self.work[lane].front_mut() else { continue };
            let whole = left(task);
            if whole > next {
                let share = 1.0 - next / whole;
                task.left = Cost { solo: task.left.solo * share, corun: task.left.corun * share };
                continue;
            }
            if let Some(task) = self.work[lane].pop_front() {
                self.follow(lane, task);
            }
        }
        true
    }

    fn follow(&mut self, lane: usize, task: Task) {
        if let Some(open) = self.open[lane].as_mut().filter(|_| task.is_block) {
            open.blocks += 1;
        }
        match task.then {
            // Others' clips are looked for behind a block, not behind the conditions.
            Then::More if task.is_block => self.interrupt(lane),
            Then::More => {}
            Then::HandOver(clip) => {
                self.close(lane);
                match self.division {
                    Division::Cut(_) => self.ready = Some(clip),
                    _ => self.between.push_back(clip),
                }
            }
            // Behind its own clip a lane turns to the next one.
            Then::End(clip) => self.end(lane, clip, &task),
            Then::EndForOther(clip) => {
                self.end(lane, clip, &task);
                if let Some(open) = &mut self.open[lane] {
                    open.start_ms = self.now;
                }
                self.interrupt(lane);
            }
        }
        if matches!(self.work[lane].front(), Some(Task { then: Then::End(_), .. })) {
            self.close(lane);
        }
    }

    /// In data-parallel with one decoder its lane takes the others' clips, one after the other.
    fn interrupt(&mut self, lane: usize) {
        if (self.division, lane) == (Division::Whole(LastStageOn::Last), 1)
            && let Some(clip) = self.between.pop_front()
        {
            self.close(lane);
            self.work[lane].push_front(Task::new(self.lanes[lane].last, Then::EndForOther(clip)));
        }
    }

    fn end(&mut self, lane: usize, clip: usize, task: &Task) {
        self.ended.push([self.begun[clip], self.now]);
        let start_ms = task.begun.unwrap_or(self.now);
        self.spans.push(Span { item: clip, lane, work: Work::Last, start_ms, end_ms: self.now, blocks: 0 });
    }

    /// Ends the span of blocks that a lane is in, if it has done any.
    fn close(&mut self, lane: usize) {
        let Some(open) = &mut self.open[lane] else { return };
        let OpenSpan { clip: item, start_ms, blocks } = *open;
        if blocks > 0 {
            self.spans.push(Span { item, lane, work: Work::Blocks, start_ms, end_ms: self.now, blocks });
            *open = OpenSpan { start_ms: self.now, blocks: 0, ..*open };
        }
    }

    /// Gives a lane that has nothing to do its next clip, if there is one.
    fn take(&mut self, lane: usize) {
        if let Some(clip) = self.ready.filter(|_| self.between.is_empty()) {
            self.between.push_back(clip);
            self.ready = None;
        }
        let waits = lane == 0 && self.ready.is_some();
        if waits || !self.work[lane].is_empty() {
            return;
        }
        let blocks = self.lanes[lane].blocks.len();
        match (self.division, lane) {
            (Division::Alone, 0) => self.begin(lane, blocks, true),
            (Division::Cut(cut), 0) => self.begin(lane, cut.min(blocks), false),
            (Division::Cut(cut), _) => {
                if let Some(clip) = self.between.pop_front() {
                    self.open[lane] = Some(OpenSpan { clip, start_ms: self.now, blocks: 0 });
                    self.add(lane, cut.min(blocks)..blocks);
                    self.work[lane].push_back(Task::new(self.lanes[lane].last, Then::End(clip)));
                }
            }
            (Division::Whole(on), _) => {
                self.begin(lane, blocks, on == LastStageOn::Each || lane == 1);
                // With no clip left to begin it waits for those of others.
                if self.work[lane].is_empty() {
                    self.interrupt(lane);
                }
            }
            (Division::Alone, _) => {}
        }
    }

    /// The next clip's conditions and first blocks on a lane, and what follows on them there.
    fn begin(&mut self, lane: usize, blocks: usize, ends: bool) {
        let clip = self.begun.len();
        if clip == self.clips {
            return;
        }
        self.begun.push(self.now);
        self.open[lane] = Some(OpenSpan { clip, start_ms: self.now, blocks: 0 });
        let costs = &self.lanes[lane];
        self.work[lane].push_back(Task::new(costs.conditions, Then::More));
        self.add(lane, 0..blocks);
        if ends {
            self.work[lane].push_back(Task::new(costs.last, Then::End(clip)));
        } else if let Some(task) = self.work[lane].back_mut() {
            task.then = Then::HandOver(clip);
        }
    }

    fn add(&mut self, lane: usize, blocks: std::ops::Range<usize>) {
        let tasks =
            self.lanes[lane].blocks[blocks].iter().map(|&left| Task { is_block: true, ..Task::new(left, Then::More) });
        self.work[lane].extend(tasks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A lane whose clip takes `blocks` executions of one cost.
    fn lane(conditions: f64, block: Cost, blocks: usize, last: Cost) -> LaneCosts {
        LaneCosts { conditions: Cost::always(conditions), blocks: vec![block; blocks], last }
    }

    fn close(got: f64, want: f64) {
        assert!((got - want).abs() < 1e-6 * want.abs().max(1.0), "{got} instead of {want}");
    }

    #[test]
    fn the_last_of_two_clips_drains_alone() {
        // Alone 10 and 12 a block, together 11 and 15; cut at 4 of 6, then a last stage of 5, 6 together.
        let costs = |solo, corun| Cost { solo, corun };
        let lanes =
            [lane(2.0, costs(10.0, 11.0), 6, costs(9.0, 9.0)), lane(2.0, costs(12.0, 15.0), 6, costs(5.0, 6.0))];
        let two = forecast(&lanes, Division::Cut(4), 2);
        // The first clip's prefix alone: 2 + 40. Its suffix beside the second's prefix: two blocks and the last stage, 36, in which the
        // other has done its conditions (2) and 34 of its 44; the rest, 10/44 of 40, alone. Then its suffix, alone: 29.
        let rest = 10.0 / 11.0 * 10.0;
        close(two.clips[0][1], 78.0);
        assert_eq!((two.clips[0][0], two.clips[1][0]), (0.0, 42.0));
        close(two.end_ms(), 78.0 + rest + 29.0);
        close(two.period_ms().unwrap(), rest + 29.0);
        // An endless stream has the longer stage, with what is left of it alone.
        let many = forecast(&lanes, Division::Cut(4), 1001);
        close(many.clips[900][1] - many.clips[899][1], 36.0 + rest);
        // One lane alone.
        let alone = forecast(&lanes[1..], Division::Alone, 3);
        assert_eq!((alone.end_ms(), alone.period_ms()), (3.0 * 79.0, Some(79.0)));
        assert!(forecast(&lanes, Division::Cut(4), 0).clips.is_empty());
        assert_eq!(forecast(&lanes, Division::Cut(4), 1).period_ms(), None);
    }

    /// By hand with the rates of HeteroVDiff's Table 1 in seconds: three clips on the first engine, seven on the second, whose last
    /// stages wait for nobody.
    #[test]
    fn clips_from_one_queue_by_hand() {
        let takes = |blocks_ms: [f64; 2], last: f64, clips: usize, on: LastStageOn, want: f64| {
            let lanes = blocks_ms.map(|ms| lane(0.0, Cost::always(ms / 180.0), 180, Cost::always(last)));
            close(forecast(&lanes, Division::Whole(on), clips).end_ms(), want);
        };
        let (gpu, npu, decoder): (f64, f64, f64) = (180.0 * 12.8, 180.0 * 3.101, 275.0);
        let second_decode = (3.0 * (npu + decoder) + decoder + 3.0 * (npu + decoder)).max(2.0 * gpu) + decoder;
        let last = (second_decode + npu + decoder).max(3.0 * gpu) + decoder;
        takes([gpu, npu], decoder, 10, LastStageOn::Last, last);
        takes([4.0, 9.0], 1.0, 1, LastStageOn::Each, 5.0);
        takes([4.0, 9.0], 1.0, 3, LastStageOn::Each, 10.0);
        // The second clip is the second engine's; the first one's last stage is done on the way.
        takes([4.0, 9.0], 1.0, 2, LastStageOn::Last, 11.0);
        takes([4.0, 4.0], 1.0, 0, LastStageOn::Last, 0.0);
    }

    proptest! {
        /// Without an influence of one lane on the other a cut's period is equation 4's, from the second clip on and for any number of
        /// them: the slot between the lanes is never what they wait for.
        #[test]
        fn equation_4_where_lanes_do_not_slow_each_other(
            first in 0.1f64..20.0, second in 0.1f64..20.0, last in 0.0f64..50.0, cut in 0usize..=12, clips in 2usize..8,
        ) {
            let lanes = [first, second].map(|block| lane(0.0, Cost::always(block), 12, Cost::always(last)));
            let period = (cut as f64 * first).max((12 - cut) as f64 * second + last);
            let told = forecast(&lanes, Division::Cut(cut), clips);
            prop_assert_eq!(told.clips.len(), clips);
            prop_assert!((told.period_ms().unwrap() - period).abs() < 1e-6 * period);
        }

        /// Slower beside each other, but never slower than that: between all at the rates alone and all at those together.
        #[test]
        fn a_forecast_lies_between_rates_alone_and_together(
            blocks in proptest::array::uniform2((0.1f64..20.0, 1.0f64..2.0)), last in (0.0f64..50.0, 1.0f64..2.0),
            cut in 0usize..=6, clips in 1usize..6, which in 0usize..3,
        ) {
            let cost = |(solo, factor): (f64, f64)| Cost { solo, corun: solo * factor };
            let lanes = blocks.map(|block| lane(1.0, cost(block), 6, cost(last)));
            let with = |of: fn(Cost) -> f64| {
                let all = |cost: &Cost| Cost::always(of(*cost));
                lanes.clone().map(|lane| LaneCosts {
                    blocks: lane.blocks.iter().map(all).collect(), last: all(&lane.last), ..lane
                })
            };
            // Which lane takes a whole clip depends on who is free first, so those have no such order.
            let division = [Division::Cut(cut), Division::Cut(6 - cut), Division::Alone][which];
            let end = |lanes: &[LaneCosts]| forecast(lanes, division, clips).end_ms();
            let (low, this, high) = (end(&with(|cost| cost.solo)), end(&lanes), end(&with(|cost| cost.corun)));
            prop_assert!(low <= this * (1.0 + 1e-9) && this <= high * (1.0 + 1e-9), "{} {} {}", low, this, high);
        }

        /// All clips end, whoever makes them.
        #[test]
        fn no_clip_is_lost(
            first in 0.0f64..20.0, second in 0.0f64..20.0, last in 0.0f64..9.0, clips in 0usize..9, on_last in any::<bool>(),
        ) {
            let lanes = [first, second].map(|block| lane(0.0, Cost::always(block), 3, Cost::always(last)));
            let on = if on_last { LastStageOn::Last } else { LastStageOn::Each };
            let told = forecast(&lanes, Division::Whole(on), clips);
            prop_assert_eq!(told.clips.len(), clips);
            prop_assert!(told.clips.is_sorted_by(|a, b| a[1] <= b[1]) && told.clips.iter().all(|[begin, end]| begin <= end));
        }
    }
}
