//! INT8 attention. Fused where a work-item is a thread of a CPU (fused.rs); where it is a lane of a GPU, de-fused here: scores of a
//! block of queries, codes of their probabilities, product with the values.

use super::call::{Call, DISPATCH_ELEMENTS, DISPATCH_MULTIPLY_ADDS, SINK_CODES, SINK_F32};
use super::gemm::{FLAG_ROUND_F16, check_codes, check_words};
use super::kernels::State;
use super::{Buffer, Kernels, OpenClError, Rows, RowsMut};
use crate::attention::{MAX_HEAD_DIM, check_heads, check_keys, check_scales};
use crate::{AttentionScales, KEY_BLOCK, KernelError, Operands};
use trefoil_weights::tile::TILE;

/// Queries whose scores exist at a time where attention is de-fused, rounded down to whole row tiles of the variant.
pub const QUERY_BLOCK: usize = 256;
/// Most bytes of scores, or of the items of a fused dispatch: several heads share a dispatch where keys are few.
pub(super) const SCORE_BYTES: usize = 8 << 20;
/// Heads of a dispatch: their scales are the lanes of one argument.
pub(super) const MOST_HEADS: usize = 16;

/// INT8 keys and values of all heads in tile order, as [`crate::PackedKeyValue`] holds them. The buffer is reused.
#[derive(Debug, Default)]
pub struct PackedKeyValue {
    pub(super) codes: Option<Buffer<i8>>,
    pub(super) keys: usize,
    pub(super) heads: usize,
    pub(super) head_dim: usize,
}

impl PackedKeyValue {
    /// An empty buffer.
    pub fn new() -> PackedKeyValue {
        PackedKeyValue::default()
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.codes.as_ref().map_or(0, Buffer::len)
    }

    pub(super) fn blocks(&self) -> usize {
        self.keys.div_ceil(KEY_BLOCK)
    }
}

/// Where attention's output goes, all heads side by side. See [`crate::AttentionSink`].
#[derive(Debug)]
pub enum AttentionSink<'b> {
    /// Floats.
    F32 {
        /// `M × d`.
        out: RowsMut<'b, f32>,
        /// Rounding on store.
        operands: Operands,
    },
    /// INT8 codes for the output projection.
    Codes {
        /// `M × d`.
        out: RowsMut<'b, i8>,
        /// Static scale of the projection's input.
        scale: f32,
    },
}

impl AttentionSink<'_> {
    fn check(&self, operator: &'static str, queries: usize, width: usize) -> Result<(), KernelError> {
        let (have, shape) = match self {
            AttentionSink::F32 { out, .. } => (out.view.size(), out.view.shape()),
            AttentionSink::Codes { out, .. } => (out.view.size(), out.view.shape()),
        };
        if have != (queries, width) {
            return Err(KernelError::shapes(
                operator,
                ("the query", format!("{queries}×{width}")),
                ("the destination", shape),
                "they must have the same shape",
            ));
        }
        match self {
            AttentionSink::F32 { .. } => Ok(()),
            AttentionSink::Codes { out, scale } => check_codes(operator, &out.view, Some(*scale)),
        }
    }

    /// Sets the destination as the next argument; 1/scale, flags and kind of sink are to follow.
    pub(super) fn destination<'k>(&self, call: Call<'k>) -> (Call<'k>, f32, u32, u32) {
        match self {
            AttentionSink::F32 { out, operands } => {
                let flags = if *operands == Operands::F16 { FLAG_ROUND_F16 } else { 0 };
                (call.rows(&out.view), 0.0, flags, SINK_F32)
            }
            AttentionSink::Codes { out, scale } => (call.rows(&out.view), 1.0 / scale, 0, SINK_CODES),
        }
    }
}

/// σ and the scale of the values of `count` heads: the same operations as on the CPU, on the host for both.
pub(super) fn scales_of_heads(
    scales: AttentionScales<'_>,
    head_dim: usize,
    first: usize,
    count: usize,
) -> ([f32; MOST_HEADS], [f32; MOST_HEADS]) {
    let per_root = (f64::from(crate::math::LOG2_E) / (head_dim as f64).sqrt()) as f32;
    let (mut sigmas, mut value_scales) = ([0f32; MOST_HEADS], [0f32; MOST_HEADS]);
    for offset in 0..count {
        let head = first + offset;
        sigmas[offset] = (scales.query[head] * scales.key[head]) * per_root;
        value_scales[offset] = scales.value[head];
    }
    (sigmas, value_scales)
}

