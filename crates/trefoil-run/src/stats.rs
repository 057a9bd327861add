//! Medians and intervals that hold without assuming any distribution.

use serde::{Deserialize, Serialize};

/// A median with an interval and the confidence that the interval really has.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Median of the samples.
    pub median: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
    /// Probability that the true median lies inside, for independent samples of any distribution. Below 0.95 when there
    /// are fewer than six samples: then it is the best that so few can give.
    pub confidence: f64,
}

/// Confidence that intervals aim for.
pub const CONFIDENCE: f64 = 0.95;

/// The order-statistic (sign-test) interval of the median: the narrowest pair `x₍ₖ₎ … x₍ₙ₊₁₋ₖ₎` of ordered samples
/// whose coverage `1 − 2·P(Bin(n, ½) < k)` reaches [`CONFIDENCE`]; the whole range when none does. Exact for any
/// continuous distribution, needs no random numbers. `None` without samples. Sorts `samples`.
pub fn median_interval(samples: &mut [f64]) -> Option<Interval> {
    let count = samples.len();
    if count == 0 {
        return None;
    }
    samples.sort_by(f64::total_cmp);
    let middle = count / 2;
    let median = if count % 2 == 1 { samples[middle] } else { f64::midpoint(samples[middle - 1], samples[middle]) };
    // Walk k upwards while the coverage stays: `term` is C(n, k)/2ⁿ, `below` their sum up to k − 1.
    let mut term = 0.5f64.powi(count as i32);
    let mut below = term;
    let mut best = (0, 1.0 - 2.0 * below);
    for rank in 1..count.div_ceil(2) {
        term *= (count - rank + 1) as f64 / rank as f64;
        below += term;
        let coverage = 1.0 - 2.0 * below;
        if coverage < CONFIDENCE {
            break;
        }
        best = (rank, coverage);
    }
    let (rank, coverage) = best;
    Some(Interval { median, low: samples[rank], high: samples[count - 1 - rank], confidence: coverage.max(0.0) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn known_ranks_and_coverages() {
        // Tables of the sign test: n = 5 covers 0.9375 with its whole range, 6 → 0.96875, 9 → [2, 8] with 0.9609.
        let of = |count: usize| median_interval(&mut (1..=count).map(|i| i as f64).collect::<Vec<_>>()).unwrap();
        assert_eq!(of(1), Interval { median: 1.0, low: 1.0, high: 1.0, confidence: 0.0 });
        assert_eq!(of(5), Interval { median: 3.0, low: 1.0, high: 5.0, confidence: 0.9375 });
        assert_eq!(of(6), Interval { median: 3.5, low: 1.0, high: 6.0, confidence: 0.96875 });
        let nine = of(9);
        assert_eq!((nine.low, nine.high), (2.0, 8.0));
        assert!((nine.confidence - 0.9609).abs() < 1e-4);
        let twenty = of(20);
        assert_eq!((twenty.low, twenty.high), (6.0, 15.0));
        assert!(median_interval(&mut []).is_none());
    }

    proptest! {
        #[test]
        fn the_interval_holds_the_median_and_only_samples(mut samples in proptest::collection::vec(-1e3f64..1e3, 1..60)) {
            let interval = median_interval(&mut samples).unwrap();
            prop_assert!(interval.low <= interval.median && interval.median <= interval.high);
            prop_assert!(samples.contains(&interval.low) && samples.contains(&interval.high));
            prop_assert!(samples.len() < 6 || interval.confidence >= CONFIDENCE);
        }
    }

    #[test]
    fn coverage_by_simulation() {
        // 4,000 draws of 9 uniform samples: the interval must hold the true median ½ about as often as it says.
        let mut state = 7u64;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        let inside = (0..4000)
            .filter(|_| {
                let interval = median_interval(&mut (0..9).map(|_| uniform()).collect::<Vec<_>>()).unwrap();
                interval.low <= 0.5 && 0.5 <= interval.high
            })
            .count();
        let share = inside as f64 / 4000.0;
        assert!((share - 0.961).abs() < 0.012, "{share}");
    }
}
