// The elementary functions of math.rs, operation by operation. See there for methods and error bounds.

#define ROUNDER 12582912.0f
#define MAX_CODE 127.0f

INLINE V(float) math_exp2_fraction(V(float) f)
{
    V(float) p = 0.0013264727f;
    p = p * f + 0.009671513f;
    p = p * f + 0.055507336f;
    p = p * f + 0.24022242f;
    p = p * f + 0.693147f;
    return p * f + 1.0f;
}

INLINE V(float) math_exp2(V(float) x)
{
    V(float) bounded = x > 127.0f ? (V(float))(127.0f) : x;
    bounded = bounded < -126.0f ? (V(float))(-126.0f) : bounded;
    V(float) shifted = bounded + ROUNDER;
    V(float) f = bounded - (shifted - ROUNDER);
    V(float) p = math_exp2_fraction(f);
    V(float) scaled = V(as_float)(V(as_uint)(p) + (V(as_uint)(shifted) << 23));
    V(float) below = x < -126.0f ? (V(float))(0.0f) : x;
    return x >= -126.0f ? scaled : below;
}

INLINE V(float) math_exp(V(float) x)
{
    V(float) bounded = x > 88.0f ? (V(float))(88.0f) : x;
    bounded = bounded < -87.0f ? (V(float))(-87.0f) : bounded;
    V(float) shifted = bounded * 1.44269504f + ROUNDER;
    V(float) n = shifted - ROUNDER;
    V(float) r = (bounded - n * 0.693359375f) - n * -0.00021219444f;
    V(float) q = 0.0013814467f;
    q = q * r + 0.008368781f;
    q = q * r + 0.041668393f;
    q = q * r + 0.1666652f;
    q = q * r + 0.49999994f;
    V(float) p = (q * (r * r) + r) + 1.0f;
    V(float) scaled = V(as_float)(V(as_uint)(p) + (V(as_uint)(shifted) << 23));
    V(float) below = x < -87.0f ? (V(float))(0.0f) : x;
    return x >= -87.0f ? scaled : below;
}

INLINE V(float) math_recip(V(float) x)
{
    V(float) y = V(as_float)(0x7ef31200u - V(as_uint)(x));
    y = y * (2.0f - x * y);
    y = y * (2.0f - x * y);
    return y * (2.0f - x * y);
}

INLINE V(float) math_rsqrt(V(float) x)
{
    V(float) half_x = 0.5f * x;
    V(float) y = V(as_float)(0x5f376400u - (V(as_uint)(x) >> 1));
    y = y * (1.5f - half_x * (y * y));
    y = y * (1.5f - half_x * (y * y));
    return y * (1.5f - half_x * (y * y));
}

INLINE V(float) math_sigmoid(V(float) x)
{
    V(float) negated = x < -80.0f ? (V(float))(80.0f) : -x;
    return math_recip(1.0f + math_exp(negated));
}

INLINE V(float) math_activate(V(float) x, uint activation)
{
    if (activation == ACT_GELU_TANH)
        return x * math_sigmoid(x * ((x * x) * 0.071354814f + 1.5957691f));
    if (activation == ACT_SILU)
        return x * math_sigmoid(x);
    return x;
}

// To the nearest FP16 value, half to even, in integers: no half-precision hardware is asked for.
INLINE V(float) math_round_f16(V(float) x)
{
    V(uint) bits = V(as_uint)(x);
    V(uint) sign = bits & 0x80000000u;
    V(uint) magnitude = bits & 0x7fffffffu;
    V(uint) rounded = (magnitude + 0x0fffu + ((magnitude >> 13) & 1u)) & ~0x1fffu;
    V(uint) normal = rounded >= 0x47800000u ? (V(uint))(0x7f800000u) : rounded;
    V(uint) subnormal = V(as_uint)((V(as_float)(magnitude) + 0.5f) - 0.5f);
    V(uint) value = magnitude < 0x38800000u ? subnormal : normal;
    value = magnitude > 0x7f800000u ? magnitude : value;
    return V(as_float)(value | sign);
}

// `clip(round_half_even(x·inverse), ±127)`; −127 for NaN.
INLINE V(char) math_code(V(float) x, V(float) inverse)
{
    V(float) scaled = x * inverse;
    scaled = scaled > -MAX_CODE ? scaled : (V(float))(-MAX_CODE);
    scaled = scaled < MAX_CODE ? scaled : (V(float))(MAX_CODE);
    return V(convert_char)(V(as_int)(scaled + ROUNDER));
}

// `round_half_even(127·2^x)` for x ≤ 0, as an integer 0..=127.
INLINE V(int) math_exp2_code(V(float) x)
{
    V(float) bounded = x > -32.0f ? x : (V(float))(-32.0f);
    V(float) shifted = bounded + ROUNDER;
    V(float) f = bounded - (shifted - ROUNDER);
    V(float) p = math_exp2_fraction(f);
    V(float) scaled = V(as_float)(V(as_uint)(p) + (V(as_uint)(shifted) << 23));
    return V(as_int)(scaled * MAX_CODE + ROUNDER) & 0xff;
}

// Scale and reciprocal scale of values of a largest magnitude; only its first lane counts.
INLINE float math_first(V(float) x)
{
#if WIDTH == 16
    return x.s0;
#else
    return x;
#endif
}

INLINE float math_dynamic_inverse(float largest, float *scale)
{
    if (largest >= 7.888609e-31f && largest <= 1e37f) {
        *scale = largest * 0.00787401574803149606f;
        return MAX_CODE * math_first(math_recip((V(float))(largest)));
    }
    *scale = 1.0f;
    return 1.0f;
}
