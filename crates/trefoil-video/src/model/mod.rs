//! An open model: what runs (configuration, experts, sampler) and where its weights lie.
//!
//! # Where the weights of each numeric path come from
//! `w8a16` and `w8a8` read the INT8 artefact as it lies. `f32` is the **unquantised** reference, so it cannot come from the
//! artefact: it reads the checkpoint, widened to f32 in memory (5.7 GB for 1.3 B parameters). Sampler and experts come from the
//! artefact's record either way, so that all paths run the same trajectory.
//!
//! An expert is a base with or without its adapter. Where experts are whole models (Wan2.2), each is an artefact of its own and
//! [`Model::joined`] puts them together.

mod compare;
mod record;
pub(crate) mod views;

pub use record::{ExpertRecord, RECORD_KEY, RECORD_VERSION, VideoRecord};
pub use views::{AdapterView, AttentionView, BlockView, LinearView};

use crate::checkpoint::{AdapterScaling, WanCheckpoint, expected_tensors};
use crate::config::DitConfig;
use crate::sampler::Sampler;
use crate::{NumericPath, VideoError};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use trefoil_kernels::{FloatWeights, Rows};
use trefoil_weights::artefact::Layout;
use trefoil_weights::tile::codes_of;
use trefoil_weights::{Artefact, Region, TensorRecord};

/// An open model. Engines share it.
#[derive(Debug)]
pub struct Model {
    record: VideoRecord,
    /// One for each stored base; several where experts are whole models.
    parts: Vec<Part>,
}

/// One stored base with its adapter.
#[derive(Debug)]
struct Part {
    path: PathBuf,
    adapter: Option<AdapterScaling>,
    weights: Weights,
    /// Block regions that another process passed on; base weights are read from these.
    regions: BTreeMap<u32, Region>,
    /// Length and time of change of an artefact's open file when it was opened.
    stamp: Option<(u64, SystemTime)>,
}

#[derive(Debug)]
enum Weights {
    Packed(Artefact),
    Float(HashMap<String, FloatTensor>),
}

#[derive(Debug)]
struct FloatTensor {
    shape: Vec<u64>,
    values: Vec<f32>,
}

impl Model {
    /// Opens a packed artefact: paths `w8a16` and `w8a8`.
    ///
    /// # Errors
    /// What [`Artefact::open`] refuses; an artefact without a video record or without one of the tensors it promises.
    pub fn open(path: &Path) -> Result<Model, VideoError> {
        Model::from_artefact(Artefact::open(path)?)
    }

    /// As [`Model::open`], of an artefact that is open already.
    ///
    /// # Errors
    /// As there.
    pub fn from_artefact(artefact: Artefact) -> Result<Model, VideoError> {
        let record = VideoRecord::of(&artefact)?;
        let model = Model::of_part(record, artefact.path().to_path_buf(), Weights::Packed(artefact));
        model.check()?;
        Ok(model)
    }

    /// Reads a checkpoint into memory: path `f32`. `sampler` as for packing; the checkpoint's own where `None`.
    ///
    /// # Errors
    /// Tensors that cannot be read, a sampler that asks for experts that the checkpoint lacks.
    pub fn from_checkpoint(checkpoint: &WanCheckpoint, sampler: Option<Sampler>) -> Result<Model, VideoError> {
        let record = VideoRecord::for_checkpoint(checkpoint, sampler)?;
        let mut tensors = HashMap::new();
        for name in checkpoint.names() {
            let Some(tensor) = checkpoint.tensor(name) else { continue };
            tensors.insert(
                name.to_string(),
                FloatTensor { shape: tensor.shape.clone(), values: checkpoint.values(name)? },
            );
        }
        let model = Model::of_part(record, checkpoint.path().to_path_buf(), Weights::Float(tensors));
        model.check()?;
        Ok(model)
    }

    /// The same weights with another sampler.
    ///
    /// # Errors
    /// A sampler that asks for experts that the model lacks.
    pub fn with_sampler(mut self, sampler: Sampler) -> Result<Model, VideoError> {
        self.record.sampler = sampler;
        self.record.check()?;
        Ok(self)
    }

    /// This model with a second whole model whose experts come behind its own (Wan2.2: one base for high noise, one for low).
    ///
    /// # Errors
    /// Models of different sizes, or a sampler that asks for experts that neither has.
    pub fn joined(mut self, second: Model, sampler: Sampler) -> Result<Model, VideoError> {
        if self.record.config != second.record.config {
            return Err(VideoError::Tensors {
                path: second.path().to_path_buf(),
                reason: format!(
                    "its sizes are not those of {}, so they are no experts of one model",
                    self.path().display()
                ),
            });
        }
        let first = self.parts.len();
        self.parts.extend(second.parts);
        let experts =
            second.record.experts.into_iter().map(|expert| ExpertRecord { base: expert.base + first, ..expert });
        self.record.experts.extend(experts);
        self.with_sampler(sampler)
    }

