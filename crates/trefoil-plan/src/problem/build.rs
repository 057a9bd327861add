//! Problems from profiles.

use super::{Job, Problem, ProblemRequest, ProblemTensor, ProblemUnit};
use crate::simulate::{SimulationModel, resource_keys};
use crate::view::CostView;
use crate::{PlanError, PlanRequest};
use std::collections::BTreeMap;
use trefoil_core::{CoreError, OperatorClass, OperatorId, TensorId, UnitAddress};

/// One item of one model: what becomes jobs.
#[derive(Debug, Clone)]
pub(crate) struct Instance {
    /// Index of the view.
    pub model: usize,
    pub item: u32,
    /// How often the whole model is repeated within the item, at least once.
    pub iterations: u32,
    /// Index of its request.
    pub request: u32,
}

/// A tensor of one instance that is an input of another (or of the same, one iteration later).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Link {
    /// Instance and tensor that it made; its last iteration's, or the previous iteration's if the instances are equal.
    pub from: (usize, TensorId),
    /// Instance and model input of it.
    pub to: (usize, TensorId),
}

/// Milliseconds of a group of operators on a unit, or why it cannot run there.
type Price<'p> = dyn Fn(&[OperatorId], usize) -> Result<f64, String> + 'p;

impl Problem {
    /// The problem of one model: every operator is a job.
    ///
    /// # Errors
    /// Whatever is wrong with the request, as for [`crate::plan`].
    pub fn from_request(request: &PlanRequest<'_>) -> Result<Self, PlanError> {
        Self::from_view(&CostView::new(request)?)
    }

    pub(crate) fn from_view(view: &CostView<'_>) -> Result<Self, PlanError> {
        let groups: Vec<Vec<OperatorId>> = view.graph.ids().map(|id| vec![id]).collect();
        Self::from_groups(view, &groups)
    }

    /// The problem of one model whose jobs are convex groups of operators (each ascending) that cover it.
    pub(crate) fn from_groups(view: &CostView<'_>, groups: &[Vec<OperatorId>]) -> Result<Self, PlanError> {
        let instance = Instance { model: 0, item: 0, iterations: 1, request: 0 };
        let requests = vec![ProblemRequest::default()];
        Self::from_instances(&[view], &[groups.to_vec()], &[instance], &[], requests)
    }

    /// The problem of one model whose jobs take the least that their operators can add to any segment; also of a model whose
    /// operators run inside larger segments only.
    pub(crate) fn of_least(view: &CostView<'_>) -> Result<Self, PlanError> {
        let groups: Vec<Vec<OperatorId>> = view.graph.ids().map(|id| vec![id]).collect();
        let instance = Instance { model: 0, item: 0, iterations: 1, request: 0 };
        Self::least_of_instances(&[view], &[groups], &[instance], &[], vec![ProblemRequest::default()])
    }

