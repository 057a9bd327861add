//! Response times in bounded memory.

use serde::{Deserialize, Serialize};

/// Width of a bucket relative to its lower edge: how exact quantiles are.
const WIDTH: f64 = 0.01;
/// Lower edge of the first bucket, in milliseconds.
const FIRST_MS: f64 = 1e-4;
/// Buckets; the last ends beyond five hours.
const BUCKETS: usize = 2600;

/// A histogram of times with buckets of 1 % width. Its size does not depend on how many it holds, so that serving for days
/// takes no more memory than serving for a second.
#[derive(Debug, Clone, PartialEq)]
pub struct Latencies {
    counts: Vec<u64>,
    count: u64,
    sum_ms: f64,
    max_ms: f64,
}

impl Default for Latencies {
    fn default() -> Self {
        Self { counts: vec![0; BUCKETS], count: 0, sum_ms: 0.0, max_ms: 0.0 }
    }
}

/// What is told of many times; milliseconds. Quantiles are exact to 1 %.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencySummary {
    /// How many.
    pub count: u64,
    /// Mean.
    pub mean_ms: f64,
    /// Median.
    pub p50_ms: f64,
    /// 95th percentile.
    pub p95_ms: f64,
    /// 99th percentile.
    pub p99_ms: f64,
    /// Largest.
    pub max_ms: f64,
}

impl Latencies {
    /// Adds one time.
    pub fn add(&mut self, ms: f64) {
        let at = if ms > FIRST_MS { ((ms / FIRST_MS).ln() / (1.0 + WIDTH).ln()) as usize } else { 0 };
        self.counts[at.min(BUCKETS - 1)] += 1;
        self.count += 1;
        self.sum_ms += ms;
        self.max_ms = self.max_ms.max(ms);
    }

    /// How many times it holds.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The time that a fraction of all are at most, 0 without any.
    pub fn quantile(&self, fraction: f64) -> f64 {
        let rank = (fraction * self.count as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (at, &count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank && count > 0 {
                // The middle of the bucket, on the logarithmic scale.
                let middle = FIRST_MS * (1.0 + WIDTH).powf(at as f64 + 0.5);
                return middle.min(self.max_ms);
            }
        }
        0.0
    }

    /// The summary.
    pub fn summary(&self) -> LatencySummary {
        LatencySummary {
            count: self.count,
            mean_ms: if self.count > 0 { self.sum_ms / self.count as f64 } else { 0.0 },
            p50_ms: self.quantile(0.5),
            p95_ms: self.quantile(0.95),
            p99_ms: self.quantile(0.99),
            max_ms: self.max_ms,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn nothing_is_nothing() {
        assert_eq!(Latencies::default().summary(), LatencySummary::default());
    }

    #[test]
    fn times_outside_the_buckets_are_kept() {
        let mut latencies = Latencies::default();
        for ms in [0.0, 1e-9, 1e9] {
            latencies.add(ms);
        }
        let summary = latencies.summary();
        assert_eq!((summary.count, summary.max_ms.to_bits()), (3, 1e9f64.to_bits()));
    }

    proptest! {
        /// Oracle: the sorted times themselves.
        #[test]
        fn quantiles_are_exact_to_one_percent(times in prop::collection::vec(0.001f64..5000.0, 1..200), fraction in 0.01f64..1.0) {
            let mut latencies = Latencies::default();
            for &ms in &times {
                latencies.add(ms);
            }
            let mut sorted = times;
            sorted.sort_by(f64::total_cmp);
            let rank = ((fraction * sorted.len() as f64).ceil().max(1.0)) as usize;
            let exact = sorted[rank - 1];
            prop_assert!((latencies.quantile(fraction) / exact - 1.0).abs() <= WIDTH, "{} for {exact}", latencies.quantile(fraction));
        }
    }
}
