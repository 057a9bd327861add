//! Elementary functions in plain IEEE-754 single operations: the same bits wherever addition, subtraction and
//! multiplication round to nearest, which an OpenCL device also promises (its division and square root need not).
//!
//! Error bounds are the largest found against `f64` over the range (dense sampling, asserted in the tests). Coefficients
//! are minimax fits for the stated intervals. All functions are branch-free, so loops over them vectorise.

#![allow(clippy::inline_always, reason = "they must be compiled inside each target_feature function")]
#![allow(clippy::many_single_char_names, reason = "the letters of the formulas")]
#![allow(clippy::approx_constant, reason = "a minimax coefficient is near a constant, not one")]
#![allow(clippy::excessive_precision, reason = "coefficients are printed as the f32 they are")]

#[cfg(target_arch = "x86_64")]
pub(crate) mod vectors;

/// Adding 1.5·2²³ leaves no fraction bits, so the addition itself rounds half to even; the low bits of the sum are the
/// integer in two's complement.
pub(crate) const ROUNDER: f32 = 12_582_912.0;
/// Largest INT8 code; −128 is never used.
pub const MAX_CODE: f32 = 127.0;
/// log₂ e.
pub const LOG2_E: f32 = std::f32::consts::LOG2_E;

/// Whether this thread keeps subnormal numbers and rounds to nearest, which everything here rests on.
pub fn environment_is_default() -> bool {
    use std::hint::black_box;
    let (one, unit) = (black_box(1f32), black_box(f32::EPSILON / 2.0));
    let keeps_subnormals = black_box(f32::MIN_POSITIVE) * black_box(0.5) > 0.0;
    // Half a unit in the last place: a tie goes to even, both ways.
    let is_nearest = one + unit <= one && -one - unit >= -one && one + unit * black_box(1.25) > one;
    keeps_subnormals && is_nearest
}

/// Rounds half to even; |x| ≤ 2²².
#[inline(always)]
pub fn round_half_even(x: f32) -> f32 {
    (x + ROUNDER) - ROUNDER
}

/// Coefficients of `2^f` for |f| ≤ ½, highest first.
pub(crate) const EXP2_FRACTION: [f32; 6] =
    [0.001_326_472_7, 0.009_671_513, 0.055_507_336, 0.240_222_42, 0.693_147, 1.0];

/// `2^f` for |f| ≤ ½.
#[inline(always)]
fn exp2_fraction(f: f32) -> f32 {
    let [c5, c4, c3, c2, c1, c0] = EXP2_FRACTION;
    ((((c5 * f + c4) * f + c3) * f + c2) * f + c1) * f + c0
}

/// `2^x`. Relative error ≤ 2·10⁻⁷; 0 below −126, 2¹²⁷ above 127, NaN for NaN.
///
/// `x = n + f`, `n` rounded half to even: `2^x = 2ⁿ·(1 + f·P₄(f))`, Horner from the highest coefficient.
#[inline(always)]
pub fn exp2(x: f32) -> f32 {
    let bounded = if x > 127.0 { 127.0 } else { x };
    let bounded = if bounded < -126.0 { -126.0 } else { bounded };
    let shifted = bounded + ROUNDER;
    let f = bounded - (shifted - ROUNDER);
    let p = exp2_fraction(f);
    // p is in [0.7, 1.42] and n in −126..=127: adding n to the exponent bits stays within normal numbers.
    let scaled = f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23));
    if x >= -126.0 {
        scaled
    } else if x < -126.0 {
        0.0
    } else {
        x
    }
}

/// `ln 2` in two parts; a product of the first with an exponent is exact.
pub(crate) const LN_2: [f32; 2] = [0.693_359_375, -0.000_212_194_44];
/// Coefficients of `Q₄` in `e^r = 1 + (r + r²·Q₄(r))`, highest first.
pub(crate) const EXP_FRACTION: [f32; 5] = [0.001_381_446_7, 0.008_368_781, 0.041_668_393, 0.166_665_2, 0.499_999_94];

