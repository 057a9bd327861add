/* A MODEL of the matrix unit, not the unit: its operands are a 32 x 32 activation tile and a 32 x 32 weight tile, its sums are
 * exact. Written tile by tile in the order in which the unit is fed, so that a port to the unit changes `multiply_tile` only. */
#include "gemm.h"

struct accumulator {
    int32_t sums[TILE][TILE];
};

/* sums += activations x tile. Rows past `rows` are not read. */
static void multiply_tile(struct accumulator *accumulator, const int8_t *activations, uint32_t stride, uint32_t rows,
                          const int8_t *tile)
{
    for (uint32_t row = 0; row < rows; row++)
        for (uint32_t column = 0; column < TILE; column++)
            for (uint32_t input = 0; input < TILE; input++)
                accumulator->sums[row][column] +=
                    activations[row * stride + input] * tile[input / 4 * GROUP_BYTES + column * 4 + input % 4];
}

void gemm_hmx_model(const int8_t *input, uint32_t stride, uint32_t rows, const int8_t *weights, uint32_t d_in, uint32_t d_out,
                    int32_t *sums)
{
    for (uint32_t column = 0; column < d_out; column += TILE) {
        const int8_t *tiles = weights + (uintptr_t)column * d_in;
        for (uint32_t row = 0; row < rows; row += TILE) {
            const uint32_t count = rows - row < TILE ? rows - row : TILE;
            struct accumulator accumulator = {0};
            for (uint32_t tile = 0; tile < d_in / TILE; tile++)
                multiply_tile(&accumulator, input + (uintptr_t)row * stride + tile * TILE, stride, count,
                              tiles + tile * TILE * TILE);
            for (uint32_t offset = 0; offset < count; offset++)
                for (uint32_t lane = 0; lane < TILE; lane++)
                    sums[(uintptr_t)(row + offset) * d_out + column + lane] = accumulator.sums[offset][lane];
        }
    }
}
