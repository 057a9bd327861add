//! The traced run: the whole model at once, or node by node, on reference units in worker processes.

use crate::client::{CallError, WorkerSlot};
use crate::probe::{PROBE_OUTPUT, Probe, declared_shapes};
use crate::protocol::{Answer, Failure, Item, Job};
use crate::sample_data::{Integers, sample_tensor};
use crate::{PrepareOptions, ProfileError, Reference, StoreWriter, TraceStore};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use trefoil_core::{DataType, HostTensor, TensorInfo, Unit};
use trefoil_onnx::{Model, Values};
use trefoil_units::{CompileOptions, SubModel};

/// Types and shapes of all inputs, which are static by now.
pub(crate) fn input_infos(model: &Model) -> Result<Vec<TensorInfo>, ProfileError> {
    model
        .inputs()
        .iter()
        .map(|port| match port.info() {
            Some(info) if info.dtype != DataType::Opaque => Ok(info),
            _ => Err(ProfileError::Input {
                name: port.name.clone(),
                reason: "is no tensor of a type that Trefoil can hold".to_owned(),
            }),
        })
        .collect()
}

/// The inputs as given, checked, or sample data.
fn gather_inputs(
    options: &PrepareOptions,
    infos: &[TensorInfo],
    integers: Integers,
) -> Result<Vec<HostTensor>, ProfileError> {
    let Some(given) = &options.inputs else {
        return Ok(infos.iter().map(|info| sample_tensor(info, options.seed, integers)).collect());
    };
    if let Some(extra) = given.iter().find(|tensor| !infos.iter().any(|info| info.name == tensor.info().name)) {
        let names: Vec<_> = infos.iter().map(|info| info.name.as_str()).collect();
        let reason = format!("the model has no such input; it has {}", names.join(", "));
        return Err(ProfileError::Input { name: extra.info().name.clone(), reason });
    }
    infos
        .iter()
        .map(|info| {
            let fail = |reason: String| ProfileError::Input { name: info.name.clone(), reason };
            let tensor = given
                .iter()
                .find(|tensor| tensor.info().name == info.name)
                .ok_or_else(|| fail(format!("is not given; the model wants {info}")))?;
            if tensor.info().dtype != info.dtype || tensor.info().shape != info.shape {
                return Err(fail(format!("given as {}, the model wants {info}", tensor.info())));
            }
            Ok(tensor.duplicate())
        })
        .collect()
}

/// Values of a traced run: mapped from the worker's store, or collected node by node.
pub(crate) enum Traced {
    Stored { inputs: Vec<HostTensor>, store: TraceStore, opaque: Vec<String> },
    Collected(Collected),
}

impl Traced {
    /// Puts everything into a store.
    pub(crate) fn write(&self, writer: &mut StoreWriter) -> Result<(), ProfileError> {
        match self {
            Self::Stored { inputs, store, opaque } => {
                inputs.iter().try_for_each(|tensor| writer.push(tensor))?;
                for name in store.names() {
                    if let Some(tensor) = store.load(name) {
                        writer.push(&tensor)?;
                    }
                }
                write_opaque(writer, opaque)
            }
            Self::Collected(collected) => {
                collected.tensors.values().try_for_each(|tensor| writer.push(tensor))?;
                write_opaque(writer, &collected.opaque)
            }
        }
    }
}

/// Values that cannot be held are told as such, so that preparation does not miss them.
fn write_opaque(writer: &mut StoreWriter, names: &[String]) -> Result<(), ProfileError> {
    names
        .iter()
        .try_for_each(|name| writer.push(&HostTensor::zeros(TensorInfo::new(name.clone(), DataType::Opaque, [0u64]))))
}

/// Values known so far, when nodes run one by one.
#[derive(Default)]
pub(crate) struct Collected {
    tensors: BTreeMap<String, HostTensor>,
    opaque: Vec<String>,
}

impl Values for Collected {
    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.tensors.get(name).map(|tensor| tensor.info().clone())
    }

    fn tensor(&self, name: &str) -> Option<HostTensor> {
        self.tensors.get(name).map(HostTensor::duplicate)
    }
}

