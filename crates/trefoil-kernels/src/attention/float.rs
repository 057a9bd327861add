//! Float attention: online softmax over blocks of [`KEY_BLOCK`] keys, both products through the f32 micro-kernel.

use super::{AttentionSink, KEY_BLOCK, check_heads, check_keys, multiply_row};
use crate::isa::Supported;
use crate::kernel::{FmaTile, TILE_ROWS};
use crate::math::{LANES, exp, lane_sum, recip, round_f16};
use crate::multiversion::multiversion;
use crate::rows::Operands;
use crate::workspace::at_least;
use crate::{KernelError, Kernels, Rows, Workspace};
use trefoil_weights::tile::TILE;

/// Query rows that share a transposed block of keys.
const BLOCK_ROWS: usize = 192;

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
                let sizes =
                    [KEY_BLOCK * head_dim, TILE_ROWS * KEY_BLOCK, BLOCK_ROWS * head_dim, BLOCK_ROWS, BLOCK_ROWS];
                let mut floats = at_least(&mut part.slot.floats, sizes.iter().sum());
                let [panels, scores, state, maxima, totals] = sizes.map(|size| {
                    let (head, tail) = std::mem::take(&mut floats).split_at_mut(size);
                    floats = tail;
                    head
                });
                for head in 0..heads {
                    let column = head * head_dim;
                    for first in (0..part.rows).step_by(BLOCK_ROWS) {
                        let rows = BLOCK_ROWS.min(part.rows - first);
                        let query = query.part(part.first + first, rows);
                        state[..rows * head_dim].fill(0.0);
                        totals[..rows].fill(0.0);
                        maxima[..rows].fill(f32::NEG_INFINITY);
                        for start in (0..key.rows()).step_by(KEY_BLOCK) {
                            let valid = KEY_BLOCK.min(key.rows() - start);
                            transpose_keys(key.part(start, valid), column, head_dim, panels);
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
                                let values = (&value.starting_at(start)[column..], value.stride());
                                block.add(queries, panels, values, valid);
                            }
                        }
                        for row in 0..rows {
                            let values = &mut state[row * head_dim..][..head_dim];
                            multiply_row(self.supported(), values, recip(totals[row]));
                            part.sink.store(self.supported(), first + row, column, values);
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
    /// Adds a block of `valid` keys. Queries and values are (from their first element on, row stride).
    fn add(&mut self, queries: (&[f32], usize), panels: &[f32], values: (&[f32], usize), valid: usize) {
        let head_dim = self.head_dim;
        for (tile_column, panel) in panels.chunks_exact(head_dim * TILE).take(valid.div_ceil(TILE)).enumerate() {
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
        for column in (0..head_dim).step_by(TILE) {
            let tile = FmaTile {
                a: self.scores,
                lda: KEY_BLOCK,
                rows: self.rows,
                b: &values.0[column..],
                ldb: values.1,
                k: valid,
                accumulate: false,
            };
            let mut sums = [0f32; TILE_ROWS * TILE];
            self.isa.fma_tile(tile, &mut sums, TILE);
            accumulate(self.isa, &mut self.state[..self.rows * head_dim], head_dim, column, &sums, &old);
        }
    }
}

/// `panels[key/32][dim][key mod 32]`; lanes past the last key are zero. For the baseline on purpose, as in float GEMM.
fn transpose_keys(keys: Rows<'_, f32>, column: usize, head_dim: usize, panels: &mut [f32]) {
    /// Dimensions at a time, so that the rows written stay in the first-level cache.
    const DIMS: usize = 16;
    for (tile, panel) in panels.chunks_mut(head_dim * TILE).take(keys.rows().div_ceil(TILE)).enumerate() {
        for (chunk, rows) in panel.as_chunks_mut::<{ DIMS * TILE }>().0.iter_mut().enumerate() {
            for lane in 0..TILE {
                let key = tile * TILE + lane;
                let mut values = [0f32; DIMS];
                if key < keys.rows() {
                    values.copy_from_slice(&keys.row(key)[column + chunk * DIMS..][..DIMS]);
                }
                for (row, value) in rows.as_chunks_mut::<TILE>().0.iter_mut().zip(values) {
                    row[lane] = value;
                }
            }
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
            let mut lanes = [f32::NEG_INFINITY; LANES];
            for chunk in scores.chunks(LANES) {
                for (lane, &score) in lanes.iter_mut().zip(chunk) {
                    let score = score * score_scale;
                    *lane = if score > *lane { score } else { *lane };
                }
            }
            let maximum = lanes.into_iter().fold(maxima[row], |a, b| if b > a { b } else { a });
            for score in scores.iter_mut() {
                let probability = exp(*score * score_scale - maximum);
                *score = if operands == Operands::F16 { round_f16(probability) } else { probability };
            }
            old[row] = exp(maxima[row] - maximum);
            totals[row] = totals[row] * old[row] + lane_sum(scores, |x| x);
            maxima[row] = maximum;
        }
    }
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
