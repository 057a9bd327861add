//! Scores of a row tile on AVX-512 VNNI, and meanwhile the codes of the row tile before.
//!
//! The product needs two of the four floating-point pipes, and 28 of 32 registers. So a step of it, a few hundred instructions that
//! depend on nothing but themselves, also holds the powers of some scores of the tile before, one register of them at a time: their
//! additions and conversions go where the product does not, and their long chains wait for nobody. Constants are operands in memory,
//! which takes no register.

use super::{LANES, TILE_GROUP};
use crate::attention::KEY_BLOCK;
use crate::attention::int8::TILE_SCORES;
use crate::kernel::{STEP, TILE_ROWS, for_each_group, four};
use crate::math::{EXP2_FRACTION, MAX_CODE};
use std::arch::x86_64::*;
use trefoil_weights::tile::{GROUP, GROUP_BYTES, TILE};

/// Scores of a row tile × tile column, which lie together.
const COLUMN_SCORES: usize = TILE_ROWS * TILE;
const _: () = assert!(COLUMN_SCORES * (KEY_BLOCK / TILE) == TILE_SCORES);

/// A block of keys of a head.
pub(super) struct Keys<'a> {
    /// head_dim × keys in tile order; the keys a multiple of 32.
    pub(super) codes: &'a [i8],
    /// `−128·Σ k` per key.
    pub(super) offsets: &'a [i32],
    /// Keys that are there, above 0; the others are padding.
    pub(super) valid: usize,
}

impl Keys<'_> {
    /// A bit for each of 32 keys from `first` on that is there.
    fn present(&self, first: usize) -> u32 {
        if self.valid - first >= TILE { u32::MAX } else { (1 << (self.valid - first)) - 1 }
    }
}

/// A number per row of a tile.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::attention) struct OfRows<T>(pub(in crate::attention) [T; LANES]);

/// What turns scores into codes.
#[repr(C)]
pub(in crate::attention) struct Coding {
    pub(super) sigma: f32,
    fraction: [f32; EXP2_FRACTION.len()],
    max_code: f32,
}

impl Coding {
    pub(in crate::attention) fn new(sigma: f32) -> Coding {
        Coding { sigma, fraction: EXP2_FRACTION, max_code: MAX_CODE }
    }

    /// [`crate::math::exp2_code`] of sixteen scores of a row whose largest is `largest`, 32 bits each. The same additions and products, with
    /// two shorter ways.
    ///
    /// - `f = x − round(x)` is one instruction.
    /// - `2ⁿ` is multiplied by an instruction that takes any n, so nothing needs a bound. It comes after the factor 127, which changes no
    ///   bit of a number that is not tiny, and tiny ones have code 0.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(in crate::attention) fn codes(&self, scores: __m512i, largest: i32) -> __m512i {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        let difference = _mm512_sub_epi32(scores, _mm512_set1_epi32(largest));
        let x = _mm512_mul_ps(_mm512_cvtepi32_ps(difference), _mm512_set1_ps(self.sigma));
        let f = _mm512_reduce_ps::<NEAREST>(x);
        let mut p = _mm512_set1_ps(self.fraction[0]);
        for &coefficient in &self.fraction[1..] {
            p = _mm512_add_ps(_mm512_mul_ps(p, f), _mm512_set1_ps(coefficient));
        }
        let scaled = _mm512_scalef_ps(_mm512_mul_ps(p, _mm512_set1_ps(self.max_code)), _mm512_sub_ps(x, f));
        // What is no number has code 0 in its lowest byte.
        _mm512_cvt_roundps_epi32::<NEAREST>(scaled)
    }
}

/// Where the coding of a tile column is.
#[derive(Clone, Copy)]
struct Cursor {
    coding: *const Coding,
    /// Of the next row.
    largest: *const i32,
    /// Its scores and codes, 32 each.
    scores: *const i32,
    codes: *mut i8,
}

impl Cursor {
    /// Where nothing is coded.
    const NOWHERE: Cursor = Cursor {
        coding: std::ptr::null(),
        largest: std::ptr::null(),
        scores: std::ptr::null(),
        codes: std::ptr::null_mut(),
    };

    /// Codes of sixteen scores: half `half` of the row `row` from here.
    ///
    /// # Safety
    /// The row is there.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn code(self, row: usize, half: usize) {
        // SAFETY: the caller's promise; `coding` lives as long as the cursor is used.
        unsafe {
            let scores = _mm512_loadu_si512(self.scores.add(row * TILE + half * LANES).cast());
            let codes = _mm512_cvtepi32_epi8((*self.coding).codes(scores, *self.largest.add(row)));
            _mm_storeu_si128(self.codes.add(row * KEY_BLOCK + half * LANES).cast(), codes);
        }
    }

    #[inline]
    fn advance(&mut self, rows: usize) {
        self.largest = self.largest.wrapping_add(rows);
        self.scores = self.scores.wrapping_add(rows * TILE);
        self.codes = self.codes.wrapping_add(rows * KEY_BLOCK);
    }
}

