// f32 convolution of frames that lie channels last inside a border of one zero pixel (conv/mod.rs), norm of pixels, and the
// packing of pixels as the right-hand side of a product (attention).
//
// Sums are of `float_tile`, whose compiler may fuse multiplication and addition: these kernels are held to an error bound.

#define PRODUCT_BIAS 1u
#define PRODUCT_ADD 2u

// A row of a tile, stored or added where it belongs; `column` is its first one.
static void store_outputs(const V(float) * values, const __global float *bias, __global float *out, uint column, uint outputs,
                          uint flags)
{
    for (uint slot = 0; slot < SLOTS; slot++) {
        const uint at = column + slot * WIDTH, valid = at < outputs ? min(outputs - at, (uint)WIDTH) : 0;
        V(float) value = values[slot];
        // The bias is padded to whole tiles.
        if (flags & PRODUCT_BIAS)
            value = value + LOAD(at, bias);
        if (flags & PRODUCT_ADD)
            value = load_lanes(out + at, valid, 0.0f) + value;
        store_lanes(value, out + at, valid);
    }
}

// out(pixel) ← Σ over frames and rows of a run of `run_length` consecutive values, `row_stride` apart, times its panel.
//
// Pixels are counted along lines of `line`, of which the first `width` are stored; the next one's runs start `pixel_stride`
// further. Item (x, y, z): columns x·WIDTH·SLOTS .. of the z-th TILE columns, ROWS pixels from y·ROWS on. Past the last
// pixel ROWS more are readable.
__kernel __attribute__((reqd_work_group_size(GROUP_ITEMS, 1, 1))) void float_product(
    const __global float *frame0, const __global float *frame1, const __global float *frame2, uint present, uint frames,
    ulong input_at, uint pixel_stride, uint row_stride, uint run_rows, uint run_length,
    const __global float *weights, const __global float *bias,
    __global float *out, ulong out_at, uint out_pixel, uint out_line, uint line, uint width, uint pixels, uint outputs, uint flags)
{
    const uint inner = get_global_id(0) * (WIDTH * SLOTS), tile_column = get_global_id(2);
    const uint first = get_global_id(1) * ROWS;
    V(float) sums[ROWS * SLOTS];
    for (uint at = 0; at < ROWS * SLOTS; at++)
        sums[at] = (V(float))(0.0f);
    const __global float *panel = weights + (size_t)tile_column * frames * run_rows * run_length * TILE + inner;
    for (uint frame = 0; frame < frames; frame++) {
        const __global float *input = frame == 0 ? frame0 : frame == 1 ? frame1 : frame2;
        input += input_at + (size_t)first * pixel_stride;
        for (uint row = 0; row < run_rows; row++) {
            // A frame of zeros is not multiplied.
            if ((present >> frame) & 1u)
                float_tile(input, pixel_stride, panel, run_length, sums);
            input += row_stride;
            panel += (size_t)run_length * TILE;
        }
    }
    for (uint offset = 0; offset < ROWS; offset++) {
        const uint pixel = first + offset, y = pixel / line, x = pixel % line;
        if (pixel < pixels && x < width)
            store_outputs(sums + offset * SLOTS, bias, out + out_at + (size_t)y * out_line + (size_t)x * out_pixel,
                          tile_column * TILE + inner, outputs, flags);
    }
}

// Winograd's F(2, 3) along the rows (conv/winograd.rs): the four differences of every pair of pixels of `rows` rows of a frame,
// as [point][row][pair][channel], points `plane` apart. Item (lane, y, z): pairs y·chunk .. of row z.
__kernel __attribute__((reqd_work_group_size(ROW_ITEMS, 1, 1))) void winograd_inputs(
    const __global float *frame, ulong frame_at, __global float *out, ulong out_at, ulong plane, uint channels, uint line, uint pairs,
    uint chunk)
{
    const uint row = get_global_id(2), first = get_global_id(1) * chunk, last = min(first + chunk, pairs);
    for (uint pair = first; pair < last; pair++) {
        const __global float *pixel = frame + frame_at + ((size_t)row * line + 2 * pair) * channels;
        __global float *to = out + out_at + ((size_t)row * pairs + pair) * channels;
        for (uint at = LANE; at < channels; at += LANES) {
            const uint valid = lanes_before(at, channels);
            const V(float) d0 = load_lanes(pixel + at, valid, 0.0f), d1 = load_lanes(pixel + channels + at, valid, 0.0f);
            const V(float) d2 = load_lanes(pixel + 2 * channels + at, valid, 0.0f);
            // Of an odd last pair the next line's border, a zero, or the first pixel of the slack; its second output is not stored.
            const V(float) d3 = load_lanes(pixel + 3 * channels + at, valid, 0.0f);
            store_lanes(d0 - d2, to + at, valid);
            store_lanes(d1 + d2, to + plane + at, valid);
            store_lanes(d2 - d1, to + 2 * plane + at, valid);
            store_lanes(d1 - d3, to + 3 * plane + at, valid);
        }
    }
}

