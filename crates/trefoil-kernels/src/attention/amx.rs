//! The row block of INT8 attention on AMX: the numbers of the generic one, 32 rows at a time.
//!
//! Both products are quick here, so nearly all of the time goes to what lies between them: powers to codes, maxima, sums. These are AVX-512,
//! sixteen scores at once; between two pieces of a product with the values goes the update of the output by the one before. (Products of
//! scores between the codes of the rows before were tried and are slower: two tiles of scores don't fit the first-level cache.)

#![allow(clippy::wildcard_imports, reason = "the intrinsics of one instruction set")]

use super::KEY_BLOCK;
use super::avx512::scores::{Coding, OfRows};
use super::avx512::{Contribution, update_rows};
use super::int8::{Block, LANES, Scratch, lane_of};
use crate::kernel::amx::{PRODUCT_ROWS, Product, STEP_INPUTS, Tiles, pack_rows};
use std::arch::x86_64::*;
use trefoil_weights::tile::TILE;

/// Query rows that share a block of keys and values.
pub(super) const BLOCK_ROWS: usize = 128;
const _: () = assert!(BLOCK_ROWS.is_multiple_of(PRODUCT_ROWS) && PRODUCT_ROWS.is_multiple_of(LANES));

/// Fewer rows are quicker without the tile unit.
const LEAST_ROWS: usize = 13;

/// Scores of a product with a block of keys: a row after the other.
const SCORES: usize = PRODUCT_ROWS * KEY_BLOCK;
/// Sums of a product with values.
const SUMS: usize = PRODUCT_ROWS * TILE;

/// Integers that [`run`] wants: scores, and sums of two products.
pub(super) const INTEGERS: usize = SCORES + 2 * SUMS;
/// Codes that [`run`] wants for heads of so many columns: queries and codes.
pub(super) fn tile_codes(head_dim: usize) -> usize {
    BLOCK_ROWS * head_dim + SCORES
}

/// Whether [`run`] takes blocks of these.
pub(super) fn suits(block: &Block<'_>) -> bool {
    block.isa.isa() == crate::Isa::AmxInt8
        && block.query.rows() >= LEAST_ROWS
        && block.key_value.head_dim().is_multiple_of(STEP_INPUTS)
}

/// `O` and `l` of every row of the block.
pub(super) fn run(block: &Block<'_>, scratch: &mut Scratch<'_>) {
    let head_dim = block.key_value.head_dim();
    let rows = block.query.rows();
    assert!(suits(block) && rows <= BLOCK_ROWS, "{rows} rows, heads of {head_dim} columns");
    // SAFETY: `suits` asked for the instruction set.
    let tiles = unsafe { Tiles::configure() };
    let (queries, codes) = scratch.tiles.split_at_mut(BLOCK_ROWS * head_dim);
    let codes: &mut [i8; SCORES] = codes.as_mut_array().expect("the codes of a product");
    let (scores, sums) = scratch.scores.split_at_mut(SCORES);
    let scores: &mut [i32; SCORES] = scores.as_mut_array().expect("the scores of a product");
    let first_column = block.head * head_dim;
    for (row, packed) in (0..rows).step_by(PRODUCT_ROWS).zip(queries.chunks_exact_mut(PRODUCT_ROWS * head_dim)) {
        let codes = &block.query.starting_at(row)[first_column..];
        pack_rows(codes, block.query.stride(), (PRODUCT_ROWS.min(rows - row), head_dim), packed);
    }
    let mut running = [const { Running { maxima: [0; LANES], totals: [0.0; LANES] } }; BLOCK_ROWS / LANES];
    scratch.state[..rows * head_dim].fill(0.0);
    for key_block in 0..block.key_value.blocks() {
        let valid = block.key_value.valid(key_block);
        assert!((1..=KEY_BLOCK).contains(&valid), "{valid} keys of a block");
        let (keys, values) = block.key_value.head(key_block, block.head);
        let tiles_of_rows = queries.chunks_exact(PRODUCT_ROWS * head_dim).take(rows.div_ceil(PRODUCT_ROWS));
        for (tile, query) in tiles_of_rows.enumerate() {
            let count = PRODUCT_ROWS.min(rows - tile * PRODUCT_ROWS);
            let running = &mut running[tile * PRODUCT_ROWS / LANES..][..PRODUCT_ROWS / LANES];
            let state = &mut scratch.state[tile * PRODUCT_ROWS * head_dim..][..count * head_dim];
            // SAFETY: `suits` asked for the instruction set.
            unsafe {
                score(&tiles, query, keys, valid, scores);
                let contributions = code(scores, valid, (block.sigma, key_block == 0), running, codes);
                add(&tiles, codes, (values, valid), &contributions, (state, count), sums);
            }
        }
    }
    for row in 0..rows {
        scratch.totals[lane_of(row)] = running[row / LANES].totals[row % LANES];
    }
}

