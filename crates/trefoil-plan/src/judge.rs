//! What every plan says of its quality, whichever planner made it.
//!
//! A planner proves something under its own model: the papers' formulas, plans that run one segment after another, schedules of
//! single operators. That goes to [`Plan::own`]. What stands in [`Plan::model_bound`], [`Plan::gap`] and [`Plan::exact`] means
//! the same for all: no plan for the same question, in whatever segments and however parallel, costs less by the simulator than
//! `model_bound`, and this one costs `gap` more.

use crate::PlanError;
use crate::assemble::ROUNDING;
use crate::bounds::{Effort, bound_over_segments, stream_bound};
use crate::chain_bound::chain_bound;
use crate::problem::{Goal, Problem};
use crate::quality::{cheapest_cuts, goal_of, plan_value};
use crate::view::CostView;
use trefoil_core::{Objective, OperatorGraph, OwnClaim, Plan};

/// Rounds of weight updates of a stream's load bound.
const STREAM_ROUNDS: usize = 300;

/// A lower bound on what the simulator says of any plan of the view's model, in the objective's unit.
pub(crate) fn bound_of_all(view: &CostView<'_>) -> Result<f64, PlanError> {
    bound_of_all_within(view, Effort::QUICK)
}

/// The same for as much as it may cost.
pub(crate) fn bound_of_all_within(view: &CostView<'_>, effort: Effort) -> Result<f64, PlanError> {
    if view.graph.is_empty() {
        return Ok(0.0);
    }
    let problem = Problem::of_least(view)?.with_goal(goal_of(view.objective))?;
    if view.objective == Objective::Throughput {
        return Ok(stream_bound(&problem, STREAM_ROUNDS));
    }
    Ok(bound_over_segments(&problem, &[view], effort).max(chain_bound(view, &problem).unwrap_or(0.0)))
}

/// The same for a problem of several models and items.
pub(crate) fn bound_of_workload(problem: &Problem, views: &[&CostView<'_>], effort: Effort) -> Result<f64, PlanError> {
    Ok(bound_over_segments(&cheapest_cuts(problem, views)?, views, effort))
}

/// Puts the planner's own claim aside and states how far what the simulator says is from `bound`, which holds for every plan.
pub(crate) fn judge(plan: &mut Plan, views: &[&CostView<'_>], goal: Goal, bound: f64) -> Result<(), PlanError> {
    if plan.own.is_none() {
        plan.own = Some(OwnClaim {
            value: plan.claimed,
            over: over(plan).to_owned(),
            bound: plan.model_bound,
            gap: plan.gap,
            exact: plan.exact,
        });
    }
    plan.weighted = goal == Goal::WeightedCompletion;
    if goal == Goal::Energy {
        plan.simulated_j = Some(plan_value(plan, views, goal)?);
    }
    state(plan, bound);
    Ok(())
}

/// States how far what the simulator says is from `bound`.
pub(crate) fn state(plan: &mut Plan, bound: f64) {
    let value = plan.simulated();
    debug_assert!(bound <= value * (1.0 + 1e-6), "bound {bound} above {value} by {}", plan.method);
    // A bound above the value by rounding is the value.
    let bound = bound.min(value);
    plan.model_bound = Some(bound);
    plan.gap = if bound > 0.0 { Some(value / bound - 1.0) } else { (value == 0.0).then_some(0.0) };
    plan.exact = value <= bound * (1.0 + ROUNDING);
}

/// Among which plans, and under which model, a planner's own bound holds.
fn over(plan: &Plan) -> &'static str {
    match plan.method.as_str() {
        "sequential" => {
            "BIDENT equation 1: operators in order at their isolated costs, tensors that skip an operator free"
        }
        "phases" => "BIDENT 3.3.2: branches mapped one by one, without slowdown",
        "aligned" | "joint" => "BIDENT 3.2.2: two requests in steps, units shared",
        "joint-units" => "two requests in steps that both finish together",
        "pipeline" => "the busiest resource's work for one item, slowdown between units not counted",
        _ => "plans that run one segment after another",
    }
}

/// Refuses a plan that holds more weights on a unit than its memory has.
pub(crate) fn check_memory(plan: &Plan, graphs: &[&OperatorGraph]) -> Result<(), PlanError> {
    let Some((unit, held, most)) = plan.over_memory(graphs) else { return Ok(()) };
    let advice = match plan.method.as_str() {
        "auto" | "interval" | "dag" | "concurrent" | "pareto" | "pipeline" => {
            "use more or other units, or a smaller model"
        }
        _ => "methods auto, interval, dag, concurrent, pipeline and pareto keep to limits where they can",
    };
    Err(PlanError::Memory {
        method: plan.method.clone(),
        unit: unit.to_string(),
        held,
        most,
        advice: advice.to_owned(),
    })
}
