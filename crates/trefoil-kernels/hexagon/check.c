/* The program that tests run under an emulator: reads problems from standard input, writes results to standard output. No C
 * library: a start, three system calls and memset.
 *
 * A problem is a struct problem, d_out scales, d_out biases (f32), the weights (d_in * d_out bytes) and the input (rows * stride
 * bytes). Its answer is rows * d_out sums (int32) of the vector unit, as many of the matrix unit's model, then rows * d_out f32
 * outputs and rows * d_out codes. Ends at the end of the input; exit code 2 for a problem that does not fit. */
#include "gemm.h"

struct problem {
    uint32_t rows, stride, d_in, d_out;
    float input_scale, inverse;
};

#define MOST_COLUMNS 1024
#define MOST_BYTES (1 << 20)
#define MOST_OUTPUTS (1 << 16)

static int8_t weights[MOST_BYTES] __attribute__((aligned(128)));
static int8_t input[MOST_BYTES] __attribute__((aligned(128)));
static float scales[MOST_COLUMNS], bias[MOST_COLUMNS];
static int32_t sums[MOST_OUTPUTS] __attribute__((aligned(128)));
static float floats[MOST_OUTPUTS];
static int8_t codes[MOST_OUTPUTS];

enum { SYS_READ = 63, SYS_WRITE = 64, SYS_EXIT_GROUP = 94 };

static long system_call(long number, long first, long second, long third)
{
    register long r6 __asm__("r6") = number;
    register long r0 __asm__("r0") = first;
    register long r1 __asm__("r1") = second;
    register long r2 __asm__("r2") = third;
    __asm__ volatile("trap0(#1)" : "+r"(r0) : "r"(r6), "r"(r1), "r"(r2) : "memory");
    return r0;
}

static void leave(int code)
{
    for (;;)
        system_call(SYS_EXIT_GROUP, code, 0, 0);
}

void *memset(void *to, int value, unsigned long bytes)
{
    volatile char *at = to;
    while (bytes--)
        *at++ = (char)value;
    return to;
}

void *memcpy(void *to, const void *from, unsigned long bytes)
{
    volatile char *at = to;
    const char *source = from;
    while (bytes--)
        *at++ = *source++;
    return to;
}

/* Reads exactly `bytes`; 0 at the end of the input before the first of them. */
static int read_all(void *to, uint32_t bytes)
{
    uint32_t have = 0;
    while (have < bytes) {
        const long got = system_call(SYS_READ, 0, (long)to + (long)have, (long)(bytes - have));
        if (got <= 0) {
            if (have == 0 && got == 0)
                return 0;
            leave(3);
        }
        have += (uint32_t)got;
    }
    return 1;
}

static void write_all(const void *from, uint32_t bytes)
{
    uint32_t done = 0;
    while (done < bytes) {
        const long wrote = system_call(SYS_WRITE, 1, (long)from + (long)done, (long)(bytes - done));
        if (wrote <= 0)
            leave(3);
        done += (uint32_t)wrote;
    }
}

void run(void)
{
    struct problem problem;
    while (read_all(&problem, sizeof problem)) {
        const uint32_t outputs = problem.rows * problem.d_out;
        if (problem.d_out > MOST_COLUMNS || problem.d_out % TILE || problem.d_in % TILE || problem.stride % 4 ||
            problem.stride < problem.d_in || problem.d_in > MOST_BYTES / MOST_COLUMNS || problem.rows > MOST_OUTPUTS / MOST_COLUMNS ||
            problem.stride > MOST_BYTES / (MOST_OUTPUTS / MOST_COLUMNS))
            leave(2);
        read_all(scales, problem.d_out * sizeof(float));
        read_all(bias, problem.d_out * sizeof(float));
        read_all(weights, problem.d_in * problem.d_out);
        read_all(input, problem.rows * problem.stride);
        const struct epilogue epilogue = {problem.input_scale, scales, bias};
        gemm_hvx(input, problem.stride, problem.rows, weights, problem.d_in, problem.d_out, sums);
        write_all(sums, outputs * sizeof(int32_t));
        finish_f32(sums, problem.rows, problem.d_out, &epilogue, floats);
        finish_codes(sums, problem.rows, problem.d_out, &epilogue, problem.inverse, codes);
        memset(sums, 0x55, outputs * sizeof(int32_t));
        gemm_hmx_model(input, problem.stride, problem.rows, weights, problem.d_in, problem.d_out, sums);
        write_all(sums, outputs * sizeof(int32_t));
        write_all(floats, outputs * sizeof(float));
        write_all(codes, outputs);
    }
    leave(0);
}

/* The stack pointer may be anything on entry; vectors are spilled to 128-byte boundaries. */
__attribute__((naked)) void _start(void)
{
    __asm__ volatile("r29 = and(r29, #-128)\n\tcall run");
}
