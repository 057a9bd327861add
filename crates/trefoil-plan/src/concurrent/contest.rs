//! Schedules of single operators, of whole models and of segments, all written down as plans: the simulator says which is best.

use super::orders::request_orders;
use super::pieces::{Cutting, Grain, cuttings, mixes};
use super::workload::{HINTED_JOBS, MOST_HINTS};
use super::{Workload, in_turn};
use crate::dag::{self, Solution};
use crate::problem::{Goal, Problem, Schedule, Score};
use crate::quality::{AT_ONCE, plan_score, state_quality};
use crate::request::{Budget, PlanOptions};
use crate::view::CostView;
use crate::{PlanError, judge};
use trefoil_core::{CoreError, OperatorGraph, OperatorId, OwnClaim, Plan};

/// Part of a time budget for cutting the models, and for schedules of what they are cut into; the rest is for single operators.
const CUTTING_SHARE: f64 = 0.15;
const FUSED_SHARE: f64 = 0.35;
/// Part of a budget of steps for each mixture of pieces.
const STEPS_SHARE: f64 = 0.05;

const METHOD: &str = "concurrent";

/// The best plan, with what is proven of the schedules that it comes from, and how many requests are late in it.
pub(super) fn best<'w, 'a>(
    workload: &'w Workload<'a>,
    views: &'w [&'w CostView<'a>],
    goal: Goal,
    options: &PlanOptions,
) -> Result<(Plan, usize), PlanError> {
    let mut contest = Contest { workload, views, goal, best: None, refused: None };
    let cutting = options.part(CUTTING_SHARE);
    let cut: Vec<Vec<Cutting>> =
        views.iter().enumerate().map(|(at, view)| cuttings(view, &workload.handed_on(at), &cutting)).collect();
    let fused = match options.budget {
        Budget::Steps(_) => options.part(STEPS_SHARE),
        Budget::Until(_) => options.part(FUSED_SHARE),
    };
    let own = if in_turn::is_possible(workload) { in_turn::own_plans(views, &cutting) } else { None };
    for mix in mixes(&cut) {
        if fused.is_over() && contest.best.is_some() {
            break;
        }
        contest.schedule(&mix, &fused)?;
    }
    let single = contest.single_operators(options)?;
    // Last: of equal plans one of which more is proven stays.
    if let Some(own) = own {
        for plan in in_turn::plans(workload, views, &own, goal)? {
            contest.offer(plan)?;
        }
    }
    let Some((_, mut plan, late)) = contest.best else {
        return Err(contest.refused.unwrap_or_else(|| views[0].no_split("no planner found a plan")));
    };
    plan.links = workload.planned_links();
    if let Some(single) = single.filter(|single| plan.own.as_ref() != Some(single)) {
        let unit = if goal == Goal::Energy { "J" } else { "ms" };
        let bound =
            single.bound.map_or_else(String::new, |bound| format!(", of which none costs less than {bound:.4} {unit}"));
        let of = single.over.strip_prefix("schedules").unwrap_or_default();
        plan.notes.push(format!("the best schedule{of} costs {:.4} {unit}{bound}", single.value));
    }
    if !options.modes && goal != Goal::Energy && in_turn::is_possible(workload) {
        let (score, _) = plan_score(&plan, views, goal)?;
        let with_modes = PlanOptions { modes: true, ..cutting };
        let mut least = score;
        if let Some(own) = in_turn::own_plans(views, &with_modes)
            && own
                .iter()
                .zip(views)
                .any(|(plan, view)| plan.units.iter().any(|unit| view.unit_index(&unit.address).is_none()))
        {
            for plan in in_turn::plans(workload, views, &own, goal)? {
                let (score, _) = plan_score(&plan, views, goal)?;
                least = if score.is_better(&least) { score } else { least };
            }
        }
        if least.is_better(&score) {
            plan.notes.push(in_turn::note_on_modes(least.value));
        }
    }
    Ok((plan, late))
}

struct Contest<'w, 'a> {
    workload: &'w Workload<'a>,
    views: &'w [&'w CostView<'a>],
    goal: Goal,
    best: Option<(Score, Plan, usize)>,
    /// Why a plan was refused that units' memory does not hold.
    refused: Option<PlanError>,
}

impl Contest<'_, '_> {
    /// Keeps a plan if it is the best so far.
    fn offer(&mut self, mut plan: Plan) -> Result<(), PlanError> {
        let graphs: Vec<&OperatorGraph> = self.views.iter().map(|view| view.graph).collect();
        if let Err(error) = judge::check_memory(&plan, &graphs) {
            self.refused.get_or_insert(error);
            return Ok(());
        }
        let (score, late) = plan_score(&plan, self.views, self.goal)?;
        plan.claimed = score.value;
        if self.best.as_ref().is_none_or(|(best, ..)| score.is_better(best)) {
            self.best = Some((score, plan, late));
        }
        Ok(())
    }

