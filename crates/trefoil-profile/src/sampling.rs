//! From raw times to samples.
//!
//! Shared machines drift: the clock frequency changes, neighbours come and go. So the samples of one measurement are
//! split into batches, batches of things that will be compared alternate, and what is kept is the **typical batch**,
//! the one whose median is the (lower) median of the batches' medians: its median and percentiles, with the count,
//! minimum and maximum over all batches. A burst that hits fewer than half of the batches changes nothing. The same rule
//! holds for operators, segments, whole models and transfers, which are then comparable, and it is the rule by which
//! fresh processes report: on a machine that is never calm, the calmest batch promises what no later run keeps.

use crate::protocol::Sampling;
use std::time::{Duration, Instant};
use trefoil_core::Samples;

/// Index and summary of the typical batch (see module); `None` if there is no sample.
pub fn typical(batches: &mut [Vec<f64>]) -> Option<(usize, Samples)> {
    let found: Vec<(usize, Samples)> = batches
        .iter_mut()
        .enumerate()
        .filter_map(|(index, batch)| Some((index, Samples::from_values(batch)?)))
        .collect();
    let summaries: Vec<Samples> = found.iter().map(|(_, samples)| *samples).collect();
    let at = typical_of(&summaries)?;
    Some((found[at].0, pooled(&summaries, at)))
}

/// Index of the summary whose median is the lower median of all medians; the first of equals.
pub fn typical_of(summaries: &[Samples]) -> Option<usize> {
    let mut order: Vec<usize> = (0..summaries.len()).collect();
    order.sort_by(|&one, &other| summaries[one].median.total_cmp(&summaries[other].median));
    order.get(order.len().checked_sub(1)? / 2).copied()
}

/// One summary for all, with count, minimum and maximum of all.
pub fn pooled(summaries: &[Samples], at: usize) -> Samples {
    let mut samples = summaries[at];
    samples.count = summaries.iter().map(|one| one.count).sum();
    samples.min = summaries.iter().map(|one| one.min).fold(f64::INFINITY, f64::min);
    samples.max = summaries.iter().map(|one| one.max).fold(f64::NEG_INFINITY, f64::max);
    samples
}

/// Paces one thing's executions: warm-up, then batches, under a time cap.
#[derive(Debug)]
pub struct Pacer {
    sampling: Sampling,
    batch_runs: u32,
    batch_cap: Duration,
}

impl Pacer {
    /// For `sampling`; at least one batch of at least one run.
    pub fn new(sampling: Sampling) -> Self {
        let batches = sampling.batches.clamp(1, sampling.runs.max(1));
        let cap = Duration::from_secs_f64(sampling.cap_ms.clamp(0.0, 3.6e6) / 1e3);
        let batch_runs = sampling.runs.max(1).div_ceil(batches);
        Self { sampling: Sampling { batches, ..sampling }, batch_runs, batch_cap: cap / batches }
    }

    /// Number of batches to take.
    pub fn batches(&self) -> u32 {
        self.sampling.batches
    }

    /// Executions of one batch, and its share of the cap.
    pub fn batch_limits(&self) -> (u32, Duration) {
        (self.batch_runs, self.batch_cap)
    }

    /// Warms up: the asked number of executions, fewer once they have taken half the cap, at least one.
    pub fn warm_up<E>(&self, mut execute: impl FnMut() -> Result<(), E>) -> Result<(), E> {
        let half = Duration::from_secs_f64(self.sampling.cap_ms.clamp(0.0, 3.6e6) / 2e3);
        let began = Instant::now();
        for _ in 0..self.sampling.warmup.max(1) {
            execute()?;
            if began.elapsed() > half {
                break;
            }
        }
        Ok(())
    }

    /// Takes one batch: `execute` is called until the batch is full or its share of the cap is used up.
    pub fn batch<E>(&self, mut execute: impl FnMut() -> Result<(), E>) -> Result<(), E> {
        let began = Instant::now();
        for _ in 0..self.batch_runs {
            execute()?;
            if began.elapsed() > self.batch_cap {
                break;
            }
        }
        Ok(())
    }
}

/// Milliseconds between two instants.
pub fn milliseconds(from: Instant, to: Instant) -> f64 {
    to.duration_since(from).as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_typical_batch_stands_for_all() {
        let mut batches = [vec![9.0, 9.5, 9.1], vec![2.0, 1.0, 50.0], vec![], vec![3.0, 3.0]];
        let (index, samples) = typical(&mut batches).unwrap();
        assert_eq!(index, 3);
        assert_eq!((samples.median, samples.count, samples.min, samples.max), (3.0, 8, 1.0, 50.0));
        assert!(typical(&mut [vec![], vec![]]).is_none());
        // Of an even number the lower one: a single disturbed batch of two must not stand for both.
        let (index, _) = typical(&mut [vec![8.0], vec![5.0]]).unwrap();
        assert_eq!(index, 1);
    }

    #[test]
    fn pacing_honours_runs_and_cap() {
        let count = |sampling| {
            let pacer = Pacer::new(sampling);
            let mut runs = 0;
            for _ in 0..pacer.batches() {
                pacer
                    .batch(|| {
                        runs += 1;
                        std::thread::sleep(Duration::from_millis(2));
                        Ok::<_, ()>(())
                    })
                    .unwrap();
            }
            runs
        };
        assert_eq!(count(Sampling { warmup: 0, runs: 10, batches: 3, cap_ms: 1e5 }), 12);
        assert_eq!(count(Sampling { warmup: 0, runs: 100, batches: 2, cap_ms: 0.0 }), 2);
        assert_eq!(count(Sampling { warmup: 0, runs: 1, batches: 5, cap_ms: 1e5 }), 1);
    }
}
