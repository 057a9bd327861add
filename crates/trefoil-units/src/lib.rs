//! Backends behind one trait: rten (embedded), OpenVINO and ONNX Runtime (loaded at run time), simulated units.
//! Discovery, pinning, and one conformance suite for all.

mod backend;
mod error;
pub mod rten;

pub use backend::{
    Availability, Backend, Buffer, CompileOptions, Compiled, Port, PortMemory, Ports, RunTiming, SubModel,
};
pub use error::{UnitError, one_line};
