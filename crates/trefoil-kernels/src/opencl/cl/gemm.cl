// INT8 GEMM with its fused epilogue (gemm/int8.rs, gemm/epilogue.rs), attention's first product, and the row sums.

#define FLAG_ROW_SCALES 1u
#define FLAG_BIAS 2u
#define FLAG_ADAPTER 4u
#define FLAG_ROUND_F16 8u
#define FLAG_GATE 16u
#define FLAG_HIDDEN_ROW_SCALES 32u

// Where a value of WIDTH columns goes; `valid` of them exist.
static void store_value(V(float) y, uint sink, uint flags, float inverse, V(float) gate, __global void *out, size_t at, uint valid)
{
    if (sink == SINK_CODES) {
        store_codes(math_code(y, (V(float))(inverse)), (__global char *)out + at, valid);
        return;
    }
    __global float *floats = (__global float *)out + at;
    if (sink == SINK_RESIDUAL) {
        V(float) state = load_lanes(floats, valid, 0.0f);
        y = state + ((flags & FLAG_GATE) ? y * gate : y);
    }
    if (flags & FLAG_ROUND_F16)
        y = math_round_f16(y);
    store_lanes(y, floats, valid);
}

// y = act(acc·(s_x·s_j) + b_j + acc'·(s_h·(factor·s_Bj))), stored. Item (x, y): columns x·WIDTH·SLOTS .., rows y·block_rows ...
__kernel __attribute__((reqd_work_group_size(GROUP_ITEMS, 1, 1))) void gemm_w8a8(
    const __global char *input, ulong input_at, uint input_stride, const __global float *input_scales, ulong input_scales_at,
    float input_scale, const __global int *input_sums,
    const __global char *weights, ulong weights_at, const __global float *scales, ulong scales_at,
    const __global float *bias, ulong bias_at,
    const __global char *hidden, ulong hidden_at, uint hidden_stride, const __global float *hidden_scales,
    ulong hidden_scales_at, float hidden_scale, const __global int *hidden_sums,
    const __global char *up, ulong up_at, const __global float *up_scales, ulong up_scales_at, float factor,
    __global void *out, ulong out_at, uint out_stride, const __global float *gate, ulong gate_at, float inverse,
    uint flags, uint sink, uint activation, uint rows, uint block_rows, uint padded_in, uint padded_rank, uint d_out)
{
    const uint column = get_global_id(0) * (WIDTH * SLOTS);
    const uint first = get_global_id(1) * block_rows, last = min(first + block_rows, rows);
    // The bytes of a tile column run on contiguously; four inputs of a column are one 32-bit operand.
    const size_t lane = (size_t)(column % TILE) * 4, tile_column = column / TILE;
    const __global int *base = (const __global int *)(weights + weights_at + tile_column * padded_in * TILE + lane);
    const __global int *delta_base = (const __global int *)(up + up_at + tile_column * padded_rank * TILE + lane);
    V(float) column_scale[SLOTS], column_bias[SLOTS], delta_scale[SLOTS], column_gate[SLOTS];
    uint valid[SLOTS];
    for (uint slot = 0; slot < SLOTS; slot++) {
        const uint at = column + slot * WIDTH;
        valid[slot] = at < d_out ? min(d_out - at, (uint)WIDTH) : 0;
        column_scale[slot] = load_lanes(scales + scales_at + at, valid[slot], 1.0f);
        column_bias[slot] = (flags & FLAG_BIAS) ? load_lanes(bias + bias_at + at, valid[slot], 0.0f) : (V(float))(0.0f);
        delta_scale[slot] =
            (flags & FLAG_ADAPTER) ? factor * load_lanes(up_scales + up_scales_at + at, valid[slot], 0.0f) : (V(float))(0.0f);
        column_gate[slot] = (flags & FLAG_GATE) ? load_lanes(gate + gate_at + at, valid[slot], 0.0f) : (V(float))(0.0f);
    }
    for (uint row = first; row < last; row += ROWS) {
        const uint count = min((uint)ROWS, last - row);
        V(int) sums[ROWS * SLOTS], deltas[ROWS * SLOTS];
        dot_tile(input + input_at + (size_t)row * input_stride, input_stride, count, base, padded_in / 4, input_sums + row, sums,
                 SLOTS);
        if (flags & FLAG_ADAPTER)
            dot_tile(hidden + hidden_at + (size_t)row * hidden_stride, hidden_stride, count, delta_base, padded_rank / 4,
                     hidden_sums + row, deltas, SLOTS);
        for (uint offset = 0; offset < count; offset++) {
            const float row_scale =
                (flags & FLAG_ROW_SCALES) ? input_scales[input_scales_at + row + offset] : input_scale;
            for (uint slot = 0; slot < SLOTS; slot++) {
                V(float) y = V(convert_float)(sums[offset * SLOTS + slot]) * (row_scale * column_scale[slot]);
                y = y + column_bias[slot];
                if (flags & FLAG_ADAPTER) {
                    const float delta_row_scale =
                        (flags & FLAG_HIDDEN_ROW_SCALES) ? hidden_scales[hidden_scales_at + row + offset] : hidden_scale;
                    y = y + V(convert_float)(deltas[offset * SLOTS + slot]) * (delta_row_scale * delta_scale[slot]);
                }
                y = math_activate(y, activation);
                store_value(y, sink, flags, inverse, column_gate[slot], out,
                            out_at + (size_t)(row + offset) * out_stride + column + slot * WIDTH, valid[slot]);
            }
        }
    }
}

#ifdef NEEDS_ROW_SUMS
// Σ of `length` codes (a multiple of 32) of rows x·ROW_BATCH .. of head y: sums[y·rows + row].
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void row_sums(
    const __global char *codes, ulong codes_at, uint stride, uint length, __global int *sums, uint rows)
{
    const uint head = get_global_id(1), start = get_global_id(0) * ROW_BATCH, end = min(start + ROW_BATCH, rows);
    for (uint row = start; row < end; row++) {
        const __global char *pointer = codes + codes_at + (size_t)row * stride + (size_t)head * length;
        int16 lanes = 0;
        uint at = 0;
        for (; at + 64 <= length; at += 64) {
            const int16 ones = 0x01010101, four = vload16(0, (const __global int *)(pointer + at));
            VPDPBUSD(lanes, ones, four);
        }
        if (at < length)
            lanes += convert_int16(vload16(0, pointer + at)) + convert_int16(vload16(0, pointer + at + 16));
        const int8 eight = lanes.lo + lanes.hi;
        const int4 four = eight.lo + eight.hi;
        const int2 two = four.lo + four.hi;
        sums[(size_t)head * rows + row] = two.lo + two.hi;
    }
}
#endif
