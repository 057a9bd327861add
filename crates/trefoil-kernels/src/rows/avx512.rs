//! Norms to codes on AVX-512, with rotary positions where there are some: the numbers of the generic ones. Sums of several rows are taken
//! together, because one alone waits for its own chain of additions, and a row goes to codes without a detour through memory.

#![allow(clippy::wildcard_imports, reason = "the intrinsics of one instruction set")]

use super::Modulation;
use crate::math::vectors::codes;
use crate::math::{LANES, rsqrt};
use crate::{RotaryTable, Rows, RowsMut};
use std::arch::x86_64::*;
use trefoil_weights::tile::TILE;

/// Rows whose sums are taken together. They stay in the first-level cache from sums to codes at the widths of the models.
pub(super) const TOGETHER: usize = 4;

/// Rows of a part and where their codes go.
pub(super) struct ToCodes<'r, 'a> {
    pub(super) input: Rows<'r, f32>,
    /// The number of its first row, which is its position.
    pub(super) first: usize,
    pub(super) out: &'r mut RowsMut<'a, i8>,
    pub(super) per_column: f32,
    pub(super) eps: f32,
    pub(super) inverse: f32,
    /// How many values ahead of what is stored the input is asked for.
    pub(super) ahead: usize,
}

impl<'r> ToCodes<'r, '_> {
    /// LayerNorm with what follows it.
    ///
    /// # Safety
    /// The processor has AVX-512 F, BW, DQ and VL.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn layer_norm(&mut self, modulation: Modulation<'_>) {
        for first in (0..self.input.rows()).step_by(TOGETHER) {
            let rows = self.rows(first);
            let means = sums(rows, [0.0; TOGETHER], |x, _| x).map(|sum| sum * self.per_column);
            let squares = sums(rows, means, |x, mean| {
                let distance = _mm512_sub_ps(x, mean);
                _mm512_mul_ps(distance, distance)
            });
            let factors = squares.map(|sum| rsqrt(sum * self.per_column + self.eps));
            let numbers = means.into_iter().zip(factors);
            for (offset, (values, (mean, factor))) in rows.into_iter().zip(numbers).enumerate() {
                let (mean, factor) = (_mm512_set1_ps(mean), _mm512_set1_ps(factor));
                let normal = |x| _mm512_mul_ps(_mm512_sub_ps(x, mean), factor);
                match modulation {
                    Modulation::None => self.store(first + offset, values, |x, _, _| normal(x)),
                    Modulation::Affine { gain, bias } => self.store(first + offset, values, |x, at, present| {
                        _mm512_add_ps(_mm512_mul_ps(normal(x), load(gain, at, present)), load(bias, at, present))
                    }),
                    Modulation::AdaLn { scale, shift } => self.store(first + offset, values, |x, at, present| {
                        let scale = _mm512_add_ps(_mm512_set1_ps(1.0), load(scale, at, present));
                        _mm512_add_ps(_mm512_mul_ps(normal(x), scale), load(shift, at, present))
                    }),
                }
            }
        }
    }

    /// RMSNorm without positions.
    ///
    /// # Safety
    /// As [`ToCodes::layer_norm`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn rms_norm(&mut self, gain: &[f32]) {
        for first in (0..self.input.rows()).step_by(TOGETHER) {
            let rows = self.rows(first);
            for (offset, (values, factor)) in rows.into_iter().zip(self.rms_factors(rows)).enumerate() {
                let factor = _mm512_set1_ps(factor);
                self.store(first + offset, values, |x, at, present| {
                    _mm512_mul_ps(_mm512_mul_ps(x, factor), load(gain, at, present))
                });
            }
        }
    }

    /// RMSNorm with positions, whose pairs fill registers.
    ///
    /// # Safety
    /// As [`ToCodes::layer_norm`].
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn rms_norm_rotary(&mut self, gain: &[f32], table: &RotaryTable) {
        let head = 2 * table.pairs;
        debug_assert!(
            head.is_multiple_of(LANES) && self.input.columns().is_multiple_of(head),
            "heads of {head} columns"
        );
        let (inverse, ahead) = (_mm512_set1_ps(self.inverse), self.ahead);
        for first in (0..self.input.rows()).step_by(TOGETHER) {
            let rows = self.rows(first);
            for (offset, (values, factor)) in rows.into_iter().zip(self.rms_factors(rows)).enumerate() {
                let row = (first + offset).min(self.input.rows() - 1);
                let factor = _mm512_set1_ps(factor);
                let (cos, sin) = table.row(self.first + row);
                let out = self.out.row_and_gap(row);
                // The same angles of all heads, one after the other.
                for lane in (0..head).step_by(LANES) {
                    let (cos, sin) = (twice(cos, lane / 2), twice(sin, lane / 2));
                    // a·cos − b·sin is a·cos + b·(−sin): minus in the first of a pair.
                    let sin = _mm512_xor_ps(sin, _mm512_castsi512_ps(_mm512_set1_epi64(1 << 31)));
                    for at in (lane..values.len()).step_by(head) {
                        ask_for(values, at + ahead);
                        let normal = _mm512_mul_ps(_mm512_mul_ps(whole(values, at), factor), whole(gain, at));
                        let others = _mm512_permute_ps::<0b10_11_00_01>(normal);
                        let turned = _mm512_add_ps(_mm512_mul_ps(normal, cos), _mm512_mul_ps(others, sin));
                        let codes = _mm512_cvtepi32_epi8(codes(turned, inverse));
                        // SAFETY: sixteen codes.
                        unsafe { _mm_storeu_si128(out[at..][..LANES].as_mut_ptr().cast(), codes) };
                    }
                }
                self.clear_padding(row);
            }
        }
    }

    /// Rows from `first` on; past the last one that one again, which is then done twice.
    #[inline]
    fn rows(&self, first: usize) -> [&'r [f32]; TOGETHER] {
        std::array::from_fn(|offset| self.input.row((first + offset).min(self.input.rows() - 1)))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn rms_factors(&self, rows: [&[f32]; TOGETHER]) -> [f32; TOGETHER] {
        let squares = sums(rows, [0.0; TOGETHER], |x, _| _mm512_mul_ps(x, x));
        squares.map(|sum| rsqrt(sum * self.per_column + self.eps))
    }

    /// The codes of `compute(x, column, lanes that are there)`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    fn store(&mut self, row: usize, values: &[f32], compute: impl Fn(__m512, usize, __mmask16) -> __m512) {
        let row = row.min(self.input.rows() - 1);
        let (inverse, ahead) = (_mm512_set1_ps(self.inverse), self.ahead);
        let out = self.out.row_and_gap(row);
        for at in (0..values.len()).step_by(LANES) {
            ask_for(values, at + ahead);
            let present = present(values, at);
            let codes = codes(compute(load(values, at, present), at, present), inverse);
            // SAFETY: rows of codes are padded to a multiple of 32, so there are sixteen.
            unsafe {
                _mm_storeu_si128(out[at..][..LANES].as_mut_ptr().cast(), _mm512_maskz_cvtepi32_epi8(present, codes));
            }
        }
        self.clear_padding(row);
    }

    #[inline]
    fn clear_padding(&mut self, row: usize) {
        let columns = self.input.columns();
        if !columns.is_multiple_of(TILE) {
            self.out.row_and_gap(row)[columns..columns.next_multiple_of(TILE)].fill(0);
        }
    }
}