/// A block of queries of some heads.
#[derive(Clone, Copy)]
struct Block {
    first_head: usize,
    heads: usize,
    first_row: usize,
    rows: usize,
}

impl Kernels {
    /// Packs `keys` and `values` (both `N × d`, heads side by side), see [`crate::Kernels::pack_key_value`].
    ///
    /// # Errors
    /// Shapes that differ, heads that are no multiple of 32 wide, codes that do not start at multiples of 4; errors of the
    /// library.
    pub fn pack_key_value(
        &self,
        keys: Rows<'_, i8>,
        values: Rows<'_, i8>,
        heads: usize,
        packed: &mut PackedKeyValue,
    ) -> Result<(), OpenClError> {
        let operator = "pack_key_value";
        if keys.size() != values.size() {
            return Err(KernelError::shapes(
                operator,
                ("the keys", keys.shape()),
                ("the values", values.shape()),
                "they must have the same shape",
            )
            .into());
        }
        check_keys(operator, keys.rows)?;
        let width = keys.columns;
        let head_dim = check_heads(operator, width, heads)?;
        if head_dim > MAX_HEAD_DIM {
            return Err(KernelError::value(
                operator,
                "the head dimension",
                head_dim,
                "INT8 attention takes at most 512",
            )
            .into());
        }
        check_words(operator, "the start or the row stride of the keys", &[keys.first, keys.stride])?;
        packed.keys = keys.rows;
        packed.heads = heads;
        packed.head_dim = head_dim;
        let bytes = packed.blocks() * 2 * KEY_BLOCK * width;
        let codes = match &packed.codes {
            Some(codes) if codes.len() >= bytes => codes,
            _ => packed.codes.insert(self.zeroed(bytes)?),
        };
        let state = self.state();
        let padded = keys.rows.next_multiple_of(TILE);
        for (name, side, columns, group, rows_of_item) in
            [("pack_keys", &keys, width / 4, 8, 1), ("pack_values", &values, width, 32, 4)]
        {
            let call = state.call(name)?.rows(side).buffer(codes).size(keys.rows).size(heads).size(head_dim);
            let rows_of_item = rows_of_item * self.variant().row_batch();
            let batches = padded.div_ceil(rows_of_item);
            let step = (DISPATCH_ELEMENTS / (width * rows_of_item)).max(1);
            for first in (0..batches).step_by(step) {
                let count = step.min(batches - first);
                call.run(&self.session, [(0, columns), (first, count), (0, 1)], [group, 1, 1])?;
            }
        }
        Ok(())
    }

    /// Softmax attention of INT8 queries over packed keys and values, see [`crate::Kernels::attention_w8a8`]. The scores of at
    /// most [`QUERY_BLOCK`] queries exist at a time, where it is fused those of a tile of rows and 256 keys.
    ///
    /// # Errors
    /// Shapes that do not fit each other, scales that are not positive numbers, codes that do not start at multiples of 4;
    /// errors of the library.
    #[allow(clippy::needless_pass_by_value, reason = "the sink is borrowed for the call, as in the CPU kernel")]
    pub fn attention_w8a8(
        &self,
        query: Rows<'_, i8>,
        key_value: &PackedKeyValue,
        scales: AttentionScales<'_>,
        sink: AttentionSink<'_>,
    ) -> Result<(), OpenClError> {
        let operator = "attention_w8a8";
        let (heads, head_dim, keys) = (key_value.heads, key_value.head_dim, key_value.keys);
        check_keys(operator, keys)?;
        if query.columns != heads * head_dim {
            return Err(KernelError::shapes(
                operator,
                ("the query", query.shape()),
                ("the keys", format!("{keys}×{}", heads * head_dim)),
                "they must have the same number of columns",
            )
            .into());
        }
        check_scales(operator, scales, heads)?;
        check_words(operator, "the start or the row stride of the query", &[query.first, query.stride])?;
        sink.check(operator, query.rows, query.columns)?;
        let mut state = self.state();
        self.sum_rows(&mut state, 0, &query, heads)?;
        if self.variant().fuses_attention() {
            return self.attend_fused(&mut state, query, key_value, scales, &sink);
        }
        let padded = keys.next_multiple_of(TILE);
        let tile_rows = self.variant().tile_rows();
        // One head's rows stay within the budget of a dispatch, and as many heads as fit go together.
        let per_row = padded * head_dim;
        let by_budget = (DISPATCH_MULTIPLY_ADDS / per_row).min(DISPATCH_ELEMENTS / padded);
        let most_rows = (by_budget / tile_rows).max(1) * tile_rows;
        let block_rows = (QUERY_BLOCK / tile_rows * tile_rows).min(most_rows);
        let by_memory = SCORE_BYTES / (block_rows * padded * 4);
        let by_work = DISPATCH_MULTIPLY_ADDS / (block_rows * per_row);
        let most_heads = by_memory.min(by_work).clamp(1, MOST_HEADS.min(heads));
        for first_row in (0..query.rows).step_by(block_rows) {
            let rows = block_rows.min(query.rows - first_row);
            for first_head in (0..heads).step_by(most_heads) {
                let block = Block { first_head, heads: most_heads.min(heads - first_head), first_row, rows };
                self.attend(&mut state, query, key_value, scales, &sink, block)?;
            }
        }
        Ok(())
    }

