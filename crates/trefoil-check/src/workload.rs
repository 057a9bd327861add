//! The longest path through all executions of a workload: over arrivals, links and repetitions.

use crate::bounds::Ground;
use crate::json::Reader;
use crate::links::Source;
use crate::machine::Class;
use crate::memory::Prices;
use crate::schedule::Execution;
use crate::{CheckError, close_above};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

const CERTIFICATE: Reader = Reader("certificate");

/// By model and item: the least time from arrival to completion.
pub type Completions = BTreeMap<(usize, u64), f64>;

/// Executions with their place, and for each operator of each what it waits for.
struct Unrolled {
    place: BTreeMap<Execution, usize>,
    /// First operator of each execution in the numbering of all.
    first: Vec<usize>,
    /// Operators of all executions so that none comes before what it reads.
    order: Vec<(Execution, usize)>,
}

impl Unrolled {
    fn new(ground: &Ground<'_>) -> Result<Self, CheckError> {
        let (mut place, mut first, mut count) = (BTreeMap::new(), Vec::new(), 0);
        let mut all: Vec<(Execution, usize)> = Vec::new();
        for &of in ground.schedule.computed_by.keys() {
            place.insert(of, first.len());
            first.push(count);
            let operators = ground.models[of.0].operators.len();
            all.extend((0..operators).map(|at| (of, at)));
            count += operators;
        }
        let mut unrolled = Self { place, first, order: Vec::with_capacity(count) };
        let mut waiting = vec![0usize; count];
        let mut follow: Vec<Vec<usize>> = vec![Vec::new(); count];
        for (number, &(of, at)) in all.iter().enumerate() {
            let makers: BTreeSet<usize> =
                makers(ground, of, at).into_iter().map(|(of, at)| unrolled.number(of, at)).collect();
            waiting[number] = makers.len();
            for maker in makers {
                follow[maker].push(number);
            }
        }
        let mut ready: Vec<usize> = (0..count).filter(|&number| waiting[number] == 0).collect();
        while let Some(number) = ready.pop() {
            unrolled.order.push(all[number]);
            for &next in &follow[number] {
                waiting[next] -= 1;
                if waiting[next] == 0 {
                    ready.push(next);
                }
            }
        }
        if unrolled.order.len() < count {
            return Err(CheckError::Schedule("linked stages wait for each other in a circle".to_owned()));
        }
        Ok(unrolled)
    }

    fn number(&self, of: Execution, operator: usize) -> usize {
        self.first[self.place[&of]] + operator
    }
}

/// The operators that make what an operator reads.
fn makers(ground: &Ground<'_>, of: Execution, at: usize) -> Vec<(Execution, usize)> {
    let maker = |&tensor: &usize| match origin(ground, of, tensor) {
        Source::Made(of, tensor) => Some((of, ground.models[of.0].tensors[tensor].producer?)),
        Source::Host(_) => None,
    };
    ground.models[of.0].operators[at].inputs.iter().filter_map(maker).collect()
}

/// Where a tensor that an execution reads comes from.
fn origin(ground: &Ground<'_>, of: Execution, tensor: usize) -> Source {
    match ground.models[of.0].tensors[tensor].producer {
        Some(_) => Source::Made(of, tensor),
        None => ground.schedule.links.source(of, tensor),
    }
}

/// The stated potentials: by execution, operators × units.
fn stated(proof: &Value, ground: &Ground<'_>, unrolled: &Unrolled) -> Result<Vec<Vec<f64>>, CheckError> {
    let mut rows = vec![None; unrolled.place.len()];
    for execution in CERTIFICATE.list(proof, "executions")? {
        let model = CERTIFICATE.index(execution, "model", ground.models.len())?;
        let of = (model, CERTIFICATE.count(execution, "item")?, CERTIFICATE.count(execution, "iteration")?);
        let Some(&place) = unrolled.place.get(&of) else {
            return Err(CheckError::Bound(format!("potentials of {of:?}, which is not executed")));
        };
        let potentials = CERTIFICATE.rows(execution, "potentials", ground.units())?;
        if potentials.len() != ground.models[model].operators.len() {
            return Err(CERTIFICATE.fail("potentials of another number of operators"));
        }
        if rows[place].replace(potentials).is_some() {
            return Err(CERTIFICATE.fail(format!("two potentials of {of:?}")));
        }
    }
    let lacking = || CheckError::Bound("an execution has no potentials".to_owned());
    let rows: Vec<Vec<Vec<f64>>> = rows.into_iter().collect::<Option<_>>().ok_or_else(lacking)?;
    Ok(rows.into_iter().flatten().collect())
}

