//! Micro-kernels: one row tile times one tile column. One file per instruction set beside the generic one.
//!
//! A micro-kernel keeps a 12 × 32 accumulator tile in registers over the whole reduction and reads both operands where
//! they lie: four activations at a time (one broadcast per row) and 128 bytes of weights (32 columns × 4 inputs).

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx_vnni;
#[cfg(target_arch = "aarch64")]
mod neon;
mod scalar;

use crate::Isa;
use crate::isa::Supported;
use crate::multiversion::multiversion;
use trefoil_weights::tile::TILE;

/// Most rows of a tile.
pub(crate) const TILE_ROWS: usize = 12;

/// Groups of four inputs in a step of a product's loop: a reduction is a multiple of 32 long.
pub(crate) const STEP: usize = trefoil_weights::tile::TILE / trefoil_weights::tile::GROUP;

/// `$body` for each group of a step, written out: what is done in between depends on its number.
#[cfg(target_arch = "x86_64")]
macro_rules! for_each_group {
    ($group:ident => $body:block) => {
        crate::kernel::for_each_group!($group => $body, 0 1 2 3 4 5 6 7)
    };
    ($group:ident => $body:block, $($number:literal)*) => {{
        const { assert!([$($number),*].len() == crate::kernel::STEP) };
        $({
            const $group: usize = $number;
            $body
        })*
    }};
}
#[cfg(target_arch = "x86_64")]
pub(crate) use for_each_group;

/// Rows of a block, whole row tiles and at most `most` (a multiple of them), so that `rows` are cut into as few blocks as
/// possible of about the same size: a last block of a few rows would pay for the panels of a whole one.
pub(crate) fn even_step(rows: usize, most: usize) -> usize {
    even_step_of(rows, most, TILE_ROWS)
}

/// As [`even_step`] in tiles of `tile` rows.
pub(crate) fn even_step_of(rows: usize, most: usize, tile: usize) -> usize {
    debug_assert!(most.is_multiple_of(tile) && most > 0, "blocks of {most} rows");
    rows.div_ceil(rows.div_ceil(most).max(1)).next_multiple_of(tile).max(tile)
}

/// Operands of an INT8 tile.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DotTile<'a> {
    /// Codes, row-major.
    pub(crate) a: &'a [i8],
    /// Elements from one row of `a` to the next.
    pub(crate) lda: usize,
    /// Rows, 1 ..= [`TILE_ROWS`].
    pub(crate) rows: usize,
    /// One tile column: `k`·32 codes in tile order.
    pub(crate) weights: &'a [i8],
    /// Length of the reduction, a multiple of 32.
    pub(crate) k: usize,
    /// `Σ a[r][..k]` per row, read where [`Supported::needs_row_sums`].
    pub(crate) row_sums: &'a [i32],
}

/// Operands of an f32 tile.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FmaTile<'a> {
    /// Values, row-major.
    pub(crate) a: &'a [f32],
    /// Elements from one row of `a` to the next.
    pub(crate) lda: usize,
    /// Rows, 1 ..= [`TILE_ROWS`].
    pub(crate) rows: usize,
    /// `k` rows of 32 values.
    pub(crate) b: &'a [f32],
    /// Elements from one row of `b` to the next.
    pub(crate) ldb: usize,
    /// Length of the reduction.
    pub(crate) k: usize,
    /// Whether `out` holds the sum so far. The order of additions is that of one long reduction either way.
    pub(crate) accumulate: bool,
}

impl DotTile<'_> {
    fn check(&self, isa: Supported, out: usize, ldc: usize) {
        assert!((1..=TILE_ROWS).contains(&self.rows) && self.k.is_multiple_of(TILE), "a tile of {self:?}");
        assert!(self.a.len() >= (self.rows - 1) * self.lda + self.k, "activations of the tile");
        assert!(self.weights.len() >= self.k * TILE, "weights of the tile");
        assert!(out >= (self.rows - 1) * ldc + TILE, "accumulators of the tile");
        assert!(!isa.needs_row_sums() || self.row_sums.len() >= self.rows, "row sums of the tile");
    }
}

