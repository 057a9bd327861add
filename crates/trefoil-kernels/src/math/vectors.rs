//! Functions of [`crate::math`] on AVX-512 registers, bit for bit where the result is a number. What cannot occur is left out, and
//! several registers go through each step together, because one alone would wait for its own chain of operations.

#![allow(clippy::wildcard_imports, reason = "the intrinsics of one instruction set")]

use super::{EXP_FRACTION, GELU, LN_2, LOG2_E, MAX_CODE, RECIP_SEED, ROUNDER};
use std::arch::x86_64::*;

/// [`crate::math::gelu_tanh`].
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn gelu_tanh<const N: usize>(values: [__m512; N]) -> [__m512; N] {
    let [cube, linear] = GELU;
    let mut inner = values;
    for inner in &mut inner {
        let factor = _mm512_mul_ps(_mm512_mul_ps(*inner, *inner), _mm512_set1_ps(cube));
        *inner = _mm512_mul_ps(*inner, _mm512_add_ps(factor, _mm512_set1_ps(linear)));
    }
    times_sigmoid(values, inner)
}

/// [`crate::math::silu`].
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn silu<const N: usize>(values: [__m512; N]) -> [__m512; N] {
    times_sigmoid(values, values)
}

/// `x·sigmoid(u)`, with `x` NaN where `u` is.
#[inline]
#[target_feature(enable = "avx512f")]
fn times_sigmoid<const N: usize>(values: [__m512; N], mut u: [__m512; N]) -> [__m512; N] {
    let one = _mm512_set1_ps(1.0);
    let mut shifted = u;
    for (u, shifted) in u.iter_mut().zip(&mut shifted) {
        // e^−u: above 87 it adds nothing to 1, whether it is 0 or e^−87.
        *u = _mm512_min_ps(_mm512_max_ps(*u, _mm512_set1_ps(-80.0)), _mm512_set1_ps(87.0));
        *shifted = _mm512_add_ps(_mm512_mul_ps(*u, _mm512_set1_ps(-LOG2_E)), _mm512_set1_ps(ROUNDER));
    }
    let [high, low] = LN_2;
    let mut remainder = u;
    for (remainder, shifted) in remainder.iter_mut().zip(&shifted) {
        let n = _mm512_sub_ps(*shifted, _mm512_set1_ps(ROUNDER));
        // n·C₁ is exact, so that fusing changes nothing.
        let first = _mm512_fnmsub_ps(n, _mm512_set1_ps(high), *remainder);
        *remainder = _mm512_sub_ps(first, _mm512_mul_ps(n, _mm512_set1_ps(low)));
    }
    let [highest, rest @ ..] = EXP_FRACTION;
    let mut power = [_mm512_set1_ps(highest); N];
    for coefficient in rest {
        for (q, &r) in power.iter_mut().zip(&remainder) {
            *q = _mm512_add_ps(_mm512_mul_ps(*q, r), _mm512_set1_ps(coefficient));
        }
    }
    for ((q, &r), &shifted) in power.iter_mut().zip(&remainder).zip(&shifted) {
        let p = _mm512_add_ps(_mm512_add_ps(_mm512_mul_ps(*q, _mm512_mul_ps(r, r)), r), one);
        let exponent = _mm512_slli_epi32::<23>(_mm512_castps_si512(shifted));
        *q = _mm512_add_ps(one, _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), exponent)));
    }
    let divisor = power;
    let mut quotient = divisor;
    for y in &mut quotient {
        let seed = _mm512_set1_epi32(RECIP_SEED.cast_signed());
        *y = _mm512_castsi512_ps(_mm512_sub_epi32(seed, _mm512_castps_si512(*y)));
    }
    for _ in 0..3 {
        for (y, &x) in quotient.iter_mut().zip(&divisor) {
            *y = _mm512_mul_ps(*y, _mm512_sub_ps(_mm512_set1_ps(2.0), _mm512_mul_ps(x, *y)));
        }
    }
    for (y, &x) in quotient.iter_mut().zip(&values) {
        *y = _mm512_mul_ps(x, *y);
    }
    quotient
}

