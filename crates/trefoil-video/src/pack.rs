//! From a model folder or checkpoint file to an artefact that denoises: weights, configuration, experts, sampler.

use crate::VideoError;
use crate::checkpoint::{CheckpointOptions, WanCheckpoint};
use crate::model::{Model, RECORD_KEY, VideoRecord};
use crate::sampler::Sampler;
use crate::tensors::write_atomically;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use trefoil_kernels::FloatWeights;
use trefoil_weights::quantise::{MatrixSource, Orientation, quantise};
use trefoil_weights::{FloatType, PackOptions, PackProgress, PackReport, RuleSet};

/// Files that a pipeline folder may describe its sampler in, most specific first.
const SAMPLER_FILES: [&str; 2] = ["scheduler/sampler.json", "scheduler/scheduler_config.json"];

/// How to pack a video model.
#[derive(Debug, Clone, Default)]
pub struct VideoPackOptions {
    /// Configuration and adapters.
    pub checkpoint: CheckpointOptions,
    /// Sampler; where `None` the folder's own, else what [`VideoRecord::for_checkpoint`] says.
    pub sampler: Option<Sampler>,
    /// Largest region that the target platform maps, in bytes.
    pub region_limit: Option<u64>,
    /// Packing ends once it is true; see [`PackOptions::stop`].
    pub stop: Option<&'static AtomicBool>,
}

/// Where an artefact's float weights are: written beside it as `NAME.checkpoint.json`, so that `f32` finds them. It is not in
/// the artefact, whose bytes depend on the model only.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointNote {
    /// Checkpoint as an absolute path.
    pub checkpoint: PathBuf,
    /// Configuration, where it was given by hand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<PathBuf>,
    /// LoRA files.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<PathBuf>,
}

