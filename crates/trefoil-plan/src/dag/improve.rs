//! The improvement phase: annealing of the whole, or window by window.

use super::anneal::{Cooling, Meter, Random, anneal};
use super::decode::{Choice, Decoder};
use super::window::{Timed, Times, Window, window};
use super::{Search, WINDOW_JOBS};
use crate::PlanError;
use crate::problem::{Goal, ProblemRequest, Schedule, Step};

/// Annealing runs of a problem that is annealed as a whole, each from the best so far and cooler than the last.
const RUNS: u32 = 4;
/// Evaluations of one run per job, and the least of them.
const EVALUATIONS_PER_JOB: u64 = 400;
const LEAST_EVALUATIONS: u64 = 2_000;
/// Jobs of the windows of successive passes.
const WINDOW_SIZES: [usize; 4] = [24, 48, 14, 72];
/// Evaluations of a window per job in it.
const WINDOW_EVALUATIONS: u64 = 14;
/// Passes over all windows without any gain after which improvement ends.
const IDLE_PASSES: u32 = 8;

impl Search<'_> {
    /// Improves the best schedule until the meter is used up or it has had enough.
    pub(super) fn improve(&mut self, meter: &mut Meter, random: &mut Random) -> Result<(), PlanError> {
        let jobs = self.problem.jobs().len();
        // Windows know neither arrivals nor deadlines.
        let plain = |request: &ProblemRequest| request.release_ms <= 0.0 && request.deadline_ms.is_none();
        let windows = self.problem.goal() == Goal::Makespan && self.problem.requests().iter().all(plain);
        if jobs > WINDOW_JOBS && windows {
            self.pass_windows(meter, random)?;
            return self.anneal_whole(meter, random, 1.0);
        }
        let windows = windows && jobs > WINDOW_SIZES[0];
        self.anneal_whole(meter, random, if windows { 0.75 } else { 1.0 })?;
        if windows { self.pass_windows(meter, random) } else { Ok(()) }
    }

    fn anneal_whole(&mut self, meter: &mut Meter, random: &mut Random, until: f64) -> Result<(), PlanError> {
        let jobs = self.problem.jobs().len() as u64;
        for run in 0..RUNS {
            let Some((choice, score)) = self.choice.clone() else { return Ok(()) };
            if meter.used() >= until || self.is_optimal() {
                return Ok(());
            }
            let used = meter.used();
            let heat = 0.05 / f64::from(1 << (2 * run));
            let cooling = Cooling {
                evaluations: (EVALUATIONS_PER_JOB * jobs).max(LEAST_EVALUATIONS),
                hot: score.value.max(1e-300) * heat,
                cold: score.value.max(1e-300) * heat * 1e-3,
                until: used + (until - used) / f64::from(RUNS - run),
                bound: self.bound,
            };
            let (choice, _) = anneal(&mut self.decoder, self.problem, choice, cooling, meter, random);
            self.try_choice(choice)?;
        }
        Ok(())
    }

    /// Sweeps windows over the best schedule; each pass improves disjoint windows and keeps what the whole confirms.
    fn pass_windows(&mut self, meter: &mut Meter, random: &mut Random) -> Result<(), PlanError> {
        let units = self.problem.units().len();
        let mut idle = 0;
        let mut effort = WINDOW_EVALUATIONS;
        for pass in 0.. {
            if meter.is_used_up() || self.is_optimal() || idle >= IDLE_PASSES {
                break;
            }
            let Some((schedule, evaluation)) = self.best.clone() else { break };
            let before = evaluation.score;
            // What keeps order beyond resources (one task at a time) is given up: orders alone may do better.
            let schedule = Schedule { after: Vec::new(), ..schedule };
            let evaluation = self.problem.evaluate(&schedule)?;
            let Some(timed) = Timed::new(self.problem, schedule, evaluation) else { break };
            meter.spend(2 * timed.schedule.order.len() as u64);
            let moments = Times::of(self.problem, &timed);
            let size = WINDOW_SIZES[pass % WINDOW_SIZES.len()];
            let mut changes: Vec<Change> = Vec::new();
            // Every other window: neighbours would each count on the other's edge.
            let mut first = random.below(2 * size);
            while first < timed.jobs.len() && !meter.is_used_up() {
                changes.extend(self.improve_window(&timed, first, size, effort, meter, random));
                first += 2 * size;
            }
            self.apply(moments, &changes, units, meter, 3)?;
            let gained = self.best.as_ref().is_some_and(|(_, best)| best.score.is_better(&before));
            idle = if gained { 0 } else { idle + 1 };
            if !gained {
                effort = (2 * effort).min(16 * WINDOW_EVALUATIONS);
            }
        }
        // Annealing of the whole goes on from here.
        if let Some((schedule, evaluation)) = self.best.clone() {
            let mut urgency = vec![0.0; schedule.unit.len()];
            for (step, (start, _)) in schedule.order.iter().zip(&evaluation.spans) {
                if let Step::Job(job) = step {
                    urgency[*job as usize] = *start;
                }
            }
            self.try_choice(Choice { unit: schedule.unit, urgency })?;
        }
        Ok(())
    }

    fn improve_window(
        &self,
        timed: &Timed,
        first: usize,
        size: usize,
        effort: u64,
        meter: &mut Meter,
        random: &mut Random,
    ) -> Option<Change> {
        let mut window = window(self.problem, timed, first, size)?;
        let around = std::mem::take(&mut window.around);
        let mut decoder = Decoder::within(&window.problem, around);
        let start = window.start.clone();
        // Steps outside slow nothing here, neither now nor then: compare with what the window comes to by itself.
        let before = decoder.run(&start).value.min(window.value);
        let span = start.urgency.iter().copied().fold(0.0, f64::max).max(window.value * 1e-6).max(1e-300);
        let cooling = Cooling {
            evaluations: effort * window.jobs.len() as u64,
            hot: 0.02 * span,
            cold: 1e-4 * span,
            until: 1.0,
            bound: 0.0,
        };
        let (choice, after) = anneal(&mut decoder, &window.problem, start, cooling, meter, random);
        if after.value >= before - 1e-3 * span {
            return None;
        }
        decoder.run(&choice);
        let (order, starts) = (decoder.order.clone(), decoder.starts.clone());
        drop(decoder);
        Some(Change { window, choice, order, starts })
    }

    /// Applies all changes at once if the whole confirms them, else each half, `depth` times.
    fn apply(
        &mut self,
        mut times: Times,
        changes: &[Change],
        units: usize,
        meter: &mut Meter,
        depth: u32,
    ) -> Result<Times, PlanError> {
        if changes.is_empty() {
            return Ok(times);
        }
        let mut whole = times.clone();
        for change in changes {
            change.window.carry(&mut whole, units, &change.choice, &change.order, &change.starts);
        }
        let schedule = whole.schedule(self.problem);
        let evaluation = self.problem.evaluate(&schedule)?;
        meter.spend(2 * schedule.order.len() as u64);
        if self.best.as_ref().is_none_or(|(_, best)| evaluation.score.is_better(&best.score)) {
            self.best = Some((schedule, evaluation));
            return Ok(whole);
        }
        if depth > 0 && changes.len() > 1 {
            let (first, second) = changes.split_at(changes.len() / 2);
            times = self.apply(times, first, units, meter, depth - 1)?;
            if !meter.is_used_up() {
                times = self.apply(times, second, units, meter, depth - 1)?;
            }
        }
        Ok(times)
    }
}

/// A window decided anew.
struct Change {
    window: Window,
    choice: Choice,
    order: Vec<Step>,
    starts: Vec<f64>,
}
