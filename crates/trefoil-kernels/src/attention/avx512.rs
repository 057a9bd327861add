//! The row block of INT8 attention on AVX-512 VNNI: the numbers of the generic one, with less between the products.
//!
//! - `vpdpbusd` multiplies unsigned by signed bytes. Probabilities are codes 0..=127, so the second product needs no
//!   correction; the queries are made unsigned (`q + 128`) once per block of rows, and `Σ q·k = Σ (q + 128)·k − 128·Σ k`
//!   starts from the sums of the keys.
//! - The queries of a row tile lie in the order in which they are broadcast.
//! - The largest scores of a row tile are found between the products of the one before with its values.
//! - The codes of a row tile are computed between the products of the scores of the next one, see [`scores`].
//! - What is one number per row (maximum, α, β, total) is computed for the rows of a tile at once, a row to a lane.
//! - `O·α + A·β` is computed while `A` is in registers.

#![allow(clippy::wildcard_imports, reason = "the intrinsics of one instruction set")]

use self::scores::{Before, Coding, Keys, OfRows, codes_of_tile, larger_scores, scores_of_tile};
use super::KEY_BLOCK;
use super::int8::{Block, LANES, Scratch, TILE_SCORES};
use crate::kernel::{STEP, TILE_ROWS, four};
use crate::math::exp2;
use std::arch::x86_64::*;
use trefoil_weights::tile::{GROUP, GROUP_BYTES, TILE};

/// Keys whose codes fill a register.
const CHUNK: usize = 64;
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

pub(super) mod scores;

/// What a block of keys contributes to the rows of a tile: a number per row.
#[repr(C, align(64))]
pub(super) struct Contribution {
    /// α.
    pub(super) old: [f32; LANES],
    /// β.
    pub(super) new: [f32; LANES],
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
    let scores: &mut [i32; TILE_SCORES] = scores[..TILE_SCORES].as_mut_array().expect("the scores of a row tile");
    let codes: &mut [i8; TILE_SCORES] = codes.as_mut_array().expect("the codes of a row tile");
    let coding = Coding::new(block.sigma);
    let mut before: Option<Scored<'_>> = None;
    for key_block in 0..block.key_value.blocks() {
        let valid = block.key_value.valid(key_block);
        let padded = valid.next_multiple_of(TILE);
        assert!((1..=KEY_BLOCK).contains(&valid), "{valid} keys of a block");
        let (keys, values) = block.key_value.head(key_block, block.head);
        let (keys, values) = (&keys[..padded * head_dim], &values[..padded * head_dim]);
        let keys = Keys { codes: keys, offsets: &block.key_value.offsets(key_block, block.head)[..padded], valid };
        for tile in 0..tiles {
            let query = &query[tile * tile_size..][..tile_size];
            let columns = padded / TILE;
            // SAFETY: `block.isa` vouches for the instruction set: `int8` calls this for AVX-512 VNNI only. The slices were cut to the
            // lengths that the functions ask for, and those of `before` to its block of keys.
            let largest = unsafe {
                scores_of_tile(&keys, query, before.as_ref().map(Scored::before), scores, codes);
                match &before {
                    Some(before) => before.add(codes, Some((&*scores, columns)), maxima, totals, state),
                    None => largest_scores(scores, columns),
                }
            };
            before = Some(Scored { tile, values, valid, is_first: key_block == 0, coding: &coding, largest });
        }
    }
    if let Some(last) = before {
        // SAFETY: as above.
        unsafe {
            codes_of_tile(last.before(), scores, codes);
            last.add(codes, None, maxima, totals, state);
        }
    }
}

/// A row tile with the scores of a block of keys, and what is left to do then.
struct Scored<'a> {
    tile: usize,
    /// The block's, a multiple of 32 keys.
    values: &'a [i8],
    /// Keys that are there.
    valid: usize,
    /// Whether it is the first block.
    is_first: bool,
    coding: &'a Coding,
    /// The largest score of each row.
    largest: OfRows<i32>,
}

impl Scored<'_> {
    fn before(&self) -> Before<'_> {
        Before { coding: self.coding, largest: &self.largest, valid: self.valid }
    }

    /// Adds the block to `O` and `l` of the tile, whose codes are there now; the largest scores of the next tile, of which there are as many
    /// columns as it says.
    ///
    /// # Safety
    /// The processor has AVX-512 VNNI; maxima, totals and state are those of all tiles, for heads of a multiple of 32 columns, and the values
    /// those of the block of keys.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    unsafe fn add(
        &self,
        codes: &[i8; TILE_SCORES],
        next: Option<(&[i32; TILE_SCORES], usize)>,
        maxima: &mut [i32],
        totals: &mut [f32],
        state: &mut [f32],
    ) -> OfRows<i32> {
        let padded = self.valid.next_multiple_of(TILE);
        let size = self.values.len() / padded * TILE_ROWS;
        let numbers = self.tile * LANES..(self.tile + 1) * LANES;
        let sums = sum_codes(codes, self.valid);
        let state = &mut state[self.tile * size..][..size];
        // SAFETY: the caller's promise.
        unsafe {
            let of_block = _mm512_loadu_si512(self.largest.0.as_ptr().cast());
            let (maxima, totals) = (&mut maxima[numbers.clone()], &mut totals[numbers]);
            let contribution = update_rows((of_block, sums), self.coding.sigma, self.is_first, maxima, totals);
            match next {
                Some((scores, columns)) if size >= TOGETHER * TILE * TILE_ROWS && columns * TILE <= padded => {
                    add_values::<true>(codes, self.values, padded, &contribution, state, (scores, columns))
                }
                _ => {
                    let nothing = (&[0; TILE_SCORES], 0);
                    add_values::<false>(codes, self.values, padded, &contribution, state, nothing);
                    next.map_or(OfRows([0; LANES]), |(scores, columns)| largest_scores(scores, columns))
                }
            }
        }
    }
}

