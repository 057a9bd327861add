//! INT8 convolution of frames of codes: the causal 3 × 3 × 3 filters of a video decoder on the INT8 micro-kernel.
//!
//! As in f32, the channels under a filter row are consecutive in memory, so a filter row of one frame is a matrix product
//! whose rows overlap. Products and sums of a frame are exact; what is left is one scale a frame and one an output:
//!
//! `y[o] = s_w[o] · Σ_f s_f · (Σ a_f·w − zero_f · Σ w) + bias[o]`,
//!
//! summed over the frames f in order. So the result depends on neither the blocking nor the number of threads nor the
//! instruction set.

use super::codes::CodeFrame;
use super::frame::FrameRows;
use super::weights::FilterShape;
use super::{BLOCK_PIXELS, ConvSink, finish_pixel};
use crate::gemm::MAX_INPUTS;
use crate::isa::Supported;
use crate::kernel::{DotTile, TILE_ROWS, row_sums};
use crate::multiversion::multiversion;
use crate::{KernelError, Kernels, Workspace};
use trefoil_weights::quantise::{code, column_scale};
use trefoil_weights::tile::{TILE, off};

/// Filter rows of one frame.
const ROWS: usize = 3;
/// Pixels under a filter row.
const TAPS: usize = 3;
/// Accumulators of a tile.
const VALUES: usize = TILE_ROWS * TILE;

/// A 3 × 3 filter over 1 or 3 frames in INT8, one scale an output.
#[derive(Debug, Clone)]
pub struct Int8ConvWeights {
    shape: FilterShape,
    /// For each 32 outputs, frame and filter row: codes in tile order, inputs padded to whole tiles.
    pub(crate) panels: Vec<i8>,
    /// Per 32 outputs and frame: sums of the codes.
    pub(crate) sums: Vec<[i32; TILE]>,
    /// Padded to whole tiles.
    pub(crate) scales: Vec<f32>,
    pub(crate) bias: Vec<f32>,
}

impl Int8ConvWeights {
    /// Whether a filter can be packed.
    pub fn suits(shape: FilterShape) -> bool {
        (shape.height, shape.width) == (ROWS, TAPS)
            && matches!(shape.frames, 1 | 3)
            && shape.outputs > 0
            && (1..=MAX_INPUTS / (ROWS * TAPS * TILE)).contains(&shape.inputs)
    }

    /// Quantises and packs a filter given as `[outputs, inputs, frames, 3, 3]`: per output `s = max|w|/127`, codes rounded half to
    /// even.
    ///
    /// # Errors
    /// Other extents, weights or a bias of another size.
    pub fn new(shape: FilterShape, weight: &[f32], bias: &[f32]) -> Result<Int8ConvWeights, KernelError> {
        if !Int8ConvWeights::suits(shape) {
            let reason = "INT8 filters have 1 or 3 frames of 3×3 and at least one channel on each side";
            return Err(KernelError::value("conv_int8", "the filter", shape, reason));
        }
        if weight.len() != shape.elements() || bias.len() != shape.outputs {
            return Err(KernelError::shapes(
                "conv_int8",
                ("the filter", shape),
                ("its values", format!("{} and a bias of {}", weight.len(), bias.len())),
                "there must be one weight per element and one bias per output",
            ));
        }
        let FilterShape { outputs, inputs, frames, .. } = shape;
        let (columns, k) = (outputs.div_ceil(TILE), products(inputs));
        let mut packed = Int8ConvWeights {
            shape,
            panels: vec![0; columns * frames * ROWS * k * TILE],
            sums: vec![[0; TILE]; columns * frames],
            scales: vec![0.0; columns * TILE],
            bias: vec![0.0; columns * TILE],
        };
        packed.bias[..outputs].copy_from_slice(bias);
        for (output, filter) in weight.chunks_exact(inputs * frames * ROWS * TAPS).enumerate() {
            let scale = column_scale(filter.iter().fold(0f32, |largest, value| largest.max(value.abs())));
            packed.scales[output] = scale;
            let (column, lane) = (output / TILE, output % TILE);
            for (index, &value) in filter.iter().enumerate() {
                let (index, tap) = (index / TAPS, index % TAPS);
                let (index, row) = (index / ROWS, index % ROWS);
                let (input, frame) = (index / frames, index % frames);
                let code = code(value, scale);
                let panel = (column * frames + frame) * ROWS + row;
                packed.panels[panel * k * TILE + off(tap * inputs + input, lane, k)] = code;
                packed.sums[column * frames + frame][lane] += i32::from(code);
            }
        }
        Ok(packed)
    }