    /// Reads base weights from `regions` (of this artefact, which the caller has made sure of) instead of mapping the file for them.
    pub(crate) fn use_regions(&mut self, regions: Vec<Region>) {
        self.parts[0].regions = regions.into_iter().map(|region| (region.block(), region)).collect();
    }

    /// The memory that all quantised weights lie in: a piece for each block's region and for each section outside, none overlapping.
    /// Empty for a checkpoint in memory.
    pub(crate) fn memory(&self) -> Result<Vec<&[u8]>, VideoError> {
        let mut pieces = Vec::new();
        for part in &self.parts {
            let Weights::Packed(artefact) = &part.weights else { continue };
            for (section, bytes) in artefact.section_bytes().filter(|(_, bytes)| !bytes.is_empty()) {
                match section.block.and_then(|block| part.regions.get(&block)) {
                    Some(region) => pieces.push(region.bytes()?),
                    None => pieces.push(bytes),
                }
            }
        }
        Ok(pieces)
    }

    fn of_part(record: VideoRecord, path: PathBuf, weights: Weights) -> Model {
        let adapter = record.adapter.clone();
        let stamp = match &weights {
            Weights::Packed(artefact) => stamp_of(artefact),
            Weights::Float(_) => None,
        };
        Model { record, parts: vec![Part { path, adapter, weights, regions: BTreeMap::new(), stamp }] }
    }

    /// Whether the artefacts are as they were when they were opened. Writing to one is noticed by its length and time of change; another
    /// file under its name is none of it, the old one stays open.
    ///
    /// # Errors
    /// [`VideoError::Artefact`] with the one that was written to.
    pub fn check_unchanged(&self) -> Result<(), VideoError> {
        for part in &self.parts {
            if let (Weights::Packed(artefact), Some(stamp)) = (&part.weights, part.stamp)
                && stamp_of(artefact) != Some(stamp)
            {
                let reason = "it was written to while its weights were in use; pack the model again".to_string();
                return Err(VideoError::Artefact { path: part.path.clone(), reason });
            }
        }
        Ok(())
    }

    /// Checkpoint or artefact, as given; the first of several.
    pub fn path(&self) -> &Path {
        &self.parts[0].path
    }

    /// Sizes.
    pub fn config(&self) -> &DitConfig {
        &self.record.config
    }

    /// Steps, solver, guidance, expert of each step.
    pub fn sampler(&self) -> &Sampler {
        &self.record.sampler
    }

    /// Everything recorded about the model.
    pub fn record(&self) -> &VideoRecord {
        &self.record
    }

    /// The (first) artefact, unless this is a checkpoint in memory.
    pub fn artefact(&self) -> Option<&Artefact> {
        self.artefacts().next()
    }

    /// All artefacts: several where experts are whole models.
    pub fn artefacts(&self) -> impl Iterator<Item = &Artefact> {
        self.parts.iter().filter_map(|part| match &part.weights {
            Weights::Packed(artefact) => Some(artefact),
            Weights::Float(_) => None,
        })
    }

    /// Bytes of weights in this process's own memory; an artefact's pages are shared and not counted.
    pub fn private_bytes(&self) -> usize {
        let bytes = |part: &Part| match &part.weights {
            Weights::Packed(_) => 0,
            Weights::Float(tensors) => {
                tensors.values().map(|tensor| tensor.values.len() * size_of::<f32>()).sum::<usize>()
            }
        };
        self.parts.iter().map(bytes).sum()
    }

    /// Whether the weights are in the form that `path` needs.
    ///
    /// # Errors
    /// [`VideoError::Path`] with what to give instead.
    pub fn check_path(&self, path: NumericPath) -> Result<(), VideoError> {
        for part in &self.parts {
            let reason = match (&part.weights, path) {
                (Weights::Packed(_), NumericPath::F32) => {
                    "f32 is the unquantised reference and an artefact holds INT8 weights; give the checkpoint it was packed from"
                }
                (Weights::Float(_), NumericPath::W8a16 | NumericPath::W8a8) => {
                    "its weights are not quantised; pack it first with `trefoil video pack`"
                }
                _ => continue,
            };
            return Err(VideoError::Path { path: path.as_str(), model: part.path.clone(), reason: reason.to_string() });
        }
        Ok(())
    }

    /// The stored base of an expert.
    fn part(&self, expert: usize) -> &Part {
        &self.parts[self.record.experts[expert].base]
    }

