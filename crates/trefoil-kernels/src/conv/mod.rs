//! f32 convolution of video frames as matrix products over frames that lie channels last.
//!
//! A causal 3-D convolution of one frame with the two before it is a 2-D convolution over three frames. With channels last
//! and a zero border ([`Frame`]), the input of one filter row is `width · channels` consecutive values, and the next output
//! pixel's input starts `channels` further: a matrix with overlapping rows. So the f32 micro-kernel reads activations where
//! they lie, nothing is gathered (no im2col buffer), and history that is zero is not multiplied at all. Filters that are small
//! beside their frames are computed with two thirds of the products ([`winograd`]), those with at most three outputs without an
//! almost empty tile ([`few`]).

#![allow(clippy::needless_range_loop, reason = "a lane indexes several arrays at once")]

mod codes;
mod few;
mod frame;
mod int8;
pub(crate) mod norm;
mod stream;
mod values;
pub(crate) mod weights;
pub(crate) mod winograd;

pub use codes::CodeFrame;
pub use frame::Frame;
pub use int8::Int8ConvWeights;
pub use weights::{ConvWeights, FilterShape};

use crate::isa::Supported;
use crate::kernel::{FmaTile, TILE_ROWS};
use crate::workspace::at_least;
use crate::{KernelError, Kernels, Workspace};
use frame::FrameRows;
use trefoil_weights::tile::TILE;
use weights::{Form, Phase, Run};

/// Pixels that share a panel; their accumulators are 48 KiB.
const BLOCK_PIXELS: usize = 384;
/// Products taken at a time: a panel piece is at most 24 KiB, so that it stays in the first-level cache beside a row tile.
const PIECE_PRODUCTS: usize = 192;

/// What happens to the result.
#[derive(Debug)]
pub enum ConvSink<'a> {
    /// Written.
    Store(&'a mut Frame),
    /// Added to what is there (a residual connection).
    Add(&'a mut Frame),
}

impl Kernels {
    /// `sink ← bias + filter ∗ frames` with zero padding in space.
    ///
    /// `frames` are the filter's frames, oldest first, `None` for one that is all zero. The result has the extent of the
    /// input, or twice that for [`ConvWeights::upsampling`]. The order of
    /// sums depends on the form of the packed filter alone, not on the blocking or the number of threads.
    ///
    /// # Errors
    /// Frames or a destination whose shapes do not fit the filter or each other.
    pub fn conv(
        &self,
        frames: &[Option<&Frame>],
        weights: &ConvWeights,
        sink: ConvSink<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), KernelError> {
        let (out, is_added) = match sink {
            ConvSink::Store(out) => (out, false),
            ConvSink::Add(out) => (out, true),
        };
        let Some(input) = check(frames, weights, out)? else {
            // Nothing but zeros: the bias alone.
            let outputs = weights.shape.outputs;
            for y in 0..out.height() {
                for pixel in out.row_mut(y).chunks_exact_mut(outputs) {
                    finish_pixel(pixel, &[], &weights.bias, is_added);
                }
            }
            return Ok(());
        };
        let (height, scale) = (input.height(), weights.scale);
        let mut rows = out.rows_mut();
        self.run_grains(
            height,
            1,
            workspace,
            |count| rows.take(count * scale),
            |part| {
                let (isa, first_row, rows) = (self.supported(), part.first, part.rows);
                let floats = &mut part.slot.floats;
                match &weights.form {
                    Form::Direct(phases) => {
                        let job = Job { isa, frames, weights, input, first_row, rows, is_added };
                        let sums = at_least(floats, BLOCK_PIXELS * TILE);
                        for phase in phases {
                            job.run(phase, sums, &mut part.sink);
                        }
                    }
                    Form::Winograd(panels) => {
                        let job = winograd::Job { isa, frames, weights, panels, input, first_row, rows, is_added };
                        job.run(at_least(floats, job.scratch()), &mut part.sink);
                    }
                    Form::Few(panels) => {
                        let job = few::Job { isa, frames, weights, panels, input, first_row, rows, is_added };
                        job.run(at_least(floats, few::scratch(input.width())), &mut part.sink);
                    }
                }
            },
        );
        Ok(())
    }
}

/// The frame that gives the extent; `None` where all are zero.
fn check<'f>(
    frames: &[Option<&'f Frame>],
    weights: &ConvWeights,
    out: &Frame,
) -> Result<Option<&'f Frame>, KernelError> {
    let extent = |frame: &Frame| [frame.height(), frame.width(), frame.channels()];
    let extents: Vec<Option<[usize; 3]>> = frames.iter().map(|frame| frame.map(extent)).collect();
    check_extents(&extents, (weights.shape, weights.scale), extent(out))?;
    Ok(frames.iter().copied().flatten().next())
}

