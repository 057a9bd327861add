//! A sub-model as an ONNX Runtime session over the caller's memory.

use super::library::{Loaded, Options, Session, TypeInfo, Value, call, element};
use super::providers::Provider;
use super::trace;
use crate::affinity::unit_cores;
use crate::ports::{self, PortNames};
use crate::{Buffer, CompileOptions, Compiled, Port, PortMemory, Ports, RunTiming, SubModel, UnitError, one_line};
use ort_sys::{ExecutionMode, GraphOptimizationLevel, ONNXType, OrtAllocator, OrtSession, OrtStatusPtr, OrtValue};
use std::ffi::{CStr, CString, c_char};
use std::fs;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use trefoil_core::{DataType, NodeTime, TensorInfo, Unit, UnitKind};

/// See [`Compiled`].
pub(super) struct OrtModel {
    session: Session,
    loaded: &'static Loaded,
    ports: Ports,
    input_names: Names,
    output_names: Names,
    inputs: Values,
    outputs: Values,
    bound: bool,
    submitted: bool,
    /// What a profiling session needs to start anew: its recording ends when it is read.
    recipe: Option<Recipe>,
    unit: String,
    model: String,
}

/// Port names as the C interface takes them: pointers into strings that are kept beside them.
struct Names {
    pointers: Vec<*const c_char>,
    _text: Vec<CString>,
}

// SAFETY: the pointers lead into the strings owned by the same value.
unsafe impl Send for Names {}

impl Names {
    fn new(infos: &[TensorInfo]) -> Option<Self> {
        let text: Vec<CString> =
            infos.iter().map(|info| CString::new(info.name.as_str())).collect::<Result<_, _>>().ok()?;
        Some(Self { pointers: text.iter().map(|name| name.as_ptr()).collect(), _text: text })
    }
}

/// Tensors over the caller's memory, as owners and as the pointer list that `Run` takes.
#[derive(Default)]
struct Values {
    pointers: Vec<*mut OrtValue>,
    owners: Vec<Value>,
}

// SAFETY: the pointers are those of the owners in the same value.
unsafe impl Send for Values {}

/// How a profiling session was made.
struct Recipe {
    model: SubModel,
    unit: Unit,
    options: CompileOptions,
    provider: Option<Provider>,
    folder: ProfileFolder,
}

/// A temporary folder that takes a session's profiling file and goes when the session goes.
struct ProfileFolder(PathBuf);

impl ProfileFolder {
    fn new() -> Result<Self, String> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("trefoil-ort-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let folder = std::env::temp_dir().join(name);
        fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        Ok(Self(folder))
    }
}

impl Drop for ProfileFolder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A path as the C interface takes it.
fn path_text(path: &Path) -> Result<CString, String> {
    let text = path.to_str().ok_or("its path is not UTF-8")?;
    CString::new(text).map_err(|_| "its path holds a NUL byte".to_owned())
}

/// `intra_op_thread_affinities`: for every worker (the calling thread is the pool's first) the unit's cores, counted from 1.
/// All workers get all of them, like the calling thread, so that the scheduler can move work away from a busy core.
fn worker_affinities(cores: &[u32]) -> String {
    let set = cores.iter().map(|core| (core + 1).to_string()).collect::<Vec<_>>().join(",");
    vec![set; cores.len().saturating_sub(1)].join(";")
}

