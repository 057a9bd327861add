//! Every placement of the jobs of a stretch, each given up as soon as it is known to take v or more.
//!
//! What fractions of jobs hide, whole jobs show: the load bound divides a job among units, a placement does not. Jobs are placed in
//! topological order. A partial placement is given up when
//!
//! * some job ends too late there, given where its makers are and what must still follow it;
//! * the priced work of what is placed, with its transfers, and the least of the rest is v or more (any prices of [`super::priced`]);
//! * some resource has too much to do between the first start of some of its work and the least that follows it (the preemptive
//!   bound of one machine with heads and tails, Jackson 1955, Carlier 1982);
//! * everything is placed and, at the prices at which these loads take longest, v is reached.
//!
//! None of this looks at orders, so idling is allowed for, as bounds on parts of a schedule need it.

use super::part::Part;
use super::refute::Stretch;

/// Something that a resource does: no earlier than `start`, and `tail` follows.
#[derive(Debug, Clone, Copy)]
struct Item {
    start: f64,
    ms: f64,
    tail: f64,
}

pub(super) struct Placements<'p> {
    stretch: &'p Stretch<'p>,
    part: &'p Part,
    /// Row-major jobs × units: which pairs are left.
    left: &'p [bool],
    /// Row-major jobs × units: what must follow.
    tails: &'p [f64],
    /// By unit and class, such that no moment does more than 1 of priced work in a millisecond.
    weights: Vec<f64>,
    v: f64,
    nodes: u64,
    unit: Vec<usize>,
    heads: Vec<f64>,
    priced: f64,
    /// The least priced work of all jobs from each on.
    rest: Vec<f64>,
    /// Row-major tensors × units: whether it is there.
    brought: Vec<bool>,
    /// By resource.
    items: Vec<Vec<Item>>,
    /// Undisturbed work by unit.
    loads: Vec<f64>,
}

impl<'p> Placements<'p> {
    pub fn new(
        stretch: &'p Stretch<'p>,
        part: &'p Part,
        left: &'p [bool],
        tails: &'p [f64],
        weights: &[f64],
        v: f64,
        nodes: u64,
    ) -> Self {
        let units = part.units;
        let work = |moment: &super::priced::Moment| moment.iter().map(|&(at, rate)| weights[at] * rate).sum::<f64>();
        let most = stretch.moments.iter().map(work).fold(0.0, f64::max);
        let scale = if most > 0.0 { 1.0 / most } else { 0.0 };
        let weights: Vec<f64> = weights.iter().map(|weight| weight * scale).collect();
        let mut placements = Self {
            stretch,
            part,
            left,
            tails,
            weights,
            v,
            nodes,
            unit: vec![0; part.jobs()],
            heads: vec![0.0; part.jobs()],
            priced: stretch.earliest,
            rest: vec![0.0; part.jobs() + 1],
            brought: vec![false; stretch.problem.tensors().len() * units],
            items: vec![Vec::new(); stretch.problem.resources().len()],
            loads: vec![0.0; units],
        };
        for at in (0..part.jobs()).rev() {
            let costs = (0..units).filter(|unit| left[at * units + unit]).map(|unit| placements.price(at, unit));
            placements.rest[at] = placements.rest[at + 1] + costs.fold(f64::INFINITY, f64::min);
        }
        placements
    }

    /// Priced work and charges of a job with its handovers, without transfers.
    fn price(&self, at: usize, unit: usize) -> f64 {
        let cell = at * self.part.units + unit;
        self.weights[2 * unit + self.part.class[cell] as usize] * self.part.ms[cell]
            + self.weights[2 * unit + self.part.memory] * self.part.handed[cell]
            + self.part.charges[cell]
    }

    /// Whether every placement takes `v` or more; `false` too when there are too many.
    pub fn all_take_long(&mut self) -> bool {
        // What the job after the stretch reads of the one before.
        let problem = self.stretch.problem;
        if let (Some((before, from)), Some((after, to))) = (self.stretch.border.before, self.stretch.border.after) {
            for &tensor in problem.dense.outputs.row(before as usize) {
                if problem.dense.consumers.row(tensor as usize).contains(&after) {
                    let _ = self.bring(tensor as usize, from, to, 0.0, 0.0);
                }
            }
        }
        self.extend(0)
    }

