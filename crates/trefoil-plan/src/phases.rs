//! BIDENT's phases (3.2.2, 3.3.2), literally and corrected.
//!
//! **Partition.** Forks (out-degree above 1) and joins (in-degree above 1) bound branches: a branch is a longest chain whose
//! inner edges leave no fork and enter no join. A branch's phase is one more than the latest phase of the branches it reads
//! from, so branches of a phase are mutually independent, and phases run one after another.
//!
//! **`phases`, literal.** Each branch is mapped by the sequential recurrence (eq. 1) on its own, start and end transfers
//! included; then every operator's time is multiplied by `max SF(own unit, unit of another branch of the phase)`; a phase
//! costs the largest of its branches, also in joules as the text has it, and phases add up. Nothing keeps two branches
//! from claiming the same unit and still counting as parallel, tensors that skip a phase are free, and the slowdown comes
//! after the choice: so `claimed` may be below what the simulator says of the same plan. Both stand in the plan.
//!
//! **`phases-exclusive`, corrected.** The same partition and barriers, but units' resources are exclusive, every crossing
//! tensor pays once per unit, and each phase is scheduled jointly, contention included, given where its inputs are.

use crate::dag::{self, Solution};
use crate::problem::{Evaluation, Job, Problem, ProblemRequest, ProblemTensor, Schedule, Step};
use crate::request::{Budget, PlanOptions};
use crate::sequential::{PaperCosts, sequential_dp};
use crate::view::CostView;
use crate::{Factors, PlanError};
use trefoil_core::{OperatorClass, Plan};

/// Branches of phases: per phase its branches, per branch its jobs in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Phases {
    /// Jobs by phase and branch.
    pub phases: Vec<Vec<Vec<u32>>>,
}

impl Phases {
    /// The partition of `count` jobs in topological order with the given predecessors and successors (without duplicates).
    pub fn new<'a>(order: &[u32], before: impl Fn(u32) -> &'a [u32], after: impl Fn(u32) -> &'a [u32]) -> Self {
        let mut branch_of = vec![usize::MAX; order.len()];
        let mut branches: Vec<Vec<u32>> = Vec::new();
        let mut phase_of: Vec<usize> = Vec::new();
        for &job in order {
            let continues = match before(job) {
                [only] if after(*only).len() == 1 => Some(branch_of[*only as usize]),
                _ => None,
            };
            let branch = continues.unwrap_or_else(|| {
                let phase = before(job).iter().map(|&from| phase_of[branch_of[from as usize]] + 1).max();
                phase_of.push(phase.unwrap_or(0));
                branches.push(Vec::new());
                branches.len() - 1
            });
            branch_of[job as usize] = branch;
            branches[branch].push(job);
        }
        let mut phases: Vec<Vec<Vec<u32>>> =
            vec![Vec::new(); phase_of.iter().map(|phase| phase + 1).max().unwrap_or(0)];
        for (branch, phase) in branches.into_iter().zip(phase_of) {
            phases[phase].push(branch);
        }
        Self { phases }
    }

    /// The partition of a problem's jobs.
    pub fn of(problem: &Problem) -> Self {
        Self::new(
            problem.topological(),
            |job| problem.predecessors(job as usize),
            |job| problem.successors(job as usize),
        )
    }

    /// Phases with two or more branches.
    pub fn concurrent(&self) -> usize {
        self.phases.iter().filter(|branches| branches.len() > 1).count()
    }

    /// A schedule that runs phase after phase, each after all of the one before; `jobs` orders the jobs within phases.
    pub(crate) fn schedule(&self, problem: &Problem, unit: Vec<u32>, jobs: &[u32]) -> Schedule {
        let mut schedule = Schedule::from_jobs(problem, unit, jobs);
        for pair in self.phases.windows(2) {
            for first in pair[0].iter().filter_map(|branch| branch.last()) {
                let begins = pair[1].iter().filter_map(|branch| branch.first());
                schedule.after.extend(begins.map(|then| (Step::Job(*first), Step::Job(*then))));
            }
        }
        schedule
    }

    pub(crate) fn in_order(&self) -> Vec<u32> {
        self.phases.iter().flatten().flatten().copied().collect()
    }
}

