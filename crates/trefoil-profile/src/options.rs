//! How to profile, and how far one is.

use crate::Launcher;
use crate::protocol::Sampling;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;
use trefoil_core::Granularity;

/// How to profile.
#[derive(Debug, Clone)]
#[allow(clippy::struct_excessive_bools)] // each is a switch of the command line
pub struct ProfileOptions {
    /// How nodes are grouped into operators.
    pub granularity: Granularity,
    /// Executions before the first sample.
    pub warmup: u32,
    /// Samples of each measurement.
    pub runs: u32,
    /// Wall-clock cap of each measurement in milliseconds; warm-up takes at most half as much again.
    pub cap_ms: f64,
    /// A first look: 3 warm-ups, at most 15 samples, a cap of 30 ms, two transfer sizes; overrides the three above.
    pub quick: bool,
    /// Declared watts by unit address, and `idle` for the idle package; used where no meter tells.
    pub watts: BTreeMap<String, f64>,
    /// Seconds of load per unit when a power meter is there; 0 measures no power.
    pub power_seconds: f64,
    /// Measure slowdown factors between units that share no resource.
    pub corun: bool,
    /// Besides the units asked for, measure the whole model on every CPU backend's one core and all cores.
    pub baselines: bool,
    /// Measure each node's time while the whole model runs, where a backend reports it.
    pub node_times: bool,
    /// Make an operator that does not run on a unit it was asked on an error.
    pub strict: bool,
    /// Measure anew what the journal already holds.
    pub fresh: bool,
    /// Longest time of one job (compile, check and samples) on an operator; whole models get five times as much.
    pub timeout: Duration,
    /// How to start workers.
    pub launcher: Launcher,
    /// Where the journal and compiled blobs lie; see [`crate::cache`].
    pub cache_dir: PathBuf,
}

impl ProfileOptions {
    /// Defaults: fused operators, 20 warm-ups, 200 runs capped at 1 s each, baselines, node times, no co-run, 2 s of
    /// load per power measurement.
    pub fn new(launcher: Launcher, cache_dir: PathBuf) -> Self {
        Self {
            granularity: Granularity::default(),
            warmup: 20,
            runs: 200,
            cap_ms: 1000.0,
            quick: false,
            watts: BTreeMap::new(),
            power_seconds: 2.0,
            corun: false,
            baselines: true,
            node_times: true,
            strict: false,
            fresh: false,
            timeout: Duration::from_mins(2),
            launcher,
            cache_dir,
        }
    }

    /// As [`ProfileOptions::new`], for a first look.
    pub fn quick(launcher: Launcher, cache_dir: PathBuf) -> Self {
        Self { quick: true, ..Self::new(launcher, cache_dir) }
    }

    /// Samples to take of operators, segments and whole models.
    pub fn sampling(&self) -> Sampling {
        if self.quick {
            Sampling { warmup: 3, runs: 15, batches: 3, cap_ms: 30.0 }
        } else {
            Sampling { warmup: self.warmup, runs: self.runs.max(1), batches: 5, cap_ms: self.cap_ms }
        }
    }

    /// Samples of pair measurements (transfers and slowdowns): one per batch, so more and smaller batches.
    pub(crate) fn pair_sampling(&self) -> Sampling {
        if self.quick {
            Sampling { warmup: 2, runs: 60, batches: 6, cap_ms: 60.0 }
        } else {
            Sampling { warmup: 5, runs: 600, batches: 12, cap_ms: self.cap_ms }
        }
    }

    /// Tensor sizes whose hand-over is measured.
    pub(crate) fn transfer_sizes(&self) -> &'static [u64] {
        if self.quick { &[256, 1 << 20] } else { &[256, 64 << 10, 1 << 20, 8 << 20] }
    }

    /// Text that tells measurements of different care apart in the journal.
    pub(crate) fn class(&self) -> String {
        let sampling = self.sampling();
        format!("w{} r{} b{} c{}", sampling.warmup, sampling.runs, sampling.batches, sampling.cap_ms)
    }
}

/// How far profiling is.
#[derive(Debug, Clone, PartialEq)]
pub struct Progress {
    /// Measurements done, journalled ones included.
    pub done: usize,
    /// Measurements planned.
    pub total: usize,
    /// How many of those done came from the journal.
    pub from_journal: usize,
    /// Time spent so far.
    pub elapsed: Duration,
    /// Estimate of the time left, from the measurements of the same kind so far; `None` before the first one.
    pub eta: Option<Duration>,
    /// What is being measured, one line: `Conv+Relu conv1 on ort:CPU@0`.
    pub current: String,
}

/// Estimates the time left: the mean cost of the measurements that were really made, times those left.
#[derive(Debug)]
pub(crate) struct Estimator {
    began: std::time::Instant,
    done: usize,
    from_journal: usize,
    total: usize,
    measuring: Duration,
}

impl Estimator {
    pub(crate) fn new(total: usize) -> Self {
        Self { began: std::time::Instant::now(), done: 0, from_journal: 0, total, measuring: Duration::ZERO }
    }

    pub(crate) fn progress(&self, current: String) -> Progress {
        let measured = (self.done - self.from_journal) as u32;
        let left = self.total.saturating_sub(self.done) as u32;
        let eta = (measured > 0).then(|| self.measuring / measured * left);
        let (done, total, from_journal) = (self.done, self.total, self.from_journal);
        Progress { done, total, from_journal, elapsed: self.began.elapsed(), eta, current }
    }

    pub(crate) fn measured(&mut self, took: Duration) {
        self.done += 1;
        self.measuring += took;
    }

    pub(crate) fn remembered(&mut self) {
        self.done += 1;
        self.from_journal += 1;
    }

    /// Plans that turned out larger or smaller than thought.
    pub(crate) fn set_total(&mut self, total: usize) {
        self.total = total.max(self.done);
    }

    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.done, self.total)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quick_is_quick() {
        let launcher = Launcher::new("worker".into(), Vec::new());
        let sampling = ProfileOptions::quick(launcher.clone(), "cache".into()).sampling();
        assert!(sampling.warmup == 3 && sampling.runs <= 15 && sampling.cap_ms <= 30.0);
        let full = ProfileOptions::new(launcher, "cache".into());
        assert_eq!((full.sampling().warmup, full.sampling().runs), (20, 200));
    }

    #[test]
    fn what_the_journal_gave_does_not_count_for_the_estimate() {
        let mut estimator = Estimator::new(10);
        assert_eq!(estimator.progress(String::new()).eta, None);
        estimator.remembered();
        estimator.measured(Duration::from_secs(2));
        estimator.measured(Duration::from_secs(4));
        let progress = estimator.progress("x".into());
        assert_eq!((progress.done, progress.from_journal, progress.eta), (3, 1, Some(Duration::from_secs(21))));
    }
}
