//! From raw times to samples.
//!
//! Shared machines drift: the clock frequency changes, neighbours come and go. So the samples of one measurement are
//! split into batches, batches of things that will be compared alternate, and what is kept is the **calmest batch**,
//! the one with the lowest median: its median and percentiles, with the count, minimum and maximum over all batches.
//! Interference only ever adds time, so this estimates the undisturbed time; the same rule holds for operators,
//! segments, whole models and transfers, which are then comparable.

use crate::protocol::Sampling;
use std::time::{Duration, Instant};
use trefoil_core::Samples;

/// Index and summary of the calmest batch (see module); `None` if there is no sample.
pub fn calmest(batches: &mut [Vec<f64>]) -> Option<(usize, Samples)> {
    let mut best: Option<(usize, Samples)> = None;
    let (mut count, mut min, mut max) = (0, f64::INFINITY, f64::NEG_INFINITY);
    for (index, batch) in batches.iter_mut().enumerate() {
        let Some(samples) = Samples::from_values(batch) else { continue };
        count += samples.count;
        min = min.min(samples.min);
        max = max.max(samples.max);
        if best.is_none_or(|(_, best)| samples.median < best.median) {
            best = Some((index, samples));
        }
    }
    best.map(|(index, samples)| (index, Samples { count, min, max, ..samples }))
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
    fn the_calmest_batch_stands_for_all() {
        let mut batches = [vec![9.0, 9.5, 9.1], vec![2.0, 1.0, 50.0], vec![], vec![3.0, 3.0]];
        let (index, samples) = calmest(&mut batches).unwrap();
        assert_eq!(index, 1);
        assert_eq!((samples.median, samples.count, samples.min, samples.max), (2.0, 8, 1.0, 50.0));
        assert!(calmest(&mut [vec![], vec![]]).is_none());
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
