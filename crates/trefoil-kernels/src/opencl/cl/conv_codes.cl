// INT8 convolution of frames of codes (conv/int8.rs), and the norm that makes such frames (conv/codes.rs).
//
// A frame's scale and the code of zero are found on the device: parameters[0] is the scale, [1] its reciprocal, [2] the code.

// Where SiLU is smallest, and its value there.
#define SILU_VALLEY -1.2784646f
#define SILU_LEAST -0.27846455f

// √C over the norm of a pixel; NaN stays NaN.
static float pixel_factor(const __global float *x, uint channels, float root, __local float *shared)
{
    V(float) lanes = (V(float))(0.0f);
    for (uint at = LANE; at < channels; at += LANES) {
        const V(float) value = load_lanes(x + at, lanes_before(at, channels), 0.0f);
        lanes = lanes + value * value;
    }
    const float norm = sqrt(fold_sum(lanes, shared));
    return norm != norm ? norm : root / (norm > 1e-12f ? norm : 1e-12f);
}

// Least and greatest value of x·factor·gain of every row of a frame, zero among them; NaN where one is not finite. Item
// (lane, 0, z): row z; ranges[2·z].
__kernel __attribute__((reqd_work_group_size(ROW_ITEMS, 1, 1))) void norm_ranges(
    const __global float *input, const __global float *gain, float root, __global float *ranges, uint channels, uint width)
{
    __local float shared_floats[LANES];
    __local int shared_integers[LANES];
    const uint row = get_global_id(2);
    const V(float) zero = (V(float))(0.0f);
    V(float) least = zero, greatest = zero, spoilt = zero;
    for (uint pixel = 0; pixel < width; pixel++) {
        const __global float *x = input + ((size_t)(row + 1) * (width + 2) + pixel + 1) * channels;
        const float factor = pixel_factor(x, channels, root, shared_floats);
        for (uint at = LANE; at < channels; at += LANES) {
            const uint valid = lanes_before(at, channels);
            const V(float) value = load_lanes(x + at, valid, 0.0f) * factor * load_lanes(gain + at, valid, 0.0f);
            // A sum of zeros that any NaN or infinity spoils.
            spoilt = spoilt + value * 0.0f;
            least = value < least ? value : least;
            greatest = value > greatest ? value : greatest;
        }
    }
    int lows[LANES], highs[LANES], spoils[LANES];
    gather_lanes(V(as_int)(least), shared_integers, lows);
    gather_lanes(V(as_int)(greatest), shared_integers, highs);
    gather_lanes(V(as_int)(spoilt), shared_integers, spoils);
    float low = 0.0f, high = 0.0f, spoil = 0.0f;
    for (uint lane = 0; lane < LANES; lane++) {
        low = as_float(lows[lane]) < low ? as_float(lows[lane]) : low;
        high = as_float(highs[lane]) > high ? as_float(highs[lane]) : high;
        spoil = spoil + as_float(spoils[lane]);
    }
    if (LANE == 0) {
        ranges[2 * row] = low + spoil;
        ranges[2 * row + 1] = high + spoil;
    }
}

// Scale, its reciprocal and the code of zero from the ranges of all rows: SiLU falls to its valley and rises from there.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void code_parameters(
    const __global float *ranges, uint rows, __global float *parameters)
{
    float low = 0.0f, high = 0.0f, spoil = 0.0f;
    for (uint row = 0; row < rows; row++) {
        const float least = ranges[2 * row], greatest = ranges[2 * row + 1];
        spoil = spoil + least * 0.0f;
        low = least < low ? least : low;
        high = greatest > high ? greatest : high;
    }
    low = low <= SILU_VALLEY ? SILU_LEAST : math_first(math_activate((V(float))(low), ACT_SILU));
    high = math_first(math_activate((V(float))(high), ACT_SILU));
    float scale = (high - low) / 255.0f + spoil;
    scale = scale == 0.0f ? 1.0f : scale;
    float zero = -128.0f - rint(low / scale);
    zero = zero > -128.0f ? zero : -128.0f;
    zero = zero < 127.0f ? zero : 127.0f;
    parameters[0] = scale;
    parameters[1] = 1.0f / scale;
    parameters[2] = scale != scale ? 0.0f : zero;
}

