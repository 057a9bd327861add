//! The one simulator that scores every plan (DESIGN 3).
//!
//! A task starts when the tasks it waits for have finished, every resource of its unit is free and it is next in the
//! order of each of them; ties by task id. A running task progresses at rate `1/f`, `f` being the slowdown that the other
//! busy units put on its unit: the largest measured pairwise factor for the class of its work, 1 where nothing was
//! measured, below 1 where engines speed each other up. Rates change at every start and finish. Transfers are tasks of
//! their destination's resources.

use crate::PlanError;
use std::collections::{BTreeMap, BTreeSet};
use trefoil_core::cost::measurement_cost;
use trefoil_core::profile::ProfileIndex;
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
    /// Reads factors and powers of the plan's units from a profile, and gives each task the class that most of its
    /// operators' isolated time has (transfers are memory-bound). `graphs` are in the order of [`Plan::models`].
    ///
    /// # Errors
    /// [`CoreError::BadNumber`] for a slowdown factor of 0.
    pub fn new(index: &ProfileIndex<'_>, graphs: &[&OperatorGraph], plan: &Plan) -> Result<Self, PlanError> {
        let mut model = Self { idle_watts: index.profile.declared_watts.get("idle").copied(), ..Self::default() };
        let used: BTreeSet<&UnitAddress> = plan.units.iter().map(|unit| &unit.address).collect();
        for measurement in index.all_newest() {
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
                    let pair = model.slowdown.entry((slowed.clone(), other.clone())).or_default();
                    pair.insert((*class, *interference), value.median);
                }
                (Subject::Power, [unit]) if used.contains(unit) => {
                    model.watts.insert(unit.clone(), value.median);
                }
                _ => {}
            }
        }
        for unit in used {
            if let Some(&watts) = index.profile.declared_watts.get(&unit.to_string()) {
                model.watts.entry(unit.clone()).or_insert(watts);
            }
        }
        model.classes = plan.tasks.iter().map(|task| task_class(index, graphs, plan, &task.work)).collect();
        Ok(model)
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

fn task_class(index: &ProfileIndex<'_>, graphs: &[&OperatorGraph], plan: &Plan, work: &Work) -> OperatorClass {
    let Work::Segment { segment } = work else { return OperatorClass::Memory };
    let Some(segment) = plan.segments.get(segment.0 as usize) else { return OperatorClass::Memory };
    let Some(graph) = graphs.get(segment.model as usize) else { return OperatorClass::Memory };
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
struct EnergyMeter<'a> {
    model: &'a SimulationModel,
    joules: Option<f64>,
}

