/* Reductions of several arrays to one. 16-bit types are summed in float32 and rounded once. */
#include "reduce.h"

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "engine.h"

/* Where the loader can choose a version of a function by processor, there is one with wide vectors. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11 && !defined(__SANITIZE_THREAD__)
#define BEST __attribute__((target_clones("default", "arch=x86-64-v3")))
#else
#define BEST
#endif

#if defined(__GNUC__) && !defined(__clang__)
#define NO_CARRIED_DEPENDENCE _Pragma("GCC ivdep")
#elif defined(__clang__)
#define NO_CARRIED_DEPENDENCE _Pragma("clang loop vectorize(assume_safety)")
#else
#define NO_CARRIED_DEPENDENCE
#endif

enum { BLOCK = 1024 }; /* elements that are summed at a time, so that the sum stays in the first-level cache */

typedef struct { float re, im; } complex64;
typedef struct { double re, im; } complex128;
typedef struct { uint16_t bits; } bfloat16;

static inline float from_bfloat16(bfloat16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline bfloat16 to_bfloat16(float value) { /* to nearest, ties to even */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bfloat16 quiet = {0x7fc0}, rounded = {(uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
    return value != value ? quiet : rounded;
}

#ifdef __FLT16_MAX__
__extension__ typedef _Float16 float16;
static inline float from_float16(float16 x) { return (float)x; }
static inline float16 to_float16(float value) { return (float16)value; }
#else
typedef struct { uint16_t bits; } float16;

static inline float from_float16(float16 x) {
    uint32_t sign = (uint32_t)(x.bits & 0x8000) << 16, exponent = (x.bits >> 10) & 31, fraction = x.bits & 0x3ff, bits;
    float value;
    if (exponent == 0) { /* zero or subnormal: fraction * 2^-24 */
        value = (float)fraction * 0x1p-24f;
        return sign ? -value : value;
    }
    bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    memcpy(&value, &bits, 4);
    return value;
}

static inline float16 to_float16(float value) { /* to nearest, ties to even */
    float16 result;
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000u)
        result.bits = (uint16_t)(sign | 0x7e00);
    else if (magnitude >= 0x477ff000u) /* 65520 and above */
        result.bits = (uint16_t)(sign | 0x7c00);
    else if (magnitude < 0x38800000u) { /* below 2^-14: a multiple of 2^-24 */
        float scaled = fabsf(value) * 0x1p24f;
        result.bits = (uint16_t)(sign | (uint32_t)nearbyintf(scaled));
    } else
        result.bits = (uint16_t)(sign | ((magnitude - 0x38000000u + 0xfff + ((magnitude >> 13) & 1)) >> 13));
    return result;
}
#endif

/* NAME: dst[i] = STORE(OP(... OP(LOAD(s0[i]), LOAD(s1[i])) ..., LOAD(sn[i]))). T: stored, A: computed in. */
#define REDUCTION(NAME, T, A, LOAD, OP, STORE)                                                                     \
    BEST static void NAME(void *to, const void *const *sources, int n, size_t count) {                             \
        T *dst = to;                                                                                               \
        const T *last = sources[n - 1], *s0 = sources[0];                                                          \
        if (n == 2) {                                                                                              \
            NO_CARRIED_DEPENDENCE                                                                                  \
            for (size_t i = 0; i < count; i++) dst[i] = STORE(OP(LOAD(s0[i]), LOAD(last[i])));                     \
            return;                                                                                                \
        }                                                                                                          \
        A sum[BLOCK];                                                                                              \
        for (size_t start = 0; start < count; start += BLOCK) {                                                    \
            size_t length = count - start < BLOCK ? count - start : BLOCK;                                         \
            for (size_t i = 0; i < length; i++) sum[i] = LOAD(s0[start + i]);                                      \
            for (int k = 1; k < n; k++) {                                                                          \
                const T *s = (const T *)sources[k] + start;                                                        \
                for (size_t i = 0; i < length; i++) sum[i] = OP(sum[i], LOAD(s[i]));                               \
            }                                                                                                      \
            for (size_t i = 0; i < length; i++) dst[start + i] = STORE(sum[i]);                                    \
        }                                                                                                          \
    }

#define AS_IS(x) (x)
#define ADD(a, b) ((a) + (b))
#define MULTIPLY(a, b) ((a) * (b))
#define LEAST(a, b) ((a) < (b) || (a) != (a) ? (a) : (b)) /* NaN wins */
#define MOST(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define BIT_AND(a, b) ((a) & (b))
#define BIT_OR(a, b) ((a) | (b))
#define BIT_XOR(a, b) ((a) ^ (b))
#define DIVIDED(x) ((x) / n)
#define FLOAT16(x) to_float16(x)
#define FLOAT16_DIVIDED(x) to_float16((x) / (float)n)
#define BFLOAT16(x) to_bfloat16(x)
#define BFLOAT16_DIVIDED(x) to_bfloat16((x) / (float)n)

#define ARITHMETIC(P, T, A, LOAD, STORE, STORE_DIVIDED)     \
    REDUCTION(P##_sum, T, A, LOAD, ADD, STORE)              \
    REDUCTION(P##_avg, T, A, LOAD, ADD, STORE_DIVIDED)      \
    REDUCTION(P##_product, T, A, LOAD, MULTIPLY, STORE)     \
    REDUCTION(P##_min, T, A, LOAD, LEAST, STORE)            \
    REDUCTION(P##_max, T, A, LOAD, MOST, STORE)

/* Sums of integers wrap around, as torch's do: they are taken in the unsigned type of the same width, or a wider one. */
#define INTEGER(P, T, U, W)                                                               \
    REDUCTION(P##_sum, T, U, (U), ADD, (T))                                               \
    REDUCTION(P##_product, T, U, (U), MULTIPLY, (T))                                      \
    BEST static void P##_avg(void *to, const void *const *sources, int n, size_t count) { \
        P##_sum(to, sources, n, count);                                                   \
        for (size_t i = 0; i < count; i++) ((T *)to)[i] = (T)((W)((T *)to)[i] / (W)n);     \
    }                                                                                     \
    REDUCTION(P##_min, T, T, AS_IS, LEAST, AS_IS)                                         \
    REDUCTION(P##_max, T, T, AS_IS, MOST, AS_IS)                                          \
    REDUCTION(P##_and, T, T, AS_IS, BIT_AND, AS_IS)                                       \
    REDUCTION(P##_or, T, T, AS_IS, BIT_OR, AS_IS)                                         \
    REDUCTION(P##_xor, T, T, AS_IS, BIT_XOR, AS_IS)

ARITHMETIC(f64, double, double, AS_IS, AS_IS, DIVIDED)
ARITHMETIC(f32, float, float, AS_IS, AS_IS, DIVIDED)
ARITHMETIC(f16, float16, float, from_float16, FLOAT16, FLOAT16_DIVIDED)
ARITHMETIC(bf16, bfloat16, float, from_bfloat16, BFLOAT16, BFLOAT16_DIVIDED)
INTEGER(i64, int64_t, uint64_t, int64_t)
INTEGER(i32, int32_t, uint32_t, int64_t)
INTEGER(i16, int16_t, uint32_t, int64_t)
INTEGER(i8, int8_t, uint32_t, int64_t)
INTEGER(u64, uint64_t, uint64_t, uint64_t)
INTEGER(u32, uint32_t, uint32_t, uint64_t)
INTEGER(u16, uint16_t, uint32_t, uint64_t)
INTEGER(u8, uint8_t, uint32_t, uint64_t)

#define COMPLEX(P, T)                                                                                             \
    static inline T P##_added(T a, T b) { return (T){a.re + b.re, a.im + b.im}; }                                 \
    static inline T P##_multiplied(T a, T b) { return (T){a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}; } \
    static inline T P##_divided(T a, int n) { return (T){a.re / n, a.im / n}; }
#define C64_DIVIDED(x) c64_divided(x, n)
#define C128_DIVIDED(x) c128_divided(x, n)

COMPLEX(c64, complex64)
COMPLEX(c128, complex128)
REDUCTION(c64_sum, complex64, complex64, AS_IS, c64_added, AS_IS)
REDUCTION(c64_product, complex64, complex64, AS_IS, c64_multiplied, AS_IS)
REDUCTION(c64_avg, complex64, complex64, AS_IS, c64_added, C64_DIVIDED)
REDUCTION(c128_sum, complex128, complex128, AS_IS, c128_added, AS_IS)
REDUCTION(c128_product, complex128, complex128, AS_IS, c128_multiplied, AS_IS)
REDUCTION(c128_avg, complex128, complex128, AS_IS, c128_added, C128_DIVIDED)

typedef void reduction(void *, const void *const *, int, size_t);

#define FLOATING(P) {P##_sum, P##_avg, P##_product, P##_min, P##_max, NULL, NULL, NULL}
#define WHOLE(P) {P##_sum, P##_avg, P##_product, P##_min, P##_max, P##_and, P##_or, P##_xor}

/* Truth values are 0 and 1: a sum is an or, a product an and, as elsewhere in torch. */
static reduction *const REDUCTIONS[ML_DTYPES][8] = {
    [ML_F64] = FLOATING(f64), [ML_F32] = FLOATING(f32), [ML_F16] = FLOATING(f16), [ML_BF16] = FLOATING(bf16),
    [ML_I64] = WHOLE(i64), [ML_I32] = WHOLE(i32), [ML_I16] = WHOLE(i16), [ML_I8] = WHOLE(i8),
    [ML_U64] = WHOLE(u64), [ML_U32] = WHOLE(u32), [ML_U16] = WHOLE(u16), [ML_U8] = WHOLE(u8),
    [ML_BOOL] = {u8_or, NULL, u8_and, u8_and, u8_or, u8_and, u8_or, u8_xor},
    [ML_C64] = {c64_sum, c64_avg, c64_product}, [ML_C128] = {c128_sum, c128_avg, c128_product},
};

int ml_reduces(int dtype, int op) { return REDUCTIONS[dtype][op] != NULL; }

void ml_reduce(int dtype, int op, void *dst, const void *const *sources, int num_sources, size_t count) {
    if (num_sources > 1)
        REDUCTIONS[dtype][op](dst, sources, num_sources, count);
    else if (dst != sources[0])
        memmove(dst, sources[0], count * ml_element_bytes(dtype));
}