/// The largest score of each row in the first `columns` tile columns.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn largest_scores(scores: &[i32; TILE_SCORES], columns: usize) -> OfRows<i32> {
    assert!(columns * TILE <= KEY_BLOCK, "{columns} columns of scores");
    let mut largest = [_mm512_set1_epi32(i32::MIN); TILE_ROWS];
    for (row, largest) in largest.iter_mut().enumerate() {
        for column in 0..columns {
            // SAFETY: a column of a tile.
            *largest = _mm512_max_epi32(*largest, unsafe { larger_scores(scores.as_ptr(), column, row) });
        }
    }
    of_rows(&largest)
}

/// The largest lane of each row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn of_rows(largest: &[__m512i; TILE_ROWS]) -> OfRows<i32> {
    let mut numbers = OfRows([0; LANES]);
    // SAFETY: a number per lane.
    unsafe { _mm512_storeu_si512(numbers.0.as_mut_ptr().cast(), fold_rows::<MAXIMUM>(largest)) };
    numbers
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

/// The sum of the first `valid` codes of each row, a row to a lane.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn sum_codes(codes: &[i8; TILE_SCORES], valid: usize) -> __m512i {
    let (chunks, _) = codes.as_chunks::<CHUNK>();
    let mut sums = [_mm512_setzero_si512(); TILE_ROWS];
    for chunk in 0..valid.div_ceil(CHUNK) {
        let left = valid - chunk * CHUNK;
        let present = if left >= CHUNK { u64::MAX } else { (1 << left) - 1 };
        for_each_row!(ROW => {
            let codes = chunks[ROW * (KEY_BLOCK / CHUNK) + chunk].as_ptr();
            // SAFETY: a chunk of codes.
            let codes = unsafe { _mm512_maskz_loadu_epi8(present, codes) };
            sums[ROW] = _mm512_dpbusd_epi32(sums[ROW], codes, _mm512_set1_epi8(1));
        });
    }
    fold_rows::<SUM>(&sums)
}

/// What the block of keys contributes to each row, given its largest scores and sums of codes; updates running maxima and totals.
///
/// # Safety
/// The processor has AVX-512 VNNI; `maxima` and `totals` have [`LANES`] numbers.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
pub(super) unsafe fn update_rows(
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

/// Columns of values with which the largest scores of all rows are found, and the rows of each.
const TOGETHER: usize = 3;
const TOGETHER_ROWS: usize = TILE_ROWS / TOGETHER;

/// `O = O·α + A·β` with `A` the product of the codes and `padded` values. With `NEXT`, meanwhile, the largest scores of each row of the next
/// tile: they cost nothing beside a product, and what is known one column of values before the end is not waited for.
///
/// # Safety
/// The processor has AVX-512 VNNI, `state` has [`TILE_ROWS`] × head_dim numbers, head_dim a multiple of 32, and `values`
/// `padded` × head_dim codes, `padded` a multiple of 32 up to [`KEY_BLOCK`]. With `NEXT` a head is at least [`TOGETHER`] × 32 wide, and there
/// is at least one column of scores and no more of them than of keys.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn add_values<const NEXT: bool>(
    codes: &[i8; TILE_SCORES],
    values: &[i8],
    padded: usize,
    contribution: &Contribution,
    state: &mut [f32],
    (scores, columns): (&[i32; TILE_SCORES], usize),
) -> OfRows<i32> {
    let head_dim = state.len() / TILE_ROWS;
    let mut largest = [_mm512_set1_epi32(i32::MIN); TILE_ROWS];
    let mut numbers = OfRows([0; LANES]);
    for (column, first) in (0..head_dim).step_by(TILE).enumerate() {
        let mut values = values[first * padded..].as_ptr();
        let mut codes = codes.as_ptr();
        let mut sums = [[_mm512_setzero_si512(); 2]; TILE_ROWS];
        // After all rows, and after all columns of scores, the last ones again: that changes nothing and asks nothing.
        let first_row = column.min(TOGETHER - 1) * TOGETHER_ROWS;
        let mut largest_here = [_mm512_set1_epi32(i32::MIN); TOGETHER_ROWS];
        for step in 0..padded / TILE {
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
            if NEXT {
                for (row, largest) in largest_here.iter_mut().enumerate() {
                    // SAFETY: one of the columns that are there.
                    let scores = unsafe { larger_scores(scores.as_ptr(), step.min(columns - 1), first_row + row) };
                    *largest = _mm512_max_epi32(*largest, scores);
                }
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
        if NEXT {
            largest[first_row..first_row + TOGETHER_ROWS].copy_from_slice(&largest_here);
            if column == TOGETHER - 1 {
                numbers = of_rows(&largest);
            }
        }
    }
    numbers
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;

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
