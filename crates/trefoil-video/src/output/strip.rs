//! A job at a glance: a strip of small frames for each clip, and all strips on one sheet.
//!
//! Strips are files of their own, so that a job that goes on later can show the clips of earlier runs too.

use super::atomic::AtomicFile;
use super::png::write_picture;
use super::{ClipMetadata, OutputError, VideoFrame};
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

/// Frames of a strip.
const FRAMES: usize = 4;
/// Largest side of a small frame, in pixels.
const MOST_SIDE: usize = 160;
/// Pixels between pictures, and their shade.
const GAP: usize = 4;
const SHADE: u8 = 32;
/// Most strips of a sheet.
const MOST_STRIPS: usize = 400;

/// The strip of a clip: four frames chosen evenly, first and last included, in a row.
#[derive(Debug)]
pub struct ClipStrip {
    /// Rows and columns of a small frame.
    size: (usize, usize),
    /// Pixels of a frame, in each direction, that become one.
    factor: usize,
    chosen: Vec<usize>,
    seen: usize,
    tiles: Vec<Vec<u8>>,
}

impl ClipStrip {
    /// A strip for a clip of `frames` frames of `height` × `width`.
    pub fn new(height: usize, width: usize, frames: usize) -> ClipStrip {
        let factor = height.max(width).div_ceil(MOST_SIDE).max(1);
        let count = frames.clamp(1, FRAMES);
        ClipStrip {
            size: ((height / factor).max(1), (width / factor).max(1)),
            factor,
            chosen: (0..count).map(|tile| tile * (frames.max(1) - 1) / (count - 1).max(1)).collect(),
            seen: 0,
            tiles: Vec::new(),
        }
    }

    /// Shows the next frame to the strip.
    pub fn push(&mut self, frame: &VideoFrame) {
        if self.chosen.contains(&self.seen) {
            self.tiles.push(self.smaller(frame));
        }
        self.seen += 1;
    }

    /// Means of squares of `factor` × `factor` pixels.
    fn smaller(&self, frame: &VideoFrame) -> Vec<u8> {
        let bytes = frame.to_bytes();
        let ((rows, columns), factor, width) = (self.size, self.factor, frame.width());
        let area = factor * factor;
        let mut small = Vec::with_capacity(rows * columns * 3);
        for row in 0..rows {
            for column in 0..columns {
                for channel in 0..3 {
                    let line = |y: usize| ((row * factor + y) * width + column * factor) * 3 + channel;
                    let sum: usize = (0..factor)
                        .map(|y| {
                            bytes[line(y)..]
                                .iter()
                                .step_by(3)
                                .take(factor)
                                .map(|&byte| usize::from(byte))
                                .sum::<usize>()
                        })
                        .sum();
                    small.push(((sum + area / 2) / area) as u8);
                }
            }
        }
        small
    }

    /// Writes the strip as a PNG.
    ///
    /// # Errors
    /// A file that cannot be written, or a strip without a frame.
    pub fn write(&self, path: &Path, metadata: &ClipMetadata) -> Result<(), OutputError> {
        if self.tiles.is_empty() {
            return Err(OutputError::format(path, "a strip needs at least one frame"));
        }
        let tiles: Vec<Option<&[u8]>> = self.tiles.iter().map(|tile| Some(tile.as_slice())).collect();
        write_grid(path, self.size, tiles.len(), &tiles, metadata)
    }
}

/// Puts strips on one sheet, in rows from left to right; a strip that cannot be read stays empty. Returns how many are on it.
///
/// # Errors
/// A sheet that cannot be written, no strip that can be read.
pub fn write_job_sheet(path: &Path, strips: &[PathBuf], metadata: &ClipMetadata) -> Result<usize, OutputError> {
    let pictures: Vec<Option<Picture>> = strips.iter().take(MOST_STRIPS).map(|strip| read_picture(strip)).collect();
    let Some((height, width)) = pictures.iter().flatten().map(|picture| picture.size).next() else {
        return Err(OutputError::format(path, "none of the job's strips can be read"));
    };
    let tiles: Vec<Option<&[u8]>> = pictures
        .iter()
        .map(|picture| {
            picture.as_ref().filter(|picture| picture.size == (height, width)).map(|picture| &picture.pixels[..])
        })
        .collect();
    // About as wide as high on a screen of 16:9.
    let ideal = (tiles.len() as f64 * height as f64 / width as f64 * 16.0 / 9.0).sqrt().round() as usize;
    write_grid(path, (height, width), ideal.clamp(1, tiles.len()), &tiles, metadata)?;
    Ok(tiles.iter().flatten().count())
}

