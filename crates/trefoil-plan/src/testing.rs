//! Synthetic graphs and profiles for tests and benches, of this crate and others.

use std::collections::{BTreeMap, BTreeSet};
use trefoil_core::{
    Conditions, DataType, Granularity, Machine, Measurement, MeasurementId, NodeTime, Operator, OperatorClass,
    OperatorGraph, OperatorId, Origin, Outcome, Profile, Resource, Samples, Signature, Subject, TensorEdge, TensorId,
    Timing, Unit, UnitAddress, UnitKind, UnitLimits,
};

/// A graph of `bytes.len()` operators `op0`, `op1`, … (kind `Relu`), each with one output tensor `t0`, … of its own bytes,
/// and edges `(from, to)`, `from < to`. Operators without a predecessor read the model input `x`; tensors that nobody reads
/// are the model's outputs.
pub fn graph(bytes: &[u64], edges: &[(u32, u32)]) -> OperatorGraph {
    let count = bytes.len() as u32;
    let tensor = |name: String, bytes: u64, producer: Option<OperatorId>| TensorEdge {
        name,
        dtype: DataType::U8,
        shape: vec![bytes],
        bytes,
        producer,
        consumers: Vec::new(),
    };
    let mut tensors = vec![tensor("x".to_owned(), 64, None)];
    tensors.extend((0..count).map(|at| tensor(format!("t{at}"), bytes[at as usize], Some(OperatorId(at)))));
    let mut inputs: Vec<BTreeSet<TensorId>> = vec![BTreeSet::new(); bytes.len()];
    for &(from, to) in edges {
        assert!(from < to && to < count, "edge {from} -> {to} of {count} operators");
        inputs[to as usize].insert(TensorId(from + 1));
    }
    for (at, inputs) in inputs.iter_mut().enumerate() {
        if inputs.is_empty() {
            inputs.insert(TensorId(0));
        }
        for input in inputs.iter() {
            tensors[input.index()].consumers.push(OperatorId(at as u32));
        }
    }
    let operators = inputs
        .into_iter()
        .enumerate()
        .map(|(at, inputs)| Operator {
            name: format!("op{at}"),
            kind: "Relu".to_owned(),
            nodes: vec![at as u32],
            inputs: inputs.into_iter().collect(),
            outputs: vec![TensorId(at as u32 + 1)],
            signature: Signature(format!("{at:032x}")),
            class: OperatorClass::Memory,
            flops: None,
            weight_bytes: 0,
        })
        .collect();
    let outputs = (1..=count).map(TensorId).filter(|tensor| tensors[tensor.index()].consumers.is_empty()).collect();
    OperatorGraph {
        model: "synthetic".to_owned(),
        fingerprint: "5".repeat(32),
        granularity: Granularity::Fused,
        tensors,
        operators,
        inputs: vec![TensorId(0)],
        outputs,
    }
}

/// A chain of operators with equal tensors.
pub fn chain(count: usize, bytes: u64) -> OperatorGraph {
    let edges: Vec<(u32, u32)> = (1..count as u32).map(|to| (to - 1, to)).collect();
    graph(&vec![bytes; count], &edges)
}

/// Builds a profile of one graph.
#[derive(Debug, Clone)]
pub struct ProfileBuilder {
    /// The profile so far.
    pub profile: Profile,
    graph: OperatorGraph,
}

impl ProfileBuilder {
    /// An empty profile of `graph`.
    pub fn new(graph: &OperatorGraph) -> Self {
        let machine = Machine {
            cpu: "synthetic".to_owned(),
            cores: vec![0, 1],
            memory_bytes: 1 << 30,
            os: "none".to_owned(),
            features: Vec::new(),
            versions: BTreeMap::new(),
        };
        let mut profile = Profile::new(machine);
        profile.models.push(graph.clone());
        Self { profile, graph: graph.clone() }
    }

    /// Adds a unit that holds one resource of its own.
    #[must_use]
    pub fn unit(mut self, address: &str, kind: UnitKind) -> Self {
        let address: UnitAddress = address.parse().expect("a unit address");
        self.profile.units.push(Unit {
            resources: BTreeSet::from([Resource::Device(address.to_string())]),
            address,
            kind,
            limits: UnitLimits::default(),
            simulated: false,
            description: None,
        });
        self
    }

    /// CPU units `a:CPU`, `b:CPU`, … that hand over tensors for free until a transfer is recorded.
    #[must_use]
    pub fn cpus(self, count: usize) -> Self {
        ["a:CPU", "b:CPU", "c:CPU", "d:CPU"][..count]
            .iter()
            .fold(self, |builder, unit| builder.unit(unit, UnitKind::Cpu))
    }

    /// The address of the unit at an index.
    pub fn address(&self, unit: usize) -> UnitAddress {
        self.profile.units[unit].address.clone()
    }

    /// Appends a record.
    pub fn record(&mut self, subject: Subject, units: &[UnitAddress], outcome: Outcome) -> MeasurementId {
        let id = self.profile.next_id(&subject, units);
        self.profile.measurements.push(Measurement {
            id: id.clone(),
            subject,
            units: units.to_vec(),
            origin: Origin::Measured,
            outcome,
            conditions: Conditions::default(),
            versions: BTreeMap::new(),
            taken_at: "2026-01-01T00:00:00Z".to_owned(),
        });
        id
    }

