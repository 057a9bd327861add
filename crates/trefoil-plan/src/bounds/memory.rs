//! Memory limits of units in lower bounds, by prices of bytes.
//!
//! A unit holds the weights of the distinct operators that it executes. For prices `μ_u ≥ 0` of a byte on unit u every schedule
//! within the limits `M_u` has `Σ_u μ_u · (held_u − M_u) ≤ 0`, so a lower bound on the cost **plus** `Σ_j μ_{u(j)} · b_j`, less
//! `Σ_u μ_u · M_u`, is one on the cost: a Lagrangian relaxation. `b_j` are the bytes of job j's weights divided by the number of jobs
//! that share them, which is never more than what is held. What jobs are charged that way is one more cost of every (job, unit),
//! so paths, loads and minimum cuts stay what they are. **Any** prices are valid; they are searched one unit at a time.

use super::least::LeastTimes;
use super::{Bound, BoundKind, Effort};
use crate::problem::Problem;

/// Prices of a byte are tried from `scale / 4^SPREAD` to `scale · 4^SPREAD`, `scale` being the cost of everything per byte of everything.
const SPREAD: i32 = 5;
/// Then narrowed in this many steps by a golden section.
const NARROWING: usize = 14;
/// Passes over the units with limits.
const PASSES: usize = 2;

/// What the limits of a problem's units say.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Limits {
    units: usize,
    /// By job.
    bytes: Vec<f64>,
    /// By unit, where everything does not fit: the largest multiple of what all weights are multiples of.
    most: Vec<Option<f64>>,
}

impl Limits {
    /// `None` where every unit has room for everything.
    pub fn of(problem: &Problem) -> Option<Self> {
        let (number, bytes) = problem.dense.weights.as_ref()?;
        let total: u64 = bytes.iter().fold(0, |sum, &bytes| sum.saturating_add(bytes));
        let unit = bytes.iter().copied().fold(0, greatest_common_divisor).max(1);
        let most: Vec<Option<f64>> = problem
            .units()
            .iter()
            .map(|known| known.memory_bytes.filter(|&most| most < total).map(|most| (most / unit * unit) as f64))
            .collect();
        if most.iter().all(Option::is_none) {
            return None;
        }
        let mut sharers = vec![0u32; bytes.len()];
        for &number in number {
            sharers[number as usize] += 1;
        }
        let bytes = number
            .iter()
            .map(|&number| bytes[number as usize] as f64 / f64::from(sharers[number as usize].max(1)))
            .collect();
        Some(Self { units: problem.units().len(), bytes, most })
    }

    /// What every job is charged on every unit at prices of a byte, row-major jobs × units.
    pub fn charges(&self, prices: &[f64]) -> Vec<f64> {
        self.bytes.iter().flat_map(|bytes| prices.iter().map(move |price| bytes * price)).collect()
    }

    /// What the limits are worth at prices of a byte.
    pub fn allowance(&self, prices: &[f64]) -> f64 {
        self.most.iter().zip(prices).map(|(most, price)| most.unwrap_or(0.0) * price).sum()
    }

    /// The highest of `value`, the bound at prices of a byte, and where it is. `plain` is the bound without prices.
    pub fn search(&self, plain: f64, narrowing: usize, mut value: impl FnMut(&[f64]) -> f64) -> (f64, Vec<f64>) {
        let scale = plain / self.bytes.iter().sum::<f64>().max(1.0);
        let mut best = (plain, vec![0.0; self.units]);
        let limited: Vec<usize> = (0..self.units).filter(|&unit| self.most[unit].is_some()).collect();
        let passes = if limited.len() > 1 { PASSES } else { 1 };
        for _ in 0..passes {
            let before = best.0;
            for &unit in &limited {
                let mut prices = best.1.clone();
                let mut tried = |price: f64, best: &mut (f64, Vec<f64>)| {
                    prices[unit] = price;
                    let found = value(&prices);
                    if found > best.0 {
                        *best = (found, prices.clone());
                    }
                    found
                };
                let grid: Vec<f64> = (-SPREAD..=SPREAD).map(|step| scale * 4f64.powi(step)).collect();
                let values: Vec<f64> = grid.iter().map(|&price| tried(price, &mut best)).collect();
                let top = (0..grid.len()).max_by(|&a, &b| values[a].total_cmp(&values[b])).unwrap_or(0);
                // The value is nearly concave in a price: the top lies between the neighbours of the best one tried.
                let mut low = top.checked_sub(1).map_or(0.0, |below| grid[below]);
                let mut high = grid.get(top + 1).copied().unwrap_or(4.0 * grid[top]);
                let ratio = (5f64.sqrt() - 1.0) / 2.0;
                let (mut one, mut two) = (high - ratio * (high - low), low + ratio * (high - low));
                let (mut first, mut second) = (tried(one, &mut best), tried(two, &mut best));
                for _ in 0..narrowing {
                    if first >= second {
                        (high, two, second) = (two, one, first);
                        one = high - ratio * (high - low);
                        first = tried(one, &mut best);
                    } else {
                        (low, one, first) = (one, two, second);
                        two = low + ratio * (high - low);
                        second = tried(two, &mut best);
                    }
                }
            }
            if best.0 <= before * (1.0 + 1e-6) {
                break;
            }
        }
        best
    }

    /// Steps of the search that an effort pays for, `step` being the cost of one in simple steps.
    pub fn narrowing(effort: Effort, step: f64) -> usize {
        ((effort.0 / step.max(1.0)) as usize / (2 * PASSES)).saturating_sub(2 * SPREAD as usize).min(NARROWING)
    }
}

/// The better of a bound without and with prices of memory. `rough` is a quick bound to search prices with.
pub(super) fn with_memory(
    problem: &Problem,
    least: &LeastTimes,
    narrowing: usize,
    rough: impl Fn(&LeastTimes) -> f64,
    full: impl Fn(&LeastTimes) -> Bound,
) -> Bound {
    let plain = full(least);
    let Some(limits) = Limits::of(problem) else { return plain };
    let charged = |prices: &[f64]| least.charging(limits.charges(prices));
    let start = rough(least);
    let (found, prices) = limits.search(start, narrowing, |prices| rough(&charged(prices)) - limits.allowance(prices));
    if found <= start {
        return plain;
    }
    let value = full(&charged(&prices)).value - limits.allowance(&prices);
    if value > plain.value { Bound { value, kind: BoundKind::Memory } } else { plain }
}

fn greatest_common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}
