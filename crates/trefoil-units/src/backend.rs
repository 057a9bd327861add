//! The two traits every backend implements, and what crosses them.
//!
//! A backend compiles an ONNX file for one of its units; the compiled sub-model is bound to caller memory once and then
//! submitted as often as wanted. Adding a backend is one file that implements [`Backend`] and [`Compiled`], one line in
//! [`crate::registry`], and the conformance suite passing.

use crate::UnitError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use trefoil_core::{NodeTime, TensorInfo, Unit, UnitAddress};

/// Whether a backend can be used here.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "kebab-case")]
pub enum Availability {
    /// It can.
    Available {
        /// Library version.
        version: String,
        /// Where the library was found; `None` for embedded backends.
        #[serde(default)]
        library: Option<PathBuf>,
    },
    /// It cannot, why, and the command (or action) that would fix it.
    Unavailable {
        /// One line.
        reason: String,
        /// One line.
        fix: String,
    },
}

/// An ONNX file to compile, with the ports the caller expects. All shapes are static.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SubModel {
    /// The `.onnx` file. External data lies beside it. Neither may change while a compiled sub-model lives: backends map
    /// weights instead of reading them.
    pub path: PathBuf,
    /// Graph inputs, in graph order.
    pub inputs: Vec<TensorInfo>,
    /// Graph outputs, in graph order.
    pub outputs: Vec<TensorInfo>,
}

/// How to compile.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CompileOptions {
    /// Folder for compiled blobs, so that a second start is warm; `None` compiles afresh.
    pub cache: Option<PathBuf>,
    /// Ask the backend to record per-node times ([`Compiled::node_times`]). Costs time; never on when timing.
    pub profiling: bool,
    /// Switch the backend's graph optimisations off: the slow, plain reference that other results are compared with.
    pub reference: bool,
}

/// Whether a port can use memory that the caller owns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PortMemory {
    /// Reads or writes the caller's buffer directly.
    Caller,
    /// Copies between its own memory and the caller's buffer inside `submit`/`wait`; the time is part of the total.
    Copied,
}

/// One input or output of a compiled sub-model, in the order of [`SubModel::inputs`] and [`SubModel::outputs`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    /// Name, type and shape **as the caller asked for them**; the backend converts if its own differ, or fails to compile.
    pub info: TensorInfo,
    /// Memory rule.
    pub memory: PortMemory,
}

/// The ports of a compiled sub-model.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ports {
    /// Inputs, in graph order.
    pub inputs: Vec<Port>,
    /// Outputs, in graph order.
    pub outputs: Vec<Port>,
}

/// A caller-owned buffer: start and length in bytes. The start is aligned to [`trefoil_core::tensor::TENSOR_ALIGNMENT`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Buffer {
    /// Start.
    pub pointer: *mut u8,
    /// Bytes; exactly the port's `info.bytes()`.
    pub length: usize,
}

// SAFETY: a `Buffer` is only an address; whoever dereferences it proves access (see `Compiled::bind`).
unsafe impl Send for Buffer {}

/// Time of one execution in milliseconds. A part that the backend cannot tell is `None`, never invented.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RunTiming {
    /// Making inputs available to the device.
    pub h2d_ms: Option<f64>,
    /// Submitting to the device's queue.
    pub dispatch_ms: Option<f64>,
    /// Computing on the device.
    pub exec_ms: Option<f64>,
    /// Making outputs available to the host.
    pub d2h_ms: Option<f64>,
}

/// A library that compiles sub-models for its units.
pub trait Backend: Send + Sync {
    /// Short name, the part of a unit address before the colon.
    fn name(&self) -> &'static str;

    /// Whether it can be used here. Never panics, never crashes on a missing or odd library.
    fn check(&self) -> Availability;

    /// The units it offers on this machine without a core set (`openvino:CPU`, `openvino:GPU`), available or not.
    /// Each device that is known but unusable carries its own reason (a GPU plugin without a GPU).
    fn units(&self) -> Vec<(Unit, Availability)>;

    /// The unit at `address`, with its cores filled in as resources.
    ///
    /// # Errors
    /// [`UnitError::UnknownDevice`], [`UnitError::Unavailable`] or [`UnitError::Cores`].
    fn unit(&self, address: &UnitAddress) -> Result<Unit, UnitError>;

    /// Compiles a sub-model for a unit. Must be called on a thread that has entered the unit ([`crate::enter_unit`]),
    /// which is also the thread that runs it.
    ///
    /// # Errors
    /// [`UnitError::Compile`] with the backend's message; [`UnitError::Port`] when ports do not match the file.
    fn compile(&self, model: &SubModel, unit: &Unit, options: &CompileOptions) -> Result<Box<dyn Compiled>, UnitError>;

    /// Versions that costs on this backend depend on (`openvino` → `2026.4.1-…`). Empty when unavailable.
    fn versions(&self) -> BTreeMap<String, String>;

    /// Runs `body` once on a thread where calls into sub-models of `unit` cost least, and returns when it has ended.
    ///
    /// A library that hands work to threads of its own pays two thread switches for each call from outside. A worker
    /// whose whole loop runs inside pays none. The thread is pinned to the unit's cores and flushes denormals. By
    /// default the calling thread enters the unit ([`crate::enter_unit`]) and runs `body`.
    ///
    /// # Errors
    /// What entering the unit reports; then `body` has not run.
    fn run_inside(&self, unit: &Unit, body: &mut (dyn FnMut() + Send)) -> Result<(), UnitError> {
        let _inside = crate::enter_unit(unit)?;
        body();
        Ok(())
    }
}

/// A sub-model compiled for one unit. Used by one thread at a time; dropping it releases everything it holds, in any
/// order relative to its backend and to other compiled sub-models.
pub trait Compiled: Send {
    /// Its ports.
    fn ports(&self) -> &Ports;

    /// Binds caller memory to every port, replacing an earlier binding. Nothing is allocated by Trefoil in later
    /// `submit`/`wait` calls.
    ///
    /// # Safety
    /// Every buffer must stay valid for reads (inputs) or reads and writes (outputs) until the next `bind` or the drop
    /// of `self`. While a submitted execution runs nobody else writes the inputs or touches the outputs.
    ///
    /// # Errors
    /// [`UnitError::Port`] when counts or lengths do not match the ports.
    unsafe fn bind(&mut self, inputs: &[Buffer], outputs: &[Buffer]) -> Result<(), UnitError>;

    /// Starts one execution. Backends whose call is synchronous execute here and return when done.
    ///
    /// # Errors
    /// [`UnitError::Run`] with the backend's message; [`UnitError::Port`] when nothing is bound.
    fn submit(&mut self) -> Result<(), UnitError>;

    /// Waits for the submitted execution.
    ///
    /// # Errors
    /// [`UnitError::Run`] with the backend's message.
    fn wait(&mut self) -> Result<RunTiming, UnitError>;

    /// Per-node times of the last execution, if compiled with [`CompileOptions::profiling`] and the backend reports them.
    fn node_times(&mut self) -> Option<Vec<NodeTime>> {
        None
    }
}