    /// Isolated milliseconds of every operator on one unit; `None` records a failure to compile.
    #[must_use]
    pub fn operators(mut self, unit: usize, ms: &[Option<f64>]) -> Self {
        let address = [self.address(unit)];
        // Ids are numbered by looking through the profile; fresh profiles need no look.
        for (at, ms) in ms.iter().enumerate() {
            let subject = Subject::Operator { signature: self.graph.operators[at].signature.clone() };
            let outcome = match ms {
                Some(ms) => ok(*ms),
                None => Outcome::Failed { stage: "compile".to_owned(), reason: "unsupported".to_owned() },
            };
            self.profile.measurements.push(Measurement {
                id: MeasurementId::new(&subject, &address, 0),
                subject,
                units: address.to_vec(),
                origin: Origin::Measured,
                outcome,
                conditions: Conditions::default(),
                versions: BTreeMap::new(),
                taken_at: "2026-01-01T00:00:00Z".to_owned(),
            });
        }
        self
    }

    /// A transfer between two units.
    #[must_use]
    pub fn transfer(mut self, from: usize, to: usize, bytes: u64, ms: f64) -> Self {
        let pair = [self.address(from), self.address(to)];
        self.record(Subject::Transfer { bytes }, &pair, ok(ms));
        self
    }

    /// The same transfer points for every pair of units.
    #[must_use]
    pub fn transfers(mut self, points: &[(u64, f64)]) -> Self {
        for from in 0..self.profile.units.len() {
            for to in (0..self.profile.units.len()).filter(|&to| to != from) {
                for &(bytes, ms) in points {
                    self = self.transfer(from, to, bytes, ms);
                }
            }
        }
        self
    }

    /// The whole model on a unit.
    #[must_use]
    pub fn whole(mut self, unit: usize, ms: f64) -> Self {
        self.record(Subject::WholeModel { model: self.graph.fingerprint.clone() }, &[self.address(unit)], ok(ms));
        self
    }

    /// The whole model on a unit with in-situ node times, one node per operator.
    #[must_use]
    pub fn whole_with_nodes(mut self, unit: usize, ms: f64, nodes: &[f64]) -> Self {
        let mut outcome = ok(ms);
        if let Outcome::Ok { nodes: list, .. } = &mut outcome {
            *list = nodes
                .iter()
                .zip(0u32..)
                .map(|(&ms, at)| NodeTime {
                    name: format!("node{at}"),
                    kind: "Relu".to_owned(),
                    ms,
                    operators: vec![OperatorId(at)],
                })
                .collect();
        }
        self.record(Subject::WholeModel { model: self.graph.fingerprint.clone() }, &[self.address(unit)], outcome);
        self
    }

    /// A segment measured whole on a unit; `None` records a failure.
    #[must_use]
    pub fn segment(mut self, unit: usize, operators: &[u32], ms: Option<f64>) -> Self {
        let subject = self.segment_subject(operators);
        let outcome = match ms {
            Some(ms) => ok(ms),
            None => Outcome::Failed { stage: "compile".to_owned(), reason: "too much at once".to_owned() },
        };
        self.record(subject, &[self.address(unit)], outcome);
        self
    }

    /// The subject of a segment of this graph.
    pub fn segment_subject(&self, operators: &[u32]) -> Subject {
        Subject::Segment {
            model: self.graph.fingerprint.clone(),
            granularity: self.graph.granularity,
            operators: operators.iter().map(|&at| OperatorId(at)).collect(),
        }
    }

    /// Power of a unit in watts, as measured.
    #[must_use]
    pub fn watts(mut self, unit: usize, watts: f64) -> Self {
        let outcome = Outcome::Value { value: Samples::exactly(watts) };
        self.record(Subject::Power, &[self.address(unit)], outcome);
        self
    }

    /// A slowdown factor of `slowed` while `other` works, for memory-bound work on both.
    #[must_use]
    pub fn slowdown(mut self, slowed: usize, other: usize, factor: f64) -> Self {
        let subject = Subject::Slowdown { class: OperatorClass::Memory, interference: OperatorClass::Memory };
        let outcome = Outcome::Value { value: Samples::exactly(factor) };
        self.record(subject, &[self.address(slowed), self.address(other)], outcome);
        self
    }
}

/// A run of exactly `ms`.
pub fn ok(ms: f64) -> Outcome {
    Outcome::Ok {
        timing: Timing { total: Some(Samples::exactly(ms)), ..Timing::default() },
        error_to_peak: Some(0.0),
        nodes: Vec::new(),
    }
}

/// A deterministic stream of numbers in `[0, 1)` (xorshift), for synthetic costs.
#[derive(Debug, Clone)]
pub struct Numbers(pub u64);

impl Iterator for Numbers {
    type Item = f64;

    fn next(&mut self) -> Option<f64> {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        Some((self.0 >> 11) as f64 / (1u64 << 53) as f64)
    }
}

/// Reads a request's costs from its profile, as every planner does first; the number of costs there are. For benches.
///
/// # Errors
/// Whatever is wrong with the request.
pub fn read_costs(request: &crate::PlanRequest<'_>) -> Result<usize, crate::PlanError> {
    let view = crate::view::CostView::new(request)?;
    Ok(view.table.costs.iter().flatten().count())
}
