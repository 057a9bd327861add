//! PNG: single frames, animations, contact sheets.

use super::atomic::AtomicFile;
use super::{ClipMetadata, OutputError, VideoFrame};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

/// An encoder for 8-bit RGB with the clip's metadata.
fn encoder<W: Write>(
    out: W,
    path: &Path,
    (height, width): (usize, usize),
    metadata: Option<&ClipMetadata>,
) -> Result<png::Encoder<'static, W>, OutputError> {
    let fail = |error: png::EncodingError| OutputError::encode(path, error);
    let mut encoder = png::Encoder::new(out, width as u32, height as u32);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    for (keyword, text) in metadata.map(ClipMetadata::entries).unwrap_or_default() {
        encoder.add_itxt_chunk(keyword.to_string(), text).map_err(fail)?;
    }
    Ok(encoder)
}

/// Writes one picture to `path` as it is; the caller makes that atomic.
pub(super) fn write_picture(
    out: File,
    path: &Path,
    size: (usize, usize),
    pixels: &[u8],
    metadata: Option<&ClipMetadata>,
) -> Result<(), OutputError> {
    let fail = |error: png::EncodingError| OutputError::encode(path, error);
    let mut writer = encoder(BufWriter::new(out), path, size, metadata)?.write_header().map_err(fail)?;
    writer.write_image_data(pixels).map_err(fail)?;
    writer.finish().map_err(fail)
}

/// An animated PNG being written.
pub(super) struct AnimatedPng {
    file: AtomicFile,
    writer: png::Writer<BufWriter<File>>,
}

impl std::fmt::Debug for AnimatedPng {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("AnimatedPng").field("file", &self.file).finish_non_exhaustive()
    }
}

impl AnimatedPng {
    pub(super) fn create(
        path: &Path,
        size: (usize, usize),
        frames: usize,
        metadata: &ClipMetadata,
    ) -> Result<AnimatedPng, OutputError> {
        let file = AtomicFile::create(path)?;
        let fail = |error: png::EncodingError| OutputError::encode(path, error);
        let mut encoder = encoder(BufWriter::new(file.handle()?), path, size, Some(metadata))?;
        if frames > 1 {
            encoder.set_animated(frames as u32, 0).map_err(fail)?;
            encoder.set_frame_delay(1, metadata.fps as u16).map_err(fail)?;
        }
        let writer = encoder.write_header().map_err(fail)?;
        Ok(AnimatedPng { file, writer })
    }

    pub(super) fn push(&mut self, frame: &VideoFrame) -> Result<(), OutputError> {
        let path = self.file.path();
        self.writer.write_image_data(&frame.to_bytes()).map_err(|error| OutputError::encode(path, error))
    }

    pub(super) fn finish(self) -> Result<(), OutputError> {
        self.writer.finish().map_err(|error| OutputError::encode(self.file.path(), error))?;
        self.file.commit()
    }
}

/// Most pictures of a contact sheet.
const SHEET_FRAMES: usize = 24;
/// Pixels between them, and their shade.
const SHEET_GAP: usize = 4;
const SHEET_SHADE: u8 = 32;

/// A clip at a glance: frames chosen evenly, first and last included, in rows.
#[derive(Debug)]
pub struct ContactSheet {
    size: (usize, usize),
    /// Frames to keep.
    chosen: Vec<usize>,
    seen: usize,
    tiles: Vec<Vec<u8>>,
}

impl ContactSheet {
    /// A sheet for a clip of `frames` frames of `height` × `width`.
    pub fn new(height: usize, width: usize, frames: usize) -> ContactSheet {
        let count = frames.min(SHEET_FRAMES);
        // With one frame there is no last one besides the first.
        let chosen = (0..count).map(|tile| tile * (frames - 1) / (count - 1).max(1)).collect();
        ContactSheet { size: (height, width), chosen, seen: 0, tiles: Vec::new() }
    }

    /// Shows the next frame to the sheet.
    pub fn push(&mut self, frame: &VideoFrame) {
        if self.chosen.contains(&self.seen) && (frame.height(), frame.width()) == self.size {
            self.tiles.push(frame.to_bytes());
        }
        self.seen += 1;
    }

    /// Writes the sheet as a PNG.
    ///
    /// # Errors
    /// A file that cannot be written, or a sheet without a frame.
    pub fn write(&self, path: &Path, metadata: &ClipMetadata) -> Result<(), OutputError> {
        if self.tiles.is_empty() {
            return Err(OutputError::format(path, "a contact sheet needs at least one frame"));
        }
        let (height, width) = self.size;
        // About as wide as high on a screen of 16:9.
        let ideal = (self.tiles.len() as f64 * height as f64 / width as f64 * 16.0 / 9.0).sqrt().ceil() as usize;
        let columns = ideal.clamp(1, self.tiles.len());
        let rows = self.tiles.len().div_ceil(columns);
        let side = |count: usize, extent: usize| count * extent + (count + 1) * SHEET_GAP;
        let (sheet_height, sheet_width) = (side(rows, height), side(columns, width));
        let mut pixels = vec![SHEET_SHADE; sheet_height * sheet_width * 3];
        for (index, tile) in self.tiles.iter().enumerate() {
            let (top, left) = (side(index / columns, height), side(index % columns, width));
            for (y, line) in tile.chunks_exact(width * 3).enumerate() {
                pixels[((top + y) * sheet_width + left) * 3..][..line.len()].copy_from_slice(line);
            }
        }
        let file = AtomicFile::create(path)?;
        write_picture(file.handle()?, path, (sheet_height, sheet_width), &pixels, Some(metadata))?;
        file.commit()
    }
}
