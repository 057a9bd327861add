//! Winograd's F(2, 3) along the rows of 3 × 3 filters: two neighbouring outputs from four products instead of six.
//!
//! With inputs d₀..d₃ under the filters of outputs 2j and 2j + 1, and filter row g₀ g₁ g₂,
//!
//! `m₀ = (d₀ − d₂)·g₀`, `m₁ = (d₁ + d₂)·(g₀ + g₁ + g₂)/2`, `m₂ = (d₂ − d₁)·(g₀ − g₁ + g₂)/2`, `m₃ = (d₁ − d₃)·g₂`,
//! `y₀ = m₀ + m₁ + m₂`, `y₁ = m₁ − m₂ − m₃`
//!
//! (S. Winograd, Arithmetic Complexity of Computations, 1980). Sums over frames, filter rows and channels are taken of the
//! mᵢ. The filters grow by a third, so this is for filters that are small beside their frames; the factors ½ and the
//! differences cost about a bit of precision.

use super::frame::FrameRows;
use super::weights::FilterShape;
use super::{ConvWeights, Frame};
use crate::isa::Supported;
use crate::kernel::{FmaTile, TILE_ROWS};
use crate::multiversion::multiversion;
use trefoil_weights::tile::TILE;

/// Products of a pair of outputs and a filter row.
pub(crate) const POINTS: usize = 4;
/// Pairs that share a panel.
const BLOCK_PAIRS: usize = 192;
/// Pairs of a band of rows, whose inputs are transformed together: enough for whole blocks, few enough for the cache.
const BAND_PAIRS: usize = 768;
/// Most channels of a side for which the larger filters are worth it.
const MOST_CHANNELS: usize = 256;
/// Fewest, below which the transforms cost as much as they save.
const FEWEST_CHANNELS: usize = 32;

/// Whether a filter is computed this way.
pub(crate) fn suits(shape: FilterShape) -> bool {
    let sides = [shape.inputs, shape.outputs];
    (shape.height, shape.width) == (3, 3) && sides.iter().all(|side| (FEWEST_CHANNELS..=MOST_CHANNELS).contains(side))
}

/// Transformed filters: for each 32 outputs, point, frame and filter row, `[inputs][32]`.
pub(super) fn pack(shape: FilterShape, weight: &[f32]) -> Vec<f32> {
    let FilterShape { outputs, inputs, frames, .. } = shape;
    let mut panels = vec![0f32; outputs.next_multiple_of(TILE) * POINTS * frames * 3 * inputs];
    let rows = panels.as_chunks_mut::<TILE>().0;
    for (index, lanes) in rows.iter_mut().enumerate() {
        let (index, input) = (index / inputs, index % inputs);
        let (index, row) = (index / 3, index % 3);
        let (index, frame) = (index / frames, index % frames);
        let (column, point) = (index / POINTS, index % POINTS);
        for (lane, output) in lanes.iter_mut().zip(column * TILE..outputs.min((column + 1) * TILE)) {
            let filter = &weight[(((output * inputs + input) * frames + frame) * 3 + row) * 3..][..3];
            let [first, middle, last] = [filter[0], filter[1], filter[2]].map(f64::from);
            // In f64, so that each is rounded once.
            *lane = match point {
                0 => first,
                1 => (first + middle + last) / 2.0,
                2 => f64::midpoint(first - middle, last),
                _ => last,
            } as f32;
        }
    }
    panels
}

fn band(pairs: usize, rows: usize) -> usize {
    BAND_PAIRS.div_ceil(pairs.max(1)).min(rows).max(1)
}

/// Values of scratch for `rows` rows of `width` pixels.
pub(super) fn scratch(shape: FilterShape, rows: usize, width: usize) -> usize {
    let pairs = width.div_ceil(2);
    POINTS * (BLOCK_PAIRS * TILE + shape.frames * (band(pairs, rows) + 2) * pairs * shape.inputs)
}

/// One thread's rows.
pub(super) struct Job<'a> {
    pub(super) isa: Supported,
    pub(super) frames: &'a [Option<&'a Frame>],
    pub(super) weights: &'a ConvWeights,
    pub(super) panels: &'a [f32],
    pub(super) input: &'a Frame,
    pub(super) first_row: usize,
    pub(super) rows: usize,
    pub(super) is_added: bool,
}

