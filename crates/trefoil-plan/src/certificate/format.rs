//! What a certificate file holds.

use serde::Serialize;
use std::collections::BTreeMap;
use trefoil_core::{Granularity, Objective, OperatorId, PlannedLink, TensorId, UnitAddress};

/// Name of the file format, first field of every certificate.
pub const CERTIFICATE_FORMAT: &str = "trefoil-certificate";
/// Version of the file format that this build writes.
pub const CERTIFICATE_VERSION: u32 = 1;

/// A certificate. Units, models and tasks are named by their index in the lists here.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Certificate {
    /// Always [`CERTIFICATE_FORMAT`].
    pub format: String,
    /// Format version.
    pub version: u32,
    /// The planner.
    pub method: String,
    /// What the plan minimises.
    pub objective: Objective,
    /// Models.
    pub models: Vec<CertifiedModel>,
    /// Every unit that the planner could choose, not only those that it did; last a mode of a unit, if the plan is on one.
    pub units: Vec<UnitAddress>,
    /// Operators that were pinned: the bound holds under these.
    pub fixed: Vec<Fixed>,
    /// Arrivals, where there are several requests.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub requests: Vec<CertifiedRequest>,
    /// What stages hand on.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub links: Vec<PlannedLink>,
    /// What runs when.
    pub tasks: Vec<CertifiedTask>,
    /// What the schedule costs.
    pub claim: Claim,
    /// The lower bound; of a plan on a mode of a unit also over the whole model on any mode.
    pub bound: Option<CertifiedBound>,
}

/// A model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CertifiedModel {
    /// Name.
    pub name: String,
    /// Fingerprint in the profile.
    pub fingerprint: String,
    /// Granularity that operator ids refer to.
    pub granularity: Granularity,
}

/// A pinned operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Fixed {
    /// Model index.
    pub model: usize,
    /// The operator.
    pub operator: OperatorId,
    /// Unit index.
    pub unit: usize,
}

/// When an item of a model arrives, and what it counts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct CertifiedRequest {
    /// Model index.
    pub model: u32,
    /// The item.
    pub item: u32,
    /// The request that it is part of.
    pub request: u32,
    /// No task of it starts before, in milliseconds.
    pub arrival_ms: f64,
    /// The request's weight, where the claim counts it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
}

/// One task: either `operators`, or a `tensor` brought `from` a unit (its own: to the host) or, without `from`, the host.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CertifiedTask {
    /// Unit index.
    pub unit: usize,
    /// Model index.
    pub model: u32,
    /// The item.
    pub item: u32,
    /// The iteration.
    pub iteration: u32,
    /// Operators computed in one piece, ascending.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub operators: Option<Vec<OperatorId>>,
    /// Tensor moved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tensor: Option<TensorId>,
    /// Unit index that it comes from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<usize>,
    /// Milliseconds alone.
    pub ms: f64,
    /// Start.
    pub start_ms: f64,
    /// End.
    pub end_ms: f64,
}

/// How a cost follows from the schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rule {
    /// The end of the last task.
    Makespan,
    /// The sum of all tasks' times, or of their energies: nothing overlaps.
    BusySum,
    /// `∫ [P_idle + Σ_busy (P_u − P_idle)] dt`.
    Energy,
    /// BIDENT eq. 1 of the assignment.
    PaperSequential,
    /// The busiest resource's time for one item of a stream.
    Period,
    /// `Σ weight · (completion − arrival) / Σ weight` over requests.
    WeightedCompletion,
}

/// What the schedule costs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Claim {
    /// How.
    pub rule: Rule,
    /// The cost, in the objective's unit.
    pub value: f64,
    /// The makespan in milliseconds.
    pub simulated_ms: f64,
}

/// Which plans a bound is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Costs {
    /// Those of one task per operator, at its cost as a segment of its own: measured as such, else isolated.
    Operators,
    /// Those of segments, at measured or estimated costs.
    Segments,
}

/// A lower bound with its witnesses.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CertifiedBound {
    /// Which plans it is over.
    pub costs: Costs,
    /// The bound, in the objective's unit: the best of the proofs.
    pub value: f64,
    /// The proofs.
    pub proofs: Vec<Proof>,
}

/// Price of a byte of weights on each unit that limits memory, in the proof's unit (millijoules for payments of energy).
pub type MemoryPrices = BTreeMap<String, f64>;

