//! From executions in order to a plan.

use super::TogetherRequest;
use crate::PlanError;
use crate::simulate::{SimulationModel, resource_keys, simulate};
use std::collections::{BTreeMap, BTreeSet};
use trefoil_core::plan::{PLAN_FORMAT, PLAN_VERSION, PlannedLink, PlannedModel};
use trefoil_core::{
    CostRef, Objective, OperatorClass, OperatorId, Origin, Plan, Segment, SegmentId, Task, TaskId, Timeline, Work,
};

/// One segment executed once. In a list, resources take executions in the list's order.
#[derive(Debug, Clone)]
pub(crate) struct Execution {
    pub model: usize,
    pub item: u32,
    /// Repetition within the inference.
    pub iteration: u32,
    pub operators: Vec<OperatorId>,
    pub unit: usize,
    pub cost: CostRef,
    /// Earlier executions of the list that it waits for.
    pub after: Vec<usize>,
}

pub(crate) fn plan(request: &TogetherRequest<'_>, method: &str, executions: &[Execution]) -> Result<Plan, PlanError> {
    linked_plan(request, method, executions, Vec::new())
}

/// As [`plan`], for models that hand tensors on.
pub(crate) fn linked_plan(
    request: &TogetherRequest<'_>,
    method: &str,
    executions: &[Execution],
    links: Vec<PlannedLink>,
) -> Result<Plan, PlanError> {
    let mut segments: Vec<Segment> = Vec::new();
    let mut tasks: Vec<Task> = Vec::new();
    let mut order: BTreeMap<String, Vec<TaskId>> = BTreeMap::new();
    let mut task_of: Vec<Option<TaskId>> = Vec::new();
    for execution in executions {
        if execution.operators.is_empty() {
            // A model of constants has nothing to run.
            task_of.push(None);
            continue;
        }
        let unit = &request.units[execution.unit];
        let same = |segment: &Segment| {
            segment.model as usize == execution.model
                && segment.unit == unit.address
                && segment.operators == execution.operators
        };
        let segment = segments.iter().position(same).unwrap_or_else(|| {
            let set: BTreeSet<_> = execution.operators.iter().copied().collect();
            let (inputs, outputs) = request.models[execution.model].graph.boundary(&set);
            segments.push(Segment {
                model: execution.model as u32,
                unit: unit.address.clone(),
                operators: execution.operators.clone(),
                inputs,
                outputs,
                cost: execution.cost.clone(),
            });
            segments.len() - 1
        });
        let id = TaskId(tasks.len() as u32);
        for key in resource_keys(unit) {
            order.entry(key).or_default().push(id);
        }
        tasks.push(Task {
            work: Work::Segment { segment: SegmentId(segment as u32) },
            unit: unit.address.clone(),
            iteration: execution.iteration,
            item: execution.item,
            after: execution.after.iter().filter_map(|&earlier| task_of[earlier]).collect(),
            cost: execution.cost.clone(),
        });
        task_of.push(Some(id));
    }
    let used: BTreeSet<_> = tasks.iter().map(|task| &task.unit).collect();
    let units = request.units.iter().filter(|unit| used.contains(&unit.address)).cloned().collect();
    let models = request.models.iter().map(|model| PlannedModel {
        name: model.graph.model.clone(),
        fingerprint: model.graph.fingerprint.clone(),
        granularity: model.graph.granularity,
        operators: model.graph.len() as u32,
    });
    let mut plan = Plan {
        format: PLAN_FORMAT.to_owned(),
        version: PLAN_VERSION,
        method: method.to_owned(),
        objective: Objective::Latency,
        models: models.collect(),
        requests: Vec::new(),
        links,
        units,
        all_measured: segments.iter().all(|segment| segment.cost.origin == Origin::Measured),
        segments,
        tasks,
        order,
        claimed: 0.0,
        simulated_ms: 0.0,
        model_bound: None,
        gap: None,
        exact: false,
        own: None,
        simulated_j: None,
        weighted: false,
        notes: Vec::new(),
        timeline: Timeline { origin: Origin::Predicted, lanes: Vec::new() },
    };
    let class = OperatorClass::Memory;
    let mut machine = SimulationModel { classes: vec![class; plan.tasks.len()], ..SimulationModel::default() };
    for ((slowed, other), &factor) in &request.slowdown {
        machine.slowdown.insert((slowed.clone(), other.clone()), BTreeMap::from([((class, class), factor)]));
    }
    let simulation = simulate(&plan, &machine)?;
    plan.claimed = simulation.makespan_ms;
    plan.simulated_ms = simulation.makespan_ms;
    plan.timeline = simulation.timeline;
    Ok(plan)
}