fn session_options(
    loaded: &'static Loaded,
    unit: &Unit,
    options: &CompileOptions,
    provider: Option<&Provider>,
    profile: Option<&ProfileFolder>,
) -> Result<Options, String> {
    // SAFETY: a valid place for the result.
    let session = Options::new(loaded, |place| unsafe { call!(loaded, CreateSessionOptions(place)) })?;
    let cores = if unit.kind == UnitKind::Cpu { unit_cores(unit) } else { Vec::new() };
    let threads = cores.len().max(1);
    let level = if options.reference {
        GraphOptimizationLevel::ORT_DISABLE_ALL
    } else {
        GraphOptimizationLevel::ORT_ENABLE_ALL
    };
    // SAFETY: live options, and plain numbers.
    unsafe {
        call!(loaded, SetSessionGraphOptimizationLevel(session.get(), level))?;
        call!(loaded, SetIntraOpNumThreads(session.get(), threads as i32))?;
        call!(loaded, SetInterOpNumThreads(session.get(), 1))?;
        call!(loaded, SetSessionExecutionMode(session.get(), ExecutionMode::ORT_SEQUENTIAL))?;
        call!(loaded, EnableMemPattern(session.get()))?;
    }
    let set = |key: &CStr, value: &CStr| {
        // SAFETY: live options and terminated strings, which are copied.
        unsafe { call!(loaded, AddSessionConfigEntry(session.get(), key.as_ptr(), value.as_ptr())) }
    };
    set(c"session.set_denormal_as_zero", c"1")?;
    // Spinning workers steal the cores of the units beside them.
    set(c"session.intra_op.allow_spinning", c"0")?;
    set(c"session.inter_op.allow_spinning", c"0")?;
    // Weights stored as 8-bit codes (DequantizeLinear → MatMul) are by default multiplied with activations rounded to 8
    // bits, percents off the model's own arithmetic (the suite's `qdq_weights`). Level 1 keeps activations in f32.
    set(c"session.qdq_matmulnbits_accuracy_level", c"1")?;
    // Results of units are compared: a float product with quantised weights must not quantise its activations too.
    set(c"session.qdq_matmulnbits_accuracy_level", c"1")?;
    if threads > 1 {
        let affinities = CString::new(worker_affinities(&cores)).map_err(|_| "odd cores")?;
        set(c"session.intra_op_thread_affinities", &affinities)?;
    }
    if let Some(provider) = provider {
        // No silent fallback: what the provider cannot run must fail, not move to the CPU.
        set(c"session.disable_cpu_ep_fallback", c"1")?;
        provider.append(loaded, &session)?;
    }
    if let Some(folder) = profile {
        let prefix = path_text(&folder.0.join("profile"))?;
        // SAFETY: live options and a terminated string, which is copied.
        unsafe { call!(loaded, EnableProfiling(session.get(), prefix.as_ptr())) }?;
    }
    Ok(session)
}

fn create_session(
    loaded: &'static Loaded,
    model: &SubModel,
    unit: &Unit,
    options: &CompileOptions,
    provider: Option<&Provider>,
    profile: Option<&ProfileFolder>,
) -> Result<Session, String> {
    let path = path_text(&model.path)?;
    let session_options = session_options(loaded, unit, options, provider, profile)?;
    // SAFETY: live environment and options, a terminated string and a valid place for the result.
    Session::new(loaded, |place| unsafe {
        call!(loaded, CreateSession(loaded.environment, path.as_ptr(), session_options.get(), place))
    })
}

/// Compiles `model` for `unit`; see [`crate::Backend::compile`].
pub(super) fn compile(
    loaded: &'static Loaded,
    model: &SubModel,
    unit: &Unit,
    options: &CompileOptions,
    provider: Option<Provider>,
) -> Result<OrtModel, UnitError> {
    let names = PortNames::new(model, unit);
    names.check_types(model)?;
    let refuse = |reason: String| names.compile_error(&reason);
    let folder = options.profiling.then(ProfileFolder::new).transpose().map_err(refuse)?;
    let session = create_session(loaded, model, unit, options, provider.as_ref(), folder.as_ref()).map_err(refuse)?;
    let memory = if provider.is_some() { PortMemory::Copied } else { PortMemory::Caller };
    let ports = Ports {
        inputs: check_ports(loaded, &session, &model.inputs, &INPUTS, memory, &names)?,
        outputs: check_ports(loaded, &session, &model.outputs, &OUTPUTS, memory, &names)?,
    };
    let (Some(input_names), Some(output_names)) = (Names::new(&model.inputs), Names::new(&model.outputs)) else {
        return Err(refuse("a port name holds a NUL byte".to_owned()));
    };
    let recipe = folder.map(|folder| Recipe {
        model: model.clone(),
        unit: unit.clone(),
        options: options.clone(),
        provider,
        folder,
    });
    Ok(OrtModel {
        session,
        loaded,
        ports,
        input_names,
        output_names,
        inputs: Values::default(),
        outputs: Values::default(),
        bound: false,
        submitted: false,
        recipe,
        unit: names.unit,
        model: names.model,
    })
}