/// Costs of the literal formula, in the objective's unit, row-major jobs × units.
#[derive(Debug, Clone)]
pub struct PhaseCosts {
    /// `w(i, j)`; infinite where the operator cannot run.
    pub w: Vec<f64>,
    /// H2D of the operator's inputs.
    pub h2d: Vec<f64>,
    /// D2H of its outputs.
    pub d2h: Vec<f64>,
    /// Per unit, whether it is an accelerator.
    pub accelerator: Vec<bool>,
}

/// BIDENT 3.3.2 literally: the claimed cost, a unit per job, and the same sum without slowdown (which bounds the formula from
/// below when no factor is under 1). `class` is that of each job.
///
/// Empty assignment and infinite cost when a job runs on no unit.
pub fn phases_literal(
    phases: &Phases,
    costs: &PhaseCosts,
    factors: &Factors,
    class: &[OperatorClass],
) -> (f64, Vec<u32>, f64) {
    let units = costs.accelerator.len();
    let mut unit = vec![0u32; class.len()];
    let (mut claimed, mut unslowed) = (0.0, 0.0);
    for branches in &phases.phases {
        let mut used: Vec<Vec<bool>> = Vec::with_capacity(branches.len());
        let mut alone: f64 = 0.0;
        for branch in branches {
            let rows = |table: &[f64]| -> Vec<f64> {
                branch.iter().flat_map(|&job| table[job as usize * units..][..units].iter().copied()).collect()
            };
            let (w, h2d, d2h) = (rows(&costs.w), rows(&costs.h2d), rows(&costs.d2h));
            let (cost, assignment) = sequential_dp(&w, &h2d, &d2h, &costs.accelerator, units);
            if assignment.is_empty() {
                return (f64::INFINITY, Vec::new(), f64::INFINITY);
            }
            alone = alone.max(cost);
            let mut seen = vec![false; units];
            for (&job, &here) in branch.iter().zip(&assignment) {
                unit[job as usize] = here as u32;
                seen[here] = true;
            }
            used.push(seen);
        }
        let mut phase: f64 = 0.0;
        for (number, branch) in branches.iter().enumerate() {
            let others: Vec<usize> = (0..units)
                .filter(|&other| used.iter().enumerate().any(|(at, used)| at != number && used[other]))
                .collect();
            phase = phase.max(branch_cost(branch, &unit, costs, factors, class, &others));
        }
        claimed += phase;
        unslowed += alone;
    }
    (claimed, unit, unslowed)
}

/// The branch's path cost with every operator's time times its slowdown.
fn branch_cost(
    branch: &[u32],
    unit: &[u32],
    costs: &PhaseCosts,
    factors: &Factors,
    class: &[OperatorClass],
    others: &[usize],
) -> f64 {
    let units = costs.accelerator.len();
    let pays = |table: &[f64], job: u32, here: usize| {
        if costs.accelerator[here] { table[job as usize * units + here] } else { 0.0 }
    };
    let mut cost = 0.0;
    let mut previous: Option<(u32, usize)> = None;
    for &job in branch {
        let here = unit[job as usize] as usize;
        match previous {
            None => cost += pays(&costs.h2d, job, here),
            Some((before, from)) if from != here => {
                cost += pays(&costs.d2h, before, from) + pays(&costs.h2d, job, here);
            }
            Some(_) => {}
        }
        let slowed = class[job as usize];
        let both = [OperatorClass::Compute, OperatorClass::Memory];
        let known = others.iter().flat_map(|&other| {
            both.into_iter().filter_map(move |interfering| factors.get(here, other, (slowed, interfering)))
        });
        cost += costs.w[job as usize * units + here] * known.reduce(f64::max).unwrap_or(1.0);
        previous = Some((job, here));
    }
    if let Some((job, here)) = previous {
        cost += pays(&costs.d2h, job, here);
    }
    cost
}

