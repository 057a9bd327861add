//! A sub-model compiled, bound to buffers with real data, checked and timed.

use crate::protocol::{Failure, Item, ItemResult, Sampling};
use crate::sampling::{Pacer, calmest, milliseconds};
use crate::tolerance::{Deviation, compare};
use crate::{StoreWriter, TraceStore};
use std::path::{Path, PathBuf};
use std::time::Instant;
use trefoil_core::{HostTensor, NodeTime, Samples, TensorInfo, Timing, Unit};
use trefoil_units::{Backend, Buffer, Compiled, RunTiming, UnitError};

/// Times of one batch, by part; a part has fewer entries than the total when the backend does not tell it.
#[derive(Debug, Default)]
pub struct Batch {
    total: Vec<f64>,
    h2d: Vec<f64>,
    dispatch: Vec<f64>,
    exec: Vec<f64>,
    d2h: Vec<f64>,
}

impl Batch {
    fn push(&mut self, total: f64, parts: RunTiming) {
        self.total.push(total);
        self.h2d.extend(parts.h2d_ms);
        self.dispatch.extend(parts.dispatch_ms);
        self.exec.extend(parts.exec_ms);
        self.d2h.extend(parts.d2h_ms);
    }
}

/// A compiled sub-model with buffers of its own. Dropped before its buffers (field order), as `bind` demands.
pub struct Loaded {
    compiled: Box<dyn Compiled>,
    inputs: Vec<HostTensor>,
    outputs: Vec<HostTensor>,
    pacer: Option<Pacer>,
    batches: Vec<Batch>,
    deviation: Option<Deviation>,
    first_outputs: Vec<u64>,
}

/// The backend of a unit.
///
/// # Errors
/// A failure of stage `compile` when there is none of that name.
pub fn backend_of(unit: &Unit) -> Result<&'static dyn Backend, Failure> {
    trefoil_units::registry::backend(&unit.address.backend)
        .ok_or_else(|| Failure::new("compile", &format!("this worker has no backend `{}`", unit.address.backend)))
}

/// The stage that an error of the trait belongs to.
pub fn unit_failure(stage: &str, error: &UnitError) -> Failure {
    let stage = match error {
        UnitError::Compile { .. } => "compile",
        UnitError::Run { .. } => "run",
        _ => stage,
    };
    // The unit and file are told by the measurement itself; what the backend said is what counts.
    let reason = match error {
        UnitError::Compile { reason, .. } | UnitError::Run { reason, .. } => reason.clone(),
        other => other.to_string(),
    };
    Failure::new(stage, &reason)
}

/// Opens the stores of an item.
fn open_stores(folders: &[PathBuf]) -> Result<Vec<TraceStore>, Failure> {
    folders
        .iter()
        .map(|folder| TraceStore::open(folder).map_err(|error| Failure::new("bind", &error.to_string())))
        .collect()
}

fn load_tensor(stores: &[TraceStore], name: &str) -> Option<HostTensor> {
    stores.iter().find_map(|store| store.load(name))
}

fn load_input(stores: &[TraceStore], info: &TensorInfo) -> Result<HostTensor, Failure> {
    let tensor = load_tensor(stores, &info.name)
        .ok_or_else(|| Failure::new("bind", &format!("no sample data for input `{}`", info.name)))?;
    if tensor.info().dtype != info.dtype || tensor.info().shape != info.shape {
        let reason = format!("input is {info}, its sample data is {}", tensor.info());
        return Err(Failure::new("bind", &reason));
    }
    Ok(tensor)
}

impl Loaded {
    /// Compiles the item on the present thread, which has entered the unit, loads its inputs and binds everything.
    pub fn load(item: &Item) -> Result<Self, Failure> {
        Self::load_with(backend_of(&item.unit)?, item)
    }

    /// As [`Loaded::load`] on a given backend.
    pub fn load_with(backend: &dyn Backend, item: &Item) -> Result<Self, Failure> {
        let stores = open_stores(&item.stores)?;
        let inputs = item.model.inputs.iter().map(|info| load_input(&stores, info)).collect::<Result<Vec<_>, _>>()?;
        let outputs: Vec<_> = item.model.outputs.iter().map(|info| HostTensor::zeros(info.clone())).collect();
        let compiled = backend
            .compile(&item.model, &item.unit, &item.options)
            .map_err(|error| unit_failure("compile", &error))?;
        let mut loaded = Self {
            compiled,
            inputs,
            outputs,
            pacer: None,
            batches: Vec::new(),
            deviation: None,
            first_outputs: Vec::new(),
        };
        loaded.bind()?;
        Ok(loaded)
    }

    fn bind(&mut self) -> Result<(), Failure> {
        let inputs: Vec<_> = self.inputs.iter_mut().map(buffer_of).collect();
        let outputs: Vec<_> = self.outputs.iter_mut().map(buffer_of).collect();
        self.rebind(&inputs, &outputs)
    }

