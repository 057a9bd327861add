//! The schedule: who computes what, when, and whether that can happen.

mod verify;

use crate::costs::Model;
use crate::json::Reader;
use crate::links::Links;
use crate::machine::{Class, Machine};
use crate::{CheckError, close};
use serde_json::Value;
use std::collections::BTreeMap;

const CERTIFICATE: Reader = Reader("certificate");

/// Model, item and iteration.
pub type Execution = (usize, u64, u64);

#[derive(Debug)]
pub enum Work {
    /// Operators, ascending, in one piece.
    Compute(Vec<usize>),
    /// A tensor brought to the task's unit from another unit or (`None`) the host; from the own unit: handed to the host.
    Transfer { tensor: usize, from: Option<usize> },
}

#[derive(Debug)]
pub struct Task {
    pub unit: usize,
    pub of: Execution,
    pub work: Work,
    pub ms: f64,
    pub start: f64,
    pub end: f64,
    class: Class,
}

#[derive(Debug)]
pub struct Schedule {
    pub tasks: Vec<Task>,
    /// Arrival of each (model, item); those not named are there from the start.
    arrivals: BTreeMap<(usize, u64), f64>,
    /// Request of each (model, item), and each request's weight.
    requests: BTreeMap<(usize, u64), u64>,
    weights: BTreeMap<u64, f64>,
    /// For each model, item and iteration the task that computes each operator.
    pub computed_by: BTreeMap<Execution, Vec<usize>>,
    pub links: Links,
    /// Number of estimated segment costs.
    pub estimated: usize,
}

impl Schedule {
    pub fn read(certificate: &Value, models: &[Model], machine: &Machine) -> Result<Self, CheckError> {
        let mut tasks = Vec::new();
        let mut estimated = 0;
        for (index, task) in CERTIFICATE.list(certificate, "tasks")?.iter().enumerate() {
            let unit = CERTIFICATE.index(task, "unit", machine.units.len())?;
            let number = CERTIFICATE.index(task, "model", models.len())?;
            let model = &models[number];
            let stated = CERTIFICATE.number(task, "ms")?;
            let (work, derived, class) = if task.get("operators").is_some() {
                let operators = CERTIFICATE.indices(task, "operators", model.operators.len())?;
                if operators.is_empty() || operators.windows(2).any(|pair| pair[0] >= pair[1]) {
                    return Err(CERTIFICATE.fail(format!("operators of task {index} are not ascending")));
                }
                let Some((ms, is_estimate)) = model.segment(&operators, unit) else {
                    return Err(CheckError::Schedule(format!(
                        "task {index} puts operators on {} that the profile or a pin forbids there",
                        machine.units[unit].address
                    )));
                };
                estimated += usize::from(is_estimate);
                let weights: f64 = operators.iter().map(|&at| model.operators[at].weight_bytes).sum();
                if machine.units[unit].memory_bytes.is_some_and(|most| weights > most) {
                    return Err(CheckError::Schedule(format!(
                        "task {index} holds {weights} bytes of weights, more than the memory of {}",
                        machine.units[unit].address
                    )));
                }
                let class = class_of(model, &operators, unit);
                (Work::Compute(operators), ms, class)
            } else {
                let tensor = CERTIFICATE.index(task, "tensor", model.tensors.len())?;
                let from = match task.get("from") {
                    None | Some(Value::Null) => None,
                    Some(from) => Some(CERTIFICATE.as_index(from, "from", machine.units.len())?),
                };
                let ms = match from {
                    Some(from) if from == unit => model.host_transfer(tensor, unit, machine, true),
                    Some(from) => model.transfer(from, unit, model.tensors[tensor].bytes),
                    None => model.host_transfer(tensor, unit, machine, false),
                };
                (Work::Transfer { tensor, from }, ms, Class::Memory)
            };
            if !close(stated, derived) {
                return Err(CheckError::Cost { task: index, stated, derived });
            }
            let (start, end) = (CERTIFICATE.number(task, "start_ms")?, CERTIFICATE.number(task, "end_ms")?);
            let of = (number, CERTIFICATE.count(task, "item")?, CERTIFICATE.count(task, "iteration")?);
            tasks.push(Task { unit, of, work, ms: derived, start, end, class });
        }
        let (mut arrivals, mut requests, mut weights) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for request in certificate.get("requests").and_then(Value::as_array).into_iter().flatten() {
            let model = CERTIFICATE.index(request, "model", models.len())?;
            let item = CERTIFICATE.count(request, "item")?;
            arrivals.insert((model, item), CERTIFICATE.number(request, "arrival_ms")?);
            let number = CERTIFICATE.count(request, "request")?;
            requests.insert((model, item), number);
            let weight = request.get("weight").and_then(Value::as_f64).unwrap_or(1.0);
            if !crate::ranges::WEIGHTS.contains(&weight) {
                return Err(CERTIFICATE.fail(format!("request {number} weighs {weight:e}, which is no weight")));
            }
            weights.insert(number, weight);
        }
        let links = Links::default();
        let mut schedule = Self { tasks, arrivals, requests, weights, computed_by: BTreeMap::new(), links, estimated };
        schedule.cover(models)?;
        schedule.links = Links::read(certificate, models, schedule.computed_by.keys())?;
        Ok(schedule)
    }