impl FmaTile<'_> {
    fn check(&self, out: usize, ldc: usize) {
        assert!((1..=TILE_ROWS).contains(&self.rows), "rows of the tile");
        assert!(self.a.len() >= (self.rows - 1) * self.lda + self.k, "left operand of the tile");
        assert!(self.k == 0 || self.b.len() >= (self.k - 1) * self.ldb + TILE, "right operand of the tile");
        assert!(out >= (self.rows - 1) * ldc + TILE, "accumulators of the tile");
    }
}

impl Supported {
    /// Whether [`Supported::dot_tile`] reads [`DotTile::row_sums`].
    pub(crate) fn needs_row_sums(self) -> bool {
        matches!(self.isa(), Isa::AmxInt8 | Isa::Avx512Vnni | Isa::AvxVnni)
    }

    /// `out[r][c] = Σ_i a[r][i]·w[i][c]` for `rows` rows (stride `ldc`) and 32 columns. Exact.
    #[inline]
    pub(crate) fn dot_tile(self, tile: DotTile<'_>, out: &mut [i32], ldc: usize) {
        tile.check(self, out.len(), ldc);
        match self.isa() {
            // SAFETY: `Supported` vouches for the instruction set, `check` for the bounds that each kernel states.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni | Isa::AmxInt8 => unsafe { avx512::dot_tile(tile, out, ldc) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => unsafe { avx_vnni::dot_tile(tile, out, ldc) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { avx2::dot_tile(tile, out, ldc) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDotprod => unsafe { neon::dot_tile(tile, out, ldc) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm => unsafe { neon::dot_tile_i8mm(tile, out, ldc) },
            _ => scalar::dot_tile(tile, out, ldc),
        }
    }

    /// `out[r][c] (+)= Σ_i a[r][i]·b[i][c]`, ascending in `i`, for `rows` rows (stride `ldc`) and 32 columns. Fused
    /// multiply-add where the instruction set has it.
    #[inline]
    pub(crate) fn fma_tile(self, tile: FmaTile<'_>, out: &mut [f32], ldc: usize) {
        tile.check(out.len(), ldc);
        match self.isa() {
            // SAFETY: `Supported` vouches for the instruction set, `check` for the bounds that each kernel states.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni | Isa::AmxInt8 => unsafe { avx512::fma_tile(tile, out, ldc) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::AvxVnni => unsafe { avx2::fma_tile(tile, out, ldc) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDotprod | Isa::NeonI8mm => unsafe { neon::fma_tile(tile, out, ldc) },
            _ => scalar::fma_tile(tile, out, ldc),
        }
    }

    /// Runs INT8 dot products from registers only, about `rounds` × 24 instructions; returns the operations done (2 per
    /// product), or `None` where the instruction set has no such instruction.
    pub(crate) fn dot_peak(self, rounds: u64) -> Option<u64> {
        match self.isa() {
            // SAFETY: `Supported` vouches for the instruction set; no memory is touched.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni => Some(unsafe { avx512::dot_peak(rounds) }),
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::AmxInt8 => Some(unsafe { amx::dot_peak(rounds) }),
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => Some(unsafe { avx_vnni::dot_peak(rounds) }),
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Some(unsafe { avx2::dot_peak(rounds) }),
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDotprod => Some(unsafe { neon::dot_peak(rounds) }),
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm => Some(unsafe { neon::i8mm_peak(rounds) }),
            _ => None,
        }
    }

    /// As [`Supported::dot_peak`] for f32 multiply-adds.
    pub(crate) fn fma_peak(self, rounds: u64) -> Option<u64> {
        match self.isa() {
            // SAFETY: `Supported` vouches for the instruction set; no memory is touched.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512Vnni | Isa::AmxInt8 => Some(unsafe { avx512::fma_peak(rounds) }),
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 | Isa::AvxVnni => Some(unsafe { avx2::fma_peak(rounds) }),
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDotprod | Isa::NeonI8mm => Some(unsafe { neon::fma_peak(rounds) }),
            _ => None,
        }
    }
}

