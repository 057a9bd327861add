//! `placements`: whichever units few operators are put on, everything takes at least v.
//!
//! The witness is v and prices of units' time; all placements are tried, operator by operator in their order, and each partial one is given
//! up as soon as something shows that it takes v or more: an operator that ends too late given what must follow it, the priced work and
//! transfers of what is placed with the least of the rest, a resource between the first start of some of its work and the least that
//! follows that (Jackson 1955, Carlier 1982), or, once all is placed, the load at its best prices. Orders are not looked at, so
//! idling is allowed for.

use crate::CheckError;
use crate::bounds::Ground;
use crate::json::Reader;
use crate::machine::Class;
use crate::priced;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

const CERTIFICATE: Reader = Reader("certificate");
/// Most operators and units, and partial placements looked at.
const MOST_OPERATORS: usize = 24;
const MOST_UNITS: usize = 4;
const MOST_NODES: u64 = 1_000_000;
/// What rounding may have added to v.
const ROUNDING: f64 = 1e-9;

/// Something that a resource does: no earlier than `start`, and `tail` follows.
#[derive(Debug, Clone, Copy)]
struct Item {
    start: f64,
    ms: f64,
    tail: f64,
}

/// A partial placement.
#[derive(Debug, Clone)]
struct Partial {
    unit: Vec<usize>,
    /// Earliest end of each operator placed.
    end: Vec<f64>,
    /// Priced work and transfers.
    priced: f64,
    /// Undisturbed work by unit.
    loads: Vec<f64>,
    /// Model, tensor and unit that it was brought to.
    brought: BTreeSet<(usize, usize, usize)>,
    /// By resource.
    items: Vec<Vec<Item>>,
}

struct Placements<'g, 'a> {
    ground: &'g Ground<'a>,
    /// Model and operator of everything that is placed.
    operators: Vec<(usize, usize)>,
    /// First of each model in that list.
    first: Vec<usize>,
    v: f64,
    /// By unit: price of compute- and of memory-bound work.
    price: Vec<[f64; 2]>,
    /// Prices at which a load can take longest: the corners of those that are allowed.
    corners: Vec<Vec<f64>>,
    /// Resources of each unit.
    resources: Vec<Vec<usize>>,
    /// Row-major operators × units: pairs that need not take v.
    left: Vec<bool>,
    /// Row-major operators × units: what must follow.
    tail: Vec<f64>,
    /// The least priced work of all operators from each on.
    rest: Vec<f64>,
    nodes: u64,
}

/// The stated value, if every placement takes as long.
pub fn verify(proof: &Value, ground: &Ground<'_>) -> Result<f64, CheckError> {
    let value = CERTIFICATE.number(proof, "value")?;
    let wrong = |reason: String| Err(CheckError::Bound(reason));
    let operators: Vec<(usize, usize)> = (0..ground.models.len())
        .flat_map(|model| (0..ground.models[model].operators.len()).map(move |at| (model, at)))
        .collect();
    let once =
        ground.schedule.links.is_empty() && (0..ground.models.len()).all(|model| ground.executions(model) <= 1.0);
    let arrives = ground.schedule.computed_by.keys().any(|of| ground.schedule.arrival(of.0, of.1) > 0.0);
    if operators.len() > MOST_OPERATORS || ground.units() > MOST_UNITS || !once || arrives {
        return wrong(format!(
            "only one execution of up to {MOST_OPERATORS} operators that are there from the start, on up to {MOST_UNITS} units, can be placed in all ways"
        ));
    }
    let price = priced::prices(proof, ground)?;
    let mut names: BTreeMap<&str, usize> = BTreeMap::new();
    for resource in ground.machine.units.iter().flat_map(|unit| &unit.resources) {
        let next = names.len();
        names.entry(resource).or_insert(next);
    }
    let resources = ground.machine.units.iter();
    let resources = resources.map(|unit| unit.resources.iter().map(|name| names[name.as_str()]).collect()).collect();
    let first = (0..ground.models.len())
        .map(|model| operators.iter().position(|of| of.0 == model).unwrap_or(operators.len()))
        .collect();
    let mut search = Placements {
        ground,
        first,
        v: value * (1.0 - ROUNDING),
        price,
        corners: corners(ground),
        resources,
        left: Vec::new(),
        tail: Vec::new(),
        rest: Vec::new(),
        nodes: 0,
        operators,
    };
    if search.leave_out() {
        return Ok(value);
    }
    let count = search.operators.len();
    search.rest = vec![0.0; count + 1];
    for at in (0..count).rev() {
        let least = search.units(at).map(|unit| search.work(at, unit)).fold(f64::INFINITY, f64::min);
        search.rest[at] = search.rest[at + 1] + least;
    }
    let start = Partial {
        unit: vec![0; count],
        end: vec![0.0; count],
        priced: 0.0,
        loads: vec![0.0; ground.units()],
        brought: BTreeSet::new(),
        items: vec![Vec::new(); names.len()],
    };
    match search.all_take_long(0, &start) {
        Some(true) => Ok(value),
        Some(false) => wrong(format!("a placement is not known to take {value} ms")),
        None => wrong("there are too many placements to try".to_owned()),
    }
}

