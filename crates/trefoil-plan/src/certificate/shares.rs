//! Loads and energies with transfers: prices from the whole workload, payments from one execution of each model.

use super::{Payment, Proof};
use crate::bounds::memory::Limits;
use crate::bounds::part::{Border, Part};
use crate::bounds::priced::{self, Pricing};
use crate::bounds::{Effort, LeastTimes};
use crate::mincut::cut_payments;
use crate::problem::Problem;
use std::collections::BTreeMap;

/// One model's part of a workload.
pub(super) struct Share {
    pub model: usize,
    /// One execution.
    pub problem: Problem,
    /// Executions.
    pub count: f64,
    /// Whether every item executes it once: only then each execution brings inputs and hands outputs over.
    pub once: bool,
}

impl Share {
    /// What each operator is charged in one execution at prices of a byte; empty for none.
    fn charges(&self, prices: &[f64]) -> Vec<f64> {
        let bytes = self.problem.jobs().iter().map(|job| job.weight_bytes as f64 / self.count.max(1.0));
        bytes.flat_map(|bytes| prices.iter().map(move |price| bytes * price)).collect()
    }

    fn part(&self, classed: bool, charges: &[f64]) -> Part {
        if self.once {
            return Part::whole(&self.problem, classed, charges);
        }
        let mut local = vec![0; self.problem.jobs().len()];
        for (at, &job) in self.problem.topological().iter().enumerate() {
            local[job as usize] = at as u32;
        }
        let border = Border { local: &local, classed, charges, ..Border::default() };
        Part::new(&self.problem, self.problem.topological(), border)
    }

    fn payments(&self, part: &Part, paid: &[f64]) -> Vec<Payment> {
        let rows = part.payments(paid).into_iter().filter(|row| row.2.iter().any(|&paid| paid != 0.0));
        rows.map(|(tensor, job, paid)| self.payment(tensor, job, paid)).collect()
    }

    fn payment(&self, tensor: u32, job: u32, paid: Vec<f64>) -> Payment {
        Payment {
            model: self.model,
            tensor: self.problem.tensors()[tensor as usize].tensor,
            reader: self.problem.jobs()[job as usize].operators[0],
            paid,
        }
    }
}

/// Rounds of the search for weights and payments.
const PRICED_ROUNDS: usize = 120;

/// The load with transfers: weights from the whole workload, payments for one execution of each model; from the weights and the
/// prices of memory of the load without.
pub(super) fn priced_load(whole: &Problem, load: &Proof, shares: &[Share], classed: bool) -> Option<Proof> {
    let Proof::Load { weights, memory, .. } = load else { return None };
    let units = whole.units().len();
    let by_name = |unit: usize, of: &BTreeMap<String, f64>| {
        of.get(&whole.units()[unit].address.to_string()).copied().unwrap_or(0.0)
    };
    let prices: Vec<f64> = (0..units).map(|unit| by_name(unit, memory)).collect();
    let limits = Limits::of(whole);
    let charges = limits.as_ref().map_or_else(Vec::new, |limits| limits.charges(&prices));
    let allowance = limits.map_or(0.0, |limits| limits.allowance(&prices));
    let moments = priced::moments(whole, classed);
    let start: Vec<f64> = (0..2 * units).map(|at| by_name(at / 2, weights)).collect();
    let rounds = Effort::THOROUGH.rounds(whole.jobs().len(), units, 8, PRICED_ROUNDS);
    let part = Part::whole(whole, classed, &charges);
    let weights = Pricing::new(&part, &moments).search(Some(&start), rounds, rounds).1.weights;
    let (mut value, mut payments) = (-allowance, Vec::new());
    for share in shares {
        let part = share.part(classed, &share.charges(&prices));
        let (least, paid) = Pricing::new(&part, &moments).at_prices(&weights, rounds);
        value += least * share.count;
        payments.extend(share.payments(&part, &paid));
    }
    let by_unit = |at: usize| [weights[2 * at], weights[2 * at + usize::from(classed)]];
    let names = whole.units().iter().enumerate().map(|(at, unit)| (unit.address.to_string(), by_unit(at)));
    (value > 0.0).then(|| Proof::PricedLoad { value, weights: names.collect(), payments, memory: memory.clone() })
}

/// Work and transfers at prices of watts above idling, in joules: a minimum cut for two units. 0 where a unit draws less
/// than idling. `memory` are prices of bytes in joules, or none.
pub(super) fn priced_energy(least: &LeastTimes, shares: &[Share], memory: &[f64]) -> (f64, Vec<Payment>) {
    let (mut value, mut payments) = (0.0, Vec::new());
    let memory: Vec<f64> = memory.iter().map(|joules| joules * 1e3).collect();
    for share in shares {
        let problem = &share.problem;
        let idle = problem.idle_watts().unwrap_or(0.0);
        let units = problem.units().len();
        let prices: Vec<f64> = (0..units)
            .map(|unit| (problem.units()[unit].watts.unwrap_or(0.0) - idle) * least.least_factor(unit))
            .collect();
        if prices.iter().any(|&price| price < 0.0) || units > priced::MOST_UNITS {
            return (0.0, Vec::new());
        }
        let charges = share.charges(&memory);
        if share.once
            && let Some((cut, paid)) = cut_payments(problem, &prices, &charges)
        {
            value += cut * share.count;
            payments.extend(paid.into_iter().map(|((tensor, job), paid)| share.payment(tensor, job, vec![0.0, paid])));
            continue;
        }
        let part = share.part(false, &charges);
        let weights: Vec<f64> = (0..2 * units).map(|at| prices[at / 2]).collect();
        let rounds = Effort::THOROUGH.rounds(problem.jobs().len(), units, 8, PRICED_ROUNDS);
        let (cost, paid) = Pricing::new(&part, &[]).at_prices(&weights, rounds);
        value += cost * share.count;
        payments.extend(share.payments(&part, &paid));
    }
    (value / 1e3, payments)
}
