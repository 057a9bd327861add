//! Plans: which segments, on which units, in which order, at which predicted cost, and why one may believe it.

use crate::{
    CoreError, Granularity, MeasurementId, OperatorGraph, OperatorId, Origin, Resource, TensorId, Timeline, Unit,
    UnitAddress, profile::ProfileIndex,
};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Name of the file format, first field of every plan.
pub const PLAN_FORMAT: &str = "trefoil-plan";
/// Version of the file format that this build writes and reads.
pub const PLAN_VERSION: u32 = 1;

/// What a plan minimises.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum Objective {
    /// Time of one inference, milliseconds.
    #[default]
    Latency,
    /// Energy of one inference, joules.
    Energy,
    /// Period of a stream, milliseconds per item.
    Throughput,
}

/// Index of a segment in [`Plan::segments`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SegmentId(pub u32);

/// Index of a task in [`Plan::tasks`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct TaskId(pub u32);

/// A cost as it stands in a plan: a number, how it was got, and the measurements it traces to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CostRef {
    /// Milliseconds.
    pub ms: f64,
    /// Joules, where powers are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub joules: Option<f64>,
    /// How it was got: `measured` when the whole thing was measured, `predicted` when composed from parts.
    pub origin: Origin,
    /// The measurements.
    pub measurements: Vec<MeasurementId>,
}

/// A convex set of operators on one unit, compiled as one sub-model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Segment {
    /// Index of the model in [`Plan::models`].
    pub model: u32,
    /// The unit.
    pub unit: UnitAddress,
    /// The operators, ascending.
    pub operators: Vec<OperatorId>,
    /// Tensors it reads from outside.
    pub inputs: Vec<TensorId>,
    /// Tensors it hands out.
    pub outputs: Vec<TensorId>,
    /// Cost of one execution (without transfers).
    pub cost: CostRef,
}

/// What a task does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "lowercase")]
pub enum Work {
    /// Execute a segment.
    Segment {
        /// Which.
        segment: SegmentId,
    },
    /// Make one tensor available to the task's unit.
    Transfer {
        /// Index of the model in [`Plan::models`].
        model: u32,
        /// Which tensor.
        tensor: TensorId,
        /// The unit it comes from; `None` for a model input from the host.
        from: Option<UnitAddress>,
    },
    /// Execute consecutive blocks (video).
    Blocks {
        /// First block execution.
        first: u32,
        /// How many.
        count: u32,
    },
}

/// One execution in a plan: (model, segment or block, iteration, item, unit).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// What.
    pub work: Work,
    /// Where; its resources are busy meanwhile.
    pub unit: UnitAddress,
    /// Repetition within one inference (a denoising loop's step); 0 when nothing repeats.
    #[serde(default)]
    pub iteration: u32,
    /// Which item of a stream or which request; 0 for a single inference.
    #[serde(default)]
    pub item: u32,
    /// Tasks that must have finished before.
    pub after: Vec<TaskId>,
    /// Cost of this execution.
    pub cost: CostRef,
}

/// The model a plan is for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedModel {
    /// Name.
    pub name: String,
    /// Fingerprint of the prepared model; `run` refuses a plan for another one.
    pub fingerprint: String,
    /// Granularity that operator ids refer to.
    pub granularity: Granularity,
    /// Number of operators, all of which the segments cover.
    pub operators: u32,
}

/// One request of a plan that serves several: an item of a model, when it arrives and what is asked of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PlannedRequest {
    /// Index of the model in [`Plan::models`].
    pub model: u32,
    /// The item, as in [`Task::item`].
    pub item: u32,
    /// The request that it is part of: an application's stages are complete together.
    #[serde(default)]
    pub request: u32,
    /// No task of the item starts before, in milliseconds of the plan's clock.
    pub arrival_ms: f64,
    /// When the item should be complete, in milliseconds of the plan's clock.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<f64>,
    /// Its weight beside the other requests.
    pub weight: f64,
}