/// `e^x`. Relative error ≤ 9·10⁻⁸ on −87..88; 0 below −87, `e⁸⁸` above 88, NaN for NaN.
///
/// `n` = x·log₂e rounded half to even, `r = (x − n·C₁) − n·C₂` with `C₁ + C₂ = ln 2` and `n·C₁` exact,
/// `e^x = 2ⁿ·(1 + (r + r²·Q₄(r)))`.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let bounded = if x > 88.0 { 88.0 } else { x };
    let bounded = if bounded < -87.0 { -87.0 } else { bounded };
    let shifted = bounded * LOG2_E + ROUNDER;
    let n = shifted - ROUNDER;
    let [high, low] = LN_2;
    let r = (bounded - n * high) - n * low;
    let [q4, q3, q2, q1, q0] = EXP_FRACTION;
    let q = (((q4 * r + q3) * r + q2) * r + q1) * r + q0;
    let p = (q * (r * r) + r) + 1.0;
    let scaled = f32::from_bits(p.to_bits().wrapping_add(shifted.to_bits() << 23));
    if x >= -87.0 {
        scaled
    } else if x < -87.0 {
        0.0
    } else {
        x
    }
}

/// [`recip`] starts from this minus the bits of its argument.
pub(crate) const RECIP_SEED: u32 = 0x7ef3_1200;

/// `1/x` for 2⁻¹²⁵ ≤ x ≤ 2¹²⁵. Relative error ≤ 1.5·10⁻⁷. An integer seed (5 %) and three Newton steps
/// `y ← y·(2 − x·y)`.
#[inline(always)]
pub fn recip(x: f32) -> f32 {
    let mut y = f32::from_bits(RECIP_SEED.wrapping_sub(x.to_bits()));
    y *= 2.0 - x * y;
    y *= 2.0 - x * y;
    y * (2.0 - x * y)
}

/// `1/√x` for normal x > 0. Relative error ≤ 1.6·10⁻⁷. An integer seed (3.4 %) and three Newton steps
/// `y ← y·(1.5 − (x/2)·(y·y))`.
#[inline(always)]
pub fn rsqrt(x: f32) -> f32 {
    let half = 0.5 * x;
    let mut y = f32::from_bits(0x5f37_6400u32.wrapping_sub(x.to_bits() >> 1));
    y *= 1.5 - half * (y * y);
    y *= 1.5 - half * (y * y);
    y * (1.5 - half * (y * y))
}

/// `1/(1 + e^−x)`. Absolute error ≤ 1.8·10⁻⁷; the exponent is capped at 80, so it never is below 1.8·10⁻³⁵.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    let negated = if x < -80.0 { 80.0 } else { -x };
    recip(1.0 + exp(negated))
}

/// `x·sigmoid(x)`. Absolute error ≤ 2.2·10⁻⁷·max(1, |x|).
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// `0.044715·√(8/π)` and `√(8/π)`.
pub(crate) const GELU: [f32; 2] = [0.071_354_814, 1.595_769_1];

/// `x/2·(1 + tanh(√(2/π)·(x + 0.044715x³)))`, computed as `x·sigmoid(x·(√(8/π) + 0.044715·√(8/π)·x²))`, which is the
/// same function without its cancellation. Absolute error ≤ 2.2·10⁻⁷·max(1, |x|).
#[inline(always)]
pub fn gelu_tanh(x: f32) -> f32 {
    let [cube, linear] = GELU;
    x * sigmoid(x * ((x * x) * cube + linear))
}

