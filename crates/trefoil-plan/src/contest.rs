//! Planners against each other on one model under one cost model: every operator alone at its isolated cost, scored by the
//! simulator. For measuring how good planners are, not for planning.

use crate::dag;
use crate::list_scheduling::{fastest_unit, heft};
use crate::phases::{Phases, literal_assignment};
use crate::problem::{Problem, Schedule};
use crate::sequential::{PaperCosts, sequential_dp};
use crate::view::CostView;
use crate::{Bound, PlanError, PlanOptions, PlanRequest, thorough_bound};
use std::fmt;

/// Who may take part.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Contender {
    /// Ours.
    Dag,
    /// BIDENT's phases with their barriers, literal assignment, exclusive units.
    Phases,
    /// BIDENT's sequential assignment, one operator after another.
    Sequential,
    /// HEFT with insertion.
    Heft,
    /// Each operator where it alone is fastest, by upward rank.
    FastestUnit,
    /// Everything on the best single unit that runs it all.
    SingleUnit,
}

impl Contender {
    /// Everyone.
    pub const ALL: [Self; 6] =
        [Self::Dag, Self::Phases, Self::Sequential, Self::Heft, Self::FastestUnit, Self::SingleUnit];
}

impl fmt::Display for Contender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dag => "dag",
            Self::Phases => "phases",
            Self::Sequential => "sequential",
            Self::Heft => "HEFT",
            Self::FastestUnit => "fastest unit",
            Self::SingleUnit => "best single unit",
        })
    }
}

/// One model, ready for the contest.
pub struct Arena<'a> {
    view: CostView<'a>,
    problem: Problem,
    /// Lower bound on the makespan.
    pub bound: Bound,
}

/// What a contender reached.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reached {
    /// Makespan in milliseconds.
    pub makespan_ms: f64,
    /// Whether it is proven to be the least possible.
    pub exact: bool,
}

impl<'a> Arena<'a> {
    /// Reads the profile.
    ///
    /// # Errors
    /// Whatever is wrong with the request, as for [`crate::plan`].
    pub fn new(request: &PlanRequest<'a>) -> Result<Self, PlanError> {
        let view = CostView::new(request)?;
        let problem = Problem::from_view(&view)?;
        let bound = thorough_bound(&problem);
        Ok(Self { view, problem, bound })
    }

    /// Number of operators.
    pub fn operators(&self) -> usize {
        self.problem.jobs().len()
    }

    /// Number of units.
    pub fn units(&self) -> usize {
        self.problem.units().len()
    }

    /// Lets one plan. `None` where it has no plan (no single unit runs everything).
    ///
    /// # Errors
    /// [`PlanError`] when its schedule is not valid.
    pub fn run(&self, contender: Contender, options: &PlanOptions) -> Result<Option<Reached>, PlanError> {
        let problem = &self.problem;
        let schedule = match contender {
            Contender::Dag => {
                let mut hints = vec![self.sequential()];
                hints.extend(Some(self.phases().1).filter(|unit| unit.len() == problem.jobs().len()));
                let solution = dag::solve(problem, &hints, options)?;
                let makespan_ms = solution.evaluation.makespan_ms;
                return Ok(Some(Reached { makespan_ms, exact: solution.exact }));
            }
            Contender::Phases => {
                let (partition, unit) = self.phases();
                if unit.len() < problem.jobs().len() {
                    return Ok(None);
                }
                partition.schedule(problem, unit, &partition.in_order())
            }
            Contender::Sequential => self.one_by_one(self.sequential()),
            Contender::Heft => heft(problem),
            Contender::FastestUnit => fastest_unit(problem),
            Contender::SingleUnit => {
                let total = |unit: usize| problem.jobs().iter().map(|job| job.ms[unit]).sum::<f64>();
                let best = (0..self.units()).min_by(|&a, &b| total(a).total_cmp(&total(b)));
                match best.filter(|&unit| total(unit).is_finite()) {
                    Some(unit) => self.one_by_one(vec![unit as u32; problem.jobs().len()]),
                    None => return Ok(None),
                }
            }
        };
        let makespan_ms = problem.evaluate(&schedule)?.makespan_ms;
        Ok(Some(Reached { makespan_ms, exact: makespan_ms <= self.bound.value * (1.0 + 1e-9) }))
    }

    fn sequential(&self) -> Vec<u32> {
        let costs = PaperCosts::new(&self.view);
        let (_, unit) =
            sequential_dp(&costs.w, &costs.h2d, &costs.d2h, &self.view.table.accelerator, self.view.unit_count());
        unit.into_iter().map(|unit| unit as u32).collect()
    }

    fn phases(&self) -> (Phases, Vec<u32>) {
        let partition = Phases::of(&self.problem);
        let unit = literal_assignment(&self.view, &self.problem, &partition).1;
        (partition, unit)
    }

    fn one_by_one(&self, unit: Vec<u32>) -> Schedule {
        let order = self.problem.topological();
        let mut schedule = Schedule::from_jobs(&self.problem, unit, order);
        schedule.after = dag::in_turn(order);
        schedule
    }
}
