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

/// Part of a time budget for `interval`, and as much again for the other planners.
const OTHERS_SHARE: f64 = 0.2;
/// Most operators for which phases with barriers are a contestant: they are solved one by one.
const PHASES_JOBS: usize = 1_000;

/// The best of: the scheduled problem of single operators; that of the segments that `interval` chose; and what `interval`,
/// `sequential`, `phases` and every single unit plan, as they stand. All by the simulator.
pub(crate) fn dag(view: &CostView<'_>, options: &PlanOptions) -> Result<Plan, PlanError> {
    let goal = goal_of(view.objective);
    let mut contestants: Vec<(Plan, String)> = Vec::new();
    let interval = crate::interval::interval(view, &options.part(OTHERS_SHARE));
    let noted = |plan: Plan| {
        let note = format!("nothing better was found than what `{}` plans", plan.method);
        (plan, note)
    };
    let mut others: Vec<(Plan, String)> = Vec::new();
    // With little time for many operators the other planners are left out one by one.
    let others_end = options.part(OTHERS_SHARE);
    let singles = (0..view.unit_count())
        .map(|unit| -> Box<dyn Fn() -> Result<Plan, PlanError> + '_> { Box::new(move || whole::single(view, unit)) });
    let planners = singles.chain([
        Box::new(|| sequential::sequential(view)) as Box<dyn Fn() -> Result<Plan, PlanError> + '_>,
        Box::new(|| phases::phases(view)),
    ]);
    for planner in planners {
        if others_end.is_over() && (interval.is_ok() || !others.is_empty()) {
            break;
        }
        others.extend(planner().ok().map(noted));
    }
    let mut searched = None;
    match Problem::from_view(view) {
        Ok(problem) => {
            let problem = problem.with_goal(goal)?;
            let mut hints = hints(view, &problem, interval.as_ref().ok());
            let hurried = options.left_ms().is_some_and(|left| left < problem.jobs().len() as f64);
            if problem.jobs().len() <= PHASES_JOBS && !hurried {
                let partition = Phases::of(&problem);
                let (schedule, evaluation) = phases::exclusive(&problem, &partition, &hints, options)?;
                let mut plan = problem.to_plan(&[view], &schedule, "phases-exclusive", true)?;
                plan.claimed = evaluation.score.value;
                contestants.push((plan, "phases with barriers were best".to_owned()));
                hints.push(schedule.unit);
            }
            let solution = solve(&problem, &hints, &super::before_writing(&problem, &part(options, 0.8)))?;
            let plan = plan_of(view, &problem, &solution)?;
            searched.clone_from(&plan.own);
            contestants.push((plan, String::new()));
        }
        // An operator that runs inside larger segments only: schedule those.
        Err(PlanError::Core(CoreError::Unplaceable { .. })) if interval.is_ok() => {}
        Err(error) => return Err(error),
    }
    if let Ok(interval) = &interval
        && interval.segments.len() > 1
        && interval.segments.len() < view.graph.len()
        && !options.is_over()
    {
        let groups: Vec<Vec<OperatorId>> = interval.segments.iter().map(|segment| segment.operators.clone()).collect();
        let problem = Problem::from_groups(view, &groups)?.with_goal(goal)?;
        let units = interval.segments.iter().filter_map(|segment| view.unit_index(&segment.unit));
        let hint: Vec<u32> = units.map(|unit| unit as u32).collect();
        let solution = solve(&problem, &[hint], &super::before_writing(&problem, &part(options, 1.0)))?;
        let mut plan = plan_of(view, &problem, &solution)?;
        // A bound for these segments says nothing about other cuts.
        plan.own = None;
        contestants.push((plan, "its segments are those of `interval`".to_owned()));
    }
    contestants.extend(interval.ok().map(noted));
    contestants.extend(others);
    let mut best: Option<(f64, Plan, String)> = None;
    let mut over_memory = None;
    for (plan, note) in contestants {
        if let Err(error) = crate::judge::check_memory(&plan, &[view.graph]) {
            over_memory = over_memory.or(Some(error));
            continue;
        }
        let value = plan_value(&plan, &[view], goal)?;
        if best.as_ref().is_none_or(|(known, ..)| value < known * (1.0 - crate::assemble::ROUNDING)) {
            best = Some((value, plan, note));
        }
    }
    let Some((value, mut plan, note)) = best else {
        return Err(over_memory.unwrap_or_else(|| view.no_split("no planner found a plan")));
    };
    // What is proven of the schedules of single operators holds beside whichever plan is best.
    plan.own = searched;
    "dag".clone_into(&mut plan.method);
    plan.claimed = value;
    plan.model_bound = None;
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
