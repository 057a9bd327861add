//! Portable micro-kernels: the oracle of the others, and what runs where none of them does.

use super::{DotTile, FmaTile, TILE_ROWS};
use trefoil_weights::tile::{GROUP, GROUP_BYTES, TILE};

/// See [`crate::isa::Supported::dot_tile`].
///
/// Products and sums of two products are exact in 16 bits: `2·128·127 < 2¹⁵` (weights are never −128).
pub(super) fn dot_tile(tile: DotTile<'_>, out: &mut [i32], ldc: usize) {
    let mut sums = [[0i32; TILE]; TILE_ROWS];
    for (group, codes) in tile.weights[..tile.k * TILE].as_chunks::<GROUP_BYTES>().0.iter().enumerate() {
        // One array per input, so that columns are lanes.
        let mut lanes = [[0i16; TILE]; GROUP];
        for (column, four) in codes.as_chunks::<GROUP>().0.iter().enumerate() {
            for (lanes, &code) in lanes.iter_mut().zip(four) {
                lanes[column] = i16::from(code);
            }
        }
        for (row, sums) in sums.iter_mut().enumerate().take(tile.rows) {
            let at = row * tile.lda + group * GROUP;
            let [a, b, c, d] = [0, 1, 2, 3].map(|offset| i16::from(tile.a[at + offset]));
            for (column, sum) in sums.iter_mut().enumerate() {
                let first = a * lanes[0][column] + b * lanes[1][column];
                let second = c * lanes[2][column] + d * lanes[3][column];
                *sum += i32::from(first) + i32::from(second);
            }
        }
    }
    for (row, sums) in sums.iter().enumerate().take(tile.rows) {
        out[row * ldc..][..TILE].copy_from_slice(sums);
    }
}

/// See [`crate::isa::Supported::fma_tile`]; multiplies and adds, two roundings.
pub(super) fn fma_tile(tile: FmaTile<'_>, out: &mut [f32], ldc: usize) {
    for row in 0..tile.rows {
        let out = &mut out[row * ldc..][..TILE];
        let mut sums = [0f32; TILE];
        if tile.accumulate {
            sums.copy_from_slice(out);
        }
        for (i, &a) in tile.a[row * tile.lda..][..tile.k].iter().enumerate() {
            for (sum, &b) in sums.iter_mut().zip(&tile.b[i * tile.ldb..][..TILE]) {
                *sum += a * b;
            }
        }
        out.copy_from_slice(&sums);
    }
}
