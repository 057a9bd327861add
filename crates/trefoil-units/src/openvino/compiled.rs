//! A sub-model compiled by OpenVINO for one of its devices.

use super::ffi::{Dimension, ElementType, NodeProfiles, PartialShape, Shape};
use super::handles::{Model, PortHandle, Program, Request, Tensor};
use super::library::Loaded;
use super::properties::{Properties, properties};
use super::workers::{self, Workers};
use crate::affinity::unit_cores;
use crate::ports::{self, PortNames};
use crate::{Buffer, CompileOptions, Compiled, Port, PortMemory, Ports, RunTiming, SubModel, UnitError, one_line};
use std::ffi::{CStr, CString, c_char};
use std::ptr;
use std::time::Instant;
use trefoil_core::{DataType, NodeTime, TensorInfo, Unit, UnitKind};

/// An output whose shape OpenVINO knows only after running: copied, with its shape checked each time.
struct DynamicOutput {
    index: usize,
    shape: Vec<i64>,
    target: Option<Buffer>,
}

/// See [`Compiled`].
pub(super) struct OpenVinoModel {
    // Dropped in this order: the request before the tensors it uses and the program it belongs to.
    request: Request,
    tensors: Vec<Tensor>,
    _program: Program,
    loaded: &'static Loaded,
    ports: Ports,
    /// For each port its index in OpenVINO's own order, which is the file's order except for equal tensors.
    input_indices: Vec<usize>,
    output_indices: Vec<usize>,
    dynamic_outputs: Vec<DynamicOutput>,
    workers: Workers,
    asynchronous: bool,
    bound: bool,
    submitted: Option<RunTiming>,
    profiling: bool,
    unit: String,
    model: String,
}

/// Calls a variadic compile function with the property pointers spread out.
macro_rules! call_with {
    ($function:expr, $($argument:expr),*; $p:ident) => {
        $function($($argument),*, $p[0], $p[1], $p[2], $p[3], $p[4], $p[5], $p[6], $p[7], $p[8], $p[9], $p[10], $p[11],
            $p[12], $p[13], $p[14], $p[15], $p[16], $p[17], $p[18], $p[19], $p[20], $p[21], $p[22], $p[23])
    };
}

/// Compiles `model` for `unit`; see [`crate::Backend::compile`].
pub(super) fn compile(
    loaded: &'static Loaded,
    model: &SubModel,
    unit: &Unit,
    options: &CompileOptions,
) -> Result<OpenVinoModel, UnitError> {
    let names = PortNames::new(model, unit);
    names.check_types(model)?;
    let refuse = |reason: String| names.compile_error(&reason);
    let text = model.path.to_str().ok_or_else(|| refuse("its path is not UTF-8".to_owned()))?;
    let path = CString::new(text).map_err(|_| refuse("its path holds a NUL byte".to_owned()))?;
    let device = CString::new(unit.address.device.as_str()).map_err(|_| refuse("odd device name".to_owned()))?;
    if !model.path.is_file() {
        return Err(refuse("there is no such file".to_owned()));
    }
    let properties = properties(model, unit, options);
    let cores = if unit.kind == UnitKind::Cpu { unit_cores(unit) } else { Vec::new() };
    let workers = Workers::claim(&cores);
    let program = workers::marked(|| build(loaded, model, &path, &device, &properties)).map_err(refuse)?;
    workers.settle();

    let functions = &loaded.functions;
    let input_indices = match_ports(loaded, &program, &model.inputs, Direction::Input, &names)?;
    let output_indices = match_ports(loaded, &program, &model.outputs, Direction::Output, &names)?;
    let mut ports = Ports::default();
    let mut dynamic_outputs = Vec::new();
    // Accelerators keep tensors in their own memory; the CPU plugin works on the caller's.
    let memory = if unit.kind == UnitKind::Cpu { PortMemory::Caller } else { PortMemory::Copied };
    for (info, &index) in model.inputs.iter().zip(&input_indices) {
        let (dtype, shape) = describe(loaded, &program, Direction::Input, index).map_err(refuse)?;
        names.check_port("input", info, dtype, shape.as_deref())?;
        ports.inputs.push(Port { info: info.clone(), memory });
    }
    for (info, &index) in model.outputs.iter().zip(&output_indices) {
        let (dtype, shape) = describe(loaded, &program, Direction::Output, index).map_err(refuse)?;
        names.check_port("output", info, dtype, shape.as_deref())?;
        let fixed = shape.is_some_and(|shape| shape.iter().all(Option::is_some));
        if !fixed {
            let shape = info.shape.iter().map(|&extent| extent as i64).collect();
            dynamic_outputs.push(DynamicOutput { index, shape, target: None });
        }
        ports.outputs.push(Port { info: info.clone(), memory: if fixed { memory } else { PortMemory::Copied } });
    }
    let request = Request::new(loaded, |place| {
        // SAFETY: a live compiled model and a valid place for the result.
        unsafe { (functions.compiled_model_create_infer_request)(program.get(), place) }
    })
    .map_err(refuse)?;
    Ok(OpenVinoModel {
        request,
        tensors: Vec::new(),
        _program: program,
        loaded,
        ports,
        input_indices,
        output_indices,
        dynamic_outputs,
        workers,
        asynchronous: unit.kind != UnitKind::Cpu,
        bound: false,
        submitted: None,
        profiling: options.profiling,
        unit: names.unit,
        model: names.model,
    })
}

