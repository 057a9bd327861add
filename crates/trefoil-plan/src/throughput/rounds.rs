//! Throughput of several models: rounds of one inference of each, one after another without end.
//!
//! A round is to models what an item is to a stream, so its period is what is made small: the busiest resource's work for one round, and of
//! the best placements the one whose rounds follow each other closest by the simulator. Models are placed whole, in the segments that
//! `interval` and `pipeline` cut them into, in single operators, and in mixtures of these. Each model's own pipeline in turn competes.

use super::{Found, ROUNDS, pipeline, steady};
use crate::bounds::stream_bound;
use crate::certificate::proofs::without_slowdown;
use crate::concurrent::pieces::{Cutting, Grain, cuttings, mixes};
use crate::concurrent::{ConcurrentRequest, Workload, in_turn, mode_bound};
use crate::judge::check_memory;
use crate::list_scheduling::{fastest_unit, ranked};
use crate::problem::{Goal, Problem};
use crate::view::CostView;
use crate::{PlanError, PlanOptions, whole};
use std::collections::BTreeSet;
use trefoil_core::{Objective, OperatorGraph, OperatorId, OwnClaim, Plan};

/// Part of a time budget for cutting the models.
const CUTTING_SHARE: f64 = 0.5;

/// Plans endless rounds of one inference of each model. `claimed` is the period.
///
/// # Errors
/// [`PlanError::Memory`] when no plan is within the units' memory; whatever is wrong with the request.
pub(crate) fn rounds(request: &ConcurrentRequest<'_>, options: &PlanOptions) -> Result<Plan, PlanError> {
    let workload = Workload::new(request)?;
    let views: Vec<&CostView<'_>> = workload.views.iter().collect();
    let graphs: Vec<&OperatorGraph> = views.iter().map(|view| view.graph).collect();
    let least = workload.least(&views)?;
    let cutting = options.part(CUTTING_SHARE);
    let pipelines: Vec<Option<Plan>> = views.iter().map(|view| pipeline(view, &cutting).ok()).collect();
    let cut: Vec<Vec<Cutting>> =
        views.iter().zip(&pipelines).map(|(view, own)| all_cuttings(view, own.as_ref(), &cutting)).collect();
    let mut found = Found::default();
    // Units that work at once slow each other down, which loads do not tell: what overlaps little competes too.
    let mut anchors = Found::default();
    for mix in mixes(&cut) {
        if options.is_over() && !found.plans.is_empty() {
            break;
        }
        let groups: Vec<Vec<Vec<OperatorId>>> = mix.iter().map(|cutting| cutting.groups.clone()).collect();
        let Ok(problem) = workload.problem_of(&views, &groups) else { continue };
        let own: Vec<u32> =
            workload.instances.iter().flat_map(|instance| mix[instance.model].unit.iter().copied()).collect();
        if mix.iter().all(|cutting| cutting.grain == Grain::Whole) {
            let units = problem.units().len() as u32;
            let alone = (0..units).map(|unit| vec![unit; problem.jobs().len()]);
            for unit in alone.chain([own.clone()]).filter(|unit| runs(&problem, unit)) {
                anchors.keep(plan_of(&problem, &views, unit)?, &graphs);
            }
        }
        offer(&mut found, &problem, &views, own)?;
    }
    if !options.is_over() || found.plans.is_empty() {
        match workload.problem(&views) {
            Ok(problem) => {
                let fastest = fastest_unit(&problem).unit;
                offer(&mut found, &problem, &views, fastest)?;
            }
            Err(error) if found.plans.is_empty() => return Err(found.over_memory.unwrap_or(error)),
            Err(_) => {}
        }
    }
    let mut best: Option<(steady::Period, f64, Plan)> = None;
    for plan in found.plans.into_iter().chain(anchors.plans) {
        let load = plan.claimed;
        let period = steady::period(&views, &least.platform, &plan, load)?;
        if best.as_ref().is_none_or(|(known, ..)| period.ms < known.ms * (1.0 - 1e-9)) {
            best = Some((period, load, plan));
        }
    }
    // The models' own pipelines in turn: many inferences of one model, then as many of the next. Units of two models never slow each other
    // down then, and a model may run on a mode.
    let mut alone = Vec::new();
    if let Some(own) = pipelines.into_iter().collect::<Option<Vec<Plan>>>() {
        alone.extend(own.iter().map(|plan| plan.claimed));
        let ms: f64 = workload.instances.iter().map(|instance| own[instance.model].claimed).sum();
        let order: Vec<usize> = (0..workload.requests.len()).collect();
        let turn = in_turn::plan(&workload, &views, &own, &order, Goal::Makespan)?;
        let load = steady::loads(&turn).into_values().fold(0.0, f64::max);
        if let Err(error) = check_memory(&turn, &graphs) {
            found.over_memory.get_or_insert(error);
        } else if best.as_ref().is_none_or(|(known, ..)| ms < known.ms * (1.0 - 1e-9)) {
            let period = steady::Period { ms, how: steady::How::InTurn };
            best = Some((period, load, Plan { objective: Objective::Throughput, ..turn }));
        }
    }
    let Some((period, load, mut plan)) = best else {
        return Err(found.over_memory.unwrap_or_else(|| views[0].no_split("no planner found a plan")));
    };
    if !options.modes {
        let ms = workload.instances.iter().map(|instance| {
            let on_mode = whole::fastest_mode(views[instance.model]).map_or(f64::INFINITY, |plan| plan.claimed);
            on_mode.min(alone.get(instance.model).copied().unwrap_or(f64::INFINITY))
        });
        let ms: f64 = ms.sum();
        if ms < period.ms * (1.0 - 1e-9) {
            plan.notes.push(in_turn::note_on_modes(ms));
        }
    }
    let all = |bound: f64, slowed: bool| {
        if !options.modes {
            return Ok(bound);
        }
        mode_bound::with_modes(bound, &workload, &views, Goal::Makespan, &|model| {
            let alone = Workload::least_of_one(&views, model)?;
            Ok(stream_bound(&if slowed { alone } else { without_slowdown(&alone)? }, ROUNDS))
        })
    };
    let bound = all(stream_bound(&without_slowdown(&least)?, ROUNDS), false)?.min(load);
    plan.own = Some(OwnClaim {
        value: load,
        over: "the busiest resource's work for one round, slowdown between units not counted".to_owned(),
        bound: Some(bound),
        gap: (bound > 0.0).then(|| load / bound - 1.0),
        exact: load <= bound * (1.0 + 1e-9),
    });
    plan.claimed = period.ms;
    plan.notes.push(format!(
        "claimed is the period of a round of one inference of each of the {} models ({}); the busiest resource works {load:.4} ms for it; one round alone takes {:.4} ms",
        views.len(),
        period.how(),
        plan.simulated_ms
    ));
    let bound = all(stream_bound(&least, ROUNDS), true)?;
    crate::judge::state(&mut plan, bound.min(period.ms));
    Ok(plan)
}