    /// Binds other memory than its own, for hand-over chains; the caller keeps it alive while `self` is used.
    pub fn rebind(&mut self, inputs: &[Buffer], outputs: &[Buffer]) -> Result<(), Failure> {
        // SAFETY: `self` owns the buffers of `bind`, and its `compiled` is declared, hence dropped, before them; other
        // callers of `rebind` keep theirs alive and run one execution at a time.
        unsafe { self.compiled.bind(inputs, outputs) }.map_err(|error| unit_failure("bind", &error))
    }

    /// One execution.
    pub fn execute(&mut self) -> Result<RunTiming, Failure> {
        self.compiled.submit().and_then(|()| self.compiled.wait()).map_err(|error| unit_failure("run", &error))
    }

    /// Node times of the last execution.
    pub fn node_times(&mut self) -> Option<Vec<NodeTime>> {
        self.compiled.node_times()
    }

    /// The output tensors as the last execution left them.
    pub fn outputs(&self) -> &[HostTensor] {
        &self.outputs
    }

    /// Checks the first execution against the reference, then warms up.
    pub fn begin(&mut self, item: &Item, sampling: Sampling) -> Result<(), Failure> {
        self.batches.clear();
        self.execute()?;
        self.first_outputs = self.outputs.iter().map(|tensor| fingerprint(tensor.bytes())).collect();
        self.deviation = None;
        if let Some(leniency) = &item.compare {
            let stores = open_stores(&item.stores)?;
            for output in self.outputs() {
                let Some(reference) = load_tensor(&stores, &output.info().name) else { continue };
                let deviation = compare(output, &reference, leniency);
                self.deviation = Some(match self.deviation.take() {
                    None => deviation,
                    Some(worst) => worst.worse(deviation),
                });
            }
        }
        let pacer = Pacer::new(sampling);
        pacer.warm_up(|| self.execute().map(drop))?;
        self.pacer = Some(pacer);
        Ok(())
    }

    /// Takes one batch of samples.
    pub fn time_batch(&mut self) -> Result<(), Failure> {
        let Some(pacer) = self.pacer.take() else { return Err(Failure::new("run", "was not warmed up")) };
        let mut batch = Batch::default();
        let outcome = pacer.batch(|| {
            let began = Instant::now();
            let parts = self.execute()?;
            batch.push(milliseconds(began, Instant::now()), parts);
            Ok(())
        });
        self.pacer = Some(pacer);
        self.batches.push(batch);
        outcome
    }

    /// Summarises the batches.
    pub fn finish(&mut self) -> Result<ItemResult, Failure> {
        let mut batches = std::mem::take(&mut self.batches);
        let mut totals: Vec<Vec<f64>> = batches.iter_mut().map(|batch| std::mem::take(&mut batch.total)).collect();
        let Some((index, total)) = calmest(&mut totals) else { return Err(Failure::new("run", "no sample was taken")) };
        let calm = &mut batches[index];
        let timing = Timing {
            total: Some(total),
            h2d: Samples::from_values(&mut calm.h2d),
            dispatch: Samples::from_values(&mut calm.dispatch),
            exec: Samples::from_values(&mut calm.exec),
            d2h: Samples::from_values(&mut calm.d2h),
        };
        let last: Vec<u64> = self.outputs.iter().map(|tensor| fingerprint(tensor.bytes())).collect();
        Ok(ItemResult { timing, deviation: self.deviation.take(), repeatable: last == self.first_outputs })
    }
}

/// The address and length of a tensor's bytes.
pub fn buffer_of(tensor: &mut HostTensor) -> Buffer {
    let bytes = tensor.bytes_mut();
    Buffer { pointer: bytes.as_mut_ptr(), length: bytes.len() }
}

/// A 64-bit fingerprint of bytes, to tell whether two executions agree (not a security matter).
fn fingerprint(bytes: &[u8]) -> u64 {
    use std::hash::Hasher;
    let mut hasher = std::hash::DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

/// Runs a whole model once and stores its outputs with the shapes they really have.
pub fn evaluate(
    model: &Path,
    unit: &Unit,
    stores: &[PathBuf],
    inputs: &[String],
    outputs: &[String],
    into: &Path,
) -> Result<(), Failure> {
    let backend = backend_of(unit)?;
    let stores = open_stores(stores)?;
    let mut tensors = Vec::new();
    for name in inputs {
        let tensor = load_tensor(&stores, name)
            .ok_or_else(|| Failure::new("bind", &format!("no sample data for input `{name}`")))?;
        tensors.push(tensor);
    }
    let results =
        backend.evaluate(model, unit, &tensors, outputs).map_err(|error| unit_failure("run", &error))?;
    let store = |error: crate::ProfileError| Failure::new("run", &error.to_string());
    let mut writer = StoreWriter::create(into).map_err(store)?;
    for tensor in &results {
        writer.push(tensor).map_err(store)?;
    }
    writer.finish().map_err(store)?;
    Ok(())
}