/// Height, width and channels of every frame and of the destination must fit the filter and each other.
pub(crate) fn check_extents(
    frames: &[Option<[usize; 3]>],
    (shape, scale): (FilterShape, usize),
    out: [usize; 3],
) -> Result<(), KernelError> {
    let told = |[height, width, channels]: [usize; 3]| format!("{height}×{width}×{channels}");
    if frames.len() != shape.frames {
        return Err(KernelError::shapes(
            "conv",
            ("the input", format!("{} frames", frames.len())),
            ("the filter", shape),
            "there must be one frame per frame of the filter",
        ));
    }
    let mut first: Option<[usize; 3]> = None;
    for &frame in frames.iter().flatten() {
        if frame[2] != shape.inputs {
            return Err(KernelError::shapes(
                "conv",
                ("the input", told(frame)),
                ("the filter", shape),
                "channels of the input must be inputs of the filter",
            ));
        }
        let extent = *first.get_or_insert(frame);
        if extent != frame {
            return Err(KernelError::shapes(
                "conv",
                ("one frame", told(extent)),
                ("another", told(frame)),
                "frames must have the same extent",
            ));
        }
    }
    let [height, width, _] = first.map_or(out, |[height, width, _]| [height * scale, width * scale, 0]);
    if out != [height, width, shape.outputs] {
        return Err(KernelError::shapes(
            "conv",
            ("the destination", told(out)),
            ("the result", told([height, width, shape.outputs])),
            "they must have the same shape",
        ));
    }
    Ok(())
}

/// One thread's rows of a convolution.
struct Job<'a> {
    isa: Supported,
    frames: &'a [Option<&'a Frame>],
    weights: &'a ConvWeights,
    input: &'a Frame,
    first_row: usize,
    rows: usize,
    is_added: bool,
}

impl Job<'_> {
    /// Pixels are counted along the padded rows, so that a row tile may go over the end of a row; what is computed for the
    /// border is not stored.
    fn run(&self, phase: &Phase, sums: &mut [f32], out: &mut FrameRows<'_>) {
        let (width, padded) = (self.input.width(), self.input.width() + 2);
        let pixels = (self.rows - 1) * padded + width;
        for first in (0..pixels).step_by(BLOCK_PIXELS) {
            let count = BLOCK_PIXELS.min(pixels - first);
            for (column, panel) in phase.panels.chunks_exact(phase.products * TILE).enumerate() {
                let sums = &mut sums[..count * TILE];
                self.multiply(phase, panel, first, sums);
                let channels = column * TILE..self.weights.shape.outputs.min((column + 1) * TILE);
                let bias = &self.weights.bias[column * TILE..][..TILE];
                let at = phase.placement;
                let (mut y, mut x) = (first / padded, first % padded);
                for sums in sums.as_chunks::<TILE>().0 {
                    if x < width {
                        let pixel = out.pixel(y * at.step + at.row, x * at.step + at.column);
                        finish_pixel(&mut pixel[channels.clone()], sums, bias, self.is_added);
                    }
                    x += 1;
                    if x == padded {
                        (y, x) = (y + 1, 0);
                    }
                }
            }
        }
    }

    /// `sums[pixel][32]` for the pixels from `first` on.
    fn multiply(&self, phase: &Phase, panel: &[f32], first: usize, sums: &mut [f32]) {
        let channels = self.input.channels();
        let padded = self.input.width() + 2;
        let mut panel = panel;
        let mut accumulate = false;
        for run in &phase.runs {
            let Run { frame, row, column, pixels } = *run;
            let products = pixels * channels;
            let (weights, rest) = panel.split_at(products * TILE);
            panel = rest;
            let Some(frame) = self.frames[frame] else { continue };
            let start = ((self.first_row + row) * padded + column + first) * channels;
            let input = &frame.data()[start..];
            let pieces = products.div_ceil(PIECE_PRODUCTS);
            let piece = products.div_ceil(pieces);
            for from in (0..products).step_by(piece) {
                let k = piece.min(products - from);
                for (tile, sums) in sums.chunks_mut(TILE_ROWS * TILE).enumerate() {
                    let fma = FmaTile {
                        a: &input[tile * TILE_ROWS * channels + from..],
                        lda: channels,
                        rows: sums.len() / TILE,
                        b: &weights[from * TILE..],
                        ldb: TILE,
                        k,
                        accumulate,
                    };
                    self.isa.fma_tile(fma, sums, TILE);
                }
                accumulate = true;
            }
        }
        if !accumulate {
            sums.fill(0.0);
        }
    }
}

/// `pixel ← sums + bias`, or added to it. Without sums they are zero.
#[inline]
fn finish_pixel(pixel: &mut [f32], sums: &[f32], bias: &[f32], is_added: bool) {
    let value = |lane: usize| sums.get(lane).map_or(bias[lane], |sum| sum + bias[lane]);
    // A whole tile has a length known to the compiler.
    if let (Ok(pixel), Ok(sums), Ok(bias)) =
        (<&mut [f32; TILE]>::try_from(&mut *pixel), <&[f32; TILE]>::try_from(sums), <&[f32; TILE]>::try_from(bias))
    {
        for lane in 0..TILE {
            let value = sums[lane] + bias[lane];
            pixel[lane] = if is_added { pixel[lane] + value } else { value };
        }
    } else {
        for (lane, pixel) in pixel.iter_mut().enumerate() {
            *pixel = if is_added { *pixel + value(lane) } else { value(lane) };
        }
    }
}

#[cfg(test)]
mod tests;
