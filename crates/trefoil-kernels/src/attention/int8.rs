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

use super::{AttentionSink, KEY_BLOCK, PackedKeyValue, check_keys, multiply_row};
use crate::isa::Supported;
use crate::kernel::{DotTile, TILE_ROWS, row_sums};
use crate::math::{exp2, exp2_code, recip};
use crate::multiversion::multiversion;
use crate::rows::check_scale;
use crate::workspace::at_least;
use crate::{KernelError, Kernels, Rows, Workspace};
use trefoil_weights::tile::TILE;

/// Query rows that share a block of keys and values while it is in the second-level cache.
const BLOCK_ROWS: usize = 120;

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
                let integers = at_least(&mut part.slot.integers, TILE_ROWS * KEY_BLOCK + 2 * BLOCK_ROWS);
                let (scores, integers) = integers.split_at_mut(TILE_ROWS * KEY_BLOCK);
                let (query_sums, maxima) = integers.split_at_mut(BLOCK_ROWS);
                let floats = at_least(&mut part.slot.floats, BLOCK_ROWS * (head_dim + 1));
                let (state, totals) = floats.split_at_mut(BLOCK_ROWS * head_dim);
                let codes = at_least(&mut part.slot.codes, TILE_ROWS * KEY_BLOCK);
                for head in 0..heads {
                    let sigma = (scales.query[head] * scales.key[head]) * per_root;
                    for first in (0..part.rows).step_by(BLOCK_ROWS) {
                        let rows = BLOCK_ROWS.min(part.rows - first);
                        let mut block = Block {
                            isa: self.supported(),
                            query: query.part(part.first + first, rows),
                            key_value,
                            head,
                            sigma,
                            scores,
                            codes,
                            query_sums,
                            maxima,
                            totals,
                            state,
                        };
                        block.run();
                        for row in 0..rows {
                            let values = &mut state[row * head_dim..][..head_dim];
                            let factor = recip(totals[row]) * scales.value[head];
                            multiply_row(self.supported(), values, factor);
                            part.sink.store(self.supported(), first + row, head * head_dim, values);
                        }
                    }
                }
            },
        );
        Ok(())
    }
}

/// A block of query rows of one head.
struct Block<'a, 's> {
    isa: Supported,
    query: Rows<'a, i8>,
    key_value: &'a PackedKeyValue,
    head: usize,
    sigma: f32,
    /// Row tile × [`KEY_BLOCK`].
    scores: &'s mut [i32],
    /// Row tile × [`KEY_BLOCK`].
    codes: &'s mut [i8],
    /// One per row of the block, as are the following.
    query_sums: &'s mut [i32],
    maxima: &'s mut [i32],
    totals: &'s mut [f32],
    /// `O`.
    state: &'s mut [f32],
}

impl Block<'_, '_> {
    fn run(&mut self) {
        let head_dim = self.key_value.head_dim();
        let rows = self.query.rows();
        let column = self.head * head_dim;
        if self.isa.needs_row_sums() {
            let codes = &self.query.starting_at(0)[column..];
            row_sums(self.isa, codes, self.query.stride(), head_dim, &mut self.query_sums[..rows]);
        }
        self.state[..rows * head_dim].fill(0.0);
        self.totals[..rows].fill(0.0);
        for key_block in 0..self.key_value.blocks() {
            let (keys, values) = self.key_value.head(key_block, self.head);
            let valid = self.key_value.valid(key_block);
            let padded = valid.next_multiple_of(TILE);
            for first in (0..rows).step_by(TILE_ROWS) {
                let count = TILE_ROWS.min(rows - first);
                for (tile_column, weights) in keys.chunks_exact(head_dim * TILE).take(padded / TILE).enumerate() {
                    let tile = DotTile {
                        a: &self.query.starting_at(first)[column..],
                        lda: self.query.stride(),
                        rows: count,
                        weights,
                        k: head_dim,
                        row_sums: &self.query_sums[first..],
                    };
                    self.isa.dot_tile(tile, &mut self.scores[tile_column * TILE..], KEY_BLOCK);
                }
                let mut weights = TileWeights::default();
                code_probabilities(
                    self.isa,
                    self.scores,
                    (count, valid, padded),
                    self.sigma,
                    key_block == 0,
                    &mut self.maxima[first..first + count],
                    &mut self.totals[first..first + count],
                    self.codes,
                    &mut weights,
                );
                for (tile_column, tiled) in values.chunks_exact(padded * TILE).take(head_dim / TILE).enumerate() {
                    let tile = DotTile {
                        a: self.codes,
                        lda: KEY_BLOCK,
                        rows: count,
                        weights: tiled,
                        k: padded,
                        row_sums: &weights.sums,
                    };
                    let mut sums = [0i32; TILE_ROWS * TILE];
                    self.isa.dot_tile(tile, &mut sums, TILE);
                    let state = &mut self.state[first * head_dim..(first + count) * head_dim];
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