/// The three functions that describe one side of a session.
struct Side {
    word: &'static str,
    count: fn(&'static Loaded, &Session) -> Result<usize, String>,
    name: unsafe fn(&'static Loaded, *const OrtSession, usize, *mut OrtAllocator, *mut *mut c_char) -> OrtStatusPtr,
    info: unsafe fn(&'static Loaded, *const OrtSession, usize, *mut *mut ort_sys::OrtTypeInfo) -> OrtStatusPtr,
}

const INPUTS: Side = Side {
    word: "input",
    count: |loaded, session| {
        let mut count = 0;
        // SAFETY: a live session and a valid place for the result.
        unsafe { call!(loaded, SessionGetInputCount(session.get(), &raw mut count)) }?;
        Ok(count)
    },
    // SAFETY: the caller passes what the function of the C interface asks for.
    name: |loaded, session, index, allocator, place| unsafe {
        ((*loaded.api).SessionGetInputName)(session, index, allocator, place)
    },
    // SAFETY: as above.
    info: |loaded, session, index, place| unsafe { ((*loaded.api).SessionGetInputTypeInfo)(session, index, place) },
};

const OUTPUTS: Side = Side {
    word: "output",
    count: |loaded, session| {
        let mut count = 0;
        // SAFETY: a live session and a valid place for the result.
        unsafe { call!(loaded, SessionGetOutputCount(session.get(), &raw mut count)) }?;
        Ok(count)
    },
    // SAFETY: the caller passes what the function of the C interface asks for.
    name: |loaded, session, index, allocator, place| unsafe {
        ((*loaded.api).SessionGetOutputName)(session, index, allocator, place)
    },
    // SAFETY: as above.
    info: |loaded, session, index, place| unsafe { ((*loaded.api).SessionGetOutputTypeInfo)(session, index, place) },
};

/// Finds every expected port in the session by its name and compares types and shapes.
fn check_ports(
    loaded: &'static Loaded,
    session: &Session,
    expected: &[TensorInfo],
    side: &Side,
    memory: PortMemory,
    names: &PortNames,
) -> Result<Vec<Port>, UnitError> {
    let refuse = |reason: String| names.compile_error(&reason);
    let count = (side.count)(loaded, session).map_err(refuse)?;
    if count != expected.len() {
        return Err(names.count_error(side.word, expected.len(), count));
    }
    let mut own = Vec::with_capacity(count);
    for index in 0..count {
        let mut text = ptr::null_mut();
        // SAFETY: a live session and allocator and a valid place for the result, which is copied and freed.
        let name = unsafe {
            loaded.check((side.name)(loaded, session.get(), index, loaded.allocator, &raw mut text)).map_err(refuse)?;
            loaded.take_text(text)
        };
        own.push(name.unwrap_or_default());
    }
    let mut found = Vec::with_capacity(count);
    for info in expected {
        let Some(index) = own.iter().position(|name| *name == info.name) else {
            let reason = format!("the model has no such {}; it has {}", side.word, own.join(", "));
            return Err(names.port_error(&info.name, reason));
        };
        let (dtype, shape) = describe(loaded, session, side, index, info).map_err(refuse)?;
        names.check_port(side.word, info, dtype, shape.as_deref())?;
        found.push(Port { info: info.clone(), memory });
    }
    Ok(found)
}

type Described = (DataType, Option<Vec<Option<u64>>>);

fn describe(
    loaded: &'static Loaded,
    session: &Session,
    side: &Side,
    index: usize,
    info: &TensorInfo,
) -> Result<Described, String> {
    let type_info = TypeInfo::new(loaded, |place| {
        // SAFETY: a live session and a valid place for the result.
        loaded.check(unsafe { (side.info)(loaded, session.get(), index, place) })
    })?;
    let mut kind = ONNXType::ONNX_TYPE_UNKNOWN;
    let mut tensor = ptr::null();
    let (mut code, mut rank) = (0i32, 0usize);
    // SAFETY: a live type description and valid places for the results. The element type is read as a number, because a
    // newer library may know types that `ort-sys` does not. The tensor description belongs to the type description.
    unsafe {
        call!(loaded, GetOnnxTypeFromTypeInfo(type_info.get(), &raw mut kind))?;
        if kind != ONNXType::ONNX_TYPE_TENSOR {
            return Ok((DataType::Opaque, None));
        }
        call!(loaded, CastTypeInfoToTensorInfo(type_info.get(), &raw mut tensor))?;
        call!(loaded, GetTensorElementType(tensor, (&raw mut code).cast()))?;
        call!(loaded, GetDimensionsCount(tensor, &raw mut rank))?;
        let mut extents = vec![0i64; rank];
        call!(loaded, GetDimensions(tensor, extents.as_mut_ptr(), rank))?;
        let extents = extents.into_iter().map(|extent| u64::try_from(extent).ok()).collect();
        // Rank 0 is either a scalar or a shape that was not inferred; the latter is settled when it runs.
        let known = rank > 0 || info.shape.is_empty();
        Ok((DataType::from_onnx(code), known.then_some(extents)))
    }
}

impl OrtModel {
    fn run_error(&self, reason: &str) -> UnitError {
        UnitError::Run { unit: self.unit.clone(), model: self.model.clone(), reason: one_line(reason) }
    }

    fn values_over(&self, ports: &[Port], buffers: &[Buffer]) -> Result<Values, String> {
        let mut values = Values::default();
        for (port, buffer) in ports.iter().zip(buffers) {
            let element = element(port.info.dtype).ok_or("a type without a byte layout")?;
            let extents: Vec<i64> = port.info.shape.iter().map(|&extent| extent as i64).collect();
            let value = Value::new(self.loaded, |place| {
                // SAFETY: the shape is copied; the buffer is exactly as long as type and shape say (checked by `bind`) and
                // outlives the tensor by the contract of `Compiled::bind`.
                unsafe {
                    call!(
                        self.loaded,
                        CreateTensorWithDataAsOrtValue(
                            self.loaded.cpu_memory,
                            buffer.pointer.cast(),
                            buffer.length,
                            extents.as_ptr(),
                            extents.len(),
                            element,
                            place
                        )
                    )
                }
            })?;
            values.pointers.push(value.get());
            values.owners.push(value);
        }
        Ok(values)
    }

    /// Ends the recording and reads it; the next `submit` begins another.
    fn read_profile(&mut self) -> Option<Vec<NodeTime>> {
        let mut text = ptr::null_mut();
        // SAFETY: a live session and allocator and a valid place for the result, which is copied and freed.
        let file = unsafe {
            call!(self.loaded, SessionEndProfiling(self.session.get(), self.loaded.allocator, &raw mut text)).ok()?;
            self.loaded.take_text(text)?
        };
        let contents = fs::read_to_string(&file).ok();
        let _ = fs::remove_file(&file);
        trace::last_execution(&contents?)
    }

    /// A session records once. After its recording was read, an equal session takes its place.
    fn renew_profiling(&mut self) -> Result<(), String> {
        let Some(recipe) = &self.recipe else { return Ok(()) };
        self.session = create_session(
            self.loaded,
            &recipe.model,
            &recipe.unit,
            &recipe.options,
            recipe.provider.as_ref(),
            Some(&recipe.folder),
        )?;
        Ok(())
    }
}

impl Compiled for OrtModel {
    fn ports(&self) -> &Ports {
        &self.ports
    }

    unsafe fn bind(&mut self, inputs: &[Buffer], outputs: &[Buffer]) -> Result<(), UnitError> {
        ports::check_buffers(&self.ports, inputs, outputs, &self.unit, &self.model)?;
        self.bound = false;
        self.submitted = false;
        self.inputs = self.values_over(&self.ports.inputs, inputs).map_err(|reason| self.run_error(&reason))?;
        self.outputs = self.values_over(&self.ports.outputs, outputs).map_err(|reason| self.run_error(&reason))?;
        self.bound = true;
        Ok(())
    }

    fn submit(&mut self) -> Result<(), UnitError> {
        if !self.bound {
            return Err(ports::unbound(&self.unit, &self.model));
        }
        // SAFETY: a live session; as many names and tensors as announced, over memory that the caller keeps. `Run` writes
        // through the given output tensors and leaves the pointers as they are. No run options are needed.
        let outcome = unsafe {
            call!(
                self.loaded,
                Run(
                    self.session.get(),
                    ptr::null(),
                    self.input_names.pointers.as_ptr(),
                    self.inputs.pointers.as_ptr().cast(),
                    self.inputs.pointers.len(),
                    self.output_names.pointers.as_ptr(),
                    self.output_names.pointers.len(),
                    self.outputs.pointers.as_mut_ptr()
                )
            )
        };
        outcome.map_err(|reason| self.run_error(&reason))?;
        self.submitted = true;
        Ok(())
    }

    fn wait(&mut self) -> Result<RunTiming, UnitError> {
        if !std::mem::take(&mut self.submitted) {
            return Err(ports::not_submitted(&self.unit, &self.model));
        }
        // `Run` returns when all is done and does not tell its parts.
        Ok(RunTiming::default())
    }

    fn node_times(&mut self) -> Option<Vec<NodeTime>> {
        let nodes = self.recipe.is_some().then(|| self.read_profile()).flatten()?;
        self.renew_profiling().ok()?;
        Some(nodes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_get_all_cores_of_the_unit_counted_from_one() {
        assert_eq!(worker_affinities(&[0, 1]), "1,2");
        assert_eq!(worker_affinities(&[2, 4, 5]), "3,5,6;3,5,6");
        assert_eq!(worker_affinities(&[3]), "");
    }

    /// Prints what a call costs with and without this wrapper; a measurement to read, not a test that can fail.
    #[test]
    #[ignore = "prints a measurement"]
    fn wrapper_overhead() {
        use crate::{Backend, enter_unit, ort::OnnxRuntime};
        use std::hint::black_box;
        use trefoil_core::HostTensor;

        let loaded = crate::ort::library::loaded().unwrap();
        let first = crate::allowed_cores()[0];
        let unit = OnnxRuntime.unit(&format!("ort:CPU@{first}").parse().unwrap()).unwrap();
        let _thread = enter_unit(&unit).unwrap();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata/conformance/relu.onnx");
        let (input, output) = crate::ports::overhead::relu_ports();
        let model = SubModel { path, inputs: vec![input.clone()], outputs: vec![output.clone()] };
        let mut compiled = compile(loaded, &model, &unit, &CompileOptions::default(), None).unwrap();
        let (mut x, mut y) = (HostTensor::zeros(input), HostTensor::zeros(output));
        let buffer = |tensor: &mut HostTensor| {
            let bytes = tensor.bytes_mut();
            Buffer { pointer: bytes.as_mut_ptr(), length: bytes.len() }
        };
        // SAFETY: both tensors outlive the compiled sub-model, which is dropped at the end of this scope before them.
        unsafe { compiled.bind(&[buffer(&mut x)], &[buffer(&mut y)]) }.unwrap();
        let (session, names) = (compiled.session.get(), &compiled.input_names.pointers);
        let (input_names, inputs) = (names.as_ptr(), compiled.inputs.pointers.as_ptr());
        let (output_names, outputs) = (compiled.output_names.pointers.as_ptr(), compiled.outputs.pointers.as_mut_ptr());
        let boxed: &mut dyn Compiled = &mut compiled;
        crate::ports::overhead::compare_calls(
            "ort",
            // SAFETY: the arguments of `submit`, used by this thread only.
            || unsafe {
                let status =
                    ((*loaded.api).Run)(session, ptr::null(), input_names, inputs.cast(), 1, output_names, 1, outputs);
                assert!(status.0.is_null());
            },
            || {
                black_box(&mut *boxed).submit().unwrap();
                black_box(boxed.wait().unwrap());
            },
        );
        drop(compiled);
    }
}
