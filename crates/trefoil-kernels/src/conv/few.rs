//! 3 × 3 filters with at most three outputs: their nine taps are the outputs of one product each.
//!
//! A tile of 32 outputs would be nearly empty. So every input pixel is multiplied once by all taps of all outputs (27 columns for
//! three outputs), and an output pixel then adds the nine values that its neighbours hold for it.

use super::frame::FrameRows;
use super::weights::FilterShape;
use super::{ConvWeights, Frame};
use crate::isa::Supported;
use crate::kernel::{FmaTile, TILE_ROWS};
use trefoil_weights::tile::TILE;

const TAPS: usize = 9;

/// Whether a filter is computed this way.
pub(super) fn suits(shape: FilterShape) -> bool {
    (shape.height, shape.width) == (3, 3) && shape.outputs * TAPS <= TILE
}

/// For each frame `[inputs][32]`; column `tap · outputs + output`.
pub(super) fn pack(shape: FilterShape, weight: &[f32]) -> Vec<f32> {
    let FilterShape { outputs, inputs, frames, .. } = shape;
    let mut panels = vec![0f32; frames * inputs * TILE];
    for (index, lanes) in panels.as_chunks_mut::<TILE>().0.iter_mut().enumerate() {
        let (frame, input) = (index / inputs, index % inputs);
        for (column, lane) in lanes.iter_mut().take(TAPS * outputs).enumerate() {
            let (tap, output) = (column / outputs, column % outputs);
            *lane = weight[((output * inputs + input) * frames + frame) * TAPS + tap];
        }
    }
    panels
}

/// Values of scratch: three rows of products.
pub(super) fn scratch(width: usize) -> usize {
    3 * (width + 2) * TILE
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
    pub(super) fn run(&self, scratch: &mut [f32], out: &mut FrameRows<'_>) {
        let padded = self.input.width() + 2;
        let products = scratch.split_at_mut(3 * padded * TILE).0;
        // Row `row` of these needs input rows row − 1 ..= row + 1, which are padded rows row ..= row + 2.
        for row in 0..self.rows + 2 {
            let line = &mut products[row % 3 * padded * TILE..][..padded * TILE];
            self.multiply(self.first_row + row, line);
            if let Some(done) = row.checked_sub(2) {
                self.gather(done, products, out);
            }
        }
    }

    /// Products of all pixels of a padded row.
    fn multiply(&self, padded_row: usize, products: &mut [f32]) {
        let channels = self.input.channels();
        let mut accumulate = false;
        for (frame, panel) in self.frames.iter().zip(self.panels.chunks_exact(channels * TILE)) {
            let Some(frame) = frame else { continue };
            let input = &frame.data()[padded_row * frame.stride()..][..frame.stride()];
            for (tile, products) in products.chunks_mut(TILE_ROWS * TILE).enumerate() {
                let fma = FmaTile {
                    a: &input[tile * TILE_ROWS * channels..],
                    lda: channels,
                    rows: products.len() / TILE,
                    b: panel,
                    ldb: TILE,
                    k: channels,
                    accumulate,
                };
                self.isa.fma_tile(fma, products, TILE);
            }
            accumulate = true;
        }
        debug_assert!(accumulate, "a convolution of nothing but zeros does not come here");
    }

    fn gather(&self, row: usize, products: &[f32], out: &mut FrameRows<'_>) {
        let (padded, outputs) = (self.input.width() + 2, self.weights.shape.outputs);
        for x in 0..self.input.width() {
            let pixel = out.pixel(row, x);
            for (output, pixel) in pixel.iter_mut().enumerate() {
                let mut sum = self.weights.bias[output];
                for tap in 0..TAPS {
                    let line = (row + tap / 3) % 3 * padded;
                    sum += products[(line + x + tap % 3) * TILE + tap * outputs + output];
                }
                *pixel = if self.is_added { *pixel + sum } else { sum };
            }
        }
    }
}
