//! A sub-model compiled, bound to buffers with real data, checked and timed.

use crate::TraceStore;
use crate::protocol::{Failure, Item, ItemResult, Sampling};
use crate::sampling::{Pacer, milliseconds, typical};
use crate::tolerance::{Deviation, compare};
use std::path::PathBuf;
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
    trefoil_units::backend(&unit.address.backend)
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
        let compiled =
            backend.compile(&item.model, &item.unit, &item.options).map_err(|error| unit_failure("compile", &error))?;
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
            for output in &self.outputs {
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
        let Some((index, total)) = typical(&mut totals) else { return Err(Failure::new("run", "no sample was taken")) };
        let batch = &mut batches[index];
        let timing = Timing {
            total: Some(total),
            h2d: Samples::from_values(&mut batch.h2d),
            dispatch: Samples::from_values(&mut batch.dispatch),
            exec: Samples::from_values(&mut batch.exec),
            d2h: Samples::from_values(&mut batch.d2h),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StoreWriter;
    use crate::tolerance::Leniency;
    use std::collections::{BTreeMap, BTreeSet};
    use trefoil_core::{DataType, UnitAddress, UnitKind, UnitLimits};
    use trefoil_units::{Availability, CompileOptions, Ports, SubModel};

    /// What the fake backend does wrong.
    #[derive(Clone, Copy, PartialEq)]
    enum Fault {
        None,
        /// Adds to the last element.
        Offset(f32),
        /// Adds one more to the last element with every execution.
        Drift,
        Compile,
        Run,
    }

    struct Fake(Fault);

    /// Hands its only input on.
    struct FakeCompiled {
        fault: Fault,
        ports: Ports,
        buffers: Option<(Buffer, Buffer)>,
        runs: u32,
    }

    fn error(fault: &str) -> UnitError {
        UnitError::Run { unit: "fake:CPU".into(), model: "m".into(), reason: fault.into() }
    }

    impl Backend for Fake {
        fn name(&self) -> &'static str {
            "fake"
        }
        fn check(&self) -> Availability {
            Availability::Available { version: "1".into(), library: None }
        }
        fn units(&self) -> Vec<(Unit, Availability)> {
            Vec::new()
        }
        fn unit(&self, _: &UnitAddress) -> Result<Unit, UnitError> {
            Ok(unit())
        }
        fn compile(&self, _: &SubModel, _: &Unit, _: &CompileOptions) -> Result<Box<dyn Compiled>, UnitError> {
            if self.0 == Fault::Compile {
                let (unit, model) = ("fake:CPU".into(), "m".into());
                return Err(UnitError::Compile { unit, model, reason: "no such operator".into() });
            }
            Ok(Box::new(FakeCompiled { fault: self.0, ports: Ports::default(), buffers: None, runs: 0 }))
        }
        fn versions(&self) -> BTreeMap<String, String> {
            BTreeMap::new()
        }
    }

    #[allow(clippy::cast_ptr_alignment)] // tensors are aligned to 128 bytes
    impl Compiled for FakeCompiled {
        fn ports(&self) -> &Ports {
            &self.ports
        }
        unsafe fn bind(&mut self, inputs: &[Buffer], outputs: &[Buffer]) -> Result<(), UnitError> {
            self.buffers = Some((inputs[0], outputs[0]));
            Ok(())
        }
        fn submit(&mut self) -> Result<(), UnitError> {
            let Some((from, to)) = self.buffers else { return Err(error("unbound")) };
            if self.fault == Fault::Run {
                return Err(error("device lost"));
            }
            let count = from.length / 4;
            // SAFETY: `bind` promised both buffers; they hold `count` aligned f32 and do not overlap.
            let (from, to) = unsafe {
                (
                    std::slice::from_raw_parts(from.pointer.cast::<f32>(), count),
                    std::slice::from_raw_parts_mut(to.pointer.cast::<f32>(), count),
                )
            };
            to.copy_from_slice(from);
            self.runs += 1;
            match self.fault {
                Fault::Offset(offset) => to[count - 1] += offset,
                Fault::Drift => to[count - 1] += self.runs as f32 * 1e-5,
                _ => {}
            }
            Ok(())
        }
        fn wait(&mut self) -> Result<RunTiming, UnitError> {
            Ok(RunTiming { exec_ms: Some(0.25), ..RunTiming::default() })
        }
    }

    fn unit() -> Unit {
        Unit {
            address: UnitAddress::new("fake", "CPU"),
            kind: UnitKind::Cpu,
            resources: BTreeSet::new(),
            limits: UnitLimits::default(),
            simulated: false,
            description: None,
        }
    }

    fn measure(fault: Fault, compare: bool) -> Result<ItemResult, Failure> {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = StoreWriter::create(&folder.path().join("trace")).unwrap();
        writer.push(&HostTensor::from_f32("x", [4u64], &[1.0, 2.0, 3.0, 4.0])).unwrap();
        writer.push(&HostTensor::from_f32("y", [4u64], &[1.0, 2.0, 3.0, 4.0])).unwrap();
        writer.finish().unwrap();
        let item = Item {
            model: SubModel {
                path: "m.onnx".into(),
                inputs: vec![TensorInfo::new("x", DataType::F32, [4u64])],
                outputs: vec![TensorInfo::new("y", DataType::F32, [4u64])],
            },
            unit: unit(),
            options: CompileOptions::default(),
            stores: vec![folder.path().join("trace")],
            compare: compare.then(Leniency::default),
            keep: None,
        };
        let mut loaded = Loaded::load_with(&Fake(fault), &item)?;
        loaded.begin(&item, Sampling { warmup: 2, runs: 9, batches: 3, cap_ms: 1000.0 })?;
        for _ in 0..3 {
            loaded.time_batch()?;
        }
        loaded.finish()
    }

    #[test]
    #[allow(clippy::float_cmp)] // exact values are meant
    fn a_right_result_is_timed_in_parts() {
        let result = measure(Fault::None, true).unwrap();
        assert_eq!(result.deviation.unwrap().wrong, None);
        assert!(result.repeatable);
        assert_eq!(result.timing.total.unwrap().count, 9);
        assert_eq!(result.timing.exec.unwrap().median, 0.25);
        assert_eq!((result.timing.h2d, result.timing.dispatch, result.timing.d2h), (None, None, None));
    }

    #[test]
    fn a_wrong_result_is_seen_and_a_close_one_passes() {
        let wrong = measure(Fault::Offset(-0.1), true).unwrap().deviation.unwrap();
        assert!((wrong.error_to_peak - 0.025).abs() < 1e-6);
        assert_eq!(
            wrong.wrong.unwrap(),
            "output `y`: 1 of 4 elements off, element 3 is 3.9000000953674316 instead of 4"
        );
        assert_eq!(measure(Fault::Offset(0.004), true).unwrap().deviation.unwrap().wrong, None);
        assert_eq!(measure(Fault::Offset(-0.1), false).unwrap().deviation, None);
    }

    #[test]
    fn results_that_change_are_not_repeatable() {
        assert!(!measure(Fault::Drift, true).unwrap().repeatable);
    }

    #[test]
    fn failures_tell_their_stage_in_the_backends_words() {
        let failure = measure(Fault::Compile, true).unwrap_err();
        assert_eq!((failure.stage.as_str(), failure.reason.as_str()), ("compile", "no such operator"));
        let failure = measure(Fault::Run, true).unwrap_err();
        assert_eq!((failure.stage.as_str(), failure.reason.as_str()), ("run", "device lost"));
    }
}
