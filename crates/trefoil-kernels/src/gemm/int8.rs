//! `w8a8`: INT8 activations times tiled INT8 weights, read where they lie.
//!
//! Loop order per thread: a block of rows whose codes fit the second-level cache, then tile columns (each one contiguous
//! run of bytes, streamed once per block), then row tiles of the block. A tile's whole reduction stays in registers, so
//! the epilogue sees final sums and writes each output once.

use super::epilogue::{ColumnParameters, TileScratch, finish_int8, gate_of, prefetch_tile, store_tile};
use super::{
    ActivationScale, Adapter, Codes, Epilogue, GemmSink, check_activations, check_inner, check_tiled, row_block,
};
use crate::isa::Supported;
use crate::kernel::{DotTile, TILE_ROWS, row_sums};
use crate::rows::check_vector;
use crate::workspace::at_least;
use crate::{KernelError, Kernels, Workspace};
use trefoil_weights::TiledView;
use trefoil_weights::tile::TILE;

/// Most rows of a block.
const MOST_ROWS: usize = 240;

impl Kernels {
    /// `sink ← epilogue(input · weights)`.
    ///
    /// # Errors
    /// Shapes that do not fit each other (with both shapes), scales that are not positive numbers.
    pub fn gemm_w8a8(
        &self,
        input: &Codes<'_>,
        weights: &TiledView<'_>,
        epilogue: &Epilogue<'_>,
        mut sink: GemmSink<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), KernelError> {
        let operator = "gemm_w8a8";
        check_product(operator, input, weights, epilogue)?;
        sink.check(operator, input.codes.rows(), weights.shape.d_out)?;
        self.run_parts(
            input.codes.rows(),
            workspace,
            |count| sink.take_rows(count),
            |part| {
                let gemm = Gemm {
                    isa: self.supported(),
                    input: *input,
                    weights: *weights,
                    epilogue: *epilogue,
                    first: part.first,
                    rows: part.rows,
                };
                let scratch = GemmScratch { sums: &mut part.slot.integers, codes: &mut part.slot.codes };
                gemm.run(&mut part.sink, scratch);
            },
        );
        Ok(())
    }
}

/// Whether input, weights and epilogue of a product fit each other.
pub(super) fn check_product(
    operator: &'static str,
    input: &Codes<'_>,
    weights: &TiledView<'_>,
    epilogue: &Epilogue<'_>,
) -> Result<(), KernelError> {
    let (d_in, d_out) = (weights.shape.d_in, weights.shape.d_out);
    check_inner(operator, input.codes.shape(), input.codes.columns(), (d_in, d_out))?;
    check_activations(operator, input)?;
    check_tiled(operator, weights)?;
    if let Some(bias) = epilogue.bias {
        check_vector(operator, ("bias", bias), d_out)?;
    }
    if let Some(adapter) = &epilogue.adapter {
        let hidden = &adapter.hidden.codes;
        check_inner(operator, hidden.shape(), hidden.columns(), (adapter.up.shape.d_in, adapter.up.shape.d_out))?;
        check_activations(operator, &adapter.hidden)?;
        check_tiled(operator, &adapter.up)?;
        if hidden.rows() != input.codes.rows() || adapter.up.shape.d_out != d_out {
            return Err(KernelError::shapes(
                operator,
                ("the adapter", format!("{}×{}", hidden.rows(), adapter.up.shape.d_out)),
                ("the product", format!("{}×{d_out}", input.codes.rows())),
                "they must have the same shape",
            ));
        }
    }
    Ok(())
}

/// One thread's part of a GEMM.
pub(super) struct Gemm<'a> {
    pub(super) isa: Supported,
    pub(super) input: Codes<'a>,
    pub(super) weights: TiledView<'a>,
    pub(super) epilogue: Epilogue<'a>,
    /// First row of the part in the input; the sink starts there.
    pub(super) first: usize,
    pub(super) rows: usize,
}

/// One thread's scratch for a product.
pub(super) struct GemmScratch<'s> {
    /// Sums of the rows' codes.
    pub(super) sums: &'s mut Vec<i32>,
    /// Repacked codes where an instruction set wants them.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "no instruction set here repacks"))]
    pub(super) codes: &'s mut Vec<i8>,
}

