//! The same products in other libraries: a model of one operator, run through the units.

use crate::error::CliError;
use serde::Serialize;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Instant;
use trefoil_core::{DataType, HostTensor, TensorInfo, UnitAddress};
use trefoil_kernels::bench::Workload;
use trefoil_onnx::builder::{Attribute, ModelBuilder};
use trefoil_units::{Buffer, CompileOptions, SubModel};

/// A contender that is not here, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Absent {
    /// Engine.
    pub engine: String,
    /// One line.
    pub reason: String,
}

impl Absent {
    /// An engine and the reason.
    pub fn new(engine: &str, reason: &str) -> Absent {
        Absent { engine: engine.to_owned(), reason: reason.to_owned() }
    }
}

/// A compiled model on a thread of its own, which is pinned to the unit's core and waits between calls.
pub struct Peer {
    engine: String,
    variant: String,
    /// Dropping it ends the thread.
    go: Option<Sender<()>>,
    done: Receiver<Result<f64, String>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.go = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Peer {
    /// Unit.
    pub fn engine(&self) -> &str {
        &self.engine
    }

    /// Type of the activations it was given.
    pub fn variant(&self) -> &str {
        &self.variant
    }

    /// Milliseconds of one call.
    pub fn time(&self) -> Result<f64, CliError> {
        let failed = |reason: &str| CliError::Failed(format!("{}: {reason}", self.engine));
        if self.go.as_ref().is_none_or(|go| go.send(()).is_err()) {
            return Err(failed("its thread has ended"));
        }
        match self.done.recv() {
            Ok(result) => result.map_err(|reason| failed(&reason)),
            Err(_) => Err(failed("its thread has ended")),
        }
    }

    /// Compiles `model` for `unit` and makes the first call.
    fn start(unit: &str, variant: &str, model: SubModel) -> Result<Peer, String> {
        let address: UnitAddress = unit.parse().map_err(|error: trefoil_core::CoreError| error.to_string())?;
        let unit = trefoil_units::resolve(&address).map_err(|error| error.to_string())?;
        let backend = trefoil_units::backend(&address.backend).ok_or("there is no such backend")?;
        let (go, calls) = channel::<()>();
        let (answer, done) = channel();
        let thread = std::thread::spawn(move || {
            let (failure, entered) = (answer.clone(), unit.clone());
            let mut work = move || serve(&model, &unit, &calls, &answer);
            if let Err(error) = backend.run_inside(&entered, &mut work) {
                let _ = failure.send(Err(error.to_string()));
            }
        });
        let peer =
            Peer { engine: address.to_string(), variant: variant.to_owned(), go: Some(go), done, thread: Some(thread) };
        peer.time().map_err(|error| error.to_string())?;
        Ok(peer)
    }
}

/// One execution per message.
fn serve(model: &SubModel, unit: &trefoil_core::Unit, calls: &Receiver<()>, answer: &Sender<Result<f64, String>>) {
    let mut inputs: Vec<HostTensor> = model.inputs.iter().map(input_of).collect();
    let mut outputs: Vec<HostTensor> = model.outputs.iter().map(|info| HostTensor::zeros(info.clone())).collect();
    let buffers = |tensors: &mut [HostTensor]| -> Vec<Buffer> {
        let of = |tensor: &mut HostTensor| {
            let bytes = tensor.bytes_mut();
            Buffer { pointer: bytes.as_mut_ptr(), length: bytes.len() }
        };
        tensors.iter_mut().map(of).collect()
    };
    let (ins, outs) = (buffers(&mut inputs), buffers(&mut outputs));
    // Dropped before the tensors that it is bound to.
    let compiled = trefoil_units::compile(model, unit, &CompileOptions::default()).and_then(|mut compiled| {
        // SAFETY: the tensors outlive `compiled`, and only this thread runs it.
        unsafe { compiled.bind(&ins, &outs) }.map(|()| compiled)
    });
    match compiled {
        Ok(mut compiled) => {
            while calls.recv().is_ok() {
                let start = Instant::now();
                let result = compiled.submit().and_then(|()| compiled.wait());
                let time = start.elapsed().as_secs_f64() * 1e3;
                if answer.send(result.map(|_| time).map_err(|error| error.to_string())).is_err() {
                    return;
                }
            }
        }
        Err(error) => {
            let _ = answer.send(Err(error.to_string()));
        }
    }
}

/// Values around the whole range of the codes.
fn input_of(info: &TensorInfo) -> HostTensor {
    let values: Vec<f32> = (0..info.elements()).map(|at| ((at * 37 % 255) as f32 - 127.0) * SCALE).collect();
    HostTensor::from_f32(info.name.clone(), info.shape.clone(), &values)
}

/// Scale of the activations.
const SCALE: f32 = 0.01;

/// The libraries that can run the workload, one core each. INT8 products get activations of the type (u8 or i8) that is the
/// faster one of the library in a trial, because libraries differ in which they have kernels for.
pub fn of(workload: Workload, core: u32, folder: &Path, absent: &mut Vec<Absent>) -> Vec<Peer> {
    let mut peers = Vec::new();
    for backend in ["openvino", "ort"] {
        let unit = format!("{backend}:CPU@{core}");
        let attempts: Vec<Result<Peer, String>> = match workload {
            Workload::LinearW8a8 { m, k, n } => [DataType::U8, DataType::I8]
                .into_iter()
                .map(|dtype| {
                    let name = if dtype == DataType::U8 { "u8" } else { "i8" };
                    let model =
                        save(&quantised(m, k, n, dtype), (m, k, n), &folder.join(format!("{name}-{m}-{k}-{n}.onnx")))?;
                    Peer::start(&unit, name, model)
                })
                .collect(),
            Workload::GemmF32 { m, k, n } => {
                let model = save(&plain(m, k, n), (m, k, n), &folder.join(format!("f32-{m}-{k}-{n}.onnx")));
                vec![model.and_then(|model| Peer::start(&unit, "f32", model))]
            }
            _ => continue,
        };
        let mut fastest: Option<(f64, Peer)> = None;
        for attempt in attempts {
            match attempt.and_then(|peer| Ok((trial(&peer)?, peer))) {
                Ok((time, peer)) => {
                    if fastest.as_ref().is_none_or(|(before, _)| time < *before) {
                        fastest = Some((time, peer));
                    }
                }
                Err(reason) => {
                    let absence = Absent { engine: unit.clone(), reason };
                    if !absent.contains(&absence) {
                        absent.push(absence);
                    }
                }
            }
        }
        peers.extend(fastest.map(|(_, peer)| peer));
    }
    peers
}

/// The faster of two calls, milliseconds.
fn trial(peer: &Peer) -> Result<f64, String> {
    let time = || peer.time().map_err(|error| error.to_string());
    Ok(time()?.min(time()?))
}

fn info(name: &str, shape: &[usize]) -> TensorInfo {
    let shape: Vec<u64> = shape.iter().map(|&extent| extent as u64).collect();
    TensorInfo::new(name, DataType::F32, shape)
}

fn save(model: &ModelBuilder, (m, k, n): (usize, usize, usize), path: &Path) -> Result<SubModel, String> {
    model.save(path).map_err(|error| error.to_string())?;
    Ok(SubModel { path: path.to_owned(), inputs: vec![info("x", &[m, k])], outputs: vec![info("y", &[m, n])] })
}

/// Deterministic INT8 codes.
fn codes(count: usize) -> Vec<u8> {
    let mut state = 1u32;
    (0..count)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((state >> 24) as u8 as i8).max(-127) as u8
        })
        .collect()
}

