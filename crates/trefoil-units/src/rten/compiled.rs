//! A sub-model loaded by rten, bound to caller memory.

use super::onnx_file;
use super::pool::pool_of;
use super::ports::{Staging, copy_output, input_memory, rten_type};
use crate::ports::{PortNames, check_buffers, not_submitted, unbound};
use crate::{Buffer, CompileOptions, Compiled, Port, PortMemory, Ports, RunTiming, SubModel, UnitError, one_line};
use rten::{Dimension, Model, ModelOptions, NodeId, RunOptions, ValueType};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Instant;
use trefoil_core::{TensorInfo, Unit};

/// One input port: where its value goes and the memory behind it.
struct Input {
    node: NodeId,
    info: TensorInfo,
    shape: Vec<usize>,
    staging: Staging,
    buffer: Option<Buffer>,
}

/// One output port. Ports may share a node: a model may list a tensor as output twice.
struct Output {
    info: TensorInfo,
    /// Position in [`RtenCompiled::output_nodes`].
    position: usize,
    buffer: Option<Buffer>,
}

/// A loaded sub-model. Holds its unit's thread pool, so the pool's threads live as long as somebody may run on them.
pub(super) struct RtenCompiled {
    names: PortNames,
    model: Model,
    run_options: RunOptions,
    ports: Ports,
    inputs: Vec<Input>,
    outputs: Vec<Output>,
    /// Distinct output nodes: rten refuses a repeated one.
    output_nodes: Vec<NodeId>,
    bound: bool,
    timing: Option<RunTiming>,
}

impl RtenCompiled {
    /// Loads and checks a sub-model.
    pub(super) fn load(model: &SubModel, unit: &Unit, options: &CompileOptions) -> Result<Self, UnitError> {
        let names = PortNames::new(model, unit);
        for info in model.inputs.iter().chain(&model.outputs) {
            if rten_type(info.dtype).is_none() {
                let reason = format!("port `{}` is {}, and rten has no such tensors", info.name, info.dtype);
                return Err(names.compile_error(&reason));
            }
        }
        let pool = pool_of(unit)?;
        let loaded = load_model(&model.path, options.reference).map_err(|reason| names.compile_error(&reason))?;
        // Nodes are looked up among the model's ports only: rten keeps operators and values in one name table, so a
        // look-up by name could find an operator.
        // An output that rten's optimiser computed in advance is a constant without a name, known by its place alone.
        let find = |ids: &[NodeId], place: usize, info: &TensorInfo| -> Result<NodeId, UnitError> {
            let port_name = |id: &NodeId| loaded.node_info(*id).and_then(|node| node.name().map(str::to_owned));
            let by_name = ids.iter().copied().find(|id| port_name(id).as_deref() == Some(info.name.as_str()));
            let unnamed = || ids.get(place).copied().filter(|id| port_name(id).is_none());
            let node = by_name.or_else(unnamed).ok_or_else(|| {
                let have: Vec<_> = ids.iter().filter_map(port_name).collect();
                names.port_error(&info.name, format!("the file has no such port; it has {}", have.join(", ")))
            })?;
            Ok(node)
        };
        let mut inputs = Vec::with_capacity(model.inputs.len());
        for (place, info) in model.inputs.iter().enumerate() {
            let node = find(loaded.input_ids(), place, info)?;
            check_declaration(&loaded, node, info).map_err(|reason| names.port_error(&info.name, reason))?;
            inputs.push(Input {
                node,
                shape: info.shape.iter().map(|&extent| extent as usize).collect(),
                staging: Staging::for_port(info),
                info: info.clone(),
                buffer: None,
            });
        }
        for id in loaded.input_ids() {
            if !inputs.iter().any(|input| input.node == *id) {
                let name = loaded.node_info(*id).and_then(|node| node.name().map(str::to_owned)).unwrap_or_default();
                return Err(names.port_error(&name, "the file has this input, the caller gives none".to_owned()));
            }
        }
        let mut output_nodes: Vec<NodeId> = Vec::new();
        let mut outputs = Vec::with_capacity(model.outputs.len());
        for (place, info) in model.outputs.iter().enumerate() {
            let node = find(loaded.output_ids(), place, info)?;
            let position = output_nodes.iter().position(|known| *known == node).unwrap_or_else(|| {
                output_nodes.push(node);
                output_nodes.len() - 1
            });
            outputs.push(Output { info: info.clone(), position, buffer: None });
        }
        let ports = Ports {
            inputs: model
                .inputs
                .iter()
                .map(|info| Port { info: info.clone(), memory: input_memory(info.dtype) })
                .collect(),
            outputs: model.outputs.iter().map(|info| Port { info: info.clone(), memory: PortMemory::Copied }).collect(),
        };
        Ok(Self {
            names,
            model: loaded,
            run_options: RunOptions::default().with_thread_pool(Some(pool)),
            ports,
            inputs,
            outputs,
            output_nodes,
            bound: false,
            timing: None,
        })
    }

