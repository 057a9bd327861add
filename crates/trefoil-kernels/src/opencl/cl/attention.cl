// Keys and values of INT8 attention (attention/int8.rs) in tiles. attention_fused.cl or attention_steps.cl reads them.

// Bytes of one side (keys or values) of one head of a block.
#define SIDE(head_dim) ((size_t)KEY_BLOCK * (head_dim))

static uint padded_keys(uint valid)
{
    return (valid + TILE - 1) / TILE * TILE;
}

// Kᵀ in tiles. Item (x, y): four columns from 4x on, of keys y·ROW_BATCH .. up to `padded` (past the last one: zeros).
__kernel __attribute__((reqd_work_group_size(8, 1, 1))) void pack_keys(
    const __global char *keys, ulong keys_at, uint stride, __global int *packed, uint count, uint heads, uint head_dim)
{
    const uint group = get_global_id(0), start = get_global_id(1) * ROW_BATCH, end = min(start + ROW_BATCH, padded_keys(count));
    const uint fours = head_dim / 4, head = group / fours;
    for (uint key = start; key < end; key++) {
        const uint within = key % KEY_BLOCK;
        const __global int *row = (const __global int *)(keys + keys_at + (size_t)key * stride);
        const size_t base = ((size_t)(key / KEY_BLOCK) * heads + head) * 2 * SIDE(head_dim) / 4;
        packed[base + (size_t)(within / TILE) * head_dim * 8 + (group % fours) * TILE + within % TILE] =
            key < count ? row[group] : 0;
    }
}

// V in tiles. Item (x, y): column x of the fours of keys from y·ROW_BATCH on.
__kernel __attribute__((reqd_work_group_size(32, 1, 1))) void pack_values(
    const __global char *values, ulong values_at, uint stride, __global int *packed, uint count, uint heads, uint head_dim)
{
    const uint column = get_global_id(0), start = get_global_id(1) * ROW_BATCH;
    const uint end = min(start + ROW_BATCH, padded_keys(count) / 4);
    const uint head = column / head_dim, dim = column % head_dim;
    for (uint four = start; four < end; four++) {
        const uint key = four * 4, block = key / KEY_BLOCK, within = key % KEY_BLOCK;
        const uint padded = padded_keys(min(count - block * KEY_BLOCK, (uint)KEY_BLOCK));
        char codes[4];
        for (uint offset = 0; offset < 4; offset++)
            codes[offset] = key + offset < count ? values[values_at + (size_t)(key + offset) * stride + column] : (char)0;
        const size_t base = (((size_t)block * heads + head) * 2 + 1) * SIDE(head_dim) / 4;
        const size_t at = (size_t)(dim / TILE) * padded * 8 + (within / TILE) * 256 + (within % TILE) / 4 * TILE + dim % TILE;
        packed[base + at] = as_int((char4)(codes[0], codes[1], codes[2], codes[3]));
    }
}