/// f32 activations, quantised with a static scale, times INT8 weights with a scale per column, plus a bias: f32 out.
fn quantised(m: usize, k: usize, n: usize, activations: DataType) -> ModelBuilder {
    let typed = |name: &str, dtype, shape: &[u64], bytes: &[u8]| {
        HostTensor::from_bytes(TensorInfo::new(name, dtype, shape), bytes).expect("the bytes fit the shape")
    };
    let zero = if activations == DataType::U8 { 128 } else { 0 };
    ModelBuilder::new("linear", 17)
        .input(&info("x", &[m, k]))
        .constant(&HostTensor::from_f32("x_scale", [], &[SCALE]))
        .constant(&typed("x_zero", activations, &[], &[zero]))
        .constant(&typed("w_codes", DataType::I8, &[k as u64, n as u64], &codes(k * n)))
        .constant(&HostTensor::from_f32("w_scale", [n as u64], &vec![SCALE; n]))
        .constant(&typed("w_zero", DataType::I8, &[n as u64], &vec![0; n]))
        .random_constant("bias", &[n as u64], 1.0)
        .node("QuantizeLinear", &["x", "x_scale", "x_zero"], &["x_codes"], &[])
        .node("DequantizeLinear", &["x_codes", "x_scale", "x_zero"], &["x_values"], &[])
        .node("DequantizeLinear", &["w_codes", "w_scale", "w_zero"], &["w"], &[("axis", Attribute::Int(1))])
        .node("MatMul", &["x_values", "w"], &["product"], &[])
        .node("Add", &["product", "bias"], &["y"], &[])
        .output(&info("y", &[m, n]))
}

/// The f32 product with a bias.
fn plain(m: usize, k: usize, n: usize) -> ModelBuilder {
    ModelBuilder::new("linear", 17)
        .input(&info("x", &[m, k]))
        .random_constant("w", &[k as u64, n as u64], 0.03)
        .random_constant("bias", &[n as u64], 1.0)
        .node("MatMul", &["x", "w"], &["product"], &[])
        .node("Add", &["product", "bias"], &["y"], &[])
        .output(&info("y", &[m, n]))
}