/// One proof. What it says is in `docs/src/planning.md`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Proof {
    /// Node potentials of BIDENT's graph, operators × units.
    PaperSequential {
        /// The bound.
        value: f64,
        /// Least cost of reaching each node.
        potentials: Vec<Vec<f64>>,
    },
    /// Node potentials of a chain's interval graph, (operators + 1) × units.
    Chain {
        /// The bound.
        value: f64,
        /// Least cost of everything before an operator, the last segment being on a unit.
        potentials: Vec<Vec<f64>>,
        /// Prices of memory.
        #[serde(skip_serializing_if = "BTreeMap::is_empty")]
        memory: MemoryPrices,
    },
    /// Every operator's least cost, summed.
    Serial {
        /// The bound.
        value: f64,
        /// Prices of memory.
        #[serde(skip_serializing_if = "BTreeMap::is_empty")]
        memory: MemoryPrices,
    },
    /// Earliest ends of one model's operators by unit, raised at cuts by the load in between.
    Path {
        /// The bound on the makespan in milliseconds.
        value: f64,
        /// Model index.
        model: usize,
        /// Operators × units.
        potentials: Vec<Vec<f64>>,
        /// Operators that come before or after every other one.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        cuts: Vec<Cut>,
        /// Weights of the load after the last cut.
        #[serde(skip_serializing_if = "Option::is_none")]
        tail: Option<BTreeMap<String, f64>>,
        /// Prices of memory.
        #[serde(skip_serializing_if = "BTreeMap::is_empty")]
        memory: MemoryPrices,
    },
    /// Earliest ends of the operators of every execution of a workload, over arrivals, links and repetitions.
    WorkloadPath {
        /// The bound on the makespan in milliseconds.
        value: f64,
        /// Every execution.
        executions: Vec<ExecutionPotentials>,
        /// Prices of memory.
        #[serde(skip_serializing_if = "BTreeMap::is_empty")]
        memory: MemoryPrices,
    },
    /// A price of each unit's work, such that no set of units that can be busy at once does more than 1 a millisecond.
    Load {
        /// The bound on the makespan in milliseconds.
        value: f64,
        /// Weight by unit address.
        weights: BTreeMap<String, f64>,
        /// Prices of memory.
        #[serde(skip_serializing_if = "BTreeMap::is_empty")]
        memory: MemoryPrices,
    },
    /// The same with transfers, which occupy their destination: prices by class of work, and what readers of tensors pay.
    PricedLoad {
        /// The bound on the makespan (or period) in milliseconds.
        value: f64,
        /// Weights of compute-bound and memory-bound work by unit address.
        weights: BTreeMap<String, [f64; 2]>,
        /// Payments; none is 0.
        payments: Vec<Payment>,
        /// Prices of memory.
        #[serde(skip_serializing_if = "BTreeMap::is_empty")]
        memory: MemoryPrices,
    },
    /// Every request takes as long as the longest of its models' paths: those of the proofs before, or with prices of memory those
    /// stated here.
    Completions {
        /// The bound on the weighted mean completion in milliseconds.
        value: f64,
        /// Every execution, its charges divided by its request's share of all weights.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        executions: Vec<ExecutionPotentials>,
        /// Prices of memory.
        #[serde(skip_serializing_if = "BTreeMap::is_empty")]
        memory: MemoryPrices,
    },
    /// Every operator's least energy above idle (with payments: and transfers'), and idle power for the makespan that the
    /// proofs before it show.
    Energy {
        /// The bound in joules.
        value: f64,
        /// What readers of tensors pay, in millijoules.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        payments: Vec<Payment>,
        /// Prices of memory.
        #[serde(skip_serializing_if = "BTreeMap::is_empty")]
        memory: MemoryPrices,
    },
    /// Every placement is tried by whoever verifies, and given up where it is known to take as long.
    Placements {
        /// The bound on the makespan in milliseconds.
        value: f64,
        /// Weights of compute-bound and memory-bound work by unit address.
        weights: BTreeMap<String, [f64; 2]>,
    },
    /// Every assignment and order is tried by whoever verifies.
    Search {
        /// The bound: the claim itself.
        value: f64,
    },
}

/// Earliest ends within one execution of a model.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ExecutionPotentials {
    /// Model index.
    pub model: u32,
    /// The item.
    pub item: u32,
    /// The iteration.
    pub iteration: u32,
    /// Operators × units.
    pub potentials: Vec<Vec<f64>>,
}

/// What a reader of a tensor pays for being on each unit.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Payment {
    /// Model index.
    pub model: usize,
    /// The tensor.
    pub tensor: TensorId,
    /// The operator that reads it.
    pub reader: OperatorId,
    /// By unit, in the certificate's order.
    pub paid: Vec<f64>,
}

impl Proof {
    /// What is proven, in its own unit.
    pub fn value(&self) -> f64 {
        match self {
            Self::PaperSequential { value, .. }
            | Self::Chain { value, .. }
            | Self::Serial { value, .. }
            | Self::Path { value, .. }
            | Self::WorkloadPath { value, .. }
            | Self::Load { value, .. }
            | Self::PricedLoad { value, .. }
            | Self::Placements { value, .. }
            | Self::Completions { value, .. }
            | Self::Search { value }
            | Self::Energy { value, .. } => *value,
        }
    }
}

/// An operator that splits time: whatever comes before it ends before it starts.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cut {
    /// The operator.
    pub operator: OperatorId,
    /// Weights of the load between the cut before and this one; none where that adds nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights: Option<BTreeMap<String, f64>>,
}
