//! Portable micro-kernels: the oracle of the others, and what runs where none of them does.

use super::{DotTile, FmaTile};
use trefoil_weights::tile::{GROUP, GROUP_BYTES, TILE};

/// See [`crate::isa::Supported::dot_tile`].
pub(super) fn dot_tile(tile: DotTile<'_>, out: &mut [i32], ldc: usize) {
    for row in 0..tile.rows {
        let mut sums = [0i32; TILE];
        let activations = &tile.a[row * tile.lda..][..tile.k];
        let (groups, _) = tile.weights.as_chunks::<GROUP_BYTES>();
        for (four, group) in activations.as_chunks::<GROUP>().0.iter().zip(groups) {
            for (sum, codes) in sums.iter_mut().zip(group.as_chunks::<GROUP>().0) {
                let mut dot = 0i32;
                for (&a, &w) in four.iter().zip(codes) {
                    dot += i32::from(a) * i32::from(w);
                }
                *sum += dot;
            }
        }
        out[row * ldc..][..TILE].copy_from_slice(&sums);
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