    fn run_error(&self, reason: &str) -> UnitError {
        UnitError::Run { unit: self.names.unit.clone(), model: self.names.model.clone(), reason: one_line(reason) }
    }

    /// Converts inputs, runs, copies outputs.
    fn execute(&mut self) -> Result<RunTiming, String> {
        let start = Instant::now();
        let mut converted = false;
        for input in &mut self.inputs {
            if !matches!(input.staging, Staging::None) {
                let buffer = input.buffer.ok_or("an input is not bound")?;
                // SAFETY: `bind` was promised that the buffer stays readable, and that nobody writes it during a run.
                let bytes = unsafe { readable(buffer) };
                input
                    .staging
                    .fill(input.info.dtype, bytes)
                    .map_err(|reason| format!("input `{}`: {reason}", input.info.name))?;
                converted = true;
            }
        }
        let mut values = Vec::with_capacity(self.inputs.len());
        for input in &self.inputs {
            let buffer = input.buffer.ok_or("an input is not bound")?;
            // SAFETY: as above; the view ends before this function returns.
            let bytes = unsafe { readable(buffer) };
            let view = input
                .staging
                .view(input.info.dtype, &input.shape, bytes)
                .map_err(|reason| format!("input `{}`: {reason}", input.info.name))?;
            values.push((input.node, view.into()));
        }
        let ready = Instant::now();
        let results = catch_unwind(AssertUnwindSafe(|| {
            self.model.run(values, &self.output_nodes, Some(self.run_options.clone()))
        }))
        .map_err(|panic| format!("rten panicked: {}", panic_text(panic.as_ref())))?
        .map_err(|error| error.to_string())?;
        let done = Instant::now();
        for output in &self.outputs {
            let buffer = output.buffer.ok_or("an output is not bound")?;
            // SAFETY: `bind` was promised exclusive access to output buffers during a run; the inputs' views are gone.
            let bytes = unsafe { writable(buffer) };
            let value = results.get(output.position).ok_or("rten returned fewer outputs than asked for")?;
            copy_output(value, &output.info, bytes)?;
        }
        let end = Instant::now();
        let ms = |from: Instant, to: Instant| to.duration_since(from).as_secs_f64() * 1e3;
        Ok(RunTiming {
            h2d_ms: converted.then(|| ms(start, ready)),
            dispatch_ms: None,
            exec_ms: Some(ms(ready, done)),
            d2h_ms: Some(ms(done, end)),
        })
    }
}

impl Compiled for RtenCompiled {
    fn ports(&self) -> &Ports {
        &self.ports
    }

    unsafe fn bind(&mut self, inputs: &[Buffer], outputs: &[Buffer]) -> Result<(), UnitError> {
        self.bound = false;
        self.timing = None;
        check_buffers(&self.ports, inputs, outputs, &self.names.unit, &self.names.model)?;
        for (input, buffer) in self.inputs.iter_mut().zip(inputs) {
            input.buffer = Some(*buffer);
        }
        for (output, buffer) in self.outputs.iter_mut().zip(outputs) {
            output.buffer = Some(*buffer);
        }
        self.bound = true;
        Ok(())
    }

