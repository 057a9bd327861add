//! The epilogue of an INT8 tile on AVX-512: the numbers of the generic one in one pass from sums to destination, two rows at a time, so
//! that the long chains of an activation overlap.

#![allow(clippy::wildcard_imports, reason = "the intrinsics of one instruction set")]

use super::epilogue::{ColumnParameters, TILE_VALUES};
use super::int8::Place;
use super::{Activation, GemmSink};
use crate::kernel::TILE_ROWS;
use crate::math::LANES;
use crate::math::vectors::{codes, gelu_tanh, round_f16, silu};
use crate::rows::Operands;
use std::arch::x86_64::*;
use trefoil_weights::tile::TILE;

/// Registers of the rows that the epilogue finishes together: two of them.
pub(super) const TWO_ROWS: usize = 2 * TILE / LANES;

/// A tile of sums on the way to its destination.
pub(super) struct Finish<'a> {
    pub(super) acc: &'a [i32; TILE_VALUES],
    /// The adapter's sums.
    pub(super) delta: Option<&'a [i32; TILE_VALUES]>,
    pub(super) row_scales: [f32; TILE_ROWS],
    pub(super) delta_row_scales: [f32; TILE_ROWS],
    pub(super) parameters: &'a ColumnParameters,
    pub(super) activation: Activation,
    pub(super) at: Place,
}

impl Finish<'_> {
    /// Stores what `sink` says of every row that is there, `VECTORS` registers at a time.
    ///
    /// # Safety
    /// The processor has AVX-512 VNNI.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(super) unsafe fn store<const VECTORS: usize>(&self, sink: &mut GemmSink<'_>) {
        let Place { row, column, valid, .. } = self.at;
        let columns = column * TILE..column * TILE + valid;
        let present = [LANES.min(valid), valid.saturating_sub(LANES)].map(|lanes| ((1u32 << lanes) - 1) as __mmask16);
        match sink {
            GemmSink::F32 { out, operands } => self.rows::<VECTORS>(|offset, values| {
                let at = out.row_mut(row + offset)[columns.clone()].as_mut_ptr();
                for (half, (value, present)) in values.into_iter().zip(present).enumerate() {
                    let value = if *operands == Operands::F16 { round_f16(value) } else { value };
                    // SAFETY: the row has `valid` elements from there on.
                    unsafe { store(at.wrapping_add(half * LANES), present, value) };
                }
            }),
            GemmSink::Codes { out, scale } => {
                let inverse = _mm512_set1_ps(1.0 / *scale);
                self.rows::<VECTORS>(|offset, values| {
                    let at = out.row_and_gap(row + offset)[columns.start..][..TILE].as_mut_ptr();
                    for (half, (value, present)) in values.into_iter().zip(present).enumerate() {
                        let codes = _mm512_maskz_cvtepi32_epi8(present, codes(value, inverse));
                        // SAFETY: 32 elements.
                        unsafe { _mm_storeu_si128(at.wrapping_add(half * LANES).cast(), codes) };
                    }
                });
            }
            GemmSink::Residual { state, precision, .. } => {
                let gate = self.parameters.gate.as_ref().map(|gate| vectors(gate));
                self.rows::<VECTORS>(|offset, values| {
                    let at = state.row_mut(row + offset)[columns.clone()].as_mut_ptr();
                    for (half, (value, present)) in values.into_iter().zip(present).enumerate() {
                        let at = at.wrapping_add(half * LANES);
                        let added = match gate {
                            Some(gate) => _mm512_mul_ps(value, gate[half]),
                            None => value,
                        };
                        // SAFETY: the row has `valid` elements from there on.
                        let sum = _mm512_add_ps(unsafe { _mm512_maskz_loadu_ps(present, at) }, added);
                        let sum = if *precision == Operands::F16 { round_f16(sum) } else { sum };
                        // SAFETY: as above.
                        unsafe { store(at, present, sum) };
                    }
                });
            }
        }
    }

    /// Hands every row that is there to `sink`, finished: `act(acc·(s_x·s_j) + b_j + delta·(s_h·t_j))`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    fn rows<const VECTORS: usize>(&self, mut sink: impl FnMut(usize, [__m512; TILE / LANES])) {
        let ColumnParameters { scale, bias, delta_scale, .. } = self.parameters;
        let (scale, bias, delta_scale) = (vectors(scale), vectors(bias), vectors(delta_scale));
        let of_row = |row_scale| {
            let row_scale = _mm512_set1_ps(row_scale);
            [_mm512_mul_ps(row_scale, scale[0]), _mm512_mul_ps(row_scale, scale[1])]
        };
        let mut row_scale = self.row_scales[0];
        let mut factors = of_row(row_scale);
        for first in (0..self.at.count).step_by(VECTORS * LANES / TILE) {
            let mut values = [_mm512_setzero_ps(); VECTORS];
            for (at, value) in values.iter_mut().enumerate() {
                let (row, half) = (first + at / 2, at % 2);
                // One scale for all rows is the rule.
                if half == 0 && self.row_scales[row].to_bits() != row_scale.to_bits() {
                    row_scale = self.row_scales[row];
                    factors = of_row(row_scale);
                }
                *value = _mm512_add_ps(_mm512_mul_ps(floats(self.acc, row, half), factors[half]), bias[half]);
                if let Some(delta) = self.delta {
                    let factor = _mm512_mul_ps(_mm512_set1_ps(self.delta_row_scales[row]), delta_scale[half]);
                    *value = _mm512_add_ps(*value, _mm512_mul_ps(floats(delta, row, half), factor));
                }
            }
            let values = match self.activation {
                Activation::Identity => values,
                Activation::GeluTanh => gelu_tanh(values),
                Activation::Silu => silu(values),
            };
            for (offset, &values) in values.as_chunks::<{ TILE / LANES }>().0.iter().enumerate() {
                if first + offset < self.at.count {
                    sink(first + offset, values);
                }
            }
        }
    }
}

/// Half a row of sums.
#[inline]
#[target_feature(enable = "avx512f")]
fn floats(sums: &[i32; TILE_VALUES], row: usize, half: usize) -> __m512 {
    let at = sums[row * TILE + half * LANES..][..LANES].as_ptr();
    // SAFETY: sixteen elements.
    _mm512_cvtepi32_ps(unsafe { _mm512_loadu_si512(at.cast()) })
}

/// A value for each of 32 columns.
#[inline]
#[target_feature(enable = "avx512f")]
fn vectors(values: &[f32; TILE]) -> [__m512; TILE / LANES] {
    let at = values.as_ptr();
    // SAFETY: 32 elements.
    unsafe { [_mm512_loadu_ps(at), _mm512_loadu_ps(at.wrapping_add(LANES))] }
}

/// The lanes that are there; a whole register takes the plain instruction, which is faster.
///
/// # Safety
/// The elements of `present` from `at` on are writable.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store(at: *mut f32, present: __mmask16, value: __m512) {
    // SAFETY: the caller's promise.
    unsafe {
        if present == __mmask16::MAX {
            _mm512_storeu_ps(at, value);
        } else {
            _mm512_mask_storeu_ps(at, present, value);
        }
    }
}