    fn extend(&mut self, at: usize) -> bool {
        let units = self.part.units;
        if at == self.part.jobs() {
            let weights = self.stretch.least.balance(&self.loads);
            let work: f64 = weights.iter().zip(&self.loads).map(|(weight, load)| weight * load).sum();
            return work + self.stretch.earliest >= self.v;
        }
        let mut order: Vec<usize> = (0..units).filter(|unit| self.left[at * units + unit]).collect();
        order.sort_by(|&a, &b| self.price(at, a).total_cmp(&self.price(at, b)));
        for unit in order {
            if self.nodes == 0 {
                return false;
            }
            self.nodes -= 1;
            let before = (self.priced, self.loads.clone(), self.items.iter().map(Vec::len).collect::<Vec<_>>());
            let mut there = Vec::new();
            let long = self.place(at, unit, &mut there);
            let refuted = long || self.extend(at + 1);
            self.priced = before.0;
            self.loads = before.1;
            for (items, count) in self.items.iter_mut().zip(before.2) {
                items.truncate(count);
            }
            for cell in there {
                self.brought[cell] = false;
            }
            if !refuted {
                return false;
            }
        }
        true
    }

    /// Places a job; whether that is too long already. `there` collects what it brings.
    fn place(&mut self, at: usize, unit: usize, there: &mut Vec<usize>) -> bool {
        let (stretch, units) = (self.stretch, self.part.units);
        let (problem, border) = (stretch.problem, &stretch.border);
        let dense = &problem.dense;
        let job = stretch.jobs[at] as usize;
        let cell = at * units + unit;
        let own = stretch.least.ms(job, unit);
        let factor = stretch.least.transfer_factor(unit);
        let mut start = if stretch.arrivals { dense.release[job] } else { 0.0 };
        self.unit[at] = unit;
        for &tensor in dense.inputs.row(job) {
            let tensor = tensor as usize;
            let maker = dense.producer[tensor];
            let (from, made) = match stretch.local(maker) {
                Some(maker) => (self.unit[maker], self.heads[maker]),
                None if maker == u32::MAX && border.inputs => {
                    (units, if stretch.arrivals { dense.tensor_release[tensor] } else { 0.0 })
                }
                None => match border.before {
                    Some((before, from)) if before == maker => (from, 0.0),
                    // Made long before: it may have been brought long before.
                    _ => continue,
                },
            };
            there.extend(self.bring(tensor, from, unit, made, own + self.tails[cell]));
            start = start.max(made + dense.transfer(tensor, from, unit) * factor);
        }
        self.heads[at] = start + own;
        self.priced += self.price(at, unit);
        self.loads[unit] += self.part.ms[cell] + self.part.handed[cell];
        self.work(
            unit,
            Item { start, ms: self.part.ms[cell] * own_factor(stretch, job, unit), tail: self.tails[cell] },
        );
        if let Some((after, to)) = border.after {
            for &tensor in dense.outputs.row(job) {
                if dense.consumers.row(tensor as usize).contains(&after) {
                    there.extend(self.bring(tensor as usize, unit, to, self.heads[at], 0.0));
                }
            }
        }
        let late = self.heads[at] + self.tails[cell] >= self.v;
        late || self.priced + self.rest[at + 1] >= self.v || self.items.iter().any(|items| one_machine(items) >= self.v)
    }

    /// Brings a tensor to a unit if it is not there; returns what is to be undone.
    fn bring(&mut self, tensor: usize, from: usize, to: usize, start: f64, tail: f64) -> Option<usize> {
        let cell = tensor * self.part.units + to;
        let ms = self.stretch.problem.dense.transfer(tensor, from, to);
        if from == to || ms <= 0.0 || self.brought[cell] {
            return None;
        }
        self.brought[cell] = true;
        self.priced += self.weights[2 * to + self.part.memory] * ms;
        self.loads[to] += ms;
        self.work(to, Item { start, ms: ms * self.stretch.least.transfer_factor(to), tail });
        Some(cell)
    }

    fn work(&mut self, unit: usize, item: Item) {
        for &resource in &self.stretch.problem.platform.unit_resources[unit] {
            self.items[resource as usize].push(item);
        }
    }
}

/// The smallest slowdown factor of a job's work on a unit.
fn own_factor(stretch: &Stretch<'_>, job: usize, unit: usize) -> f64 {
    let class = stretch.problem.dense.class[job * stretch.problem.dense.units + unit] as usize;
    stretch.least.factor[unit][class]
}

/// The largest, over sets of items, of their first start, all their work and the least that follows one of them.
fn one_machine(items: &[Item]) -> f64 {
    let mut most = 0.0f64;
    for first in items {
        let mut rest: Vec<&Item> = items.iter().filter(|item| item.start >= first.start).collect();
        rest.sort_by(|a, b| b.tail.total_cmp(&a.tail));
        let mut sum = first.start;
        for item in rest {
            sum += item.ms;
            most = most.max(sum + item.tail);
        }
    }
    most
}
