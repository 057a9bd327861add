//! Preparing a model for profiling: shapes fixed, one traced run on a reference backend, constants folded, all cached.
//!
//! The traced run gives every shape, real sample data for every operator, and the reference that results are compared
//! with. It runs in a worker, with the backend's own optimisations off, on the first of `references`. Where that one does
//! not run the whole model (a model may need two backends), every node is run by itself on the first that can: another
//! backend's whole run would only be compared with itself, right or wrong.

use crate::file::write_atomically;
use crate::store::publish_folder;
use crate::trace::{Tracer, input_infos};
use crate::{Launcher, ProfileError, StoreWriter, TraceStore, cache};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;
use trefoil_core::{Granularity, HostTensor, OperatorGraph, Unit, UnitAddress};
use trefoil_onnx::{Extracted, KernelGroup, Model, Prepared};

/// How to prepare a model.
#[derive(Debug)]
pub struct PrepareOptions {
    /// Shapes of inputs that the model leaves open. Shapes of given `inputs` need not be repeated.
    pub shapes: BTreeMap<String, Vec<u64>>,
    /// Input tensors by name; `None` makes sample data ([`crate::sample_data`]).
    pub inputs: Option<Vec<HostTensor>>,
    /// Seed of sample data.
    pub seed: u64,
    /// Cache folder, see [`crate::cache`].
    pub cache_dir: PathBuf,
    /// Units to trace on, in order of preference.
    pub references: Vec<UnitAddress>,
    /// How to start workers.
    pub launcher: Launcher,
    /// Longest time of one traced run of the whole model.
    pub timeout: Duration,
}

impl PrepareOptions {
    /// Sample data of seed 0; ONNX Runtime, OpenVINO and rten as references, on the CPU, in this order.
    pub fn new(launcher: Launcher, cache_dir: PathBuf) -> Self {
        let references = ["ort", "openvino", "rten"].map(|backend| UnitAddress::new(backend, "CPU")).to_vec();
        Self {
            shapes: BTreeMap::new(),
            inputs: None,
            seed: 0,
            cache_dir,
            references,
            launcher,
            timeout: Duration::from_mins(15),
        }
    }
}

/// Where the reference values come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reference {
    /// One line for people: `ort:CPU (onnxruntime 1.32.0), graph optimisation off, on sample data of seed 0`.
    pub description: String,
    /// Number of values by the unit that computed them; one entry unless the model was traced node by node.
    pub units: BTreeMap<String, usize>,
    /// When traced node by node: the unit of each node that the first reference could not run, by node name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub exceptions: BTreeMap<String, String>,
    /// What a reader should know, such as integers that had to be zero.
    #[serde(default)]
    pub notes: Vec<String>,
}

impl Reference {
    /// Whether values of a backend are compared with values of the same backend only.
    pub fn is_self_check(&self, backend: &str) -> bool {
        let own = |unit: &String| unit.split_once(':').is_some_and(|(name, _)| name == backend);
        !self.units.is_empty() && self.units.keys().all(own)
    }
}

/// A model ready to be profiled and cut, with its traced run.
#[derive(Debug)]
pub struct PreparedModel {
    /// The prepared model.
    pub prepared: Prepared,
    /// Every boundary value of the traced run, and the inputs.
    pub trace: TraceStore,
    /// Where those values come from.
    pub reference: Reference,
    directory: PathBuf,
}

impl PreparedModel {
    /// Its folder in the cache.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Where sub-models of a granularity are extracted to.
    pub fn segments_dir(&self, granularity: Granularity) -> PathBuf {
        self.directory.join("segments").join(granularity.to_string())
    }

    /// The model as operators. `groups` are used by [`Granularity::Backend`] only.
    pub fn graph(&self, granularity: Granularity, groups: &[KernelGroup]) -> Result<OperatorGraph, ProfileError> {
        Ok(self.prepared.operator_graph(granularity, groups)?)
    }

    /// The whole prepared model as one sub-model.
    pub fn whole(&self) -> Result<Extracted, ProfileError> {
        Ok(self.prepared.whole(&self.directory.join("segments").join("whole"))?)
    }

    fn open(directory: &Path) -> Result<Self, ProfileError> {
        let path = directory.join("reference.json");
        let text = std::fs::read(&path).map_err(ProfileError::io("read", &path))?;
        let reference = serde_json::from_slice(&text).map_err(|error| ProfileError::Format {
            path,
            what: "reference description",
            reason: error.to_string(),
        })?;
        Ok(Self {
            prepared: Prepared::load(&directory.join("prepared"))?,
            trace: TraceStore::open(&directory.join("trace"))?,
            reference,
            directory: directory.to_owned(),
        })
    }
}

