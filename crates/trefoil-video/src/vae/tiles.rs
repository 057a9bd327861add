//! Decoding in spatial tiles: less memory, a slightly different picture.
//!
//! Each tile is a clip of its own, with its own histories, from the first latent frame to the last; then the next tile is
//! decoded in the same memory. Where tiles overlap, the later one is faded in, downwards first and then to the right, as
//! diffusers does. The middle's attention sees only its tile, so the result differs from the untiled one.

use super::session::MAX_SIDE;
use super::{DecoderKernels, DecoderMemory, Latent, VaeDecoder, VaeError};
use crate::output::VideoFrame;

/// How a latent is cut into tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TileLayout {
    height: usize,
    width: usize,
    size: usize,
    stride: usize,
}

impl TileLayout {
    /// Square tiles of `size` latent pixels whose first rows and columns are `stride` apart, over a latent of `height` ×
    /// `width`. The last ones are cut short by the border.
    ///
    /// # Errors
    /// A stride of zero or above the size (which would leave gaps), an overlap above the stride.
    pub fn new(height: usize, width: usize, size: usize, stride: usize) -> Result<TileLayout, VaeError> {
        let fail = |reason| Err(VaeError::Tiles { size, stride, reason });
        if stride == 0 || stride > size {
            return fail("the stride must be at least 1 and at most the size, or parts would be left out");
        }
        if size - stride > stride {
            return fail("tiles may overlap by at most their stride: a seam is blended with the next tile only");
        }
        if size > MAX_SIDE {
            return fail("a tile has at most 1024 latent pixels a side");
        }
        if height == 0 || width == 0 {
            return fail("the latent is empty");
        }
        Ok(TileLayout { height, width, size, stride })
    }

    /// Side of a tile, latent pixels.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Distance from one tile to the next, latent pixels.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// First row of each row of tiles.
    fn rows(&self) -> impl Iterator<Item = usize> {
        (0..self.height).step_by(self.stride)
    }

    fn columns(&self) -> impl Iterator<Item = usize> {
        (0..self.width).step_by(self.stride)
    }

    /// Number of tiles.
    pub fn count(&self) -> usize {
        self.rows().count() * self.columns().count()
    }
}

impl VaeDecoder {
    /// Decodes a clip tile by tile. `may_continue` is asked before every latent frame of every tile.
    ///
    /// # Errors
    /// A latent that does not fit the VAE or the layout, [`VaeError::Stopped`] when told to stop.
    pub fn decode_tiled<'k>(
        &self,
        kernels: impl Into<DecoderKernels<'k>>,
        latent: &Latent,
        tiles: &TileLayout,
        may_continue: &dyn Fn() -> bool,
    ) -> Result<Vec<VideoFrame>, VaeError> {
        let kernels = kernels.into();
        if (latent.height(), latent.width()) != (tiles.height, tiles.width) {
            return Err(VaeError::Latent {
                what: format!("of {}", latent.shape()),
                reason: format!("the tiles are those of {}×{} latent pixels", tiles.height, tiles.width),
            });
        }
        let scale = self.config().spatial_scale();
        let (height, width) = (latent.height() * scale, latent.width() * scale);
        let (overlap, stride) = ((tiles.size - tiles.stride) * scale, tiles.stride * scale);
        let count = self.config().frames(latent.frames());
        let blank = || VideoFrame::from_signed(height, width, vec![0.0; height * width * 3]);
        let mut canvas: Vec<VideoFrame> = (0..count).map(|_| blank()).collect();
        // What the next row of tiles and the next tile of the row are faded in over: the lowest rows and the rightmost
        // columns of tiles already blended.
        let mut above: Vec<Vec<Strip>> = vec![Vec::new(); tiles.columns().count()];
        for top in tiles.rows() {
            let mut left: Vec<Strip> = Vec::new();
            for (above, first) in above.iter_mut().zip(tiles.columns()) {
                let rows = top..latent.height().min(top + tiles.size);
                let columns = first..latent.width().min(first + tiles.size);
                let part = latent.tile(rows, columns);
                let mut session = self.session(part.height(), part.width())?;
                let mut frames = Vec::with_capacity(count);
                for frame in 0..part.frames() {
                    if !may_continue() {
                        return Err(VaeError::Stopped);
                    }
                    frames.extend(session.push(kernels, &part, frame)?);
                }
                drop(session);
                for (index, frame) in frames.iter_mut().enumerate() {
                    if let Some(strip) = above.get(index) {
                        blend_down(strip, frame, overlap);
                    }
                    if let Some(strip) = left.get(index) {
                        blend_right(strip, frame, overlap);
                    }
                    paste(frame, &mut canvas[index], (top * scale, first * scale), stride);
                }
                *above = frames.iter().map(|frame| Strip::lowest(frame, overlap)).collect();
                left = frames.iter().map(|frame| Strip::rightmost(frame, overlap)).collect();
            }
        }
        self.check_unchanged()?;
        Ok(canvas)
    }

    /// Memory that [`VaeDecoder::decode_tiled`] takes for a clip of `latent_frames` on `threads` threads.
    ///
    /// # Errors
    /// As [`VaeDecoder::memory`].
    pub fn tiled_memory(
        &self,
        tiles: &TileLayout,
        latent_frames: usize,
        threads: usize,
    ) -> Result<DecoderMemory, VaeError> {
        let (rows, columns) = (tiles.size.min(tiles.height), tiles.size.min(tiles.width));
        let mut memory = self.memory(rows, columns, threads)?;
        let scale = self.config().spatial_scale();
        let frames = self.config().frames(latent_frames);
        let pixels = |height: usize, width: usize| frames * height * width * scale * scale * 3 * size_of::<f32>();
        let overlap = tiles.size - tiles.stride;
        let latent = latent_frames * rows * columns * self.config().z_dim * size_of::<f32>();
        memory.working += pixels(tiles.height, tiles.width)
            + pixels(rows, columns)
            + pixels(overlap.min(rows), tiles.columns().count() * columns)
            + pixels(rows, overlap.min(columns))
            + latent;
        Ok(memory)
    }
}