/// Compiles the file directly, so that a cached blob spares reading it; a file with open input shapes is read and reshaped.
fn build(
    loaded: &'static Loaded,
    model: &SubModel,
    path: &CStr,
    device: &CStr,
    properties: &Properties,
) -> Result<Program, String> {
    let functions = &loaded.functions;
    let (pointers, count) = (properties.pointers(), properties.count());
    let program = Program::new(loaded, |place| {
        // SAFETY: terminated strings, a valid place for the result, and as many property arguments as announced.
        unsafe {
            call_with!((functions.core_compile_model_from_file), loaded.core(), path.as_ptr(), device.as_ptr(), count, place;
                pointers)
        }
    });
    let is_open = |program: &Program| {
        (0..model.inputs.len()).any(|index| {
            describe(loaded, program, Direction::Input, index)
                .is_ok_and(|(_, shape)| shape.is_none_or(|shape| shape.contains(&None)))
        })
    };
    match &program {
        Ok(compiled) if !is_open(compiled) => return program,
        // A device without dynamic shapes refuses such a file; the second attempt tells the reason that counts.
        Err(_) if model.inputs.is_empty() => return program,
        _ => {}
    }
    let read = Model::new(loaded, |place| {
        // SAFETY: a terminated string and a valid place for the result; a null weights path means "beside the model".
        unsafe { (functions.core_read_model)(loaded.core(), path.as_ptr(), ptr::null(), place) }
    })?;
    let mut extents: Vec<Vec<Dimension>> = model
        .inputs
        .iter()
        .map(|info| info.shape.iter().map(|&extent| Dimension { min: extent as i64, max: extent as i64 }).collect())
        .collect();
    let shapes: Vec<PartialShape> = extents
        .iter_mut()
        .map(|extents| {
            let rank = extents.len() as i64;
            PartialShape { rank: Dimension { min: rank, max: rank }, extents: extents.as_mut_ptr() }
        })
        .collect();
    let indices: Vec<usize> = (0..shapes.len()).collect();
    // SAFETY: as many indices and shapes as announced, alive during the call.
    loaded.check(unsafe {
        (functions.model_reshape_by_port_indexes)(read.get(), indices.as_ptr(), shapes.as_ptr(), shapes.len())
    })?;
    Program::new(loaded, |place| {
        // SAFETY: a live model, and otherwise as above.
        unsafe {
            call_with!((functions.core_compile_model), loaded.core(), read.get(), device.as_ptr(), count, place; pointers)
        }
    })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Input,
    Output,
}

fn port(loaded: &'static Loaded, program: &Program, direction: Direction, index: usize) -> Result<PortHandle, String> {
    let get = match direction {
        Direction::Input => loaded.functions.compiled_model_input_by_index,
        Direction::Output => loaded.functions.compiled_model_output_by_index,
    };
    // SAFETY: a live compiled model and a valid place for the result; OpenVINO checks the index.
    PortHandle::new(loaded, |place| unsafe { get(program.get(), index, place) })
}

fn port_by_name(loaded: &'static Loaded, program: &Program, direction: Direction, name: &str) -> Option<PortHandle> {
    let get = match direction {
        Direction::Input => loaded.functions.compiled_model_input_by_name,
        Direction::Output => loaded.functions.compiled_model_output_by_name,
    };
    let name = CString::new(name).ok()?;
    // SAFETY: a live compiled model, a terminated string and a valid place for the result.
    PortHandle::new(loaded, |place| unsafe { get(program.get(), name.as_ptr(), place) }).ok()
}

