// INT8 attention where a work-item is a thread of a CPU: scores, codes and products of a tile of rows and a block of keys one after
// the other, as in the CPU's kernel (attention/int8.rs). Nothing but the outputs leaves the caches.

// Most rows of a work-item, which share a block of keys and values while it is in the second-level cache. As in fused.rs.
#define FUSED_ROWS 120
#define FUSED_TILES (FUSED_ROWS / ROWS)
#define KEY_VECTORS (KEY_BLOCK / WIDTH)
// O·α + A·β of a vector of a row's columns.
#define UPDATE(slot)                                                                                                           \
    STORE_WHOLE(float, vload16(slot, state) * old + convert_float16(products[offset * SLOTS + (slot)]) * new,                  \
                state + (slot) * WIDTH)
#define LARGER(left, right) ((left) > (right) ? (left) : (right))

static int largest_lane(int16 lanes)
{
    const int8 eight = LARGER(lanes.lo, lanes.hi);
    const int4 four = LARGER(eight.lo, eight.hi);
    const int2 two = LARGER(four.lo, four.hi);
    return LARGER(two.lo, two.hi);
}

static int lanes_total(int16 lanes)
{
    const int8 eight = lanes.lo + lanes.hi;
    const int4 four = eight.lo + eight.hi;
    const int2 two = four.lo + four.hi;
    return two.lo + two.hi;
}

// m_b, the codes and l_b of `count` rows of scores; codes from `valid` to `padded` are 0.
static void codes_of_tile(const int16 *scores, uint count, uint valid, uint padded, float sigma, __global char *codes, int *largest,
                          int *sums)
{
    const uint whole = valid / WIDTH, rest = valid % WIDTH;
    for (uint row = 0; row < count; row++) {
        const int16 *from = scores + row * KEY_VECTORS;
        __global char *to = codes + row * KEY_BLOCK;
        int16 lanes = INT_MIN;
        for (uint at = 0; at < whole; at++)
            lanes = LARGER(lanes, from[at]);
        if (rest) {
            const int16 last = LANE_NUMBERS < (int)rest ? from[whole] : (int16)(INT_MIN);
            lanes = LARGER(lanes, last);
        }
        const int maximum = largest_lane(lanes);
        lanes = 0;
        for (uint at = 0; at < whole; at++) {
            // The difference is below 2²⁴ (heads are at most 512 wide), so it converts exactly.
            const int16 code = math_exp2_code(convert_float16(from[at] - maximum) * sigma);
            lanes = lanes + code;
            STORE_WHOLE(char, convert_char16(code), to + at * WIDTH);
        }
        for (uint at = whole; at < padded / WIDTH; at++) {
            // Padding has scores of zero: nothing there overflows, and its codes are dropped.
            int16 code = math_exp2_code(convert_float16(from[at] - maximum) * sigma);
            code = LANE_NUMBERS < (int)lanes_before(at * WIDTH, valid) ? code : (int16)(0);
            lanes = lanes + code;
            STORE_WHOLE(char, convert_char16(code), to + at * WIDTH);
        }
        largest[row] = maximum;
        sums[row] = lanes_total(lanes);
    }
}

