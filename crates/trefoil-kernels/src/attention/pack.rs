//! Keys and values in tile order: the right-hand operands of the two products of INT8 attention.

use super::{KEY_BLOCK, check_heads, check_keys};
use crate::multiversion::multiversion;
use crate::workspace::{at_least, line_start, lines};
use crate::{KernelError, Kernels, Rows, Workspace};
use trefoil_weights::tile::{GROUP, GROUP_BYTES, TILE, TILE_BYTES};

/// Widest head: differences of scores, at most `2·127·127·D`, stay below 2²⁴ and so convert to f32 exactly.
pub(crate) const MAX_HEAD_DIM: usize = 512;

/// INT8 keys and values of all heads in tile order, 256 keys at a time: per block and head `Kᵀ` (head_dim × keys) and then
/// `V` (keys × head_dim), both tiled. These are activations, not weights; the buffer is reused by the next packing.
#[derive(Debug, Clone, Default)]
pub struct PackedKeyValue {
    codes: Vec<i8>,
    /// First code that is used: the first on a cache line.
    start: usize,
    /// `−128·Σ k` per block, head and key: what a product with `q + 128` starts from. 0 in the padding.
    offsets: Vec<i32>,
    keys: usize,
    heads: usize,
    head_dim: usize,
}

impl PackedKeyValue {
    /// An empty buffer.
    pub fn new() -> PackedKeyValue {
        PackedKeyValue::default()
    }

    /// Keys packed.
    pub fn keys(&self) -> usize {
        self.keys
    }

    /// Heads packed.
    pub fn heads(&self) -> usize {
        self.heads
    }

    /// Columns of a head.
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.codes.capacity() + self.offsets.capacity() * size_of::<i32>()
    }

    /// Number of key blocks.
    pub(super) fn blocks(&self) -> usize {
        self.keys.div_ceil(KEY_BLOCK)
    }

    /// Keys of a block.
    pub(super) fn valid(&self, block: usize) -> usize {
        KEY_BLOCK.min(self.keys - block * KEY_BLOCK)
    }

    /// Bytes of one side of one head of a block.
    fn side(&self) -> usize {
        KEY_BLOCK * self.head_dim
    }

    /// `Kᵀ` and `V` of a head of a block.
    pub(super) fn head(&self, block: usize, head: usize) -> (&[i8], &[i8]) {
        let side = self.side();
        self.codes[self.start + (block * self.heads + head) * 2 * side..][..2 * side].split_at(side)
    }

    /// `−128·Σ k` of the keys of a head of a block.
    #[cfg(any(target_arch = "x86_64", test))]
    pub(super) fn offsets(&self, block: usize, head: usize) -> &[i32] {
        &self.offsets[(block * self.heads + head) * KEY_BLOCK..][..KEY_BLOCK]
    }
}

impl Kernels {
    /// Packs `keys` and `values` (both `N × d`, heads side by side) for [`Kernels::attention_w8a8`].
    ///
    /// # Errors
    /// Shapes that differ, heads that are no multiple of 32 wide.
    pub fn pack_key_value(
        &self,
        keys: Rows<'_, i8>,
        values: Rows<'_, i8>,
        heads: usize,
        packed: &mut PackedKeyValue,
        workspace: &mut Workspace,
    ) -> Result<(), KernelError> {
        let operator = "pack_key_value";
        if (keys.rows(), keys.columns()) != (values.rows(), values.columns()) {
            return Err(KernelError::shapes(
                operator,
                ("the keys", keys.shape()),
                ("the values", values.shape()),
                "they must have the same shape",
            ));
        }
        check_keys(operator, keys.rows())?;
        let head_dim = check_heads(operator, keys.columns(), heads)?;
        if head_dim > MAX_HEAD_DIM {
            return Err(KernelError::value(
                operator,
                "the head dimension",
                head_dim,
                "INT8 attention takes at most 512",
            ));
        }
        packed.head_dim = head_dim;
        packed.keys = keys.rows();
        packed.heads = heads;
        let (side, blocks) = (packed.side(), packed.blocks());
        let block_bytes = 2 * side * heads;
        let block_keys = KEY_BLOCK * heads;
        let mut codes = lines(&mut packed.codes, blocks * block_bytes);
        let mut offsets = at_least(&mut packed.offsets, blocks * block_keys);
        self.run_grains(
            blocks,
            1,
            workspace,
            |count| {
                let codes = codes.split_off_mut(..count * block_bytes).unwrap_or_default();
                (codes, offsets.split_off_mut(..count * block_keys).unwrap_or_default())
            },
            |part| {
                let (codes, offsets) = &mut part.sink;
                let blocks = codes.chunks_exact_mut(block_bytes).zip(offsets.chunks_exact_mut(block_keys));
                for (at, (block, offsets)) in blocks.enumerate() {
                    let first = (part.first + at) * KEY_BLOCK;
                    let valid = KEY_BLOCK.min(keys.rows() - first);
                    let heads = block.chunks_exact_mut(2 * side).zip(offsets.chunks_exact_mut(KEY_BLOCK));
                    for (head, (sides, offsets)) in heads.enumerate() {
                        let (key_side, value_side) = sides.split_at_mut(side);
                        let column = head * head_dim;
                        pack_keys(self.supported(), keys.part(first, valid), column, head_dim, key_side);
                        sum_keys(self.supported(), keys.part(first, valid), column, head_dim, offsets);
                        pack_values(self.supported(), values.part(first, valid), column, head_dim, value_side);
                    }
                }
            },
        );
        packed.start = line_start(&packed.codes);
        Ok(())
    }
}