    /// Schedules of single operators; what is proven of them. `None` where an operator runs inside larger segments only, and such plans
    /// exist.
    fn single_operators(&mut self, options: &PlanOptions) -> Result<Option<OwnClaim>, PlanError> {
        let problem = match self.workload.problem(self.views) {
            Ok(problem) => problem.with_goal(self.goal)?,
            Err(PlanError::Core(CoreError::Unplaceable { .. })) if self.best.is_some() || self.refused.is_some() => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let hints = Workload::hints(self.views, &problem);
        let solution: Solution = dag::solve(&problem, &hints, &dag::before_writing(&problem, options))?;
        let mut plan = problem.to_plan(self.views, &solution.schedule, METHOD, true)?;
        state_quality(&mut plan, &problem, self.views, Some(&solution))?;
        let own = plan.own.clone();
        self.offer(plan)?;
        Ok(own)
    }

    /// Schedules of the models in pieces: searched, in the order of requests as units allow, and one thing at a time.
    fn schedule(&mut self, mix: &[&Cutting], options: &PlanOptions) -> Result<(), PlanError> {
        let groups: Vec<Vec<Vec<OperatorId>>> = mix.iter().map(|cutting| cutting.groups.clone()).collect();
        let problem = match self.workload.problem_of(self.views, &groups) {
            Ok(problem) => problem.with_goal(self.goal)?,
            // Single operators say what is wrong, if they cannot be scheduled either.
            Err(_) => return Ok(()),
        };
        let hints = self.hints(mix, &problem);
        let Some(own_units) = hints.first() else { return Ok(()) };
        let orders = job_orders(&problem, own_units);
        let mut solution = dag::solve(&problem, &hints, options)?;
        for unit in &hints {
            for order in &orders {
                let schedule = Schedule::from_jobs(&problem, unit.clone(), order);
                let evaluation = problem.evaluate(&schedule)?;
                if evaluation.score.is_better(&solution.evaluation.score) {
                    solution = Solution { schedule, evaluation, exact: false, ..solution };
                }
            }
        }
        let mut plan = problem.to_plan(self.views, &solution.schedule, METHOD, true)?;
        state_quality(&mut plan, &problem, self.views, Some(&solution))?;
        if let Some(own) = &mut plan.own {
            let at_once = if own.over.ends_with(AT_ONCE) { AT_ONCE } else { "" };
            own.over = format!("{}{at_once}", over(mix));
        }
        plan.notes.push(pieces_note(self.views, mix));
        self.offer(plan)?;
        for order in &orders {
            let schedule = Schedule::from_jobs(&problem, own_units.clone(), order);
            let mut plan = problem.to_serial_plan(self.views, &schedule, METHOD)?;
            plan.own = Some(OwnClaim {
                value: plan.claimed,
                over: "one thing at a time".to_owned(),
                bound: None,
                gap: None,
                exact: false,
            });
            plan.notes.push(pieces_note(self.views, mix));
            plan.notes
                .push("one thing at a time is best here: units that work at once slow each other down".to_owned());
            self.offer(plan)?;
        }
        Ok(())
    }

    /// Units to start from: each model's own first, then, where all are whole, every way to give each model one unit.
    fn hints(&self, mix: &[&Cutting], problem: &Problem) -> Vec<Vec<u32>> {
        let of = |unit_of: &dyn Fn(usize) -> Vec<u32>| -> Vec<u32> {
            let mut unit = Vec::with_capacity(problem.jobs().len());
            for instance in &self.workload.instances {
                for _ in 0..instance.iterations.max(1) {
                    unit.extend(unit_of(instance.model));
                }
            }
            unit
        };
        let mut hints = vec![of(&|model| mix[model].unit.clone())];
        if mix.iter().all(|cutting| cutting.grain == Grain::Whole) {
            let units = problem.units().len();
            let ways = units.checked_pow(mix.len() as u32).unwrap_or(usize::MAX);
            let most = (HINTED_JOBS / problem.jobs().len().max(1)).clamp(1, MOST_HINTS);
            hints.extend((0..ways.min(most)).map(|code| {
                let digit = |model: usize| (code / units.pow(model as u32) % units) as u32;
                of(&|model| vec![digit(model); mix[model].groups.len()])
            }));
        }
        let runs = |unit: &Vec<u32>| {
            unit.len() == problem.jobs().len()
                && unit.iter().zip(problem.jobs()).all(|(&unit, job)| job.ms[unit as usize].is_finite())
        };
        hints.retain(runs);
        hints
    }
}

/// Orders of the jobs in which requests do not mix: those of [`request_orders`].
fn job_orders(problem: &Problem, unit: &[u32]) -> Vec<Vec<u32>> {
    let mut work = vec![0.0; problem.requests().len()];
    for (job, &unit) in problem.jobs().iter().zip(unit) {
        work[job.request as usize] += job.ms[unit as usize];
    }
    let orders = request_orders(problem.requests(), &work, problem.goal()).into_iter().map(|sorted| {
        let mut place = vec![0; sorted.len()];
        sorted.into_iter().enumerate().for_each(|(at, request)| place[request] = at);
        let mut order = problem.topological().to_vec();
        order.sort_by_key(|&job| place[problem.jobs()[job as usize].request as usize]);
        order
    });
    orders.collect()
}

/// Among which schedules a search over these pieces looks.
fn over(mix: &[&Cutting]) -> &'static str {
    let all = |grain: Grain| mix.iter().all(|cutting| cutting.grain == grain);
    if all(Grain::Whole) {
        "schedules of whole models"
    } else if all(Grain::Segments) {
        "schedules of the segments that `interval` cuts each model into"
    } else {
        "schedules of these pieces: whole models, segments as `interval` cuts them, or single operators"
    }
}

fn pieces_note(views: &[&CostView<'_>], mix: &[&Cutting]) -> String {
    let one = |(view, cutting): (&&CostView<'_>, &&Cutting)| {
        let how = match cutting.grain {
            Grain::Whole => "whole".to_owned(),
            Grain::Segments => format!("in {} segments as `interval` cuts it", cutting.groups.len()),
            Grain::Operators => "in single operators".to_owned(),
        };
        format!("{} {how}", view.graph.model)
    };
    let all: Vec<String> = views.iter().zip(mix).map(one).collect();
    format!("scheduled as pieces: {}", all.join(", "))
}