    /// Every operator of every execution is computed once, and every model and request is executed.
    fn cover(&mut self, models: &[Model]) -> Result<(), CheckError> {
        for (index, task) in self.tasks.iter().enumerate() {
            let Work::Compute(operators) = &task.work else { continue };
            let count = models[task.of.0].operators.len();
            let done = self.computed_by.entry(task.of).or_insert_with(|| vec![usize::MAX; count]);
            for &at in operators {
                if done[at] != usize::MAX {
                    return Err(CheckError::Schedule(format!("operator {at} of {:?} is computed twice", task.of)));
                }
                done[at] = index;
            }
        }
        for (of, done) in &self.computed_by {
            if let Some(at) = done.iter().position(|&task| task == usize::MAX) {
                let name = &models[of.0].name;
                return Err(CheckError::Schedule(format!("operator {at} of model `{name}` is never computed")));
            }
        }
        let executed = |model: usize, item: Option<u64>| {
            self.computed_by.keys().any(|of| of.0 == model && item.is_none_or(|item| of.1 == item))
        };
        let missing = (0..models.len()).find(|&model| !models[model].operators.is_empty() && !executed(model, None));
        let unserved = self.arrivals.keys().find(|of| !executed(of.0, Some(of.1)));
        match (missing, unserved) {
            (None, None) => Ok(()),
            (Some(model), _) | (_, Some(&(model, _))) => {
                Err(CheckError::Schedule(format!("model `{}` is never executed as asked", models[model].name)))
            }
        }
    }

    pub fn makespan(&self) -> f64 {
        self.tasks.iter().fold(0.0, |end, task| f64::max(end, task.end))
    }

    pub fn arrival(&self, model: usize, item: u64) -> f64 {
        self.arrivals.get(&(model, item)).copied().unwrap_or(0.0)
    }

    /// The request that an item of a model is part of.
    pub fn request(&self, of: (usize, u64)) -> Option<u64> {
        self.requests.get(&of).copied()
    }

    /// The share of all weights that an item's request has.
    pub fn share(&self, of: (usize, u64)) -> f64 {
        let own = self.requests.get(&of).map_or(0.0, |request| self.weights[request]);
        own / self.weights.values().sum::<f64>()
    }

    /// When the last item of a model arrives.
    pub fn latest_arrival(&self, model: usize) -> f64 {
        let items = self.computed_by.keys().filter(|of| of.0 == model);
        items.map(|of| self.arrival(of.0, of.1)).fold(0.0, f64::max)
    }

    /// `Σ weight · time / Σ weight` over requests, each taking the longest of the times of its (model, item)s.
    pub fn weighted_mean(&self, time: impl Fn(usize, u64) -> f64) -> f64 {
        let mut longest: BTreeMap<u64, f64> = BTreeMap::new();
        for (of, request) in &self.requests {
            let slot = longest.entry(*request).or_insert(0.0);
            *slot = slot.max(time(of.0, of.1));
        }
        let weights: f64 = self.weights.values().sum();
        let sum: f64 = longest.iter().map(|(request, time)| self.weights[request] * time).sum();
        if weights > 0.0 { sum / weights } else { 0.0 }
    }

    /// When an item of a model is complete.
    fn completion(&self, model: usize, item: u64) -> f64 {
        let own = self.tasks.iter().filter(|task| task.of.0 == model && task.of.1 == item);
        own.map(|task| task.end).fold(0.0, f64::max)
    }
}

/// A single operator's own class, else that which most of the operators' isolated time has.
fn class_of(model: &Model, operators: &[usize], unit: usize) -> Class {
    if let [only] = operators {
        return model.operators[*only].class;
    }
    let time = |class: Class| -> f64 {
        let own = operators.iter().filter(|&&at| model.operators[at].class == class);
        own.filter_map(|&at| model.alone(at, unit)).map(|alone| alone.ms).sum()
    };
    if time(Class::Compute) > time(Class::Memory) { Class::Compute } else { Class::Memory }
}
