// A work-item computes 8 rows of one column: what a GPU wants. The 32 work-items of a group read 128 consecutive bytes of
// weights at a time and the same four activations. With INTEGER_DOT the product of four codes is one instruction
// (cl_khr_integer_dot_product); otherwise it is four multiply-adds, with the same integers.

#define ROWS 8
#define SLOTS 1
#define GROUP_ITEMS 32

static int dot_four(int a, int w)
{
#ifdef INTEGER_DOT
    return dot_4x8packed_ss_int(as_uint(a), as_uint(w));
#else
    const char4 x = as_char4(a), y = as_char4(w);
    return (int)x.s0 * (int)y.s0 + (int)x.s1 * (int)y.s1 + (int)x.s2 * (int)y.s2 + (int)x.s3 * (int)y.s3;
#endif
}

// Sums of `rows` rows (at most ROWS) of activations with one column; `fours` groups of four codes. Row r's goes to sums[pitch·r].
static void dot_tile(const __global char *a, uint stride, uint rows, const __global int *weights, uint fours,
                     const __global int *row_sums, int *sums, uint pitch)
{
    const __global int *pointers[ROWS];
    for (uint row = 0; row < ROWS; row++) {
        // Rows past the last one repeat it; nobody reads their sums.
        pointers[row] = (const __global int *)(a + (size_t)min(row, rows - 1u) * stride);
        sums[pitch * row] = 0;
    }
    for (uint four = 0; four < fours; four++) {
        const int w = weights[four * TILE];
        for (uint row = 0; row < ROWS; row++)
            sums[pitch * row] += dot_four(pointers[row][four], w);
    }
}

// Adds the products of ROWS rows of floats, all readable, with one column, whose weights are TILE apart.
static void float_tile(const __global float *a, uint stride, const __global float *weights, uint length, float *sums)
{
#pragma OPENCL FP_CONTRACT ON
    for (uint at = 0; at < length; at++) {
        const float w = weights[(size_t)at * TILE];
        for (uint row = 0; row < ROWS; row++)
            sums[row] = a[(size_t)row * stride + at] * w + sums[row];
    }
}
