//! INT8 attention in one dispatch per piece, where a work-item is a thread of a CPU: 32-bit scores and codes of a tile of rows stay in
//! the first-level cache, keys and values of a block in the second.

use super::attention::{MOST_HEADS, SCORE_BYTES, scales_of_heads};
use super::call::{DISPATCH_MULTIPLY_ADDS, cut_grid};
use super::kernels::State;
use super::{AttentionSink, Kernels, OpenClError, PackedKeyValue, Rows};
use crate::{AttentionScales, KEY_BLOCK};

/// Most rows of a work-item, `FUSED_ROWS` of attention_fused.cl: as many share keys and values in the CPU's kernel.
const FUSED_ROWS: usize = 120;
/// Sums that a work-item keeps: a vector of them.
const SUMS: usize = 16;

/// How the rows of a product are spread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Plan {
    /// Rows of a work-item, whole tiles.
    block_rows: usize,
    /// Most work-items of a dispatch.
    items: usize,
}

/// Work-items as large as the budget of a dispatch allows, but so many that each of `units` threads has one.
fn plan((rows, keys, head_dim, heads): (usize, usize, usize, usize), tile_rows: usize, units: usize) -> Plan {
    let per_row = 2 * keys * head_dim;
    let budget = (DISPATCH_MULTIPLY_ADDS / per_row).max(1);
    let by_budget = budget / units.max(1);
    let by_rows = (rows * heads).div_ceil(units.max(1));
    let tiles = (FUSED_ROWS / tile_rows).min(by_budget.min(by_rows) / tile_rows).max(1);
    let block_rows = tiles * tile_rows;
    let bytes = block_rows * head_dim * size_of::<f32>() + tile_rows * KEY_BLOCK;
    Plan { block_rows, items: (budget / block_rows).min(SCORE_BYTES / bytes).max(1) }
}

impl Kernels {
    /// Attention after the checks and the row sums.
    pub(super) fn attend_fused(
        &self,
        state: &mut State,
        query: Rows<'_, i8>,
        key_value: &PackedKeyValue,
        scales: AttentionScales<'_>,
        sink: &AttentionSink<'_>,
    ) -> Result<(), OpenClError> {
        let PackedKeyValue { keys, heads, head_dim, .. } = *key_value;
        let Some(packed) = &key_value.codes else { return Ok(()) };
        let tile_rows = self.variant().tile_rows();
        let units = self.device().info().compute_units as usize;
        let plan = plan((query.rows, keys, head_dim, heads), tile_rows, units);
        let blocks = query.rows.div_ceil(plan.block_rows);
        let items = plan.items.min(blocks * MOST_HEADS.min(heads));
        state.codes.at_least(&self.session, items * tile_rows * KEY_BLOCK)?;
        state.block_sums.at_least(&self.session, items * SUMS)?;
        state.weights.at_least(&self.session, items * plan.block_rows * head_dim)?;
        let state = &*state;
        for first_head in (0..heads).step_by(MOST_HEADS) {
            let some = MOST_HEADS.min(heads - first_head);
            let (sigmas, value_scales) = scales_of_heads(scales, head_dim, first_head, some);
            let call = state
                .call("attention_fused")?
                .rows(&query)
                .buffer(state.sums[0].get(&self.no_integers))
                .size(query.rows)
                .buffer(packed)
                .size(keys)
                .size(heads)
                .size(head_dim)
                .size(first_head)
                .value(sigmas)
                .value(value_scales)
                .size(plan.block_rows)
                .buffer(state.codes.get(&self.no_codes))
                .buffer(state.block_sums.get(&self.no_integers))
                .buffer(state.weights.get(&self.no_floats));
            let (call, inverse, flags, kind) = sink.destination(call);
            let call = call.value(inverse).value(flags).value(kind);
            cut_grid((some, 1, blocks), 1, items, |heads, blocks| {
                call.run(&self.session, [heads, blocks, (0, 1)], [1, 1, 1])
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dispatches_keep_their_budgets_and_every_thread_has_work() {
        for rows in [1, 12, 300, 1560, 7800] {
            for (keys, head_dim, heads) in
                [(1, 32, 1), (512, 128, 12), (1560, 128, 12), (7800, 128, 12), (32_760, 512, 40)]
            {
                for (tile_rows, units) in [(12, 1), (12, 2), (12, 64), (6, 2)] {
                    let plan = plan((rows, keys, head_dim, heads), tile_rows, units);
                    let at = format!("{rows} rows, {keys} keys, {heads} × {head_dim}, {units} units: {plan:?}");
                    assert!(plan.block_rows.is_multiple_of(tile_rows) && plan.block_rows <= FUSED_ROWS, "{at}");
                    let products = 2 * plan.items * plan.block_rows * keys * head_dim;
                    assert!(products <= DISPATCH_MULTIPLY_ADDS, "{at}");
                    let bytes = plan.items * (4 * plan.block_rows * head_dim + tile_rows * KEY_BLOCK);
                    assert!(bytes <= SCORE_BYTES || plan.items == 1, "{at}");
                    // Either as many items as threads, or the rows or the budget do not make more of whole tiles.
                    let blocks = rows.div_ceil(plan.block_rows) * heads;
                    assert!(
                        blocks.min(plan.items) >= units || plan.block_rows == tile_rows || bytes > SCORE_BYTES / 2,
                        "{at}"
                    );
                }
            }
        }
        // One thread has the CPU kernel's blocks.
        assert_eq!(plan((7800, 7800, 128, 12), 12, 1), Plan { block_rows: 120, items: 4 });
    }
}
