//! From a model folder or checkpoint file to an artefact that denoises: weights, configuration, experts, sampler.

mod claim;
mod reference;

pub use claim::PackingFolder;
pub use reference::{CheckpointNote, note_path, open_reference};

use crate::VideoError;
use crate::checkpoint::{CheckpointOptions, WanCheckpoint};
use crate::model::{Model, RECORD_KEY, VideoRecord};
use crate::sampler::Sampler;
use crate::tensors::write_atomically;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use trefoil_weights::{PackOptions, PackProgress, PackReport, RuleSet};

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
        None => sampler_file(source).map(|file| Sampler::read(&file)).transpose()?,
    };
    let record = VideoRecord::for_checkpoint(&checkpoint, sampler)?;
    checkpoint.check_adapters()?;
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
    // A folder that is not there is told by whoever writes into it.
    let _packing = PackingFolder::join(trefoil_files::folder_of(output)).ok();
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

/// The file in which a pipeline folder describes its sampler; `source` is the folder, its `transformer`, or a file in one of them.
pub fn sampler_file(source: &Path) -> Option<PathBuf> {
    let folders = source.ancestors().take(3).filter(|folder| folder.is_dir());
    let mut files = folders.flat_map(|folder| SAMPLER_FILES.iter().map(|name| folder.join(name)));
    files.find(|file| file.is_file())
}