/// [`gelu_tanh`] of a register in five pieces, for who has other work in between. Called in the order in which they stand here.
#[derive(Clone, Copy)]
pub(crate) struct GeluPieces {
    /// `u`, then `r`, then `1 + e^−u`.
    first: __m512,
    /// `n` in its low bits.
    shifted: __m512,
    /// The polynomial, then the reciprocal.
    second: __m512,
}

impl GeluPieces {
    /// Nothing yet.
    #[inline]
    pub(crate) fn new() -> GeluPieces {
        // SAFETY: an array of plain numbers as a register of them.
        let zero = unsafe { std::mem::transmute::<[f32; 16], __m512>([0.0; 16]) };
        GeluPieces { first: zero, shifted: zero, second: zero }
    }

    /// How often 2 divides `e^−u`.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(crate) fn exponent(&mut self, value: __m512) {
        let [cube, linear] = GELU;
        let factor = _mm512_mul_ps(_mm512_mul_ps(value, value), _mm512_set1_ps(cube));
        let u = _mm512_mul_ps(value, _mm512_add_ps(factor, _mm512_set1_ps(linear)));
        self.first = _mm512_min_ps(_mm512_max_ps(u, _mm512_set1_ps(-80.0)), _mm512_set1_ps(87.0));
        self.shifted = _mm512_add_ps(_mm512_mul_ps(self.first, _mm512_set1_ps(-LOG2_E)), _mm512_set1_ps(ROUNDER));
    }

    /// What is left then, and the start of its power.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(crate) fn remainder(&mut self) {
        let [high, low] = LN_2;
        let n = _mm512_sub_ps(self.shifted, _mm512_set1_ps(ROUNDER));
        let first = _mm512_fnmsub_ps(n, _mm512_set1_ps(high), self.first);
        let r = _mm512_sub_ps(first, _mm512_mul_ps(n, _mm512_set1_ps(low)));
        let [highest, next, after, ..] = EXP_FRACTION;
        let q = _mm512_add_ps(_mm512_mul_ps(_mm512_set1_ps(highest), r), _mm512_set1_ps(next));
        self.second = _mm512_add_ps(_mm512_mul_ps(q, r), _mm512_set1_ps(after));
        self.first = r;
    }

    /// `1 + e^−u`.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(crate) fn divisor(&mut self) {
        let one = _mm512_set1_ps(1.0);
        let (r, mut q) = (self.first, self.second);
        let [_, _, _, rest @ ..] = EXP_FRACTION;
        for coefficient in rest {
            q = _mm512_add_ps(_mm512_mul_ps(q, r), _mm512_set1_ps(coefficient));
        }
        let p = _mm512_add_ps(_mm512_add_ps(_mm512_mul_ps(q, _mm512_mul_ps(r, r)), r), one);
        let exponent = _mm512_slli_epi32::<23>(_mm512_castps_si512(self.shifted));
        self.first = _mm512_add_ps(one, _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p), exponent)));
    }

    /// The start of its reciprocal.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(crate) fn reciprocal(&mut self) {
        let seed = _mm512_set1_epi32(RECIP_SEED.cast_signed());
        self.second = _mm512_castsi512_ps(_mm512_sub_epi32(seed, _mm512_castps_si512(self.first)));
        self.newton();
        self.newton();
    }

    #[inline]
    #[target_feature(enable = "avx512f")]
    fn newton(&mut self) {
        let y = self.second;
        self.second = _mm512_mul_ps(y, _mm512_sub_ps(_mm512_set1_ps(2.0), _mm512_mul_ps(self.first, y)));
    }

    /// The result for the value that it began with.
    #[inline]
    #[target_feature(enable = "avx512f")]
    pub(crate) fn value(&mut self, value: __m512) -> __m512 {
        self.newton();
        _mm512_mul_ps(value, self.second)
    }
}

/// [`crate::math::round_f16`].
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn round_f16(x: __m512) -> __m512 {
    let half = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
    let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
    _mm512_mask_mov_ps(_mm512_cvtph_ps(half), is_nan, x)
}

