/* From sums to outputs on the scalar core. Compiled without contraction. */
#include "gemm.h"

static float finished(int32_t sum, uint32_t column, const struct epilogue *epilogue)
{
    const float scale = epilogue->input_scale * epilogue->scales[column];
    const float product = (float)sum * scale;
    return product + epilogue->bias[column];
}

void finish_f32(const int32_t *sums, uint32_t rows, uint32_t d_out, const struct epilogue *epilogue, float *out)
{
    for (uint32_t row = 0; row < rows; row++)
        for (uint32_t column = 0; column < d_out; column++)
            out[row * d_out + column] = finished(sums[row * d_out + column], column, epilogue);
}

void finish_codes(const int32_t *sums, uint32_t rows, uint32_t d_out, const struct epilogue *epilogue, float inverse,
                  int8_t *out)
{
    /* Adding 1.5 * 2^23 leaves no fraction bits, so the addition rounds half to even; see math.rs. */
    const float rounder = 12582912.0f;
    for (uint32_t row = 0; row < rows; row++) {
        for (uint32_t column = 0; column < d_out; column++) {
            float scaled = finished(sums[row * d_out + column], column, epilogue) * inverse;
            scaled = scaled > -127.0f ? scaled : -127.0f;
            scaled = scaled < 127.0f ? scaled : 127.0f;
            scaled = scaled + rounder;
            uint32_t bits;
            __builtin_memcpy(&bits, &scaled, sizeof bits);
            out[row * d_out + column] = (int8_t)bits;
        }
    }
}
