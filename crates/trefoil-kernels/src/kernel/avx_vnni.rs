//! VEX-encoded VNNI on 256-bit registers (processors without AVX-512). Signs as in [`super::avx512`].
//!
//! The same source is compiled with the EVEX encoding for the tests, so that its logic is checked on processors that have
//! only that one.

#![allow(clippy::wildcard_imports, reason = "the intrinsics of one instruction set")]

use super::{DotTile, four};
use std::arch::x86_64::*;
use trefoil_weights::tile::{GROUP, GROUP_BYTES, TILE};

macro_rules! kernels {
    ($features:literal, $dot_tile:ident, $dot_rows:ident, $dpbusd:ident) => {
        /// See [`crate::isa::Supported::dot_tile`].
        ///
        /// # Safety
        /// The processor has the features, and the tile passed `DotTile::check`.
        #[target_feature(enable = $features)]
        pub(super) unsafe fn $dot_tile(tile: DotTile<'_>, out: &mut [i32], ldc: usize) {
            let mut row = 0;
            while row < tile.rows {
                // SAFETY: the caller's promise, passed on; row + R ≤ rows.
                row += unsafe {
                    match tile.rows - row {
                        1 => $dot_rows::<1>(tile, row, out, ldc),
                        2 => $dot_rows::<2>(tile, row, out, ldc),
                        _ => $dot_rows::<3>(tile, row, out, ldc),
                    }
                };
            }
        }

        /// Rows `first .. first + R` times 32 columns: 4·R accumulators, R broadcasts and one weight register.
        ///
        /// # Safety
        /// The processor has the features, the tile passed `DotTile::check`, and `first + R ≤ tile.rows`.
        #[target_feature(enable = $features)]
        unsafe fn $dot_rows<const R: usize>(tile: DotTile<'_>, first: usize, out: &mut [i32], ldc: usize) -> usize {
            let flip = _mm256_set1_epi8(-128);
            let mut sums = [[_mm256_setzero_si256(); 4]; R];
            let a = tile.a.as_ptr().wrapping_add(first * tile.lda);
            for group in 0..tile.k / GROUP {
                let mut activations = [_mm256_setzero_si256(); R];
                for (row, activations) in activations.iter_mut().enumerate() {
                    // SAFETY: `check`: row first + r has k codes.
                    *activations = _mm256_set1_epi32(unsafe { four(a.add(row * tile.lda + group * GROUP)) });
                }
                for column in 0..4 {
                    // SAFETY: `check`: the weights have k/4 groups of 128 bytes.
                    let weights = unsafe {
                        _mm256_loadu_si256(tile.weights.as_ptr().add(group * GROUP_BYTES + column * TILE).cast())
                    };
                    let weights = _mm256_xor_si256(weights, flip);
                    for (sums, &activations) in sums.iter_mut().zip(&activations) {
                        sums[column] = $dpbusd(sums[column], weights, activations);
                    }
                }
            }
            for (row, sums) in sums.into_iter().enumerate() {
                let excess = _mm256_set1_epi32(tile.row_sums[first + row].wrapping_mul(128));
                let at = out[(first + row) * ldc..][..TILE].as_mut_ptr();
                for (column, sum) in sums.into_iter().enumerate() {
                    // SAFETY: `at` has 32 elements.
                    unsafe { _mm256_storeu_si256(at.add(column * 8).cast(), _mm256_sub_epi32(sum, excess)) };
                }
            }
            R
        }
    };
}

kernels!("avx2,avxvnni", dot_tile, dot_rows, _mm256_dpbusd_avx_epi32);
#[cfg(test)]
kernels!("avx2,avx512f,avx512vl,avx512vnni", dot_tile_evex, dot_rows_evex, _mm256_dpbusd_epi32);

/// See [`crate::isa::Supported::dot_peak`].
///
/// # Safety
/// The processor has AVX2 and AVX-VNNI.
#[target_feature(enable = "avx2,avxvnni")]
pub(super) unsafe fn dot_peak(rounds: u64) -> u64 {
    let mut sums = [_mm256_setzero_si256(); 12];
    let (a, b) = (std::hint::black_box(_mm256_set1_epi8(3)), std::hint::black_box(_mm256_set1_epi8(-5)));
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm256_dpbusd_avx_epi32(*sum, a, b);
        }
        for sum in &mut sums {
            *sum = _mm256_dpbusd_avx_epi32(*sum, a, b);
        }
    }
    std::hint::black_box(sums);
    rounds * 24 * 32 * 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::kernel::{TILE_ROWS, scalar};

    #[test]
    fn the_evex_twin_is_exact() {
        if !Isa::Avx512Vnni.is_available() {
            eprintln!("skipped: no AVX-512 VNNI, which the twin needs");
            return;
        }
        let k = 3 * TILE;
        let bytes: Vec<i8> = (0..k * TILE).map(|n| ((n * 73 % 255) as i32 - 127) as i8).collect();
        for rows in 1..=TILE_ROWS {
            let row_sums: Vec<i32> =
                (0..rows).map(|row| bytes[row * k..][..k].iter().map(|&code| i32::from(code)).sum()).collect();
            let tile = DotTile { a: &bytes, lda: k, rows, weights: &bytes, k, row_sums: &row_sums };
            let (mut got, mut want) = (vec![1; rows * TILE], vec![2; rows * TILE]);
            scalar::dot_tile(tile, &mut want, TILE);
            // SAFETY: the features were checked above; the buffers are those that `DotTile::check` asks for.
            unsafe { dot_tile_evex(tile, &mut got, TILE) };
            assert_eq!(got, want);
        }
    }
}