/// Packs `source` into `output` and opens the result, so that what is written is known to run.
///
/// # Errors
/// What [`WanCheckpoint::open`] and [`trefoil_weights::pack()`] refuse; a sampler that does not fit.
pub fn pack_video(
    source: &Path,
    output: &Path,
    options: &VideoPackOptions,
    progress: impl FnMut(PackProgress<'_>),
) -> Result<PackReport, VideoError> {
    let checkpoint = WanCheckpoint::open(source, &options.checkpoint)?;
    let sampler = match &options.sampler {
        Some(sampler) => Some(sampler.clone()),
        None => folder_sampler(source)?,
    };
    let record = VideoRecord::for_checkpoint(&checkpoint, sampler)?;
    drop(checkpoint);
    let json = serde_json::to_value(&record)
        .map_err(|error| VideoError::Artefact { path: output.to_path_buf(), reason: error.to_string() })?;
    let pack_options = PackOptions {
        rules: Some(RuleSet::wan()),
        extra_sources: options.checkpoint.adapters.clone(),
        region_limit: options.region_limit,
        stop: options.stop,
        adapter_scaling: record.adapter.as_ref().map(|scaling| f64::from(scaling.default)),
        metadata: serde_json::Map::from_iter([(RECORD_KEY.to_string(), json)]),
        ..PackOptions::default()
    };
    let report = trefoil_weights::pack(source, output, &pack_options, progress)?;
    Model::open(output)?;
    let absolute = |path: &PathBuf| std::fs::canonicalize(path).unwrap_or_else(|_| path.clone());
    let note = CheckpointNote {
        checkpoint: absolute(&source.to_path_buf()),
        config: options.checkpoint.config.as_ref().map(absolute),
        adapters: options.checkpoint.adapters.iter().map(absolute).collect(),
    };
    let text = serde_json::to_vec_pretty(&note)
        .map_err(|error| VideoError::Artefact { path: output.to_path_buf(), reason: error.to_string() })?;
    write_atomically(&note_path(output), &text)?;
    Ok(report)
}

/// The sampler that a pipeline folder describes; `source` is the folder, its `transformer`, or a file in one of them.
fn folder_sampler(source: &Path) -> Result<Option<Sampler>, VideoError> {
    for folder in source.ancestors().take(3).filter(|folder| folder.is_dir()) {
        if let Some(file) = SAMPLER_FILES.iter().map(|name| folder.join(name)).find(|file| file.is_file()) {
            return Sampler::read(&file).map(Some);
        }
    }
    Ok(None)
}

/// Where the note beside an artefact is.
pub fn note_path(artefact: &Path) -> PathBuf {
    let mut name = artefact.file_name().map(std::ffi::OsStr::to_os_string).unwrap_or_default();
    name.push(".checkpoint.json");
    artefact.with_file_name(name)
}

/// Opens the unquantised weights of a packed model for path `f32`, with the artefact's sampler. `checkpoint` names them; the note
/// beside the artefact where `None`.
///
/// # Errors
/// No note and no name, a checkpoint that cannot be read or is that of another model: other sizes, or weights that quantise to
/// other codes (one matrix of each block is compared).
pub fn open_reference(packed: &Model, checkpoint: Option<&Path>) -> Result<Model, VideoError> {
    let note_file = note_path(packed.path());
    let (path, options) = if let Some(path) = checkpoint {
        (path.to_path_buf(), CheckpointOptions::default())
    } else {
        let text = std::fs::read(&note_file).map_err(|_| VideoError::Path {
            path: "f32",
            model: packed.path().to_path_buf(),
            reason: format!(
                "f32 is the unquantised reference and an artefact holds INT8 weights; name the checkpoint it was packed from with --checkpoint ({} is not there)",
                note_file.display()
            ),
        })?;
        let note: CheckpointNote = serde_json::from_slice(&text).map_err(|error| VideoError::Artefact {
            path: note_file.clone(),
            reason: format!("it does not name a checkpoint ({error}); pack the model again"),
        })?;
        (note.checkpoint, CheckpointOptions { config: note.config, adapters: note.adapters })
    };
    let opened = WanCheckpoint::open(&path, &options)?;
    let model = Model::from_checkpoint(&opened, Some(packed.sampler().clone()))?;
    let (reference, record) = (model.record(), packed.record());
    if (&reference.config, &reference.experts, &reference.adapter) != (&record.config, &record.experts, &record.adapter)
    {
        return Err(VideoError::Tensors {
            path,
            reason: format!(
                "it is not the model that {} was packed from: sizes or experts differ",
                packed.path().display()
            ),
        });
    }
    for block in 0..record.config.layers {
        let name = format!("blocks.{block}.attn1.to_q.weight");
        if !quantises_to(&name, &model.matrix(0, &name)?, &packed.matrix(0, &name)?)? {
            return Err(VideoError::Tensors {
                path,
                reason: format!(
                    "it is not the model that {} was packed from: `{name}` quantises to other codes",
                    packed.path().display()
                ),
            });
        }
    }
    Ok(model)
}

/// Whether a float matrix has these codes and scales.
fn quantises_to(name: &str, floats: &FloatWeights<'_>, codes: &FloatWeights<'_>) -> Result<bool, VideoError> {
    let (FloatWeights::OutIn(rows), FloatWeights::Tiled(tiled)) = (floats, codes) else { return Ok(false) };
    let bytes: Vec<u8> = (0..rows.rows()).flat_map(|row| rows.row(row)).flat_map(|value| value.to_le_bytes()).collect();
    let source = MatrixSource::new(name, &bytes, FloatType::F32, tiled.shape, Orientation::OutIn)?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let quantised = quantise(&source, threads)?;
    Ok(quantised.codes == tiled.codes && quantised.scales == tiled.scales)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_note_lies_beside_the_artefact() {
        assert_eq!(note_path(Path::new("/a/b.trefoil")), Path::new("/a/b.trefoil.checkpoint.json"));
        assert_eq!(note_path(Path::new("b")), Path::new("b.checkpoint.json"));
    }
}
