// Operators on whole rows (rows.rs): normalisation with modulation, rotary positions, softmax, quantisation.
//
// Reductions have 16 lanes: element i goes to lane i mod 16, ascending; then lane l takes lane l + 8, l + 4, l + 2, l + 1. With
// WIDTH 16 a work-item has the row and all lanes, with WIDTH 1 a work-item is a lane.

#if WIDTH == 16
#define ROW_ITEMS 1
#define LANE 0
#define LANE_NUMBERS ((int16)(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15))
#else
#define ROW_ITEMS 16
#define LANE get_local_id(0)
#define LANE_NUMBERS 0
#endif

// The elements of a chunk that lie before `end`.
static uint lanes_before(uint at, uint end)
{
    return at < end ? min(end - at, (uint)WIDTH) : 0;
}

// Runs BODY for every chunk of `end` elements: `at` is its first element, `valid` of its lanes exist. Where a work-item has all lanes,
// whole chunks are compiled apart from the last one.
#if WIDTH == 16
#define EACH_CHUNK(end, BODY)                                                                                                  \
    {                                                                                                                          \
        uint at = 0;                                                                                                           \
        for (; at + 16 <= (end); at += 16) {                                                                                   \
            const uint valid = 16;                                                                                             \
            BODY                                                                                                               \
        }                                                                                                                      \
        if (at < (end)) {                                                                                                      \
            const uint valid = (end) - at;                                                                                     \
            BODY                                                                                                               \
        }                                                                                                                      \
    }
#else
#define EACH_CHUNK(end, BODY)                                                                                                  \
    for (uint at = LANE; at < (end); at += LANES) {                                                                            \
        const uint valid = 1;                                                                                                  \
        BODY                                                                                                                   \
    }
#endif
// The lanes that exist, `other` in the rest.
#define VALID_LANES(value, other) (LANE_NUMBERS < (int)valid ? (value) : (other))

static float fold_sum(V(float) lanes, __local float *shared)
{
#if WIDTH == 16
    const float8 eight = lanes.lo + lanes.hi;
    const float4 four = eight.lo + eight.hi;
    const float2 two = four.lo + four.hi;
    return two.lo + two.hi;
#else
    const uint lane = get_local_id(0);
    barrier(CLK_LOCAL_MEM_FENCE);
    shared[lane] = lanes;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint width = LANES / 2; width > 0; width /= 2) {
        if (lane < width)
            shared[lane] = shared[lane] + shared[lane + width];
        barrier(CLK_LOCAL_MEM_FENCE);
    }
    return shared[0];
#endif
}

// All lanes, for what is not a sum of floats.
static void gather_lanes(V(int) lanes, __local int *shared, int *all)
{
#if WIDTH == 16
    vstore16(lanes, 0, all);
#else
    barrier(CLK_LOCAL_MEM_FENCE);
    shared[get_local_id(0)] = lanes;
    barrier(CLK_LOCAL_MEM_FENCE);
    for (uint lane = 0; lane < LANES; lane++)
        all[lane] = shared[lane];
#endif
}

typedef struct {
    const __global float *row;
    uint operation, modulation;
    // mean, or the largest value of a softmax
    float shift;
    float factor;
    // gain and bias, or scale and shift
    const __global float *first, *second;
    const __global float *cosines, *sines;
    // 0 without rotary positions
    uint pairs;
} RowPlan;

// RMSNorm's value before rotation.
INLINE V(float) rms_value(const RowPlan *plan, uint at, uint valid)
{
    return (load_lanes(plan->row + at, valid, 0.0f) * plan->factor) * load_lanes(plan->first + at, valid, 0.0f);
}

// (a, b) → (a·cos − b·sin, a·sin + b·cos) on adjacent pairs of every head. `pair` is the first one's number in its head, where heads
// have whole chunks.
INLINE V(float) rotated_value(const RowPlan *plan, uint at, uint valid, uint pair)
{
#if WIDTH == 16
    const float16 value = rms_value(plan, at, valid);
    float8 cosine, sine;
    if (plan->pairs % 8 == 0) {
        cosine = vload8(0, plan->cosines + pair);
        sine = vload8(0, plan->sines + pair);
    } else {
        float cosines[8], sines[8];
        for (uint next = 0; next < 8; next++) {
            cosines[next] = plan->cosines[(at / 2 + next) % plan->pairs];
            sines[next] = plan->sines[(at / 2 + next) % plan->pairs];
        }
        cosine = vload8(0, cosines);
        sine = vload8(0, sines);
    }
    float16 turned;
    turned.even = value.even * cosine - value.odd * sine;
    turned.odd = value.even * sine + value.odd * cosine;
    return turned;
#else
    const float even = rms_value(plan, at & ~1u, valid), odd = rms_value(plan, at | 1u, valid);
    const float cosine = plan->cosines[at / 2 % plan->pairs], sine = plan->sines[at / 2 % plan->pairs];
    return at & 1u ? even * sine + odd * cosine : even * cosine - odd * sine;
#endif
}

