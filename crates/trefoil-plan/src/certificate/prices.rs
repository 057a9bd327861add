//! Proofs with prices of memory ([`crate::bounds::memory`]).

use super::{MemoryPrices, Proof};
use crate::bounds::memory::Limits;
use crate::problem::Problem;

/// Steps in which the price of a limited unit's bytes is narrowed.
const PRICE_STEPS: usize = 14;

/// Prices of memory that a proof counts with; none by default.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Prices<'p> {
    /// By unit, of a byte.
    pub per_byte: &'p [f64],
    /// Row-major jobs × units.
    pub charges: &'p [f64],
    /// What the limits are worth.
    pub allowance: f64,
}

impl Prices<'_> {
    /// As certificates state them.
    pub fn named(&self, problem: &Problem) -> MemoryPrices {
        let named = problem.units().iter().zip(self.per_byte).filter(|(_, price)| **price > 0.0);
        named.map(|(unit, &price)| (unit.address.to_string(), price)).collect()
    }
}

/// The better of a proof without and with prices of memory, where the problem's units limit it.
pub(super) fn with_memory(problem: &Problem, proof: &dyn Fn(Prices<'_>) -> Proof) -> Proof {
    let plain = proof(Prices::default());
    let Some(limits) = Limits::of(problem) else { return plain };
    let at = |prices: &[f64]| {
        let charges = limits.charges(prices);
        proof(Prices { per_byte: prices, charges: &charges, allowance: limits.allowance(prices) })
    };
    let (_, prices) = limits.search(plain.value(), PRICE_STEPS, |prices| at(prices).value());
    let better = at(&prices);
    if better.value() > plain.value() { better } else { plain }
}