/// One of the names of a port: always the same one for the same tensor.
fn any_name(loaded: &'static Loaded, port: &PortHandle) -> Option<String> {
    let mut name = ptr::null_mut();
    // SAFETY: a live port and a valid place for the result, which is copied and freed.
    unsafe {
        loaded.check((loaded.functions.port_get_any_name)(port.get(), &raw mut name)).ok()?;
        let text = CStr::from_ptr(name).to_string_lossy().into_owned();
        (loaded.functions.free)(name);
        Some(text)
    }
}

/// For each expected port the index of OpenVINO's port that carries its name. A tensor may have several names and several
/// ports may be one tensor, so the file's own position is tried first. Only a port that OpenVINO left without any name is
/// taken by its position alone.
fn match_ports(
    loaded: &'static Loaded,
    program: &Program,
    expected: &[TensorInfo],
    direction: Direction,
    names: &PortNames,
) -> Result<Vec<usize>, UnitError> {
    let (word, count_of) = match direction {
        Direction::Input => ("input", loaded.functions.compiled_model_inputs_size),
        Direction::Output => ("output", loaded.functions.compiled_model_outputs_size),
    };
    let mut count = 0;
    // SAFETY: a live compiled model and a valid place for the result.
    let status = unsafe { count_of(program.get(), &raw mut count) };
    loaded.check(status).map_err(|reason| names.compile_error(&reason))?;
    if count != expected.len() {
        return Err(names.count_error(word, expected.len(), count));
    }
    let own: Vec<Option<String>> =
        (0..count).map(|index| any_name(loaded, &port(loaded, program, direction, index).ok()?)).collect();
    let index_of = |(position, info): (usize, &TensorInfo)| {
        let tensor = port_by_name(loaded, program, direction, &info.name).and_then(|port| any_name(loaded, &port));
        match (tensor, &own[position]) {
            (Some(name), Some(here)) if name == *here => Ok(position),
            (Some(name), _) => Ok(own.iter().position(|other| other.as_ref() == Some(&name)).unwrap_or(position)),
            (None, None) => Ok(position),
            (None, Some(_)) => {
                let have: Vec<&str> = own.iter().flatten().map(String::as_str).collect();
                let reason = format!("the model has no such {word}; it has {}", have.join(", "));
                Err(names.port_error(&info.name, reason))
            }
        }
    };
    expected.iter().enumerate().map(index_of).collect()
}

/// Element type and shape of a port: `None` for an unknown rank, `None` extents where they are open.
type Described = (DataType, Option<Vec<Option<u64>>>);

fn describe(
    loaded: &'static Loaded,
    program: &Program,
    direction: Direction,
    index: usize,
) -> Result<Described, String> {
    let functions = &loaded.functions;
    let port = port(loaded, program, direction, index)?;
    let open = Dimension { min: 0, max: -1 };
    let mut element: ElementType = 0;
    let mut shape = PartialShape { rank: open, extents: ptr::null_mut() };
    // SAFETY: a live port and valid places for the results; the extents are `rank` many until they are freed.
    unsafe {
        loaded.check((functions.port_get_element_type)(port.get(), &raw mut element))?;
        loaded.check((functions.port_get_partial_shape)(port.get(), &raw mut shape))?;
        let fixed = |dimension: Dimension| (dimension.min == dimension.max).then_some(dimension.min as u64);
        let extents = fixed(shape.rank)
            .map(|rank| (0..rank as usize).map(|axis| fixed(*shape.extents.add(axis))).collect::<Vec<_>>());
        (functions.partial_shape_free)(&raw mut shape);
        Ok((loaded.dtype(element), extents))
    }
}

impl OpenVinoModel {
    fn run_error(&self, reason: &str) -> UnitError {
        UnitError::Run { unit: self.unit.clone(), model: self.model.clone(), reason: one_line(reason) }
    }

    /// A tensor over the caller's memory.
    fn tensor_over(&self, info: &TensorInfo, buffer: Buffer) -> Result<Tensor, String> {
        let element = self.loaded.element(info.dtype).ok_or("a type without a byte layout")?;
        let mut extents: Vec<i64> = info.shape.iter().map(|&extent| extent as i64).collect();
        let shape = Shape { rank: extents.len() as i64, extents: extents.as_mut_ptr() };
        Tensor::new(self.loaded, |place| {
            // SAFETY: the shape is copied during the call; the buffer is exactly as long as type and shape say (checked by
            // `bind`) and outlives the tensor by the contract of `Compiled::bind`.
            unsafe { (self.loaded.functions.tensor_create_from_host_ptr)(element, shape, buffer.pointer.cast(), place) }
        })
    }