    /// The three steps of a block.
    fn attend(
        &self,
        state: &mut State,
        query: Rows<'_, i8>,
        key_value: &PackedKeyValue,
        scales: AttentionScales<'_>,
        sink: &AttentionSink<'_>,
        block: Block,
    ) -> Result<(), OpenClError> {
        let PackedKeyValue { keys, heads, head_dim, .. } = *key_value;
        let Some(packed) = &key_value.codes else { return Ok(()) };
        let Block { first_head, heads: some, first_row, rows } = block;
        let (variant, blocks, score_stride) = (self.variant(), key_value.blocks(), keys.next_multiple_of(TILE));
        let code_stride = blocks * KEY_BLOCK;
        state.scores.at_least(&self.session, some * rows * score_stride)?;
        state.codes.at_least(&self.session, some * rows * code_stride)?;
        state.block_sums.at_least(&self.session, some * rows * blocks)?;
        state.weights.at_least(&self.session, some * rows * (2 * blocks + 1))?;
        let state = &*state;
        let scores = state.scores.get(&self.no_integers);
        let codes = state.codes.get(&self.no_codes);
        let block_sums = state.block_sums.get(&self.no_integers);
        let weights = state.weights.get(&self.no_floats);
        let (sigmas, value_scales) = scales_of_heads(scales, head_dim, first_head, some);
        let (columns, group) = (variant.tile_columns(), variant.group_items());
        let tiles = rows.div_ceil(variant.tile_rows());
        let call = state
            .call("attention_scores")?
            .rows(&query)
            .buffer(state.sums[0].get(&self.no_integers))
            .size(query.rows)
            .buffer(packed)
            .size(heads)
            .size(head_dim)
            .size(first_head)
            .size(first_row)
            .size(rows)
            .buffer(scores)
            .size(score_stride);
        let ranges = [(0, score_stride / columns), (0, tiles), (0, some)];
        call.run(&self.session, ranges, [group, 1, 1])?;

        let items = variant.row_items();
        let call = state
            .call("attention_codes")?
            .buffer(scores)
            .size(score_stride)
            .size(rows)
            .size(keys)
            .value(sigmas)
            .buffer(codes)
            .size(code_stride)
            .buffer(block_sums)
            .buffer(weights);
        let batches = rows.div_ceil(variant.row_batch());
        call.run(&self.session, [(0, batches * items), (0, some), (0, 1)], [items, 1, 1])?;

        let call = state
            .call("attention_values")?
            .buffer(codes)
            .size(code_stride)
            .size(rows)
            .size(keys)
            .buffer(block_sums)
            .buffer(weights)
            .buffer(packed)
            .size(heads)
            .size(head_dim)
            .size(first_head)
            .value(value_scales);
        let (call, inverse, flags, kind) = sink.destination(call);
        let call = call.size(first_row).value(inverse).value(flags).value(kind);
        let ranges = [(0, head_dim / columns), (0, tiles), (0, some)];
        call.run(&self.session, ranges, [group, 1, 1])
    }
}