/// The row tile before: codes for its scores of `valid` keys.
#[derive(Clone, Copy)]
pub(super) struct Before<'a> {
    pub(super) coding: &'a Coding,
    /// The largest score of each row.
    pub(super) largest: &'a OfRows<i32>,
    pub(super) valid: usize,
}

impl Before<'_> {
    fn columns(self) -> usize {
        self.valid.div_ceil(TILE)
    }
}

/// A product of a row tile with 32 keys.
struct Column {
    keys: *const i8,
    query: *const i8,
    /// Of 32 inputs.
    steps: usize,
    /// What the sums start from, one per key.
    offsets: *const i32,
    /// A bit for each key that is there.
    present: u32,
    /// Where the scores go.
    scores: *mut i32,
}

impl Column {
    /// The scores; codes of `ROWS` rows in each step. Not part of its caller, so that constants stay in memory and sums in registers.
    ///
    /// # Safety
    /// The processor has AVX-512 VNNI; there are `steps` × 32 inputs of 32 keys and of all rows of a tile, as many offsets, room for as
    /// many scores of every row, and `ROWS` rows for each step where the cursor is, if that is above 0.
    #[inline(never)]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn product<const ROWS: usize>(&self, cursor: &Cursor) {
        let (mut keys, mut query, mut cursor) = (self.keys, self.query, *cursor);
        // SAFETY: the caller's promise: 32 offsets.
        let start =
            unsafe { [_mm512_loadu_si512(self.offsets.cast()), _mm512_loadu_si512(self.offsets.add(LANES).cast())] };
        let mut sums = [start; TILE_ROWS];
        for _ in 0..self.steps {
            for_each_group!(AT => {
                // SAFETY: the caller's promise: a step has eight groups of keys and of queries.
                let (low, high) = unsafe {
                    let keys = keys.add(AT * GROUP_BYTES);
                    (_mm512_loadu_si512(keys.cast()), _mm512_loadu_si512(keys.add(GROUP_BYTES / 2).cast()))
                };
                for (row, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: as above; a group has four codes of every row.
                    let codes = _mm512_set1_epi32(unsafe { four(query.add(AT * TILE_GROUP + row * GROUP)) });
                    sums[0] = _mm512_dpbusd_epi32(sums[0], codes, low);
                    sums[1] = _mm512_dpbusd_epi32(sums[1], codes, high);
                }
                for half in AT * 2 * ROWS / STEP..(AT + 1) * 2 * ROWS / STEP {
                    // SAFETY: the caller's promise.
                    unsafe { cursor.code(half / 2, half % 2) };
                }
            });
            keys = keys.wrapping_add(STEP * GROUP_BYTES);
            query = query.wrapping_add(STEP * TILE_GROUP);
            cursor.advance(ROWS);
        }
        if self.present != u32::MAX {
            // What is not there is never the largest.
            let present = [self.present as u16, (self.present >> LANES) as u16];
            for sums in &mut sums {
                for (sums, present) in sums.iter_mut().zip(present) {
                    *sums = _mm512_mask_mov_epi32(_mm512_set1_epi32(i32::MIN), present, *sums);
                }
            }
        }
        for_each_row!(ROW => {
            // SAFETY: 32 scores of each row.
            unsafe {
                let at = self.scores.add(ROW * TILE);
                _mm512_storeu_si512(at.cast(), sums[ROW][0]);
                _mm512_storeu_si512(at.add(LANES).cast(), sums[ROW][1]);
            }
        });
    }
}

