// A work-item computes 6 rows × 16 columns in vectors of 32-bit integers: portable, for CPU devices without VNNI.

#define ROWS 6
#define SLOTS 1
#define GROUP_ITEMS 1
// Codes that are not negative are multiplied like others.
#define dot_probabilities dot_tile

#define ROW_STEP(row)                                                                                                          \
    {                                                                                                                          \
        const char4 x = as_char4(pointer##row[four]);                                                                          \
        sum##row += w0 * (int)x.s0 + w1 * (int)x.s1 + w2 * (int)x.s2 + w3 * (int)x.s3;                                         \
    }
#define ROW_POINTER(row) (const __global int *)(a + (size_t)min((uint)row, rows - 1u) * stride)

// Row r's sums go to sums[pitch·r].
static void dot_tile(const __global char *a, uint stride, uint rows, const __global int *weights, uint fours,
                     const __global int *row_sums, int16 *sums, uint pitch)
{
    const __global int *pointer0 = ROW_POINTER(0), *pointer1 = ROW_POINTER(1), *pointer2 = ROW_POINTER(2);
    const __global int *pointer3 = ROW_POINTER(3), *pointer4 = ROW_POINTER(4), *pointer5 = ROW_POINTER(5);
    int16 sum0 = 0, sum1 = 0, sum2 = 0, sum3 = 0, sum4 = 0, sum5 = 0;
    for (uint four = 0; four < fours; four++) {
        const int16 w = vload16(0, weights + four * TILE);
        const int16 w0 = (w << 24) >> 24, w1 = (w << 16) >> 24, w2 = (w << 8) >> 24, w3 = w >> 24;
        ROW_STEP(0) ROW_STEP(1) ROW_STEP(2) ROW_STEP(3) ROW_STEP(4) ROW_STEP(5)
    }
    sums[0] = sum0, sums[pitch] = sum1, sums[2 * pitch] = sum2;
    sums[3 * pitch] = sum3, sums[4 * pitch] = sum4, sums[5 * pitch] = sum5;
}

// Adds the products of ROWS rows of floats, all readable, with 16 columns.
#define FLOAT_STEP(row) sum##row = (float16)(pointer[(row) * one]) * w + sum##row;

static void float_tile(const __global float *a, uint stride, const __global float *weights, uint length, float16 *sums)
{
#pragma OPENCL FP_CONTRACT ON
    const size_t one = stride;
    const __global float *pointer = a;
    float16 sum0 = sums[0], sum1 = sums[1], sum2 = sums[2], sum3 = sums[3], sum4 = sums[4], sum5 = sums[5];
    for (uint at = 0; at < length; at++, pointer++, weights += TILE) {
        const float16 w = vload16(0, weights);
        FLOAT_STEP(0) FLOAT_STEP(1) FLOAT_STEP(2) FLOAT_STEP(3) FLOAT_STEP(4) FLOAT_STEP(5)
    }
    sums[0] = sum0, sums[1] = sum1, sums[2] = sum2, sums[3] = sum3, sums[4] = sum4, sums[5] = sum5;
}
