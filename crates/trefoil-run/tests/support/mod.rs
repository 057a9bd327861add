//! A backend whose segments compute checksums, graphs and plans made from edges, and the sequential reference.
#![allow(dead_code)] // each test and bench uses its part

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use trefoil_core::{
    CostRef, DataType, Granularity, Objective, Operator, OperatorClass, OperatorGraph, OperatorId, Origin, Plan,
    Resource, Segment, SegmentId, Signature, Task, TaskId, TensorEdge, TensorId, TensorInfo, Timeline, Unit,
    UnitAddress, UnitKind, UnitLimits, Work,
    plan::{PLAN_FORMAT, PLAN_VERSION, PlannedModel},
};
use trefoil_run::{ExtractedSegments, RunError, SegmentSource};
use trefoil_units::{
    Availability, Backend, Buffer, CompileOptions, Compiled, Port, PortMemory, Ports, RunTiming, SubModel, UnitError,
};

/// What a fake segment does on an execution, counted from 1.
#[derive(Clone, Debug)]
pub enum Mishap {
    Error,
    Panic,
}

/// What fake segments do.
#[derive(Clone, Debug, Default)]
pub struct Behaviour {
    /// Segment index → (execution, what happens).
    pub mishaps: BTreeMap<u32, (u32, Mishap)>,
    /// Segment that does not compile.
    pub refuses: Option<u32>,
    /// Compute nothing at all.
    pub idle: bool,
    /// Claim that ports are copied.
    pub copied: bool,
}

/// The backend `fake`; its units are whatever the plan says.
#[derive(Default)]
pub struct Fake {
    pub behaviour: Behaviour,
    pub executions: Arc<AtomicU32>,
    pub threads: Mutex<BTreeSet<String>>,
}

impl Fake {
    pub fn leak(behaviour: Behaviour) -> &'static Self {
        Box::leak(Box::new(Self { behaviour, ..Self::default() }))
    }

    /// Finds every unit of the plan on this backend.
    pub fn find(
        &'static self,
        plan: &Plan,
    ) -> impl Fn(&UnitAddress) -> Result<(&'static dyn Backend, Unit), UnitError> + use<> {
        let units = plan.units.clone();
        move |address| {
            let unit = units.iter().find(|unit| unit.address == *address).cloned();
            unit.map(|unit| (self as &'static dyn Backend, unit)).ok_or_else(|| UnitError::UnknownDevice {
                backend: "fake".into(),
                device: address.device.clone(),
                have: "others".into(),
            })
        }
    }
}

impl Backend for Fake {
    fn name(&self) -> &'static str {
        "fake"
    }
    fn check(&self) -> Availability {
        Availability::Available { version: "1".into(), library: None }
    }
    fn units(&self) -> Vec<(Unit, Availability)> {
        Vec::new()
    }
    fn unit(&self, address: &UnitAddress) -> Result<Unit, UnitError> {
        Ok(unit(&address.to_string(), &[]))
    }
    fn compile(&self, model: &SubModel, unit: &Unit, _: &CompileOptions) -> Result<Box<dyn Compiled>, UnitError> {
        let segment: u32 = model.path.file_stem().unwrap().to_str().unwrap().parse().unwrap();
        self.threads.lock().unwrap().insert(format!("{:?}", std::thread::current().name()));
        if self.behaviour.refuses == Some(segment) {
            return Err(UnitError::Compile {
                unit: unit.address.to_string(),
                model: model.path.display().to_string(),
                reason: "no such kernel".into(),
            });
        }
        let memory = if self.behaviour.copied { PortMemory::Copied } else { PortMemory::Caller };
        let ports = |infos: &[TensorInfo]| infos.iter().map(|info| Port { info: info.clone(), memory }).collect();
        Ok(Box::new(FakeCompiled {
            ports: Ports { inputs: ports(&model.inputs), outputs: ports(&model.outputs) },
            unit: unit.address.to_string(),
            segment,
            behaviour: self.behaviour.clone(),
            runs: 0,
            executions: Arc::clone(&self.executions),
            thread: std::thread::current().id(),
            bound: None,
        }))
    }
    fn versions(&self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }
}