/// `phases`, literal.
pub(crate) fn phases(view: &CostView<'_>) -> Result<Plan, PlanError> {
    let problem = Problem::from_view(view)?.with_goal(super::goal_of(view.objective))?;
    let partition = Phases::of(&problem);
    let (claimed, unit, unslowed) = literal_assignment(view, &problem, &partition);
    if unit.len() < problem.jobs().len() {
        return Err(view.no_unit());
    }
    let schedule = partition.schedule(&problem, unit, &partition.in_order());
    let mut plan = problem.to_plan(&[view], &schedule, "phases", true)?;
    let own = plan.claimed;
    plan.claimed = claimed;
    crate::assemble::set_bound(&mut plan, unslowed);
    plan.exact = false;
    let suffix = if view.objective == trefoil_core::Objective::Energy { "J" } else { "ms" };
    plan.notes.push(format!(
        "claimed is the paper's sum over {} phases, {} of them concurrent (BIDENT 3.3.2); branches may share a unit and skipping tensors are free there: with exclusive units and every crossing tensor paid the same assignment costs {own:.4} {suffix}; the bound is the formula's own without slowdown",
        partition.phases.len(),
        partition.concurrent(),
    ));
    Ok(plan)
}

/// The literal planner's claim, units per job (empty if some job runs nowhere) and claim without slowdown.
pub(crate) fn literal_assignment(view: &CostView<'_>, problem: &Problem, partition: &Phases) -> (f64, Vec<u32>, f64) {
    let PaperCosts { w, h2d, d2h } = PaperCosts::new(view);
    let costs = PhaseCosts { w, h2d, d2h, accelerator: view.table.accelerator.clone() };
    let class: Vec<OperatorClass> = view.graph.operators.iter().map(|operator| operator.class).collect();
    phases_literal(partition, &costs, problem.factors(), &class)
}

/// `phases-exclusive`.
pub(crate) fn phases_exclusive(view: &CostView<'_>, options: &PlanOptions) -> Result<Plan, PlanError> {
    let problem = Problem::from_view(view)?.with_goal(super::goal_of(view.objective))?;
    let partition = Phases::of(&problem);
    let literal = literal_assignment(view, &problem, &partition).1;
    let hints = if literal.len() == problem.jobs().len() { vec![literal] } else { Vec::new() };
    let (schedule, _) = exclusive(&problem, &partition, &hints, options)?;
    let mut plan = problem.to_plan(&[view], &schedule, "phases-exclusive", true)?;
    super::state_quality(&mut plan, &problem, &[view], None)?;
    plan.notes.push(format!(
        "{} phases, {} of them concurrent, with barriers between them",
        partition.phases.len(),
        partition.concurrent()
    ));
    Ok(plan)
}

/// Most steps that `phases-exclusive` simulates, whatever the budget.
const EXCLUSIVE_STEPS: u64 = 2_000_000;

