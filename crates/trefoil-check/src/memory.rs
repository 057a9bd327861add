//! Prices of memory in lower bounds.
//!
//! A unit holds the weights of the distinct operators that it executes, and no plan may exceed what its memory has. At a price
//! of a byte on each unit, weights are thus worth no more than all memory is: a bound on the cost **and** the priced weights,
//! less the priced memory, is one on the cost. An operator that is executed several times is charged a part each time, which is
//! never more than what is held.

use crate::CheckError;
use crate::bounds::Ground;
use crate::costs::Model;
use serde_json::Value;

/// By unit: the price of a byte.
#[derive(Debug, Default)]
pub struct Prices(Vec<f64>);

impl Prices {
    /// The prices of a proof that states some.
    pub fn read(proof: &Value, ground: &Ground<'_>) -> Result<Self, CheckError> {
        let Some(stated) = proof.get("memory") else { return Ok(Self::default()) };
        let prices: Vec<f64> =
            ground.machine.units.iter().map(|unit| stated[&unit.address].as_f64().unwrap_or(0.0)).collect();
        for (unit, &price) in ground.machine.units.iter().zip(&prices) {
            if !price.is_finite() || price < 0.0 || (price > 0.0 && unit.memory_bytes.is_none()) {
                return Err(CheckError::Bound(format!("{} has no limit, or a price below 0, of memory", unit.address)));
            }
        }
        Ok(Self(prices))
    }

    /// The same prices in another unit.
    pub fn times(self, factor: f64) -> Self {
        Self(self.0.into_iter().map(|price| price * factor).collect())
    }

    /// What an operator is charged on a unit when it is executed so many times.
    pub fn charge(&self, model: &Model, operator: usize, unit: usize, executions: f64) -> f64 {
        self.0.get(unit).map_or(0.0, |price| price * model.operators[operator].weight_bytes / executions.max(1.0))
    }

    /// What all memory is worth for the weights of some models: of each unit's limit, the largest multiple of what all weights
    /// are multiples of.
    pub fn allowance<'m>(&self, models: impl Iterator<Item = &'m Model>, ground: &Ground<'_>) -> f64 {
        if self.0.is_empty() {
            return 0.0;
        }
        let weights = models.flat_map(|model| model.operators.iter().map(|operator| operator.weight_bytes as u64));
        let step = weights.fold(0, gcd).max(1);
        let worth = |(unit, price): (&crate::machine::Unit, &f64)| {
            let most = unit.memory_bytes.unwrap_or(0.0) as u64;
            price * (most / step * step) as f64
        };
        ground.machine.units.iter().zip(&self.0).map(worth).sum()
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
