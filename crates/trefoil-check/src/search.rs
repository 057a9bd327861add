//! Optimality of small models, by trying every placement and every order.
//!
//! A schedule of lone operators is a unit for each, and an order in which every resource takes its operators, transfers and
//! handovers; everything starts as soon as its inputs are there and its resources come to it. Orders are built step by step. A
//! partial one is given up when it cannot beat the claim even if nothing slowed anything; a complete one is run with slowdowns.

use crate::CheckError;
use crate::bounds::Ground;
use crate::machine::Class;
use std::collections::{BTreeMap, BTreeSet};

/// Most operators and units.
const MOST_OPERATORS: usize = 7;
const MOST_UNITS: usize = 3;
/// Most partial orders looked at.
const MOST_NODES: u64 = 20_000_000;

/// An operator, a transfer or a handover of one placement.
struct Step {
    unit: usize,
    ms: f64,
    class: Class,
    /// Steps that must have ended.
    needs: Vec<usize>,
    /// Least time from its end to the end of what depends on it.
    tail: f64,
}

struct Search<'g, 'a> {
    ground: &'g Ground<'a>,
    claim: f64,
    steps: Vec<Step>,
    resources: Vec<Vec<usize>>,
    nodes: u64,
    /// A makespan below the claim, if one was met.
    better: Option<f64>,
}

/// The claim, if no schedule of single operators ends earlier.
pub fn verify(ground: &Ground<'_>, claim: f64) -> Result<f64, CheckError> {
    let [model] = ground.models else {
        return Err(CheckError::Bound("only one model can be searched".to_owned()));
    };
    let (count, units) = (model.operators.len(), ground.units());
    if count > MOST_OPERATORS || units > MOST_UNITS || ground.executions(0) > 1.0 || !ground.operator_costs {
        return Err(CheckError::Bound(format!(
            "only one execution of up to {MOST_OPERATORS} single operators on up to {MOST_UNITS} units can be searched"
        )));
    }
    let mut names: BTreeMap<&str, usize> = BTreeMap::new();
    for unit in &ground.machine.units {
        for resource in &unit.resources {
            let next = names.len();
            names.entry(resource).or_insert(next);
        }
    }
    let resources: Vec<Vec<usize>> = ground
        .machine
        .units
        .iter()
        .map(|unit| unit.resources.iter().map(|resource| names[resource.as_str()]).collect())
        .collect();
    let mut search = Search { ground, claim, steps: Vec::new(), resources, nodes: 0, better: None };
    for code in 0..units.pow(count as u32) {
        let unit_of: Vec<usize> = (0..count).map(|at| code / units.pow(at as u32) % units).collect();
        if unit_of.iter().enumerate().any(|(at, &unit)| ground.least(0, at, unit).is_infinite()) {
            continue;
        }
        search.place(&unit_of);
        let mut order = Vec::new();
        search.extend(&mut order, &mut vec![f64::NAN; search.steps.len()], &vec![0.0; names.len()]);
        if search.nodes > MOST_NODES {
            return Err(CheckError::Bound("its search is too large".to_owned()));
        }
        if let Some(better) = search.better {
            return Err(CheckError::Bound(format!("a schedule ends after {better} ms, before {claim}")));
        }
    }
    Ok(claim)
}

impl Search<'_, '_> {
    /// The steps of a placement.
    fn place(&mut self, unit_of: &[usize]) {
        let (model, machine) = (&self.ground.models[0], self.ground.machine);
        let mut steps: Vec<Step> = unit_of
            .iter()
            .enumerate()
            .map(|(at, &unit)| Step {
                unit,
                ms: self.ground.least(0, at, unit),
                class: model.operators[at].class,
                needs: Vec::new(),
                tail: 0.0,
            })
            .collect();
        for (tensor, edge) in model.tensors.iter().enumerate() {
            let readers: BTreeSet<usize> = edge.consumers.iter().copied().collect();
            let places: BTreeSet<usize> = readers.iter().map(|&reader| unit_of[reader]).collect();
            for unit in places {
                let ms = match edge.producer {
                    Some(maker) => model.transfer(unit_of[maker], unit, edge.bytes),
                    None => model.host_transfer(tensor, unit, machine, false),
                };
                let here = readers.iter().copied().filter(|&reader| unit_of[reader] == unit);
                if ms > 0.0 {
                    let number = steps.len();
                    here.for_each(|reader| steps[reader].needs.push(number));
                    let needs = edge.producer.into_iter().collect();
                    steps.push(Step { unit, ms, class: Class::Memory, needs, tail: 0.0 });
                } else if let Some(maker) = edge.producer {
                    here.for_each(|reader| steps[reader].needs.push(maker));
                }
            }
            if let Some(maker) = edge.producer.filter(|_| edge.is_output) {
                let unit = unit_of[maker];
                let ms = model.host_transfer(tensor, unit, machine, true);
                if ms > 0.0 {
                    steps.push(Step { unit, ms, class: Class::Memory, needs: vec![maker], tail: 0.0 });
                }
            }
        }
        // Longest way to the end, undisturbed: everything relaxes as often as there are steps.
        for _ in 0..steps.len() {
            for at in 0..steps.len() {
                let reach = self.fastest(&steps[at]) + steps[at].tail;
                for before in steps[at].needs.clone() {
                    steps[before].tail = steps[before].tail.max(reach);
                }
            }
        }
        self.steps = steps;
    }