/// What a planner proves of a plan under its own model and among the plans that it considers. The papers' literal planners
/// believe in a formula, serial planners consider plans that run one segment after another, `dag` single operators; so this is not
/// comparable between methods, as [`Plan::model_bound`] and [`Plan::gap`] are.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OwnClaim {
    /// What the planner believes the plan costs, in the objective's unit.
    pub value: f64,
    /// Among which plans, and under which model, in words.
    pub over: String,
    /// Lower bound under that model among those plans.
    pub bound: Option<f64>,
    /// `value / bound − 1`; `None` without a bound.
    pub gap: Option<f64>,
    /// Whether it is proven that none of those costs less under that model.
    pub exact: bool,
}

/// An item of a model, and one of its tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LinkEnd {
    /// Index of the model in [`Plan::models`].
    pub model: u32,
    /// The item, as in [`Task::item`].
    pub item: u32,
    /// The tensor.
    pub tensor: TensorId,
}

impl LinkEnd {
    /// Model and item.
    pub fn stage(&self) -> (u32, u32) {
        (self.model, self.item)
    }
}

/// A tensor handed on: what `from` makes is what `to` reads instead of a model input. Another stage's is its last iteration's;
/// a stage's own is that of its previous iteration, while the first iteration reads the model input or what another link hands
/// it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PlannedLink {
    /// A tensor that an operator makes.
    pub from: LinkEnd,
    /// A model input.
    pub to: LinkEnd,
}

/// A plan. Serialised as the plan file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Always [`PLAN_FORMAT`].
    pub format: String,
    /// Format version.
    pub version: u32,
    /// Planner name: `sequential`, `interval`, `single:UNIT`, `imported`, …
    pub method: String,
    /// What it minimises.
    pub objective: Objective,
    /// Models.
    pub models: Vec<PlannedModel>,
    /// Requests with their arrivals; empty when there is one request, which is there from the start.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub requests: Vec<PlannedRequest>,
    /// Whether it minimises the weighted mean completion of the requests instead of the end of the last.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub weighted: bool,
    /// What linked stages hand on to each other; empty where every model stands for itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<PlannedLink>,
    /// Units used, with their resources.
    pub units: Vec<Unit>,
    /// Segments.
    pub segments: Vec<Segment>,
    /// Tasks, topologically ordered by `after`.
    pub tasks: Vec<Task>,
    /// Order of tasks on each resource; a resource runs its tasks in this order.
    pub order: BTreeMap<String, Vec<TaskId>>,
    /// What its planner claims, in the objective's unit (ms or J).
    pub claimed: f64,
    /// Makespan by the simulator, in milliseconds.
    pub simulated_ms: f64,
    /// Energy by the simulator, in joules, of a plan that minimises energy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub simulated_j: Option<f64>,
    /// Lower bound on what the simulator says of **any** plan for the same question, in the objective's unit: whichever
    /// segments it has, in parallel or not. It means the same for every method, and bounds the cost model, not the machine.
    pub model_bound: Option<f64>,
    /// How far what the simulator says of this plan ([`Plan::simulated`]) is above `model_bound`, relatively; `None` without a bound.
    pub gap: Option<f64>,
    /// Whether no plan at all costs less by the simulator: `model_bound` is reached.
    pub exact: bool,
    /// What its planner proves under its own model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own: Option<OwnClaim>,
    /// Whether every segment's cost was measured whole (refinement finished).
    pub all_measured: bool,
    /// What a reader should know.
    #[serde(default)]
    pub notes: Vec<String>,
    /// Predicted timeline.
    pub timeline: Timeline,
}