/// `sums[r] = Σ a[r·lda ..][..k]`.
pub(crate) fn row_sums(isa: Supported, a: &[i8], lda: usize, k: usize, sums: &mut [i32]) {
    #[cfg(target_arch = "x86_64")]
    if isa.has_avx512_vnni() {
        // SAFETY: `Supported` vouches for the instruction set.
        return unsafe { avx512::row_sums(a, lda, k, sums) };
    }
    row_sums_generic(isa, a, lda, k, sums);
}

multiversion! {
    fn row_sums_generic(a: &[i8], lda: usize, k: usize, sums: &mut [i32]) {
        for (row, sum) in sums.iter_mut().enumerate() {
            *sum = a[row * lda..][..k].iter().map(|&code| i32::from(code)).sum();
        }
    }
}

/// Asks for the cache lines of `count` elements from `at` on. Nothing is read, so any address will do.
#[inline(always)]
#[allow(clippy::inline_always, reason = "one instruction")]
pub(crate) fn prefetch<T>(at: *const T, count: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let at = at.cast::<i8>();
        let bytes = count * size_of::<T>();
        for offset in (0..bytes).step_by(crate::workspace::LINE).chain(bytes.checked_sub(1)) {
            // SAFETY: a hint; it neither reads nor faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(offset)) };
        }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = (at, count);
}