/// Scores of a row tile in place of those of the one before, whose codes are computed.
///
/// # Safety
/// The processor has AVX-512 VNNI, `query` has [`TILE_ROWS`] × head_dim codes, head_dim a multiple of 32, and `keys` as many
/// keys as it says, of head_dim codes; the tile before has at most [`KEY_BLOCK`] keys.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn scores_of_tile(
    keys: &Keys<'_>,
    query: &[i8],
    before: Option<Before<'_>>,
    scores: &mut [i32; TILE_SCORES],
    codes: &mut [i8; TILE_SCORES],
) {
    let head_dim = query.len() / TILE_ROWS;
    let steps = head_dim / TILE;
    let (columns, columns_before) = (keys.valid.div_ceil(TILE), before.map_or(0, Before::columns));
    // Scores are read and written in the same loop, so all go by this.
    let scores = scores.as_mut_ptr();
    for column in 0..columns.max(columns_before) {
        let first = column * TILE;
        let scores = scores.wrapping_add(column * COLUMN_SCORES);
        let cursor = before.filter(|_| column < columns_before).map(|before| Cursor {
            coding: before.coding,
            largest: before.largest.0.as_ptr(),
            scores,
            codes: codes.as_mut_ptr().wrapping_add(first),
        });
        let meanwhile = column < columns && matches!(steps, 2 | 4);
        if let Some(cursor) = cursor.filter(|_| !meanwhile) {
            // SAFETY: scores and codes of this column.
            unsafe { code_column(&cursor) };
        }
        if column >= columns {
            continue;
        }
        let product = Column {
            keys: keys.codes[first * head_dim..].as_ptr(),
            query: query.as_ptr(),
            steps,
            offsets: keys.offsets[first..][..TILE].as_ptr(),
            present: keys.present(first),
            scores,
        };
        // SAFETY: the caller's promise; two or four steps times six or three rows are those of a tile.
        unsafe {
            match (cursor, steps) {
                (Some(cursor), 2) => product.product::<{ TILE_ROWS / 2 }>(&cursor),
                (Some(cursor), 4) => product.product::<{ TILE_ROWS / 4 }>(&cursor),
                _ => product.product::<0>(&Cursor::NOWHERE),
            }
        }
    }
}

/// The two registers of scores of a row in a tile column, joined to their larger ones.
///
/// # Safety
/// The processor has AVX-512 F; there are scores of that column and row.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn larger_scores(scores: *const i32, column: usize, row: usize) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe {
        let at = scores.add(column * COLUMN_SCORES + row * TILE);
        _mm512_max_epi32(_mm512_loadu_si512(at.cast()), _mm512_loadu_si512(at.add(LANES).cast()))
    }
}

/// The codes of a row tile that no other one follows.
///
/// # Safety
/// The processor has AVX-512 VNNI; the tile has at most [`KEY_BLOCK`] keys.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn codes_of_tile(before: Before<'_>, scores: &[i32; TILE_SCORES], codes: &mut [i8; TILE_SCORES]) {
    for column in 0..before.columns() {
        let cursor = Cursor {
            coding: before.coding,
            largest: before.largest.0.as_ptr(),
            scores: scores[column * COLUMN_SCORES..].as_ptr(),
            codes: codes.as_mut_ptr().wrapping_add(column * TILE),
        };
        // SAFETY: scores and codes of a column.
        unsafe { code_column(&cursor) };
    }
}

/// The codes of a tile column.
///
/// # Safety
/// The processor has AVX-512 VNNI; the scores and codes of all rows are there.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn code_column(cursor: &Cursor) {
    for row in 0..TILE_ROWS {
        // SAFETY: the caller's promise.
        unsafe {
            cursor.code(row, 0);
            cursor.code(row, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::math::exp2_code;

    #[test]
    fn codes_are_those_of_the_formula() {
        if !Isa::Avx512Vnni.is_available() {
            eprintln!("skipped: no AVX-512 VNNI");
            return;
        }
        let steps: Vec<i32> = (0..1 << 24).step_by(if cfg!(miri) { 99_991 } else { 61 }).chain(0..1024).collect();
        let (mut scores, mut codes) = ([0i32; TILE_SCORES], [0i8; TILE_SCORES]);
        // From all differences alike to only the largest counting, and past what a float holds.
        for sigma in [1e-30, 1.3e-4, 0.003, 0.11, 1.0, 7.7, 1e30, 3e38] {
            for differences in steps.chunks(TILE_SCORES) {
                let largest = |row: usize| 5 + row as i32;
                let place = |at: usize| (at / TILE % TILE_ROWS, at / COLUMN_SCORES * TILE + at % TILE);
                for (at, (score, difference)) in scores.iter_mut().zip(differences).enumerate() {
                    *score = largest(place(at).0) - difference;
                }
                let (coding, of_rows) = (Coding::new(sigma), OfRows(std::array::from_fn(largest)));
                // SAFETY: the processor has the instruction set.
                unsafe {
                    codes_of_tile(Before { coding: &coding, largest: &of_rows, valid: KEY_BLOCK }, &scores, &mut codes);
                }
                for (at, difference) in differences.iter().enumerate() {
                    let (row, key) = place(at);
                    let want = exp2_code(-difference as f32 * sigma);
                    assert_eq!(i32::from(codes[row * KEY_BLOCK + key]), want, "{difference} · {sigma:e}");
                }
            }
        }
    }
}