// Two neighbouring outputs of every pair from the four sums of products. Items as in `float_product`, pairs for pixels.
__kernel __attribute__((reqd_work_group_size(GROUP_ITEMS, 1, 1))) void winograd_product(
    const __global float *inputs, ulong plane, uint present, uint frames, uint channels, uint pairs,
    const __global float *weights, const __global float *bias,
    __global float *out, ulong out_at, uint out_pixel, uint out_line, uint width, uint count, uint outputs, uint flags)
{
    const uint inner = get_global_id(0) * (WIDTH * SLOTS), tile_column = get_global_id(2);
    const uint first = get_global_id(1) * ROWS;
    V(float) even[ROWS * SLOTS], odd[ROWS * SLOTS];
    const __global float *panel = weights + (size_t)tile_column * 4 * frames * 3 * channels * TILE + inner;
    for (uint point = 0; point < 4; point++) {
        V(float) sums[ROWS * SLOTS];
        for (uint at = 0; at < ROWS * SLOTS; at++)
            sums[at] = (V(float))(0.0f);
        for (uint frame = 0; frame < frames; frame++) {
            const __global float *input = inputs + (frame * 4 + point) * plane + (size_t)first * channels;
            for (uint row = 0; row < 3; row++) {
                if ((present >> frame) & 1u)
                    float_tile(input, channels, panel, channels, sums);
                input += (size_t)pairs * channels;
                panel += (size_t)channels * TILE;
            }
        }
        for (uint at = 0; at < ROWS * SLOTS; at++) {
            even[at] = point == 0 ? sums[at] : point < 3 ? even[at] + sums[at] : even[at];
            odd[at] = point <= 1 ? sums[at] : odd[at] - sums[at];
        }
    }
    for (uint offset = 0; offset < ROWS; offset++) {
        const uint index = first + offset, y = index / pairs, x = index % pairs * 2;
        if (index >= count)
            break;
        __global float *to = out + out_at + (size_t)y * out_line + (size_t)x * out_pixel;
        store_outputs(even + offset * SLOTS, bias, to, tile_column * TILE + inner, outputs, flags);
        if (x + 1 < width)
            store_outputs(odd + offset * SLOTS, bias, to + out_pixel, tile_column * TILE + inner, outputs, flags);
    }
}

// act(x / max(‖x‖₂, 1e-12) · root · gain) over the channels of every pixel (conv/norm.rs). Item (lane, y, z): pixels y·chunk ..
// of row z.
__kernel __attribute__((reqd_work_group_size(ROW_ITEMS, 1, 1))) void pixel_norm(
    const __global float *input, const __global float *gain, float root, uint activation, __global float *out, uint channels,
    uint width, uint chunk)
{
    __local float shared_floats[LANES];
    const uint row = get_global_id(2), first = get_global_id(1) * chunk, last = min(first + chunk, width);
    for (uint pixel = first; pixel < last; pixel++) {
        const size_t base = ((size_t)(row + 1) * (width + 2) + pixel + 1) * channels;
        V(float) lanes = (V(float))(0.0f);
        for (uint at = LANE; at < channels; at += LANES) {
            const V(float) x = load_lanes(input + base + at, lanes_before(at, channels), 0.0f);
            lanes = lanes + x * x;
        }
        const float norm = sqrt(fold_sum(lanes, shared_floats));
        // NaN stays NaN: a comparison with it is false, so its norm must not be replaced.
        const float factor = norm != norm ? norm : root / (norm > 1e-12f ? norm : 1e-12f);
        for (uint at = LANE; at < channels; at += LANES) {
            const uint valid = lanes_before(at, channels);
            const V(float) value =
                load_lanes(input + base + at, valid, 0.0f) * factor * load_lanes(gain + at, valid, 0.0f);
            store_lanes(math_activate(value, activation), out + base + at, valid);
        }
    }
}

// Keys (times `factor`) and values of every pixel of a frame of queries, keys and values as panels of TILE columns: keys
// [pixel / TILE][channel][pixel % TILE], values [channel / TILE][pixel][channel % TILE]. Item x: a pixel, up to whole tiles.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void pack_pixels(
    const __global float *frame, uint channels, uint width, uint pixels, float factor, __global float *keys,
    __global float *values)
{
    const uint pixel = get_global_id(0);
    __global float *key = keys + (size_t)(pixel / TILE) * channels * TILE + pixel % TILE;
    if (pixel >= pixels) {
        for (uint at = 0; at < channels; at++)
            key[(size_t)at * TILE] = 0.0f;
        return;
    }
    const __global float *here =
        frame + ((size_t)(pixel / width + 1) * (width + 2) + pixel % width + 1) * 3 * channels;
    for (uint at = 0; at < channels; at++) {
        key[(size_t)at * TILE] = here[channels + at] * factor;
        values[((size_t)(at / TILE) * pixels + pixel) * TILE + at % TILE] = here[2 * channels + at];
    }
}