/// `executions`: no operator of any of them ends earlier on a unit than its potential. Checked operator by operator, each after what it
/// reads: it ends at its own least time after the last of its inputs, which was made at its potential on some unit and brought
/// over, and not before it arrives. The bound on the makespan, and on each item's time from its arrival.
pub fn path(proof: &Value, ground: &Ground<'_>) -> Result<(f64, Completions), CheckError> {
    let allowance = Prices::read(proof, ground)?.allowance(ground.models.iter(), ground);
    let mut bound = 0.0f64;
    let mut completions = Completions::new();
    for (of, end) in ends(proof, ground, &|_| 1.0)? {
        bound = bound.max(end - allowance);
        let slot = completions.entry((of.0, of.1)).or_insert(0.0);
        *slot = slot.max(end - allowance - ground.schedule.arrival(of.0, of.1));
    }
    Ok((bound, completions))
}

/// The weighted mean of what requests take, with prices of memory. A request's time counts by its share of all weights, so what its
/// operators are charged is divided by that; the limits are worth what they are worth once for all. That holds if no path leads
/// through several requests.
pub fn completions(proof: &Value, ground: &Ground<'_>) -> Result<f64, CheckError> {
    let schedule = ground.schedule;
    if schedule.links.joins_others(|of| schedule.request(of)) {
        return Err(CheckError::Bound("a link joins two requests, so paths charge memory twice".to_owned()));
    }
    for of in schedule.computed_by.keys() {
        if schedule.request((of.0, of.1)).is_none() {
            return Err(CheckError::Bound(format!("{of:?} belongs to no request")));
        }
    }
    let mut longest = Completions::new();
    for (of, end) in ends(proof, ground, &|of| 1.0 / schedule.share((of.0, of.1)))? {
        let slot = longest.entry((of.0, of.1)).or_insert(0.0);
        *slot = slot.max(end - schedule.arrival(of.0, of.1));
    }
    let mean = schedule.weighted_mean(|model, item| longest.get(&(model, item)).copied().unwrap_or(0.0));
    Ok(mean - Prices::read(proof, ground)?.allowance(ground.models.iter(), ground))
}

/// The verified earliest end of each operator of each execution, handing its outputs over included. What an execution's operators are
/// charged for memory counts so many `times`.
fn ends(
    proof: &Value,
    ground: &Ground<'_>,
    times: &dyn Fn(Execution) -> f64,
) -> Result<Vec<(Execution, f64)>, CheckError> {
    let (units, schedule, machine) = (ground.units(), ground.schedule, ground.machine);
    let unrolled = Unrolled::new(ground)?;
    let mut potentials = stated(proof, ground, &unrolled)?;
    let begins: Vec<Vec<f64>> =
        (0..ground.models.len()).map(|model| (0..units).map(|unit| ground.begins(model, unit)).collect()).collect();
    let memory = Prices::read(proof, ground)?;
    let executions: Vec<f64> = (0..ground.models.len()).map(|model| ground.executions(model)).collect();
    let mut found = Vec::with_capacity(unrolled.order.len());
    for &(of, at) in &unrolled.order {
        let model = &ground.models[of.0];
        let number = unrolled.number(of, at);
        let arrival = schedule.arrival(of.0, of.1);
        for unit in 0..units {
            let own = ground.fastest(of.0, at, unit) + memory.charge(model, at, unit, executions[of.0]) * times(of);
            if own.is_infinite() {
                potentials[number][unit] = f64::INFINITY;
                continue;
            }
            let made = |tensor: usize| match origin(ground, of, tensor) {
                Source::Host(_) => None,
                Source::Made(of, made) => {
                    let producer = ground.models[of.0].tensors[made].producer?;
                    Some((of.0, made, potentials[unrolled.number(of, producer)].as_slice()))
                }
            };
            let ready = ground.ready((of.0, at), unit, (arrival, arrival), begins[of.0][unit], made);
            let potential = potentials[number][unit];
            if !close_above(ready + own, potential) {
                return Err(CheckError::Bound(format!(
                    "potential {potential} of operator {at} of {of:?} on {} is above {}",
                    machine.units[unit].address,
                    ready + own
                )));
            }
            // What rounding may add must not add up.
            potentials[number][unit] = potential.min(ready + own);
        }
        let handed = |unit: usize| -> f64 {
            let outputs = model.operators[at].outputs.iter();
            let outputs =
                outputs.filter(|&&tensor| model.tensors[tensor].is_output && schedule.links.hands_over(of, tensor));
            let ms: f64 = outputs.map(|&tensor| model.host_transfer(tensor, unit, machine, true)).sum();
            ms * machine.least_factor(unit, Class::Memory)
        };
        let least = (0..units).map(|unit| potentials[number][unit] + handed(unit)).fold(f64::INFINITY, f64::min);
        if least.is_finite() {
            found.push((of, least));
        }
    }
    Ok(found)
}
