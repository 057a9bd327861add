//! AVX2 with FMA.
//!
//! `vpmaddubsw` multiplies unsigned by signed bytes and adds pairs with saturation. The sign trick makes one side unsigned:
//! `a·w = |a|·(w·sign a)`. With codes |w| ≤ 127 and |a| ≤ 128 a pair is at most 2·128·127 = 32,512 < 2¹⁵, so nothing
//! saturates and the sums are exact.

#![allow(clippy::wildcard_imports, reason = "the intrinsics of one instruction set")]

use super::{DotTile, FmaTile, four};
use std::arch::x86_64::*;
use trefoil_weights::tile::{GROUP, GROUP_BYTES, TILE};

/// See [`crate::isa::Supported::dot_tile`].
///
/// # Safety
/// The processor has AVX2, and the tile passed `DotTile::check`.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn dot_tile(tile: DotTile<'_>, out: &mut [i32], ldc: usize) {
    for half in 0..2 {
        let mut row = 0;
        while row < tile.rows {
            // SAFETY: the caller's promise, passed on; row + R ≤ rows.
            row += unsafe {
                match tile.rows - row {
                    1 => dot_rows::<1>(tile, row, half, out, ldc),
                    2 => dot_rows::<2>(tile, row, half, out, ldc),
                    3 => dot_rows::<3>(tile, row, half, out, ldc),
                    _ => dot_rows::<4>(tile, row, half, out, ldc),
                }
            };
        }
    }
}

/// Rows `first .. first + R` times columns `16·half .. 16·half + 16`.
///
/// # Safety
/// As [`dot_tile`], `first + R ≤ tile.rows` and `half` is 0 or 1.
#[target_feature(enable = "avx2")]
unsafe fn dot_rows<const R: usize>(tile: DotTile<'_>, first: usize, half: usize, out: &mut [i32], ldc: usize) -> usize {
    let ones = _mm256_set1_epi16(1);
    let mut sums = [[_mm256_setzero_si256(); 2]; R];
    let a = tile.a.as_ptr().wrapping_add(first * tile.lda);
    let weights = tile.weights.as_ptr().wrapping_add(half * GROUP_BYTES / 2);
    for group in 0..tile.k / GROUP {
        // SAFETY: `check`: the weights have k/4 groups of 128 bytes.
        let (low, high) = unsafe {
            let at = weights.add(group * GROUP_BYTES);
            (_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(TILE).cast()))
        };
        for (row, sums) in sums.iter_mut().enumerate() {
            // SAFETY: `check`: row first + r has k codes.
            let activations = _mm256_set1_epi32(unsafe { four(a.add(row * tile.lda + group * GROUP)) });
            let magnitudes = _mm256_abs_epi8(activations);
            let pairs_low = _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(low, activations));
            let pairs_high = _mm256_maddubs_epi16(magnitudes, _mm256_sign_epi8(high, activations));
            sums[0] = _mm256_add_epi32(sums[0], _mm256_madd_epi16(pairs_low, ones));
            sums[1] = _mm256_add_epi32(sums[1], _mm256_madd_epi16(pairs_high, ones));
        }
    }
    for (row, sums) in sums.into_iter().enumerate() {
        let at = out[(first + row) * ldc + half * 16..][..16].as_mut_ptr();
        // SAFETY: `at` has 16 elements.
        unsafe {
            _mm256_storeu_si256(at.cast(), sums[0]);
            _mm256_storeu_si256(at.add(8).cast(), sums[1]);
        }
    }
    R
}

