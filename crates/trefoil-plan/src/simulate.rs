//! The one simulator that scores every plan (DESIGN 3).
//!
//! A task starts when the tasks it waits for have finished, every resource of its unit is free and it is next in the
//! order of each of them; ties by task id. A running task progresses at rate `1/f`, `f` being the slowdown that the other
//! busy units put on its unit: the largest measured pairwise factor for the class of its work, 1 where nothing was
//! measured, below 1 where engines speed each other up. Rates change at every start and finish. Transfers are tasks of
//! their destination's resources. Tasks of a request ([`Plan::requests`]) wait for its arrival.

use crate::PlanError;
use crate::engine::{self, Platform, Stall, Tasks};
use crate::factors::{Factors, class_index};
use std::collections::{BTreeMap, BTreeSet};
use trefoil_core::cost::measurement_cost;
use trefoil_core::profile::{ProfileIndex, above_idle};
use trefoil_core::{
    CoreError, Lane, OperatorClass, OperatorGraph, Origin, Outcome, Plan, Span, SpanKind, Subject, TaskId, Timeline,
    Unit, UnitAddress, Work,
};

/// What the simulator needs beside the plan: slowdown factors, powers, and the class of each task.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SimulationModel {
    /// `SF(slowed unit, interfering unit, class of the slowed work, class of the interfering work)`.
    pub slowdown: BTreeMap<(UnitAddress, UnitAddress), BTreeMap<(OperatorClass, OperatorClass), f64>>,
    /// Watts while busy, where known.
    pub watts: BTreeMap<UnitAddress, f64>,
    /// Package watts while nothing runs, where known.
    pub idle_watts: Option<f64>,
    /// Class of each task; missing ones count as memory-bound.
    pub classes: Vec<OperatorClass>,
}

impl SimulationModel {
    /// Reads factors and powers of the plan's units from a profile, and gives each task its class: a single operator's own, that
    /// of most of the isolated time of several, memory-bound for transfers. `graphs` are in the order of [`Plan::models`].
    ///
    /// # Errors
    /// [`CoreError::BadNumber`] for a slowdown factor of 0.
    pub fn new(index: &ProfileIndex<'_>, graphs: &[&OperatorGraph], plan: &Plan) -> Result<Self, PlanError> {
        Self::from_profiles(&vec![index; graphs.len().max(1)], graphs, plan)
    }