    /// Extents of the filter as stored in the checkpoint.
    pub fn shape(&self) -> FilterShape {
        self.shape
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.panels.capacity()
            + self.sums.capacity() * size_of::<[i32; TILE]>()
            + (self.scales.capacity() + self.bias.capacity()) * size_of::<f32>()
    }

    /// Scale of an output's codes.
    pub fn scale(&self, output: usize) -> f32 {
        self.scales[output]
    }
}

/// Products of a filter row, padded to whole tiles.
fn products(inputs: usize) -> usize {
    (TAPS * inputs).next_multiple_of(TILE)
}

impl Kernels {
    /// `sink ← bias + filter ∗ frames` with zero padding in space, in INT8. `frames` are the filter's frames, oldest first, `None`
    /// for one that is all zero. The same bits on every instruction set and any number of threads.
    ///
    /// # Errors
    /// Frames or a destination whose shapes do not fit the filter or each other.
    pub fn conv_int8(
        &self,
        frames: &[Option<&CodeFrame>],
        weights: &Int8ConvWeights,
        sink: ConvSink<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), KernelError> {
        let (out, is_added) = match sink {
            ConvSink::Store(out) => (out, false),
            ConvSink::Add(out) => (out, true),
        };
        let shape = weights.shape;
        let fail = |one: (&'static str, String), other: (&'static str, String), reason| {
            Err(KernelError::shapes("conv_int8", one, other, reason))
        };
        if frames.len() != shape.frames {
            return fail(
                ("the input", format!("{} frames", frames.len())),
                ("the filter", shape.to_string()),
                "there must be one frame per frame of the filter",
            );
        }
        if out.channels() != shape.outputs {
            return fail(
                ("the destination", out.shape()),
                ("the filter", shape.to_string()),
                "channels of the destination must be outputs of the filter",
            );
        }
        for frame in frames.iter().flatten() {
            if (frame.height(), frame.width(), frame.channels()) != (out.height(), out.width(), shape.inputs) {
                return fail(
                    ("the input", frame.shape()),
                    ("the destination", out.shape()),
                    "they must have the same extent, and channels of the input must be inputs of the filter",
                );
            }
        }
        let (height, width) = (out.height(), out.width());
        let mut rows = out.rows_mut();
        self.run_grains(
            height,
            1,
            workspace,
            |count| rows.take(count),
            |part| {
                let (first_row, rows) = (part.first, part.rows);
                let job = Job { isa: self.supported(), frames, weights, width, first_row, rows, is_added };
                job.run(&mut part.sink);
            },
        );
        Ok(())
    }
}

/// One thread's rows.
struct Job<'a> {
    isa: Supported,
    frames: &'a [Option<&'a CodeFrame>],
    weights: &'a Int8ConvWeights,
    width: usize,
    first_row: usize,
    rows: usize,
    is_added: bool,
}

/// Accumulators of one tile of pixels.
struct Sums {
    /// Of one filter row.
    row: [i32; VALUES],
    /// Of one frame.
    frame: [i32; VALUES],
    /// Of all frames, in units of the weights' scales.
    all: [f32; VALUES],
}

