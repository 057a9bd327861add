/* The vector unit's kernel: eight rows x one tile column (32 outputs) in eight accumulators over the whole reduction. */
#include "gemm.h"

typedef int32_t hvx_vector __attribute__((vector_size(128), aligned(128)));

#define ROWS 8

void gemm_hvx(const int8_t *input, uint32_t stride, uint32_t rows, const int8_t *weights, uint32_t d_in, uint32_t d_out,
              int32_t *sums)
{
    for (uint32_t column = 0; column < d_out; column += TILE) {
        const hvx_vector *groups = (const hvx_vector *)(weights + (uintptr_t)column * d_in);
        for (uint32_t row = 0; row < rows; row += ROWS) {
            const uint32_t count = rows - row < ROWS ? rows - row : ROWS;
            const int32_t *fours[ROWS];
            hvx_vector sum[ROWS];
            for (uint32_t offset = 0; offset < ROWS; offset++) {
                /* Rows past the last one repeat it; their sums are not stored. */
                const uint32_t from = row + (offset < count ? offset : count - 1);
                fours[offset] = (const int32_t *)(input + (uintptr_t)from * stride);
                sum[offset] = __builtin_HEXAGON_V6_vd0_128B();
            }
            for (uint32_t group = 0; group < d_in / 4; group++) {
                const hvx_vector w = groups[group];
                for (uint32_t offset = 0; offset < ROWS; offset++) {
                    const hvx_vector a = __builtin_HEXAGON_V6_lvsplatw_128B(fours[offset][group]);
                    sum[offset] = __builtin_HEXAGON_V6_vrmpybv_acc_128B(sum[offset], a, w);
                }
            }
            for (uint32_t offset = 0; offset < count; offset++)
                *(hvx_vector *)(sums + (uintptr_t)(row + offset) * d_out + column) = sum[offset];
        }
    }
}