/// `tanh x`. Relative error ≤ 1.9·10⁻⁷. Below 0.625 `x + x·z·P₄(z)` with `z = x²`, else `1 − 2/(e^2|x| + 1)` with x's sign.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let z = x * x;
    let mut p = -0.005_717_045;
    p = p * z + 0.020_650_588;
    p = p * z + -0.053_743_497;
    p = p * z + 0.133_314_91;
    p = p * z + -0.333_332_84;
    let small = (p * z) * x + x;
    let magnitude = f32::from_bits(x.to_bits() & 0x7fff_ffff);
    let doubled = if magnitude > 20.0 { 40.0 } else { magnitude + magnitude };
    let large = 1.0 - 2.0 * recip(exp(doubled) + 1.0);
    let signed = f32::from_bits(large.to_bits() | (x.to_bits() & 0x8000_0000));
    if magnitude < 0.625 {
        small
    } else if magnitude >= 0.625 {
        signed
    } else {
        x
    }
}

/// Rounds to the nearest FP16 value, half to even, as a conversion there and back does: infinities from 65,520 on, steps
/// of 2⁻²⁴ below 2⁻¹⁴, NaN for NaN.
#[inline(always)]
pub fn round_f16(x: f32) -> f32 {
    let bits = x.to_bits();
    let sign = bits & 0x8000_0000;
    let magnitude = bits & 0x7fff_ffff;
    // Normal numbers: ten fraction bits stay. Ties to even through the lowest bit that stays.
    let rounded = (magnitude + 0x0fff + ((magnitude >> 13) & 1)) & !0x1fff;
    let normal = if rounded >= 0x4780_0000 { 0x7f80_0000 } else { rounded };
    // Subnormal numbers: next to 0.5 an f32 has steps of 2⁻²⁴.
    let subnormal = ((f32::from_bits(magnitude) + 0.5) - 0.5).to_bits();
    let value = if magnitude < 0x3880_0000 { subnormal } else { normal };
    let value = if magnitude > 0x7f80_0000 { magnitude } else { value };
    f32::from_bits(value | sign)
}

/// The INT8 code of `x` given the reciprocal of the scale: `clip(round_half_even(x · inverse), −127, 127)`; −127 for NaN.
#[inline(always)]
pub fn code(x: f32, inverse: f32) -> i8 {
    let scaled = x * inverse;
    let scaled = if scaled > -MAX_CODE { scaled } else { -MAX_CODE };
    let scaled = if scaled < MAX_CODE { scaled } else { MAX_CODE };
    (scaled + ROUNDER).to_bits() as u8 as i8
}

/// `round_half_even(127·2^x)` for x ≤ 0: the INT8 code, 0..=127, of a probability relative to the largest one. The same
/// number as rounding 127 times [`exp2`], without the cases that cannot occur: below −32 the code is 0 either way.
#[inline(always)]
pub fn exp2_code(x: f32) -> i32 {
    let bounded = if x > -32.0 { x } else { -32.0 };
    let shifted = bounded + ROUNDER;
    let f = bounded - (shifted - ROUNDER);
    let scaled = f32::from_bits(exp2_fraction(f).to_bits().wrapping_add(shifted.to_bits() << 23));
    ((scaled * MAX_CODE + ROUNDER).to_bits() & 0xff) as i32
}

/// Scale and reciprocal scale of values whose largest magnitude is `largest`: `s = largest·(1/127)`, `1/s = 127·recip(largest)`.
/// 1 and 1 where `largest` is below 2⁻¹⁰⁰ (all codes are then zero) or not finite.
#[inline(always)]
pub fn dynamic_scale(largest: f32) -> (f32, f32) {
    if (7.888_609e-31..=1e37).contains(&largest) {
        (largest * (1.0 / MAX_CODE), MAX_CODE * recip(largest))
    } else {
        (1.0, 1.0)
    }
}

/// Lanes of every reduction.
pub const LANES: usize = 16;

/// Sum of `LANES` partial sums in a fixed tree: lane `l` takes lane `l + 8`, then `l + 4`, `l + 2`, `l + 1`.
#[inline(always)]
pub fn fold_lanes(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] += lanes[lane + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// `Σ term(x)` in the fixed order of the `w8a8` path: element `i` goes to lane `i mod 16`, ascending; then [`fold_lanes`].
#[inline(always)]
pub fn lane_sum(values: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &value) in lanes.iter_mut().zip(chunk) {
            *lane += term(value);
        }
    }
    for (lane, &value) in lanes.iter_mut().zip(rest) {
        *lane += term(value);
    }
    fold_lanes(lanes)
}