impl Gemm<'_> {
    pub(super) fn run(&self, sink: &mut GemmSink<'_>, scratch: GemmScratch<'_>) {
        #[cfg(target_arch = "x86_64")]
        let scratch = {
            let mut scratch = scratch;
            if super::amx::run(self, sink, &mut scratch) {
                return;
            }
            scratch
        };
        let shape = self.weights.shape;
        let block = row_block(shape.padded_in(), MOST_ROWS);
        let sums = at_least(scratch.sums, 2 * MOST_ROWS);
        let mut scratch = TileScratch::new();
        for first in (0..self.rows).step_by(block) {
            let rows = block.min(self.rows - first);
            let (input_sums, hidden_sums) = sums.split_at_mut(MOST_ROWS);
            if self.isa.needs_row_sums() {
                self.sum_rows(&self.input, first, &mut input_sums[..rows]);
                if let Some(adapter) = &self.epilogue.adapter {
                    self.sum_rows(&adapter.hidden, first, &mut hidden_sums[..rows]);
                }
            }
            #[cfg(target_arch = "x86_64")]
            let done = super::overlap::run(self, (first, rows), &input_sums[..rows], sink);
            #[cfg(not(target_arch = "x86_64"))]
            let done = 0;
            if done == rows {
                continue;
            }
            for column in 0..shape.tile_columns() {
                let valid = TILE.min(shape.d_out - column * TILE);
                let parameters = self.parameters(column, valid, sink);
                for tile in (done..rows).step_by(TILE_ROWS) {
                    let count = TILE_ROWS.min(rows - tile);
                    let at = Place { row: first + tile, count, column, valid };
                    self.tile(at, &parameters, (&input_sums[tile..], &hidden_sums[tile..]), &mut scratch, sink);
                }
            }
        }
    }

    /// What the epilogue needs of a tile column.
    pub(super) fn parameters(&self, column: usize, valid: usize, sink: &GemmSink<'_>) -> ColumnParameters {
        let builder = ColumnParameters::columns(column * TILE, valid);
        let mut delta_scale = [0f32; TILE];
        if let Some(adapter) = &self.epilogue.adapter {
            delta_scale = builder.lift(Some(adapter.up.scales), 0.0).map(|scale| adapter.factor * scale);
        }
        ColumnParameters {
            scale: builder.lift(Some(self.weights.scales), 1.0),
            bias: builder.lift(self.epilogue.bias, 0.0),
            delta_scale,
            gate: gate_of(sink, builder),
        }
    }

    fn sum_rows(&self, codes: &Codes<'_>, first: usize, sums: &mut [i32]) {
        let k = codes.codes.columns().next_multiple_of(TILE);
        row_sums(self.isa, codes.codes.starting_at(self.first + first), codes.codes.stride(), k, sums);
    }

    fn tile(
        &self,
        at: Place,
        parameters: &ColumnParameters,
        (input_sums, hidden_sums): (&[i32], &[i32]),
        scratch: &mut TileScratch,
        sink: &mut GemmSink<'_>,
    ) {
        let TileScratch { acc, delta, y } = scratch;
        let values = at.count * TILE;
        prefetch_tile((at.row, at.count), (at.column * TILE, at.valid), sink);
        self.dot(&self.input, &self.weights, at, input_sums, acc);
        let has_delta = self.dot_hidden(at, hidden_sums, delta);
        let [row_scales, delta_row_scales] = self.row_scales(at);
        let activation = self.epilogue.activation;
        #[cfg(target_arch = "x86_64")]
        if self.isa.has_avx512_vnni() {
            let delta = has_delta.then_some(&*delta);
            let tile = super::avx512::Finish { acc, delta, row_scales, delta_row_scales, parameters, activation, at };
            // SAFETY: `self.isa` vouches for the instruction set.
            return unsafe { tile.store::<{ super::avx512::TWO_ROWS }>(sink) };
        }
        let y = &mut y[..values];
        finish_int8(
            self.isa,
            &acc[..values],
            &row_scales[..at.count],
            &delta[..if has_delta { values } else { 0 }],
            &delta_row_scales[..at.count],
            parameters,
            activation,
            y,
        );
        store_tile(self.isa, y, parameters, (at.row, at.column * TILE, at.valid), sink);
    }

    /// The sums of the adapter's codes of some rows, if there is one and the instruction set wants them.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn sum_hidden(&self, first: usize, sums: &mut [i32]) {
        if let Some(adapter) = self.epilogue.adapter.as_ref().filter(|_| self.isa.needs_row_sums()) {
            self.sum_rows(&adapter.hidden, first, sums);
        }
    }

    /// The product of the adapter for any number of rows, row tile by row tile.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn dot_hidden_rows(&self, at: Place, sums: &[i32], delta: &mut [i32]) {
        for first in (0..at.count).step_by(TILE_ROWS) {
            let tile = Place { row: at.row + first, count: TILE_ROWS.min(at.count - first), ..at };
            self.dot_hidden(tile, &sums[first..], &mut delta[first * TILE..]);
        }
    }

    /// The product of the adapter; false where there is none.
    fn dot_hidden(&self, at: Place, sums: &[i32], delta: &mut [i32]) -> bool {
        let Some(Adapter { hidden, up, .. }) = &self.epilogue.adapter else { return false };
        self.dot(hidden, up, at, sums, delta);
        true
    }

    /// The scales of a tile's rows, and those of the adapter's; zeros where there are none.
    #[inline]
    pub(super) fn row_scales(&self, at: Place) -> [[f32; TILE_ROWS]; 2] {
        let row = self.first + at.row;
        let of_hidden = |adapter: &Adapter<'_>| scales_of(&adapter.hidden.scale, row, at.count);
        [
            scales_of(&self.input.scale, row, at.count),
            self.epilogue.adapter.as_ref().map_or([0.0; TILE_ROWS], of_hidden),
        ]
    }

    fn dot(&self, codes: &Codes<'_>, weights: &TiledView<'_>, at: Place, sums: &[i32], acc: &mut [i32]) {
        let bytes = weights.shape.column_bytes();
        let tile = DotTile {
            a: codes.codes.starting_at(self.first + at.row),
            lda: codes.codes.stride(),
            rows: at.count,
            weights: &weights.codes[at.column * bytes..(at.column + 1) * bytes],
            k: weights.shape.padded_in(),
            row_sums: sums,
        };
        self.isa.dot_tile(tile, acc, TILE);
    }
}

/// A row tile × tile column within a part.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    pub(super) row: usize,
    pub(super) count: usize,
    pub(super) column: usize,
    pub(super) valid: usize,
}

fn scales_of(scale: &ActivationScale<'_>, first: usize, count: usize) -> [f32; TILE_ROWS] {
    std::array::from_fn(|row| if row < count { scale.of(first + row) } else { 0.0 })
}