/// [`crate::math::code`] of every lane, in the lowest eight bits.
#[inline]
#[target_feature(enable = "avx512f")]
pub(crate) fn codes(value: __m512, inverse: __m512) -> __m512i {
    let scaled = _mm512_mul_ps(value, inverse);
    // NaN gives the second operand, as the comparison there does.
    let scaled = _mm512_max_ps(scaled, _mm512_set1_ps(-MAX_CODE));
    let scaled = _mm512_min_ps(scaled, _mm512_set1_ps(MAX_CODE));
    _mm512_castps_si512(_mm512_add_ps(scaled, _mm512_set1_ps(ROUNDER)))
}

#[cfg(test)]
mod tests {
    use super::super::LANES;
    use super::*;
    use crate::{Isa, math};

    type OfRegisters = unsafe fn([__m512; 2]) -> [__m512; 2];
    type OfNumber = fn(f32) -> f32;

    #[target_feature(enable = "avx512f")]
    fn rounded(x: [__m512; 2]) -> [__m512; 2] {
        [round_f16(x[0]), round_f16(x[1])]
    }

    #[target_feature(enable = "avx512f")]
    fn in_pieces(x: [__m512; 2]) -> [__m512; 2] {
        x.map(|x| {
            let mut pieces = GeluPieces::new();
            pieces.exponent(x);
            pieces.remainder();
            pieces.divisor();
            pieces.reciprocal();
            pieces.value(x)
        })
    }

    /// `function` of sixteen numbers at a time, in two registers.
    #[target_feature(enable = "avx512f")]
    fn apply(function: OfRegisters, values: &[f32]) -> Vec<f32> {
        let mut out = vec![0f32; values.len()];
        for (out, values) in out.as_chunks_mut::<LANES>().0.iter_mut().zip(values.as_chunks::<LANES>().0) {
            // SAFETY: sixteen numbers each way; the caller has the instruction set.
            unsafe {
                let x = _mm512_loadu_ps(values.as_ptr());
                let [first, second] = function([x, x]);
                assert_eq!(_mm512_cmp_epi32_mask::<4>(_mm512_castps_si512(first), _mm512_castps_si512(second)), 0);
                _mm512_storeu_ps(out.as_mut_ptr(), first);
            }
        }
        out
    }

    #[test]
    fn registers_give_the_bits_of_the_formulas() {
        if !Isa::Avx512Vnni.is_available() {
            eprintln!("skipped: no AVX-512 VNNI");
            return;
        }
        let step = if cfg!(miri) { 1 << 18 } else { 1 << 11 };
        let mut values: Vec<f32> = (0..u32::MAX / step).map(|at| f32::from_bits(at * step + at % step)).collect();
        // Where almost everything that a model holds lies, and the ties of FP16.
        values
            .extend((0..1 << 18).filter(|at| !cfg!(miri) || at % 1024 == 0).map(|at| (at - (1 << 17)) as f32 / 4096.0));
        values.extend(
            (0..0xffffu32)
                .filter(|top| !cfg!(miri) || top % 256 == 0)
                .flat_map(|top| [0x0fff, 0x1000, 0x1001, 0x3000, 0xffff].map(|low| f32::from_bits(top << 16 | low))),
        );
        values.truncate(values.len() / LANES * LANES);
        let functions: [(OfRegisters, OfNumber); 4] = [
            (gelu_tanh, math::gelu_tanh),
            (in_pieces, math::gelu_tanh),
            (silu, math::silu),
            (rounded, math::round_f16),
        ];
        for (at, (of_registers, function)) in functions.into_iter().enumerate() {
            // SAFETY: the processor has the instruction set.
            let got = unsafe { apply(of_registers, &values) };
            for (&x, got) in values.iter().zip(got) {
                let want = function(x);
                let is_nan = x.is_nan() && got.is_nan() && want.is_nan();
                assert!(got.to_bits() == want.to_bits() || is_nan, "function {at} of {x:e}: {got:e}, not {want:e}");
            }
        }
    }
}
