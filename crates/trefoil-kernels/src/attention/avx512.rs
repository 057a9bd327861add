//! The row block of INT8 attention on AVX-512 VNNI: the numbers of the generic one, with less between the products.
//!
//! - `vpdpbusd` multiplies unsigned by signed bytes. Probabilities are codes 0..=127, so the second product needs no
//!   correction; the queries are made unsigned (`q + 128`) once per block of rows, and `Σ q·k = Σ (q + 128)·k − 128·Σ k`
//!   starts from the sums of the keys.
//! - The queries of a row tile lie in the order in which they are broadcast.
//! - The largest score of a row is taken while the scores are in registers.
//! - What is one number per row (maximum, α, β, total) is computed for the rows of a tile at once, a row to a lane.
//! - `O·α + A·β` is computed while `A` is in registers.

#![allow(clippy::wildcard_imports, reason = "the intrinsics of one instruction set")]

use super::KEY_BLOCK;
use super::int8::{Block, LANES, Scratch, TILE_SCORES};
use crate::kernel::{TILE_ROWS, four};
use crate::math::{EXP2_FRACTION, MAX_CODE, ROUNDER, exp2};
use std::arch::x86_64::*;
use trefoil_weights::tile::{GROUP, GROUP_BYTES, TILE};

/// Keys whose codes fill a register.
const CHUNK: usize = 64;
/// Groups of a step of a product's loop: a reduction is a multiple of 32 long.
const STEP: usize = TILE / GROUP;
/// Bytes of four codes of every row of a tile.
const TILE_GROUP: usize = TILE_ROWS * GROUP;

/// The largest score of every row of a tile in a block of keys, in every lane.
type Largest = [__m512i; TILE_ROWS];

/// What a block of keys contributes to the rows of a tile: a number per row.
#[repr(C, align(64))]
struct Contribution {
    /// α.
    old: [f32; LANES],
    /// β.
    new: [f32; LANES],
}

/// `O` and `l` of every row of the block. Rows that fill up the last tile are computed and not used.
pub(super) fn run(block: &Block<'_>, scratch: &mut Scratch<'_>) {
    let head_dim = block.key_value.head_dim();
    let tiles = block.query.rows().div_ceil(TILE_ROWS);
    assert!(head_dim.is_multiple_of(TILE), "a head of {head_dim} columns");
    let tile_size = TILE_ROWS * head_dim;
    let Scratch { query, scores, codes, maxima, totals, state, .. } = scratch;
    pack_queries(block, &mut query[..tiles * tile_size]);
    state[..tiles * tile_size].fill(0.0);
    totals[..tiles * LANES].fill(0.0);
    let scores: &mut [i32; TILE_SCORES] = scores.as_mut_array().expect("the scores of a row tile");
    let codes: &mut [i8; TILE_SCORES] = codes.as_mut_array().expect("the codes of a row tile");
    for key_block in 0..block.key_value.blocks() {
        let valid = block.key_value.valid(key_block);
        let padded = valid.next_multiple_of(TILE);
        assert!((1..=KEY_BLOCK).contains(&valid), "{valid} keys of a block");
        let (keys, values) = block.key_value.head(key_block, block.head);
        let (keys, values) = (&keys[..padded * head_dim], &values[..padded * head_dim]);
        let offsets = &block.key_value.offsets(key_block, block.head)[..padded];
        let keys = Keys { codes: keys, offsets, valid, sigma: block.sigma };
        for tile in 0..tiles {
            let query = &query[tile * tile_size..][..tile_size];
            let state = &mut state[tile * tile_size..][..tile_size];
            let numbers = tile * LANES..(tile + 1) * LANES;
            let (maxima, totals) = (&mut maxima[numbers.clone()], &mut totals[numbers]);
            // SAFETY: `block.isa` vouches for the instruction set: `int8` calls this for AVX-512 VNNI only. The slices were cut to the
            // lengths that the functions ask for.
            unsafe {
                let largest = scores_of_tile(&keys, query, scores);
                code_tile(&keys, &largest, scores, codes);
                let contribution = update_rows(&keys, &largest, key_block == 0, codes, maxima, totals);
                add_values(codes, values, padded, &contribution, state);
            }
        }
    }
}