/// Largest magnitude, whatever the order; the largest NaN if there is one.
#[inline(always)]
pub fn largest_magnitude(values: &[f32]) -> f32 {
    // Magnitude bits order like the numbers, so an integer maximum does, and NaN is not lost.
    let mut lanes = [0u32; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane = (*lane).max(value.to_bits() & 0x7fff_ffff);
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane = (*lane).max(value.to_bits() & 0x7fff_ffff);
    }
    f32::from_bits(lanes.into_iter().fold(0, u32::max))
}

#[cfg(test)]
#[allow(clippy::float_cmp, clippy::similar_names, reason = "values that are exact by construction; exp and exp2")]
mod tests {
    use super::*;

    fn sweep(low: f32, high: f32) -> impl Iterator<Item = f32> {
        const STEPS: u32 = 200_000;
        (0..=STEPS).map(move |step| low + (high - low) * (step as f32 / STEPS as f32))
    }

    fn worst(values: impl Iterator<Item = f32>, error: impl Fn(f32) -> f64) -> f64 {
        values.map(error).fold(0.0, f64::max)
    }

    fn relative(got: f32, want: f64) -> f64 {
        ((f64::from(got) - want) / want).abs()
    }

    #[test]
    fn errors_are_within_the_documented_bounds() {
        let exact = |x: f32| f64::from(x);
        let exp2_error = worst(sweep(-126.0, 127.0).chain(sweep(-1.0, 1.0)), |x| relative(exp2(x), exact(x).exp2()));
        let exp_error = worst(sweep(-87.0, 88.0).chain(sweep(-1.0, 1.0)), |x| relative(exp(x), exact(x).exp()));
        let everywhere = || sweep(1.0, 4.0).chain((-125..125).map(|power| 1.3 * 2f32.powi(power)));
        let recip_error = worst(everywhere(), |x| relative(recip(x), 1.0 / exact(x)));
        let rsqrt_error = worst(everywhere(), |x| relative(rsqrt(x), 1.0 / exact(x).sqrt()));
        let sigmoid_of = |x: f64| 1.0 / (1.0 + (-x).exp());
        let sigmoid_error =
            worst(sweep(-100.0, 100.0).chain(sweep(-8.0, 8.0)), |x| (exact(sigmoid(x)) - sigmoid_of(exact(x))).abs());
        let scaled = |got: f32, want: f64, x: f32| (exact(got) - want).abs() / exact(x).abs().max(1.0);
        let silu_error = worst(sweep(-100.0, 100.0).chain(sweep(-8.0, 8.0)), |x| {
            scaled(silu(x), exact(x) * sigmoid_of(exact(x)), x)
        });
        let gelu_error = worst(sweep(-100.0, 100.0).chain(sweep(-8.0, 8.0)), |x| {
            let wide = exact(x);
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (wide + 0.044_715 * wide * wide * wide);
            scaled(gelu_tanh(x), 0.5 * wide * (1.0 + inner.tanh()), x)
        });
        let tanh_error = worst(sweep(-30.0, 30.0).chain(sweep(-1.0, 1.0)).filter(|&x| x != 0.0), |x| {
            relative(tanh(x), exact(x).tanh())
        });
        println!(
            "exp2 {exp2_error:.2e}, exp {exp_error:.2e}, recip {recip_error:.2e}, rsqrt {rsqrt_error:.2e}, sigmoid {sigmoid_error:.2e}, silu {silu_error:.2e}, gelu {gelu_error:.2e}, tanh {tanh_error:.2e}"
        );
        assert!(exp2_error <= 2e-7, "exp2 {exp2_error:e}");
        assert!(exp_error <= 9e-8, "exp {exp_error:e}");
        assert!(recip_error <= 1.5e-7, "recip {recip_error:e}");
        assert!(rsqrt_error <= 1.6e-7, "rsqrt {rsqrt_error:e}");
        assert!(sigmoid_error <= 1.8e-7, "sigmoid {sigmoid_error:e}");
        assert!(silu_error <= 2.2e-7, "silu {silu_error:e}");
        assert!(gelu_error <= 2.2e-7, "gelu {gelu_error:e}");
        assert!(tanh_error <= 1.9e-7, "tanh {tanh_error:e}");
    }