impl Job<'_> {
    /// Pixels are counted along the padded rows, so that a tile may go over the end of a row; what is computed for the border is
    /// not stored.
    fn run(&self, out: &mut FrameRows<'_>) {
        let padded = self.width + 2;
        let pixels = (self.rows - 1) * padded + self.width;
        let mut sums = Sums { row: [0; VALUES], frame: [0; VALUES], all: [0.0; VALUES] };
        let outputs = self.weights.shape.outputs;
        for first in (0..pixels).step_by(BLOCK_PIXELS) {
            let end = pixels.min(first + BLOCK_PIXELS);
            for column in 0..outputs.div_ceil(TILE) {
                let lanes = column * TILE..(column + 1) * TILE;
                let (scales, bias) = (&self.weights.scales[lanes.clone()], &self.weights.bias[lanes.clone()]);
                let channels = lanes.start..lanes.end.min(outputs);
                for tile in (first..end).step_by(TILE_ROWS) {
                    let count = TILE_ROWS.min(end - tile);
                    self.multiply(column, tile, count, &mut sums);
                    scale_outputs(self.isa, scales, &mut sums.all[..count * TILE]);
                    for (pixel, values) in (tile..).zip(sums.all[..count * TILE].as_chunks::<TILE>().0) {
                        let (y, x) = (pixel / padded, pixel % padded);
                        if x < self.width {
                            finish_pixel(&mut out.pixel(y, x)[channels.clone()], values, bias, self.is_added);
                        }
                    }
                }
            }
        }
    }

    /// `sums.all[pixel][32]` for `count` pixels from `first` on, but for the weights' scales.
    fn multiply(&self, column: usize, first: usize, count: usize, sums: &mut Sums) {
        let FilterShape { inputs, frames, .. } = self.weights.shape;
        let (k, padded) = (products(inputs), self.width + 2);
        sums.all[..count * TILE].fill(0.0);
        for (index, frame) in self.frames.iter().enumerate() {
            let Some(frame) = frame else { continue };
            let panel = (column * frames + index) * ROWS;
            for row in 0..ROWS {
                let start = (self.first_row + row) * padded + first;
                let a = &frame.data()[start * inputs..];
                let mut of_codes = [0i32; TILE_ROWS];
                if self.isa.needs_row_sums() {
                    if k == TAPS * inputs {
                        let pixels = &frame.sums()[start..];
                        for (pixel, sum) in of_codes[..count].iter_mut().enumerate() {
                            *sum = pixels[pixel] + pixels[pixel + 1] + pixels[pixel + 2];
                        }
                    } else {
                        row_sums(self.isa, a, inputs, k, &mut of_codes[..count]);
                    }
                }
                let weights = &self.weights.panels[(panel + row) * k * TILE..][..k * TILE];
                let tile = DotTile { a, lda: inputs, rows: count, weights, k, row_sums: &of_codes };
                if row == 0 {
                    self.isa.dot_tile(tile, &mut sums.frame, TILE);
                } else {
                    self.isa.dot_tile(tile, &mut sums.row, TILE);
                    add(self.isa, &sums.row[..count * TILE], &mut sums.frame[..count * TILE]);
                }
            }
            let of_weights = &self.weights.sums[column * frames + index];
            let zero = i32::from(frame.zero());
            let (of_frame, all) = (&sums.frame[..count * TILE], &mut sums.all[..count * TILE]);
            add_scaled(self.isa, of_frame, of_weights, zero, frame.scale(), all);
        }
    }
}

multiversion! {
    fn add(row: &[i32], frame: &mut [i32]) {
        for (sum, value) in frame.iter_mut().zip(row) {
            *sum += value;
        }
    }
}

multiversion! {
    /// `all += scale · (frame − zero · Σ w)`.
    fn add_scaled(frame: &[i32], of_weights: &[i32; TILE], zero: i32, scale: f32, all: &mut [f32]) {
        for (values, all) in frame.as_chunks::<TILE>().0.iter().zip(all.as_chunks_mut::<TILE>().0) {
            for lane in 0..TILE {
                all[lane] += scale * (values[lane] - zero * of_weights[lane]) as f32;
            }
        }
    }
}

