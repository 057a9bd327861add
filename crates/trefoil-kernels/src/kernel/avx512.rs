//! AVX-512 VNNI.
//!
//! `vpdpbusd` multiplies unsigned by signed bytes. The weights are made unsigned in registers (`w + 128` is one XOR of the
//! sign bits, two per 24 products), the activations stay signed, so
//! `Σ a·w = Σ a·(w + 128) − 128·Σ a`; the row sums come from the caller. 32-bit sums wrap, so the identity is exact.

#![allow(clippy::wildcard_imports, reason = "the intrinsics of one instruction set")]

use super::{DotTile, FmaTile, four};
use std::arch::x86_64::*;
use trefoil_weights::tile::{GROUP, GROUP_BYTES};

/// See [`crate::isa::Supported::dot_tile`].
///
/// # Safety
/// The processor has AVX-512 F, BW and VNNI, and the tile passed `DotTile::check`.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(super) unsafe fn dot_tile(tile: DotTile<'_>, out: &mut [i32], ldc: usize) {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        match tile.rows {
            12 => dot_rows::<12>(tile, out, ldc),
            11 => dot_rows::<11>(tile, out, ldc),
            10 => dot_rows::<10>(tile, out, ldc),
            9 => dot_rows::<9>(tile, out, ldc),
            8 => dot_rows::<8>(tile, out, ldc),
            7 => dot_rows::<7>(tile, out, ldc),
            6 => dot_rows::<6>(tile, out, ldc),
            5 => dot_rows::<5>(tile, out, ldc),
            4 => dot_rows::<4>(tile, out, ldc),
            3 => dot_rows::<3>(tile, out, ldc),
            2 => dot_rows::<2>(tile, out, ldc),
            _ => dot_rows::<1>(tile, out, ldc),
        }
    }
}

/// # Safety
/// As [`dot_tile`], and `tile.rows` is `R`.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
unsafe fn dot_rows<const R: usize>(tile: DotTile<'_>, out: &mut [i32], ldc: usize) {
    let flip = _mm512_set1_epi8(-128);
    let mut sums = [[_mm512_setzero_si512(); 2]; R];
    let lda = tile.lda;
    let mut weights = tile.weights.as_ptr();
    // Three rows share a pointer, at strides 0, 1 and 2: few enough registers that no address is spilled.
    let mut rows: [*const i8; 4] = [tile.a.as_ptr(); 4];
    for (triple, pointer) in rows.iter_mut().enumerate() {
        *pointer = pointer.wrapping_add(triple * 3 * lda);
    }
    for _ in 0..tile.k / GROUP {
        // SAFETY: `check`: the weights have k/4 groups of 128 bytes.
        let (low, high) =
            unsafe { (_mm512_loadu_si512(weights.cast()), _mm512_loadu_si512(weights.add(GROUP_BYTES / 2).cast())) };
        let (low, high) = (_mm512_xor_si512(low, flip), _mm512_xor_si512(high, flip));
        for (row, sums) in sums.iter_mut().enumerate() {
            // SAFETY: `check`: row r < R has k codes from r·lda on.
            let activations = _mm512_set1_epi32(unsafe { four(rows[row / 3].add(row % 3 * lda)) });
            sums[0] = _mm512_dpbusd_epi32(sums[0], low, activations);
            sums[1] = _mm512_dpbusd_epi32(sums[1], high, activations);
        }
        weights = weights.wrapping_add(GROUP_BYTES);
        for pointer in &mut rows {
            *pointer = pointer.wrapping_add(GROUP);
        }
    }
    for (row, sums) in sums.into_iter().enumerate() {
        let excess = _mm512_set1_epi32(tile.row_sums[row].wrapping_mul(128));
        let at = out[row * ldc..][..32].as_mut_ptr();
        // SAFETY: `at` has 32 elements.
        unsafe {
            _mm512_storeu_si512(at.cast(), _mm512_sub_epi32(sums[0], excess));
            _mm512_storeu_si512(at.add(16).cast(), _mm512_sub_epi32(sums[1], excess));
        }
    }
}

/// `sums[r] = Σ a[r·lda ..][..k]`: products with 1, 64 at a time.
///
/// # Safety
/// The processor has AVX-512 F, BW and VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
pub(super) unsafe fn row_sums(a: &[i8], lda: usize, k: usize, sums: &mut [i32]) {
    for (row, sum) in sums.iter_mut().enumerate() {
        let (chunks, rest) = a[row * lda..][..k].as_chunks::<64>();
        let mut of_lanes = [_mm512_setzero_si512(); 4];
        for (at, chunk) in chunks.iter().enumerate() {
            // SAFETY: 64 codes.
            let codes = unsafe { _mm512_loadu_si512(chunk.as_ptr().cast()) };
            of_lanes[at % 4] = _mm512_dpbusd_epi32(of_lanes[at % 4], _mm512_set1_epi8(1), codes);
        }
        let [first, second, third, fourth] = of_lanes;
        let of_lanes = _mm512_add_epi32(_mm512_add_epi32(first, second), _mm512_add_epi32(third, fourth));
        *sum = _mm512_reduce_add_epi32(of_lanes) + rest.iter().map(|&code| i32::from(code)).sum::<i32>();
    }
}