impl EnergyMeter<'_> {
    fn pass(&mut self, ms: f64, busy: &[&UnitAddress]) {
        let Some(joules) = self.joules else { return };
        if ms <= 0.0 {
            return;
        }
        let watts: Option<f64> = busy.iter().map(|unit| self.model.watts.get(*unit)).sum();
        let idle = match busy.len() {
            1 => Some(0.0), // P_idle + (P_u − P_idle)
            overlap => self.model.idle_watts.map(|idle| idle * (1.0 - overlap as f64)),
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
    let mut unit_resources: BTreeMap<&UnitAddress, Vec<usize>> = BTreeMap::new();
    for unit in &plan.units {
        let mut ids = Vec::new();
        for key in resource_keys(unit) {
            let next = keys.len();
            ids.push(*keys.entry(key).or_insert(next));
        }
        unit_resources.insert(&unit.address, ids);
    }
    let mut needs: Vec<&[usize]> = Vec::with_capacity(count);
    for (index, task) in plan.tasks.iter().enumerate() {
        let Some(resources) = unit_resources.get(&task.unit) else {
            return Err(PlanError::Stuck {
                reason: format!("task {index} runs on {}, which is not among the plan's units", task.unit),
            });
        };
        needs.push(resources);
    }
    // Position of each resource in its order; a resource that the plan orders nothing for takes tasks by id.
    let mut queues: Vec<Vec<TaskId>> = vec![Vec::new(); keys.len()];
    for (key, &resource) in &keys {
        queues[resource] = plan.order.get(key).cloned().unwrap_or_else(|| {
            (0..count as u32).map(TaskId).filter(|id| needs[id.0 as usize].contains(&resource)).collect()
        });
    }
    let mut reached = vec![0usize; keys.len()];
    let mut busy_resource = vec![false; keys.len()];
    let mut missing: Vec<usize> = plan.tasks.iter().map(|task| task.after.len()).collect();
    let mut followers: Vec<Vec<usize>> = vec![Vec::new(); count];
    for (index, task) in plan.tasks.iter().enumerate() {
        for before in &task.after {
            match followers.get_mut(before.0 as usize) {
                Some(list) => list.push(index),
                None => {
                    return Err(PlanError::Stuck {
                        reason: format!("task {index} waits for task {}, which does not exist", before.0),
                    });
                }
            }
        }
    }
    let class = |task: usize| model.classes.get(task).copied().unwrap_or(OperatorClass::Memory);
    let mut left: Vec<f64> = plan.tasks.iter().map(|task| task.cost.ms).collect();
    let (mut start, mut end) = (vec![f64::NAN; count], vec![f64::NAN; count]);
    let mut ready: BTreeSet<usize> = (0..count).filter(|&task| missing[task] == 0).collect();
    let mut running: Vec<usize> = Vec::new();
    let mut now = 0.0;
    let mut done = 0;
    let mut meter = EnergyMeter { model, joules: Some(0.0) };
    while done < count {
        let startable: Vec<usize> = ready.iter().copied().collect();
        for task in startable {
            let resources = needs[task];
            let free = resources.iter().all(|&resource| {
                !busy_resource[resource] && queues[resource].get(reached[resource]) == Some(&TaskId(task as u32))
            });
            if free {
                for &resource in resources {
                    busy_resource[resource] = true;
                    reached[resource] += 1;
                }
                ready.remove(&task);
                start[task] = now;
                running.push(task);
            }
        }
        if running.is_empty() {
            return Err(stuck(plan, &ready, &missing, &end));
        }
        running.sort_unstable();
        let units: Vec<&UnitAddress> = running.iter().map(|&task| &plan.tasks[task].unit).collect();
        let rate: Vec<f64> = running
            .iter()
            .enumerate()
            .map(|(at, &task)| {
                let others: Vec<_> = (0..running.len())
                    .filter(|&other| other != at)
                    .map(|other| (units[other], class(running[other])))
                    .collect();
                1.0 / model.factor(units[at], class(task), &others)
            })
            .collect();
        let step = running.iter().zip(&rate).map(|(&task, rate)| left[task] / rate).fold(f64::INFINITY, f64::min);
        meter.pass(step, &units);
        now += step;
        let mut still = Vec::new();
        for (&task, rate) in running.iter().zip(&rate) {
            // Whoever set the step finishes exactly; equal ends finish together whatever rounding says.
            let wait = left[task] / rate;
            if wait <= step * (1.0 + 1e-12) {
                left[task] = 0.0;
                end[task] = now;
                done += 1;
                needs[task].iter().for_each(|&resource| busy_resource[resource] = false);
                for &follower in &followers[task] {
                    missing[follower] -= 1;
                    if missing[follower] == 0 {
                        ready.insert(follower);
                    }
                }
            } else {
                left[task] -= step * rate;
                still.push(task);
            }
        }
        running = still;
    }
    Ok(Simulation { makespan_ms: now, timeline: timeline(plan, &start, &end), energy_j: meter.joules })
}

fn stuck(plan: &Plan, ready: &BTreeSet<usize>, missing: &[usize], end: &[f64]) -> PlanError {
    let reason = if let Some(&task) = ready.first() {
        format!("task {task} on {} has its inputs but its resources' order never reaches it", plan.tasks[task].unit)
    } else {
        let task = (0..missing.len()).find(|&task| missing[task] > 0 && end[task].is_nan()).unwrap_or(0);
        format!("task {task} waits for tasks that wait for it")
    };
    PlanError::Stuck { reason }
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
