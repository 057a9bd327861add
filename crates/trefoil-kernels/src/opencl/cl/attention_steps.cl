// INT8 attention where a work-item is a lane of a GPU, in three steps per block of queries: scores, codes of probabilities, product
// with the values. No more than a block of rows of scores exists. Codes are per block of KEY_BLOCK keys, so the numbers are those of
// the fused kernel.

// S = q·Kᵀ. Item (x, y, z): keys x·WIDTH·SLOTS .., row tile y of the block, head first_head + z.
__kernel __attribute__((reqd_work_group_size(GROUP_ITEMS, 1, 1))) void attention_scores(
    const __global char *query, ulong query_at, uint query_stride, const __global int *query_sums, uint query_rows,
    const __global char *packed, uint heads, uint head_dim, uint first_head, uint first_row, uint rows,
    __global int *scores, uint score_stride)
{
    const uint key = get_global_id(0) * (WIDTH * SLOTS), within = key % KEY_BLOCK;
    const uint head = first_head + get_global_id(2);
    const uint row = get_global_id(1) * ROWS, count = min((uint)ROWS, rows - row);
    const size_t in = first_row + row;
    const size_t base = ((size_t)(key / KEY_BLOCK) * heads + head) * 2 * SIDE(head_dim);
    const __global int *keys =
        (const __global int *)(packed + base + (size_t)(within / TILE) * head_dim * TILE + (within % TILE) * 4);
    __global int *out = scores + ((size_t)get_global_id(2) * rows + row) * score_stride + key;
    V(int) sums[ROWS * SLOTS];
    dot_tile(query + query_at + in * query_stride + (size_t)head * head_dim, query_stride, count, keys, head_dim / 4,
             query_sums + (size_t)head * query_rows + in, sums, SLOTS);
    for (uint offset = 0; offset < count; offset++)
        for (uint slot = 0; slot < SLOTS; slot++)
            out[(size_t)offset * score_stride + slot * WIDTH] = sums[offset * SLOTS + slot];
}

// Of each block of keys and row: l_b at block_sums, α and β at weights; l at the end of weights.
static void codes_of_row(const __global int *scores, uint score_stride, uint rows, uint keys, float sigma, __global char *codes,
                         uint code_stride, __global int *block_sums, __global float *weights, uint row, uint head,
                         __local int *shared)
{
    const uint blocks = (keys + KEY_BLOCK - 1) / KEY_BLOCK;
    const __global int *from = scores + ((size_t)head * rows + row) * score_stride;
    __global char *to = codes + ((size_t)head * rows + row) * code_stride;
    __global float *of_head = weights + (size_t)head * rows * (2 * blocks + 1);
    int maximum = 0, all[LANES];
    float total = 0.0f;
    for (uint block = 0; block < blocks; block++) {
        const uint start = block * KEY_BLOCK, valid = min(keys - start, (uint)KEY_BLOCK), padded = padded_keys(valid);
        V(int) lanes = (V(int))(INT_MIN);
        for (uint at = LANE; at < valid; at += LANES)
            lanes = max(lanes, LANE_NUMBERS < (int)lanes_before(at, valid) ? LOAD(start + at, from) : (V(int))(INT_MIN));
        gather_lanes(lanes, shared, all);
        int largest = all[0];
        for (uint lane = 1; lane < LANES; lane++)
            largest = max(largest, all[lane]);
        lanes = (V(int))(0);
        for (uint at = LANE; at < padded; at += LANES) {
            // Padding has scores of zero: nothing there overflows, and its codes are dropped.
            V(int) code = math_exp2_code(V(convert_float)(LOAD(start + at, from) - largest) * sigma);
            code = LANE_NUMBERS < (int)lanes_before(at, valid) ? code : (V(int))(0);
            lanes = lanes + code;
            to[start + at] = V(convert_char)(code);
        }
        gather_lanes(lanes, shared, all);
        int sum = 0;
        for (uint lane = 0; lane < LANES; lane++)
            sum += all[lane];
        const int greater = block == 0 ? largest : max(maximum, largest);
        const float kept =
            block == 0 ? 0.0f : math_first(math_exp2((V(float))(convert_float(maximum - greater) * sigma)));
        const float added = math_first(math_exp2((V(float))(convert_float(largest - greater) * sigma)));
        maximum = greater;
        total = total * kept + convert_float(sum) * added;
        if (LANE == 0) {
            block_sums[((size_t)head * blocks + block) * rows + row] = sum;
            of_head[(size_t)block * rows + row] = kept;
            of_head[(size_t)(blocks + block) * rows + row] = added;
        }
    }
    if (LANE == 0)
        of_head[(size_t)2 * blocks * rows + row] = total;
}