impl Plan {
    /// Everything on one unit as one segment. `ms` is the predicted time, which `measurements` back; 0 without any.
    pub fn whole(
        graph: &OperatorGraph,
        unit: &Unit,
        ms: f64,
        measurements: Vec<MeasurementId>,
        origin: Origin,
    ) -> Self {
        let operators: Vec<_> = graph.ids().collect();
        let (inputs, outputs) = graph.boundary(&operators.iter().copied().collect());
        let all_measured = origin == Origin::Measured && !measurements.is_empty();
        let cost = CostRef { ms, joules: None, origin, measurements };
        let span = crate::Span {
            task: TaskId(0),
            label: graph.model.clone(),
            kind: crate::SpanKind::Compute,
            start_ms: 0.0,
            end_ms: ms,
        };
        let lanes = vec![crate::Lane { name: unit.address.to_string(), spans: vec![span] }];
        Self {
            format: PLAN_FORMAT.to_owned(),
            version: PLAN_VERSION,
            method: format!("single:{}", unit.address),
            objective: Objective::Latency,
            models: vec![PlannedModel {
                name: graph.model.clone(),
                fingerprint: graph.fingerprint.clone(),
                granularity: graph.granularity,
                operators: graph.len() as u32,
            }],
            requests: Vec::new(),
            weighted: false,
            links: Vec::new(),
            units: vec![unit.clone()],
            segments: vec![Segment {
                model: 0,
                unit: unit.address.clone(),
                operators,
                inputs,
                outputs,
                cost: cost.clone(),
            }],
            tasks: vec![Task {
                work: Work::Segment { segment: SegmentId(0) },
                unit: unit.address.clone(),
                iteration: 0,
                item: 0,
                after: Vec::new(),
                cost,
            }],
            order: unit.resources.iter().map(|resource| (resource.to_string(), vec![TaskId(0)])).collect(),
            claimed: ms,
            simulated_ms: ms,
            simulated_j: None,
            model_bound: None,
            gap: None,
            exact: false,
            own: None,
            all_measured,
            notes: Vec::new(),
            timeline: Timeline { origin: if origin == Origin::Simulated { origin } else { Origin::Predicted }, lanes },
        }
    }

    /// What the simulator says the plan costs, in the objective's unit: milliseconds of makespan, joules, or milliseconds of
    /// period or of weighted mean completion (which [`Plan::claimed`] is, slowdowns included).
    pub fn simulated(&self) -> f64 {
        match self.objective {
            Objective::Latency if self.weighted => self.claimed,
            Objective::Latency => self.simulated_ms,
            Objective::Energy => self.simulated_j.unwrap_or(self.claimed),
            Objective::Throughput => self.claimed,
        }
    }

    /// Bytes of weights that each unit holds: those of the distinct operators it executes. `graphs` are in the order of
    /// [`Plan::models`].
    pub fn weights_held(&self, graphs: &[&OperatorGraph]) -> BTreeMap<&UnitAddress, u64> {
        let mut seen = BTreeSet::new();
        let mut held: BTreeMap<&UnitAddress, u64> = BTreeMap::new();
        for segment in &self.segments {
            let Some(graph) = graphs.get(segment.model as usize) else { continue };
            for &id in segment.operators.iter().filter(|id| id.index() < graph.len()) {
                if seen.insert((&segment.unit, segment.model, id)) {
                    let held = held.entry(&segment.unit).or_default();
                    *held = held.saturating_add(graph.operator(id).weight_bytes);
                }
            }
        }
        held
    }

    /// The first unit that would hold more bytes of weights than its memory has: the unit, what it would hold, and its memory.
    pub fn over_memory(&self, graphs: &[&OperatorGraph]) -> Option<(&UnitAddress, u64, u64)> {
        self.weights_held(graphs).into_iter().find_map(|(address, held)| {
            let unit = self.units.iter().find(|unit| unit.address == *address)?;
            let most = unit.limits.memory_bytes?;
            (held > most).then_some((address, held, most))
        })
    }

    /// Number of places where consecutive data crosses from one unit to another: distinct (tensor, destination unit)
    /// pairs whose producer segment is on another unit.
    pub fn crossings(&self) -> usize {
        let mut producer: BTreeMap<(u32, TensorId), &UnitAddress> = BTreeMap::new();
        for segment in &self.segments {
            producer.extend(segment.outputs.iter().map(|&tensor| ((segment.model, tensor), &segment.unit)));
        }
        let mut crossings = BTreeSet::new();
        for segment in &self.segments {
            for &tensor in &segment.inputs {
                if producer.get(&(segment.model, tensor)).is_some_and(|unit| **unit != segment.unit) {
                    crossings.insert((segment.model, tensor, &segment.unit));
                }
            }
        }
        crossings.len()
    }

    /// Distinct units that execute segments.
    pub fn units_used(&self) -> BTreeSet<&UnitAddress> {
        self.segments.iter().map(|segment| &segment.unit).collect()
    }

    /// The resources of a unit of this plan.
    pub fn resources(&self, address: &UnitAddress) -> Option<&BTreeSet<Resource>> {
        self.units.iter().find(|unit| unit.address == *address).map(|unit| &unit.resources)
    }