// Item (x, y): head first_head + x, rows y·block_rows ... Each item of a dispatch has ROWS·KEY_BLOCK codes, 16 sums of them and
// block_rows·head_dim values of O for itself. Rows of a tile are the lanes of its vectors.
__kernel __attribute__((reqd_work_group_size(1, 1, 1))) void attention_fused(
    const __global char *query, ulong query_at, uint query_stride, const __global int *query_sums, uint rows,
    const __global char *packed, uint keys, uint heads, uint head_dim, uint first_head, float16 sigmas, float16 value_scales,
    uint block_rows, __global char *codes, __global int *code_sums, __global float *states,
    __global void *out, ulong out_at, uint out_stride, float inverse, uint flags, uint sink)
{
    const uint x = get_global_id(0), head = first_head + x, first = get_global_id(1) * block_rows;
    const uint last = min(first + block_rows, rows);
    const size_t item = (get_global_id(1) - get_global_offset(1)) * get_global_size(0) + (x - get_global_offset(0));
    float of_heads[16], kept_of[16], added_of[16];
    vstore16(sigmas, 0, of_heads);
    const float sigma = of_heads[x];
    vstore16(value_scales, 0, of_heads);
    const float value_scale = of_heads[x];
    codes += item * (ROWS * KEY_BLOCK);
    code_sums += item * 16;
    states += item * block_rows * head_dim;
    int16 maxima[FUSED_TILES];
    float16 totals[FUSED_TILES];
    for (uint at = 0; at < (last - first) * head_dim; at += WIDTH)
        STORE_WHOLE(float, (float16)(0.0f), states + at);
    for (uint block = 0; block * KEY_BLOCK < keys; block++) {
        const uint valid = min(keys - block * KEY_BLOCK, (uint)KEY_BLOCK), padded = padded_keys(valid);
        const __global char *key_side = packed + ((size_t)block * heads + head) * 2 * SIDE(head_dim);
        const __global char *value_side = key_side + SIDE(head_dim);
        for (uint row = first, tile = 0; row < last; row += ROWS, tile++) {
            const uint count = min((uint)ROWS, last - row);
            int16 scores[ROWS * KEY_VECTORS];
            for (uint key = 0; key < padded; key += WIDTH * SLOTS)
                dot_tile(query + query_at + (size_t)row * query_stride + (size_t)head * head_dim, query_stride, count,
                         (const __global int *)(key_side + (size_t)(key / TILE) * head_dim * TILE + (key % TILE) * 4), head_dim / 4,
                         query_sums + (size_t)head * rows + row, scores + key / WIDTH, KEY_VECTORS);
            int largest_of[16] = {0}, sums_of[16] = {0};
            codes_of_tile(scores, count, valid, padded, sigma, codes, largest_of, sums_of);
            const int16 largest = vload16(0, largest_of), sums = vload16(0, sums_of);
            const int16 greater = block == 0 ? largest : LARGER(maxima[tile], largest);
            const float16 kept =
                block == 0 ? (float16)(0.0f) : math_exp2(convert_float16(maxima[tile] - greater) * sigma);
            const float16 added = math_exp2(convert_float16(largest - greater) * sigma);
            const float16 before = block == 0 ? (float16)(0.0f) : totals[tile];
            maxima[tile] = greater;
            totals[tile] = before * kept + convert_float16(sums) * added;
            vstore16(kept, 0, kept_of);
            vstore16(added, 0, added_of);
            STORE_WHOLE(int, sums, code_sums);
            for (uint dim = 0; dim < head_dim; dim += WIDTH * SLOTS) {
                int16 products[ROWS * SLOTS];
                dot_probabilities(
                    codes, KEY_BLOCK, count,
                    (const __global int *)(value_side + (size_t)(dim / TILE) * padded * TILE + (dim % TILE) * 4), padded / 4,
                    code_sums, products, SLOTS);
                __global float *state = states + (size_t)(row - first) * head_dim + dim;
                for (uint offset = 0; offset < count; offset++, state += head_dim) {
                    const float old = kept_of[offset], new = added_of[offset];
                    UPDATE(0);
#if SLOTS == 2
                    UPDATE(1);
#endif
                }
            }
        }
    }
    for (uint row = first, tile = 0; row < last; row += ROWS, tile++) {
        float factors[16];
        vstore16(math_recip(totals[tile]) * value_scale, 0, factors);
        for (uint offset = 0; offset < min((uint)ROWS, last - row); offset++) {
            const __global float *state = states + (size_t)(row + offset - first) * head_dim;
            for (uint dim = 0; dim < head_dim; dim += WIDTH)
                store_value(vload16(0, state + dim) * factors[offset], sink, flags, inverse, (float16)(0.0f), out,
                            out_at + (size_t)(row + offset) * out_stride + (size_t)head * head_dim + dim, WIDTH);
        }
    }
}