impl Placements<'_, '_> {
    /// Units that an operator is left.
    fn units(&self, at: usize) -> impl Iterator<Item = usize> + '_ {
        let units = self.ground.units();
        (0..units).filter(move |unit| self.left[at * units + unit])
    }

    /// Least milliseconds of an operator on a unit, whoever runs beside it.
    fn ms(&self, at: usize, unit: usize) -> f64 {
        let (model, operator) = self.operators[at];
        self.ground.fastest(model, operator, unit)
    }

    fn transfer_factor(&self, unit: usize) -> f64 {
        self.ground.machine.least_factor(unit, Class::Memory)
    }

    /// Milliseconds to bring a tensor to a unit from another, or from the host.
    fn moved(&self, model: usize, tensor: usize, from: Option<usize>, to: usize) -> f64 {
        let described = &self.ground.models[model];
        match from {
            Some(from) => described.transfer(from, to, described.tensors[tensor].bytes),
            None => described.host_transfer(tensor, to, self.ground.machine, false),
        }
    }

    /// Milliseconds to hand an operator's model outputs over.
    fn handed(&self, at: usize, unit: usize) -> f64 {
        let (model, operator) = self.operators[at];
        let described = &self.ground.models[model];
        let outputs =
            described.operators[operator].outputs.iter().filter(|&&tensor| described.tensors[tensor].is_output);
        outputs.map(|&tensor| described.host_transfer(tensor, unit, self.ground.machine, true)).sum()
    }

    /// Priced work of an operator and of handing over its outputs.
    fn work(&self, at: usize, unit: usize) -> f64 {
        let (model, operator) = self.operators[at];
        let class = usize::from(self.ground.models[model].operators[operator].class == Class::Memory);
        self.price[unit][class] * self.ground.least(model, operator, unit) + self.price[unit][1] * self.handed(at, unit)
    }

    /// Leaves out operators on units where what must come before, their own time and what must follow add up to v, until nothing
    /// changes; whether an operator is left without a unit.
    fn leave_out(&mut self) -> bool {
        let (units, count) = (self.ground.units(), self.operators.len());
        self.left = (0..count * units).map(|cell| self.ms(cell / units, cell % units).is_finite()).collect();
        loop {
            self.tail = self.tails();
            let ends = self.ends();
            let late: Vec<usize> =
                (0..count * units).filter(|&cell| self.left[cell] && ends[cell] + self.tail[cell] >= self.v).collect();
            if late.is_empty() {
                return false;
            }
            for cell in late {
                self.left[cell] = false;
            }
            if (0..count).any(|at| self.units(at).next().is_none()) {
                return true;
            }
        }
    }

    /// Earliest ends by operator and unit.
    fn ends(&self) -> Vec<f64> {
        let units = self.ground.units();
        let mut ends = vec![f64::INFINITY; self.left.len()];
        for at in 0..self.operators.len() {
            let (model, operator) = self.operators[at];
            let described = &self.ground.models[model];
            let row: Vec<(usize, f64)> = self
                .units(at)
                .map(|unit| {
                    let factor = self.transfer_factor(unit);
                    let arrives = |&tensor: &usize| match described.tensors[tensor].producer {
                        None => factor * self.moved(model, tensor, None, unit),
                        Some(maker) => (0..units)
                            .map(|from| {
                                let made = ends[(self.first[model] + maker) * units + from];
                                made + factor * self.moved(model, tensor, Some(from), unit)
                            })
                            .fold(f64::INFINITY, f64::min),
                    };
                    let start = described.operators[operator].inputs.iter().map(arrives).fold(0.0, f64::max);
                    (unit, start + self.ms(at, unit))
                })
                .collect();
            for (unit, end) in row {
                ends[at * units + unit] = end;
            }
        }
        ends
    }

    /// The least time from the end of each operator on each unit to the end of everything.
    fn tails(&self) -> Vec<f64> {
        let units = self.ground.units();
        let mut tails = vec![0.0f64; self.left.len()];
        for at in (0..self.operators.len()).rev() {
            let (model, operator) = self.operators[at];
            let described = &self.ground.models[model];
            for unit in 0..units {
                let mut most = 0.0f64;
                for &tensor in &described.operators[operator].outputs {
                    for &reader in &described.tensors[tensor].consumers {
                        let next = self.first[model] + reader;
                        let least = self
                            .units(next)
                            .map(|to| {
                                let moved = self.transfer_factor(to) * self.moved(model, tensor, Some(unit), to);
                                moved + self.ms(next, to) + tails[next * units + to]
                            })
                            .fold(f64::INFINITY, f64::min);
                        most = most.max(least);
                    }
                    if described.tensors[tensor].is_output {
                        let handed = described.host_transfer(tensor, unit, self.ground.machine, true);
                        most = most.max(self.transfer_factor(unit) * handed);
                    }
                }
                tails[at * units + unit] = most;
            }
        }
        tails
    }

    /// Whether every way to place the operators from `at` on takes v; `None` when there are too many.
    fn all_take_long(&mut self, at: usize, partial: &Partial) -> Option<bool> {
        if at == self.operators.len() {
            let load = |prices: &Vec<f64>| prices.iter().zip(&partial.loads).map(|(price, load)| price * load).sum();
            return Some(self.corners.iter().map(load).fold(0.0, f64::max) >= self.v);
        }
        for unit in self.units(at).collect::<Vec<_>>() {
            self.nodes += 1;
            if self.nodes > MOST_NODES {
                return None;
            }
            let mut next = partial.clone();
            if !self.place(at, unit, &mut next) && !self.all_take_long(at + 1, &next)? {
                return Some(false);
            }
        }
        Some(true)
    }

    /// Places an operator; whether that takes too long already.
    fn place(&self, at: usize, unit: usize, partial: &mut Partial) -> bool {
        let (model, operator) = self.operators[at];
        let described = &self.ground.models[model];
        let (own, tail) = (self.ms(at, unit), self.tail[at * self.ground.units() + unit]);
        let mut start = 0.0f64;
        for &tensor in &described.operators[operator].inputs {
            let maker = described.tensors[tensor].producer.map(|maker| self.first[model] + maker);
            let made = maker.map_or(0.0, |maker| partial.end[maker]);
            let ms = self.moved(model, tensor, maker.map(|maker| partial.unit[maker]), unit);
            let slowed = ms * self.transfer_factor(unit);
            if ms > 0.0 && partial.brought.insert((model, tensor, unit)) {
                partial.priced += self.price[unit][1] * ms;
                partial.loads[unit] += ms;
                self.occupy(unit, Item { start: made, ms: slowed, tail: own + tail }, partial);
            }
            start = start.max(made + slowed);
        }
        partial.unit[at] = unit;
        partial.end[at] = start + own;
        partial.priced += self.work(at, unit);
        partial.loads[unit] += self.ground.least(model, operator, unit) + self.handed(at, unit);
        self.occupy(unit, Item { start, ms: own, tail }, partial);
        partial.end[at] + tail >= self.v
            || partial.priced + self.rest[at + 1] >= self.v
            || partial.items.iter().any(|items| one_machine(items) >= self.v)
    }

    fn occupy(&self, unit: usize, item: Item, partial: &mut Partial) {
        for &resource in &self.resources[unit] {
            partial.items[resource].push(item);
        }
    }
}

