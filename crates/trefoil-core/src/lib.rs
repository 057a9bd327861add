//! Trefoil's vocabulary as types (DESIGN: operator, segment, resource, unit, measurement, profile, plan, trace).
//!
//! This crate does no I/O and touches no hardware. Every other crate speaks in these types, so the JSON files
//! that Trefoil writes (profiles, plans, traces) are these types serialised by serde.
//!
//! Conventions: times are `f64` **milliseconds**, energies `f64` **joules**, powers `f64` **watts**, sizes `u64`
//! **bytes**. A quantity that nobody could tell is `None`, never zero.

// Tests compare values that are exact in binary.
#![cfg_attr(test, allow(clippy::float_cmp))]

pub mod cost;
pub mod error;
pub mod graph;
pub mod machine;
pub mod measurement;
pub mod plan;
pub mod profile;
pub mod quantity;
pub mod tensor;
pub mod trace;
pub mod unit;

pub use cost::{Cost, CostTable, TransferCost};
pub use error::CoreError;
pub use graph::{Granularity, Operator, OperatorClass, OperatorGraph, OperatorId, Signature, TensorEdge, TensorId};
pub use machine::Machine;
pub use measurement::{Conditions, Measurement, MeasurementId, NodeTime, Origin, Outcome, Samples, Subject, Timing};
pub use plan::{
    CostRef, LinkEnd, Objective, OwnClaim, Plan, PlannedLink, PlannedRequest, Segment, SegmentId, Task, TaskId, Work,
};
pub use profile::Profile;
pub use quantity::Quantity;
pub use tensor::{DataType, HostTensor, TensorInfo};
pub use trace::{Lane, Span, SpanKind, Timeline};
pub use unit::{Precision, Resource, Unit, UnitAddress, UnitKind, UnitLimits};