    #[test]
    fn the_ends_of_the_number_line_are_tame() {
        assert_eq!(exp2(0.0).to_bits(), 1f32.to_bits());
        assert_eq!(exp2(-126.0).to_bits(), f32::MIN_POSITIVE.to_bits());
        assert_eq!(exp2(-126.1).to_bits(), 0);
        assert_eq!(exp2(f32::NEG_INFINITY).to_bits(), 0);
        assert_eq!(exp2(f32::INFINITY).to_bits(), 2f32.powi(127).to_bits());
        assert_eq!(exp(0.0).to_bits(), 1f32.to_bits());
        assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
        assert!(exp(f32::INFINITY).is_finite());
        for function in [exp2, exp, gelu_tanh, silu, tanh, round_f16] {
            assert!(function(f32::NAN).is_nan());
        }
        for x in [1e20, 3e38f32] {
            assert_eq!(gelu_tanh(x).to_bits(), x.to_bits());
            assert!(gelu_tanh(-x).is_finite() && silu(-x).is_finite());
            assert_eq!(tanh(x).to_bits(), 1f32.to_bits());
            assert_eq!(tanh(-x).to_bits(), (-1f32).to_bits());
        }
    }

    #[test]
    fn fp16_rounding_is_a_conversion_there_and_back() {
        let check = |bits: u32| {
            let x = f32::from_bits(bits);
            let want = half::f16::from_f32(x).to_f32();
            let got = round_f16(x);
            assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{x:e}: {got:e}, not {want:e}");
        };
        // Every sign, exponent and leading fraction bits, with the last bits around the ties.
        for top in 0..=0xffffu32 {
            for low in [0, 1, 0x0fff, 0x1000, 0x1001, 0x1fff, 0x2000, 0x3000, 0x7fff, 0x8000, 0xffff] {
                check(top << 16 | low);
            }
        }
    }

    #[test]
    fn codes_round_half_to_even_and_clip() {
        for half in -600..600 {
            let x = half as f32 / 2.0;
            assert_eq!(code(x, 1.0), x.round_ties_even().clamp(-127.0, 127.0) as i8);
        }
        assert_eq!((code(f32::INFINITY, 1.0), code(f32::NEG_INFINITY, 1.0), code(f32::NAN, 1.0)), (127, -127, -127));
        for x in sweep(-40.0, 0.0).chain([f32::NEG_INFINITY, -1e30]) {
            assert_eq!(exp2_code(x) as f32, (exp2(x) * 127.0).round_ties_even(), "{x}");
        }
        assert_eq!(dynamic_scale(0.0), (1.0, 1.0));
        assert_eq!(dynamic_scale(f32::NAN), (1.0, 1.0));
        let (scale, inverse) = dynamic_scale(5.0);
        assert_eq!((code(5.0, inverse), code(-5.0, inverse)), (127, -127));
        assert!((scale * inverse - 1.0).abs() < 3e-7);
    }

    #[test]
    fn lane_sums_take_every_element_once() {
        for len in [0, 1, 15, 16, 17, 100] {
            let values: Vec<f32> = (0..len).map(|n| n as f32).collect();
            assert_eq!(lane_sum(&values, |x| x), (0..len).sum::<i32>() as f32);
            assert_eq!(largest_magnitude(&values.iter().map(|x| -x).collect::<Vec<_>>()), (len - 1).max(0) as f32);
        }
    }
}
