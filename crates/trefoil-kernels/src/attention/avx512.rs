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
use crate::math::{EXP2_FRACTION, MAX_CODE, exp2};
use std::arch::x86_64::*;
use trefoil_weights::tile::{GROUP, GROUP_BYTES, TILE};

/// Keys whose codes fill a register.
const CHUNK: usize = 64;
/// Groups of a step of a product's loop: a reduction is a multiple of 32 long.
const STEP: usize = TILE / GROUP;
/// Bytes of four codes of every row of a tile.
const TILE_GROUP: usize = TILE_ROWS * GROUP;

/// `$body` for every row of a tile, written out: sums stay in registers only where nothing indexes them at run time.
macro_rules! for_each_row {
    ($row:ident => $body:block) => {
        for_each_row!($row => $body, 0 1 2 3 4 5 6 7 8 9 10 11)
    };
    ($row:ident => $body:block, $($number:literal)*) => {{
        const { assert!([$($number),*].len() == TILE_ROWS) };
        $({
            const $row: usize = $number;
            $body
        })*
    }};
}

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
                let sums = code_tile(&keys, largest, scores, codes);
                let contribution = update_rows((largest, sums), block.sigma, key_block == 0, maxima, totals);
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

/// Scores of a row tile, and the largest of each row, a row to a lane.
///
/// # Safety
/// The processor has AVX-512 VNNI, `query` has [`TILE_ROWS`] × head_dim codes, head_dim a multiple of 32, and `keys` as many
/// keys as it says, of head_dim codes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn scores_of_tile(keys: &Keys<'_>, query: &[i8], scores: &mut [i32; TILE_SCORES]) -> __m512i {
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
        let scores = scores[first..][..TILE_SCORES - KEY_BLOCK + TILE].as_mut_ptr();
        if present == u32::MAX {
            for_each_row!(ROW => {
                let [low, high] = sums[ROW];
                largest[ROW] = _mm512_max_epi32(largest[ROW], _mm512_max_epi32(low, high));
                // SAFETY: 32 scores of each row.
                unsafe { store_row(scores.add(ROW * KEY_BLOCK), sums[ROW]) };
            });
        } else {
            let (low, high) = (present as u16, (present >> LANES) as u16);
            for_each_row!(ROW => {
                largest[ROW] = _mm512_mask_max_epi32(largest[ROW], low, largest[ROW], sums[ROW][0]);
                largest[ROW] = _mm512_mask_max_epi32(largest[ROW], high, largest[ROW], sums[ROW][1]);
                // SAFETY: as above.
                unsafe { store_row(scores.add(ROW * KEY_BLOCK), sums[ROW]) };
            });
        }
    }
    fold_rows::<MAXIMUM>(&largest)
}

/// The codes of all scores of a tile, 0 where there is no key; their sum for each row, a row to a lane.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn code_tile(keys: &Keys<'_>, largest: __m512i, scores: &[i32; TILE_SCORES], codes: &mut [i8; TILE_SCORES]) -> __m512i {
    let mut of_rows = [0i32; LANES];
    // SAFETY: a number per lane.
    unsafe { _mm512_storeu_si512(of_rows.as_mut_ptr().cast(), largest) };
    let mut sums = [_mm512_setzero_si512(); TILE_ROWS];
    let (scores, _) = scores.as_chunks::<CHUNK>();
    let (codes, _) = codes.as_chunks_mut::<CHUNK>();
    for (row, (sum, &largest)) in sums.iter_mut().zip(&of_rows).enumerate() {
        let largest = _mm512_set1_epi32(largest);
        let mut of_row = _mm512_setzero_si512();
        for chunk in 0..keys.valid.div_ceil(CHUNK) {
            let left = keys.valid - chunk * CHUNK;
            let at = row * (KEY_BLOCK / CHUNK) + chunk;
            let bytes = code_chunk(&scores[at], largest, keys.sigma);
            let bytes = if left >= CHUNK { bytes } else { _mm512_maskz_mov_epi8((1 << left) - 1, bytes) };
            of_row = _mm512_dpbusd_epi32(of_row, bytes, _mm512_set1_epi8(1));
            // SAFETY: a chunk of codes.
            unsafe { _mm512_storeu_si512(codes[at].as_mut_ptr().cast(), bytes) };
        }
        *sum = of_row;
    }
    fold_rows::<SUM>(&sums)
}