/// See [`crate::isa::Supported::fma_tile`].
///
/// # Safety
/// The processor has AVX2 and FMA, and the tile passed `FmaTile::check`.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn fma_tile(tile: FmaTile<'_>, out: &mut [f32], ldc: usize) {
    for half in 0..2 {
        let mut row = 0;
        while row < tile.rows {
            // SAFETY: the caller's promise, passed on; row + R ≤ rows.
            row += unsafe {
                match tile.rows - row {
                    1 => fma_rows::<1>(tile, row, half, out, ldc),
                    2 => fma_rows::<2>(tile, row, half, out, ldc),
                    3 => fma_rows::<3>(tile, row, half, out, ldc),
                    4 => fma_rows::<4>(tile, row, half, out, ldc),
                    5 => fma_rows::<5>(tile, row, half, out, ldc),
                    _ => fma_rows::<6>(tile, row, half, out, ldc),
                }
            };
        }
    }
}

/// Rows `first .. first + R` times columns `16·half .. 16·half + 16`: 2·R accumulators, two of b, one broadcast.
///
/// # Safety
/// As [`fma_tile`], `first + R ≤ tile.rows` and `half` is 0 or 1.
#[target_feature(enable = "avx2,fma")]
unsafe fn fma_rows<const R: usize>(tile: FmaTile<'_>, first: usize, half: usize, out: &mut [f32], ldc: usize) -> usize {
    let mut sums = [[_mm256_setzero_ps(); 2]; R];
    if tile.accumulate {
        for (row, sums) in sums.iter_mut().enumerate() {
            let at = out[(first + row) * ldc + half * 16..][..16].as_ptr();
            // SAFETY: `at` has 16 elements.
            *sums = unsafe { [_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))] };
        }
    }
    let a = tile.a.as_ptr().wrapping_add(first * tile.lda);
    let b = tile.b.as_ptr().wrapping_add(half * 16);
    for i in 0..tile.k {
        // SAFETY: `check`: b has k rows of 32 values.
        let (low, high) = unsafe { (_mm256_loadu_ps(b.add(i * tile.ldb)), _mm256_loadu_ps(b.add(i * tile.ldb + 8))) };
        for (row, sums) in sums.iter_mut().enumerate() {
            // SAFETY: `check`: row first + r has k values.
            let value = _mm256_set1_ps(unsafe { *a.add(row * tile.lda + i) });
            sums[0] = _mm256_fmadd_ps(value, low, sums[0]);
            sums[1] = _mm256_fmadd_ps(value, high, sums[1]);
        }
    }
    for (row, sums) in sums.into_iter().enumerate() {
        let at = out[(first + row) * ldc + half * 16..][..16].as_mut_ptr();
        // SAFETY: `at` has 16 elements.
        unsafe {
            _mm256_storeu_ps(at, sums[0]);
            _mm256_storeu_ps(at.add(8), sums[1]);
        }
    }
    R
}

/// See [`crate::isa::Supported::dot_peak`]: the sign trick's four instructions per 32 products.
///
/// # Safety
/// The processor has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn dot_peak(rounds: u64) -> u64 {
    let mut sums = [_mm256_setzero_si256(); 8];
    let ones = _mm256_set1_epi16(1);
    let (a, b) = (std::hint::black_box(_mm256_set1_epi8(3)), std::hint::black_box(_mm256_set1_epi8(-5)));
    for _ in 0..rounds {
        for _ in 0..3 {
            for sum in &mut sums {
                // The sign of the sum so far, or the product would be computed once.
                let pairs = _mm256_maddubs_epi16(a, _mm256_sign_epi8(b, *sum));
                *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, ones));
            }
        }
    }
    std::hint::black_box(sums);
    rounds * 24 * 32 * 2
}

/// See [`crate::isa::Supported::fma_peak`].
///
/// # Safety
/// The processor has FMA.
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn fma_peak(rounds: u64) -> u64 {
    let mut sums = [_mm256_setzero_ps(); 12];
    let (a, b) = (std::hint::black_box(_mm256_set1_ps(0.5)), std::hint::black_box(_mm256_set1_ps(0.25)));
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm256_fmadd_ps(*sum, a, b);
        }
        for sum in &mut sums {
            *sum = _mm256_fmadd_ps(*sum, a, b);
        }
    }
    std::hint::black_box(sums);
    rounds * 24 * 8 * 2
}