    fn fastest(&self, step: &Step) -> f64 {
        step.ms * self.ground.machine.least_factor(step.unit, step.class)
    }

    /// Tries every step that may come next. `end` is when each placed step ends at the earliest, `free` when each resource is.
    fn extend(&mut self, order: &mut Vec<usize>, end: &mut Vec<f64>, free: &[f64]) {
        self.nodes += 1;
        if self.nodes > MOST_NODES || self.better.is_some() {
            return;
        }
        if order.len() == self.steps.len() {
            let makespan = self.run(order);
            if makespan < self.claim * (1.0 - crate::TOLERANCE) {
                self.better = Some(makespan);
            }
            return;
        }
        let limit = self.claim * (1.0 - crate::TOLERANCE);
        // Work that each resource still has to do.
        let mut left = vec![0.0; free.len()];
        for at in (0..self.steps.len()).filter(|&at| end[at].is_nan()) {
            for &resource in &self.resources[self.steps[at].unit] {
                left[resource] += self.fastest(&self.steps[at]);
            }
        }
        if free.iter().zip(&left).any(|(free, left)| free + left >= limit) {
            return;
        }
        let last = order.last().copied();
        for at in 0..self.steps.len() {
            if !end[at].is_nan() || self.steps[at].needs.iter().any(|&before| end[before].is_nan()) {
                continue;
            }
            // Two neighbours that have nothing to do with each other come in the order of their numbers only.
            if let Some(last) = last.filter(|&last| at < last) {
                let shares = |resource: &usize| self.resources[self.steps[last].unit].contains(resource);
                let related = self.resources[self.steps[at].unit].iter().any(shares);
                if !related && !self.steps[at].needs.contains(&last) {
                    continue;
                }
            }
            let unit = self.steps[at].unit;
            let ready = self.steps[at].needs.iter().map(|&before| end[before]).fold(0.0, f64::max);
            let start = self.resources[unit].iter().map(|&resource| free[resource]).fold(ready, f64::max);
            let finish = start + self.fastest(&self.steps[at]);
            if finish + self.steps[at].tail >= limit {
                continue;
            }
            let mut next = free.to_vec();
            self.resources[unit].iter().for_each(|&resource| next[resource] = finish);
            end[at] = finish;
            order.push(at);
            self.extend(order, end, &next);
            order.pop();
            end[at] = f64::NAN;
        }
    }

    /// The makespan of an order with slowdowns: whoever is next on all its resources starts as soon as its inputs are there.
    fn run(&self, order: &[usize]) -> f64 {
        let count = self.steps.len();
        let (mut left, mut done): (Vec<f64>, Vec<bool>) =
            (self.steps.iter().map(|step| step.ms).collect(), vec![false; count]);
        let mut started = vec![false; count];
        let mut now = 0.0;
        loop {
            for (place, &at) in order.iter().enumerate() {
                if started[at] || !self.steps[at].needs.iter().all(|&before| done[before]) {
                    continue;
                }
                let mine = &self.resources[self.steps[at].unit];
                let shares = |other: usize| self.resources[self.steps[other].unit].iter().any(|one| mine.contains(one));
                if order[..place].iter().all(|&other| done[other] || !shares(other)) {
                    started[at] = true;
                }
            }
            let running: Vec<usize> = (0..count).filter(|&at| started[at] && !done[at]).collect();
            if running.is_empty() {
                return now;
            }
            let rate = |at: usize| {
                let others: Vec<(usize, Class)> = running
                    .iter()
                    .filter(|&&other| other != at)
                    .map(|&other| (self.steps[other].unit, self.steps[other].class))
                    .collect();
                1.0 / self.ground.machine.factor(self.steps[at].unit, self.steps[at].class, &others)
            };
            let rates: Vec<f64> = running.iter().map(|&at| rate(at)).collect();
            let step = running.iter().zip(&rates).map(|(&at, rate)| left[at] / rate).fold(f64::INFINITY, f64::min);
            now += step;
            for (&at, rate) in running.iter().zip(&rates) {
                left[at] -= step * rate;
                if left[at] <= 1e-12 * self.steps[at].ms.max(1e-12) {
                    done[at] = true;
                }
            }
        }
    }
}
