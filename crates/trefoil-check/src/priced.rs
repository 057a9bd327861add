//! Loads and energies with transfers: prices of units' time, and what readers of tensors pay for where they are.
//!
//! The witness gives a price λ of a millisecond of each class of work on each unit, and a payment φ of every (tensor, reader) for
//! every unit. Whatever the placement, an operator costs at least its cheapest unit, its payments and what the tensors that it
//! makes then still need included; and a tensor needs at least, over all sets of units that its readers may be on, the price of
//! bringing it there less what those readers pay. Nothing is searched: each term is evaluated.

use crate::CheckError;
use crate::bounds::Ground;
use crate::json::Reader;
use crate::machine::Class;
use crate::memory::Prices;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

const CERTIFICATE: Reader = Reader("certificate");
/// Sets of more units are too many to look at.
const MOST_UNITS: usize = 8;

/// By (model, tensor, reader): payment on each unit.
type Payments = BTreeMap<(usize, usize, usize), Vec<f64>>;

fn payments(proof: &Value, ground: &Ground<'_>) -> Result<Payments, CheckError> {
    let mut all = Payments::new();
    for payment in proof.get("payments").and_then(Value::as_array).map_or(&[][..], Vec::as_slice) {
        let model = CERTIFICATE.index(payment, "model", ground.models.len())?;
        let described = &ground.models[model];
        let tensor = CERTIFICATE.index(payment, "tensor", described.tensors.len())?;
        let reader = CERTIFICATE.index(payment, "reader", described.operators.len())?;
        let paid: Vec<f64> =
            CERTIFICATE.list(payment, "paid")?.iter().map(|value| value.as_f64().unwrap_or(f64::NAN)).collect();
        if paid.len() != ground.units() || paid.iter().any(|paid| !paid.is_finite()) {
            return Err(CheckError::Bound(format!(
                "the payments for tensor {tensor} are no {} numbers",
                ground.units()
            )));
        }
        if !described.tensors[tensor].consumers.contains(&reader) {
            return Err(CheckError::Bound(format!(
                "operator {reader} pays for tensor {tensor}, which it does not read"
            )));
        }
        all.insert((model, tensor, reader), paid);
    }
    Ok(all)
}

/// The least sum of all work and transfers of one execution of a model at a price of each unit's time, as far as the payments
/// show it, and of the charges for memory.
fn least_cost(
    ground: &Ground<'_>,
    number: usize,
    price: &dyn Fn(usize, Class) -> f64,
    payments: &Payments,
    memory: &Prices,
) -> f64 {
    let (model, units) = (&ground.models[number], ground.units());
    // Whether inputs are brought and outputs handed over in every execution.
    let host = ground.is_once(number);
    let executions = ground.executions(number);
    let readers: Vec<Vec<usize>> = model
        .tensors
        .iter()
        .map(|edge| edge.consumers.iter().copied().collect::<BTreeSet<_>>().into_iter().collect())
        .collect();
    let pays = |tensor: usize, reader: usize, unit: usize| {
        payments.get(&(number, tensor, reader)).map_or(0.0, |paid| paid[unit])
    };
    // What a tensor needs, given where it was made (`None`: at the host).
    let needs = |tensor: usize, from: Option<usize>| -> f64 {
        let edge = &model.tensors[tensor];
        if readers[tensor].is_empty() {
            return 0.0;
        }
        let brought = |unit: usize| {
            let ms = match from {
                Some(from) => model.transfer(from, unit, edge.bytes),
                None => model.host_transfer(tensor, unit, ground.machine, false),
            };
            if from == Some(unit) { 0.0 } else { ms * price(unit, Class::Memory) }
        };
        let of_set = |set: usize| -> f64 {
            let inside = || (0..units).filter(|unit| set >> unit & 1 == 1);
            let moved: f64 = inside().map(brought).sum();
            let paid: f64 = readers[tensor]
                .iter()
                .map(|&reader| {
                    let able = inside().filter(|&unit| ground.least(number, reader, unit).is_finite());
                    able.map(|unit| pays(tensor, reader, unit)).fold(f64::NEG_INFINITY, f64::max)
                })
                .sum();
            moved - paid
        };
        (1usize..1 << units).map(of_set).fold(f64::INFINITY, f64::min)
    };
    let mut total = 0.0;
    for (at, operator) in model.operators.iter().enumerate() {
        let class = operator.class;
        let least = (0..units)
            .filter_map(|unit| {
                let ms = ground.least(number, at, unit);
                if ms.is_infinite() {
                    return None;
                }
                let mut sum = ms * price(unit, class) + memory.charge(model, at, unit, executions);
                for &tensor in operator.inputs.iter().collect::<BTreeSet<_>>() {
                    if model.tensors[tensor].producer.is_some() || host {
                        sum += pays(tensor, at, unit);
                    }
                }
                for &tensor in &operator.outputs {
                    sum += needs(tensor, Some(unit));
                    if host && model.tensors[tensor].is_output {
                        sum += model.host_transfer(tensor, unit, ground.machine, true) * price(unit, Class::Memory);
                    }
                }
                Some(sum)
            })
            .reduce(f64::min);
        total += least.unwrap_or(0.0);
    }
    if host {
        let inputs = (0..model.tensors.len()).filter(|&tensor| model.tensors[tensor].producer.is_none());
        total += inputs.map(|tensor| needs(tensor, None)).sum::<f64>();
    }
    total
}

