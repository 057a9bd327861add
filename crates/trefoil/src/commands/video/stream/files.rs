//! Where a stream's clips, strips and contact sheet go.

use super::args::StreamFormat;
use super::source::Source;
use super::stage::{Outputs, Stage};
use crate::error::CliError;
use std::path::Path;
use trefoil_video::VideoError;
use trefoil_video::job::Job;
use trefoil_video::output::{ClipMetadata, write_job_sheet};

/// Name of the job's contact sheet.
pub const SHEET: &str = "contact-sheet.png";

/// A clip's place in the job's folder.
pub fn outputs_of(job: &Job, source: &Source, number: usize, metadata: ClipMetadata) -> Result<Outputs, VideoError> {
    let strip = match source.stage {
        Stage::Decode(_) => Some(job.strip(number)?),
        Stage::Latents { .. } => None,
    };
    Ok(Outputs { clip: job.path(number), strip, metadata })
}

/// A clip's place in a folder that is removed: the same work as for one that stays.
pub fn scratch_outputs(folder: &Path, source: &Source, number: usize, metadata: ClipMetadata) -> Outputs {
    let (file, strip) = match &source.stage {
        Stage::Decode(decoding) => {
            (decoding.format.file(&number.to_string()), Some(folder.join(format!("{number}-strip.png"))))
        }
        Stage::Latents { .. } => (StreamFormat::Latents.file(&number.to_string()), None),
    };
    Outputs { clip: folder.join(file), strip, metadata }
}

/// Writes the job's contact sheet, if any of its clips has a strip.
pub fn sheet(job: &Job, source: &Source) -> Result<bool, CliError> {
    let clips = &job.state().clips;
    let done: Vec<usize> = (0..clips.len()).filter(|&index| job.is_done(index)).collect();
    let strips = done.iter().map(|&index| job.strip(index)).collect::<Result<Vec<_>, _>>()?;
    if !strips.iter().any(|strip| strip.exists()) {
        return Ok(false);
    }
    let names: Vec<String> =
        done.iter().map(|&index| format!("{}: {}", clips[index].file, clips[index].prompt)).collect();
    let metadata = ClipMetadata {
        fps: source.stage.fps().unwrap_or(1),
        prompt: Some(names.join("\n")),
        seed: None,
        numeric_path: String::new(),
        plan: None,
        source: None,
    };
    write_job_sheet(&job.folder().join(SHEET), &strips, &metadata)?;
    Ok(true)
}