/// Whose word counts where the model declares a value's shape and a backend computes another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trust {
    /// The model's: the backend is no reference here.
    Declared,
    /// The backend's.
    Backend,
}

/// Runs a model so that every value is told.
pub(crate) struct Tracer<'a> {
    options: &'a PrepareOptions,
    references: Vec<Unit>,
    slots: HashMap<String, WorkerSlot>,
    scratch: PathBuf,
    stop: &'a AtomicBool,
    count: usize,
}

impl<'a> Tracer<'a> {
    /// With an empty folder for what is needed meanwhile.
    pub(crate) fn new(
        options: &'a PrepareOptions,
        references: Vec<Unit>,
        scratch: PathBuf,
        stop: &'a AtomicBool,
    ) -> Self {
        Self { options, references, slots: HashMap::new(), scratch, stop, count: 0 }
    }

    /// Traces the model; see the module.
    pub(crate) fn trace(&mut self, model: &Model, infos: &[TensorInfo]) -> Result<(Traced, Reference), ProfileError> {
        let traced = model.traced()?;
        let folder = self.fresh_folder()?;
        let declared = declared_shapes(&traced);
        let probe = Probe::new(&traced, infos.to_vec(), declared.clone(), &folder)?;
        let given = self.options.inputs.is_some();
        let wide = |info: &TensorInfo| !info.dtype.is_float() && info.dtype.size() > 1;
        let tries: &[Integers] =
            if given || !infos.iter().any(wide) { &[Integers::Small] } else { &[Integers::Small, Integers::Zero] };
        let mut notes = Vec::new();
        let mut reasons = Vec::new();
        let mut inputs = Vec::new();
        let mut ran_somewhere = false;
        for &integers in tries {
            // Zeros help only where something compiled and then failed on the data.
            if integers == Integers::Zero && !ran_somewhere {
                break;
            }
            reasons.clear();
            inputs = gather_inputs(self.options, infos, integers)?;
            let store = self.store_of(&inputs)?;
            // The most trusted reference runs the whole model, or every node that it can. Another backend's whole run would
            // be compared with itself where it computes wrongly, and nobody would know.
            let unit = self.references[0].clone();
            match self.evaluate(&probe, &unit, &store, Trust::Declared)? {
                Ok(values) => {
                    if integers == Integers::Zero {
                        notes.push("integer inputs are all zero: random small ones made the model fail".to_owned());
                    }
                    return Ok(self.stored(&probe, &unit, inputs, values, notes));
                }
                Err(failure) => {
                    ran_somewhere |= failure.stage == "run";
                    reasons.push(format!("{}: {}: {}", unit.address, failure.stage, failure.reason));
                }
            }
        }
        let first = &self.references[0].address;
        notes.push(format!(
            "{first} does not run the whole model, so it was traced node by node ({})",
            reasons.join("; ")
        ));
        let again: Vec<HostTensor> = inputs.iter().map(HostTensor::duplicate).collect();
        let untraceable = match self.trace_nodes(model, again, &declared, notes.clone()) {
            Err(error @ (ProfileError::Untraceable { .. } | ProfileError::Onnx(_))) => error,
            other => return other,
        };
        let store = self.store_of(&inputs)?;
        for (rank, unit) in self.references.clone().into_iter().enumerate() {
            if let Ok(values) = self.evaluate(&probe, &unit, &store, Trust::Backend)? {
                notes.pop();
                let address = &unit.address;
                notes.push(if rank == 0 {
                    format!("the model declares shapes that {address} does not compute; those that it computes are used")
                } else {
                    format!("{address} alone runs the whole model, so its results could not be checked against another backend")
                });
                return Ok(self.stored(&probe, &unit, inputs, values, notes));
            }
        }
        Err(match untraceable {
            // Values of integer inputs often steer (a sample rate that an If asks for), and random ones steer anywhere.
            ProfileError::Untraceable { node, kind, reasons } if !given && infos.iter().any(wide) => {
                let reasons = format!("with random integer inputs (give real ones with --input): {reasons}");
                ProfileError::Untraceable { node, kind, reasons }
            }
            other => other,
        })
    }

