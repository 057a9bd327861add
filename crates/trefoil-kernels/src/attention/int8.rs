//! INT8 attention.
//!
//! Per head, with keys in blocks of [`KEY_BLOCK`] in ascending order and `σ = (s_q·s_k)·(log₂e/√D)`:
//!
//! ```text
//! S   = q·Kᵀ                     exact integers
//! m_b = max S                    over the keys of block b
//! c   = round(127·2^((S − m_b)·σ))   codes 0..=127, half to even
//! l_b = Σ c,  A_b = Σ c·v        exact integers
//! m'  = max(m, m_b), α = 2^((m − m')·σ), β = 2^((m_b − m')·σ)
//! O   = O·α + A_b·β,  l = l·α + l_b·β,  m = m'
//! y   = O·(recip(l)·s_v)
//! ```
//!
//! Probabilities are coded against their own block's maximum, so a block far below the largest score keeps its
//! resolution, and are normalised by the sum of the codes, so they add up to one whatever was rounded.

use super::{AttentionSink, KEY_BLOCK, PackedKeyValue, check_keys};
use crate::isa::Supported;
use crate::kernel::{DotTile, TILE_ROWS, row_sums};
use crate::math::{exp2, exp2_code, recip};
use crate::multiversion::multiversion;
use crate::rows::check_scale;
use crate::workspace::{Slot, lines};
use crate::{KernelError, Kernels, Rows, Workspace};
use trefoil_weights::tile::TILE;

/// Scores or codes of a row tile against a block of keys.
pub(super) const TILE_SCORES: usize = TILE_ROWS * KEY_BLOCK;

/// Query rows that share a block of keys and values while it is in the second-level cache.
const BLOCK_ROWS: usize = 120;

/// The same for an instruction set, at most [`MOST_ROWS`].
fn block_rows(isa: Supported) -> usize {
    #[cfg(target_arch = "x86_64")]
    if isa.isa() == crate::Isa::AmxInt8 {
        return super::amx::BLOCK_ROWS;
    }
    let _ = isa;
    BLOCK_ROWS
}

/// Most rows of a block.
const MOST_ROWS: usize = 132;

/// Numbers kept for a row tile: one per row, and a whole register of them.
pub(super) const LANES: usize = 16;
const _: () = assert!(TILE_ROWS <= LANES && BLOCK_ROWS <= MOST_ROWS && MOST_ROWS.is_multiple_of(TILE_ROWS));

/// Scales of INT8 attention, one per head.
#[derive(Debug, Clone, Copy)]
pub struct AttentionScales<'a> {
    /// Of the queries.
    pub query: &'a [f32],
    /// Of the keys.
    pub key: &'a [f32],
    /// Of the values.
    pub value: &'a [f32],
}

/// One positive scale per head and operand.
pub(crate) fn check_scales(
    operator: &'static str,
    scales: AttentionScales<'_>,
    heads: usize,
) -> Result<(), KernelError> {
    for (what, of_heads) in
        [("the query scales", scales.query), ("the key scales", scales.key), ("the value scales", scales.value)]
    {
        if of_heads.len() != heads {
            return Err(KernelError::shapes(
                operator,
                (what, format!("{} values", of_heads.len())),
                ("the heads", heads.to_string()),
                "there must be one scale per head",
            ));
        }
        of_heads.iter().try_for_each(|&scale| check_scale(operator, what, scale))?;
    }
    Ok(())
}

impl Kernels {
    /// Softmax attention of INT8 queries (`M × d`, heads side by side) over packed keys and values, scores scaled by
    /// `1/√head_dim`. Self- and cross-attention alike.
    ///
    /// # Errors
    /// Shapes that do not fit each other, scales that are not positive numbers.
    pub fn attention_w8a8(
        &self,
        query: Rows<'_, i8>,
        key_value: &PackedKeyValue,
        scales: AttentionScales<'_>,
        mut sink: AttentionSink<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), KernelError> {
        let operator = "attention_w8a8";
        let (heads, head_dim) = (key_value.heads(), key_value.head_dim());
        check_keys(operator, key_value.keys())?;
        if query.columns() != heads * head_dim {
            return Err(KernelError::shapes(
                operator,
                ("the query", query.shape()),
                ("the keys", format!("{}×{}", key_value.keys(), heads * head_dim)),
                "they must have the same number of columns",
            ));
        }
        check_scales(operator, scales, heads)?;
        sink.check(operator, query.rows(), query.columns())?;
        let per_root = (f64::from(crate::math::LOG2_E) / (head_dim as f64).sqrt()) as f32;
        self.run_parts(
            query.rows(),
            workspace,
            |count| sink.take_rows(count),
            |part| {
                let mut scratch = Scratch::of(part.slot, self.supported(), head_dim);
                for head in 0..heads {
                    let sigma = (scales.query[head] * scales.key[head]) * per_root;
                    for first in (0..part.rows).step_by(block_rows(self.supported())) {
                        let rows = block_rows(self.supported()).min(part.rows - first);
                        let query = query.part(part.first + first, rows);
                        let block = Block { isa: self.supported(), query, key_value, head, sigma };
                        block.run(&mut scratch);
                        for row in 0..rows {
                            let values = &mut scratch.state[row * head_dim..][..head_dim];
                            let factor = recip(scratch.totals[lane_of(row)]) * scales.value[head];
                            part.sink.store(self.supported(), first + row, head * head_dim, values, factor);
                        }
                    }
                }
            },
        );
        Ok(())
    }
}