    /// Every tensor that the configuration asks for is there in its shape; every view can be made.
    fn check(&self) -> Result<(), VideoError> {
        self.record.check()?;
        let config = &self.record.config;
        for (number, expert) in self.record.experts.iter().enumerate() {
            let part = self.part(number);
            for (name, shape) in expected_tensors(config, expert.own_embedder) {
                let have = part.shape(&name)?;
                if have != shape {
                    let reason = format!("tensor `{name}` is {have:?} instead of {shape:?}; pack the model again");
                    return Err(VideoError::Tensors { path: part.path.clone(), reason });
                }
            }
            for block in 0..config.layers {
                self.block(number, block)?;
            }
        }
        Ok(())
    }
}

/// Length and time of change of the file that is open.
fn stamp_of(artefact: &Artefact) -> Option<(u64, SystemTime)> {
    let about = artefact.file().metadata().ok()?;
    Some((about.len(), about.modified().ok()?))
}

impl Part {
    /// A matrix in whatever form it is stored.
    fn matrix(&self, name: &str) -> Result<FloatWeights<'_>, VideoError> {
        match &self.weights {
            Weights::Packed(artefact) => {
                let view = artefact.tensor(name)?;
                if view.record.spec.layout == Layout::Tile32 {
                    let mut matrix = artefact.matrix(name)?;
                    if let Some(region) = view.section.block.and_then(|block| self.regions.get(&block)) {
                        matrix.codes = self.codes_in(region, name, view.record)?;
                    }
                    return Ok(FloatWeights::Tiled(matrix));
                }
                self.out_in(name, &view.record.spec.shape, view.f32_values()?)
            }
            Weights::Float(tensors) => {
                let tensor = tensors.get(name).ok_or_else(|| self.lacks(name))?;
                self.out_in(name, &tensor.shape, &tensor.values)
            }
        }
    }

    /// A tensor's codes in its block's region.
    fn codes_in<'a>(&self, region: &'a Region, name: &str, record: &TensorRecord) -> Result<&'a [i8], VideoError> {
        let range = record.offset as usize..(record.offset + record.bytes) as usize;
        let bytes = region.bytes()?.get(range).ok_or_else(|| VideoError::Tensors {
            path: self.path.clone(),
            reason: format!("tensor `{name}` does not lie in the region of {} bytes that was passed on", region.len()),
        })?;
        Ok(codes_of(bytes))
    }

    /// The first `len` values of a vector or table (biases of tiled matrices are padded behind them).
    fn vector(&self, name: &str, len: usize) -> Result<&[f32], VideoError> {
        let values = match &self.weights {
            Weights::Packed(artefact) => artefact.tensor(name)?.f32_values()?,
            Weights::Float(tensors) => &tensors.get(name).ok_or_else(|| self.lacks(name))?.values,
        };
        values.get(..len).ok_or_else(|| VideoError::Tensors {
            path: self.path.clone(),
            reason: format!("tensor `{name}` has {} values instead of {len}", values.len()),
        })
    }

    /// `[out, in, …]` as a matrix of `out` rows.
    fn out_in<'a>(&self, name: &str, shape: &[u64], values: &'a [f32]) -> Result<FloatWeights<'a>, VideoError> {
        let (rows, columns) = match shape {
            [out, rest @ ..] if !rest.is_empty() => (*out as usize, rest.iter().product::<u64>() as usize),
            _ => {
                let reason = format!("tensor `{name}` {shape:?} is no matrix");
                return Err(VideoError::Tensors { path: self.path.clone(), reason });
            }
        };
        Ok(FloatWeights::OutIn(Rows::dense("the weights", values, rows, columns)?))
    }

    fn has(&self, name: &str) -> bool {
        match &self.weights {
            Weights::Packed(artefact) => artefact.tensor(name).is_ok(),
            Weights::Float(tensors) => tensors.contains_key(name),
        }
    }

    /// Shape of a tensor as in a checkpoint.
    fn shape(&self, name: &str) -> Result<Vec<u64>, VideoError> {
        match &self.weights {
            Weights::Packed(artefact) => {
                let spec = &artefact.tensor(name)?.record.spec;
                // Tiled matrices are recorded as input × output.
                let is_tiled = spec.layout == Layout::Tile32;
                Ok(if is_tiled { spec.shape.iter().rev().copied().collect() } else { spec.shape.clone() })
            }
            Weights::Float(tensors) => Ok(tensors.get(name).ok_or_else(|| self.lacks(name))?.shape.clone()),
        }
    }

    fn lacks(&self, name: &str) -> VideoError {
        VideoError::Tensors { path: self.path.clone(), reason: format!("tensor `{name}` is missing") }
    }
}
