//! Bounds on plans that run one segment after another, and on BIDENT's own graph.

use crate::bounds::Ground;
use crate::costs::Model;
use crate::json::Reader;
use crate::machine::Machine;
use crate::memory::Prices;
use crate::{CheckError, close_above};
use serde_json::Value;
use std::collections::BTreeMap;

const CERTIFICATE: Reader = Reader("certificate");

/// Plans that run segments one after another pay at least every operator's least cost.
pub fn every_operator(proof: &Value, ground: &Ground<'_>) -> Result<f64, CheckError> {
    let memory = Prices::read(proof, ground)?;
    let mut total = -memory.allowance(ground.models.iter(), ground);
    for (number, model) in ground.models.iter().enumerate() {
        let executions = ground.executions(number);
        let one: f64 = (0..model.operators.len())
            .map(|at| {
                let prices = (0..ground.units()).map(|unit| {
                    ground.least(number, at, unit) * ground.per_ms[unit] + memory.charge(model, at, unit, executions)
                });
                prices.fold(f64::INFINITY, f64::min)
            })
            .filter(|least| least.is_finite())
            .sum();
        total += one * executions;
    }
    Ok(total)
}

/// BIDENT's terms of one operator on one unit, in the objective's unit: `w`, H2D and D2H.
fn paper_terms(model: &Model, machine: &Machine, per_ms: &[f64], at: usize, unit: usize) -> (f64, f64, f64) {
    let price = per_ms[unit];
    let fits = machine.units[unit].memory_bytes.is_none_or(|most| model.operators[at].weight_bytes <= most);
    let alone = model.alone(at, unit).filter(|_| fits && model.allowed(at, unit));
    let work = alone.map_or(f64::INFINITY, |alone| alone.ms * price);
    if !machine.units[unit].accelerator {
        return (work, 0.0, 0.0);
    }
    let host = machine.units.iter().position(|unit| !unit.accelerator);
    let operator = &model.operators[at];
    let moved = |tensors: &[usize], outward: bool| -> f64 {
        let one = |bytes: f64| match host {
            Some(host) if outward => model.transfer(unit, host, bytes),
            Some(host) => model.transfer(host, unit, bytes),
            // Accelerators only: the measured transfer covers both ends and is charged at the entry.
            None if outward || machine.units.len() == 1 => 0.0,
            None => (0..machine.units.len())
                .filter(|&other| other != unit)
                .map(|other| model.transfer(other, unit, bytes))
                .fold(f64::INFINITY, f64::min),
        };
        tensors.iter().map(|&tensor| one(model.tensors[tensor].bytes)).sum()
    };
    let h2d = alone.and_then(|alone| alone.h2d).unwrap_or_else(|| moved(&operator.inputs, false));
    let d2h = alone.and_then(|alone| alone.d2h).unwrap_or_else(|| moved(&operator.outputs, true));
    (work, h2d * price, d2h * price)
}

/// BIDENT eq. 1 of one assignment.
pub fn paper_cost(model: &Model, machine: &Machine, per_ms: &[f64], assignment: &[usize]) -> f64 {
    let mut total = 0.0;
    let mut before: Option<(usize, f64)> = None;
    for (at, &unit) in assignment.iter().enumerate() {
        let (work, h2d, d2h) = paper_terms(model, machine, per_ms, at, unit);
        total += work;
        match before {
            None => total += h2d,
            Some((from, left)) if from != unit => total += left + h2d,
            Some(_) => {}
        }
        before = Some((unit, d2h));
    }
    total + before.map_or(0.0, |last| last.1)
}

/// `potentials[i][j]`: no path of the paper's graph reaches operator i on unit j for less.
pub fn paper_sequential(proof: &Value, ground: &Ground<'_>) -> Result<f64, CheckError> {
    let [model] = ground.models else { return Err(CERTIFICATE.fail("the paper's graph is of one model")) };
    let units = ground.units();
    let mut potentials = CERTIFICATE.rows(proof, "potentials", units)?;
    if potentials.len() != model.operators.len() {
        return Err(CERTIFICATE.fail("potentials of another number of operators"));
    }
    let mut left: Vec<f64> = Vec::new();
    for at in 0..model.operators.len() {
        let terms: Vec<_> =
            (0..units).map(|unit| paper_terms(model, ground.machine, ground.per_ms, at, unit)).collect();
        for (unit, &(work, h2d, _)) in terms.iter().enumerate() {
            let reached = match at {
                0 => h2d,
                _ => (0..units)
                    .map(|from| if from == unit { potentials[at - 1][from] } else { left[from] + h2d })
                    .fold(f64::INFINITY, f64::min),
            };
            if !close_above(reached + work, potentials[at][unit]) && (reached + work).is_finite() {
                return Err(CheckError::Bound(format!("potential of operator {at} on unit {unit} is too high")));
            }
            // What rounding may add must not add up.
            potentials[at][unit] = potentials[at][unit].min(reached + work);
        }
        left = (0..units)
            .map(|unit| if terms[unit].0.is_finite() { potentials[at][unit] + terms[unit].2 } else { f64::INFINITY })
            .collect();
    }
    Ok(left.into_iter().fold(f64::INFINITY, f64::min))
}

