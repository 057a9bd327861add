//! From accumulators to destinations, a row tile × 32 columns at a time.

#![allow(clippy::needless_range_loop, reason = "a column indexes several arrays at once")]

use super::{Activation, GemmSink};
use crate::isa::Supported;
use crate::kernel::{TILE_ROWS, prefetch};
use crate::math::{code, gelu_tanh, round_f16, silu};
use crate::multiversion::multiversion;
use crate::rows::Operands;
use trefoil_weights::tile::TILE;

/// Values of a tile.
pub(super) const TILE_VALUES: usize = TILE_ROWS * TILE;

/// What a row tile needs besides its destination; one per thread and call, on the stack. A register of any instruction set
/// is then within a cache line.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct TileScratch {
    pub(super) acc: [i32; TILE_VALUES],
    pub(super) delta: [i32; TILE_VALUES],
    pub(super) y: [f32; TILE_VALUES],
}

impl TileScratch {
    pub(super) fn new() -> TileScratch {
        TileScratch { acc: [0; TILE_VALUES], delta: [0; TILE_VALUES], y: [0.0; TILE_VALUES] }
    }
}

/// Per-column values of one tile column, padding filled in.
#[derive(Debug, Clone, Copy)]
pub(super) struct ColumnParameters {
    /// `s_j`, 1 in the padding.
    pub(super) scale: [f32; TILE],
    /// `b_j`, 0 in the padding.
    pub(super) bias: [f32; TILE],
    /// `factor·s_Bj`.
    pub(super) delta_scale: [f32; TILE],
    /// The gate, if any.
    pub(super) gate: Option<[f32; TILE]>,
}

impl ColumnParameters {
    /// Takes columns `first .. first + valid`.
    pub(super) fn columns(first: usize, valid: usize) -> ColumnParameterBuilder {
        ColumnParameterBuilder { first, valid }
    }
}

/// Copies slices of vectors into [`ColumnParameters`].
#[derive(Debug, Clone, Copy)]
pub(super) struct ColumnParameterBuilder {
    first: usize,
    valid: usize,
}

impl ColumnParameterBuilder {
    /// The columns of `vector`, `padding` where there are none.
    pub(super) fn lift(self, vector: Option<&[f32]>, padding: f32) -> [f32; TILE] {
        let mut values = [padding; TILE];
        if let Some(vector) = vector {
            values[..self.valid].copy_from_slice(&vector[self.first..][..self.valid]);
        }
        values
    }
}

#[inline(always)]
#[allow(clippy::inline_always, reason = "it must be compiled inside each version")]
fn activate(activation: Activation, values: &mut [f32]) {
    match activation {
        Activation::Identity => {}
        Activation::GeluTanh => values.iter_mut().for_each(|value| *value = gelu_tanh(*value)),
        Activation::Silu => values.iter_mut().for_each(|value| *value = silu(*value)),
    }
}

multiversion! {
    /// `y = act(acc·(s_x·s_j) + b_j + delta·(s_h·t_j))`; `delta` is empty where there is no adapter.
    pub(super) fn finish_int8(
        acc: &[i32], row_scales: &[f32], delta: &[i32], delta_row_scales: &[f32],
        columns: &ColumnParameters, activation: Activation, y: &mut [f32],
    ) {
        for ((y, acc), &row_scale) in y.as_chunks_mut::<TILE>().0.iter_mut().zip(acc.as_chunks::<TILE>().0).zip(row_scales) {
            for column in 0..TILE {
                y[column] = acc[column] as f32 * (row_scale * columns.scale[column]) + columns.bias[column];
            }
        }
        for ((y, delta), &row_scale) in y.as_chunks_mut::<TILE>().0.iter_mut().zip(delta.as_chunks::<TILE>().0).zip(delta_row_scales) {
            for column in 0..TILE {
                y[column] += delta[column] as f32 * (row_scale * columns.delta_scale[column]);
            }
        }
        activate(activation, y);
    }
}

