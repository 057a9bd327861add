//! `dag` as a planner of one model: every operator a job, every other planner a competitor.

use super::{Solution, solve};
use crate::phases::{Phases, literal_assignment};
use crate::problem::Problem;
use crate::quality::{goal_of, plan_value, state_quality};
use crate::request::{Budget, PlanOptions};
use crate::sequential::{PaperCosts, sequential_dp};
use crate::view::CostView;
use crate::{PlanError, phases, sequential, whole};
use trefoil_core::{CoreError, OperatorId, Plan};

/// Most operators for which phases with barriers are a contestant: they are solved one by one.
const PHASES_JOBS: usize = 1_000;

/// The best of: the scheduled problem of single operators; that of the segments that `interval` chose; and what `interval`,
/// `sequential`, `phases` and every single unit plan, as they stand. All by the simulator.
pub(crate) fn dag(view: &CostView<'_>, options: &PlanOptions) -> Result<Plan, PlanError> {
    let goal = goal_of(view.objective);
    let interval = crate::interval::interval(view, options);
    let mut contestants: Vec<(Plan, String)> = Vec::new();
    // Holds for every way to cut segments; nothing is known where an operator runs inside larger segments only.
    let mut bound = 0.0;
    match Problem::from_view(view) {
        Ok(problem) => {
            let problem = problem.with_goal(goal)?;
            bound = crate::model_bound(&crate::quality::cheapest_cuts(&problem, &[view])?).value;
            let mut hints = hints(view, &problem, interval.as_ref().ok());
            if problem.jobs().len() <= PHASES_JOBS {
                let partition = Phases::of(&problem);
                let (schedule, evaluation) = phases::exclusive(&problem, &partition, &hints, options)?;
                let mut plan = problem.to_plan(&[view], &schedule, "phases-exclusive", true)?;
                plan.claimed = evaluation.score.value;
                contestants.push((plan, "phases with barriers were best".to_owned()));
                hints.push(schedule.unit);
            }
            let solution = solve(&problem, &hints, &part(options, 0.8))?;
            contestants.push((plan_of(view, &problem, &solution)?, String::new()));
        }
        // An operator that runs inside larger segments only: schedule those.
        Err(PlanError::Core(CoreError::Unplaceable { .. })) if interval.is_ok() => {}
        Err(error) => return Err(error),
    }
    if let Ok(interval) = &interval
        && interval.segments.len() > 1
        && interval.segments.len() < view.graph.len()
    {
        let groups: Vec<Vec<OperatorId>> = interval.segments.iter().map(|segment| segment.operators.clone()).collect();
        let problem = Problem::from_groups(view, &groups)?.with_goal(goal)?;
        let units = interval.segments.iter().filter_map(|segment| view.unit_index(&segment.unit));
        let hint: Vec<u32> = units.map(|unit| unit as u32).collect();
        let solution = solve(&problem, &[hint], &part(options, 1.0))?;
        let mut plan = plan_of(view, &problem, &solution)?;
        // A bound for these segments says nothing about other cuts.
        crate::assemble::set_bound(&mut plan, bound);
        contestants.push((plan, "its segments are those of `interval`".to_owned()));
    }
    let mut others: Vec<Plan> = (0..view.unit_count()).filter_map(|unit| whole::single(view, unit).ok()).collect();
    others.extend(interval.ok());
    others.extend(sequential::sequential(view).ok());
    others.extend(phases::phases(view).ok());
    contestants.extend(others.into_iter().map(|plan| {
        let note = format!("nothing better was found than what `{}` plans", plan.method);
        (plan, note)
    }));
    let mut best: Option<(f64, Plan, String)> = None;
    for (plan, note) in contestants {
        let value = plan_value(&plan, &[view], goal)?;
        if best.as_ref().is_none_or(|(known, ..)| value < known * (1.0 - crate::assemble::ROUNDING)) {
            best = Some((value, plan, note));
        }
    }
    let Some((value, mut plan, note)) = best else { return Err(view.no_split("no planner found a plan")) };
    if plan.method != "dag" {
        "dag".clone_into(&mut plan.method);
        plan.claimed = value;
        crate::assemble::set_bound(&mut plan, bound);
    }
    if !note.is_empty() {
        plan.notes.push(note);
    }
    Ok(plan)
}

fn plan_of(view: &CostView<'_>, problem: &Problem, solution: &Solution) -> Result<Plan, PlanError> {
    let mut plan = problem.to_plan(&[view], &solution.schedule, "dag", true)?;
    state_quality(&mut plan, problem, &[view], Some(solution))?;
    Ok(plan)
}

/// Assignments of other planners, of single operators.
fn hints(view: &CostView<'_>, problem: &Problem, interval: Option<&Plan>) -> Vec<Vec<u32>> {
    let mut hints = Vec::new();
    let costs = PaperCosts::new(view);
    let (_, sequential) = sequential_dp(&costs.w, &costs.h2d, &costs.d2h, &view.table.accelerator, view.unit_count());
    hints.push(sequential.into_iter().map(|unit| unit as u32).collect::<Vec<u32>>());
    hints.push(literal_assignment(view, problem, &Phases::of(problem)).1);
    if let Some(plan) = interval {
        let mut unit = vec![0; view.graph.len()];
        for segment in &plan.segments {
            let here = view.unit_index(&segment.unit).unwrap_or(0) as u32;
            segment.operators.iter().for_each(|id| unit[id.index()] = here);
        }
        hints.push(unit);
    }
    let fits = |unit: &Vec<u32>| {
        unit.len() == problem.jobs().len()
            && unit.iter().zip(problem.jobs()).all(|(&unit, job)| job.ms[unit as usize].is_finite())
    };
    hints.retain(fits);
    hints
}

/// The options with the budget up to a share of the whole.
fn part(options: &PlanOptions, share: f64) -> PlanOptions {
    let budget = match options.budget {
        // What follows the first share gets the rest.
        Budget::Steps(steps) => Budget::Steps((steps as f64 * if share < 1.0 { share } else { 0.1 }) as u64),
        Budget::Until(clock) if share < 1.0 => {
            let now = (clock.now_ms)();
            Budget::Until(crate::Clock { end_ms: now + (clock.end_ms - now) * share, ..clock })
        }
        until @ Budget::Until(_) => until,
    };
    PlanOptions { budget, ..*options }
}
