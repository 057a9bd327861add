//! `concurrent` (ours): any number of models at once, with arrivals, rates, weights and deadlines; and pipelines of linked
//! stages with repeats. One scheduling problem, solved like `dag`.
//!
//! An [`Application`] is one or several [`Stage`]s (models) that hand tensors on, and the times at which its inferences
//! (items) arrive. A stage may be repeated within an item, as a denoising loop is: what it links to itself is read one
//! iteration later, what it reads from elsewhere is the same for all iterations, and what others read is its last iteration's.
//! Every item is a request: no task of it starts before its arrival; missing deadlines count first, then the goal.

use crate::bounds::Effort;
use crate::dag::{self, Solution};
use crate::problem::{Goal, Instance, Link, Problem, ProblemRequest};
use crate::quality::state_quality;
use crate::request::PlanOptions;
use crate::sequential::{PaperCosts, sequential_dp};
use crate::view::CostView;
use crate::{Pin, PlanError, PlanRequest, whole};
use std::collections::BTreeMap;
use trefoil_core::{LinkEnd, Objective, OperatorGraph, OperatorId, Plan, PlannedLink, Profile, TensorId, UnitAddress};

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
    let problem = workload.problem(&views)?;
    let goal = match request.objective {
        Objective::Energy => Goal::Energy,
        _ if request.weighted => Goal::WeightedCompletion,
        _ => Goal::Makespan,
    };
    let problem = problem.with_goal(goal)?;
    let bound = crate::judge::bound_of_workload(&problem, &views, Effort::within(options))?;
    let hints = Workload::hints(&views, &problem);
    let solution: Solution = dag::solve(&problem, &hints, &dag::before_writing(&problem, options))?;
    let mut plan = problem.to_plan(&views, &solution.schedule, "concurrent", true)?;
    plan.links = workload.planned_links();
    state_quality(&mut plan, &problem, &views, Some(&solution))?;
    crate::judge::judge(&mut plan, &views, goal, bound)?;
    let graphs: Vec<&OperatorGraph> = views.iter().map(|view| view.graph).collect();
    crate::judge::check_memory(&plan, &graphs)?;
    let late = problem
        .requests()
        .iter()
        .zip(&solution.evaluation.completion_ms)
        .filter(|(request, end)| request.deadline_ms.is_some_and(|deadline| **end > deadline))
        .count();
    if late > 0 {
        // Deadlines come first, and nothing is proven about how many can be met.
        plan.exact = false;
        if let Some(own) = &mut plan.own {
            own.exact = false;
        }
        plan.notes.push(format!("{late} of {} items miss their deadline", problem.requests().len()));
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

/// Views of the distinct models, and items as instances of them.
struct Workload<'a> {
    views: Vec<CostView<'a>>,
    instances: Vec<Instance>,
    links: Vec<Link>,
    requests: Vec<ProblemRequest>,
}

fn wrong(model: &str, reason: String) -> PlanError {
    PlanError::Workload { model: model.to_owned(), reason }
}