    /// Checks the plan against the graphs it is for (in the order of [`Plan::models`]): version, fingerprints, every
    /// operator covered, and by one segment only or by segments of which no item and iteration executes two, segments
    /// convex with the right boundary, task order sane.
    ///
    /// # Errors
    /// [`CoreError::Version`], [`CoreError::WrongModel`] or [`CoreError::Graph`] with what is wrong.
    pub fn check(&self, graphs: &[&OperatorGraph]) -> Result<(), CoreError> {
        if self.format != PLAN_FORMAT || self.version != PLAN_VERSION {
            return Err(CoreError::Version {
                format: self.format.clone(),
                found: self.version,
                supported: PLAN_VERSION,
                hint: "plan again".to_owned(),
            });
        }
        let names = |graphs: &[&OperatorGraph]| {
            graphs
                .iter()
                .map(|graph| format!("`{}` ({})", graph.model, graph.fingerprint))
                .collect::<Vec<_>>()
                .join(", ")
        };
        let planned = || {
            self.models
                .iter()
                .map(|model| format!("{} ({})", model.name, model.fingerprint))
                .collect::<Vec<_>>()
                .join(", ")
        };
        let same = self.models.len() == graphs.len()
            && self.models.iter().zip(graphs).all(|(model, graph)| {
                model.fingerprint == graph.fingerprint
                    && model.granularity == graph.granularity
                    && model.operators as usize == graph.len()
            });
        if !same {
            return Err(CoreError::WrongModel { want: planned(), have: names(graphs) });
        }
        self.check_links(graphs)?;
        for (model, graph) in graphs.iter().enumerate() {
            let fail = |reason: String| Err(CoreError::Graph { model: graph.model.clone(), reason });
            // Segments that cover an operator: items and iterations may split a model differently.
            let mut covered: Vec<Vec<usize>> = vec![Vec::new(); graph.len()];
            let mut apart = BTreeMap::new();
            for (index, segment) in self.segments.iter().enumerate().filter(|(_, s)| s.model as usize == model) {
                let set: BTreeSet<_> = segment.operators.iter().copied().collect();
                for &id in &set {
                    match covered.get_mut(id.index()) {
                        None => return fail(format!("plan segment {index} names operator {id}, which does not exist")),
                        Some(others) => {
                            let mut apart =
                                |other| *apart.entry((other, index)).or_insert_with(|| self.run_apart(other, index));
                            if !others.iter().all(|&other| apart(other)) {
                                return fail(format!("plan covers operator {id} twice"));
                            }
                            others.push(index);
                        }
                    }
                }
                if !graph.is_convex(&set) {
                    return fail(format!("plan segment {index} on {} is not convex", segment.unit));
                }
                let (inputs, outputs) = graph.boundary(&set);
                if segment.inputs != inputs || segment.outputs != outputs {
                    return fail(format!("plan segment {index} on {} states a wrong boundary", segment.unit));
                }
            }
            if let Some(missing) = covered.iter().position(Vec::is_empty) {
                return fail(format!("plan leaves out operator {missing} `{}`", graph.operators[missing].name));
            }
        }
        for (index, task) in self.tasks.iter().enumerate() {
            if let Some(bad) = task.after.iter().find(|before| before.0 as usize >= index) {
                return Err(CoreError::Graph {
                    model: planned(),
                    reason: format!("plan task {index} waits for task {}, which does not come before it", bad.0),
                });
            }
            if self.resources(&task.unit).is_none() {
                return Err(CoreError::UnknownUnit {
                    want: task.unit.to_string(),
                    have: self.units.iter().map(|unit| unit.address.to_string()).collect::<Vec<_>>().join(", "),
                });
            }
        }
        Ok(())
    }

    /// Whether both segments are executed and no item and iteration executes both.
    fn run_apart(&self, first: usize, second: usize) -> bool {
        let runs = |segment: usize| -> BTreeSet<(u32, u32)> {
            let executes = |task: &&Task| task.work == Work::Segment { segment: SegmentId(segment as u32) };
            self.tasks.iter().filter(executes).map(|task| (task.item, task.iteration)).collect()
        };
        let (first, second) = (runs(first), runs(second));
        !first.is_empty() && !second.is_empty() && first.is_disjoint(&second)
    }

