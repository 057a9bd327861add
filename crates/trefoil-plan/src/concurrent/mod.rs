//! `concurrent` (ours): any number of models at once, with arrivals, rates, weights and deadlines; and pipelines of linked
//! stages with repeats. One scheduling problem, solved like `dag`.
//!
//! An [`Application`] is one or several [`Stage`]s (models) that hand tensors on, and the times at which its inferences
//! (items) arrive. A stage may be repeated within an item, as a denoising loop is: what it links to itself is read one
//! iteration later, what it reads from elsewhere is the same for all iterations, and what others read is its last iteration's.
//! Every item is a request: no task of it starts before its arrival; missing deadlines count first, then the goal.
//!
//! Backends fuse: a whole model measured in one piece is often much shorter than the sum of its operators. So schedules of single
//! operators compete with schedules of whole models, of the segments that `interval` cuts each model into, and of mixtures of
//! these; overlapped as the units allow, and one thing after another in the order of arrival, of deadlines, of work by weight, and the best
//! order of few requests; and with each model's own plan in turn, in the same orders. The simulator decides between the plans as they stand, so the result is never worse than any of these.

mod contest;
pub(crate) mod in_turn;
pub(crate) mod mode_bound;
mod orders;
pub(crate) mod pieces;
mod workload;

pub(crate) use workload::Workload;

use crate::bounds::Effort;
use crate::dag;
use crate::problem::{Goal, Instance, Problem, ProblemRequest};
use crate::request::PlanOptions;
use crate::view::CostView;
use crate::{Pin, PlanError};
use trefoil_core::{Objective, OperatorGraph, OperatorId, Plan, Profile, TensorId, UnitAddress};

/// A model within an application.
#[derive(Debug, Clone, Copy)]
pub struct Stage<'a> {
    /// Its measurements.
    pub profile: &'a Profile,
    /// The model.
    pub graph: &'a OperatorGraph,
    /// Executions per item, at least 1.
    pub repeat: u32,
}

/// A tensor handed on: what `from` makes is what `to` reads instead of a model input. Equal stages make a loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageLink {
    /// Stage index and one of its tensors that an operator makes.
    pub from: (usize, TensorId),
    /// Stage index and one of its model inputs.
    pub to: (usize, TensorId),
}

/// Something that runs again and again.
#[derive(Debug, Clone)]
pub struct Application<'a> {
    /// Stages, in any order.
    pub stages: Vec<Stage<'a>>,
    /// What they hand on.
    pub links: Vec<StageLink>,
    /// Arrival of each item in milliseconds; as many items as arrivals.
    pub arrivals_ms: Vec<f64>,
    /// Milliseconds from arrival in which an item should be complete.
    pub deadline_ms: Option<f64>,
    /// Weight of each item beside those of other applications, above 0.
    pub weight: f64,
}

impl<'a> Application<'a> {
    /// One model, one item, at time 0.
    pub fn new(profile: &'a Profile, graph: &'a OperatorGraph) -> Self {
        Self {
            stages: vec![Stage { profile, graph, repeat: 1 }],
            links: Vec::new(),
            arrivals_ms: vec![0.0],
            deadline_ms: None,
            weight: 1.0,
        }
    }

    /// `items` items, the first at `offset_ms`, one every `period_ms`.
    #[must_use]
    pub fn every(mut self, items: u32, offset_ms: f64, period_ms: f64) -> Self {
        self.arrivals_ms = (0..items).map(|item| offset_ms + f64::from(item) * period_ms).collect();
        self
    }

    /// Sets the deadline, in milliseconds from arrival.
    #[must_use]
    pub fn within(mut self, deadline_ms: f64) -> Self {
        self.deadline_ms = Some(deadline_ms);
        self
    }

    /// Sets the weight.
    #[must_use]
    pub fn weighing(mut self, weight: f64) -> Self {
        self.weight = weight;
        self
    }
}