// The pair of the next chunk.
INLINE uint next_pair(uint pair, uint pairs)
{
    return pair + 8 < pairs ? pair + 8 : 0;
}

// The values of `valid` elements from `at` on, before they are stored.
INLINE V(float) row_value(const RowPlan *plan, uint at, uint valid, uint pair)
{
    if (plan->operation == OP_RMS_NORM)
        return plan->pairs ? rotated_value(plan, at, valid, pair) : rms_value(plan, at, valid);
    V(float) x = load_lanes(plan->row + at, valid, 0.0f);
    if (plan->operation == OP_SCALE)
        return x * plan->factor;
    if (plan->operation == OP_SOFTMAX)
        return math_exp(x - plan->shift) * plan->factor;
    if (plan->operation == OP_LAYER_NORM) {
        x = (x - plan->shift) * plan->factor;
        if (plan->modulation != MODULATION_NONE) {
            const V(float) first = load_lanes(plan->first + at, valid, 0.0f), second = load_lanes(plan->second + at, valid, 0.0f);
            x = plan->modulation == MODULATION_AFFINE ? x * first + second : x * (1.0f + first) + second;
        }
    }
    return x;
}

INLINE void one_row(
    const __global float *input, ulong input_at, uint input_stride, uint operation, uint modulation,
    const __global float *first, ulong first_at, const __global float *second, ulong second_at, float eps, float per_column,
    const __global float *cosines, const __global float *sines, uint pairs,
    __global void *out, ulong out_at, uint out_stride, __global float *scales, ulong scales_at, float inverse,
    uint flags, uint sink, uint columns, uint row, __local float *shared_floats, __local int *shared_integers)
{
    const V(float) zero = (V(float))(0.0f);
    const size_t out_row = out_at + (size_t)row * out_stride;
    RowPlan plan;
    plan.row = input + input_at + (size_t)row * input_stride;
    plan.operation = operation;
    plan.modulation = modulation;
    plan.shift = 0.0f;
    plan.factor = 1.0f;
    plan.first = first + first_at;
    plan.second = second + second_at;
    plan.cosines = cosines + (size_t)row * pairs;
    plan.sines = sines + (size_t)row * pairs;
    plan.pairs = pairs;

    if (operation == OP_LAYER_NORM) {
        V(float) lanes = zero;
        EACH_CHUNK(columns, lanes = lanes + load_lanes(plan.row + at, valid, 0.0f);)
        const float mean = fold_sum(lanes, shared_floats) * per_column;
        lanes = zero;
        EACH_CHUNK(columns, {
            const V(float) off = load_lanes(plan.row + at, valid, 0.0f) - mean;
            lanes = lanes + VALID_LANES(off * off, zero);
        })
        plan.shift = mean;
        plan.factor = math_first(math_rsqrt((V(float))(fold_sum(lanes, shared_floats) * per_column + eps)));
    } else if (operation == OP_RMS_NORM) {
        V(float) lanes = zero;
        EACH_CHUNK(columns, {
            const V(float) x = load_lanes(plan.row + at, valid, 0.0f);
            lanes = lanes + x * x;
        })
        plan.factor = math_first(math_rsqrt((V(float))(fold_sum(lanes, shared_floats) * per_column + eps)));
    } else if (operation == OP_SOFTMAX) {
        V(float) lanes = (V(float))(-INFINITY);
        EACH_CHUNK(columns, {
            const V(float) x = load_lanes(plan.row + at, valid, -INFINITY);
            lanes = x > lanes ? x : lanes;
        })
        int all[LANES];
        gather_lanes(V(as_int)(lanes), shared_integers, all);
        float largest = -INFINITY;
        for (uint lane = 0; lane < LANES; lane++)
            largest = as_float(all[lane]) > largest ? as_float(all[lane]) : largest;
        lanes = zero;
        EACH_CHUNK(columns, {
            const V(float) x = math_exp(load_lanes(plan.row + at, valid, 0.0f) - largest);
            lanes = lanes + VALID_LANES(x, zero);
            // Kept where floats go anyway, so that no power is computed twice.
            if (sink == SINK_F32)
                store_lanes(x, (__global float *)out + out_row + at, valid);
        })
        plan.shift = largest;
        plan.factor = math_first(math_recip((V(float))(fold_sum(lanes, shared_floats))));
        if (sink == SINK_F32) {
            plan.row = (const __global float *)out + out_row;
            plan.operation = OP_SCALE;
        }
    }

    if (sink == SINK_DYNAMIC) {
        // Magnitude bits order like the numbers, so an integer maximum does, and NaN is not lost.
        V(int) lanes = 0;
        uint pair = 0;
        EACH_CHUNK(columns, {
            const V(int) bits = V(as_int)(row_value(&plan, at, valid, pair)) & 0x7fffffff;
            lanes = max(lanes, VALID_LANES(bits, (V(int))(0)));
            pair = next_pair(pair, pairs);
        })
        int all[LANES];
        gather_lanes(lanes, shared_integers, all);
        int largest = 0;
        for (uint lane = 0; lane < LANES; lane++)
            largest = max(largest, all[lane]);
        float scale;
        inverse = math_dynamic_inverse(as_float(largest), &scale);
        if (LANE == 0)
            scales[scales_at + row] = scale;
    }
    uint pair = 0;
    if (sink == SINK_F32) {
        EACH_CHUNK(columns, {
            V(float) value = row_value(&plan, at, valid, pair);
            if (flags & FLAG_ROUND_F16)
                value = math_round_f16(value);
            store_lanes(value, (__global float *)out + out_row + at, valid);
            pair = next_pair(pair, pairs);
        })
    } else {
        __global char *codes = (__global char *)out + out_row;
        EACH_CHUNK(columns, {
            const V(float) value = row_value(&plan, at, valid, pair);
            store_codes(math_code(value, (V(float))(inverse)), codes + at, valid);
            pair = next_pair(pair, pairs);
        })
        // Padding to whole tiles is zeroed.
        const uint padded = (columns + TILE - 1) / TILE * TILE;
        for (uint at = columns / LANES * LANES + LANE; at < padded; at += LANES)
            if (at >= columns)
                store_codes((V(char))(0), codes + at, 0);
    }
}