/// `m` and `l` of sixteen rows.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Running {
    maxima: [i32; LANES],
    totals: [f32; LANES],
}

/// Scores of 32 rows with the keys of a block.
///
/// # Safety
/// The processor has AMX.
unsafe fn score(tiles: &Tiles, query: &[i8], keys: &[i8], valid: usize, scores: &mut [i32; SCORES]) {
    let head_dim = query.len() / PRODUCT_ROWS;
    for (column, keys) in keys.chunks_exact(head_dim * TILE).take(valid.div_ceil(TILE)).enumerate() {
        let to = scores[column * TILE..][..(PRODUCT_ROWS - 1) * KEY_BLOCK + TILE].as_mut_ptr();
        // SAFETY: operands of head_dim inputs; 32 scores of each row.
        unsafe {
            let mut product = Product::new(tiles, query.as_ptr(), keys.as_ptr());
            product.steps(head_dim / STEP_INPUTS);
            product.store(to, KEY_BLOCK);
        }
    }
}

/// Codes of 32 rows of `valid` scores as [`Product`] reads them, 0 where there is none; what the block contributes to each row.
///
/// # Safety
/// The processor has AVX-512 VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn code(
    scores: &[i32; SCORES],
    valid: usize,
    (sigma, is_first): (f32, bool),
    running: &mut [Running],
    codes: &mut [i8; SCORES],
) -> [Contribution; PRODUCT_ROWS / LANES] {
    let mut largest = [OfRows([0; LANES]); PRODUCT_ROWS / LANES];
    let mut sums = [OfRows([0; LANES]); PRODUCT_ROWS / LANES];
    let (whole, rest) = (valid / LANES, valid % LANES);
    let present = ((1u32 << rest) - 1) as __mmask16;
    let coding = Coding::new(sigma);
    for row in 0..PRODUCT_ROWS {
        let scores = scores[row * KEY_BLOCK..][..KEY_BLOCK].as_ptr();
        let at = |vector: usize| scores.wrapping_add(vector * LANES);
        let mut maxima = [_mm512_set1_epi32(i32::MIN); 2];
        for vector in 0..whole {
            // SAFETY: sixteen scores.
            let scores = unsafe { _mm512_loadu_si512(at(vector).cast()) };
            maxima[vector % 2] = _mm512_max_epi32(maxima[vector % 2], scores);
        }
        if rest > 0 {
            // SAFETY: the row is as long as a whole block.
            let scores = unsafe { _mm512_loadu_si512(at(whole).cast()) };
            maxima[0] = _mm512_mask_max_epi32(maxima[0], present, maxima[0], scores);
        }
        let maximum = _mm512_reduce_max_epi32(_mm512_max_epi32(maxima[0], maxima[1]));
        let mut sum = _mm512_setzero_si512();
        // A line of codes is 64 keys of a row; the rows of a step lie together.
        let lines = codes[row * STEP_INPUTS..].as_mut_ptr();
        let mut store = |vector: usize, of_vector: __m512i| {
            sum = _mm512_add_epi32(sum, of_vector);
            let place = vector * LANES / STEP_INPUTS * PRODUCT_ROWS * STEP_INPUTS + vector * LANES % STEP_INPUTS;
            // SAFETY: sixteen codes of the row.
            unsafe { _mm_storeu_si128(lines.wrapping_add(place).cast(), _mm512_cvtepi32_epi8(of_vector)) };
        };
        for vector in 0..whole {
            // SAFETY: sixteen scores.
            let scores = unsafe { _mm512_loadu_si512(at(vector).cast()) };
            store(vector, coding.codes(scores, maximum));
        }
        let mut stored = whole;
        if rest > 0 {
            // SAFETY: the row is as long as a whole block.
            let scores = unsafe { _mm512_loadu_si512(at(whole).cast()) };
            store(whole, _mm512_maskz_mov_epi32(present, coding.codes(scores, maximum)));
            stored += 1;
        }
        for vector in stored..valid.next_multiple_of(STEP_INPUTS) / LANES {
            store(vector, _mm512_setzero_si512());
        }
        largest[row / LANES].0[row % LANES] = maximum;
        sums[row / LANES].0[row % LANES] = _mm512_reduce_add_epi32(sum);
    }
    std::array::from_fn(|half| {
        let Running { maxima, totals } = &mut running[half];
        // SAFETY: sixteen numbers each.
        unsafe {
            let of_block = _mm512_loadu_si512(largest[half].0.as_ptr().cast());
            let sums = _mm512_loadu_si512(sums[half].0.as_ptr().cast());
            update_rows((of_block, sums), sigma, is_first, maxima, totals)
        }
    })
}

