//! Float GEMM: weights are widened (INT8) or transposed (f32) one tile column and a few hundred inputs at a time.
//!
//! Sums run over the inputs in ascending order with one accumulator per output, whatever the blocking. With FP16 operands
//! a product has 22 significant bits and is exact in f32, so fused and separate multiply-add agree: `w8a16` gives the same
//! bits on every instruction set.

use super::epilogue::{ColumnParameters, finish_float, gate_of, store_tile};
use super::{FloatEpilogue, FloatWeights, GemmSink, check_inner, check_tiled};
use crate::isa::Supported;
use crate::kernel::{FmaTile, TILE_ROWS, even_step};
use crate::math::round_f16;
use crate::multiversion::multiversion;
use crate::rows::{Operands, check_vector};
use crate::transpose::transpose;
use crate::workspace::at_least;
use crate::{KernelError, Kernels, Rows, Workspace};
use trefoil_weights::tile::{GROUP, GROUP_BYTES, TILE};

/// Inputs widened at a time; a panel is 32 KiB.
const PANEL_INPUTS: usize = 256;
/// Most rows that share a panel: enough that making it costs a few per cent of using it.
const BLOCK_ROWS: usize = 396;

impl Kernels {
    /// `sink ← epilogue(input · weights)` with f32 accumulation.
    ///
    /// With [`Operands::F16`] the weights are rounded to FP16 as they are widened; the caller passes input (and the
    /// adapter's hidden values) already rounded, which every sink can do on store.
    ///
    /// # Errors
    /// Shapes that do not fit each other (with both shapes).
    pub fn gemm_f32(
        &self,
        input: Rows<'_, f32>,
        weights: &FloatWeights<'_>,
        operands: Operands,
        epilogue: &FloatEpilogue<'_>,
        mut sink: GemmSink<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), KernelError> {
        let operator = "gemm_f32";
        let (d_in, d_out) = weights.shape();
        check_inner(operator, input.shape(), input.columns(), (d_in, d_out))?;
        if let FloatWeights::Tiled(view) = weights {
            check_tiled(operator, view)?;
        }
        if let Some(bias) = epilogue.bias {
            check_vector(operator, ("bias", bias), d_out)?;
        }
        if let Some(adapter) = &epilogue.adapter {
            let (rank, adapter_out) = adapter.up.shape();
            check_inner(operator, adapter.hidden.shape(), adapter.hidden.columns(), (rank, adapter_out))?;
            if let FloatWeights::Tiled(view) = &adapter.up {
                check_tiled(operator, view)?;
            }
            if adapter.hidden.rows() != input.rows() || adapter_out != d_out {
                return Err(KernelError::shapes(
                    operator,
                    ("the adapter", format!("{}×{adapter_out}", adapter.hidden.rows())),
                    ("the product", format!("{}×{d_out}", input.rows())),
                    "they must have the same shape",
                ));
            }
        }
        sink.check(operator, input.rows(), d_out)?;
        self.run_parts(
            input.rows(),
            workspace,
            |count| sink.take_rows(count),
            |part| {
                let isa = self.supported();
                let scratch = at_least(&mut part.slot.floats, PANEL_INPUTS * TILE + 2 * BLOCK_ROWS * TILE);
                let (panel, tiles) = scratch.split_at_mut(PANEL_INPUTS * TILE);
                let (y, delta) = tiles.split_at_mut(BLOCK_ROWS * TILE);
                let step = even_step(part.rows, BLOCK_ROWS);
                for first in (0..part.rows).step_by(step) {
                    let rows = step.min(part.rows - first);
                    let block = input.part(part.first + first, rows);
                    for column in 0..d_out.div_ceil(TILE) {
                        let valid = TILE.min(d_out - column * TILE);
                        let builder = ColumnParameters::columns(column * TILE, valid);
                        let parameters = ColumnParameters {
                            scale: [1.0; TILE],
                            bias: builder.lift(epilogue.bias, 0.0),
                            delta_scale: [0.0; TILE],
                            gate: gate_of(&part.sink, builder),
                        };
                        multiply(isa, block, weights, operands, column, panel, y);
                        let mut factor = 0.0;
                        if let Some(adapter) = &epilogue.adapter {
                            let hidden = adapter.hidden.part(part.first + first, rows);
                            multiply(isa, hidden, &adapter.up, operands, column, panel, delta);
                            factor = adapter.factor;
                        }
                        for tile in (0..rows).step_by(TILE_ROWS) {
                            let values = tile * TILE..(tile + TILE_ROWS.min(rows - tile)) * TILE;
                            let delta = if epilogue.adapter.is_some() { &delta[values.clone()] } else { &[][..] };
                            let y = &mut y[values];
                            finish_float(isa, delta, factor, &parameters, epilogue.activation, y);
                            store_tile(isa, y, &parameters, (first + tile, column * TILE, valid), &mut part.sink);
                        }
                    }
                }
            },
        );
        Ok(())
    }
}

/// `out ← input · weights[.., column]`, rows of 32.
fn multiply(
    isa: Supported,
    input: Rows<'_, f32>,
    weights: &FloatWeights<'_>,
    operands: Operands,
    column: usize,
    panel: &mut [f32],
    out: &mut [f32],
) {
    let (d_in, _) = weights.shape();
    for start in (0..d_in).step_by(PANEL_INPUTS) {
        let k = PANEL_INPUTS.min(d_in - start);
        match weights {
            FloatWeights::Tiled(view) => {
                let bytes = view.shape.column_bytes();
                // PANEL_INPUTS is a multiple of the tile, so the panel starts at a group of four inputs.
                let codes = &view.codes[column * bytes..(column + 1) * bytes][start * TILE..];
                let mut scales = [1f32; TILE];
                let valid = TILE.min(view.shape.d_out - column * TILE);
                scales[..valid].copy_from_slice(&view.scales[column * TILE..][..valid]);
                widen(isa, &codes[..k.next_multiple_of(GROUP) * TILE], &scales, operands, panel);
            }
            FloatWeights::OutIn(rows) => {
                let panel = &mut panel[..k * TILE];
                transpose(*rows, column * TILE, start, panel);
                if operands == Operands::F16 {
                    round_panel(isa, panel);
                }
            }
        }
        for tile in (0..input.rows()).step_by(TILE_ROWS) {
            let fma = FmaTile {
                a: &input.starting_at(tile)[start..],
                lda: input.stride(),
                rows: TILE_ROWS.min(input.rows() - tile),
                b: panel,
                ldb: TILE,
                k,
                accumulate: start > 0,
            };
            isa.fma_tile(fma, &mut out[tile * TILE..], TILE);
        }
    }
}

multiversion! {
    /// `panel[i][j] = codes[i][j]·scale[j]` for the groups of a tile column.
    fn widen(codes: &[i8], scales: &[f32; TILE], operands: Operands, panel: &mut [f32]) {
        for (rows, group) in panel.as_chunks_mut::<{ TILE * GROUP }>().0.iter_mut().zip(codes.as_chunks::<GROUP_BYTES>().0) {
            for (offset, row) in rows.as_chunks_mut::<TILE>().0.iter_mut().enumerate() {
                for column in 0..TILE {
                    row[column] = f32::from(group[column * GROUP + offset]) * scales[column];
                }
            }
            if operands == Operands::F16 {
                for value in rows.iter_mut() {
                    *value = round_f16(*value);
                }
            }
        }
    }
}

multiversion! {
    fn round_panel(panel: &mut [f32]) {
        for value in panel {
            *value = round_f16(*value);
        }
    }
}
