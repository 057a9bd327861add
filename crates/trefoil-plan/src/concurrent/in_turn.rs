//! Each model's own best plan, one inference after another: what anybody would do without planning models together.
//!
//! Nothing overlaps, so no slowdown matters, and a model may run on a mode of a unit of which nothing but its whole time is known. No
//! plan of several models may be worse than this.

use super::Workload;
use super::orders::request_orders;
use crate::PlanError;
use crate::problem::{Goal, ProblemRequest};
use crate::quality::plan_value;
use crate::request::PlanOptions;
use crate::simulate::resource_keys;
use crate::view::CostView;
use std::collections::{BTreeMap, BTreeSet};
use trefoil_core::plan::{PLAN_FORMAT, PLAN_VERSION, PlannedModel, PlannedRequest};
use trefoil_core::{Objective, Origin, OwnClaim, Plan, Segment, SegmentId, Task, TaskId, Timeline, Unit, Work};

/// Among which plans such a plan is.
const OVER: &str = "each model's own plan in turn";

/// What `auto` plans for each model alone, modes of units included where `options` allow them; `None` where a model has no such plan. Small
/// gains count: they may add up.
pub(crate) fn own_plans(views: &[&CostView<'_>], options: &PlanOptions) -> Option<Vec<Plan>> {
    let options = PlanOptions { minimum_gain: 0.0, ..*options };
    views.iter().map(|view| crate::auto(view, &options).ok()).collect()
}

/// Whether inferences can simply follow one another: a linked or repeated stage reads what another leaves on its unit.
pub(crate) fn is_possible(workload: &Workload<'_>) -> bool {
    !workload.is_linked() && workload.instances.iter().all(|instance| instance.iterations == 1)
}

/// Each model's own plan in turn, in every order of [`request_orders`].
///
/// # Errors
/// [`PlanError::Stuck`] should one of the models' own plans not run.
pub(super) fn plans(
    workload: &Workload<'_>,
    views: &[&CostView<'_>],
    own: &[Plan],
    goal: Goal,
) -> Result<Vec<Plan>, PlanError> {
    let mut work = vec![0.0; workload.requests.len()];
    for instance in &workload.instances {
        work[instance.request as usize] += own[instance.model].simulated_ms;
    }
    let orders = request_orders(&workload.requests, &work, goal);
    orders.iter().map(|order| plan(workload, views, own, order, goal)).collect()
}

/// One plan of the models' own ones, requests in the order given.
pub(crate) fn plan(
    workload: &Workload<'_>,
    views: &[&CostView<'_>],
    own: &[Plan],
    order: &[usize],
    goal: Goal,
) -> Result<Plan, PlanError> {
    let mut segments: Vec<Segment> = Vec::new();
    let mut units: Vec<Unit> = Vec::new();
    let mut first_segment = Vec::with_capacity(own.len());
    for (model, alone) in (0u32..).zip(own) {
        first_segment.push(segments.len() as u32);
        segments.extend(alone.segments.iter().cloned().map(|segment| Segment { model, ..segment }));
        for unit in &alone.units {
            if units.iter().all(|known| known.address != unit.address) {
                units.push(unit.clone());
            }
        }
    }
    let mut tasks: Vec<Task> = Vec::new();
    for &request in order {
        for instance in workload.instances.iter().filter(|instance| instance.request as usize == request) {
            let (model, base) = (instance.model as u32, tasks.len() as u32);
            for task in &own[instance.model].tasks {
                let work = match &task.work {
                    Work::Segment { segment } => {
                        Work::Segment { segment: SegmentId(first_segment[instance.model] + segment.0) }
                    }
                    Work::Transfer { tensor, from, .. } => {
                        Work::Transfer { model, tensor: *tensor, from: from.clone() }
                    }
                    blocks @ Work::Blocks { .. } => blocks.clone(),
                };
                let mut after: BTreeSet<TaskId> = task.after.iter().map(|id| TaskId(base + id.0)).collect();
                after.extend((tasks.len() as u32).checked_sub(1).map(TaskId));
                let after = after.into_iter().collect();
                tasks.push(Task { work, item: instance.item, iteration: 0, after, ..task.clone() });
            }
        }
    }
    let keys: BTreeMap<_, _> = units.iter().map(|unit| (&unit.address, resource_keys(unit))).collect();
    let mut on_resource: BTreeMap<String, Vec<TaskId>> = BTreeMap::new();
    for (id, task) in (0u32..).map(TaskId).zip(&tasks) {
        for key in keys.get(&task.unit).into_iter().flatten() {
            on_resource.entry(key.clone()).or_default().push(id);
        }
    }
    let describe = |model: &(&&CostView<'_>, &Plan)| {
        let names: BTreeSet<String> = model.1.segments.iter().map(|segment| segment.unit.to_string()).collect();
        format!("{} on {}", model.0.graph.model, names.into_iter().collect::<Vec<_>>().join(" and "))
    };
    let described: Vec<String> = views.iter().zip(own).map(|model| describe(&model)).collect();
    let mut plan = Plan {
        format: PLAN_FORMAT.to_owned(),
        version: PLAN_VERSION,
        method: "concurrent".to_owned(),
        objective: if goal == Goal::Energy { Objective::Energy } else { Objective::Latency },
        models: views
            .iter()
            .map(|view| PlannedModel {
                name: view.graph.model.clone(),
                fingerprint: view.graph.fingerprint.clone(),
                granularity: view.graph.granularity,
                operators: view.graph.len() as u32,
            })
            .collect(),
        requests: requests(workload),
        weighted: false,
        links: Vec::new(),
        units,
        segments,
        tasks,
        order: on_resource,
        claimed: 0.0,
        simulated_ms: 0.0,
        simulated_j: None,
        model_bound: None,
        gap: None,
        exact: false,
        own: None,
        all_measured: own.iter().all(|plan| plan.all_measured),
        notes: vec![format!("each model's own plan in turn is best here: {}", described.join(", "))],
        timeline: Timeline { origin: Origin::Predicted, lanes: Vec::new() },
    };
    crate::problem::run(&mut plan, views)?;
    plan.claimed = plan_value(&plan, views, goal)?;
    plan.own = Some(OwnClaim { value: plan.claimed, over: OVER.to_owned(), bound: None, gap: None, exact: false });
    Ok(plan)
}

fn requests(workload: &Workload<'_>) -> Vec<PlannedRequest> {
    if let [only] = workload.requests.as_slice()
        && *only == ProblemRequest::default()
    {
        return Vec::new();
    }
    let mut found: Vec<PlannedRequest> = workload
        .instances
        .iter()
        .map(|instance| {
            let request = &workload.requests[instance.request as usize];
            PlannedRequest {
                model: instance.model as u32,
                item: instance.item,
                request: instance.request,
                arrival_ms: request.release_ms,
                deadline_ms: request.deadline_ms,
                weight: request.weight,
            }
        })
        .collect();
    found.sort_by_key(|request| (request.model, request.item, request.request));
    found
}

/// What a plan on the units alone says where models' own plans in turn, on modes of units, take less than it: its bound is not about those.
pub(crate) fn note_on_modes(value: f64) -> String {
    format!(
        "bounds are over plans on the units alone: with modes of units, of which only whole models were measured, the models' own plans in turn take {value:.4} ms (method `auto` without a certificate plans them)"
    )
}