/// Where a row's number lies among those of a block: a row tile has [`LANES`].
pub(super) fn lane_of(row: usize) -> usize {
    row / TILE_ROWS * LANES + row % TILE_ROWS
}

/// A block of query rows of one head.
pub(super) struct Block<'a> {
    pub(super) isa: Supported,
    pub(super) query: Rows<'a, i8>,
    pub(super) key_value: &'a PackedKeyValue,
    pub(super) head: usize,
    pub(super) sigma: f32,
}

/// One thread's scratch for a block of rows. Numbers of rows lie at [`lane_of`] them.
pub(super) struct Scratch<'s> {
    /// Of a row tile, × [`KEY_BLOCK`]; more where an instruction set wants it.
    pub(super) scores: &'s mut [i32],
    /// Of a row tile, × [`KEY_BLOCK`].
    pub(super) codes: &'s mut [i8],
    /// Repacked queries where an instruction set wants them, rows × head_dim.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "no instruction set here repacks"))]
    pub(super) query: &'s mut [i8],
    /// Repacked queries and codes for tiles of the tile unit.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code, reason = "as above"))]
    pub(super) tiles: &'s mut [i8],
    /// Sums of the queries where an instruction set wants them.
    query_sums: &'s mut [i32],
    /// `m`.
    pub(super) maxima: &'s mut [i32],
    /// `l`.
    pub(super) totals: &'s mut [f32],
    /// `O`, rows × head_dim.
    pub(super) state: &'s mut [f32],
}

impl<'s> Scratch<'s> {
    fn of(slot: &'s mut Slot, isa: Supported, head_dim: usize) -> Scratch<'s> {
        const ROW_NUMBERS: usize = MOST_ROWS / TILE_ROWS * LANES;
        #[cfg(target_arch = "x86_64")]
        let (scores, tiles) = match isa.isa() {
            crate::Isa::AmxInt8 => (super::amx::INTEGERS, super::amx::tile_codes(head_dim)),
            _ => (TILE_SCORES, 0),
        };
        #[cfg(not(target_arch = "x86_64"))]
        let (scores, tiles, _) = (TILE_SCORES, 0, isa);
        let integers = lines(&mut slot.integers, scores + 2 * ROW_NUMBERS);
        let (scores, integers) = integers.split_at_mut(scores);
        let (maxima, query_sums) = integers.split_at_mut(ROW_NUMBERS);
        let floats = lines(&mut slot.floats, MOST_ROWS * head_dim + ROW_NUMBERS);
        let (state, totals) = floats.split_at_mut(MOST_ROWS * head_dim);
        let (tiles, codes) = lines(&mut slot.codes, tiles + TILE_SCORES + MOST_ROWS * head_dim).split_at_mut(tiles);
        let (codes, query) = codes.split_at_mut(TILE_SCORES);
        Scratch { scores, codes, query, tiles, query_sums, maxima, totals, state }
    }
}

impl Block<'_> {
    /// `O` and `l` of every row.
    fn run(&self, scratch: &mut Scratch<'_>) {
        #[cfg(target_arch = "x86_64")]
        {
            if super::amx::suits(self) {
                return super::amx::run(self, scratch);
            }
            if self.isa.has_avx512_vnni() {
                return super::avx512::run(self, scratch);
            }
        }
        self.run_generic(scratch);
    }

