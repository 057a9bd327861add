//! Float attention: online softmax over blocks of [`KEY_BLOCK`] keys, both products through the f32 micro-kernel.

use super::{AttentionSink, KEY_BLOCK, check_heads, check_keys};
use crate::isa::Supported;
use crate::kernel::{FmaTile, TILE_ROWS, even_step};
use crate::math::{LANES, exp, fold_lanes, recip, round_f16};
use crate::multiversion::multiversion;
use crate::rows::Operands;
use crate::transpose::transpose;
use crate::workspace::at_least;
use crate::{KernelError, Kernels, Rows, Workspace};
use trefoil_weights::tile::TILE;

/// Most query rows that share the panels of a block of keys.
const BLOCK_ROWS: usize = 396;

impl Kernels {
    /// Softmax attention in f32: `query` is `M × d`, `key` and `value` `N × d`, heads side by side, scores scaled by
    /// `1/√head_dim`. With [`Operands::F16`] the probabilities are rounded to FP16; the caller passes the rest rounded.
    ///
    /// # Errors
    /// Shapes that do not fit each other, heads that are no multiple of 32 wide.
    #[allow(clippy::too_many_arguments, reason = "three operands, their split, a precision, a destination and scratch")]
    pub fn attention_f32(
        &self,
        query: Rows<'_, f32>,
        key: Rows<'_, f32>,
        value: Rows<'_, f32>,
        heads: usize,
        operands: Operands,
        mut sink: AttentionSink<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), KernelError> {
        let operator = "attention_f32";
        let head_dim = check_heads(operator, query.columns(), heads)?;
        check_keys(operator, key.rows())?;
        if query.columns() != key.columns() {
            return Err(KernelError::shapes(
                operator,
                ("the query", query.shape()),
                ("the keys", key.shape()),
                "they must have the same number of columns",
            ));
        }
        if (key.rows(), key.columns()) != (value.rows(), value.columns()) {
            return Err(KernelError::shapes(
                operator,
                ("the keys", key.shape()),
                ("the values", value.shape()),
                "they must have the same shape",
            ));
        }
        sink.check(operator, query.rows(), query.columns())?;
        let score_scale = (1.0 / (head_dim as f64).sqrt()) as f32;
        self.run_parts(
            query.rows(),
            workspace,
            |count| sink.take_rows(count),
            |part| {
                let step = even_step(part.rows, BLOCK_ROWS);
                let panel = KEY_BLOCK * head_dim;
                let sizes = [panel, panel, TILE_ROWS * KEY_BLOCK, step * head_dim, step, step];
                let mut floats = at_least(&mut part.slot.floats, sizes.iter().sum());
                let [keys, values, scores, state, maxima, totals] = sizes.map(|size| {
                    let (head, tail) = std::mem::take(&mut floats).split_at_mut(size);
                    floats = tail;
                    head
                });
                for head in 0..heads {
                    let column = head * head_dim;
                    for first in (0..part.rows).step_by(step) {
                        let rows = step.min(part.rows - first);
                        let query = query.part(part.first + first, rows);
                        state[..rows * head_dim].fill(0.0);
                        totals[..rows].fill(0.0);
                        maxima[..rows].fill(f32::NEG_INFINITY);
                        for start in (0..key.rows()).step_by(KEY_BLOCK) {
                            let valid = KEY_BLOCK.min(key.rows() - start);
                            transpose_keys(key.part(start, valid), column, head_dim, keys);
                            gather_values(value.part(start, valid), column, head_dim, values);
                            for tile in (0..rows).step_by(TILE_ROWS) {
                                let mut block = Tile {
                                    isa: self.supported(),
                                    rows: TILE_ROWS.min(rows - tile),
                                    head_dim,
                                    score_scale,
                                    operands,
                                    scores,
                                    maxima: &mut maxima[tile..],
                                    totals: &mut totals[tile..],
                                    state: &mut state[tile * head_dim..],
                                };
                                let queries = (&query.starting_at(tile)[column..], query.stride());
                                block.add(queries, keys, values, valid);
                            }
                        }
                        for row in 0..rows {
                            let values = &mut state[row * head_dim..][..head_dim];
                            part.sink.store(self.supported(), first + row, column, values, recip(totals[row]));
                        }
                    }
                }
            },
        );
        Ok(())
    }
}

/// A row tile of one head and its running softmax.
struct Tile<'s> {
    isa: Supported,
    rows: usize,
    head_dim: usize,
    score_scale: f32,
    operands: Operands,
    scores: &'s mut [f32],
    maxima: &'s mut [f32],
    totals: &'s mut [f32],
    state: &'s mut [f32],
}

