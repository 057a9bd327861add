//! The improvement phase: annealing of the whole, or window by window.

use super::anneal::{Cooling, Meter, Random, anneal};
use super::decode::{Choice, Decoder};
use super::window::{Timed, Window, window};
use super::{Search, WINDOW_JOBS};
use crate::PlanError;
use crate::problem::{Goal, Score, Step};

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
    /// Improves the best list schedule until the meter is used up or it has had enough.
    pub(super) fn improve(&mut self, meter: &mut Meter, random: &mut Random) -> Result<(), PlanError> {
        if self.problem.jobs().len() > WINDOW_JOBS && self.problem.goal() == Goal::Makespan {
            self.pass_windows(meter, random)?;
        }
        self.anneal_whole(meter, random)
    }

    fn anneal_whole(&mut self, meter: &mut Meter, random: &mut Random) -> Result<(), PlanError> {
        let jobs = self.problem.jobs().len() as u64;
        for run in 0..RUNS {
            let Some((choice, score)) = self.choice.clone() else { return Ok(()) };
            if meter.is_used_up() || self.is_optimal() {
                return Ok(());
            }
            let used = meter.used();
            let heat = 0.05 / f64::from(1 << (2 * run));
            let cooling = Cooling {
                evaluations: (EVALUATIONS_PER_JOB * jobs).max(LEAST_EVALUATIONS),
                hot: score.value.max(1e-300) * heat,
                cold: score.value.max(1e-300) * heat * 1e-3,
                until: used + (1.0 - used) / f64::from(RUNS - run),
                bound: self.bound,
            };
            let (choice, _) = anneal(&mut self.decoder, self.problem, choice, cooling, meter, random);
            self.try_choice(choice)?;
        }
        Ok(())
    }

    /// Sweeps windows over the schedule; each pass improves disjoint windows and keeps what the whole confirms.
    fn pass_windows(&mut self, meter: &mut Meter, random: &mut Random) -> Result<(), PlanError> {
        let Some((mut choice, _)) = self.choice.clone() else { return Ok(()) };
        let mut score = self.decoder.run(&choice);
        let mut idle = 0;
        for pass in 0.. {
            if meter.is_used_up() || self.is_optimal() || idle >= IDLE_PASSES {
                break;
            }
            // From here on urgencies are start times: those of a window are then those of the whole, shifted.
            self.start_times(&mut choice);
            let settled = self.decoder.run(&choice);
            score = settled;
            let Some(timed) = Timed::new(self.problem, &choice, &self.decoder) else { break };
            meter.spend(2 * self.decoder.order.len() as u64);
            let size = WINDOW_SIZES[pass % WINDOW_SIZES.len()];
            let mut first = random.below(size);
            let mut changes: Vec<Change> = Vec::new();
            if first > 1 {
                changes.extend(self.improve_window(&choice, &timed, 0, first, meter, random));
            }
            while first < timed.jobs.len() && !meter.is_used_up() {
                changes.extend(self.improve_window(&choice, &timed, first, size, meter, random));
                first += size;
            }
            let before = score;
            self.apply(&mut choice, &mut score, &changes, meter)?;
            idle = if score.is_better(&before) { 0 } else { idle + 1 };
        }
        let _ = score;
        Ok(())
    }

    /// Makes each urgency the job's start in the decoder's last run.
    fn start_times(&self, choice: &mut Choice) {
        for (&step, &start) in self.decoder.order.iter().zip(&self.decoder.starts) {
            if let Step::Job(job) = step {
                choice.urgency[job as usize] = start;
            }
        }
    }

    fn improve_window(
        &self,
        choice: &Choice,
        timed: &Timed,
        first: usize,
        size: usize,
        meter: &mut Meter,
        random: &mut Random,
    ) -> Option<Change> {
        let Window { problem, around, start, jobs, zero_ms } = window(self.problem, choice, timed, first, size)?;
        let mut decoder = Decoder::within(&problem, around);
        let before = decoder.run(&start);
        let span = start.urgency.iter().copied().fold(0.0, f64::max).max(before.value * 1e-6).max(1e-300);
        let cooling = Cooling {
            evaluations: WINDOW_EVALUATIONS * jobs.len() as u64,
            hot: 0.02 * span,
            cold: 1e-4 * span,
            until: 1.0,
            bound: 0.0,
        };
        let (best, after) = anneal(&mut decoder, &problem, start, cooling, meter, random);
        if !(after.value < before.value * (1.0 - 1e-9)) {
            return None;
        }
        decoder.run(&best);
        let mut change = Change { jobs, unit: best.unit, urgency: vec![0.0; best.urgency.len()] };
        for (&step, &start) in decoder.order.iter().zip(&decoder.starts) {
            if let Step::Job(job) = step {
                change.urgency[job as usize] = zero_ms + start;
            }
        }
        Some(change)
    }

    /// Applies all changes at once if the whole confirms them, else one by one.
    fn apply(
        &mut self,
        choice: &mut Choice,
        score: &mut Score,
        changes: &[Change],
        meter: &mut Meter,
    ) -> Result<(), PlanError> {
        if changes.is_empty() {
            return Ok(());
        }
        let mut all = choice.clone();
        changes.iter().for_each(|change| change.apply(&mut all));
        let found = self.decoder.run(&all);
        meter.spend(self.decoder.order.len() as u64);
        if found.is_better(score) {
            *choice = all;
            *score = found;
        } else if let [one, two @ ..] = changes
            && !two.is_empty()
        {
            let middle = changes.len() / 2;
            let _ = one;
            self.apply(choice, score, &changes[..middle], meter)?;
            if !meter.is_used_up() {
                self.apply(choice, score, &changes[middle..], meter)?;
            }
            return Ok(());
        }
        self.try_choice(choice.clone())
    }
}

/// New units and urgencies of a window's jobs.
struct Change {
    jobs: Vec<u32>,
    unit: Vec<u32>,
    urgency: Vec<f64>,
}

impl Change {
    fn apply(&self, choice: &mut Choice) {
        for ((&job, &unit), &urgency) in self.jobs.iter().zip(&self.unit).zip(&self.urgency) {
            choice.unit[job as usize] = unit;
            choice.urgency[job as usize] = urgency;
        }
    }
}