/// Prepares the model at `path`, or takes it from the cache. See the module.
///
/// # Errors
/// [`ProfileError::Onnx`] for a model that cannot be read or has open shapes, [`ProfileError::Input`],
/// [`ProfileError::NoReference`], [`ProfileError::Untraceable`], [`ProfileError::Interrupted`] when `stop` is raised.
pub fn prepare_model(path: &Path, options: &PrepareOptions, stop: &AtomicBool) -> Result<PreparedModel, ProfileError> {
    let mut model = Model::load(path)?;
    let mut shapes = options.shapes.clone();
    for tensor in options.inputs.iter().flatten() {
        shapes.entry(tensor.info().name.clone()).or_insert_with(|| tensor.info().shape.clone());
    }
    // A tensor that is no input of the model is told by `gather_inputs`, in its own words.
    let ports = model.inputs();
    shapes.retain(|name, _| options.shapes.contains_key(name) || ports.iter().any(|port| port.name == *name));
    model.fix_shapes(&shapes)?;
    let references = reference_units(options)?;
    let key = inputs_key(options, &references);
    let directory = cache::model_path(&options.cache_dir, model.fingerprint(), &key);
    if directory.is_dir() {
        match PreparedModel::open(&directory) {
            Ok(prepared) => return Ok(prepared),
            // A cache of another version, or damaged: made again.
            Err(_) => std::fs::remove_dir_all(&directory).map_err(ProfileError::io("remove", &directory))?,
        }
    }
    let infos = input_infos(&model)?;
    let parent = directory.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(parent).map_err(ProfileError::io("create", parent))?;
    let building = tempfile::Builder::new()
        .prefix(".preparing-")
        .permissions(std::os::unix::fs::PermissionsExt::from_mode(0o755))
        .tempdir_in(parent)
        .map_err(ProfileError::io("create a folder in", parent))?;
    let scratch = building.path().join("scratch");
    std::fs::create_dir_all(&scratch).map_err(ProfileError::io("create", &scratch))?;
    let (values, reference) = Tracer::new(options, references, scratch.clone(), stop).trace(&model, &infos)?;
    let mut writer = StoreWriter::create(&building.path().join("trace"))?;
    values.write(&mut writer)?;
    let trace = writer.finish()?;
    drop(values);
    let prepared = Prepared::new(model, &trace)?;
    prepared.save(&building.path().join("prepared"))?;
    write_atomically(&building.path().join("reference.json"), |mut file| {
        file.write_all(&serde_json::to_vec_pretty(&reference).expect("a reference serialises"))
    })?;
    std::fs::remove_dir_all(&scratch).map_err(ProfileError::io("remove", &scratch))?;
    drop((trace, prepared));
    publish_folder(building, &directory)?;
    PreparedModel::open(&directory)
}

/// The reference units that are here.
fn reference_units(options: &PrepareOptions) -> Result<Vec<Unit>, ProfileError> {
    let mut units = Vec::new();
    let mut reasons = Vec::new();
    for address in &options.references {
        match trefoil_units::resolve(address) {
            Ok(unit) if unit.simulated => reasons.push(format!("{address} is simulated")),
            Ok(unit) => units.push(unit),
            Err(error) => reasons.push(error.to_string()),
        }
    }
    if units.is_empty() { Err(ProfileError::NoReference { reasons: reasons.join("; ") }) } else { Ok(units) }
}

/// What the traced run depends on besides model and shapes: input data and the references with their versions.
fn inputs_key(options: &PrepareOptions, references: &[Unit]) -> String {
    let mut hash = Sha256::new();
    for unit in references {
        let versions = trefoil_units::backend(&unit.address.backend).map(trefoil_units::Backend::versions);
        hash.update(format!("{} {versions:?}\n", unit.address));
    }
    match &options.inputs {
        None => hash.update(format!("seed {}", options.seed)),
        Some(tensors) => {
            let mut tensors: Vec<_> = tensors.iter().collect();
            tensors.sort_by(|a, b| a.info().name.cmp(&b.info().name));
            for tensor in tensors {
                hash.update(format!("{}\n", tensor.info()));
                hash.update(tensor.bytes());
            }
        }
    }
    crate::journal::hex(&hash.finalize()[..8])
}