    fn submit(&mut self) -> Result<(), UnitError> {
        if !self.bound {
            return Err(unbound(&self.names.unit, &self.names.model));
        }
        self.timing = None;
        self.timing = Some(self.execute().map_err(|reason| self.run_error(&reason))?);
        Ok(())
    }

    fn wait(&mut self) -> Result<RunTiming, UnitError> {
        self.timing.take().ok_or_else(|| not_submitted(&self.names.unit, &self.names.model))
    }
}

/// Loads a model, from a file that rten takes as it is or from a rewritten copy (see [`onnx_file`]).
///
/// Weights in external files are mapped, not read, so that many segments of one model share them.
fn load_model(path: &Path, reference: bool) -> Result<Model, String> {
    let staged = onnx_file::stage(path)?;
    let file = staged.path();
    let mut options = ModelOptions::with_all_ops();
    // Weights are packed at load, as the other backends do; the plain reference leaves everything as the file has it.
    // rten 0.27 computes integer products with packed weights wrongly when they have a zero point (the suite's
    // `matmul_integer`), so models with such operators are not packed.
    options.enable_optimization(!reference).prepack_weights(!reference && !staged.has_integer_products());
    let guarded = |load: &dyn Fn() -> Result<Model, rten::LoadError>| {
        catch_unwind(AssertUnwindSafe(load))
            .map_err(|panic| format!("rten panicked while loading: {}", panic_text(panic.as_ref())))?
            .map_err(|error| error.to_string())
    };
    // SAFETY: the files are memory-mapped. Model files and their weights must not be changed while they are in use;
    // `SubModel` documents it, and every backend that maps weights needs the same.
    let mapped = guarded(&|| unsafe { options.load_mmap(file) });
    match mapped {
        // A tensor at an odd offset of its file cannot be used in place: read it instead.
        Err(reason) if reason.contains("alignment") => guarded(&|| options.load_file(file)),
        other => other,
    }
}

/// Compares what the file declares for an input with what the caller gives. Outputs are compared when they come out: what
/// rten tells of them before is its own inference, which errs (`QuantizeLinear` to `u8` is inferred as `i8`).
fn check_declaration(model: &Model, node: NodeId, info: &TensorInfo) -> Result<(), String> {
    let Some(declared) = model.node_info(node) else { return Ok(()) };
    if let (Some(ValueType::Tensor(have)), Some(want)) = (declared.dtype(), rten_type(info.dtype))
        && have != want
    {
        return Err(format!("the file has {have} where {} was expected", info.dtype));
    }
    let Some(shape) = declared.shape() else { return Ok(()) };
    let fits = shape.len() == info.shape.len()
        && shape.iter().zip(&info.shape).all(|(have, want)| match have {
            Dimension::Fixed(extent) => *extent as u64 == *want,
            Dimension::Symbolic(_) => true,
        });
    if fits {
        return Ok(());
    }
    let have: Vec<String> = shape
        .iter()
        .map(|dimension| match dimension {
            Dimension::Fixed(extent) => extent.to_string(),
            Dimension::Symbolic(name) => name.clone(),
        })
        .collect();
    Err(format!("the file declares [{}], expected {:?}", have.join(", "), info.shape))
}

/// What a panic said.
fn panic_text(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(ToString::to_string)
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}

/// The buffer's bytes for reading.
///
/// # Safety
/// The buffer is valid for reads of its length for `'a`, and nobody writes it meanwhile.
unsafe fn readable<'a>(buffer: Buffer) -> &'a [u8] {
    if buffer.length == 0 {
        return &[];
    }
    // SAFETY: not null (checked at bind), valid and unshared by this function's contract.
    unsafe { std::slice::from_raw_parts(buffer.pointer, buffer.length) }
}

/// The buffer's bytes for writing.
///
/// # Safety
/// The buffer is valid for reads and writes of its length for `'a`, and nobody else touches it meanwhile.
unsafe fn writable<'a>(buffer: Buffer) -> &'a mut [u8] {
    if buffer.length == 0 {
        return &mut [];
    }
    // SAFETY: not null (checked at bind), valid and exclusive by this function's contract.
    unsafe { std::slice::from_raw_parts_mut(buffer.pointer, buffer.length) }
}