/// The best schedule with barriers between phases: phase by phase, each jointly; or one of the hints, if better.
pub(crate) fn exclusive(
    problem: &Problem,
    partition: &Phases,
    hints: &[Vec<u32>],
    options: &PlanOptions,
) -> Result<(Schedule, Evaluation), PlanError> {
    let mut best: Option<(Schedule, Evaluation)> = None;
    let mut offer = |schedule: Schedule| -> Result<(), PlanError> {
        let evaluation = problem.evaluate(&schedule)?;
        if best.as_ref().is_none_or(|(_, known)| evaluation.score.is_better(&known.score)) {
            best = Some((schedule, evaluation));
        }
        Ok(())
    };
    let units = problem.units().len();
    let singles = (0..units).map(|unit| dag::construct::single(problem, unit));
    let all = hints.iter().cloned().chain(singles).chain([dag::construct::chain(problem, &vec![1.0; units])]);
    for unit in all {
        offer(partition.schedule(problem, unit, &partition.in_order()))?;
    }
    let mut unit = vec![u32::MAX; problem.jobs().len()];
    let mut brought = vec![false; problem.tensors().len() * units];
    let mut order = Vec::with_capacity(unit.len());
    // Every phase gets its share, by steps; phases are small.
    let steps = match options.budget {
        Budget::Steps(steps) => steps.min(EXCLUSIVE_STEPS),
        Budget::Until(_) => dag::steps_left(options, 0.15).min(EXCLUSIVE_STEPS),
    };
    let share = Budget::Steps(steps / partition.phases.len().max(1) as u64);
    for branches in &partition.phases {
        let jobs: Vec<u32> = {
            let mut jobs: Vec<u32> = branches.iter().flatten().copied().collect();
            jobs.sort_unstable();
            jobs
        };
        let part = part_of(problem, &jobs, &unit, &brought)?;
        let Solution { schedule, .. } = dag::solve(&part, &[], &PlanOptions { budget: share, ..*options })?;
        for (&job, &here) in jobs.iter().zip(&schedule.unit) {
            unit[job as usize] = here;
        }
        for step in &schedule.order {
            if let crate::problem::Step::Job(at) = step {
                let job = jobs[*at as usize];
                order.push(job);
                let here = unit[job as usize] as usize;
                for &tensor in problem.dense.inputs.row(job as usize) {
                    brought[tensor as usize * units + here] = true;
                }
            }
        }
    }
    offer(partition.schedule(problem, unit, &order))?;
    best.ok_or_else(|| PlanError::Problem { reason: "it has no schedule".to_owned() })
}

/// Some jobs as a problem of their own; what they read from outside is there at once, at the price of bringing it from the
/// unit that `unit` tells, or for nothing where it was brought before.
fn part_of(problem: &Problem, jobs: &[u32], unit: &[u32], brought: &[bool]) -> Result<Problem, PlanError> {
    let dense = &problem.dense;
    let units = dense.units;
    let local = |job: u32| jobs.binary_search(&job).ok().map(|at| at as u32);
    let mut tensors: Vec<u32> = jobs
        .iter()
        .flat_map(|&job| dense.inputs.row(job as usize).iter().chain(dense.outputs.row(job as usize)).copied())
        .collect();
    tensors.sort_unstable();
    tensors.dedup();
    let tensors = tensors.into_iter().filter_map(|tensor| {
        let index = tensor as usize;
        let details = &problem.tensors()[index];
        let producer = details.producer.and_then(local);
        let consumers: Vec<u32> = details.consumers.iter().filter_map(|&job| local(job)).collect();
        if consumers.is_empty() && !(details.is_output && producer.is_some()) {
            return None;
        }
        let mut transfer_ms = details.transfer_ms.clone();
        if producer.is_none() {
            let from = problem.source(index, unit);
            for to in 0..units {
                let there = brought[index * units + to];
                transfer_ms[units * units + to] = if there { 0.0 } else { dense.transfer(index, from, to) };
            }
        }
        Some(ProblemTensor {
            producer,
            consumers,
            transfer_ms,
            to_host_ms: details.to_host_ms.clone(),
            is_output: details.is_output && producer.is_some(),
            ..*details
        })
    });
    let tensors = tensors.collect();
    let jobs: Vec<Job> = jobs.iter().map(|&job| Job { request: 0, ..problem.jobs()[job as usize].clone() }).collect();
    Problem::new(
        problem.units().to_vec(),
        problem.resources().to_vec(),
        jobs,
        tensors,
        vec![ProblemRequest::default()],
        problem.factors().clone(),
        problem.idle_watts(),
    )?
    .with_goal(problem.goal())
}