/// The edge of a blended tile.
#[derive(Debug, Clone)]
struct Strip {
    height: usize,
    width: usize,
    values: Vec<f32>,
}

impl Strip {
    fn lowest(frame: &VideoFrame, rows: usize) -> Strip {
        let height = rows.min(frame.height());
        let start = (frame.height() - height) * frame.width() * 3;
        Strip { height, width: frame.width(), values: frame.values()[start..].to_vec() }
    }

    fn rightmost(frame: &VideoFrame, columns: usize) -> Strip {
        let width = columns.min(frame.width());
        let skip = (frame.width() - width) * 3;
        let lines = frame.values().chunks_exact(frame.width() * 3);
        Strip { height: frame.height(), width, values: lines.flat_map(|line| line[skip..].iter().copied()).collect() }
    }
}

/// `b[y] = a[−e + y]·(1 − y/e) + b[y]·y/e` for the first `e` rows.
fn blend_down(strip: &Strip, frame: &mut VideoFrame, overlap: usize) {
    let extent = overlap.min(strip.height).min(frame.height());
    let line = frame.width().min(strip.width) * 3;
    let stride = frame.width() * 3;
    for y in 0..extent {
        let share = y as f32 / extent as f32;
        let old = &strip.values[(strip.height - extent + y) * strip.width * 3..][..line];
        fade(old, share, &mut frame.values_mut()[y * stride..][..line]);
    }
}

/// The same for the first `e` columns.
fn blend_right(strip: &Strip, frame: &mut VideoFrame, overlap: usize) {
    let extent = overlap.min(strip.width).min(frame.width());
    let rows = frame.height().min(strip.height);
    let stride = frame.width() * 3;
    for y in 0..rows {
        let old = &strip.values[(y * strip.width + strip.width - extent) * 3..][..extent * 3];
        let new = &mut frame.values_mut()[y * stride..][..extent * 3];
        for x in 0..extent {
            fade(&old[x * 3..][..3], x as f32 / extent as f32, &mut new[x * 3..][..3]);
        }
    }
}

fn fade(old: &[f32], share: f32, new: &mut [f32]) {
    for (new, old) in new.iter_mut().zip(old) {
        *new = old * (1.0 - share) + *new * share;
    }
}

/// The first `stride` rows and columns of a tile, at their place, as far as the canvas goes.
fn paste(tile: &VideoFrame, canvas: &mut VideoFrame, (top, left): (usize, usize), stride: usize) {
    let rows = stride.min(tile.height()).min(canvas.height() - top);
    let columns = stride.min(tile.width()).min(canvas.width() - left);
    let width = canvas.width();
    for y in 0..rows {
        let line = &tile.values()[y * tile.width() * 3..][..columns * 3];
        canvas.values_mut()[((top + y) * width + left) * 3..][..columns * 3].copy_from_slice(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_that_leave_gaps_are_refused() {
        let refuse = |size, stride| TileLayout::new(30, 52, size, stride).unwrap_err().to_string();
        assert!(refuse(8, 0).starts_with("tiles of 8 latent pixels every 0: the stride must be at least 1"));
        assert!(refuse(8, 9).contains("parts would be left out"));
        assert!(refuse(8, 3).contains("overlap by at most their stride"));
        assert!(refuse(usize::MAX, usize::MAX).contains("at most 1024 latent pixels"));
        let tiles = TileLayout::new(30, 52, 32, 24).unwrap();
        assert_eq!((tiles.count(), tiles.size(), tiles.stride()), (2 * 3, 32, 24));
        assert_eq!(TileLayout::new(8, 8, 32, 24).unwrap().count(), 1);
    }

    #[test]
    fn seams_fade_from_the_old_to_the_new() {
        let gray = |height: usize, width: usize, value: f32| {
            VideoFrame::from_signed(height, width, vec![value; height * width * 3])
        };
        let mut frame = gray(6, 4, 1.0);
        blend_down(&Strip::lowest(&gray(8, 4, 0.0), 4), &mut frame, 4);
        let column: Vec<f32> = frame.values().chunks_exact(12).map(|line| line[0]).collect();
        assert_eq!(column, [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]);
        let mut frame = gray(2, 6, 1.0);
        blend_right(&Strip::rightmost(&gray(2, 8, 0.0), 4), &mut frame, 4);
        let line: Vec<f32> = frame.values()[..18].iter().step_by(3).copied().collect();
        assert_eq!(line, [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]);
        // A tile shorter than the overlap fades within itself.
        let mut frame = gray(2, 4, 1.0);
        blend_down(&Strip::lowest(&gray(8, 4, 0.0), 4), &mut frame, 4);
        assert_eq!(frame.values().chunks_exact(12).map(|line| line[0]).collect::<Vec<_>>(), [0.0, 0.5]);
    }
}