impl Tile<'_> {
    /// Adds a block of `valid` keys. Queries are (from their first element on, row stride), keys and values panels.
    fn add(&mut self, queries: (&[f32], usize), keys: &[f32], values: &[f32], valid: usize) {
        let head_dim = self.head_dim;
        for (tile_column, panel) in keys.chunks_exact(head_dim * TILE).take(valid.div_ceil(TILE)).enumerate() {
            let tile = FmaTile {
                a: queries.0,
                lda: queries.1,
                rows: self.rows,
                b: panel,
                ldb: TILE,
                k: head_dim,
                accumulate: false,
            };
            self.isa.fma_tile(tile, &mut self.scores[tile_column * TILE..], KEY_BLOCK);
        }
        let mut old = [0f32; TILE_ROWS];
        soften(
            self.isa,
            self.scores,
            (self.rows, valid),
            self.score_scale,
            self.operands,
            self.maxima,
            self.totals,
            &mut old,
        );
        for (tile_column, panel) in values.chunks_exact(KEY_BLOCK * TILE).enumerate() {
            let tile = FmaTile {
                a: self.scores,
                lda: KEY_BLOCK,
                rows: self.rows,
                b: panel,
                ldb: TILE,
                k: valid,
                accumulate: false,
            };
            let mut sums = [0f32; TILE_ROWS * TILE];
            self.isa.fma_tile(tile, &mut sums, TILE);
            accumulate(self.isa, &mut self.state[..self.rows * head_dim], head_dim, tile_column * TILE, &sums, &old);
        }
    }
}

/// `panels[key/32][dim][key mod 32]`; lanes past the last key are zero.
fn transpose_keys(keys: Rows<'_, f32>, column: usize, head_dim: usize, panels: &mut [f32]) {
    for (tile, panel) in panels.chunks_exact_mut(head_dim * TILE).take(keys.rows().div_ceil(TILE)).enumerate() {
        transpose(keys, tile * TILE, column, panel);
    }
}

/// `panels[dim/32][key][dim mod 32]`: values of a head lie a row of all heads apart, a page each, and every row tile of queries
/// reads them again.
fn gather_values(values: Rows<'_, f32>, column: usize, head_dim: usize, panels: &mut [f32]) {
    for (tile, panel) in panels.chunks_exact_mut(KEY_BLOCK * TILE).take(head_dim / TILE).enumerate() {
        let first = column + tile * TILE;
        for (key, out) in panel.as_chunks_mut::<TILE>().0.iter_mut().take(values.rows()).enumerate() {
            out.copy_from_slice(&values.row(key)[first..first + TILE]);
        }
    }
}

multiversion! {
    /// Scores become `exp(s − m')`; updates maxima and totals; `old` is the factor of what was summed so far.
    fn soften(
        scores: &mut [f32], sizes: (usize, usize), score_scale: f32, operands: Operands,
        maxima: &mut [f32], totals: &mut [f32], old: &mut [f32; TILE_ROWS],
    ) {
        let (rows, valid) = sizes;
        for row in 0..rows {
            let scores = &mut scores[row * KEY_BLOCK..][..valid];
            // The scale is positive, and rounding keeps order: the largest score scaled is the largest scaled score.
            let largest = maximum_of(scores) * score_scale;
            let maximum = if largest > maxima[row] { largest } else { maxima[row] };
            // Two loops: asked inside one, the compiler rounds always and then chooses.
            let sum = match operands {
                Operands::F32 => exponentials(scores, score_scale, maximum, |probability| probability),
                Operands::F16 => exponentials(scores, score_scale, maximum, round_f16),
            };
            old[row] = exp(maxima[row] - maximum);
            totals[row] = totals[row] * old[row] + sum;
            maxima[row] = maximum;
        }
    }
}

/// The largest value; minus infinity if there is none. In lanes of whole chunks, so that they stay in a register.
#[inline(always)]
#[allow(clippy::inline_always, reason = "compiled inside each version")]
fn maximum_of(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane = if value > *lane { value } else { *lane };
        }
    }
    for (lane, &value) in lanes.iter_mut().zip(rest) {
        *lane = if value > *lane { value } else { *lane };
    }
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            let other = lanes[lane + width];
            lanes[lane] = if other > lanes[lane] { other } else { lanes[lane] };
        }
        width /= 2;
    }
    lanes[0]
}

/// Scores become `round(exp(s·scale − maximum))`; their sum in the order of [`crate::math::lane_sum`].
#[inline(always)]
#[allow(clippy::inline_always, reason = "compiled inside each version")]
fn exponentials(scores: &mut [f32], scale: f32, maximum: f32, round: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let (chunks, rest) = scores.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for (lane, score) in lanes.iter_mut().zip(chunk) {
            *score = round(exp(*score * scale - maximum));
            *lane += *score;
        }
    }
    for (lane, score) in lanes.iter_mut().zip(rest) {
        *score = round(exp(*score * scale - maximum));
        *lane += *score;
    }
    fold_lanes(lanes)
}

multiversion! {
    /// `O = O·α + A` for the 32 columns from `column` on.
    fn accumulate(state: &mut [f32], head_dim: usize, column: usize, sums: &[f32], old: &[f32; TILE_ROWS]) {
        for (row, state) in state.chunks_exact_mut(head_dim).enumerate() {
            for (state, &sum) in state[column..column + TILE].iter_mut().zip(&sums[row * TILE..][..TILE]) {
                *state = *state * old[row] + sum;
            }
        }
    }
}