/// Four codes of a row after the other rows' same four.
fn pack_queries(block: &Block<'_>, packed: &mut [i8]) {
    let head_dim = block.key_value.head_dim();
    let first = block.head * head_dim;
    for (tile, packed) in packed.chunks_exact_mut(TILE_ROWS * head_dim).enumerate() {
        for row in tile * TILE_ROWS..block.query.rows().min((tile + 1) * TILE_ROWS) {
            let (fours, _) = block.query.row(row)[first..first + head_dim].as_chunks::<GROUP>();
            let at = row % TILE_ROWS * GROUP;
            for (group, four) in packed.as_chunks_mut::<TILE_GROUP>().0.iter_mut().zip(fours) {
                group[at..at + GROUP].copy_from_slice(&four.map(|code| code ^ i8::MIN));
            }
        }
    }
}

/// A block of keys of a head.
struct Keys<'a> {
    /// head_dim × keys in tile order; the keys a multiple of 32.
    codes: &'a [i8],
    /// `−128·Σ k` per key.
    offsets: &'a [i32],
    /// Keys that are there, above 0; the others are padding.
    valid: usize,
    sigma: f32,
}

impl Keys<'_> {
    /// A bit for each of 32 keys from `first` on that is there.
    fn present(&self, first: usize) -> u32 {
        if self.valid - first >= TILE { u32::MAX } else { (1 << (self.valid - first)) - 1 }
    }
}

/// Scores of a row tile, and the largest of each row.
///
/// # Safety
/// The processor has AVX-512 VNNI, `query` has [`TILE_ROWS`] × head_dim codes, head_dim a multiple of 32, and `keys` as many
/// keys as it says, of head_dim codes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn scores_of_tile(keys: &Keys<'_>, query: &[i8], scores: &mut [i32; TILE_SCORES]) -> Largest {
    let head_dim = query.len() / TILE_ROWS;
    let mut largest = [_mm512_set1_epi32(i32::MIN); TILE_ROWS];
    for first in (0..keys.valid).step_by(TILE) {
        let present = keys.present(first);
        let mut column = keys.codes[first * head_dim..].as_ptr();
        let mut query = query.as_ptr();
        let offsets = keys.offsets[first..][..TILE].as_ptr();
        // SAFETY: 32 offsets.
        let start = unsafe { [_mm512_loadu_si512(offsets.cast()), _mm512_loadu_si512(offsets.add(LANES).cast())] };
        let mut sums = [start; TILE_ROWS];
        for _ in 0..head_dim / TILE {
            for _ in 0..STEP {
                // SAFETY: the caller's promise: head_dim/4 groups of keys and of queries.
                let (low, high) = unsafe {
                    (_mm512_loadu_si512(column.cast()), _mm512_loadu_si512(column.add(GROUP_BYTES / 2).cast()))
                };
                for (row, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: as above; a group has four codes of every row.
                    let codes = _mm512_set1_epi32(unsafe { four(query.add(row * GROUP)) });
                    sums[0] = _mm512_dpbusd_epi32(sums[0], codes, low);
                    sums[1] = _mm512_dpbusd_epi32(sums[1], codes, high);
                }
                column = column.wrapping_add(GROUP_BYTES);
                query = query.wrapping_add(TILE_GROUP);
            }
        }
        let (low, high) = (present as u16, (present >> LANES) as u16);
        for (row, (sums, largest)) in sums.into_iter().zip(&mut largest).enumerate() {
            *largest = _mm512_mask_max_epi32(*largest, low, *largest, sums[0]);
            *largest = _mm512_mask_max_epi32(*largest, high, *largest, sums[1]);
            let at = scores[row * KEY_BLOCK + first..][..TILE].as_mut_ptr();
            // SAFETY: `at` has 32 elements.
            unsafe {
                _mm512_storeu_si512(at.cast(), sums[0]);
                _mm512_storeu_si512(at.add(LANES).cast(), sums[1]);
            }
        }
    }
    largest.map(|lanes| everywhere::<MAXIMUM>(lanes))
}

/// The codes of all scores of a tile.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn code_tile(keys: &Keys<'_>, largest: &Largest, scores: &[i32; TILE_SCORES], codes: &mut [i8; TILE_SCORES]) {
    for first in (0..keys.valid).step_by(TILE) {
        for (row, &largest) in largest.iter().enumerate() {
            code_keys((row, first), largest, keys.sigma, keys.present(first), scores, codes);
        }
    }
}