/// Registers of 32-bit numbers whose codes fill one.
const VECTORS: usize = CHUNK / LANES;

/// [`crate::math::exp2_code`] of 64 scores of a row: the same additions and products, with two shorter ways.
///
/// - `f = x − round(x)` is one instruction.
/// - `2ⁿ` is multiplied by an instruction that takes any n, so nothing needs a bound. It comes after the factor 127, which changes no
///   bit of a number that is not tiny, and tiny ones have code 0.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn code_chunk(scores: &[i32; CHUNK], largest: __m512i, sigma: f32) -> __m512i {
    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    let mut x = [_mm512_setzero_ps(); VECTORS];
    for (at, x) in x.iter_mut().enumerate() {
        // SAFETY: a chunk of scores.
        let scores = unsafe { _mm512_loadu_si512(scores.as_ptr().add(at * LANES).cast()) };
        *x = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(scores, largest)), _mm512_set1_ps(sigma));
    }
    let mut f = x;
    for f in &mut f {
        *f = _mm512_reduce_ps::<NEAREST>(*f);
    }
    let [highest, rest @ ..] = EXP2_FRACTION;
    let mut p = [_mm512_set1_ps(highest); VECTORS];
    for coefficient in rest {
        for (p, &f) in p.iter_mut().zip(&f) {
            *p = _mm512_add_ps(_mm512_mul_ps(*p, f), _mm512_set1_ps(coefficient));
        }
    }
    let mut values = [_mm512_setzero_si512(); VECTORS];
    for (value, ((&p, &x), &f)) in values.iter_mut().zip(p.iter().zip(&x).zip(&f)) {
        let scaled = _mm512_scalef_ps(_mm512_mul_ps(p, _mm512_set1_ps(MAX_CODE)), _mm512_sub_ps(x, f));
        *value = _mm512_cvt_roundps_epi32::<NEAREST>(scaled);
    }
    let [zeroth, second, third, fourth] = values;
    // Four keys of each register side by side, then in order. What is no number saturates to 0.
    let mixed = _mm512_packus_epi16(_mm512_packs_epi32(zeroth, second), _mm512_packs_epi32(third, fourth));
    _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), mixed)
}

/// 32 scores.
///
/// # Safety
/// There is room for them from `at` on.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store_row(at: *mut i32, [low, high]: [__m512i; 2]) {
    // SAFETY: the caller's promise.
    unsafe {
        _mm512_storeu_si512(at.cast(), low);
        _mm512_storeu_si512(at.add(LANES).cast(), high);
    }
}

