//! The unquantised weights of an artefact, for path `f32`: where they are, and whether they are its own.

use crate::VideoError;
use crate::checkpoint::{CheckpointOptions, WanCheckpoint};
use crate::model::Model;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// What the names of notes end with.
const NOTE: &str = ".checkpoint.json";

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

impl CheckpointNote {
    /// The note beside an artefact, or `None` where there is no file.
    ///
    /// # Errors
    /// A file that is no note.
    pub fn beside(artefact: &Path) -> Result<Option<CheckpointNote>, VideoError> {
        let file = note_path(artefact);
        if file.exists() { CheckpointNote::read(&file).map(Some) } else { Ok(None) }
    }

    fn read(file: &Path) -> Result<CheckpointNote, VideoError> {
        let text = trefoil_files::read_regular(file).map_err(VideoError::io("read", file))?;
        serde_json::from_slice(&text).map_err(|error| VideoError::Artefact {
            path: file.to_path_buf(),
            reason: format!("it does not name a checkpoint ({error}); pack the model again"),
        })
    }

    fn options(self) -> (PathBuf, CheckpointOptions) {
        (self.checkpoint, CheckpointOptions { config: self.config, adapters: self.adapters })
    }
}

/// Where the note beside an artefact is.
pub fn note_path(artefact: &Path) -> PathBuf {
    let mut name = artefact.file_name().map(std::ffi::OsStr::to_os_string).unwrap_or_default();
    name.push(NOTE);
    artefact.with_file_name(name)
}

/// Checkpoint, configuration and adapters: `given` is a checkpoint, which replaces the note's, or a note that lies elsewhere.
fn sources(packed: &Model, given: Option<&Path>) -> Result<(PathBuf, CheckpointOptions), VideoError> {
    if let Some(file) = given.filter(|path| path.as_os_str().to_string_lossy().ends_with(NOTE) && path.is_file()) {
        return Ok(CheckpointNote::read(file)?.options());
    }
    match (given, CheckpointNote::beside(packed.path())?) {
        (Some(path), Some(note)) => Ok((path.to_path_buf(), note.options().1)),
        (Some(path), None) => Ok((path.to_path_buf(), CheckpointOptions::default())),
        (None, Some(note)) => Ok(note.options()),
        (None, None) => Err(VideoError::Path {
            path: "f32",
            model: packed.path().to_path_buf(),
            reason: format!(
                "f32 is the unquantised reference and an artefact holds INT8 weights; name the checkpoint it was packed from with --checkpoint ({} is not there)",
                note_path(packed.path()).display()
            ),
        }),
    }
}

/// Opens the unquantised weights of a packed model for path `f32`, with the artefact's sampler. `checkpoint` names them, or a note about
/// them; where it is `None` the note beside the artefact does. That note's configuration and adapters go with a `checkpoint` too.
///
/// # Errors
/// No note and no name, a checkpoint that cannot be read or is that of another model: other sizes, experts or values, or weights that
/// quantise to other codes (of every matrix the first, the middle and the last 32 outputs are compared).
pub fn open_reference(packed: &Model, checkpoint: Option<&Path>) -> Result<Model, VideoError> {
    let (path, options) = sources(packed, checkpoint)?;
    let opened = WanCheckpoint::open(&path, &options)?;
    let record = packed.record();
    let refuse = |what: String| VideoError::Tensors {
        path: path.clone(),
        reason: format!("it is not the model that {} was packed from: {what}", packed.path().display()),
    };
    if record.adapter.is_some() && opened.adapter.is_none() {
        return Err(refuse(format!(
            "the artefact has a LoRA file's adapter; name a note with --checkpoint NAME{NOTE} that says {{\"checkpoint\": MODEL, \"adapters\": [LORA]}}, or pack again"
        )));
    }
    let model = Model::from_checkpoint(&opened, Some(packed.sampler().clone()))?;
    let reference = model.record();
    if reference.config != record.config {
        return Err(refuse("its sizes differ".to_string()));
    }
    if (&reference.experts, &reference.adapter) != (&record.experts, &record.adapter) {
        return Err(refuse("its experts or adapters differ".to_string()));
    }
    match model.difference(packed)? {
        None => Ok(model),
        Some(difference) => Err(refuse(difference)),
    }
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