    /// The same for several instances of several models.
    pub(crate) fn least_of_instances(
        views: &[&CostView<'_>],
        groups: &[Vec<Vec<OperatorId>>],
        instances: &[Instance],
        links: &[Link],
        requests: Vec<ProblemRequest>,
    ) -> Result<Self, PlanError> {
        let price = |view: &CostView<'_>, operators: &[OperatorId], unit: usize| {
            let sum = operators.iter().map(|&id| view.estimates[unit].least[id.index()]).sum::<f64>();
            match operators.iter().find(|&&id| !view.possible(id, unit)) {
                None => Ok(sum),
                Some(&id) => Err(view.why_impossible(id, unit)),
            }
        };
        let prices: Vec<_> = views
            .iter()
            .map(|&view| move |operators: &[OperatorId], unit: usize| price(view, operators, unit))
            .collect();
        let prices: Vec<&Price<'_>> = prices.iter().map(|price| price as &Price<'_>).collect();
        crate::quality::cheapest_cuts(&Self::priced(views, groups, instances, links, requests, &prices)?, views)
    }

    /// The problem of several instances of several models. `groups` are per view; all views have the same units.
    pub(crate) fn from_instances(
        views: &[&CostView<'_>],
        groups: &[Vec<Vec<OperatorId>>],
        instances: &[Instance],
        links: &[Link],
        requests: Vec<ProblemRequest>,
    ) -> Result<Self, PlanError> {
        let prices: Vec<_> = views
            .iter()
            .map(|view| move |operators: &[OperatorId], unit: usize| view.segment_ms(operators, unit))
            .collect();
        let prices: Vec<&Price<'_>> = prices.iter().map(|price| price as &Price<'_>).collect();
        Self::priced(views, groups, instances, links, requests, &prices)
    }

    /// The same with the price of a group on a unit, per view, or why it cannot run there.
    fn priced(
        views: &[&CostView<'_>],
        groups: &[Vec<Vec<OperatorId>>],
        instances: &[Instance],
        links: &[Link],
        requests: Vec<ProblemRequest>,
        prices: &[&Price<'_>],
    ) -> Result<Self, PlanError> {
        let Some(&first) = views.first() else { return Err(PlanError::NoUnits) };
        if let Some(view) = views.iter().find(|view| view.table.units != first.table.units) {
            return Err(PlanError::Workload {
                model: view.graph.model.clone(),
                reason: format!("it was measured on {}, another on {}", view.unit_names(), first.unit_names()),
            });
        }
        let (units, resources) = machine(first);
        let addresses: Vec<&UnitAddress> = first.table.units.iter().collect();
        let indices: Vec<_> = views.iter().map(|view| &view.index).collect();
        let model = SimulationModel::of_machine(&indices, &addresses.iter().copied().collect())?;
        let mut builder = Builder { views, instances, templates: Vec::new(), job_of: Vec::new(), jobs: Vec::new() };
        for ((view, groups), price) in views.iter().zip(groups).zip(prices) {
            builder.templates.push(templates(view, groups, price)?);
        }
        builder.add_jobs(groups);
        let tensors = builder.tensors(groups, links);
        Self::new(units, resources, builder.jobs, tensors, requests, model.factors(&addresses), model.idle_watts)
    }
}

/// Units and names of resources.
fn machine(view: &CostView<'_>) -> (Vec<ProblemUnit>, Vec<String>) {
    let mut names: Vec<String> = Vec::new();
    let units = view.units.iter().enumerate().map(|(index, unit)| {
        let resources = resource_keys(unit).into_iter().map(|key| {
            let known = names.iter().position(|name| *name == key);
            known.unwrap_or_else(|| {
                names.push(key);
                names.len() - 1
            }) as u32
        });
        ProblemUnit {
            address: unit.address.clone(),
            resources: resources.collect(),
            accelerator: view.table.accelerator[index],
            watts: view.table.watts[index],
            memory_bytes: unit.limits.memory_bytes,
        }
    });
    (units.collect(), names)
}

/// Jobs of one iteration of a model, of item 0.
fn templates(view: &CostView<'_>, groups: &[Vec<OperatorId>], price: &Price<'_>) -> Result<Vec<Job>, PlanError> {
    let jobs = groups.iter().map(|operators| {
        let name = operators.first().map_or_else(String::new, |&id| view.graph.operator(id).name.clone());
        let mut reasons = Vec::new();
        let ms: Vec<f64> = (0..view.unit_count())
            .map(|unit| match price(operators, unit) {
                Ok(ms) => ms,
                Err(reason) => {
                    reasons.push(format!("{}: {reason}", view.table.units[unit]));
                    f64::INFINITY
                }
            })
            .collect();
        if ms.iter().all(|ms| ms.is_infinite()) {
            let first = operators.first().copied().unwrap_or(OperatorId(0));
            let operator = view.graph.operator(first);
            return Err(CoreError::Unplaceable {
                operator: first.0,
                name: operator.name.clone(),
                kind: operator.kind.clone(),
                reasons: reasons.join("; "),
            }
            .into());
        }
        Ok(Job {
            name,
            model: 0,
            item: 0,
            iteration: 0,
            operators: operators.clone(),
            class: (0..view.unit_count()).map(|unit| view.class_of(operators, unit)).collect(),
            ms,
            weight_bytes: view.graph.weight_bytes(operators.iter().copied()),
            request: 0,
        })
    });
    jobs.collect()
}

struct Builder<'v, 'a> {
    views: &'v [&'v CostView<'a>],
    instances: &'v [Instance],
    /// Per view.
    templates: Vec<Vec<Job>>,
    /// Per instance and iteration: first job.
    job_of: Vec<Vec<u32>>,
    jobs: Vec<Job>,
}

impl Builder<'_, '_> {
    fn add_jobs(&mut self, groups: &[Vec<Vec<OperatorId>>]) {
        for instance in self.instances {
            let mut firsts = Vec::new();
            for iteration in 0..instance.iterations.max(1) {
                firsts.push(self.jobs.len() as u32);
                self.jobs.extend(self.templates[instance.model].iter().map(|job| Job {
                    model: instance.model as u32,
                    item: instance.item,
                    iteration,
                    request: instance.request,
                    ..job.clone()
                }));
            }
            debug_assert_eq!(groups[instance.model].len(), self.templates[instance.model].len());
            self.job_of.push(firsts);
        }
    }

    fn tensors(&self, groups: &[Vec<Vec<OperatorId>>], links: &[Link]) -> Vec<ProblemTensor> {
        // Group of each operator, per view.
        let group_of: Vec<Vec<u32>> = self
            .views
            .iter()
            .zip(groups)
            .map(|(view, groups)| {
                let mut of = vec![0; view.graph.len()];
                for (index, operators) in groups.iter().enumerate() {
                    for id in operators {
                        of[id.index()] = index as u32;
                    }
                }
                of
            })
            .collect();
        let into: BTreeMap<(usize, TensorId), Vec<Link>> =
            links.iter().fold(BTreeMap::new(), |mut map: BTreeMap<_, Vec<Link>>, link| {
                map.entry(link.to).or_default().push(*link);
                map
            });
        // Readers by where a tensor really comes from: (instance, iteration, tensor), iteration 0 for the host.
        let mut readers: BTreeMap<(usize, u32, TensorId), Vec<u32>> = BTreeMap::new();
        for (number, instance) in self.instances.iter().enumerate() {
            let graph = self.views[instance.model].graph;
            for (iteration, &first) in self.job_of[number].iter().enumerate() {
                for (at, edge) in graph.tensors.iter().enumerate() {
                    let tensor = TensorId(at as u32);
                    let source = self.source((number, iteration as u32, tensor), &into);
                    let list = readers.entry(source).or_default();
                    list.extend(edge.consumers.iter().map(|id| first + group_of[instance.model][id.index()]));
                }
            }
        }
        let mut tensors = Vec::new();
        for ((number, iteration, tensor), mut consumers) in readers {
            let instance = &self.instances[number];
            let view = self.views[instance.model];
            let edge = view.graph.tensor(tensor);
            let first = self.job_of[number][iteration as usize];
            let producer = edge.producer.map(|id| first + group_of[instance.model][id.index()]);
            consumers.sort_unstable();
            consumers.dedup();
            consumers.retain(|&job| Some(job) != producer);
            let last = iteration + 1 == instance.iterations.max(1);
            let linked = links.iter().any(|link| link.from == (number, tensor) && link.to.0 != number);
            let is_output = view.is_output[tensor.index()] && last && producer.is_some() && !linked;
            if consumers.is_empty() && !is_output {
                continue;
            }
            let units = view.unit_count();
            let mut transfer_ms = vec![0.0; (units + 1) * units];
            for to in 0..units {
                if producer.is_none() {
                    transfer_ms[units * units + to] = view.input_ms(tensor, to).0;
                    continue;
                }
                for from in (0..units).filter(|&from| from != to) {
                    transfer_ms[from * units + to] = view.table.transfer(from, to).ms(edge.bytes);
                }
            }
            tensors.push(ProblemTensor {
                model: instance.model as u32,
                tensor,
                producer,
                consumers,
                bytes: edge.bytes,
                transfer_ms,
                to_host_ms: (0..units).map(|unit| view.output_ms(tensor, unit).0).collect(),
                is_output,
            });
        }
        tensors
    }

    /// Where a tensor as an instance's iteration knows it really comes from.
    fn source(
        &self,
        at: (usize, u32, TensorId),
        into: &BTreeMap<(usize, TensorId), Vec<Link>>,
    ) -> (usize, u32, TensorId) {
        let (number, iteration, tensor) = at;
        if self.views[self.instances[number].model].graph.tensor(tensor).producer.is_some() {
            return at;
        }
        let links = into.get(&(number, tensor)).map_or(&[][..], Vec::as_slice);
        // A loop's own value from the second iteration on, else what another stage made, else the host.
        if iteration > 0
            && let Some(link) = links.iter().find(|link| link.from.0 == number)
        {
            return self.source((number, iteration - 1, link.from.1), into);
        }
        match links.iter().find(|link| link.from.0 != number) {
            Some(link) => {
                let last = self.instances[link.from.0].iterations.max(1) - 1;
                self.source((link.from.0, last, link.from.1), into)
            }
            None => (number, 0, tensor),
        }
    }
}

impl CostView<'_> {
    /// The class that the simulator gives to a segment of these operators on a unit: a single operator's own, else what most of
    /// their isolated time is.
    pub(crate) fn class_of(&self, operators: &[OperatorId], unit: usize) -> OperatorClass {
        if let [only] = operators {
            return self.graph.operator(*only).class;
        }
        let time = |class: OperatorClass| -> f64 {
            let ids = operators.iter().filter(|id| self.graph.operator(**id).class == class);
            ids.filter_map(|&id| self.table.cost(id, unit)).map(|cost| cost.ms).sum()
        };
        if time(OperatorClass::Compute) > time(OperatorClass::Memory) {
            OperatorClass::Compute
        } else {
            OperatorClass::Memory
        }
    }
}