/// What the block of keys contributes to each row, given its largest scores and sums of codes; updates running maxima and totals.
///
/// # Safety
/// The processor has AVX-512 VNNI; `maxima` and `totals` have [`LANES`] numbers.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn update_rows(
    (of_block, sums): (__m512i, __m512i),
    sigma: f32,
    is_first: bool,
    maxima: &mut [i32],
    totals: &mut [f32],
) -> Contribution {
    // SAFETY: both have a number per lane.
    let (before, total) = unsafe { (_mm512_loadu_si512(maxima.as_ptr().cast()), _mm512_loadu_ps(totals.as_ptr())) };
    let after = if is_first { of_block } else { _mm512_max_epi32(before, of_block) };
    let mut contribution = Contribution { old: [0.0; LANES], new: [0.0; LANES] };
    if !is_first {
        powers(_mm512_sub_epi32(before, after), sigma, &mut contribution.old);
    }
    powers(_mm512_sub_epi32(of_block, after), sigma, &mut contribution.new);
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

/// [`fold_rows`] for the largest lane.
const MAXIMUM: bool = true;
/// [`fold_rows`] for the sum.
const SUM: bool = false;

/// The largest or the sum of the lanes of each row, a row to a lane; the last lanes mean nothing. Rows are joined on the way, so that no
/// step works on lanes that are done.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn fold_rows<const IS_MAXIMUM: bool>(rows: &[__m512i; TILE_ROWS]) -> __m512i {
    const FOUR: usize = 4;
    const { assert!(TILE_ROWS == 3 * FOUR) };
    let join = |a, b| if IS_MAXIMUM { _mm512_max_epi32(a, b) } else { _mm512_add_epi32(a, b) };
    let halves = |a, b| join(_mm512_shuffle_i64x2::<0b01_00_01_00>(a, b), _mm512_shuffle_i64x2::<0b11_10_11_10>(a, b));
    let mut quarters = [_mm512_setzero_si512(); FOUR];
    for (at, quarter) in quarters.iter_mut().enumerate() {
        // Rows at, at + 4, at + 8: a 128-bit lane each.
        let (low, high) = (halves(rows[at], rows[at + FOUR]), halves(rows[at + 2 * FOUR], rows[at + 2 * FOUR]));
        let even = _mm512_shuffle_i64x2::<0b10_00_10_00>(low, high);
        *quarter = join(even, _mm512_shuffle_i64x2::<0b11_01_11_01>(low, high));
    }
    let pairs = |a, b| {
        let joined = join(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
        _mm512_castsi512_ps(joined)
    };
    let (low, high) = (pairs(quarters[0], quarters[1]), pairs(quarters[2], quarters[3]));
    let even = _mm512_castps_si512(_mm512_shuffle_ps::<0b10_00_10_00>(low, high));
    join(even, _mm512_castps_si512(_mm512_shuffle_ps::<0b11_01_11_01>(low, high)))
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
        let state = state[first..][..(TILE_ROWS - 1) * head_dim + TILE].as_mut_ptr();
        for_each_row!(ROW => {
            let (old, new) = (_mm512_set1_ps(contribution.old[ROW]), _mm512_set1_ps(contribution.new[ROW]));
            let [low, high] = sums[ROW];
            let at = state.wrapping_add(ROW * head_dim);
            // SAFETY: 32 numbers of each row.
            unsafe {
                let kept = _mm512_mul_ps(_mm512_loadu_ps(at), old);
                _mm512_storeu_ps(at, _mm512_add_ps(kept, _mm512_mul_ps(_mm512_cvtepi32_ps(low), new)));
                let at = at.add(LANES);
                let kept = _mm512_mul_ps(_mm512_loadu_ps(at), old);
                _mm512_storeu_ps(at, _mm512_add_ps(kept, _mm512_mul_ps(_mm512_cvtepi32_ps(high), new)));
            }
        });
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
        // From all differences alike to only the largest counting, and past what a float holds.
        for sigma in [1e-30, 1.3e-4, 0.003, 0.11, 1.0, 7.7, 1e30, 3e38] {
            for differences in steps.chunks(CHUNK) {
                let (mut scores, mut got) = ([0i32; CHUNK], [0i8; CHUNK]);
                for (score, difference) in scores.iter_mut().zip(differences) {
                    *score = 5 - difference;
                }
                // SAFETY: the processor has the instruction set; room for 64 codes.
                unsafe {
                    let codes = code_chunk(&scores, _mm512_set1_epi32(5), sigma);
                    _mm512_storeu_si512(got.as_mut_ptr().cast(), codes);
                }
                for (score, got) in scores.into_iter().zip(got) {
                    assert_eq!(i32::from(got), exp2_code((score - 5) as f32 * sigma), "{} · {sigma:e}", score - 5);
                }
            }
        }
    }

    #[test]
    fn rows_are_folded_to_lanes() {
        if !Isa::Avx512Vnni.is_available() {
            eprintln!("skipped: no AVX-512 VNNI");
            return;
        }
        let rows: [[i32; LANES]; TILE_ROWS] =
            std::array::from_fn(|row| std::array::from_fn(|lane| ((row * LANES + lane) * 7919 % 1009) as i32 - 500));
        let (mut largest, mut sums) = ([0i32; LANES], [0i32; LANES]);
        // SAFETY: the processor has the instruction set; sixteen numbers each.
        unsafe {
            let registers = rows.map(|row| _mm512_loadu_si512(row.as_ptr().cast()));
            _mm512_storeu_si512(largest.as_mut_ptr().cast(), fold_rows::<MAXIMUM>(&registers));
            _mm512_storeu_si512(sums.as_mut_ptr().cast(), fold_rows::<SUM>(&registers));
        }
        for (row, values) in rows.into_iter().enumerate() {
            assert_eq!(
                (Some(largest[row]), sums[row]),
                (values.into_iter().max(), values.into_iter().sum()),
                "row {row}"
            );
        }
    }
}