    /// A whole traced run on one unit.
    fn stored(
        &self,
        probe: &Probe,
        unit: &Unit,
        inputs: Vec<HostTensor>,
        store: TraceStore,
        notes: Vec<String>,
    ) -> (Traced, Reference) {
        let units = BTreeMap::from([(unit.address.to_string(), probe.len())]);
        let reference = self.reference(units, BTreeMap::new(), notes);
        (Traced::Stored { inputs, store, opaque: probe.opaque().to_vec() }, reference)
    }

    /// Runs every node by itself on the first reference that can.
    fn trace_nodes(
        &mut self,
        model: &Model,
        inputs: Vec<HostTensor>,
        declared: &HashMap<String, Vec<u64>>,
        notes: Vec<String>,
    ) -> Result<(Traced, Reference), ProfileError> {
        let mut known = Collected::default();
        known.tensors.extend(inputs.into_iter().map(|tensor| (tensor.info().name.clone(), tensor)));
        let mut units: BTreeMap<String, usize> = BTreeMap::new();
        let mut exceptions = BTreeMap::new();
        for node in 0..model.node_count() {
            let single = model.single_node(node, &known)?;
            let name = model.node_name(node).unwrap_or_default().to_owned();
            let infos = input_infos(&single)?;
            let store = self.store_of_known(&known, &infos)?;
            let folder = self.fresh_folder()?;
            let mut probe = Probe::new(&single, infos, declared.clone(), &folder)?;
            known.opaque.extend_from_slice(probe.opaque());
            if probe.is_empty() {
                continue;
            }
            let (unit, values) = self.evaluate_node(&mut probe, &store, &name)?;
            *units.entry(unit.address.to_string()).or_insert(0) += probe.len();
            if unit.address != self.references[0].address {
                exceptions.insert(name, unit.address.to_string());
            }
            for name in values.names() {
                if let Some(tensor) = values.load(name) {
                    known.tensors.insert(name.to_owned(), tensor);
                }
            }
            drop(values);
            // Weights of a big model would otherwise lie there once per node.
            let _ = std::fs::remove_dir_all(&folder);
        }
        let reference = self.reference(units, exceptions, notes);
        Ok((Traced::Collected(known), reference))
    }

    fn evaluate_node(
        &mut self,
        probe: &mut Probe,
        store: &Path,
        name: &str,
    ) -> Result<(Unit, TraceStore), ProfileError> {
        const OTHERS: [DataType; 6] =
            [DataType::F32, DataType::F16, DataType::I64, DataType::I32, DataType::Bool, DataType::U8];
        let mut reasons = Vec::new();
        for unit in self.references.clone() {
            match self.evaluate(probe, &unit, store, Trust::Declared)? {
                Ok(values) => return Ok((unit, values)),
                Err(failure) => reasons.push(format!("{}: {}: {}", unit.address, failure.stage, failure.reason)),
            }
        }
        // Perhaps only the supposed output type is wrong (custom operators that change types): try others.
        if probe.len() == 1 {
            for unit in self.references.clone() {
                for dtype in OTHERS {
                    probe.suppose(0, dtype);
                    if let Ok(values) = self.evaluate(probe, &unit, store, Trust::Declared)? {
                        return Ok((unit, values));
                    }
                }
            }
        }
        Err(ProfileError::Untraceable { node: name.to_owned(), kind: probe.first_kind(), reasons: reasons.join("; ") })
    }

