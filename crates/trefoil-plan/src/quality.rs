//! What a plan of a scheduled problem may claim, and how far that is from the best.

use crate::PlanError;
use crate::assemble::ROUNDING;
use crate::bounds::{LeastTimes, model_bound};
use crate::dag::Solution;
use crate::problem::{Goal, Job, Problem, Score};
use crate::simulate::{SimulationModel, simulate};
use crate::view::CostView;
use std::collections::BTreeMap;
use trefoil_core::plan::PlannedRequest;
use trefoil_core::{Objective, OperatorClass, OperatorGraph, OwnClaim, Plan, Work};

/// The goal that an objective means for one request.
pub(crate) fn goal_of(objective: Objective) -> Goal {
    match objective {
        Objective::Energy => Goal::Energy,
        Objective::Latency | Objective::Throughput => Goal::Makespan,
    }
}

/// The goal's value of a plan by the simulator. An unknown idle power counts as 0.
pub(crate) fn plan_value(plan: &Plan, views: &[&CostView<'_>], goal: Goal) -> Result<f64, PlanError> {
    match goal {
        Goal::Makespan => Ok(plan.simulated_ms),
        Goal::Energy => {
            let indices: Vec<_> = views.iter().map(|view| &view.index).collect();
            let graphs: Vec<&OperatorGraph> = views.iter().map(|view| view.graph).collect();
            let mut model = SimulationModel::from_profiles(&indices, &graphs, plan)?;
            model.idle_watts = Some(model.idle_watts.unwrap_or(0.0));
            let found = simulate(plan, &model)?;
            found.energy_j.ok_or_else(|| PlanError::NoPower {
                units: "a unit of the plan".to_owned(),
                example: "UNIT=15".to_owned(),
            })
        }
        Goal::WeightedCompletion => {
            let (sum, weights) = completions(plan).values().fold((0.0, 0.0), |(sum, weights), &(end, request)| {
                let time = (end - request.arrival_ms).max(0.0);
                (sum + request.weight * time, weights + request.weight)
            });
            Ok(if weights > 0.0 { sum / weights } else { plan.simulated_ms })
        }
    }
}

/// By request number: when it is complete, and one of its entries. Stages of one application are complete together.
fn completions(plan: &Plan) -> BTreeMap<u32, (f64, &PlannedRequest)> {
    let mut completion: BTreeMap<(u32, u32), f64> = BTreeMap::new();
    for span in plan.timeline.lanes.iter().flat_map(|lane| &lane.spans) {
        let task = &plan.tasks[span.task.0 as usize];
        let model = match &task.work {
            Work::Segment { segment } => plan.segments[segment.0 as usize].model,
            Work::Transfer { model, .. } => *model,
            Work::Blocks { .. } => 0,
        };
        let slot = completion.entry((model, task.item)).or_insert(0.0);
        *slot = slot.max(span.end_ms);
    }
    let mut requests: BTreeMap<u32, (f64, &PlannedRequest)> = BTreeMap::new();
    for request in &plan.requests {
        let end = completion.get(&(request.model, request.item)).copied().unwrap_or(0.0);
        let slot = requests.entry(request.request).or_insert((0.0, request));
        slot.0 = slot.0.max(end);
    }
    requests
}

/// How good a plan is by the simulator, memory aside; and how many requests miss their deadline.
pub(crate) fn plan_score(plan: &Plan, views: &[&CostView<'_>], goal: Goal) -> Result<(Score, usize), PlanError> {
    let value = plan_value(plan, views, goal)?;
    let (mut late, mut tardiness_ms, mut missed) = (0.0, 0.0, 0);
    for (end, request) in completions(plan).into_values() {
        let over = request.deadline_ms.map(|deadline| end - deadline);
        // Sums in another order may end later by rounding.
        if let Some(over) = over.filter(|&over| over > ROUNDING * end) {
            late += request.weight;
            tardiness_ms += request.weight * over;
            missed += 1;
        }
    }
    Ok((Score { excess_bytes: 0.0, late, tardiness_ms, value }, missed))
}

/// What restricts schedules to those that [`Solution::exact_at_once`] is about.
pub(crate) const AT_ONCE: &str = " in which nothing waits that could start";

/// Sets `claimed` to what the simulator says of a plan made of a schedule, and [`Plan::own`] to what is proven of the schedule
/// itself, in which every operator runs alone. Merged segments may make the plan cheaper than that.
pub(crate) fn state_quality(
    plan: &mut Plan,
    problem: &Problem,
    views: &[&CostView<'_>],
    solution: Option<&Solution>,
) -> Result<(), PlanError> {
    let alone = plan.claimed;
    plan.claimed = plan_value(plan, views, problem.goal())?;
    let bound = solution.map_or_else(|| model_bound(problem).value, |solution| solution.bound.value).min(alone);
    let exact = solution.is_some_and(|solution| solution.exact) || alone <= bound * (1.0 + ROUNDING);
    // Of schedules in which something waits that could start less may be proven.
    let at_once = !exact && solution.is_some_and(|solution| solution.exact_at_once);
    let bound = if at_once { alone } else { bound };
    plan.own = Some(OwnClaim {
        value: alone,
        over: format!("schedules of single operators{}", if at_once { AT_ONCE } else { "" }),
        bound: Some(bound),
        gap: if bound > 0.0 { Some(alone / bound - 1.0) } else { (alone == 0.0).then_some(0.0) },
        exact: exact || at_once,
    });
    Ok(())
}

/// The problem with every job at the least that its operators can add to any segment: its bound holds for all segmentations.
pub(crate) fn cheapest_cuts(problem: &Problem, views: &[&CostView<'_>]) -> Result<Problem, PlanError> {
    let least = LeastTimes::new(problem);
    let jobs: Vec<Job> = problem
        .jobs()
        .iter()
        .map(|job| {
            let view = views[job.model as usize];
            let ms: Vec<f64> = (0..view.unit_count())
                .map(|unit| {
                    let shares = job.operators.iter().map(|&id| {
                        if view.possible(id, unit) { view.estimates[unit].least[id.index()] } else { f64::INFINITY }
                    });
                    shares.sum::<f64>().min(job.ms[unit])
                })
                .collect();
            // A merged segment has the class of most of its time: assume the one that is slowed least.
            let class = (0..view.unit_count())
                .map(|unit| {
                    if least.factor(unit, OperatorClass::Compute) < least.factor(unit, OperatorClass::Memory) {
                        OperatorClass::Compute
                    } else {
                        OperatorClass::Memory
                    }
                })
                .collect();
            Job { class, ms, ..job.clone() }
        })
        .collect();
    Problem::new(
        problem.units().to_vec(),
        problem.resources().to_vec(),
        jobs,
        problem.tensors().to_vec(),
        problem.requests().to_vec(),
        problem.factors().clone(),
        problem.idle_watts(),
    )?
    .with_goal(problem.goal())
}