impl<'a> Workload<'a> {
    fn new(request: &ConcurrentRequest<'a>) -> Result<Self, PlanError> {
        let stages: Vec<&Stage<'a>> = request.applications.iter().flat_map(|app| &app.stages).collect();
        let Some(first) = stages.first() else {
            return Err(wrong("", "there is no model to plan for".to_owned()));
        };
        for stage in &stages {
            let (here, there) = (&stage.profile.machine, &first.profile.machine);
            if here.cpu != there.cpu || here.cores != there.cores {
                return Err(wrong(
                    &stage.graph.model,
                    format!("its profile is of {} and another of {}; profile all on one machine", here.cpu, there.cpu),
                ));
            }
        }
        let units: Vec<UnitAddress> = if request.units.is_empty() {
            let known = |unit: &UnitAddress| stages.iter().all(|stage| stage.profile.unit(unit).is_ok());
            first.profile.units.iter().map(|unit| unit.address.clone()).filter(known).collect()
        } else {
            request.units.clone()
        };
        if units.is_empty() {
            return Err(wrong(&first.graph.model, "the profiles have no unit in common".to_owned()));
        }
        let mut workload = Self { views: Vec::new(), instances: Vec::new(), links: Vec::new(), requests: Vec::new() };
        let mut pinned = vec![false; request.pins.len()];
        let mut known: Vec<(*const Profile, *const OperatorGraph)> = Vec::new();
        let mut items: BTreeMap<usize, u32> = BTreeMap::new();
        for application in &request.applications {
            let mut models = Vec::new();
            for stage in &application.stages {
                let key = (std::ptr::from_ref(stage.profile), std::ptr::from_ref(stage.graph));
                let model = if let Some(model) = known.iter().position(|known| *known == key) {
                    model
                } else {
                    // A pin needs to match somewhere, not in every model.
                    let matches = |pin: &Pin| stage.graph.operators.iter().any(|operator| pin.matches(operator));
                    let pins: Vec<Pin> = request.pins.iter().filter(|pin| matches(pin)).cloned().collect();
                    request.pins.iter().zip(&mut pinned).for_each(|(pin, found)| *found |= matches(pin));
                    let plan_request = PlanRequest {
                        profile: stage.profile,
                        graph: stage.graph,
                        units: units.clone(),
                        objective: request.objective,
                        pins,
                    };
                    workload.views.push(CostView::new(&plan_request)?);
                    known.push(key);
                    known.len() - 1
                };
                models.push(model);
            }
            workload.check_links(application, &models)?;
            for &arrival in &application.arrivals_ms {
                let number = workload.requests.len() as u32;
                workload.requests.push(ProblemRequest {
                    release_ms: arrival,
                    deadline_ms: application.deadline_ms.map(|deadline| arrival + deadline),
                    weight: application.weight,
                });
                let base = workload.instances.len();
                for (stage, &model) in application.stages.iter().zip(&models) {
                    let item = items.entry(model).or_insert(0);
                    workload.instances.push(Instance {
                        model,
                        item: *item,
                        iterations: stage.repeat.max(1),
                        request: number,
                    });
                    *item += 1;
                }
                workload.links.extend(
                    application.links.iter().map(|link| Link {
                        from: (base + link.from.0, link.from.1),
                        to: (base + link.to.0, link.to.1),
                    }),
                );
            }
        }
        if let Some(at) = pinned.iter().position(|found| !found) {
            let pin = request.pins[at].to_string();
            return Err(PlanError::PinMatchesNothing { pin, model: first.graph.model.clone() });
        }
        Ok(workload)
    }

    /// Whether all there is to do is one execution of one model, without arrival or deadline.
    fn is_one_inference(&self) -> bool {
        let plain = |request: &ProblemRequest| {
            let from_the_start = request.release_ms.to_bits() == 0;
            from_the_start && request.deadline_ms.is_none() && request.weight.is_finite() && request.weight > 0.0
        };
        matches!(self.instances.as_slice(), [Instance { iterations: 1, .. }])
            && self.links.is_empty()
            && self.requests.iter().all(plain)
    }