/// The codes of 32 scores of a row from key `first` on; 0 where there is no key.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn code_keys(
    (row, first): (usize, usize),
    largest: __m512i,
    sigma: f32,
    present: u32,
    scores: &[i32; TILE_SCORES],
    codes: &mut [i8; TILE_SCORES],
) {
    let at = row * KEY_BLOCK + first;
    let (scores, codes) = (scores[at..][..TILE].as_ptr(), codes[at..][..TILE].as_mut_ptr());
    for half in 0..TILE / LANES {
        // SAFETY: there are 32.
        let scores = unsafe { _mm512_loadu_si512(scores.add(half * LANES).cast()) };
        let difference = _mm512_cvtepi32_ps(_mm512_sub_epi32(scores, largest));
        let values = exp2_codes(_mm512_mul_ps(difference, _mm512_set1_ps(sigma)));
        let bytes = _mm512_maskz_cvtepi32_epi8((present >> (half * LANES)) as u16, values);
        // SAFETY: there are 32.
        unsafe { _mm_storeu_si128(codes.add(half * LANES).cast(), bytes) };
    }
}

/// [`crate::math::exp2_code`] of every lane, in 32 bits: the same additions and products, rounded by the conversion.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn exp2_codes(x: __m512) -> __m512i {
    // NaN gives the second operand, as the comparison there does.
    let x = _mm512_max_ps(x, _mm512_set1_ps(-32.0));
    let shifted = _mm512_add_ps(x, _mm512_set1_ps(ROUNDER));
    let f = _mm512_sub_ps(x, _mm512_sub_ps(shifted, _mm512_set1_ps(ROUNDER)));
    let [highest, rest @ ..] = EXP2_FRACTION;
    let mut p = _mm512_set1_ps(highest);
    for coefficient in rest {
        p = _mm512_add_ps(_mm512_mul_ps(p, f), _mm512_set1_ps(coefficient));
    }
    let exponent = _mm512_slli_epi32::<23>(_mm512_castps_si512(shifted));
    let scaled = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), exponent));
    let scaled = _mm512_mul_ps(scaled, _mm512_set1_ps(MAX_CODE));
    _mm512_cvt_roundps_epi32::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(scaled)
}

/// Sums of the codes, what the block of keys contributes to each row; updates running maxima and totals.
///
/// # Safety
/// The processor has AVX-512 VNNI; `maxima` and `totals` have [`LANES`] numbers.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn update_rows(
    keys: &Keys<'_>,
    largest: &Largest,
    is_first: bool,
    codes: &[i8; TILE_SCORES],
    maxima: &mut [i32],
    totals: &mut [f32],
) -> Contribution {
    let mut of_block = _mm512_setzero_si512();
    let mut sums = _mm512_setzero_si512();
    for (row, (&largest, codes)) in largest.iter().zip(codes.as_chunks::<KEY_BLOCK>().0).enumerate() {
        of_block = _mm512_mask_mov_epi32(of_block, 1 << row, largest);
        let mut sum = _mm512_setzero_si512();
        for (chunk, codes) in codes.as_chunks::<CHUNK>().0.iter().enumerate() {
            let left = keys.valid.saturating_sub(chunk * CHUNK);
            let present = if left >= CHUNK { u64::MAX } else { (1 << left) - 1 };
            // SAFETY: a chunk of codes.
            let codes = unsafe { _mm512_maskz_loadu_epi8(present, codes.as_ptr()) };
            sum = _mm512_dpbusd_epi32(sum, codes, _mm512_set1_epi8(1));
        }
        sums = _mm512_mask_mov_epi32(sums, 1 << row, everywhere::<SUM>(sum));
    }
    // SAFETY: both have a number per lane.
    let (before, total) = unsafe { (_mm512_loadu_si512(maxima.as_ptr().cast()), _mm512_loadu_ps(totals.as_ptr())) };
    let after = if is_first { of_block } else { _mm512_max_epi32(before, of_block) };
    let mut contribution = Contribution { old: [0.0; LANES], new: [0.0; LANES] };
    if !is_first {
        powers(_mm512_sub_epi32(before, after), keys.sigma, &mut contribution.old);
    }
    powers(_mm512_sub_epi32(of_block, after), keys.sigma, &mut contribution.new);
    // SAFETY: each has a number per lane.
    unsafe {
        let (old, new) = (_mm512_loadu_ps(contribution.old.as_ptr()), _mm512_loadu_ps(contribution.new.as_ptr()));
        let total = _mm512_add_ps(_mm512_mul_ps(total, old), _mm512_mul_ps(_mm512_cvtepi32_ps(sums), new));
        _mm512_storeu_si512(maxima.as_mut_ptr().cast(), after);
        _mm512_storeu_ps(totals.as_mut_ptr(), total);
    }
    contribution
}