    fn set_tensors(&mut self, inputs: &[Buffer], outputs: &[Buffer]) -> Result<(), String> {
        let functions = &self.loaded.functions;
        let mut tensors = Vec::with_capacity(inputs.len() + outputs.len());
        for ((port, &index), &buffer) in self.ports.inputs.iter().zip(&self.input_indices).zip(inputs) {
            let tensor = self.tensor_over(&port.info, buffer)?;
            // SAFETY: a live request and tensor; the request shares the tensor.
            self.loaded.check(unsafe {
                (functions.infer_request_set_input_tensor_by_index)(self.request.get(), index, tensor.get())
            })?;
            tensors.push(tensor);
        }
        for ((port, &index), &buffer) in self.ports.outputs.iter().zip(&self.output_indices).zip(outputs) {
            if let Some(dynamic) = self.dynamic_outputs.iter_mut().find(|dynamic| dynamic.index == index) {
                dynamic.target = Some(buffer);
                continue;
            }
            let tensor = self.tensor_over(&port.info, buffer)?;
            // SAFETY: as above.
            self.loaded.check(unsafe {
                (functions.infer_request_set_output_tensor_by_index)(self.request.get(), index, tensor.get())
            })?;
            tensors.push(tensor);
        }
        // The request holds the new tensors now, so the old ones may go.
        self.tensors = tensors;
        Ok(())
    }

    /// Copies outputs whose shape was open to the caller's memory.
    fn copy_dynamic_outputs(&self) -> Result<(), String> {
        let functions = &self.loaded.functions;
        for output in &self.dynamic_outputs {
            let Some(target) = output.target else { return Err("an output is not bound".to_owned()) };
            let tensor = Tensor::new(self.loaded, |place| {
                // SAFETY: a live request and a valid place for the result.
                unsafe { (functions.infer_request_get_output_tensor_by_index)(self.request.get(), output.index, place) }
            })?;
            let mut shape = Shape { rank: 0, extents: ptr::null_mut() };
            let (mut bytes, mut data) = (0usize, ptr::null_mut());
            // SAFETY: a live tensor and valid places for the results; the extents are `rank` many until they are freed. The
            // tensor's data are valid while it lives, and are not the caller's memory, which is `length` bytes long.
            unsafe {
                self.loaded.check((functions.tensor_get_shape)(tensor.get(), &raw mut shape))?;
                let extents = (0..shape.rank as usize).map(|axis| *shape.extents.add(axis));
                let same = shape.rank as usize == output.shape.len() && extents.eq(output.shape.iter().copied());
                let got = if same {
                    String::new()
                } else {
                    format!("{:?}", (0..shape.rank as usize).map(|axis| *shape.extents.add(axis)).collect::<Vec<_>>())
                };
                (functions.shape_free)(&raw mut shape);
                if !same {
                    return Err(format!("output {} has shape {got}, not {:?}", output.index, output.shape));
                }
                self.loaded.check((functions.tensor_get_byte_size)(tensor.get(), &raw mut bytes))?;
                if bytes != target.length {
                    return Err(format!("output {} has {bytes} bytes, not {}", output.index, target.length));
                }
                if bytes > 0 {
                    self.loaded.check((functions.tensor_data)(tensor.get(), &raw mut data))?;
                    ptr::copy_nonoverlapping(data.cast::<u8>(), target.pointer, bytes);
                }
            }
        }
        Ok(())
    }
}

impl Compiled for OpenVinoModel {
    fn ports(&self) -> &Ports {
        &self.ports
    }

    unsafe fn bind(&mut self, inputs: &[Buffer], outputs: &[Buffer]) -> Result<(), UnitError> {
        ports::check_buffers(&self.ports, inputs, outputs, &self.unit, &self.model)?;
        self.bound = false;
        self.submitted = None;
        self.set_tensors(inputs, outputs).map_err(|reason| self.run_error(&reason))?;
        self.bound = true;
        Ok(())
    }