/// What `concurrent` cuts a model into, and the stages of its own pipeline.
fn all_cuttings(view: &CostView<'_>, own: Option<&Plan>, options: &PlanOptions) -> Vec<Cutting> {
    let none = BTreeSet::new();
    let mut found = cuttings(view, &none, options);
    if let Some(plan) = own
        && plan.segments.len() > 1
        && plan.segments.len() < view.graph.len()
        && let Some(stages) = Cutting::of_plan(view, plan, Grain::Segments, &none)
    {
        found.insert(found.len().min(1), Cutting { alone: plan.simulated_ms, ..stages });
    }
    found
}

fn runs(problem: &Problem, unit: &[u32]) -> bool {
    unit.len() == problem.jobs().len()
        && unit.iter().zip(problem.jobs()).all(|(&unit, job)| job.ms[unit as usize].is_finite())
}

/// Offers the balanced placement next to a start, and next to every job where it is fastest.
fn offer(found: &mut Found, problem: &Problem, views: &[&CostView<'_>], start: Vec<u32>) -> Result<(), PlanError> {
    let graphs: Vec<&OperatorGraph> = views.iter().map(|view| view.graph).collect();
    let mut placements: Vec<Vec<u32>> = Vec::new();
    for start in [start, fastest_unit(problem).unit] {
        if !runs(problem, &start) {
            continue;
        }
        let balanced = super::balance::balance(problem, start.clone());
        for unit in [balanced, start] {
            if !placements.contains(&unit) {
                placements.push(unit);
            }
        }
    }
    for unit in placements {
        found.keep(plan_of(problem, views, unit)?, &graphs);
    }
    Ok(())
}

fn plan_of(problem: &Problem, views: &[&CostView<'_>], unit: Vec<u32>) -> Result<Plan, PlanError> {
    let mut plan = problem.to_plan(views, &ranked(problem, unit), "concurrent", true)?;
    plan.objective = Objective::Throughput;
    Ok(plan)
}