impl Job<'_> {
    fn pairs(&self) -> usize {
        self.input.width().div_ceil(2)
    }

    /// Rows whose inputs are transformed together.
    fn band(&self) -> usize {
        band(self.pairs(), self.rows)
    }

    /// Values of transformed inputs of one frame and point.
    fn plane(&self) -> usize {
        (self.band() + 2) * self.pairs() * self.input.channels()
    }

    /// Values of scratch.
    pub(super) fn scratch(&self) -> usize {
        scratch(self.weights.shape, self.rows, self.input.width())
    }

    pub(super) fn run(&self, scratch: &mut [f32], out: &mut FrameRows<'_>) {
        let (sums, inputs) = scratch.split_at_mut(POINTS * BLOCK_PAIRS * TILE);
        let (pairs, band) = (self.pairs(), self.band());
        for first in (0..self.rows).step_by(band) {
            let rows = band.min(self.rows - first);
            for (frame, inputs) in self.frames.iter().zip(inputs.chunks_exact_mut(POINTS * self.plane())) {
                if let Some(frame) = frame {
                    self.transform(frame, first, rows + 2, inputs);
                }
            }
            for start in (0..rows * pairs).step_by(BLOCK_PAIRS) {
                let count = BLOCK_PAIRS.min(rows * pairs - start);
                let column_values = self.panels.len() / self.weights.shape.outputs.div_ceil(TILE);
                for (column, panels) in self.panels.chunks_exact(column_values).enumerate() {
                    self.multiply(panels, inputs, start, count, sums);
                    self.store(column, sums, (first, start, count), out);
                }
            }
        }
    }

    /// Rows `first ..` of a frame, its border included, as the four differences of every pair.
    fn transform(&self, frame: &Frame, first: usize, rows: usize, inputs: &mut [f32]) {
        let channels = frame.channels();
        let line = self.pairs() * channels;
        for row in 0..rows {
            let source = &frame.data()[(self.first_row + first + row) * frame.stride()..][..frame.stride()];
            let mut points = inputs.chunks_exact_mut(self.plane()).map(|plane| &mut plane[row * line..][..line]);
            if let (Some(a), Some(b), Some(c), Some(d)) = (points.next(), points.next(), points.next(), points.next()) {
                transform_row(self.isa, source, channels, a, b, c, d);
            }
        }
    }

    /// `sums[point][pair][32]` for pairs `start ..` of the band.
    fn multiply(&self, panels: &[f32], inputs: &[f32], start: usize, count: usize, sums: &mut [f32]) {
        let (channels, pairs) = (self.input.channels(), self.pairs());
        let panel = channels * TILE;
        for (point, panels) in panels.chunks_exact(self.frames.len() * 3 * panel).enumerate() {
            let sums = &mut sums[point * BLOCK_PAIRS * TILE..][..count * TILE];
            let mut accumulate = false;
            for (index, weights) in panels.chunks_exact(panel).enumerate() {
                let (frame, row) = (index / 3, index % 3);
                if self.frames[frame].is_none() {
                    continue;
                }
                let input = &inputs[(frame * POINTS + point) * self.plane()..][(start + row * pairs) * channels..];
                for (tile, sums) in sums.chunks_mut(TILE_ROWS * TILE).enumerate() {
                    let fma = FmaTile {
                        a: &input[tile * TILE_ROWS * channels..],
                        lda: channels,
                        rows: sums.len() / TILE,
                        b: weights,
                        ldb: TILE,
                        k: channels,
                        accumulate,
                    };
                    self.isa.fma_tile(fma, sums, TILE);
                }
                accumulate = true;
            }
        }
    }

    fn store(
        &self,
        column: usize,
        sums: &[f32],
        (first, start, count): (usize, usize, usize),
        out: &mut FrameRows<'_>,
    ) {
        let (width, pairs) = (self.input.width(), self.pairs());
        let channels = column * TILE..self.weights.shape.outputs.min((column + 1) * TILE);
        let bias = &self.weights.bias[column * TILE..][..TILE];
        for offset in 0..count {
            let (row, pair) = ((start + offset) / pairs, (start + offset) % pairs);
            let products: [&[f32]; POINTS] =
                std::array::from_fn(|point| &sums[(point * BLOCK_PAIRS + offset) * TILE..][..TILE]);
            let mut outputs = [[0f32; TILE]; 2];
            combine(self.isa, products, bias, &mut outputs);
            for (x, values) in (2 * pair..width).zip(&outputs) {
                let pixel = &mut out.pixel(first + row, x)[channels.clone()];
                if self.is_added {
                    for (pixel, value) in pixel.iter_mut().zip(values) {
                        *pixel += value;
                    }
                } else {
                    pixel.copy_from_slice(&values[..pixel.len()]);
                }
            }
        }
    }
}

multiversion! {
    /// The differences of one row of pixels, border included. Past the row lie zeros.
    fn transform_row(source: &[f32], channels: usize, a: &mut [f32], b: &mut [f32], c: &mut [f32], d: &mut [f32]) {
        let pairs = a.len() / channels;
        for pair in 0..pairs {
            let at = |pixel: usize| &source[(2 * pair + pixel) * channels..][..channels];
            let (d0, d1, d2) = (at(0), at(1), at(2));
            let here = pair * channels..(pair + 1) * channels;
            let (a, b) = (&mut a[here.clone()], &mut b[here.clone()]);
            let (c, d) = (&mut c[here.clone()], &mut d[here]);
            for channel in 0..channels {
                a[channel] = d0[channel] - d2[channel];
                b[channel] = d1[channel] + d2[channel];
                c[channel] = d2[channel] - d1[channel];
            }
            let end = (2 * pair + 4) * channels;
            if end <= source.len() {
                let d3 = at(3);
                for channel in 0..channels {
                    d[channel] = d1[channel] - d3[channel];
                }
            } else {
                d.copy_from_slice(d1);
            }
        }
    }
}

multiversion! {
    /// Two outputs from their four products.
    fn combine(products: [&[f32]; POINTS], bias: &[f32], outputs: &mut [[f32; TILE]; 2]) {
        let [m0, m1, m2, m3] = products;
        let (m0, m1, m2, m3, bias) = (&m0[..TILE], &m1[..TILE], &m2[..TILE], &m3[..TILE], &bias[..TILE]);
        for lane in 0..TILE {
            outputs[0][lane] = ((m0[lane] + m1[lane]) + m2[lane]) + bias[lane];
            outputs[1][lane] = ((m1[lane] - m2[lane]) - m3[lane]) + bias[lane];
        }
    }
}