// Item (x, y), or the ROW_ITEMS items from x·ROW_ITEMS on: rows x·ROW_BATCH .. of head y.
__kernel __attribute__((reqd_work_group_size(ROW_ITEMS, 1, 1))) void attention_codes(
    const __global int *scores, uint score_stride, uint rows, uint keys, float16 sigmas, __global char *codes,
    uint code_stride, __global int *block_sums, __global float *weights)
{
    __local int shared[LANES];
    const uint head = get_global_id(1), start = get_global_id(0) / ROW_ITEMS * ROW_BATCH, end = min(start + ROW_BATCH, rows);
    float of_heads[16];
    vstore16(sigmas, 0, of_heads);
    for (uint row = start; row < end; row++)
        codes_of_row(scores, score_stride, rows, keys, of_heads[head], codes, code_stride, block_sums, weights, row, head, shared);
}

// O = O·α + (Σ c·v)·β over the blocks, y = O·(recip(l)·s_v). Item (x, y, z): columns x·WIDTH·SLOTS .. of head first_head + z,
// row tile y of the block.
__kernel __attribute__((reqd_work_group_size(GROUP_ITEMS, 1, 1))) void attention_values(
    const __global char *codes, uint code_stride, uint rows, uint keys, const __global int *block_sums,
    const __global float *weights, const __global char *packed, uint heads, uint head_dim, uint first_head, float16 value_scales,
    __global void *out, ulong out_at, uint out_stride, uint first_row, float inverse, uint flags, uint sink)
{
    const uint dim = get_global_id(0) * (WIDTH * SLOTS), row = get_global_id(1) * ROWS, z = get_global_id(2);
    const uint head = first_head + z, count = min((uint)ROWS, rows - row);
    const uint blocks = (keys + KEY_BLOCK - 1) / KEY_BLOCK;
    const __global float *of_head = weights + (size_t)z * rows * (2 * blocks + 1);
    float of_heads[16];
    vstore16(value_scales, 0, of_heads);
    V(float) state[ROWS * SLOTS];
    for (uint at = 0; at < ROWS * SLOTS; at++)
        state[at] = (V(float))(0.0f);
    for (uint block = 0; block < blocks; block++) {
        const uint start = block * KEY_BLOCK, padded = padded_keys(min(keys - start, (uint)KEY_BLOCK));
        const size_t base = (((size_t)block * heads + head) * 2 + 1) * SIDE(head_dim);
        const __global int *values =
            (const __global int *)(packed + base + (size_t)(dim / TILE) * padded * TILE + (dim % TILE) * 4);
        V(int) sums[ROWS * SLOTS];
        dot_tile(codes + ((size_t)z * rows + row) * code_stride + start, code_stride, count, values, padded / 4,
                 block_sums + ((size_t)z * blocks + block) * rows + row, sums, SLOTS);
        for (uint offset = 0; offset < count; offset++) {
            const float kept = of_head[(size_t)block * rows + row + offset];
            const float added = of_head[(size_t)(blocks + block) * rows + row + offset];
            for (uint slot = 0; slot < SLOTS; slot++) {
                const uint at = offset * SLOTS + slot;
                state[at] = state[at] * kept + V(convert_float)(sums[at]) * added;
            }
        }
    }
    for (uint offset = 0; offset < count; offset++) {
        const float total = of_head[(size_t)2 * blocks * rows + row + offset];
        const float factor = math_first(math_recip((V(float))(total))) * of_heads[z];
        for (uint slot = 0; slot < SLOTS; slot++)
            store_value(state[offset * SLOTS + slot] * factor, sink, flags, inverse, (V(float))(0.0f), out,
                        out_at + (size_t)(first_row + row + offset) * out_stride + (size_t)head * head_dim + dim + slot * WIDTH,
                        WIDTH);
    }
}