/// The largest, over sets of items, of their first start, all their work and the least that follows one of them.
fn one_machine(items: &[Item]) -> f64 {
    let mut by_tail: Vec<&Item> = items.iter().collect();
    by_tail.sort_by(|a, b| b.tail.total_cmp(&a.tail));
    let from = |first: &Item| {
        let mut done = first.start;
        let mut most = 0.0f64;
        for item in by_tail.iter().filter(|item| item.start >= first.start) {
            done += item.ms;
            most = most.max(done + item.tail);
        }
        most
    };
    items.iter().map(from).fold(0.0, f64::max)
}

/// The corners of all prices of units that let no set of units that can be busy at once do more than 1 of priced work in a millisecond.
fn corners(ground: &Ground<'_>) -> Vec<Vec<f64>> {
    let units = ground.units();
    let sets = ground.machine.busy_sets().unwrap_or_default();
    let row = |set: &Vec<usize>| {
        let mut row = vec![0.0; units];
        for &unit in set {
            row[unit] = 1.0 / ground.machine.least_beside(unit, set);
        }
        row
    };
    let rows: Vec<Vec<f64>> = sets.iter().map(row).collect();
    let mut planes: Vec<(Vec<f64>, f64)> = rows.iter().map(|row| (row.clone(), 1.0)).collect();
    planes.extend((0..units).map(|unit| ((0..units).map(|at| f64::from(at == unit)).collect(), 0.0)));
    let mut found = Vec::new();
    for code in 0u32..1 << planes.len() {
        if code.count_ones() as usize != units {
            continue;
        }
        let chosen = planes.iter().enumerate().filter(|(at, _)| code >> at & 1 == 1).map(|(_, plane)| plane.clone());
        let Some(prices) = solve(chosen.collect()) else { continue };
        let most = rows.iter().map(|row| row.iter().zip(&prices).map(|(a, b)| a * b).sum::<f64>()).fold(0.0, f64::max);
        if prices.iter().all(|&price| price >= -1e-12) && most > 0.0 && most <= 1.0 + 1e-9 {
            // What rounding may have added is taken off.
            found.push(prices.iter().map(|price| price.max(0.0) / most.max(1.0)).collect());
        }
    }
    found
}

/// The point on all of as many planes as it has coordinates, if there is one only.
fn solve(mut planes: Vec<(Vec<f64>, f64)>) -> Option<Vec<f64>> {
    let count = planes.len();
    for column in 0..count {
        let pivot = (column..count).max_by(|&a, &b| planes[a].0[column].abs().total_cmp(&planes[b].0[column].abs()))?;
        planes.swap(column, pivot);
        let (top, value) = planes[column].clone();
        if top[column].abs() < 1e-12 {
            return None;
        }
        for (at, (row, right)) in planes.iter_mut().enumerate() {
            if at != column {
                let times = row[column] / top[column];
                row.iter_mut().zip(&top).for_each(|(cell, above)| *cell -= times * above);
                *right -= times * value;
            }
        }
    }
    Some(planes.iter().enumerate().map(|(at, (row, right))| right / row[at]).collect())
}