    fn check_links(&self, application: &Application<'a>, models: &[usize]) -> Result<(), PlanError> {
        for (number, link) in application.links.iter().enumerate() {
            let graph = |stage: usize| models.get(stage).map(|&model| self.views[model].graph);
            let (Some(from), Some(to)) = (graph(link.from.0), graph(link.to.0)) else {
                return Err(wrong(
                    "",
                    format!("a link names stage {} or {}, of {}", link.from.0, link.to.0, models.len()),
                ));
            };
            let made = from.tensors.get(link.from.1.index());
            let read = to.tensors.get(link.to.1.index());
            let (Some(made), Some(read)) = (made, read) else {
                return Err(wrong(&to.model, "a link names a tensor that does not exist".to_owned()));
            };
            if made.producer.is_none() {
                return Err(wrong(&from.model, format!("a link hands on `{}`, which no operator makes", made.name)));
            }
            if read.producer.is_some() {
                return Err(wrong(&to.model, format!("a link feeds `{}`, which is no model input", read.name)));
            }
            // A loop's own link and one that starts it are different; of two others none is right.
            let is_loop = |link: &StageLink| link.from.0 == link.to.0;
            let again =
                application.links[..number].iter().any(|other| other.to == link.to && is_loop(other) == is_loop(link));
            if again {
                return Err(wrong(&to.model, format!("two links feed `{}`", read.name)));
            }
            if made.bytes != read.bytes {
                return Err(wrong(
                    &to.model,
                    format!(
                        "a link hands {} bytes of `{}` on as {} bytes of `{}`",
                        made.bytes, made.name, read.bytes, read.name
                    ),
                ));
            }
        }
        Ok(())
    }

    /// The links as the executor needs them.
    fn planned_links(&self) -> Vec<PlannedLink> {
        let end = |(instance, tensor): (usize, TensorId)| {
            let Instance { model, item, .. } = &self.instances[instance];
            LinkEnd { model: *model as u32, item: *item, tensor }
        };
        self.links.iter().map(|link| PlannedLink { from: end(link.from), to: end(link.to) }).collect()
    }

    fn problem(&self, views: &[&CostView<'_>]) -> Result<Problem, PlanError> {
        let groups: Vec<Vec<Vec<OperatorId>>> =
            views.iter().map(|view| view.graph.ids().map(|id| vec![id]).collect()).collect();
        Problem::from_instances(views, &groups, &self.instances, &self.links, self.requests.clone())
    }

    /// What there is to start from: every model by the sequential recurrence or on its best single unit; and every way to give
    /// each model one unit, where there are few.
    fn hints(views: &[&CostView<'_>], problem: &Problem) -> Vec<Vec<u32>> {
        let units = problem.units().len();
        let mut choices: Vec<Vec<Vec<u32>>> = Vec::new();
        for view in views {
            let costs = PaperCosts::new(view);
            let (_, sequential) =
                sequential_dp(&costs.w, &costs.h2d, &costs.d2h, &view.table.accelerator, view.unit_count());
            let mut list = vec![sequential.into_iter().map(|unit| unit as u32).collect::<Vec<u32>>()];
            let mut order: Vec<u32> = (0..units as u32).collect();
            if let Some(best) = whole::best_single(view).and_then(|plan| view.unit_index(&plan.segments.first()?.unit))
            {
                order.retain(|&unit| unit as usize != best);
                order.insert(0, best as u32);
            }
            list.extend(order.into_iter().map(|unit| vec![unit; view.graph.len()]));
            choices.push(list);
        }
        let total = choices.iter().map(Vec::len).product::<usize>();
        let mut hints = Vec::new();
        for code in 0..total.min((HINTED_JOBS / problem.jobs().len().max(1)).clamp(1, MOST_HINTS)) {
            let mut rest = code;
            let digits: Vec<usize> = choices
                .iter()
                .map(|list| {
                    let digit = rest % list.len();
                    rest /= list.len();
                    digit
                })
                .collect();
            let unit: Option<Vec<u32>> = problem
                .jobs()
                .iter()
                .map(|job| {
                    let model = job.model as usize;
                    choices[model][digits[model]].get(job.operators.first()?.index()).copied()
                })
                .collect();
            hints.extend(
                unit.filter(|unit| {
                    unit.iter().zip(problem.jobs()).all(|(&unit, job)| job.ms[unit as usize].is_finite())
                }),
            );
        }
        hints
    }
}

/// Most combinations of the models' own assignments to start from.
const MOST_HINTS: usize = 64;
/// Jobs of all of them together: large problems get fewer.
const HINTED_JOBS: usize = 100_000;