// Codes of SiLU(x·factor·gain) of every pixel, border included, which is zero in the codes of the day; and for every pixel the sum of
// its codes and those of the next two, where products need it. Item (lane, 0, z): padded row z. Codes of a pixel are `stride` apart;
// those behind the channels stay 0.
__kernel __attribute__((reqd_work_group_size(ROW_ITEMS, 1, 1))) void norm_codes(
    const __global float *input, const __global float *gain, float root, const __global float *parameters,
    __global char *codes, __global int *runs, uint channels, uint stride, uint height, uint width)
{
    __local float shared_floats[LANES];
    __local int shared_integers[LANES];
    const uint row = get_global_id(2), line = width + 2;
    const float inverse = parameters[1], zero = parameters[2];
    // Sums of the last two pixels.
    int older = 0, newer = 0;
    for (uint pixel = 0; pixel < line; pixel++) {
        const size_t at_pixel = (size_t)row * line + pixel;
        const bool is_border = row == 0 || row == height + 1 || pixel == 0 || pixel == width + 1;
        const __global float *x = input + at_pixel * channels;
        const float factor = is_border ? 0.0f : pixel_factor(x, channels, root, shared_floats);
        V(int) lanes = 0;
        for (uint at = LANE; at < channels; at += LANES) {
            const uint valid = lanes_before(at, channels);
            const V(float) normed = load_lanes(x + at, valid, 0.0f) * factor * load_lanes(gain + at, valid, 0.0f);
            V(float) value = is_border ? (V(float))(zero) : math_activate(normed, ACT_SILU) * inverse + zero;
            value = value > -128.0f ? value : (V(float))(-128.0f);
            value = value < 127.0f ? value : (V(float))(127.0f);
            // The low byte of the mantissa, as a signed number.
            const V(int) code = (V(as_int)(value + ROUNDER) << 24) >> 24;
            // Behind the channels come zeros: a pixel has whole tiles of codes.
            store_codes(V(convert_char)(code), codes + at_pixel * stride + at, valid);
            lanes = lanes + (LANE_NUMBERS < (int)valid ? code : (V(int))(0));
        }
        int all[LANES];
        gather_lanes(lanes, shared_integers, all);
        int sum = 0;
        for (uint lane = 0; lane < LANES; lane++)
            sum += all[lane];
        if (LANE == 0 && pixel >= 2)
            runs[at_pixel - 2] = older + newer + sum;
        older = newer;
        newer = sum;
    }
}

// out(pixel) ← bias + s_w · Σ over frames of scale·(Σ codes·w − zero·Σ w), or added to it. Items as in `float_product`.
__kernel __attribute__((reqd_work_group_size(GROUP_ITEMS, 1, 1))) void codes_product(
    const __global char *codes0, const __global char *codes1, const __global char *codes2,
    const __global int *runs0, const __global int *runs1, const __global int *runs2,
    const __global float *parameters0, const __global float *parameters1, const __global float *parameters2,
    uint present, uint frames, uint stride, const __global char *weights, const __global int *weight_sums,
    const __global float *scales, const __global float *bias,
    __global float *out, ulong out_at, uint out_pixel, uint out_line, uint line, uint width, uint pixels, uint outputs, uint flags)
{
    const uint inner = get_global_id(0) * (WIDTH * SLOTS), tile_column = get_global_id(2);
    const uint first = get_global_id(1) * ROWS, count = min((uint)ROWS, pixels - first);
    const uint run = 3 * stride;
    V(float) all[ROWS * SLOTS];
    for (uint at = 0; at < ROWS * SLOTS; at++)
        all[at] = (V(float))(0.0f);
    for (uint frame = 0; frame < frames; frame++) {
        if (!((present >> frame) & 1u))
            continue;
        const __global char *codes = frame == 0 ? codes0 : frame == 1 ? codes1 : codes2;
        const __global int *runs = frame == 0 ? runs0 : frame == 1 ? runs1 : runs2;
        const __global float *parameters = frame == 0 ? parameters0 : frame == 1 ? parameters1 : parameters2;
        V(int) totals[ROWS * SLOTS];
        for (uint row = 0; row < 3; row++) {
            const size_t start = (size_t)row * line + first;
            const __global char *panel = weights + (((size_t)tile_column * frames + frame) * 3 + row) * run * TILE;
            V(int) part[ROWS * SLOTS];
            dot_tile(codes + start * stride, stride, count, (const __global int *)panel + inner, run / 4, runs + start, part,
                     SLOTS);
            for (uint at = 0; at < ROWS * SLOTS; at++)
                totals[at] = row == 0 ? part[at] : totals[at] + part[at];
        }
        const float scale = parameters[0];
        const int zero = (int)parameters[2];
        for (uint slot = 0; slot < SLOTS; slot++) {
            const V(int) of_weights =
                LOAD((tile_column * frames + frame) * TILE + inner + slot * WIDTH, weight_sums) * zero;
            for (uint offset = 0; offset < ROWS; offset++)
                all[offset * SLOTS + slot] =
                    all[offset * SLOTS + slot] + scale * V(convert_float)(totals[offset * SLOTS + slot] - of_weights);
        }
    }
    for (uint offset = 0; offset < count; offset++) {
        const uint pixel = first + offset, y = pixel / line, x = pixel % line;
        if (x >= width)
            continue;
        for (uint slot = 0; slot < SLOTS; slot++)
            all[offset * SLOTS + slot] =
                all[offset * SLOTS + slot] * LOAD(tile_column * TILE + inner + slot * WIDTH, scales);
        store_outputs(all + offset * SLOTS, bias, out + out_at + (size_t)y * out_line + (size_t)x * out_pixel,
                      tile_column * TILE + inner, outputs, flags);
    }
}