/// Four consecutive codes as one 32-bit operand.
///
/// # Safety
/// Four bytes from `at` on are readable.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
#[allow(clippy::inline_always, reason = "it must be compiled inside each target_feature function")]
pub(crate) unsafe fn four(at: *const i8) -> i32 {
    const { assert!(trefoil_weights::tile::GROUP == 4) };
    // SAFETY: the caller's promise; no alignment is needed.
    unsafe { at.cast::<i32>().read_unaligned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn codes(len: usize, seed: u32) -> Vec<i8> {
        let mut state = seed;
        (0..len)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                // All bytes, −128 too: a tile must be exact for them as well.
                (state >> 24) as i8
            })
            .collect()
    }

    #[test]
    fn blocks_are_few_and_even() {
        for (rows, most, want) in [(0, 396, 12), (1, 396, 12), (396, 396, 396), (397, 396, 204), (1560, 396, 396)] {
            assert_eq!(even_step(rows, most), want, "{rows} rows in blocks of {most}");
        }
        for rows in 1..2000 {
            let step = even_step(rows, 396);
            assert!(step <= 396 && step.is_multiple_of(TILE_ROWS));
            assert!(rows.div_ceil(step) <= rows.div_ceil(396), "{rows} rows in {step}");
        }
    }

    /// Buffers of exactly the promised size, so that an interpreter or a sanitizer sees every byte beyond it: the test for
    /// `tools/sanitize`, few products and nothing random.
    #[test]
    fn tiles_touch_their_own_bytes_only() {
        let k = TILE;
        for isa in Isa::available() {
            let isa = Supported::check(isa).unwrap();
            for rows in (1..=TILE_ROWS).filter(|rows| !cfg!(miri) || [1, 7, TILE_ROWS].contains(rows)) {
                let (lda, ldc) = (k + rows % 3, TILE + rows % 2);
                let (a, weights) = (codes((rows - 1) * lda + k, 1), codes(k * TILE, 2));
                let mut sums = vec![0; rows];
                row_sums(isa, &a, lda, k, &mut sums);
                let mut out = vec![7i32; (rows - 1) * ldc + TILE];
                isa.dot_tile(DotTile { a: &a, lda, rows, weights: &weights, k, row_sums: &sums }, &mut out, ldc);
                let (b, values) = (vec![0.5f32; (k - 1) * ldc + TILE], vec![2f32; (rows - 1) * lda + k]);
                let mut products = vec![1f32; (rows - 1) * ldc + TILE];
                let tile = FmaTile { a: &values, lda, rows, b: &b, ldb: ldc, k, accumulate: true };
                isa.fma_tile(tile, &mut products, ldc);
                for (row, column) in [(0, 0), (0, TILE - 1), (rows - 1, 0), (rows - 1, TILE - 1)] {
                    let factor = |i: usize| i32::from(weights[trefoil_weights::tile::off(i, column, k)]);
                    let want: i32 = (0..k).map(|i| i32::from(a[row * lda + i]) * factor(i)).sum();
                    let at = row * ldc + column;
                    assert_eq!(out[at], want, "{} row {row} of {rows}, column {column}", isa.isa());
                    assert_eq!(products[at].to_bits(), (1.0 + k as f32).to_bits(), "{}", isa.isa());
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 48 }))]
        #[test]
        fn int8_tiles_are_exact(rows in 1usize..=TILE_ROWS, tiles in 1usize..6, gap in 0usize..40, extreme in any::<bool>(), seed in any::<u32>()) {
            let k = tiles * TILE;
            let (lda, ldc) = (k + gap, TILE + gap);
            let mut a = codes((rows - 1) * lda + k, seed);
            let mut weights = codes(k * TILE, !seed);
            if extreme {
                // The largest sums of pairs, where a saturating instruction would show.
                for code in &mut a {
                    *code = if *code < 0 { -128 } else { 127 };
                }
                for code in &mut weights {
                    *code = if *code < 0 { -127 } else { 127 };
                }
            }
            for code in &mut weights {
                *code = (*code).max(-127);
            }
            let sums: Vec<i32> = (0..rows).map(|row| a[row * lda..][..k].iter().map(|&code| i32::from(code)).sum()).collect();
            for isa in Isa::available() {
                let isa = Supported::check(isa).unwrap();
                let mut computed_sums = vec![0; rows];
                row_sums(isa, &a, lda, k, &mut computed_sums);
                prop_assert_eq!(&computed_sums, &sums);
                let mut out = vec![7i32; (rows - 1) * ldc + TILE];
                isa.dot_tile(DotTile { a: &a, lda, rows, weights: &weights, k, row_sums: &sums }, &mut out, ldc);
                for row in 0..rows {
                    for column in 0..TILE {
                        let want: i32 = (0..k)
                            .map(|i| i32::from(a[row * lda + i]) * i32::from(weights[trefoil_weights::tile::off(i, column, k)]))
                            .sum();
                        prop_assert_eq!(out[row * ldc + column], want, "{} row {} column {}", isa.isa(), row, column);
                    }
                }
                // Gaps between rows are left alone.
                prop_assert!(out.chunks(ldc).flat_map(|row| row.iter().skip(TILE)).all(|&value| value == 7));
            }
        }

        #[test]
        fn f32_tiles_match_f64(rows in 1usize..=TILE_ROWS, k in 0usize..70, gap in 0usize..20, accumulate in any::<bool>(), seed in any::<u32>()) {
            let (lda, ldb, ldc) = (k + gap, TILE + gap, TILE + gap);
            let value = |code: i8| f32::from(code) / 77.0;
            let a: Vec<f32> = codes((rows - 1) * lda + k, seed).into_iter().map(value).collect();
            let b: Vec<f32> = codes(k.saturating_sub(1) * ldb + TILE, !seed).into_iter().map(value).collect();
            for isa in Isa::available() {
                let isa = Supported::check(isa).unwrap();
                let mut out = vec![0.5f32; (rows - 1) * ldc + TILE];
                isa.fma_tile(FmaTile { a: &a, lda, rows, b: &b, ldb, k, accumulate }, &mut out, ldc);
                for row in 0..rows {
                    for column in 0..TILE {
                        let products: Vec<f64> = (0..k).map(|i| f64::from(a[row * lda + i]) * f64::from(b[i * ldb + column])).collect();
                        let want: f64 = products.iter().sum::<f64>() + if accumulate { 0.5 } else { 0.0 };
                        let magnitude: f64 = products.iter().map(|p| p.abs()).sum::<f64>() + 0.5;
                        // Every addition and product rounds once, relative to at most the sum of magnitudes.
                        let bound = magnitude * (2 * k + 2) as f64 * f64::from(f32::EPSILON) / 2.0;
                        let got = f64::from(out[row * ldc + column]);
                        prop_assert!((got - want).abs() <= bound, "{} {} {}", isa.isa(), got, want);
                    }
                }
            }
        }
    }
}