    /// The same for models of several profiles: `indices` and `graphs` are in the order of [`Plan::models`]. Of a factor or
    /// power that several profiles hold the first counts.
    ///
    /// # Errors
    /// As for [`SimulationModel::new`].
    pub fn from_profiles(
        indices: &[&ProfileIndex<'_>],
        graphs: &[&OperatorGraph],
        plan: &Plan,
    ) -> Result<Self, PlanError> {
        let used: BTreeSet<&UnitAddress> = plan.units.iter().map(|unit| &unit.address).collect();
        let mut model = Self::of_machine(indices, &used)?;
        model.classes = plan.tasks.iter().map(|task| task_class(indices, graphs, plan, &task.work)).collect();
        Ok(model)
    }

    /// Factors and powers of units, without classes.
    pub(crate) fn of_machine(indices: &[&ProfileIndex<'_>], used: &BTreeSet<&UnitAddress>) -> Result<Self, PlanError> {
        let mut model = Self::default();
        for (at, index) in indices.iter().enumerate() {
            // The same profile may serve several models.
            if !indices[..at].iter().any(|seen| std::ptr::eq(seen.profile, index.profile)) {
                model.read_machine(index, used)?;
            }
        }
        // Profiles that are fine one by one may contradict each other.
        if let Some(idle) = model.idle_watts {
            model.watts.iter().try_for_each(|(unit, &watts)| above_idle(&unit.to_string(), watts, idle))?;
        }
        Ok(model)
    }

    fn read_machine(&mut self, index: &ProfileIndex<'_>, used: &BTreeSet<&UnitAddress>) -> Result<(), PlanError> {
        self.idle_watts = self.idle_watts.or_else(|| index.profile.declared_watts.get("idle").copied());
        let machine = |subject: &Subject| matches!(subject, Subject::Slowdown { .. } | Subject::Power);
        for measurement in index.newest_of(machine) {
            let Outcome::Value { value } = &measurement.outcome else { continue };
            match (&measurement.subject, measurement.units.as_slice()) {
                (Subject::Slowdown { class, interference }, [slowed, other])
                    if used.contains(slowed) && used.contains(other) =>
                {
                    if value.median <= 0.0 {
                        return Err(CoreError::BadNumber {
                            place: format!("measurement `{}`", measurement.id),
                            value: value.median.to_string(),
                            what: "slowdown factor".to_owned(),
                        }
                        .into());
                    }
                    let pair = self.slowdown.entry((slowed.clone(), other.clone())).or_default();
                    pair.entry((*class, *interference)).or_insert(value.median);
                }
                (Subject::Power, [unit]) if used.contains(unit) => {
                    self.watts.entry(unit.clone()).or_insert(value.median);
                }
                _ => {}
            }
        }
        for &unit in used {
            if let Some(&watts) = index.profile.declared_watts.get(&unit.to_string()) {
                self.watts.entry(unit.clone()).or_insert(watts);
            }
        }
        Ok(())
    }

    /// `f`: how much slower `unit` works on `class` while `others` (unit, class of its work) are busy.
    pub fn factor(&self, unit: &UnitAddress, class: OperatorClass, others: &[(&UnitAddress, OperatorClass)]) -> f64 {
        let factors = others.iter().filter_map(|(other, interference)| {
            let pair = self.slowdown.get(&(unit.clone(), (*other).clone()))?;
            // The exact class pair, else the worst that was measured for this class.
            pair.get(&(class, *interference)).copied().or_else(|| {
                pair.iter().filter(|((slowed, _), _)| *slowed == class).map(|(_, &factor)| factor).reduce(f64::max)
            })
        });
        factors.reduce(f64::max).unwrap_or(1.0)
    }
}

impl SimulationModel {
    /// The factors between the given units, densely.
    pub(crate) fn factors(&self, units: &[&UnitAddress]) -> Factors {
        let mut factors = Factors::none(units.len());
        for (slowed, unit) in units.iter().enumerate() {
            for (other, interfering) in units.iter().enumerate() {
                let pair = self.slowdown.get(&((*unit).clone(), (*interfering).clone()));
                for (&classes, &factor) in pair.into_iter().flatten() {
                    factors.set(slowed, other, classes, factor);
                }
            }
        }
        factors.fill_classes();
        factors
    }
}

fn task_class(indices: &[&ProfileIndex<'_>], graphs: &[&OperatorGraph], plan: &Plan, work: &Work) -> OperatorClass {
    let Work::Segment { segment } = work else { return OperatorClass::Memory };
    let Some(segment) = plan.segments.get(segment.0 as usize) else { return OperatorClass::Memory };
    let model = segment.model as usize;
    let (Some(graph), Some(index)) = (graphs.get(model), indices.get(model)) else { return OperatorClass::Memory };
    if let [only] = segment.operators.as_slice() {
        return graph.operator(*only).class;
    }
    let (mut compute, mut memory) = (0.0, 0.0);
    for &id in &segment.operators {
        let operator = graph.operator(id);
        let subject = Subject::Operator { signature: operator.signature.clone() };
        let record = index.newest(&subject, std::slice::from_ref(&segment.unit));
        let ms = record.and_then(measurement_cost).map_or(0.0, |cost| cost.ms);
        match operator.class {
            OperatorClass::Compute => compute += ms,
            OperatorClass::Memory => memory += ms,
        }
    }
    if compute > memory { OperatorClass::Compute } else { OperatorClass::Memory }
}

/// What happened in the simulated run.
#[derive(Debug, Clone, PartialEq)]
pub struct Simulation {
    /// End of the last task, in milliseconds.
    pub makespan_ms: f64,
    /// One lane per unit of the plan.
    pub timeline: Timeline,
    /// `∫ [P_idle + Σ_busy (P_u − P_idle)] dt` in joules. `None` when a busy unit's power is unknown, or the idle power is
    /// and it matters (units overlap, or none is busy for a while).
    pub energy_j: Option<f64>,
}

/// Names of the resources a unit holds, as in [`Plan::order`]. A unit that lists none is its own resource.
pub fn resource_keys(unit: &Unit) -> Vec<String> {
    if unit.resources.is_empty() {
        vec![format!("unit:{}", unit.address)]
    } else {
        unit.resources.iter().map(ToString::to_string).collect()
    }
}

/// Integral of power over time, kept as far as powers are known.
#[derive(Debug, Clone)]
pub(crate) struct EnergyMeter {
    watts: Vec<Option<f64>>,
    idle: Option<f64>,
    pub joules: Option<f64>,
}

impl EnergyMeter {
    pub fn new(watts: impl Iterator<Item = Option<f64>>, idle: Option<f64>) -> Self {
        Self { watts: watts.collect(), idle, joules: Some(0.0) }
    }

    pub fn pass(&mut self, ms: f64, busy: impl Iterator<Item = u32>) {
        let Some(joules) = self.joules else { return };
        if ms <= 0.0 {
            return;
        }
        let (mut overlap, mut watts) = (0usize, Some(0.0));
        for unit in busy {
            overlap += 1;
            watts = watts.zip(self.watts[unit as usize]).map(|(sum, watts)| sum + watts);
        }
        let idle = match overlap {
            1 => Some(0.0), // P_idle + (P_u − P_idle)
            _ => self.idle.map(|idle| idle * (1.0 - overlap as f64)),
        };
        self.joules = watts.zip(idle).map(|(watts, idle)| joules + (watts + idle) * ms / 1e3);
    }
}

/// Runs a plan on the model's machine.
///
/// # Errors
/// [`PlanError::Stuck`] when tasks wait for each other, for a resource order that never reaches them, or name a unit that
/// the plan does not list.
pub fn simulate(plan: &Plan, model: &SimulationModel) -> Result<Simulation, PlanError> {
    let count = plan.tasks.len();
    let mut keys: BTreeMap<String, usize> = BTreeMap::new();
    let mut unit_index: BTreeMap<&UnitAddress, u32> = BTreeMap::new();
    let mut unit_resources: Vec<Vec<u32>> = Vec::new();
    for unit in &plan.units {
        let mut ids = Vec::new();
        for key in resource_keys(unit) {
            let next = keys.len();
            ids.push(*keys.entry(key).or_insert(next) as u32);
        }
        unit_index.insert(&unit.address, unit_resources.len() as u32);
        unit_resources.push(ids);
    }
    let arrivals: BTreeMap<(u32, u32), f64> =
        plan.requests.iter().map(|request| ((request.model, request.item), request.arrival_ms)).collect();
    let mut tasks = Tasks::default();
    for (index, task) in plan.tasks.iter().enumerate() {
        let Some(&unit) = unit_index.get(&task.unit) else {
            return Err(PlanError::Stuck {
                reason: format!("task {index} runs on {}, which is not among the plan's units", task.unit),
            });
        };
        let class = model.classes.get(index).copied().unwrap_or(OperatorClass::Memory);
        tasks.unit.push(unit);
        tasks.ms.push(task.cost.ms);
        tasks.class.push(class_index(class) as u8);
        let work_model = match &task.work {
            Work::Segment { segment } => plan.segments.get(segment.0 as usize).map(|segment| segment.model),
            Work::Transfer { model, .. } => Some(*model),
            Work::Blocks { .. } => Some(0),
        };
        let arrival = work_model.and_then(|model| arrivals.get(&(model, task.item)));
        tasks.release.push(arrival.copied().unwrap_or(0.0));
        for before in &task.after {
            if before.0 as usize >= count {
                return Err(PlanError::Stuck {
                    reason: format!("task {index} waits for task {}, which does not exist", before.0),
                });
            }
            tasks.edges.push((before.0, index as u32));
        }
    }
    // A resource that the plan orders nothing for takes tasks by id.
    let mut queues: Vec<Vec<u32>> = vec![Vec::new(); keys.len()];
    for (key, &resource) in &keys {
        queues[resource] = match plan.order.get(key) {
            Some(order) => order.iter().map(|id| id.0).filter(|&id| (id as usize) < count).collect(),
            None => (0..count as u32)
                .filter(|&id| unit_resources[tasks.unit[id as usize] as usize].contains(&(resource as u32)))
                .collect(),
        };
    }
    let addresses: Vec<&UnitAddress> = plan.units.iter().map(|unit| &unit.address).collect();
    let platform = Platform { unit_resources, resources: keys.len(), factors: model.factors(&addresses) };
    let mut meter = EnergyMeter::new(addresses.iter().map(|unit| model.watts.get(*unit).copied()), model.idle_watts);
    let run = engine::run(&platform, &tasks, &queues, |ms, running| {
        meter.pass(ms, running.iter().map(|&task| tasks.unit[task as usize]));
    })
    .map_err(|stall| PlanError::Stuck {
        reason: match stall {
            Stall::Order(task) => {
                let unit = &plan.tasks[task].unit;
                format!("task {task} on {unit} has its inputs but its resources' order never reaches it")
            }
            Stall::Circle(task) => format!("task {task} waits for tasks that wait for it"),
        },
    })?;
    Ok(Simulation { makespan_ms: run.makespan, timeline: timeline(plan, &run.start, &run.end), energy_j: meter.joules })
}

fn timeline(plan: &Plan, start: &[f64], end: &[f64]) -> Timeline {
    let simulated = plan.tasks.iter().any(|task| task.cost.origin == Origin::Simulated);
    let lanes = plan
        .units
        .iter()
        .map(|unit| {
            let mut spans: Vec<Span> = plan
                .tasks
                .iter()
                .enumerate()
                .filter(|(_, task)| task.unit == unit.address)
                .map(|(index, task)| Span {
                    task: TaskId(index as u32),
                    label: label(plan, &task.work),
                    kind: if matches!(task.work, Work::Transfer { .. }) {
                        SpanKind::Transfer
                    } else {
                        SpanKind::Compute
                    },
                    start_ms: start[index],
                    end_ms: end[index],
                })
                .collect();
            spans.sort_by(|a, b| a.start_ms.total_cmp(&b.start_ms).then(a.task.cmp(&b.task)));
            Lane { name: unit.address.to_string(), spans }
        })
        .collect();
    Timeline { origin: if simulated { Origin::Simulated } else { Origin::Predicted }, lanes }
}

fn label(plan: &Plan, work: &Work) -> String {
    match work {
        Work::Segment { segment } => {
            let operators = plan.segments.get(segment.0 as usize).map_or(0, |segment| segment.operators.len());
            format!("segment {} ({operators} operator{})", segment.0, if operators == 1 { "" } else { "s" })
        }
        Work::Transfer { tensor, .. } => format!("tensor {}", tensor.0),
        Work::Blocks { first, count } => format!("blocks {first}..{}", first + count),
    }
}