/// `2^(difference·σ)`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn powers(difference: __m512i, sigma: f32, out: &mut [f32; LANES]) {
    // SAFETY: sixteen numbers.
    unsafe { _mm512_storeu_ps(out.as_mut_ptr(), _mm512_mul_ps(_mm512_cvtepi32_ps(difference), _mm512_set1_ps(sigma))) };
    for x in out {
        *x = exp2(*x);
    }
}

/// [`everywhere`] for the largest lane.
const MAXIMUM: bool = true;
/// [`everywhere`] for the sum.
const SUM: bool = false;

/// The largest or the sum of all lanes, in every lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn everywhere<const IS_MAXIMUM: bool>(lanes: __m512i) -> __m512i {
    let join = |a, b| if IS_MAXIMUM { _mm512_max_epi32(a, b) } else { _mm512_add_epi32(a, b) };
    let lanes = join(lanes, _mm512_shuffle_i64x2::<0b01_00_11_10>(lanes, lanes));
    let lanes = join(lanes, _mm512_shuffle_i64x2::<0b10_11_00_01>(lanes, lanes));
    let lanes = join(lanes, _mm512_shuffle_epi32::<0b01_00_11_10>(lanes));
    join(lanes, _mm512_shuffle_epi32::<0b10_11_00_01>(lanes))
}

/// `O = O·α + A·β` with `A` the product of the codes and `padded` values.
///
/// # Safety
/// The processor has AVX-512 VNNI, `state` has [`TILE_ROWS`] × head_dim numbers, head_dim a multiple of 32, and `values`
/// `padded` × head_dim codes, `padded` a multiple of 32 up to [`KEY_BLOCK`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn add_values(
    codes: &[i8; TILE_SCORES],
    values: &[i8],
    padded: usize,
    contribution: &Contribution,
    state: &mut [f32],
) {
    let head_dim = state.len() / TILE_ROWS;
    for first in (0..head_dim).step_by(TILE) {
        let mut values = values[first * padded..].as_ptr();
        let mut codes = codes.as_ptr();
        let mut sums = [[_mm512_setzero_si512(); 2]; TILE_ROWS];
        for _ in 0..padded / TILE {
            for _ in 0..STEP {
                // SAFETY: the caller's promise: padded/4 groups of values and of codes.
                let (low, high) = unsafe {
                    (_mm512_loadu_si512(values.cast()), _mm512_loadu_si512(values.add(GROUP_BYTES / 2).cast()))
                };
                for (row, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: as above, for row `row`.
                    let codes = _mm512_set1_epi32(unsafe { four(codes.add(row * KEY_BLOCK)) });
                    sums[0] = _mm512_dpbusd_epi32(sums[0], codes, low);
                    sums[1] = _mm512_dpbusd_epi32(sums[1], codes, high);
                }
                values = values.wrapping_add(GROUP_BYTES);
                codes = codes.wrapping_add(GROUP);
            }
        }
        for (row, sums) in sums.into_iter().enumerate() {
            let old = _mm512_set1_ps(contribution.old[row]);
            let new = _mm512_set1_ps(contribution.new[row]);
            for (half, sums) in sums.into_iter().enumerate() {
                let at = state[row * head_dim + first + half * LANES..][..LANES].as_mut_ptr();
                // SAFETY: `at` has sixteen numbers.
                unsafe {
                    let kept = _mm512_mul_ps(_mm512_loadu_ps(at), old);
                    let added = _mm512_mul_ps(_mm512_cvtepi32_ps(sums), new);
                    _mm512_storeu_ps(at, _mm512_add_ps(kept, added));
                }
            }
        }
    }
}