multiversion! {
    fn scale_outputs(scales: &[f32], all: &mut [f32]) {
        for values in all.as_chunks_mut::<TILE>().0 {
            for (value, scale) in values.iter_mut().zip(scales) {
                *value *= scale;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conv::{ConvWeights, Frame};
    use crate::gemm::Activation;
    use crate::{Isa, Pool};
    use proptest::prelude::*;

    fn values(len: usize, seed: u32) -> Vec<f32> {
        let mut state = seed | 1;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        };
        (0..len).map(|_| next()).collect()
    }

    fn codes(height: usize, width: usize, channels: usize, seed: u32) -> CodeFrame {
        let mut frame = Frame::new(height, width, channels);
        for y in 0..height {
            frame.row_mut(y).copy_from_slice(&values(width * channels, seed.wrapping_add(y as u32 * 77)));
        }
        let mut out = CodeFrame::new(height, width, channels);
        let kernels = Kernels::new(Isa::Scalar, Pool::on_caller()).unwrap();
        kernels.pixel_norm_codes(&frame, &vec![0.8; channels], &mut out, &mut Workspace::new()).unwrap();
        out
    }

    /// The formula of the module's head, pixel by pixel. Integer sums are exact, so it must come out to the bit.
    fn definition(
        frames: &[Option<&CodeFrame>],
        shape: FilterShape,
        (weight, bias): (&[f32], &[f32]),
        packed: &Int8ConvWeights,
        (y, x, output): (usize, usize, usize),
    ) -> f32 {
        let scale = packed.scale(output);
        let mut all = 0f32;
        for (index, frame) in frames.iter().enumerate() {
            let Some(frame) = frame else { continue };
            let mut sum = 0i32;
            for input in 0..shape.inputs {
                for row in 0..3 {
                    for column in 0..3 {
                        let at = ((output * shape.inputs + input) * shape.frames + index) * 9 + row * 3 + column;
                        let (y, x) = (y + row, x + column);
                        let is_inside = (1..=frame.height()).contains(&y) && (1..=frame.width()).contains(&x);
                        if is_inside {
                            let value = frame.row(y - 1)[(x - 1) * shape.inputs + input];
                            sum += (i32::from(value) - i32::from(frame.zero())) * i32::from(code(weight[at], scale));
                        }
                    }
                }
            }
            all += frame.scale() * sum as f32;
        }
        all * scale + bias[output]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn it_is_its_definition_to_the_bit(
            height in 1usize..4, width in 1usize..16, inputs in prop::sample::select(vec![1usize, 16, 32, 33]),
            outputs in prop::sample::select(vec![3usize, 32, 40]), is_causal in any::<bool>(), missing in 0usize..4, is_added in any::<bool>(),
            seed in any::<u32>(),
        ) {
            let count = if is_causal { 3 } else { 1 };
            let shape = FilterShape { outputs, inputs, frames: count, height: 3, width: 3 };
            let (weight, bias) = (values(shape.elements(), seed), values(outputs, !seed));
            let packed = Int8ConvWeights::new(shape, &weight, &bias).unwrap();
            let all: Vec<CodeFrame> = (0..count).map(|at| codes(height, width, inputs, seed.wrapping_add(at as u32))).collect();
            let frames: Vec<Option<&CodeFrame>> =
                all.iter().enumerate().map(|(at, frame)| (at + 1 == count || at >= missing).then_some(frame)).collect();
            let mut all_kernels: Vec<Kernels> =
                Isa::available().into_iter().map(|isa| Kernels::new(isa, Pool::on_caller()).unwrap()).collect();
            if let Ok(pool) = Pool::pinned(&[0, 1]) {
                all_kernels.push(Kernels::new(Isa::best(), pool).unwrap());
            }
            for kernels in all_kernels {
                let mut out = Frame::new(height, width, outputs);
                (0..height).for_each(|y| out.row_mut(y).fill(0.25));
                let sink = if is_added { ConvSink::Add(&mut out) } else { ConvSink::Store(&mut out) };
                kernels.conv_int8(&frames, &packed, sink, &mut Workspace::new()).unwrap();
                for y in 0..height {
                    for x in 0..width {
                        for output in 0..outputs {
                            let want = definition(&frames, shape, (&weight, &bias), &packed, (y, x, output));
                            let want = if is_added { 0.25 + want } else { want };
                            let got = out.row(y)[x * outputs + output];
                            prop_assert_eq!(got.to_bits(), want.to_bits(), "{} {} at {} {}", kernels.isa(), shape, y, x);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn it_is_close_to_f32() {
        let (height, width, inputs, outputs) = (6, 9, 64, 32);
        let shape = FilterShape { outputs, inputs, frames: 3, height: 3, width: 3 };
        let (weight, bias) = (values(shape.elements(), 5), values(outputs, 6));
        let kernels = Kernels::new(Isa::best(), Pool::on_caller()).unwrap();
        let mut workspace = Workspace::new();
        let gain: Vec<f32> = (0..inputs).map(|channel| 0.5 + 0.02 * channel as f32).collect();
        let mut normed = Vec::new();
        for seed in 0..3 {
            let mut frame = Frame::new(height, width, inputs);
            (0..height).for_each(|y| frame.row_mut(y).copy_from_slice(&values(width * inputs, seed * 100 + y as u32)));
            let (mut exact, mut codes) = (Frame::new(height, width, inputs), CodeFrame::new(height, width, inputs));
            kernels.pixel_norm(&frame, &gain, Activation::Silu, &mut exact, &mut workspace).unwrap();
            kernels.pixel_norm_codes(&frame, &gain, &mut codes, &mut workspace).unwrap();
            normed.push((exact, codes));
        }
        let exact = ConvWeights::new(shape, &weight, &bias).unwrap();
        let packed = Int8ConvWeights::new(shape, &weight, &bias).unwrap();
        assert!(packed.bytes() * 3 < exact.bytes(), "{} {}", packed.bytes(), exact.bytes());
        let (mut want, mut got) = (Frame::new(height, width, outputs), Frame::new(height, width, outputs));
        let frames: Vec<Option<&Frame>> = normed.iter().map(|(exact, _)| Some(exact)).collect();
        kernels.conv(&frames, &exact, ConvSink::Store(&mut want), &mut workspace).unwrap();
        let frames: Vec<Option<&CodeFrame>> = normed.iter().map(|(_, codes)| Some(codes)).collect();
        kernels.conv_int8(&frames, &packed, ConvSink::Store(&mut got), &mut workspace).unwrap();
        let (mut error, mut size) = (0f64, 0f64);
        for y in 0..height {
            for (&want, &got) in want.row(y).iter().zip(got.row(y)) {
                error += f64::from(want - got).powi(2);
                size += f64::from(want).powi(2);
            }
        }
        let relative = (error / size).sqrt();
        assert!(relative > 1e-4 && relative < 0.02, "{relative}");
    }

    #[test]
    fn shapes_that_do_not_fit_are_told() {
        let kernels = Kernels::new(Isa::best(), Pool::on_caller()).unwrap();
        let shape = FilterShape { outputs: 4, inputs: 32, frames: 3, height: 3, width: 3 };
        let packed = Int8ConvWeights::new(shape, &vec![0.1; shape.elements()], &[0.0; 4]).unwrap();
        let frame = CodeFrame::new(2, 2, 32);
        let mut out = Frame::new(2, 2, 4);
        let run = |frames: &[Option<&CodeFrame>], out: &mut Frame| {
            kernels
                .conv_int8(frames, &packed, ConvSink::Store(out), &mut Workspace::new())
                .map_err(|error| error.to_string())
        };
        assert!(run(&[Some(&frame)], &mut out).unwrap_err().contains("one frame per frame"));
        assert!(
            run(&[None, None, Some(&frame)], &mut Frame::new(2, 2, 5)).unwrap_err().contains("outputs of the filter")
        );
        assert!(run(&[None, None, Some(&CodeFrame::new(2, 3, 32))], &mut out).unwrap_err().contains("2×3×32"));
        assert_eq!(run(&[None, None, Some(&frame)], &mut out), Ok(()));
        let flat = FilterShape { height: 1, ..shape };
        assert!(Int8ConvWeights::new(flat, &[], &[]).unwrap_err().to_string().contains("1 or 3 frames of 3×3"));
        assert!(Int8ConvWeights::new(shape, &[0.0], &[0.0; 4]).unwrap_err().to_string().contains("1 and a bias of 4"));
    }
}