/// [`crate::math::lane_sum`] of `term(x, number of the row)` of every row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
fn sums(
    rows: [&[f32]; TOGETHER],
    numbers: [f32; TOGETHER],
    term: impl Fn(__m512, __m512) -> __m512,
) -> [f32; TOGETHER] {
    let mut lanes = [_mm512_setzero_ps(); TOGETHER];
    for at in (0..rows[0].len()).step_by(LANES) {
        let present = present(rows[0], at);
        for ((lanes, row), number) in lanes.iter_mut().zip(rows).zip(numbers) {
            let term = term(load(row, at, present), _mm512_set1_ps(number));
            *lanes = _mm512_mask_add_ps(*lanes, present, *lanes, term);
        }
    }
    let mut folded = [0f32; TOGETHER];
    for (folded, lanes) in folded.iter_mut().zip(lanes) {
        // Lane l takes l + 8, l + 4, l + 2, l + 1.
        let eight = _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps::<1>(lanes));
        let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        *folded = _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
    }
    folded
}

/// Asks for the cache line of element `at`, wherever that is. Sums of several rows read as many places at once, which is more than the
/// processor foresees.
#[inline]
#[target_feature(enable = "avx512f")]
fn ask_for(values: &[f32], at: usize) {
    #[cfg(not(miri))]
    _mm_prefetch::<_MM_HINT_T0>(values.as_ptr().wrapping_add(at).cast());
    #[cfg(miri)]
    let _ = (values, at);
}

/// The lanes that are there from `at` on.
#[inline]
fn present(values: &[f32], at: usize) -> __mmask16 {
    let left = values.len() - at;
    if left >= LANES { __mmask16::MAX } else { (1 << left) - 1 }
}

/// Sixteen values from `at` on, zeros where they are not `present`.
#[inline]
#[target_feature(enable = "avx512f")]
fn load(values: &[f32], at: usize, present: __mmask16) -> __m512 {
    if present == __mmask16::MAX {
        return whole(values, at);
    }
    assert!(values.len() - at >= (LANES - present.leading_zeros() as usize), "values of a row");
    // SAFETY: just checked; lanes that are not there are not read.
    unsafe { _mm512_maskz_loadu_ps(present, values[at..].as_ptr()) }
}

/// Sixteen values from `at` on.
#[inline]
#[target_feature(enable = "avx512f")]
fn whole(values: &[f32], at: usize) -> __m512 {
    // SAFETY: sixteen values.
    unsafe { _mm512_loadu_ps(values[at..][..LANES].as_ptr()) }
}

/// Eight values from `at` on, each twice.
#[inline]
#[target_feature(enable = "avx512f")]
fn twice(values: &[f32], at: usize) -> __m512 {
    // SAFETY: eight values.
    let eight = unsafe { _mm256_loadu_ps(values[at..][..LANES / 2].as_ptr()) };
    let order = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    _mm512_permutexvar_ps(order, _mm512_castps256_ps512(eight))
}