/// See [`crate::isa::Supported::fma_tile`].
///
/// # Safety
/// The processor has AVX-512 F, and the tile passed `FmaTile::check`.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn fma_tile(tile: FmaTile<'_>, out: &mut [f32], ldc: usize) {
    // SAFETY: the caller's promise, passed on.
    unsafe {
        match tile.rows {
            12 => fma_rows::<12>(tile, out, ldc),
            11 => fma_rows::<11>(tile, out, ldc),
            10 => fma_rows::<10>(tile, out, ldc),
            9 => fma_rows::<9>(tile, out, ldc),
            8 => fma_rows::<8>(tile, out, ldc),
            7 => fma_rows::<7>(tile, out, ldc),
            6 => fma_rows::<6>(tile, out, ldc),
            5 => fma_rows::<5>(tile, out, ldc),
            4 => fma_rows::<4>(tile, out, ldc),
            3 => fma_rows::<3>(tile, out, ldc),
            2 => fma_rows::<2>(tile, out, ldc),
            _ => fma_rows::<1>(tile, out, ldc),
        }
    }
}

/// # Safety
/// As [`fma_tile`], and `tile.rows` is `R`.
#[target_feature(enable = "avx512f")]
unsafe fn fma_rows<const R: usize>(tile: FmaTile<'_>, out: &mut [f32], ldc: usize) {
    let mut sums = [[_mm512_setzero_ps(); 2]; R];
    if tile.accumulate {
        for (row, sums) in sums.iter_mut().enumerate() {
            let at = out[row * ldc..][..32].as_ptr();
            // SAFETY: `at` has 32 elements.
            *sums = unsafe { [_mm512_loadu_ps(at), _mm512_loadu_ps(at.add(16))] };
        }
    }
    let lda = tile.lda;
    let mut b = tile.b.as_ptr();
    let mut rows: [*const f32; 4] = [tile.a.as_ptr(); 4];
    for (triple, pointer) in rows.iter_mut().enumerate() {
        *pointer = pointer.wrapping_add(triple * 3 * lda);
    }
    for _ in 0..tile.k {
        // SAFETY: `check`: b has k rows of 32 values.
        let (low, high) = unsafe { (_mm512_loadu_ps(b), _mm512_loadu_ps(b.add(16))) };
        for (row, sums) in sums.iter_mut().enumerate() {
            // SAFETY: `check`: row r < R has k values from r·lda on.
            let a = _mm512_set1_ps(unsafe { *rows[row / 3].add(row % 3 * lda) });
            sums[0] = _mm512_fmadd_ps(a, low, sums[0]);
            sums[1] = _mm512_fmadd_ps(a, high, sums[1]);
        }
        b = b.wrapping_add(tile.ldb);
        for pointer in &mut rows {
            *pointer = pointer.wrapping_add(1);
        }
    }
    for (row, sums) in sums.into_iter().enumerate() {
        let at = out[row * ldc..][..32].as_mut_ptr();
        // SAFETY: `at` has 32 elements.
        unsafe {
            _mm512_storeu_ps(at, sums[0]);
            _mm512_storeu_ps(at.add(16), sums[1]);
        }
    }
}

/// See [`crate::isa::Supported::dot_peak`].
///
/// # Safety
/// The processor has AVX-512 F and VNNI.
#[target_feature(enable = "avx512f,avx512vnni")]
pub(super) unsafe fn dot_peak(rounds: u64) -> u64 {
    let mut sums = [_mm512_setzero_si512(); 24];
    let (a, b) = (std::hint::black_box(_mm512_set1_epi8(3)), std::hint::black_box(_mm512_set1_epi8(-5)));
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbusd_epi32(*sum, a, b);
        }
    }
    std::hint::black_box(sums);
    rounds * 24 * 64 * 2
}

/// See [`crate::isa::Supported::fma_peak`].
///
/// # Safety
/// The processor has AVX-512 F.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn fma_peak(rounds: u64) -> u64 {
    let mut sums = [_mm512_setzero_ps(); 24];
    let (a, b) = (std::hint::black_box(_mm512_set1_ps(0.5)), std::hint::black_box(_mm512_set1_ps(0.25)));
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(*sum, a, b);
        }
    }
    std::hint::black_box(sums);
    rounds * 24 * 16 * 2
}