/// Whether no moment, whichever units are busy with whichever classes of work, does more than 1 of priced work a millisecond.
fn check_prices(ground: &Ground<'_>, price: &[[f64; 2]]) -> Result<(), CheckError> {
    let units = ground.units();
    for code in 1usize..3usize.pow(units as u32) {
        let busy: Vec<(usize, Class)> = (0..units)
            .filter_map(|unit| match code / 3usize.pow(unit as u32) % 3 {
                0 => None,
                1 => Some((unit, Class::Compute)),
                _ => Some((unit, Class::Memory)),
            })
            .collect();
        let resources = |unit: usize| &ground.machine.units[unit].resources;
        let apart = busy
            .iter()
            .all(|one| busy.iter().all(|two| one.0 == two.0 || resources(one.0).is_disjoint(resources(two.0))));
        if !apart {
            continue;
        }
        let set: Vec<usize> = busy.iter().map(|one| one.0).collect();
        let work: f64 = busy
            .iter()
            .map(|&(unit, class)| {
                let others: Vec<(usize, Class)> = busy.iter().copied().filter(|other| other.0 != unit).collect();
                let factor = match (ground.contention, ground.operator_costs) {
                    (false, _) => 1.0,
                    (true, true) => ground.machine.factor(unit, class, &others),
                    // The class of a larger segment is that of most of its time, which may be another.
                    (true, false) => ground.machine.least_beside(unit, &set),
                };
                price[unit][usize::from(class == Class::Memory)] / factor
            })
            .sum();
        if !crate::close_above(1.0, work) {
            return Err(CheckError::Bound(format!("prices let {work} of priced work be done in a millisecond")));
        }
    }
    Ok(())
}

/// The prices of units' time that a proof states, by unit and class, such that no moment does more than 1 of priced work in a millisecond.
pub fn prices(proof: &Value, ground: &Ground<'_>) -> Result<Vec<[f64; 2]>, CheckError> {
    let units = ground.units();
    if units > MOST_UNITS {
        return Err(CheckError::Bound(format!("{units} units are too many for prices by class of work")));
    }
    let weights = proof.get("weights").unwrap_or(&Value::Null);
    let price: Vec<[f64; 2]> = ground
        .machine
        .units
        .iter()
        .map(|unit| [0, 1].map(|class| weights[&unit.address][class].as_f64().unwrap_or(0.0)))
        .collect();
    if price.iter().flatten().any(|price| !price.is_finite() || *price < 0.0) {
        return Err(CheckError::Bound("a price is no number that is not negative".to_owned()));
    }
    if !ground.operator_costs && price.iter().any(|[compute, memory]| compute.total_cmp(memory).is_ne()) {
        return Err(CheckError::Bound("prices tell classes apart, but segments have no certain class".to_owned()));
    }
    check_prices(ground, &price)?;
    Ok(price)
}

/// The load with transfers, in milliseconds.
pub fn load(proof: &Value, ground: &Ground<'_>) -> Result<f64, CheckError> {
    let price = prices(proof, ground)?;
    let of = |unit: usize, class: Class| price[unit][usize::from(class == Class::Memory)];
    sum(proof, ground, &of, &Prices::read(proof, ground)?)
}

/// Work and transfers at watts above idling, in joules.
pub fn energy(proof: &Value, ground: &Ground<'_>) -> Result<f64, CheckError> {
    let idle = ground.machine.idle_watts.unwrap_or(0.0);
    let factor = |unit: usize| {
        let least = |class| ground.machine.least_factor(unit, class);
        least(Class::Compute).min(least(Class::Memory))
    };
    let price: Vec<f64> = (0..ground.units())
        .map(|unit| (ground.machine.units[unit].watts.unwrap_or(0.0) - idle) * factor(unit))
        .collect();
    if price.iter().any(|price| *price < 0.0) || ground.units() > MOST_UNITS {
        return Err(CheckError::Bound("a unit draws less than idling, or there are too many units".to_owned()));
    }
    // Work is counted in millijoules, memory in joules.
    let memory = Prices::read(proof, ground)?.times(1e3);
    Ok(sum(proof, ground, &|unit, _| price[unit], &memory)? / 1e3)
}

fn sum(
    proof: &Value,
    ground: &Ground<'_>,
    price: &dyn Fn(usize, Class) -> f64,
    memory: &Prices,
) -> Result<f64, CheckError> {
    let payments = payments(proof, ground)?;
    let mut total = -memory.allowance(ground.models.iter(), ground);
    for number in 0..ground.models.len() {
        total += least_cost(ground, number, price, &payments, memory) * ground.executions(number);
    }
    Ok(total)
}