/// `potentials[b][u]`: operators before b are not done for less when the last segment was on unit u. A chain's segments
/// are intervals; a tensor made by the last operator of a segment is on its unit.
pub fn chain(proof: &Value, ground: &Ground<'_>) -> Result<f64, CheckError> {
    let [model] = ground.models else { return Err(CERTIFICATE.fail("the chain's graph is of one model")) };
    let (units, count, machine) = (ground.units(), model.operators.len(), ground.machine);
    for at in 1..count {
        let linked = model.operators[at].inputs.iter().any(|&tensor| model.tensors[tensor].producer == Some(at - 1));
        if !linked {
            return Err(CheckError::Bound(format!(
                "the model is no chain: operator {at} does not read its predecessor"
            )));
        }
    }
    let mut potentials = CERTIFICATE.rows(proof, "potentials", units)?;
    if potentials.len() != count + 1 {
        return Err(CERTIFICATE.fail("potentials of another number of operators"));
    }
    // Nothing reads them, so nothing else would notice.
    if potentials[0].iter().any(|&potential| potential != 0.0) {
        return Err(CheckError::Bound("potentials before the first operator are not 0".to_owned()));
    }
    let memory = Prices::read(proof, ground)?;
    // Measured intervals by start; every other interval follows from prefix sums.
    let mut measured: Vec<BTreeMap<(usize, usize), f64>> = vec![BTreeMap::new(); units];
    for (unit, sets) in model.sets.iter().enumerate() {
        for (set, &ms) in sets {
            if set[set.len() - 1] + 1 - set[0] == set.len() {
                measured[unit].insert((set[0], set[set.len() - 1] + 1), ms);
            }
        }
    }
    for start in 0..count {
        for unit in 0..units {
            let price = ground.per_ms[unit];
            let estimate = &model.estimates[unit];
            let (mut shares, mut handed, mut broken, mut host, mut charged) = (0.0, 0.0, false, 0.0, 0.0);
            let mut weights = 0.0;
            // Per source unit, tensors of the operator before that were brought along so far.
            let mut moved = vec![0.0; units];
            let mut seen: Vec<usize> = Vec::new();
            for end in start + 1..=count {
                let at = end - 1;
                weights += model.operators[at].weight_bytes;
                if !model.allowed(at, unit) || machine.units[unit].memory_bytes.is_some_and(|most| weights > most) {
                    break;
                }
                // Once in one piece too much, always.
                broken = broken || model.alone(at, unit).is_none() || model.fails_from(start, end, unit);
                shares += estimate.share[at];
                charged += memory.charge(model, at, unit, 1.0);
                for &tensor in &model.operators[at].outputs {
                    if model.tensors[tensor].is_output {
                        handed += model.host_transfer(tensor, unit, machine, true);
                    }
                }
                for &tensor in &model.operators[at].inputs {
                    let edge = &model.tensors[tensor];
                    let fresh = !seen.contains(&tensor);
                    if fresh && start > 0 && edge.producer == Some(start - 1) {
                        seen.push(tensor);
                        for (from, sum) in moved.iter_mut().enumerate() {
                            *sum += model.transfer(from, unit, edge.bytes);
                        }
                    } else if fresh && edge.producer.is_none() && edge.consumers.first() >= Some(&start) {
                        seen.push(tensor);
                        host += model.host_transfer(tensor, unit, machine, false);
                    }
                }
                let segment = match measured[unit].get(&(start, end)) {
                    Some(&ms) => ms,
                    None if broken => continue,
                    None if end == start + 1 => model.lone(at, unit).unwrap_or(f64::INFINITY),
                    None => estimate.dispatch + shares,
                };
                let reached = if start == 0 {
                    0.0
                } else {
                    (0..units).map(|from| potentials[start][from] + moved[from] * price).fold(f64::INFINITY, f64::min)
                };
                let cost = reached + (segment + handed + host) * price + charged;
                if cost.is_finite() && !close_above(cost, potentials[end][unit]) {
                    return Err(CheckError::Bound(format!(
                        "potential {} before operator {end} on unit {unit} is above {cost}",
                        potentials[end][unit]
                    )));
                }
                potentials[end][unit] = potentials[end][unit].min(cost);
            }
        }
    }
    let least = potentials[count].iter().copied().fold(f64::INFINITY, f64::min);
    Ok(least - memory.allowance(std::iter::once(model), ground))
}
