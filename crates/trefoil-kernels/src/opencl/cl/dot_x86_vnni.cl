// A work-item computes 12 rows × 32 columns with AVX-512 VNNI: for OpenCL devices that are this machine's CPU, where the host
// found the instruction. `vpdpbusd` multiplies unsigned by signed bytes, so the weights are made unsigned in registers and
// Σ a·w = Σ a·(w + 128) − 128·Σ a, with the row sums from a kernel of their own. 32-bit sums wrap, so this is exact.

#define ROWS 12
#define SLOTS 2
#define GROUP_ITEMS 1
#define NEEDS_ROW_SUMS 1

#define VPDPBUSD(sum, unsigned_bytes, signed_bytes)                                                                            \
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(unsigned_bytes), "v"(signed_bytes))
#define FLIPPED(at) (vload16(0, weights + (at)) ^ as_int(0x80808080u))
#define ROW_DECLARE(row) int16 low##row = 0, high##row = 0;
#define ROW_STEP(row, pointer, offset)                                                                                         \
    {                                                                                                                          \
        const int16 x = (int16)(*(const __global int *)((pointer) + (offset)));                                                \
        VPDPBUSD(low##row, low, x);                                                                                            \
        VPDPBUSD(high##row, high, x);                                                                                          \
    }
#define CODE_STEP(row, pointer, offset)                                                                                        \
    {                                                                                                                          \
        const int16 x = (int16)(*(const __global int *)((pointer) + (offset)));                                                \
        VPDPBUSD(low##row, x, low);                                                                                            \
        VPDPBUSD(high##row, x, high);                                                                                          \
    }
#define CODE_STORE(row) sums[pitch * row] = low##row, sums[pitch * row + 1] = high##row;
#define ROW_STORE(row)                                                                                                         \
    sums[pitch * row] = low##row - 128 * row_sums[row];                                                                        \
    sums[pitch * row + 1] = high##row - 128 * row_sums[row];

// Row r's sums go to sums[pitch·r] and the next.
static void dot_tile(const __global char *a, uint stride, uint rows, const __global int *weights, uint fours,
                     const __global int *row_sums, int16 *sums, uint pitch)
{
    if (rows < ROWS) {
        for (uint row = 0; row < rows; row++) {
            const __global int *pointer = (const __global int *)(a + (size_t)row * stride);
            ROW_DECLARE(0)
            for (uint four = 0; four < fours; four++) {
                const int16 low = FLIPPED(four * TILE), high = FLIPPED(four * TILE + 16);
                ROW_STEP(0, (const __global char *)(pointer + four), 0)
            }
            sums[pitch * row] = low0 - 128 * row_sums[row];
            sums[pitch * row + 1] = high0 - 128 * row_sums[row];
        }
        return;
    }
    // Three rows share a pointer, at strides 0, 1 and 2: few enough registers that no address is spilled.
    const size_t one = stride, two = 2 * (size_t)stride;
    const __global char *p0 = a, *p1 = a + 3 * one, *p2 = a + 6 * one, *p3 = a + 9 * one;
    ROW_DECLARE(0) ROW_DECLARE(1) ROW_DECLARE(2) ROW_DECLARE(3) ROW_DECLARE(4) ROW_DECLARE(5)
    ROW_DECLARE(6) ROW_DECLARE(7) ROW_DECLARE(8) ROW_DECLARE(9) ROW_DECLARE(10) ROW_DECLARE(11)
    for (uint four = 0; four < fours; four++) {
        const int16 low = FLIPPED(0), high = FLIPPED(16);
        ROW_STEP(0, p0, 0) ROW_STEP(1, p0, one) ROW_STEP(2, p0, two)
        ROW_STEP(3, p1, 0) ROW_STEP(4, p1, one) ROW_STEP(5, p1, two)
        ROW_STEP(6, p2, 0) ROW_STEP(7, p2, one) ROW_STEP(8, p2, two)
        ROW_STEP(9, p3, 0) ROW_STEP(10, p3, one) ROW_STEP(11, p3, two)
        weights += TILE;
        p0 += 4, p1 += 4, p2 += 4, p3 += 4;
    }
    ROW_STORE(0) ROW_STORE(1) ROW_STORE(2) ROW_STORE(3) ROW_STORE(4) ROW_STORE(5)
    ROW_STORE(6) ROW_STORE(7) ROW_STORE(8) ROW_STORE(9) ROW_STORE(10) ROW_STORE(11)
}

// Products of codes that are not negative (attention's probabilities) with columns: the codes are the unsigned operand, so the weights
// are multiplied as they lie and there is nothing to take off. `row_sums` are for variants that need them.
static void dot_probabilities(const __global char *a, uint stride, uint rows, const __global int *weights, uint fours,
                              const __global int *row_sums, int16 *sums, uint pitch)
{
    if (rows < ROWS) {
        dot_tile(a, stride, rows, weights, fours, row_sums, sums, pitch);
        return;
    }
    const size_t one = stride, two = 2 * (size_t)stride;
    const __global char *p0 = a, *p1 = a + 3 * one, *p2 = a + 6 * one, *p3 = a + 9 * one;
    ROW_DECLARE(0) ROW_DECLARE(1) ROW_DECLARE(2) ROW_DECLARE(3) ROW_DECLARE(4) ROW_DECLARE(5)
    ROW_DECLARE(6) ROW_DECLARE(7) ROW_DECLARE(8) ROW_DECLARE(9) ROW_DECLARE(10) ROW_DECLARE(11)
    for (uint four = 0; four < fours; four++) {
        const int16 low = vload16(0, weights), high = vload16(1, weights);
        CODE_STEP(0, p0, 0) CODE_STEP(1, p0, one) CODE_STEP(2, p0, two)
        CODE_STEP(3, p1, 0) CODE_STEP(4, p1, one) CODE_STEP(5, p1, two)
        CODE_STEP(6, p2, 0) CODE_STEP(7, p2, one) CODE_STEP(8, p2, two)
        CODE_STEP(9, p3, 0) CODE_STEP(10, p3, one) CODE_STEP(11, p3, two)
        weights += TILE;
        p0 += 4, p1 += 4, p2 += 4, p3 += 4;
    }
    CODE_STORE(0) CODE_STORE(1) CODE_STORE(2) CODE_STORE(3) CODE_STORE(4) CODE_STORE(5)
    CODE_STORE(6) CODE_STORE(7) CODE_STORE(8) CODE_STORE(9) CODE_STORE(10) CODE_STORE(11)
}

// Adds the products of ROWS rows of floats, all readable, with 32 columns. By inline assembly too, so that the sums stay in
// 512-bit registers whatever width the driver's compiler prefers.
#define VFMADD(sum, left, right) __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(left), "v"(right))
#define FLOAT_DECLARE(row) float16 low##row = sums[2 * row], high##row = sums[2 * row + 1];
#define FLOAT_STEP(row, pointer, offset)                                                                                       \
    {                                                                                                                          \
        const float16 x = (float16)((pointer)[offset]);                                                                        \
        VFMADD(low##row, low, x);                                                                                              \
        VFMADD(high##row, high, x);                                                                                            \
    }
#define FLOAT_STORE(row) sums[2 * row] = low##row, sums[2 * row + 1] = high##row;

static void float_tile(const __global float *a, uint stride, const __global float *weights, uint length, float16 *sums)
{
    const size_t one = stride, two = 2 * (size_t)stride;
    const __global float *p0 = a, *p1 = a + 3 * one, *p2 = a + 6 * one, *p3 = a + 9 * one;
    FLOAT_DECLARE(0) FLOAT_DECLARE(1) FLOAT_DECLARE(2) FLOAT_DECLARE(3) FLOAT_DECLARE(4) FLOAT_DECLARE(5)
    FLOAT_DECLARE(6) FLOAT_DECLARE(7) FLOAT_DECLARE(8) FLOAT_DECLARE(9) FLOAT_DECLARE(10) FLOAT_DECLARE(11)
    for (uint at = 0; at < length; at++) {
        const float16 low = vload16(0, weights), high = vload16(1, weights);
        FLOAT_STEP(0, p0, 0) FLOAT_STEP(1, p0, one) FLOAT_STEP(2, p0, two)
        FLOAT_STEP(3, p1, 0) FLOAT_STEP(4, p1, one) FLOAT_STEP(5, p1, two)
        FLOAT_STEP(6, p2, 0) FLOAT_STEP(7, p2, one) FLOAT_STEP(8, p2, two)
        FLOAT_STEP(9, p3, 0) FLOAT_STEP(10, p3, one) FLOAT_STEP(11, p3, two)
        weights += TILE;
        p0++, p1++, p2++, p3++;
    }
    FLOAT_STORE(0) FLOAT_STORE(1) FLOAT_STORE(2) FLOAT_STORE(3) FLOAT_STORE(4) FLOAT_STORE(5)
    FLOAT_STORE(6) FLOAT_STORE(7) FLOAT_STORE(8) FLOAT_STORE(9) FLOAT_STORE(10) FLOAT_STORE(11)
}
