//! The models, items and links of a request, densely.

use super::{Application, ConcurrentRequest, Stage, StageLink};
use crate::problem::{Instance, Link, Problem, ProblemRequest};
use crate::sequential::{PaperCosts, sequential_dp};
use crate::view::CostView;
use crate::{Pin, PlanError, PlanRequest, whole};
use std::collections::{BTreeMap, BTreeSet};
use trefoil_core::{LinkEnd, OperatorGraph, OperatorId, PlannedLink, Profile, TensorId, UnitAddress};

/// Views of the distinct models, and items as instances of them.
pub(crate) struct Workload<'a> {
    pub views: Vec<CostView<'a>>,
    pub instances: Vec<Instance>,
    links: Vec<Link>,
    pub requests: Vec<ProblemRequest>,
}

fn wrong(model: &str, reason: String) -> PlanError {
    PlanError::Workload { model: model.to_owned(), reason }
}

impl<'a> Workload<'a> {
    pub fn new(request: &ConcurrentRequest<'a>) -> Result<Self, PlanError> {
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
            // Not their modes, of which only the whole model is known.
            let known = |unit: &UnitAddress| {
                stages.iter().all(|stage| stage.profile.units.iter().any(|known| known.address == *unit))
            };
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
    pub fn is_one_inference(&self) -> bool {
        let plain = |request: &ProblemRequest| {
            let from_the_start = request.release_ms.to_bits() == 0;
            from_the_start && request.deadline_ms.is_none() && request.weight.is_finite() && request.weight > 0.0
        };
        matches!(self.instances.as_slice(), [Instance { iterations: 1, .. }])
            && self.links.is_empty()
            && self.requests.iter().all(plain)
    }

    /// Whether stages hand tensors on.
    pub fn is_linked(&self) -> bool {
        !self.links.is_empty()
    }

    /// The problem of one inference of a single one of the models, as [`Self::least`].
    pub fn least_of_one(views: &[&CostView<'_>], model: usize) -> Result<Problem, PlanError> {
        let one = Instance { model, item: 0, iterations: 1, request: 0 };
        Problem::least_of_instances(views, &single_operators(views), &[one], &[], vec![ProblemRequest::default()])
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
    pub fn planned_links(&self) -> Vec<PlannedLink> {
        let end = |(instance, tensor): (usize, TensorId)| {
            let Instance { model, item, .. } = &self.instances[instance];
            LinkEnd { model: *model as u32, item: *item, tensor }
        };
        self.links.iter().map(|link| PlannedLink { from: end(link.from), to: end(link.to) }).collect()
    }

    /// The problem whose jobs are single operators.
    pub fn problem(&self, views: &[&CostView<'_>]) -> Result<Problem, PlanError> {
        self.problem_of(views, &single_operators(views))
    }

    /// The problem whose jobs are the given groups of operators, per view.
    pub fn problem_of(&self, views: &[&CostView<'_>], groups: &[Vec<Vec<OperatorId>>]) -> Result<Problem, PlanError> {
        Problem::from_instances(views, groups, &self.instances, &self.links, self.requests.clone())
    }

    /// The problem whose jobs take the least that their operators can add to any segment: what bounds every plan.
    pub fn least(&self, views: &[&CostView<'_>]) -> Result<Problem, PlanError> {
        let groups = single_operators(views);
        Problem::least_of_instances(views, &groups, &self.instances, &self.links, self.requests.clone())
    }

    /// Tensors of a model that links hand on: each must leave the segment that makes it.
    pub fn handed_on(&self, model: usize) -> BTreeSet<TensorId> {
        let own = self.links.iter().filter(|link| self.instances[link.from.0].model == model);
        own.map(|link| link.from.1).collect()
    }

    /// What there is to start from: every model by the sequential recurrence or on its best single unit; and every way to give
    /// each model one unit, where there are few.
    pub fn hints(views: &[&CostView<'_>], problem: &Problem) -> Vec<Vec<u32>> {
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
pub(super) const MOST_HINTS: usize = 64;
/// Jobs of all of them together: large problems get fewer.
pub(super) const HINTED_JOBS: usize = 100_000;

fn single_operators(views: &[&CostView<'_>]) -> Vec<Vec<Vec<OperatorId>>> {
    views.iter().map(|view| view.graph.ids().map(|id| vec![id]).collect()).collect()
}