struct FakeCompiled {
    ports: Ports,
    unit: String,
    segment: u32,
    behaviour: Behaviour,
    runs: u32,
    executions: Arc<AtomicU32>,
    thread: std::thread::ThreadId,
    bound: Option<(Vec<Buffer>, Vec<Buffer>)>,
}

impl Compiled for FakeCompiled {
    fn ports(&self) -> &Ports {
        &self.ports
    }
    unsafe fn bind(&mut self, inputs: &[Buffer], outputs: &[Buffer]) -> Result<(), UnitError> {
        for (port, buffer) in self.ports.inputs.iter().zip(inputs).chain(self.ports.outputs.iter().zip(outputs)) {
            assert_eq!(port.info.bytes() as usize, buffer.length);
            assert_eq!(buffer.pointer as usize % trefoil_core::tensor::TENSOR_ALIGNMENT, 0);
        }
        assert_eq!((self.ports.inputs.len(), self.ports.outputs.len()), (inputs.len(), outputs.len()));
        self.bound = Some((inputs.to_vec(), outputs.to_vec()));
        Ok(())
    }
    fn submit(&mut self) -> Result<(), UnitError> {
        if self.behaviour.idle {
            return Ok(());
        }
        assert_eq!(self.thread, std::thread::current().id(), "runs on the thread that compiled it");
        self.runs += 1;
        self.executions.fetch_add(1, Ordering::Relaxed);
        match self.behaviour.mishaps.get(&self.segment) {
            Some((run, Mishap::Error)) if *run == self.runs => {
                return Err(UnitError::Run {
                    unit: self.unit.clone(),
                    model: self.segment.to_string(),
                    reason: "boom".into(),
                });
            }
            Some((run, Mishap::Panic)) if *run == self.runs => panic!("fake\npanic"),
            _ => {}
        }
        let (inputs, outputs) = self.bound.as_ref().expect("bound");
        // Scribble first: an output that aliases an input (or a live value) makes the checksum wrong.
        for buffer in outputs {
            // SAFETY: bound buffers are valid, and this is the running task's output.
            unsafe { buffer.pointer.write_bytes(0xA5, buffer.length) };
        }
        std::hint::black_box(&outputs);
        let read: Vec<&[u8]> = inputs
            .iter()
            // SAFETY: bound buffers are valid, and nobody writes a running task's inputs.
            .map(|buffer| unsafe { std::slice::from_raw_parts(buffer.pointer, buffer.length) })
            .collect();
        for (number, buffer) in outputs.iter().enumerate() {
            let made = checksum_bytes(self.segment, number, &read, buffer.length);
            // SAFETY: as above.
            unsafe { buffer.pointer.copy_from_nonoverlapping(made.as_ptr(), buffer.length) };
        }
        Ok(())
    }
    fn wait(&mut self) -> Result<RunTiming, UnitError> {
        Ok(RunTiming::default())
    }
}

