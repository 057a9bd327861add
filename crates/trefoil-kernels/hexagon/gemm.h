/* INT8 GEMM for Hexagon on tiled weights as they lie (HeteroVDiff 4.2). One interface, two engines:
 *
 *   gemm_hvx        the vector unit: 128 bytes of weights (32 columns x 4 inputs) are one vrmpy operand
 *   gemm_hmx_model  a MODEL in plain C of the matrix unit's arithmetic: 32 x 32 tiles, exact 32-bit sums. It says nothing about
 *                   the unit's speed, and it is not the unit.
 *
 * Sums are exact and wrap at 32 bits, so both, and every other engine, give the same integers. */
#ifndef TREFOIL_GEMM_H
#define TREFOIL_GEMM_H

#include <stdint.h>

/* Side of a weight tile, and bytes of one group row (32 columns x 4 inputs). */
#define TILE 32
#define GROUP_BYTES 128

/* sums[row * d_out + column] = sum of input[row * stride + i] * W[i][column].
 *
 * `weights` holds d_in / 32 tiles per tile column, tile columns one after the other, 128-byte aligned. d_in and d_out are
 * multiples of 32; `input` and `stride` are multiples of 4 (four codes are read as one word); `sums` is 128-byte aligned. */
typedef void gemm_kernel(const int8_t *input, uint32_t stride, uint32_t rows, const int8_t *weights, uint32_t d_in,
                         uint32_t d_out, int32_t *sums);

gemm_kernel gemm_hvx;
gemm_kernel gemm_hmx_model;

/* How a product ends, as on the CPU: y = sum * (input_scale * scales[j]) + bias[j], each operation rounded on its own. The scalar
 * core's single precision is IEEE 754; the vector unit's is not, so this part is scalar. */
struct epilogue {
    float input_scale;
    const float *scales;
    const float *bias;
};

/* y of every element of `rows` rows of d_out columns. */
void finish_f32(const int32_t *sums, uint32_t rows, uint32_t d_out, const struct epilogue *epilogue, float *out);

/* The INT8 codes of y: clip(round_half_even(y * inverse), -127, 127). */
void finish_codes(const int32_t *sums, uint32_t rows, uint32_t d_out, const struct epilogue *epilogue, float inverse,
                  int8_t *out);

#endif