// Item x, or the ROW_ITEMS items from x·ROW_ITEMS on: rows x·ROW_BATCH ...
__kernel __attribute__((reqd_work_group_size(ROW_ITEMS, 1, 1))) void row_operator(
    const __global float *input, ulong input_at, uint input_stride, uint operation, uint modulation,
    const __global float *first, ulong first_at, const __global float *second, ulong second_at, float eps, float per_column,
    const __global float *cosines, const __global float *sines, uint pairs,
    __global void *out, ulong out_at, uint out_stride, __global float *scales, ulong scales_at, float inverse,
    uint flags, uint sink, uint columns, uint rows)
{
    __local float shared_floats[LANES];
    __local int shared_integers[LANES];
    const uint start = get_global_id(0) / ROW_ITEMS * ROW_BATCH, end = min(start + ROW_BATCH, rows);
#define ROWS_OF(operation, modulation, sink)                                                                                   \
    for (uint row = start; row < end; row++)                                                                                   \
        one_row(input, input_at, input_stride, operation, modulation, first, first_at, second, second_at, eps, per_column, cosines,    \
                sines, pairs, out, out_at, out_stride, scales, scales_at, inverse, flags, sink, columns, row, shared_floats,   \
                shared_integers);
#if WIDTH == 16
    // What a block runs, compiled for it alone: a CPU decides nothing per chunk.
    if (operation == OP_LAYER_NORM && modulation == MODULATION_ADA_LN && sink == SINK_CODES) {
        ROWS_OF(OP_LAYER_NORM, MODULATION_ADA_LN, SINK_CODES)
    } else if (operation == OP_LAYER_NORM && modulation == MODULATION_AFFINE && sink == SINK_CODES) {
        ROWS_OF(OP_LAYER_NORM, MODULATION_AFFINE, SINK_CODES)
    } else if (operation == OP_RMS_NORM && sink == SINK_CODES) {
        ROWS_OF(OP_RMS_NORM, MODULATION_NONE, SINK_CODES)
    } else if (operation == OP_COPY && sink == SINK_CODES) {
        ROWS_OF(OP_COPY, MODULATION_NONE, SINK_CODES)
    } else if (operation == OP_COPY && sink == SINK_DYNAMIC) {
        ROWS_OF(OP_COPY, MODULATION_NONE, SINK_DYNAMIC)
    } else if (operation == OP_SOFTMAX && sink == SINK_F32) {
        ROWS_OF(OP_SOFTMAX, MODULATION_NONE, SINK_F32)
    } else
#endif
    {
        ROWS_OF(operation, modulation, sink)
    }
}

__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void add(
    const __global float *left, ulong left_at, const __global float *right, ulong right_at, __global float *out)
{
    const size_t at = get_global_id(0);
    out[at] = left[left_at + at] + right[right_at + at];
}

// Operations that tell contraction, flushed subnormals and other roundings apart; the host knows the results.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void check_arithmetic(
    const __global float *x, __global float *out)
{
    out[0] = x[0] * x[0] + x[1];
    out[1] = x[2] + x[3];
    out[2] = -x[2] - x[3];
    out[3] = x[0] + x[3];
    out[4] = x[4] * x[5];
    out[5] = (x[4] * x[5]) + x[4];
}