    /// Both runs of a probe on one unit.
    fn evaluate(
        &mut self,
        probe: &Probe,
        unit: &Unit,
        store: &Path,
        trust: Trust,
    ) -> Result<Result<TraceStore, Failure>, ProfileError> {
        if probe.is_empty() {
            let writer = StoreWriter::create(&self.fresh_path())?;
            return Ok(Ok(writer.finish()?));
        }
        let shapes = match self.run(probe.shapes_model()?, unit, store)? {
            Ok(store) => store,
            Err(failure) => return Ok(Err(failure)),
        };
        let Some(shapes) = shapes.load(PROBE_OUTPUT) else {
            return Ok(Err(Failure::new("run", "the backend told no shapes")));
        };
        if trust == Trust::Declared
            && let Some(contradiction) = probe.contradiction(&shapes)
        {
            return Ok(Err(Failure::new("shape", &contradiction)));
        }
        self.run(probe.values_model(&shapes)?, unit, store)
    }

    fn run(&mut self, model: SubModel, unit: &Unit, store: &Path) -> Result<Result<TraceStore, Failure>, ProfileError> {
        let into = self.fresh_path();
        let item = Item {
            model,
            unit: unit.clone(),
            // Optimisers fold what depends on static shapes, and some then lose the folded output's name.
            options: CompileOptions { reference: true, ..CompileOptions::default() },
            stores: vec![store.to_owned()],
            compare: None,
            keep: None,
        };
        let launcher = &self.options.launcher;
        let slot = self.slots.entry(unit.address.to_string()).or_insert_with(|| WorkerSlot::new(launcher.clone()));
        match slot.call(&Job::Evaluate { item, into: into.clone() }, self.options.timeout, self.stop) {
            Ok(Answer::Evaluated) => Ok(Ok(TraceStore::open(&into)?)),
            Ok(_) => Ok(Err(crate::session::unexpected())),
            Err(CallError::Failure(mut failure)) => {
                // Reasons end up in notes, and the files they name are gone by then.
                failure.reason = failure.reason.replace(&format!("{}/", self.scratch.display()), "");
                Ok(Err(failure))
            }
            Err(CallError::Interrupted) => Err(ProfileError::Interrupted { done: 0, total: 1 }),
            Err(CallError::Fatal(error)) => Err(error),
        }
    }

    fn fresh_path(&mut self) -> PathBuf {
        self.count += 1;
        self.scratch.join(self.count.to_string())
    }

    fn fresh_folder(&mut self) -> Result<PathBuf, ProfileError> {
        let folder = self.fresh_path();
        std::fs::create_dir_all(&folder).map_err(ProfileError::io("create", &folder))?;
        Ok(folder)
    }

    fn store_of(&mut self, tensors: &[HostTensor]) -> Result<PathBuf, ProfileError> {
        let path = self.fresh_path();
        let mut writer = StoreWriter::create(&path)?;
        tensors.iter().try_for_each(|tensor| writer.push(tensor))?;
        writer.finish()?;
        Ok(path)
    }

    fn store_of_known(&mut self, known: &Collected, infos: &[TensorInfo]) -> Result<PathBuf, ProfileError> {
        let path = self.fresh_path();
        let mut writer = StoreWriter::create(&path)?;
        for info in infos {
            if let Some(tensor) = known.tensors.get(&info.name) {
                writer.push(tensor)?;
            }
        }
        writer.finish()?;
        Ok(path)
    }

    fn reference(
        &self,
        units: BTreeMap<String, usize>,
        exceptions: BTreeMap<String, String>,
        notes: Vec<String>,
    ) -> Reference {
        let named: Vec<String> = units
            .keys()
            .map(|unit| {
                let backend = unit.split(':').next().unwrap_or_default();
                let versions =
                    trefoil_units::backend(backend).map(trefoil_units::Backend::versions).unwrap_or_default();
                let version: Vec<_> = versions.iter().map(|(name, version)| format!("{name} {version}")).collect();
                format!("{unit} ({})", version.join(", "))
            })
            .collect();
        let data = match self.options.inputs {
            Some(_) => "on given inputs".to_owned(),
            None => format!("on sample data of seed {}", self.options.seed),
        };
        let description = format!("{}, graph optimisation off, {data}", named.join(" and "));
        Reference { description, units, exceptions, notes }
    }
}
