//! Lower bounds by contradiction: suppose that everything took less than v.
//!
//! Then a job can be on a unit only if what must come before it, its own time there and what must come after it add up to less
//! than v. Without the other pairs of jobs and units the rest have fewer ways too, so this is repeated until nothing changes. If some
//! job is left without a unit, or the load with transfers of what is left ([`super::priced`]) is v or more, or every placement of few
//! jobs ([`super::enumerate`]) takes as long, nothing takes less than v. (Klein and Scholl 1999 call such bounds destructive; leaving out what is too long for v is how Lenstra, Shmoys and Tardos
//! 1990 strengthen the load.) The largest v is searched.

use super::Effort;
use super::enumerate::Placements;
use super::least::LeastTimes;
use super::part::{Border, Part};
use super::priced::{Moment, Pricing};
use crate::problem::Problem;

/// Largest step of the search for v beyond what is known, and the relative difference at which it ends.
const FIRST_STEP: f64 = 0.04;
const CLOSE: f64 = 0.004;
/// Most values of v that are tried.
const TRIES: usize = 9;
/// Stretches of more jobs have too many placements.
pub(super) const MOST_PLACED: usize = 24;
/// Nanoseconds that looking at a partial placement takes.
const NODE_NS: f64 = 600.0;

/// Partial placements for each v, of as many stretches, that an effort pays for.
pub(super) fn nodes(effort: Effort, stretches: usize) -> u64 {
    (effort.0 / (NODE_NS * (stretches.max(1) * TRIES) as f64)).min(100_000.0) as u64
}

/// Most times that pairs are left out for one v.
const PASSES: usize = 6;

/// Jobs that must all happen within one stretch of time, and what is known of them.
pub(super) struct Stretch<'s> {
    pub problem: &'s Problem,
    pub least: &'s LeastTimes,
    /// In topological order.
    pub jobs: &'s [u32],
    pub border: Border<'s>,
    /// Whether requests' arrivals count: where the stretch is everything.
    pub arrivals: bool,
    pub moments: &'s [Moment],
    /// Rounds of the search for prices at each v.
    pub rounds: usize,
    /// Partial placements that are looked at for each v.
    pub nodes: u64,
    /// Added to the load: nothing happens before.
    pub earliest: f64,
}

impl Stretch<'_> {
    /// A bound on the stretch's length that is at least `known`; `weights` are prices of units that show that.
    pub fn bound(&self, known: f64, weights: &[f64]) -> f64 {
        if self.moments.is_empty() || self.rounds == 0 && !self.are_few() {
            return known;
        }
        let units = self.least.units();
        let able: Vec<bool> = self
            .jobs
            .iter()
            .flat_map(|&job| (0..units).map(move |unit| self.least.ms(job as usize, unit).is_finite()))
            .collect();
        let part = Part::new(self.problem, self.jobs, self.border);
        let mut proven = known;
        let mut step = FIRST_STEP;
        let mut above = f64::INFINITY;
        for _ in 0..TRIES {
            let tried = if above.is_finite() { 0.5 * (proven + above) } else { proven * (1.0 + step) };
            if tried <= 0.0 || tried - proven <= CLOSE * proven {
                break;
            }
            if self.refutes(tried, &able, &part, weights) {
                proven = tried;
                step *= 2.0;
            } else {
                above = tried;
            }
        }
        proven
    }

    /// Whether placements are worth a look.
    fn are_few(&self) -> bool {
        self.nodes > 0 && self.jobs.len() <= MOST_PLACED
    }

    /// Whether nothing takes less than `v`.
    fn refutes(&self, v: f64, able: &[bool], part: &Part, weights: &[f64]) -> bool {
        let units = self.least.units();
        let mut left = able.to_vec();
        let mut tails = self.tails(&left);
        let mut fewer = false;
        for _ in 0..PASSES {
            let heads = self.heads(&left);
            let mut changed = false;
            for (slot, (head, tail)) in left.iter_mut().zip(heads.iter().zip(&tails)) {
                if *slot && head + tail >= v * (1.0 + 1e-12) {
                    *slot = false;
                    changed = true;
                }
            }
            if left.chunks_exact(units).any(|row| !row.contains(&true)) {
                return true;
            }
            if !changed {
                break;
            }
            fewer = true;
            tails = self.tails(&left);
        }
        // The load of everything is known.
        if fewer && self.rounds > 0 {
            let part = part.without(&left);
            if Pricing::new(&part, self.moments).reaches(weights, self.rounds, v - self.earliest) {
                return true;
            }
        }
        self.are_few() && Placements::new(self, part, &left, &tails, weights, v, self.nodes).all_take_long()
    }

    /// The earliest end of each job on each unit, row-major; infinite where it is left out.
    fn heads(&self, left: &[bool]) -> Vec<f64> {
        let (dense, units) = (&self.problem.dense, self.least.units());
        let mut heads = vec![f64::INFINITY; left.len()];
        for (at, &job) in self.jobs.iter().enumerate() {
            for unit in (0..units).filter(|unit| left[at * units + unit]) {
                let factor = self.least.transfer_factor(unit);
                let mut start = if self.arrivals { dense.release[job as usize] } else { 0.0 };
                for &tensor in dense.inputs.row(job as usize) {
                    let tensor = tensor as usize;
                    let maker = dense.producer[tensor];
                    let there = match self.local(maker) {
                        Some(maker) => (0..units)
                            .map(|from| heads[maker * units + from] + dense.transfer(tensor, from, unit) * factor)
                            .fold(f64::INFINITY, f64::min),
                        None if maker == u32::MAX && self.border.inputs => {
                            let arrival = if self.arrivals { dense.tensor_release[tensor] } else { 0.0 };
                            arrival + dense.transfer(tensor, units, unit) * factor
                        }
                        None => match self.border.before {
                            Some((before, from)) if before == maker => dense.transfer(tensor, from, unit) * factor,
                            _ => 0.0,
                        },
                    };
                    start = start.max(there);
                }
                heads[at * units + unit] = start + self.least.ms(job as usize, unit);
            }
        }
        heads
    }

    /// The least time from the end of each job on each unit to the end of the stretch.
    fn tails(&self, left: &[bool]) -> Vec<f64> {
        let (dense, units) = (&self.problem.dense, self.least.units());
        let mut tails = vec![0.0f64; left.len()];
        for (at, &job) in self.jobs.iter().enumerate().rev() {
            for unit in (0..units).filter(|unit| left[at * units + unit]) {
                let mut rest = 0.0f64;
                for &tensor in dense.outputs.row(job as usize) {
                    let tensor = tensor as usize;
                    let moved = |to: usize| dense.transfer(tensor, unit, to) * self.least.transfer_factor(to);
                    for &reader in dense.consumers.row(tensor) {
                        rest = rest.max(match (self.local(reader), self.border.after) {
                            (Some(next), _) => (0..units)
                                .filter(|to| left[next * units + to])
                                .map(|to| moved(to) + self.least.ms(reader as usize, to) + tails[next * units + to])
                                .fold(f64::INFINITY, f64::min),
                            (None, Some((after, to))) if after == reader => moved(to),
                            _ => 0.0,
                        });
                    }
                    if self.border.outputs {
                        rest = rest.max(dense.to_host[tensor * units + unit] * self.least.transfer_factor(unit));
                    }
                }
                tails[at * units + unit] = rest;
            }
        }
        tails
    }

    /// Place of a job among those of the stretch.
    pub fn local(&self, job: u32) -> Option<usize> {
        let at = *self.border.local.get(job as usize)?;
        (at != u32::MAX).then_some(at as usize)
    }
}