struct Picture {
    size: (usize, usize),
    pixels: Vec<u8>,
}

/// An 8-bit RGB picture that this program wrote.
fn read_picture(path: &Path) -> Option<Picture> {
    let mut reader = png::Decoder::new(BufReader::new(File::open(path).ok()?)).read_info().ok()?;
    let mut pixels = vec![0; reader.output_buffer_size()?];
    let info = reader.next_frame(&mut pixels).ok()?;
    let size = (info.height as usize, info.width as usize);
    let is_ours = info.color_type == png::ColorType::Rgb && info.bit_depth == png::BitDepth::Eight;
    (is_ours && pixels.len() == size.0 * size.1 * 3).then_some(Picture { size, pixels })
}

/// Writes pictures of one size in rows of `columns`.
fn write_grid(
    path: &Path,
    (height, width): (usize, usize),
    columns: usize,
    tiles: &[Option<&[u8]>],
    metadata: &ClipMetadata,
) -> Result<(), OutputError> {
    let side = |count: usize, extent: usize| count * extent + (count + 1) * GAP;
    let (all_rows, all_columns) = (side(tiles.len().div_ceil(columns), height), side(columns, width));
    let mut pixels = vec![SHADE; all_rows * all_columns * 3];
    for (index, tile) in tiles.iter().enumerate() {
        let Some(tile) = tile else { continue };
        let (top, left) = (side(index / columns, height), side(index % columns, width));
        for (y, line) in tile.chunks_exact(width * 3).enumerate() {
            pixels[((top + y) * all_columns + left) * 3..][..line.len()].copy_from_slice(line);
        }
    }
    let file = AtomicFile::create(path)?;
    write_picture(file.handle()?, path, (all_rows, all_columns), &pixels, Some(metadata))?;
    file.commit()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn metadata() -> ClipMetadata {
        ClipMetadata { fps: 8, prompt: None, seed: None, numeric_path: "f32".to_string(), plan: None, source: None }
    }

    #[test]
    fn strips_are_small_and_stand_on_one_sheet() {
        let folder = tempfile::tempdir().unwrap();
        let mut paths = Vec::new();
        for clip in 0..3u8 {
            let mut strip = ClipStrip::new(400, 480, 9);
            for frame in 0..9u8 {
                strip.push(&VideoFrame::from_bytes(400, 480, &vec![clip * 40 + frame; 400 * 480 * 3]));
            }
            assert_eq!((strip.size, strip.chosen.as_slice()), ((133, 160), &[0, 2, 5, 8][..]));
            let path = folder.path().join(format!("{clip}.png"));
            strip.write(&path, &metadata()).unwrap();
            paths.push(path);
        }
        let strip = read_picture(&paths[1]).unwrap();
        assert_eq!(strip.size, (133 + 2 * GAP, 4 * 160 + 5 * GAP));
        // The last frame of the second clip, in its place.
        let last = (GAP * strip.size.1 + 3 * 160 + 4 * GAP) * 3;
        assert_eq!(strip.pixels[last], 48);
        // A strip that is damaged leaves its place empty.
        std::fs::write(&paths[2], b"no picture").unwrap();
        let sheet = folder.path().join("sheet.png");
        assert_eq!(write_job_sheet(&sheet, &paths, &metadata()).unwrap(), 2);
        let sheet = read_picture(&sheet).unwrap();
        assert!(sheet.size.0 > 2 * 133 && sheet.pixels.contains(&48));
        assert!(write_job_sheet(&folder.path().join("none.png"), &paths[2..], &metadata()).is_err());
        assert!(ClipStrip::new(8, 8, 3).write(&folder.path().join("empty.png"), &metadata()).is_err());
        // One frame is its own first and last.
        let mut strip = ClipStrip::new(2, 2, 1);
        strip.push(&VideoFrame::from_bytes(2, 2, &[7; 12]));
        assert_eq!(strip.tiles, [vec![7; 12]]);
    }
}
