//! NEON: `SDOT` (Armv8.2) and `SMMLA` (Armv8.6), both signed by signed, so no correction is needed.
//!
//! The two instructions are written as inline assembly because their intrinsics are not stable yet.

#![allow(clippy::wildcard_imports, reason = "the intrinsics of one instruction set")]

use super::{DotTile, FmaTile};
use std::arch::aarch64::*;
use std::arch::asm;
use trefoil_weights::tile::{GROUP, GROUP_BYTES, TILE};

/// `acc += dot(w, a[lane])` on four columns. Register operands only.
macro_rules! sdot {
    ($acc:expr, $weights:expr, $activations:expr, $lane:literal) => {
        // SAFETY: the enclosing function has the `dotprod` feature; only registers are touched.
        unsafe {
            asm!(
                concat!("sdot {acc:v}.4s, {w:v}.16b, {a:v}.4b[", $lane, "]"),
                acc = inout(vreg) $acc, w = in(vreg) $weights, a = in(vreg) $activations,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
    };
}

/// `acc += A · B` with A 2 × 8 and B 8 × 2. Register operands only.
macro_rules! smmla {
    ($acc:expr, $activations:expr, $weights:expr) => {
        // SAFETY: the enclosing function has the `i8mm` feature; only registers are touched.
        unsafe {
            asm!(
                "smmla {acc:v}.4s, {a:v}.16b, {w:v}.16b",
                acc = inout(vreg) $acc, w = in(vreg) $weights, a = in(vreg) $activations,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
    };
}

/// See [`crate::isa::Supported::dot_tile`].
///
/// # Safety
/// The processor has the dot-product extension, and the tile passed `DotTile::check`.
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn dot_tile(tile: DotTile<'_>, out: &mut [i32], ldc: usize) {
    let mut row = 0;
    while row < tile.rows {
        // SAFETY: the caller's promise, passed on; row + R ≤ rows.
        row += unsafe {
            match tile.rows - row {
                1 => dot_rows::<1>(tile, row, out, ldc),
                2 => dot_rows::<2>(tile, row, out, ldc),
                _ => dot_rows::<3>(tile, row, out, ldc),
            }
        };
    }
}

/// Rows `first .. first + R` times 32 columns: 8·R accumulators.
///
/// # Safety
/// As [`dot_tile`], and `first + R ≤ tile.rows`.
#[target_feature(enable = "neon,dotprod")]
unsafe fn dot_rows<const R: usize>(tile: DotTile<'_>, first: usize, out: &mut [i32], ldc: usize) -> usize {
    let mut sums = [[vdupq_n_s32(0); 8]; R];
    let a = tile.a.as_ptr().wrapping_add(first * tile.lda);
    for sixteen in 0..tile.k / 16 {
        let mut activations = [vdupq_n_s8(0); R];
        for (row, activations) in activations.iter_mut().enumerate() {
            // SAFETY: `check`: row first + r has k codes, k is a multiple of 32.
            *activations = unsafe { vld1q_s8(a.add(row * tile.lda + sixteen * 16)) };
        }
        // SAFETY: `check`: the weights have k/4 groups of 128 bytes.
        let groups = unsafe { tile.weights.as_ptr().add(sixteen * 4 * GROUP_BYTES) };
        macro_rules! group {
            ($lane:literal) => {
                for column in 0..8 {
                    // SAFETY: as above.
                    let weights = unsafe { vld1q_s8(groups.add($lane * GROUP_BYTES + column * 16)) };
                    for (sums, &activations) in sums.iter_mut().zip(&activations) {
                        sdot!(sums[column], weights, activations, $lane);
                    }
                }
            };
        }
        group!(0);
        group!(1);
        group!(2);
        group!(3);
    }
    for (row, sums) in sums.into_iter().enumerate() {
        let at = out[(first + row) * ldc..][..TILE].as_mut_ptr();
        for (column, sum) in sums.into_iter().enumerate() {
            // SAFETY: `at` has 32 elements.
            unsafe { vst1q_s32(at.add(column * 4), sum) };
        }
    }
    R
}

/// See [`crate::isa::Supported::dot_tile`].
///
/// # Safety
/// The processor has the INT8 matrix extension, and the tile passed `DotTile::check`.
#[target_feature(enable = "neon,i8mm")]
pub(super) unsafe fn dot_tile_i8mm(tile: DotTile<'_>, out: &mut [i32], ldc: usize) {
    for half in 0..2 {
        let mut row = 0;
        while row < tile.rows {
            // SAFETY: the caller's promise, passed on; row < rows.
            row += unsafe {
                match tile.rows - row {
                    1 | 2 => pair_rows::<1>(tile, row, half, out, ldc),
                    3 | 4 => pair_rows::<2>(tile, row, half, out, ldc),
                    _ => pair_rows::<3>(tile, row, half, out, ldc),
                }
            };
        }
    }
}

/// P pairs of rows from `first` on times columns `16·half .. 16·half + 16`. A row past the last one repeats the last and is
/// not stored.
///
/// # Safety
/// As [`dot_tile_i8mm`], `first < tile.rows` and `half` is 0 or 1.
#[target_feature(enable = "neon,i8mm")]
unsafe fn pair_rows<const P: usize>(
    tile: DotTile<'_>,
    first: usize,
    half: usize,
    out: &mut [i32],
    ldc: usize,
) -> usize {
    let mut sums = [[vdupq_n_s32(0); 8]; P];
    let row_at = |row: usize| tile.a.as_ptr().wrapping_add((first + row).min(tile.rows - 1) * tile.lda);
    for eight in 0..tile.k / 8 {
        let mut activations = [vdupq_n_s8(0); P];
        for (pair, activations) in activations.iter_mut().enumerate() {
            // SAFETY: `check`: both rows have k codes, k is a multiple of 32.
            *activations = unsafe {
                let (even, odd) = (row_at(2 * pair).add(eight * 8), row_at(2 * pair + 1).add(eight * 8));
                vcombine_s8(vld1_s8(even), vld1_s8(odd))
            };
        }
        for quad in 0..4 {
            // SAFETY: `check`: the weights have k/4 groups of 128 bytes.
            let (low, high) = unsafe {
                let at = tile.weights.as_ptr().add(2 * eight * GROUP_BYTES + (half * 16 + quad * 4) * GROUP);
                (vreinterpretq_s32_s8(vld1q_s8(at)), vreinterpretq_s32_s8(vld1q_s8(at.add(GROUP_BYTES))))
            };
            // Two groups of four inputs, column by column: eight inputs of columns (0, 1) and of (2, 3).
            let (left, right) =
                (vreinterpretq_s8_s32(vzip1q_s32(low, high)), vreinterpretq_s8_s32(vzip2q_s32(low, high)));
            for (sums, &activations) in sums.iter_mut().zip(&activations) {
                smmla!(sums[2 * quad], activations, left);
                smmla!(sums[2 * quad + 1], activations, right);
            }
        }
    }
    let count = (2 * P).min(tile.rows - first);
    for (pair, sums) in sums.into_iter().enumerate() {
        for quad in 0..4 {
            let (left, right) = (sums[2 * quad], sums[2 * quad + 1]);
            let rows = [
                vcombine_s32(vget_low_s32(left), vget_low_s32(right)),
                vcombine_s32(vget_high_s32(left), vget_high_s32(right)),
            ];
            for (odd, values) in rows.into_iter().enumerate() {
                let row = 2 * pair + odd;
                if row < count {
                    let at = out[(first + row) * ldc + half * 16 + quad * 4..][..4].as_mut_ptr();
                    // SAFETY: `at` has 4 elements.
                    unsafe { vst1q_s32(at, values) };
                }
            }
        }
    }
    count
}

/// See [`crate::isa::Supported::fma_tile`].
///
/// # Safety
/// The tile passed `FmaTile::check`.
#[target_feature(enable = "neon")]
pub(super) unsafe fn fma_tile(tile: FmaTile<'_>, out: &mut [f32], ldc: usize) {
    let mut row = 0;
    while row < tile.rows {
        // SAFETY: the caller's promise, passed on; row + R ≤ rows.
        row += unsafe {
            match tile.rows - row {
                1 => fma_rows::<1>(tile, row, out, ldc),
                2 => fma_rows::<2>(tile, row, out, ldc),
                _ => fma_rows::<3>(tile, row, out, ldc),
            }
        };
    }
}

/// Rows `first .. first + R` times 32 columns: 8·R accumulators.
///
/// # Safety
/// As [`fma_tile`], and `first + R ≤ tile.rows`.
#[target_feature(enable = "neon")]
unsafe fn fma_rows<const R: usize>(tile: FmaTile<'_>, first: usize, out: &mut [f32], ldc: usize) -> usize {
    let mut sums = [[vdupq_n_f32(0.0); 8]; R];
    if tile.accumulate {
        for (row, sums) in sums.iter_mut().enumerate() {
            let at = out[(first + row) * ldc..][..TILE].as_ptr();
            for (column, sum) in sums.iter_mut().enumerate() {
                // SAFETY: `at` has 32 elements.
                *sum = unsafe { vld1q_f32(at.add(column * 4)) };
            }
        }
    }
    let a = tile.a.as_ptr().wrapping_add(first * tile.lda);
    for i in 0..tile.k {
        let mut values = [0f32; R];
        for (row, value) in values.iter_mut().enumerate() {
            // SAFETY: `check`: row first + r has k values.
            *value = unsafe { *a.add(row * tile.lda + i) };
        }
        for column in 0..8 {
            // SAFETY: `check`: b has k rows of 32 values.
            let b = unsafe { vld1q_f32(tile.b.as_ptr().add(i * tile.ldb + column * 4)) };
            for (sums, &value) in sums.iter_mut().zip(&values) {
                sums[column] = vfmaq_n_f32(sums[column], b, value);
            }
        }
    }
    for (row, sums) in sums.into_iter().enumerate() {
        let at = out[(first + row) * ldc..][..TILE].as_mut_ptr();
        for (column, sum) in sums.into_iter().enumerate() {
            // SAFETY: `at` has 32 elements.
            unsafe { vst1q_f32(at.add(column * 4), sum) };
        }
    }
    R
}

/// See [`crate::isa::Supported::dot_peak`].
///
/// # Safety
/// The processor has the dot-product extension.
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn dot_peak(rounds: u64) -> u64 {
    let mut sums = [vdupq_n_s32(0); 24];
    let (a, b) = (std::hint::black_box(vdupq_n_s8(3)), std::hint::black_box(vdupq_n_s8(-5)));
    for _ in 0..rounds {
        for sum in &mut sums {
            sdot!(*sum, b, a, 0);
        }
    }
    std::hint::black_box(sums);
    rounds * 24 * 16 * 2
}

/// See [`crate::isa::Supported::dot_peak`].
///
/// # Safety
/// The processor has the INT8 matrix extension.
#[target_feature(enable = "neon,i8mm")]
pub(super) unsafe fn i8mm_peak(rounds: u64) -> u64 {
    let mut sums = [vdupq_n_s32(0); 24];
    let (a, b) = (std::hint::black_box(vdupq_n_s8(3)), std::hint::black_box(vdupq_n_s8(-5)));
    for _ in 0..rounds {
        for sum in &mut sums {
            smmla!(*sum, a, b);
        }
    }
    std::hint::black_box(sums);
    rounds * 24 * 32 * 2
}

/// See [`crate::isa::Supported::fma_peak`].
///
/// # Safety
/// None beyond the target's baseline.
#[target_feature(enable = "neon")]
pub(super) unsafe fn fma_peak(rounds: u64) -> u64 {
    let mut sums = [vdupq_n_f32(0.0); 24];
    let (a, b) = (std::hint::black_box(vdupq_n_f32(0.5)), std::hint::black_box(vdupq_n_f32(0.25)));
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = vfmaq_f32(b, *sum, a);
        }
    }
    std::hint::black_box(sums);
    rounds * 24 * 4 * 2
}
