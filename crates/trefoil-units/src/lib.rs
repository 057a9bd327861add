//! Backends behind one trait: rten (embedded), OpenVINO and ONNX Runtime (loaded at run time), simulated units.
//! Discovery, pinning, and one conformance suite for all.

mod affinity;
mod backend;
mod cache;
pub mod discovery;
mod error;
mod machine;
pub mod openvino;
pub mod ort;
mod ports;
mod registry;
pub mod rten;
pub mod sim;

pub use affinity::{
    UnitThread, allowed_cores, core_resources, cores_text, denormals_flushed, enter_unit, thread_cores, unit_cores,
};
pub use backend::{
    Availability, Backend, Buffer, CompileOptions, Compiled, Port, PortMemory, Ports, RunTiming, SubModel,
};
pub use error::{UnitError, one_line};
pub use machine::machine;
pub use registry::{UnitReport, backend, backends, compile, list, resolve};