/// What `concurrent` is asked.
#[derive(Debug, Clone)]
pub struct ConcurrentRequest<'a> {
    /// What runs.
    pub applications: Vec<Application<'a>>,
    /// Units to use; empty means every unit that all profiles have, in the first one's order.
    pub units: Vec<UnitAddress>,
    /// Latency or energy.
    pub objective: Objective,
    /// For latency: the weighted completion time of the items instead of the end of the last.
    pub weighted: bool,
    /// Placements that are not the planner's to choose, for all models that they match.
    pub pins: Vec<Pin>,
}

impl<'a> ConcurrentRequest<'a> {
    /// Least makespan on all common units.
    pub fn new(applications: Vec<Application<'a>>) -> Self {
        Self { applications, units: Vec::new(), objective: Objective::Latency, weighted: false, pins: Vec::new() }
    }
}

/// Plans several applications together. `claimed` is the goal's value: milliseconds of makespan or weighted mean completion,
/// or joules.
///
/// # Errors
/// [`PlanError::Workload`] when there is nothing to run, profiles are of different machines or share no unit, or a link names
/// no tensor; [`PlanError::Objective`] for throughput; whatever is wrong with a profile.
pub fn concurrent(request: &ConcurrentRequest<'_>, options: &PlanOptions) -> Result<Plan, PlanError> {
    if request.objective == Objective::Throughput {
        return Err(PlanError::Objective { method: "concurrent".to_owned(), objective: "throughput".to_owned() });
    }
    let workload = Workload::new(request)?;
    let views: Vec<&CostView<'_>> = workload.views.iter().collect();
    if let ([view], true) = (views.as_slice(), workload.is_one_inference() && !request.weighted) {
        return one_inference(view, options);
    }
    let goal = match request.objective {
        Objective::Energy => Goal::Energy,
        _ if request.weighted => Goal::WeightedCompletion,
        _ => Goal::Makespan,
    };
    let least = workload.least(&views)?.with_goal(goal)?;
    let mut bound = crate::bounds::bound_over_segments(&least, &views, Effort::within(options));
    if options.modes && goal != Goal::Energy {
        bound = mode_bound::with_modes(bound, &workload, &views, goal, &|model| {
            let alone = Workload::least_of_one(&views, model)?;
            Ok(crate::bounds::bound_over_segments(&alone, &views, Effort::QUICK))
        })?;
    }
    let (mut plan, late) = contest::best(&workload, &views, goal, options)?;
    crate::judge::judge(&mut plan, &views, goal, bound)?;
    if late > 0 {
        // Deadlines come first, and nothing is proven about how many can be met.
        plan.exact = false;
        if let Some(own) = &mut plan.own {
            own.exact = false;
        }
        plan.notes.push(format!("{late} of {} items miss their deadline", workload.requests.len()));
    }
    Ok(plan)
}

/// One inference of one model, there from the start: what `dag` plans.
fn one_inference(view: &CostView<'_>, options: &PlanOptions) -> Result<Plan, PlanError> {
    let bound = crate::judge::bound_of_all_within(view, Effort::within(options))?;
    let mut plan = dag::dag(view, options)?;
    "concurrent".clone_into(&mut plan.method);
    crate::judge::judge(&mut plan, &[view], crate::goal_of(view.objective), bound)?;
    crate::judge::check_memory(&plan, &[view.graph])?;
    Ok(plan)
}

/// The problem that [`concurrent`] solves, for those who schedule it themselves.
///
/// # Errors
/// As for [`concurrent`].
pub fn concurrent_problem(request: &ConcurrentRequest<'_>) -> Result<Problem, PlanError> {
    let workload = Workload::new(request)?;
    let views: Vec<&CostView<'_>> = workload.views.iter().collect();
    workload.problem(&views)
}

/// One execution of each model, all from the start.
pub(crate) fn side_by_side(views: &[&CostView<'_>]) -> Result<Problem, PlanError> {
    let groups: Vec<Vec<Vec<OperatorId>>> =
        views.iter().map(|view| view.graph.ids().map(|id| vec![id]).collect()).collect();
    let instances: Vec<Instance> = (0..views.len())
        .map(|model| Instance { model, item: model as u32, iterations: 1, request: model as u32 })
        .collect();
    Problem::from_instances(views, &groups, &instances, &[], vec![ProblemRequest::default(); views.len()])
}