/// What a fake segment writes: bytes that depend on every byte it reads.
pub fn checksum_bytes(segment: u32, output: usize, inputs: &[&[u8]], length: usize) -> Vec<u8> {
    let mut state = 0xcbf2_9ce4_8422_2325u64 ^ (u64::from(segment) << 32) ^ output as u64;
    for byte in inputs.iter().copied().flatten() {
        state = (state ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    (0..length)
        .map(|index| {
            let mixed = (state ^ index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (mixed >> 32) as u8
        })
        .collect()
}

/// A unit `fake:NAME` holding `device:` resources of the given names.
pub fn unit(address: &str, resources: &[&str]) -> Unit {
    Unit {
        address: address.parse().unwrap(),
        kind: UnitKind::Npu,
        resources: resources.iter().map(|name| Resource::Device((*name).to_owned())).collect(),
        limits: UnitLimits::default(),
        simulated: false,
        description: None,
    }
}

/// A graph from edges `(from, to)` with `from < to`; operator `i` makes one tensor of `bytes(i)` bytes.
pub fn graph(count: u32, edges: &[(u32, u32)], bytes: impl Fn(u32) -> u64) -> OperatorGraph {
    let edge = |name: String, size: u64, producer: Option<OperatorId>, consumers: Vec<OperatorId>| TensorEdge {
        name,
        dtype: DataType::U8,
        shape: vec![size],
        bytes: size,
        producer,
        consumers,
    };
    let mut tensors = vec![edge("x".into(), 64, None, Vec::new())];
    for index in 0..count {
        let consumers: BTreeSet<_> =
            edges.iter().filter(|(from, _)| *from == index).map(|&(_, to)| OperatorId(to)).collect();
        tensors.push(edge(format!("t{index}"), bytes(index), Some(OperatorId(index)), consumers.into_iter().collect()));
    }
    let mut operators = Vec::new();
    for index in 0..count {
        let mut inputs: Vec<_> =
            edges.iter().filter(|(_, to)| *to == index).map(|&(from, _)| TensorId(from + 1)).collect();
        inputs.sort_unstable();
        inputs.dedup();
        if inputs.is_empty() {
            inputs.push(TensorId(0));
            tensors[0].consumers.push(OperatorId(index));
        }
        operators.push(Operator {
            name: format!("op{index}"),
            kind: "Relu".into(),
            nodes: vec![index],
            inputs,
            outputs: vec![TensorId(index + 1)],
            signature: Signature(format!("{index:032x}")),
            class: OperatorClass::Memory,
            flops: None,
            weight_bytes: 0,
        });
    }
    let outputs = (1..=count).map(TensorId).filter(|id| tensors[id.index()].consumers.is_empty()).collect();
    let graph = OperatorGraph {
        model: "test".into(),
        fingerprint: "0".repeat(32),
        granularity: Granularity::Node,
        tensors,
        operators,
        inputs: vec![TensorId(0)],
        outputs,
    };
    graph.validate().unwrap();
    graph
}

fn no_cost() -> CostRef {
    CostRef { ms: 0.0, joules: None, origin: Origin::Declared, measurements: Vec::new() }
}

/// A plan over `graph`: segment `s` holds operators `cuts[s].0` and runs on unit `cuts[s].1` (index in `units`).
/// Tasks run in the order of `sequence` (segment indices per item, a linear extension); `transfers` inserts transfer
/// tasks at crossings.
pub fn plan(
    graph: &OperatorGraph,
    units: &[Unit],
    cuts: &[(Vec<u32>, usize)],
    sequence: &[(usize, u32)],
    transfers: bool,
) -> Plan {
    let segments: Vec<_> = cuts
        .iter()
        .map(|(operators, unit)| {
            let set: BTreeSet<_> = operators.iter().copied().map(OperatorId).collect();
            let (inputs, outputs) = graph.boundary(&set);
            Segment {
                model: 0,
                unit: units[*unit].address.clone(),
                operators: set.into_iter().collect(),
                inputs,
                outputs,
                cost: no_cost(),
            }
        })
        .collect();
    let mut tasks = Vec::new();
    let mut order: BTreeMap<String, Vec<TaskId>> = BTreeMap::new();
    let mut producer: HashMap<(u32, TensorId), TaskId> = HashMap::new();
    for &(segment, item) in sequence {
        let description = &segments[segment];
        let mut after = BTreeSet::new();
        for &tensor in &description.inputs {
            let Some(&made) = producer.get(&(item, tensor)) else { continue };
            let from: &Task = &tasks[made.0 as usize];
            if transfers && from.unit != description.unit {
                let work = Work::Transfer { model: 0, tensor, from: Some(from.unit.clone()) };
                let unit = description.unit.clone();
                tasks.push(Task { work, unit, iteration: 0, item, after: vec![made], cost: no_cost() });
                after.insert(TaskId(tasks.len() as u32 - 1));
            } else {
                after.insert(made);
            }
        }
        let id = TaskId(tasks.len() as u32);
        for resource in &units[cuts[segment].1].resources {
            order.entry(resource.to_string()).or_default().push(id);
        }
        for &tensor in &description.outputs {
            producer.insert((item, tensor), id);
        }
        let work = Work::Segment { segment: SegmentId(segment as u32) };
        let unit = description.unit.clone();
        tasks.push(Task { work, unit, iteration: 0, item, after: after.into_iter().collect(), cost: no_cost() });
    }
    Plan {
        format: PLAN_FORMAT.into(),
        version: PLAN_VERSION,
        method: "test".into(),
        objective: Objective::Latency,
        models: vec![PlannedModel {
            name: graph.model.clone(),
            fingerprint: graph.fingerprint.clone(),
            granularity: graph.granularity,
            operators: graph.len() as u32,
        }],
        requests: Vec::new(),
        links: Vec::new(),
        units: units.to_vec(),
        segments,
        tasks,
        order,
        claimed: 0.0,
        simulated_ms: 0.0,
        model_bound: None,
        gap: None,
        exact: false,
        own: None,
        simulated_j: None,
        weighted: false,
        all_measured: false,
        notes: Vec::new(),
        timeline: Timeline { origin: Origin::Predicted, lanes: Vec::new() },
    }
}

/// One sub-model per segment, named by its index, ports from the graph.
pub struct FakeSource<'a>(pub &'a OperatorGraph);

impl SegmentSource for FakeSource<'_> {
    fn segment(&self, plan: &Plan, segment: SegmentId) -> Result<SubModel, RunError> {
        let description = &plan.segments[segment.0 as usize];
        let infos = |tensors: &[TensorId]| tensors.iter().map(|&tensor| self.0.tensor(tensor).info()).collect();
        Ok(SubModel {
            path: PathBuf::from(format!("{}.onnx", segment.0)),
            inputs: infos(&description.inputs),
            outputs: infos(&description.outputs),
        })
    }
}

pub fn extracted(graph: &OperatorGraph, plan: &Plan) -> ExtractedSegments {
    ExtractedSegments::of(plan, &FakeSource(graph)).unwrap()
}

/// Outputs of one item, computed one segment after the other in buffers of their own.
pub fn reference(graph: &OperatorGraph, plan: &Plan, input: &[u8]) -> Vec<Vec<u8>> {
    let mut values: HashMap<TensorId, Vec<u8>> = HashMap::from([(TensorId(0), input.to_vec())]);
    let mut left: BTreeSet<usize> = (0..plan.segments.len()).collect();
    while !left.is_empty() {
        let next = *left
            .iter()
            .find(|&&index| plan.segments[index].inputs.iter().all(|tensor| values.contains_key(tensor)))
            .expect("segments are acyclic");
        left.remove(&next);
        let segment = &plan.segments[next];
        let made: Vec<_> = {
            let inputs: Vec<&[u8]> = segment.inputs.iter().map(|tensor| values[tensor].as_slice()).collect();
            let sizes = segment.outputs.iter().enumerate();
            sizes
                .map(|(number, &tensor)| {
                    (tensor, checksum_bytes(next as u32, number, &inputs, graph.tensor(tensor).bytes as usize))
                })
                .collect()
        };
        values.extend(made);
    }
    graph.outputs.iter().map(|tensor| values[tensor].clone()).collect()
}

/// A chain of `count` operators, each a segment, on the units in turn; one item.
pub fn chain(count: u32, units: &[Unit], bytes: u64) -> (OperatorGraph, Plan) {
    let edges: Vec<_> = (1..count).map(|index| (index - 1, index)).collect();
    let graph = graph(count, &edges, |_| bytes);
    let cuts: Vec<_> = (0..count).map(|index| (vec![index], index as usize % units.len())).collect();
    let sequence: Vec<_> = (0..count as usize).map(|segment| (segment, 0)).collect();
    let plan = plan(&graph, units, &cuts, &sequence, false);
    (graph, plan)
}

/// A small deterministic generator for shuffles (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((word ^ (word >> 31)) % bound as u64) as usize
    }
}