/// `O = O·α + A·β` with `A` the product of the codes with the values.
///
/// # Safety
/// The processor has AMX and AVX-512.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
unsafe fn add(
    tiles: &Tiles,
    codes: &[i8; SCORES],
    (values, valid): (&[i8], usize),
    contributions: &[Contribution; PRODUCT_ROWS / LANES],
    (state, count): (&mut [f32], usize),
    sums: &mut [i32],
) {
    let padded = valid.next_multiple_of(TILE);
    let steps = valid.div_ceil(STEP_INPUTS);
    let head_dim = state.len() / count;
    let (even, odd) = sums.split_at_mut(SUMS);
    let (mut now, mut before) = (even, odd);
    let columns = head_dim / TILE;
    for column in 0..=columns {
        // SAFETY: the codes of so many steps, and the values of as many: where the keys are not whole steps there are other values or unused
        // ones after them, which meet codes of 0; 32 sums of 32 rows.
        let mut product = (column < columns).then(|| unsafe {
            let at = column * padded * TILE;
            assert!(values.len() >= at + steps * STEP_INPUTS * TILE && now.len() >= SUMS, "values of a product");
            Product::new(tiles, codes.as_ptr(), values[at..].as_ptr())
        });
        for row in 0..PRODUCT_ROWS {
            if let Some(product) = &mut product {
                // SAFETY: no more than all steps.
                unsafe { product.steps(steps * (row + 1) / PRODUCT_ROWS - steps * row / PRODUCT_ROWS) };
            }
            if column > 0 && row < count {
                let contribution = &contributions[row / LANES];
                let (old, new) = (contribution.old[row % LANES], contribution.new[row % LANES]);
                let (old, new) = (_mm512_set1_ps(old), _mm512_set1_ps(new));
                let state = state[row * head_dim + (column - 1) * TILE..][..TILE].as_mut_ptr();
                for half in [0, LANES] {
                    // SAFETY: 32 numbers of the state and sums of a row.
                    unsafe {
                        let sums = _mm512_loadu_si512(before[row * TILE + half..][..LANES].as_ptr().cast());
                        let state = state.wrapping_add(half);
                        let kept = _mm512_mul_ps(_mm512_loadu_ps(state), old);
                        _mm512_storeu_ps(state, _mm512_add_ps(kept, _mm512_mul_ps(_mm512_cvtepi32_ps(sums), new)));
                    }
                }
            }
        }
        if let Some(product) = product {
            // SAFETY: as above.
            unsafe { product.store(now.as_mut_ptr(), TILE) };
        }
        std::mem::swap(&mut now, &mut before);
    }
}