multiversion! {
    /// `−128·Σ k` of every key, 0 where there is none.
    fn sum_keys(keys: Rows<'_, i8>, column: usize, head_dim: usize, offsets: &mut [i32]) {
        for (key, offset) in offsets.iter_mut().enumerate() {
            *offset = 0;
            if key < keys.rows() {
                *offset = -128 * keys.row(key)[column..column + head_dim].iter().map(|&code| i32::from(code)).sum::<i32>();
            }
        }
    }
}

multiversion! {
    /// Input = dimension, output = key: four consecutive dimensions of a key stay together.
    fn pack_keys(keys: Rows<'_, i8>, column: usize, head_dim: usize, out: &mut [i8]) {
        let padded = keys.rows().next_multiple_of(TILE);
        for key in 0..padded {
            let tile_column = &mut out[key / TILE * head_dim * TILE..][..head_dim * TILE];
            let lane = key % TILE * GROUP;
            if key < keys.rows() {
                let (fours, _) = keys.row(key)[column..column + head_dim].as_chunks::<GROUP>();
                for (group, four) in tile_column.as_chunks_mut::<GROUP_BYTES>().0.iter_mut().zip(fours) {
                    group[lane..lane + GROUP].copy_from_slice(four);
                }
            } else {
                for group in tile_column.as_chunks_mut::<GROUP_BYTES>().0 {
                    group[lane..lane + GROUP].fill(0);
                }
            }
        }
    }
}

multiversion! {
    /// Input = key, output = dimension: four consecutive keys of a dimension come together.
    fn pack_values(values: Rows<'_, i8>, column: usize, head_dim: usize, out: &mut [i8]) {
        let padded = values.rows().next_multiple_of(TILE);
        let zeros = [0i8; TILE];
        for (tile_column, tiles) in out.chunks_exact_mut(padded * TILE).take(head_dim / TILE).enumerate() {
            let first = column + tile_column * TILE;
            for (tile, bytes) in tiles.as_chunks_mut::<TILE_BYTES>().0.iter_mut().enumerate() {
                for (group, four) in bytes.as_chunks_mut::<GROUP_BYTES>().0.iter_mut().enumerate() {
                    let key = tile * TILE + group * GROUP;
                    let rows: [&[i8; TILE]; GROUP] = std::array::from_fn(|offset| {
                        let row = if key + offset < values.rows() { &values.row(key + offset)[first..first + TILE] } else { &[] };
                        row.first_chunk().unwrap_or(&zeros)
                    });
                    // Four bytes as one word: a few vector instructions instead of a store per byte.
                    for (lane, four) in four.as_chunks_mut::<GROUP>().0.iter_mut().enumerate() {
                        let word = rows.iter().rev().fold(0u32, |word, row| word << 8 | u32::from(row[lane].cast_unsigned()));
                        *four = word.to_le_bytes().map(u8::cast_signed);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Isa, Pool};
    use trefoil_weights::tile::off;

    #[test]
    fn both_sides_are_tiled_per_head_and_block() {
        let (keys, heads, head_dim) = (KEY_BLOCK + 37, 2, 64);
        let width = heads * head_dim;
        let data: Vec<i8> = (0..keys * width).map(|n| (n * 7 % 251) as u8 as i8).collect();
        let reversed: Vec<i8> = data.iter().rev().copied().collect();
        let view = Rows::dense("k", &data, keys, width).unwrap();
        let values = Rows::dense("v", &reversed, keys, width).unwrap();
        let kernels = Kernels::new(Isa::best(), Pool::on_caller()).unwrap();
        // Stale bytes must not survive as padding.
        let mut packed = PackedKeyValue {
            codes: vec![99; 5 * KEY_BLOCK * width],
            offsets: vec![99; 4 * KEY_BLOCK],
            ..PackedKeyValue::new()
        };
        kernels.pack_key_value(view, values, heads, &mut packed, &mut Workspace::new()).unwrap();
        for block in 0..2 {
            let valid = packed.valid(block);
            let padded = valid.next_multiple_of(TILE);
            for head in 0..heads {
                let (key_side, value_side) = packed.head(block, head);
                for key in 0..padded {
                    for dim in 0..head_dim {
                        let pick = |rows: &Rows<'_, i8>| {
                            if key < valid { rows.row(block * KEY_BLOCK + key)[head * head_dim + dim] } else { 0 }
                        };
                        assert_eq!(key_side[off(dim, key, head_dim)], pick(&view));
                        assert_eq!(value_side[off(key, dim, padded)], pick(&values));
                    }
                    let sum: i32 = (0..head_dim).map(|dim| i32::from(key_side[off(dim, key, head_dim)])).sum();
                    assert_eq!(packed.offsets(block, head)[key], -128 * sum);
                }
            }
        }
    }
}