    fn run_generic(&self, scratch: &mut Scratch<'_>) {
        let head_dim = self.key_value.head_dim();
        let rows = self.query.rows();
        let column = self.head * head_dim;
        if self.isa.needs_row_sums() {
            for (tile, sums) in scratch.query_sums.chunks_mut(LANES).take(rows.div_ceil(TILE_ROWS)).enumerate() {
                let count = TILE_ROWS.min(rows - tile * TILE_ROWS);
                let codes = &self.query.starting_at(tile * TILE_ROWS)[column..];
                row_sums(self.isa, codes, self.query.stride(), head_dim, &mut sums[..count]);
            }
        }
        scratch.state[..rows * head_dim].fill(0.0);
        scratch.totals.fill(0.0);
        for key_block in 0..self.key_value.blocks() {
            let (keys, values) = self.key_value.head(key_block, self.head);
            let valid = self.key_value.valid(key_block);
            let padded = valid.next_multiple_of(TILE);
            for first in (0..rows).step_by(TILE_ROWS) {
                let count = TILE_ROWS.min(rows - first);
                let numbers = lane_of(first)..lane_of(first) + count;
                for (tile_column, weights) in keys.chunks_exact(head_dim * TILE).take(padded / TILE).enumerate() {
                    let tile = DotTile {
                        a: &self.query.starting_at(first)[column..],
                        lda: self.query.stride(),
                        rows: count,
                        weights,
                        k: head_dim,
                        row_sums: &scratch.query_sums[numbers.clone()],
                    };
                    self.isa.dot_tile(tile, &mut scratch.scores[tile_column * TILE..], KEY_BLOCK);
                }
                let mut weights = TileWeights::default();
                code_probabilities(
                    self.isa,
                    scratch.scores,
                    (count, valid, padded),
                    self.sigma,
                    key_block == 0,
                    &mut scratch.maxima[numbers.clone()],
                    &mut scratch.totals[numbers],
                    scratch.codes,
                    &mut weights,
                );
                for (tile_column, tiled) in values.chunks_exact(padded * TILE).take(head_dim / TILE).enumerate() {
                    let tile = DotTile {
                        a: scratch.codes,
                        lda: KEY_BLOCK,
                        rows: count,
                        weights: tiled,
                        k: padded,
                        row_sums: &weights.sums,
                    };
                    let mut sums = [0i32; TILE_ROWS * TILE];
                    self.isa.dot_tile(tile, &mut sums, TILE);
                    let state = &mut scratch.state[first * head_dim..(first + count) * head_dim];
                    accumulate(self.isa, state, head_dim, tile_column * TILE, &sums, &weights);
                }
            }
        }
    }
}

/// What a block of keys contributes to each row of a tile.
#[derive(Debug, Default)]
struct TileWeights {
    /// `l_b`.
    sums: [i32; TILE_ROWS],
    /// α.
    old: [f32; TILE_ROWS],
    /// β.
    new: [f32; TILE_ROWS],
}

multiversion! {
    /// The codes of a row tile of scores, their sums, the block's weights; updates running maxima and totals.
    fn code_probabilities(
        scores: &[i32], sizes: (usize, usize, usize), sigma: f32, is_first: bool,
        maxima: &mut [i32], totals: &mut [f32], codes: &mut [i8], weights: &mut TileWeights,
    ) {
        let (rows, valid, padded) = sizes;
        for row in 0..rows {
            let scores = &scores[row * KEY_BLOCK..][..valid];
            let largest = scores.iter().copied().fold(i32::MIN, i32::max);
            let codes = &mut codes[row * KEY_BLOCK..][..padded];
            let mut sum = 0i32;
            for (out, &score) in codes.iter_mut().zip(scores) {
                // The difference is below 2²⁴ (heads are at most 512 wide), so it converts exactly.
                let code = exp2_code((score - largest) as f32 * sigma);
                *out = code as i8;
                sum += code;
            }
            codes[valid..].fill(0);
            let maximum = if is_first { largest } else { maxima[row].max(largest) };
            let old = if is_first { 0.0 } else { exp2((maxima[row] - maximum) as f32 * sigma) };
            let new = exp2((largest - maximum) as f32 * sigma);
            maxima[row] = maximum;
            totals[row] = totals[row] * old + sum as f32 * new;
            weights.sums[row] = sum;
            weights.old[row] = old;
            weights.new[row] = new;
        }
    }
}

multiversion! {
    /// `O = O·α + A·β` for the 32 columns from `column` on.
    fn accumulate(state: &mut [f32], head_dim: usize, column: usize, sums: &[i32], weights: &TileWeights) {
        for (row, state) in state.chunks_exact_mut(head_dim).enumerate() {
            let (old, new) = (weights.old[row], weights.new[row]);
            for (state, &sum) in state[column..column + TILE].iter_mut().zip(&sums[row * TILE..][..TILE]) {
                *state = *state * old + sum as f32 * new;
            }
        }
    }
}
