//! Optimality of small models, by trying every placement and every order.
//!
//! A schedule of lone operators is a unit for each, and what operators, transfers and handovers do when something ends: each that could
//! start does or waits until something else ends, be it for the sake of a step that takes its resource first or to be slowed less. The
//! walk through time is given up where it cannot beat the claim even if nothing slowed anything any more.

use crate::CheckError;
use crate::bounds::Ground;
use crate::machine::Class;
use std::collections::{BTreeMap, BTreeSet};

/// Most operators and units.
const MOST_OPERATORS: usize = 7;
const MOST_UNITS: usize = 3;
/// Most moments looked at.
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

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// Not started.
    Open,
    /// Could have started, and waits for an end.
    Waiting,
    Running,
    Done,
}

#[derive(Clone)]
struct Moment {
    now: f64,
    left: Vec<f64>,
    stage: Vec<Stage>,
}

struct Search<'g, 'a> {
    ground: &'g Ground<'a>,
    claim: f64,
    /// Whether units that work at once change each other's rates.
    slows: bool,
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
    let slows = ground.machine.slows();
    let mut search = Search { ground, claim, slows, steps: Vec::new(), resources, nodes: 0, better: None };
    for code in 0..units.pow(count as u32) {
        let unit_of: Vec<usize> = (0..count).map(|at| code / units.pow(at as u32) % units).collect();
        if unit_of.iter().enumerate().any(|(at, &unit)| ground.least(0, at, unit).is_infinite()) {
            continue;
        }
        search.place(&unit_of);
        let start = Moment {
            now: 0.0,
            left: search.steps.iter().map(|step| step.ms).collect(),
            stage: vec![Stage::Open; search.steps.len()],
        };
        search.decide(start, 0);
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

    /// Whether steps can never run at once.
    fn exclude(&self, one: usize, other: usize) -> bool {
        let resources = &self.resources[self.steps[other].unit];
        self.resources[self.steps[one].unit].iter().any(|resource| resources.contains(resource))
    }

    /// Decides for each step from `first` on whether it starts now, then lets time pass.
    fn decide(&mut self, mut moment: Moment, first: usize) {
        self.nodes += 1;
        if self.nodes > MOST_NODES || self.better.is_some() || !self.may_end_earlier(&moment) {
            return;
        }
        let count = self.steps.len();
        let could = |at: &usize| {
            let ready = self.steps[*at].needs.iter().all(|&before| moment.stage[before] == Stage::Done);
            let free = (0..count).all(|other| moment.stage[other] != Stage::Running || !self.exclude(*at, other));
            moment.stage[*at] == Stage::Open && ready && free
        };
        let Some(at) = (first..count).find(could) else {
            if let Some(next) = self.pass(moment) {
                self.decide(next, 0);
            }
            return;
        };
        let mut begun = moment.clone();
        begun.stage[at] = Stage::Running;
        self.decide(begun, at + 1);
        // Where nothing slows anything, waiting is for a step that takes the resource first.
        let others = (0..count).filter(|&other| other != at && moment.stage[other] != Stage::Done);
        if others
            .into_iter()
            .any(|other| self.slows || moment.stage[other] != Stage::Running && self.exclude(at, other))
        {
            moment.stage[at] = Stage::Waiting;
            self.decide(moment, at + 1);
        }
    }

    /// Whether the claim could be beaten if nothing slowed anything any more.
    fn may_end_earlier(&self, moment: &Moment) -> bool {
        let limit = self.claim * (1.0 - crate::TOLERANCE);
        let mut busy = vec![moment.now; self.resources.iter().flatten().max().map_or(0, |most| most + 1)];
        for (at, step) in self.steps.iter().enumerate().filter(|&(at, _)| moment.stage[at] != Stage::Done) {
            let share = if step.ms > 0.0 { moment.left[at] / step.ms } else { 0.0 };
            let left = self.fastest(step) * share;
            if moment.now + left + step.tail >= limit {
                return false;
            }
            self.resources[step.unit].iter().for_each(|&resource| busy[resource] += left);
        }
        busy.into_iter().all(|end| end < limit)
    }

    /// The moment at which something has ended; `None` where nothing runs. A course that is complete is compared with the claim.
    fn pass(&mut self, mut moment: Moment) -> Option<Moment> {
        let running: Vec<usize> = (0..self.steps.len()).filter(|&at| moment.stage[at] == Stage::Running).collect();
        if running.is_empty() {
            if moment.stage.iter().all(|stage| *stage == Stage::Done) {
                self.better = Some(moment.now);
            }
            return None;
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
        let step = running.iter().zip(&rates).map(|(&at, rate)| moment.left[at] / rate).fold(f64::INFINITY, f64::min);
        moment.now += step;
        for (&at, rate) in running.iter().zip(&rates) {
            moment.left[at] -= step * rate;
            if moment.left[at] <= 1e-12 * self.steps[at].ms.max(1e-12) {
                moment.stage[at] = Stage::Done;
            }
        }
        for stage in moment.stage.iter_mut().filter(|stage| **stage == Stage::Waiting) {
            *stage = Stage::Open;
        }
        Some(moment)
    }
}