multiversion! {
    /// `y = act(y + b_j + factor·delta)`; `delta` is empty where there is no adapter.
    pub(super) fn finish_float(delta: &[f32], factor: f32, columns: &ColumnParameters, activation: Activation, y: &mut [f32]) {
        for y in y.as_chunks_mut::<TILE>().0 {
            for column in 0..TILE {
                y[column] += columns.bias[column];
            }
        }
        for (y, &delta) in y.iter_mut().zip(delta) {
            *y += factor * delta;
        }
        activate(activation, y);
    }
}

multiversion! {
    fn quantise_tile(y: &[f32], inverse: f32, codes: &mut [i8]) {
        for (out, &value) in codes.iter_mut().zip(y) {
            *out = code(value, inverse);
        }
    }
}

multiversion! {
    fn round_tile(y: &mut [f32]) {
        for value in y {
            *value = round_f16(*value);
        }
    }
}

multiversion! {
    fn add_to_state(y: &[f32], gate: Option<&[f32; TILE]>, precision: Operands, state: &mut [f32]) {
        match gate {
            Some(gate) => {
                for ((state, &y), &gate) in state.iter_mut().zip(y).zip(gate) {
                    *state += y * gate;
                }
            }
            None => {
                for (state, &y) in state.iter_mut().zip(y) {
                    *state += y;
                }
            }
        }
        if precision == Operands::F16 {
            for state in state.iter_mut() {
                *state = round_f16(*state);
            }
        }
    }
}

/// Stores rows `row ..` and columns `first .. first + valid` of a finished tile. `y` holds whole rows of 32.
pub(super) fn store_tile(
    isa: Supported,
    y: &mut [f32],
    columns: &ColumnParameters,
    (row, first, valid): (usize, usize, usize),
    sink: &mut GemmSink<'_>,
) {
    match sink {
        GemmSink::F32 { out, operands } => {
            if *operands == Operands::F16 {
                round_tile(isa, y);
            }
            for (offset, y) in y.as_chunks::<TILE>().0.iter().enumerate() {
                let out = &mut out.row_mut(row + offset)[first..first + valid];
                // A whole tile has a length known to the compiler: a few registers instead of a call.
                match <&mut [f32; TILE]>::try_from(&mut *out) {
                    Ok(out) => *out = *y,
                    Err(_) => out.copy_from_slice(&y[..valid]),
                }
            }
        }
        GemmSink::Codes { out, scale } => {
            let mut codes = [0i8; TILE_VALUES];
            let codes = &mut codes[..y.len()];
            quantise_tile(isa, y, 1.0 / *scale, codes);
            for (offset, codes) in codes.as_chunks_mut::<TILE>().0.iter_mut().enumerate() {
                codes[valid..].fill(0);
                out.row_and_gap(row + offset)[first..first + TILE].copy_from_slice(codes);
            }
        }
        GemmSink::Residual { state, precision, .. } => {
            for (offset, y) in y.as_chunks::<TILE>().0.iter().enumerate() {
                let state = &mut state.row_mut(row + offset)[first..first + valid];
                add_to_state(isa, &y[..valid], columns.gate.as_ref(), *precision, state);
            }
        }
    }
}

/// Asks for the cache lines that [`store_tile`] will write, so that they are there when the sums are: most outputs are much larger
/// than the caches.
pub(super) fn prefetch_tile((row, count): (usize, usize), (first, valid): (usize, usize), sink: &GemmSink<'_>) {
    for row in row..row + count {
        match sink {
            GemmSink::F32 { out, .. } => prefetch(out.at(row, first), valid),
            GemmSink::Codes { out, .. } => prefetch(out.at(row, first), valid),
            GemmSink::Residual { state, .. } => prefetch(state.at(row, first), valid),
        }
    }
}

/// The gate of a sink for the columns of a tile.
pub(super) fn gate_of(sink: &GemmSink<'_>, builder: ColumnParameterBuilder) -> Option<[f32; TILE]> {
    match sink {
        GemmSink::Residual { gate: Some(gate), .. } => Some(builder.lift(Some(gate), 0.0)),
        _ => None,
    }
}