    fn check_links(&self, graphs: &[&OperatorGraph]) -> Result<(), CoreError> {
        for link in &self.links {
            let tensor = |end: &LinkEnd| graphs.get(end.model as usize)?.tensors.get(end.tensor.index());
            let graph =
                |end: &LinkEnd| graphs.get(end.model as usize).map_or_else(String::new, |graph| graph.model.clone());
            let fail = |end: &LinkEnd, reason: String| Err(CoreError::Graph { model: graph(end), reason });
            let (Some(from), Some(to)) = (tensor(&link.from), tensor(&link.to)) else {
                return fail(&link.to, "a link of the plan names a model or tensor that does not exist".to_owned());
            };
            if from.producer.is_none() || to.producer.is_some() {
                let reason = format!("a link hands `{}` on as `{}`; it must be made, and read", from.name, to.name);
                return fail(&link.to, reason);
            }
            if (from.bytes, from.dtype) != (to.bytes, to.dtype) {
                let reason = format!("a link hands {} on as {}", from.info(), to.info());
                return fail(&link.to, reason);
            }
        }
        Ok(())
    }

    /// Checks that every measurement the plan cites is in the profile.
    ///
    /// # Errors
    /// [`CoreError::DanglingMeasurement`] with the first missing id.
    pub fn check_costs(&self, index: &ProfileIndex<'_>) -> Result<(), CoreError> {
        let segments =
            self.segments.iter().enumerate().map(|(n, segment)| (format!("plan segment {n}"), &segment.cost));
        let tasks = self.tasks.iter().enumerate().map(|(n, task)| (format!("plan task {n}"), &task.cost));
        for (citer, cost) in segments.chain(tasks) {
            if let Some(id) = cost.measurements.iter().find(|id| index.by_id(id).is_none()) {
                return Err(CoreError::DanglingMeasurement { citer, id: id.0.clone() });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::tests::from_edges;
    use crate::{UnitKind, UnitLimits};

    fn unit(address: &str) -> Unit {
        Unit {
            address: address.parse().unwrap(),
            kind: UnitKind::Cpu,
            resources: BTreeSet::from([Resource::Device(address.to_owned())]),
            limits: UnitLimits::default(),
            simulated: false,
            description: None,
        }
    }

    /// Item 0 runs whole on one unit, item 1 whole on another: the same operators in two segments.
    fn two_items() -> (OperatorGraph, Plan) {
        let graph = from_edges(3, &[(0, 1), (1, 2)], 16);
        let mut plan = Plan::whole(&graph, &unit("a:CPU"), 1.0, Vec::new(), Origin::Predicted);
        let other = Plan::whole(&graph, &unit("b:CPU"), 2.0, Vec::new(), Origin::Predicted);
        plan.units.extend(other.units);
        plan.segments.extend(other.segments);
        plan.tasks.extend(other.tasks.into_iter().map(|task| Task {
            work: Work::Segment { segment: SegmentId(1) },
            item: 1,
            ..task
        }));
        (graph, plan)
    }

    #[test]
    fn items_may_split_a_model_differently_but_run_no_operator_twice() {
        let (graph, mut plan) = two_items();
        plan.check(&[&graph]).unwrap();
        plan.tasks[1].item = 0;
        let error = plan.check(&[&graph]).unwrap_err().to_string();
        assert!(error.contains("covers operator 0 twice"), "{error}");
        plan.tasks.truncate(1);
        assert!(plan.check(&[&graph]).is_err(), "a segment that nothing executes covers operators again");
    }

    #[test]
    fn requests_survive_json_and_are_absent_when_there_is_one() {
        let (_, mut plan) = two_items();
        assert!(!serde_json::to_string(&plan).unwrap().contains("requests"));
        let request =
            PlannedRequest { model: 0, item: 1, request: 0, arrival_ms: 0.5, deadline_ms: Some(3.0), weight: 2.0 };
        plan.requests.push(request);
        let again: Plan = serde_json::from_str(&serde_json::to_string(&plan).unwrap()).unwrap();
        assert_eq!(again, plan);
    }
}
