// What all kernels share. The host puts WIDTH (16 or 1) and one of the dot_*.cl files before the operators.
//
// A work-item computes vectors of WIDTH lanes: 16 where a work-item is a CPU thread, 1 where it is a GPU lane. Every line below
// is the same IEEE operation for both, so the width changes no bit. No operation may be contracted, reassociated or replaced by
// a library function.

#pragma OPENCL FP_CONTRACT OFF

#if WIDTH == 16
#define V(name) name##16
#define LOAD(at, pointer) vload16(0, (pointer) + (at))
// A vector of a type that asks for no more alignment than its elements is stored at once; PoCL's vstore16 writes codes one by one.
typedef char16 char16_anywhere __attribute__((aligned(1)));
typedef int16 int16_anywhere __attribute__((aligned(4)));
typedef float16 float16_anywhere __attribute__((aligned(4)));
#define STORE_WHOLE(type, value, pointer) (*(__global type##16_anywhere *)(pointer) = (value))
#else
#define V(name) name
#define LOAD(at, pointer) ((pointer)[at])
#endif

// Rows, or keys, that a work-item of an operator on rows does one after the other: starting a group costs a CPU device more than
// half a microsecond. A GPU lane does one.
#if WIDTH == 16
#define ROW_BATCH 16
#else
#define ROW_BATCH 1
#endif

// Compiled into every caller, so that what is constant there is constant inside.
#define INLINE static inline __attribute__((always_inline))

#define TILE 32
#define LANES 16
#define KEY_BLOCK 256

// Operations of `row_operator`, as in rows.rs.
#define OP_COPY 0u
#define OP_LAYER_NORM 1u
#define OP_RMS_NORM 2u
#define OP_SOFTMAX 3u
// Inside a softmax only.
#define OP_SCALE 4u
#define MODULATION_NONE 0u
#define MODULATION_AFFINE 1u
#define MODULATION_ADA_LN 2u
// Destinations, as in call.rs.
#define SINK_F32 0u
#define SINK_CODES 1u
#define SINK_RESIDUAL 2u
#define SINK_DYNAMIC 3u
// Activations.
#define ACT_GELU_TANH 1u
#define ACT_SILU 2u

// The first `valid` lanes from `pointer`, `fill` in the others.
INLINE V(float) load_lanes(const __global float *pointer, uint valid, float fill)
{
#if WIDTH == 16
    if (valid >= 16)
        return vload16(0, pointer);
    float lanes[16];
    for (uint lane = 0; lane < 16; lane++)
        lanes[lane] = lane < valid ? pointer[lane] : fill;
    return vload16(0, lanes);
#else
    return valid ? pointer[0] : fill;
#endif
}

INLINE void store_lanes(V(float) value, __global float *pointer, uint valid)
{
#if WIDTH == 16
    if (valid >= 16) {
        STORE_WHOLE(float, value, pointer);
        return;
    }
    float lanes[16];
    vstore16(value, 0, lanes);
    for (uint lane = 0; lane < valid; lane++)
        pointer[lane] = lanes[lane];
#else
    if (valid)
        pointer[0] = value;
#endif
}

// All lanes are written: zero from `valid` on.
INLINE void store_codes(V(char) value, __global char *pointer, uint valid)
{
#if WIDTH == 16
    if (valid < 16) {
        char lanes[16];
        vstore16(value, 0, lanes);
        for (uint lane = valid; lane < 16; lane++)
            lanes[lane] = 0;
        value = vload16(0, lanes);
    }
    STORE_WHOLE(char, value, pointer);
#else
    pointer[0] = valid ? value : (char)0;
#endif
}