    fn submit(&mut self) -> Result<(), UnitError> {
        if !self.bound {
            return Err(ports::unbound(&self.unit, &self.model));
        }
        let functions = &self.loaded.functions;
        let request = self.request.get();
        let mut timing = RunTiming::default();
        let status = if self.asynchronous {
            let start = Instant::now();
            // SAFETY: a live request whose tensors are bound to memory that the caller keeps.
            let status = unsafe { (functions.infer_request_start_async)(request) };
            timing.dispatch_ms = Some(start.elapsed().as_secs_f64() * 1e3);
            status
        } else {
            // SAFETY: as above.
            self.workers.watch(|| unsafe { (functions.infer_request_infer)(request) })
        };
        self.loaded.check(status).map_err(|reason| self.run_error(&reason))?;
        self.submitted = Some(timing);
        Ok(())
    }

    fn wait(&mut self) -> Result<RunTiming, UnitError> {
        let Some(timing) = self.submitted.take() else { return Err(ports::not_submitted(&self.unit, &self.model)) };
        if self.asynchronous {
            // SAFETY: a live request.
            let status = unsafe { (self.loaded.functions.infer_request_wait)(self.request.get()) };
            self.loaded.check(status).map_err(|reason| self.run_error(&reason))?;
        }
        self.copy_dynamic_outputs().map_err(|reason| self.run_error(&reason))?;
        Ok(timing)
    }

    fn node_times(&mut self) -> Option<Vec<NodeTime>> {
        if !self.profiling || !self.bound {
            return None;
        }
        let mut profiles = NodeProfiles { nodes: ptr::null_mut(), count: 0 };
        // SAFETY: a live request and a valid place for the result, whose `count` nodes hold terminated strings until freed.
        unsafe {
            let status =
                (self.loaded.functions.infer_request_get_profiling_info)(self.request.get(), &raw mut profiles);
            if status != 0 {
                return None;
            }
            let text = |pointer: *const c_char| CStr::from_ptr(pointer).to_string_lossy().into_owned();
            let nodes = (0..profiles.count)
                .map(|index| &*profiles.nodes.add(index))
                // Nodes that were folded or fused away have no time of their own.
                .filter(|node| node.status == EXECUTED)
                .map(|node| NodeTime {
                    name: text(node.name),
                    kind: text(node.node_type),
                    ms: node.real_microseconds as f64 / 1e3,
                    operators: Vec::new(),
                })
                .collect();
            (self.loaded.functions.profiling_info_list_free)(&raw mut profiles);
            Some(nodes)
        }
    }
}

/// `ov_profiling_info_t::Status` of a node that ran.
const EXECUTED: i32 = 2;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Backend, enter_unit, openvino::OpenVino};
    use std::hint::black_box;
    use std::path::Path;
    use trefoil_core::HostTensor;

    /// Prints what a call costs with and without this wrapper; a measurement to read, not a test that can fail.
    #[test]
    #[ignore = "prints a measurement"]
    fn wrapper_overhead() {
        let loaded = crate::openvino::library::loaded().unwrap();
        let first = crate::allowed_cores()[0];
        let unit = OpenVino.unit(&format!("openvino:CPU@{first}").parse().unwrap()).unwrap();
        let _thread = enter_unit(&unit).unwrap();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/conformance/relu.onnx");
        let (input, output) = crate::ports::overhead::relu_ports();
        let model = SubModel { path, inputs: vec![input.clone()], outputs: vec![output.clone()] };
        let mut compiled = compile(loaded, &model, &unit, &CompileOptions::default()).unwrap();
        let (mut x, mut y) = (HostTensor::zeros(input), HostTensor::zeros(output));
        let buffer = |tensor: &mut HostTensor| {
            let bytes = tensor.bytes_mut();
            Buffer { pointer: bytes.as_mut_ptr(), length: bytes.len() }
        };
        // SAFETY: both tensors outlive the compiled sub-model, which is dropped at the end of this scope before them.
        unsafe { compiled.bind(&[buffer(&mut x)], &[buffer(&mut y)]) }.unwrap();
        let (request, infer) = (compiled.request.get(), loaded.functions.infer_request_infer);
        let boxed: &mut dyn Compiled = &mut compiled;
        crate::ports::overhead::compare_calls(
            "openvino",
            // SAFETY: a live request, used by this thread only.
            || assert_eq!(unsafe { infer(request) }, 0),
            || {
                black_box(&mut *boxed).submit().unwrap();
                black_box(boxed.wait().unwrap());
            },
        );
        drop(compiled);
    }
}
