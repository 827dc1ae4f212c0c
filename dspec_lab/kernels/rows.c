/* CPU kernels for few rows: the ops of a decoder layer, weights bf16 or fp32, arithmetic fp32. Where the CPU multiplies
 * pairs of bf16 (AVX512_BF16) or tiles of them (AMX), bf16 weights meet activations that are rounded to bf16 too; sums
 * stay fp32.
 *
 * Every output number is computed by the same sequence of operations whatever the number of rows, so a row's result
 * does not depend on its neighbours (batch invariance): a verify pass over gamma + 1 rows gives, bit for bit, the rows
 * that one-token passes give. Loops are written with GCC/Clang vector extensions; 8 floats a vector, 16 in products where the CPU has AVX-512.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(_OPENMP)
#include <omp.h>
#endif

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));

#define INLINE static inline __attribute__((always_inline))

INLINE f8 load_f32(const float *p) { f8 r; memcpy(&r, p, 32); return r; }
INLINE void store_f32(float *p, f8 v) { memcpy(p, &v, 32); }
#if defined(__AVX2__)
#include <immintrin.h>
INLINE f8 load_bf16(const uint16_t *p) {
    return (f8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
}
#else
INLINE f8 load_bf16(const uint16_t *p) {
    h8 half; memcpy(&half, p, 16);
    u8 wide = __builtin_convertvector(half, u8) << 16;
    f8 r; memcpy(&r, &wide, 32); return r;
}
#endif
INLINE float one_bf16(uint16_t v) { uint32_t w = (uint32_t)v << 16; float r; memcpy(&r, &w, 4); return r; }
INLINE float one_f32(float v) { return v; }
INLINE float sum8(f8 a) { return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])); }
INLINE f8 splat(float v) { return (f8){v, v, v, v, v, v, v, v}; }

/* a b + c. The compiler must not choose per loop whether to fuse (built with -ffp-contract=off): rows would differ. */
#if defined(__FMA__) && defined(__AVX__)
#include <immintrin.h>
INLINE f8 madd(f8 a, f8 b, f8 c) { return (f8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
#else
INLINE f8 madd(f8 a, f8 b, f8 c) { return a * b + c; }
#endif

/* e^x to about 2 ulp for x <= 0 (scores less their maximum) and moderate x > 0; below -87 it gives 0. F: a vector of
 * floats, I: one of as many ints */
#define EXP(NAME, F, I)                                                                                               \
    INLINE F NAME##_pick(I mask, F yes, F no) {                                                                       \
        I a, b; memcpy(&a, &yes, sizeof a); memcpy(&b, &no, sizeof b);                                                \
        I bits = (mask & a) | (~mask & b);                                                                            \
        F r; memcpy(&r, &bits, sizeof r); return r;                                                                   \
    }                                                                                                                 \
    INLINE F NAME(F x) {                                                                                              \
        const F zero = {0}, low = zero - 87.0f, high = zero + 88.0f;                                                  \
        I under = x < low;                                                                                            \
        x = NAME##_pick(under, low, x);                                                                               \
        x = NAME##_pick(x > high, high, x);                                                                           \
        F t = x * 1.44269504088896341f;                                                                               \
        I whole = __builtin_convertvector(t + NAME##_pick(t < zero, zero - 0.5f, zero + 0.5f), I);                    \
        F n = __builtin_convertvector(whole, F);                                                                      \
        F r = x - n * 0.693359375f;                                                                                   \
        r = r + n * 2.12194440e-4f;                                                                                   \
        F y = zero + 1.9875691500e-4f;                                                                                \
        y = NAME##_madd(y, r, zero + 1.3981999507e-3f);                                                               \
        y = NAME##_madd(y, r, zero + 8.3334519073e-3f);                                                               \
        y = NAME##_madd(y, r, zero + 4.1665795894e-2f);                                                               \
        y = NAME##_madd(y, r, zero + 1.6666665459e-1f);                                                               \
        y = NAME##_madd(y, r, zero + 5.0000001201e-1f);                                                               \
        y = y * r * r + r + 1.0f;                                                                                     \
        I bits = (whole + 127) << 23;                                                                                 \
        F scale; memcpy(&scale, &bits, sizeof scale);                                                                 \
        y = y * scale;                                                                                                \
        return NAME##_pick(under, zero, y);                                                                           \
    }
#define exp8_madd madd
EXP(exp8, f8, i8)

/* Vectors of the products: as wide as the CPU multiplies. */
#if defined(__AVX512F__)
#define LANES 16
typedef float fv __attribute__((vector_size(64)));
INLINE fv fv_f32(const float *p) { return (fv)_mm512_loadu_ps(p); }
INLINE fv fv_bf16(const uint16_t *p) {
    return (fv)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
}
INLINE fv fv_madd(fv a, fv b, fv c) { return (fv)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
/* sums of the lanes of 4 vectors, each in the order of fv_sum */
INLINE __m128 fv_sum4(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d lo = _mm512_unpacklo_pd((__m512d)ab, (__m512d)cd), hi = _mm512_unpackhi_pd((__m512d)ab, (__m512d)cd);
    const __m512 all = _mm512_add_ps((__m512)lo, (__m512)hi);
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), (__m256)_mm512_extractf64x4_pd((__m512d)all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
INLINE fv fv_larger(fv a, fv b) { return (fv)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE float fv_sum(fv a) {
    const __m512 v = (__m512)a;
    return _mm_cvtss_f32(fv_sum4(v, v, v, v));
}
#else
#define LANES 8
typedef f8 fv;
INLINE fv fv_f32(const float *p) { return load_f32(p); }
INLINE fv fv_bf16(const uint16_t *p) { return load_bf16(p); }
INLINE fv fv_madd(fv a, fv b, fv c) { return madd(a, b, c); }
INLINE fv fv_larger(fv a, fv b) { fv r; for (int i = 0; i < LANES; i++) r[i] = a[i] > b[i] ? a[i] : b[i]; return r; }
INLINE float fv_sum(fv a) { return sum8(a); }
#endif
#if LANES == 16
typedef int32_t iv __attribute__((vector_size(64)));
#define fv_exp_madd fv_madd
EXP(fv_exp, fv, iv)
#else
#define fv_exp exp8
#endif
/* sums of 3 vectors */
INLINE void fv_sum3(const fv *a, float *total) {
#if LANES == 16
    float four[4];
    _mm_storeu_ps(four, fv_sum4((__m512)a[0], (__m512)a[1], (__m512)a[2], (__m512)a[2]));
    memcpy(total, four, 12);
#else
    for (int i = 0; i < 3; i++) total[i] = fv_sum(a[i]);
#endif
}

/* Y[m, n] (+)= sum_k W[n, k] X[m, k]; one accumulator of LANES lanes per output, k rising, lanes summed in a fixed order.
 * One weight row at a time, so that memory is read as one stream; AHEAD bytes of it are asked for early. */
#define AHEAD 4608

#define TILE(NAME, T, LOAD, ONE, MR)                                                                                  \
    INLINE void NAME(const T *W, const float *X, float *Y, long N, long K, long add, int fetch) {                     \
        fv acc[MR];                                                                                                   \
        for (int j = 0; j < MR; j++) acc[j] = (fv){0};                                                                \
        long k = 0;                                                                                                   \
        for (; k + LANES <= K; k += LANES) {                                                                          \
            if (fetch && (k * (long)sizeof(T) & 63) == 0) __builtin_prefetch((const char *)(W + k) + AHEAD, 0, 3);    \
            fv w = LOAD(W + k);                                                                                       \
            for (int j = 0; j < MR; j++) acc[j] = fv_madd(w, fv_f32(X + j * K + k), acc[j]);                          \
        }                                                                                                             \
        for (int j = 0; j < MR; j++) {                                                                                \
            float total = fv_sum(acc[j]);                                                                             \
            for (long t = k; t < K; t++) total = fmaf(ONE(W[t]), X[j * K + t], total);                                \
            Y[j * N] = add ? Y[j * N] + total : total;                                                                \
        }                                                                                                             \
    }

/* The same for 3 weight rows at once: each number of X that is read serves 3 products. Bit for bit the same result.
 * Where asked, the next 3 rows are fetched meanwhile. */
#define TRIO(NAME, T, LOAD, ONE, MR)                                                                                  \
    INLINE void NAME(const T *W, const float *X, float *Y, long N, long K, long add, int fetch) {                     \
        fv acc[MR][3];                                                                                                \
        for (int j = 0; j < MR; j++) acc[j][0] = acc[j][1] = acc[j][2] = (fv){0};                                     \
        long k = 0;                                                                                                   \
        for (; k + LANES <= K; k += LANES) {                                                                          \
            if (fetch && (k * (long)sizeof(T) & 63) == 0)                                                             \
                for (int i = 0; i < 3; i++) __builtin_prefetch(W + (3 + i) * K + k, 0, 3);                            \
            fv w0 = LOAD(W + k), w1 = LOAD(W + K + k), w2 = LOAD(W + 2 * K + k);                                      \
            for (int j = 0; j < MR; j++) {                                                                            \
                fv x = fv_f32(X + j * K + k);                                                                         \
                acc[j][0] = fv_madd(w0, x, acc[j][0]);                                                                \
                acc[j][1] = fv_madd(w1, x, acc[j][1]);                                                                \
                acc[j][2] = fv_madd(w2, x, acc[j][2]);                                                                \
            }                                                                                                         \
        }                                                                                                             \
        for (int j = 0; j < MR; j++) {                                                                                \
            float total[3];                                                                                           \
            fv_sum3(acc[j], total);                                                                                   \
            for (int i = 0; i < 3; i++) {                                                                             \
                for (long t = k; t < K; t++) total[i] = fmaf(ONE(W[i * K + t]), X[j * K + t], total[i]);              \
                Y[j * N + i] = add ? Y[j * N + i] + total[i] : total[i];                                              \
            }                                                                                                         \
        }                                                                                                             \
    }

/* Up to ROW_BY_ROW rows memory is the limit: one weight row at a time, for all rows. Beyond, arithmetic is: 3 weight rows at a
 * time, for a group of at most GROUP rows (as many as the registers hold), which stays in the first cache while UNIT
 * times 3 weight rows pass. What is left of N goes by one weight row.
 * Groups are of nearly equal size: few chains would wait for each other. */
#define UNIT 8
#if LANES == 16
#define GROUP 8
#define ROW_BY_ROW(M, K) ((M) <= 6)
#else
#define GROUP 4
#define ROW_BY_ROW(M, K) ((M) <= 6 || ((M) <= 8 && (K) <= 1024))
#endif

#define LINEAR(NAME, T, LOAD, ONE)                                                                                    \
    TILE(NAME##_1, T, LOAD, ONE, 1) TILE(NAME##_2, T, LOAD, ONE, 2)                                                   \
    TILE(NAME##_3, T, LOAD, ONE, 3) TILE(NAME##_4, T, LOAD, ONE, 4)                                                   \
    TILE(NAME##_5, T, LOAD, ONE, 5) TILE(NAME##_6, T, LOAD, ONE, 6)                                                   \
    TILE(NAME##_7, T, LOAD, ONE, 7) TILE(NAME##_8, T, LOAD, ONE, 8)                                                   \
    TRIO(NAME##_3x1, T, LOAD, ONE, 1) TRIO(NAME##_3x2, T, LOAD, ONE, 2)                                               \
    TRIO(NAME##_3x3, T, LOAD, ONE, 3) TRIO(NAME##_3x4, T, LOAD, ONE, 4)                                               \
    TRIO(NAME##_3x5, T, LOAD, ONE, 5) TRIO(NAME##_3x6, T, LOAD, ONE, 6)                                               \
    TRIO(NAME##_3x7, T, LOAD, ONE, 7) TRIO(NAME##_3x8, T, LOAD, ONE, 8)                                               \
    static void NAME##_row(const T *W, const float *X, float *Y, long M, long N, long K, long add) {                  \
        const long groups = (M + 7) / 8;                                                                              \
        for (long g = 0; g < groups; g++) {                                                                           \
            const long m = g * M / groups, size = (g + 1) * M / groups - m;                                           \
            const float *x = X + m * K; float *y = Y + m * N; const int f = g == 0;                                   \
            switch (size) {                                                                                           \
            case 1: NAME##_1(W, x, y, N, K, add, f); break;                                                           \
            case 2: NAME##_2(W, x, y, N, K, add, f); break;                                                           \
            case 3: NAME##_3(W, x, y, N, K, add, f); break;                                                           \
            case 4: NAME##_4(W, x, y, N, K, add, f); break;                                                           \
            case 5: NAME##_5(W, x, y, N, K, add, f); break;                                                           \
            case 6: NAME##_6(W, x, y, N, K, add, f); break;                                                           \
            case 7: NAME##_7(W, x, y, N, K, add, f); break;                                                           \
            default: NAME##_8(W, x, y, N, K, add, f);                                                                 \
            }                                                                                                         \
        }                                                                                                             \
    }                                                                                                                 \
    static void NAME##_trios(const T *W, const float *X, float *Y, long M, long N, long K, long add, long count) {    \
        const long groups = (M + GROUP - 1) / GROUP;                                                                  \
        for (long g = 0; g < groups; g++) {                                                                           \
            const long m = g * M / groups, size = (g + 1) * M / groups - m; const int f = g == 0;                     \
            for (long t = 0; t < count; t++) {                                                                        \
                const T *w = W + 3 * t * K; const float *x = X + m * K; float *y = Y + m * N + 3 * t;                 \
                switch (size) {                                                                                       \
                case 1: NAME##_3x1(w, x, y, N, K, add, f); break;                                                     \
                case 2: NAME##_3x2(w, x, y, N, K, add, f); break;                                                     \
                case 3: NAME##_3x3(w, x, y, N, K, add, f); break;                                                     \
                case 4: NAME##_3x4(w, x, y, N, K, add, f); break;                                                     \
                case 5: NAME##_3x5(w, x, y, N, K, add, f); break;                                                     \
                case 6: NAME##_3x6(w, x, y, N, K, add, f); break;                                                     \
                case 7: NAME##_3x7(w, x, y, N, K, add, f); break;                                                     \
                default: NAME##_3x8(w, x, y, N, K, add, f);                                                           \
                }                                                                                                     \
            }                                                                                                         \
        }                                                                                                             \
    }                                                                                                                 \
    void NAME(const T *W, const float *X, float *Y, long M, long N, long K, long add, uint16_t *unused) {             \
        (void)unused;                                                                                                 \
        if (ROW_BY_ROW(M, K)) {                                                                                       \
            _Pragma("omp parallel for schedule(static)") for (long n = 0; n < N; n++)                                 \
                NAME##_row(W + n * K, X, Y + n, M, N, K, add);                                                        \
            return;                                                                                                   \
        }                                                                                                             \
        const long trios = N / 3, units = (trios + UNIT - 1) / UNIT;                                                  \
        _Pragma("omp parallel for schedule(static)") for (long u = 0; u < units; u++) {                               \
            const long t = u * UNIT, count = t + UNIT < trios ? UNIT : trios - t;                                     \
            NAME##_trios(W + 3 * t * K, X, Y + 3 * t, M, N, K, add, count);                                           \
        }                                                                                                             \
        for (long n = 3 * trios; n < N; n++) NAME##_row(W + n * K, X, Y + n, M, N, K, add);                           \
    }

LINEAR(linear_f32, float, fv_f32, one_f32)

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define PRODUCTS "bf16 pairs"
/* Products of bf16 pairs, NR weight rows and MR rows at once, summed in fp32. X is rounded to bf16, in rows of K up to the
 * next multiple of 32, filled with zeros. */
#define PAIRS(NAME, NR, MR)                                                                                           \
    INLINE void NAME(const uint16_t *W, const uint16_t *X, float *Y, long N, long K, long add, int fetch) {           \
        __m512 acc[MR][NR];                                                                                           \
        const long wide = (K + 31) & ~31L;                                                                            \
        for (int j = 0; j < MR; j++) for (int i = 0; i < NR; i++) acc[j][i] = _mm512_setzero_ps();                    \
        for (long k = 0; k < wide; k += 32) {                                                                         \
            __m512bh w[NR];                                                                                           \
            const __mmask32 mask = K - k >= 32 ? 0xffffffffu : (1u << (K - k)) - 1;                                   \
            if (fetch) for (int i = 0; i < NR; i++)                                                                   \
                __builtin_prefetch((const char *)W + 2 * NR * k + 64 * i + (NR == 1 ? AHEAD : 2 * AHEAD), 0, 3);\
            for (int i = 0; i < NR; i++) w[i] = (__m512bh)_mm512_maskz_loadu_epi16(mask, W + i * K + k);              \
            for (int j = 0; j < MR; j++) {                                                                            \
                const __m512bh x = (__m512bh)_mm512_loadu_si512(X + j * wide + k);                                    \
                for (int i = 0; i < NR; i++) acc[j][i] = _mm512_dpbf16_ps(acc[j][i], w[i], x);                        \
            }                                                                                                         \
        }                                                                                                             \
        for (int j = 0; NR == 4 && j < MR; j++) {                                                                     \
            __m128 total = fv_sum4(acc[j][0], acc[j][1 % NR], acc[j][2 % NR], acc[j][3 % NR]);                        \
            if (add) total = _mm_add_ps(_mm_loadu_ps(Y + j * N), total);                                              \
            _mm_storeu_ps(Y + j * N, total);                                                                          \
        }                                                                                                             \
        for (int j = 0; NR == 1 && j < MR; j += 4) {                                                                  \
            float total[4];                                                                                           \
            _mm_storeu_ps(total, fv_sum4(acc[j][0], acc[(j + 1) % MR][0], acc[(j + 2) % MR][0], acc[(j + 3) % MR][0]));\
            for (int i = j; i < MR && i < j + 4; i++) Y[i * N] = add ? Y[i * N] + total[i - j] : total[i - j];        \
        }                                                                                                             \
    }
#define PAIRS_OF(NR, MOST)                                                                                            \
    PAIRS(pairs_##NR##x1, NR, 1) PAIRS(pairs_##NR##x2, NR, 2) PAIRS(pairs_##NR##x3, NR, 3)                            \
    PAIRS(pairs_##NR##x4, NR, 4) PAIRS(pairs_##NR##x5, NR, 5) PAIRS(pairs_##NR##x6, NR, 6)                            \
    PAIRS(pairs_##NR##x7, NR, 7) PAIRS(pairs_##NR##x8, NR, 8)                                                         \
    static void pairs_##NR(const uint16_t *W, const uint16_t *X, float *Y, long M, long N, long K, long add,          \
                           long count) {                                                                              \
        const long groups = (M + MOST - 1) / MOST, wide = (K + 31) & ~31L;                                            \
        for (long g = 0; g < groups; g++) {                                                                           \
            const long m = g * M / groups, size = (g + 1) * M / groups - m; const int f = g == 0;                     \
            const uint16_t *x = X + m * wide;                                                                         \
            for (long t = 0; t < count; t++) {                                                                        \
                const uint16_t *w = W + NR * t * K; float *y = Y + m * N + NR * t;                                    \
                switch (size) {                                                                                       \
                case 1: pairs_##NR##x1(w, x, y, N, K, add, f); break;                                                 \
                case 2: pairs_##NR##x2(w, x, y, N, K, add, f); break;                                                 \
                case 3: pairs_##NR##x3(w, x, y, N, K, add, f); break;                                                 \
                case 4: pairs_##NR##x4(w, x, y, N, K, add, f); break;                                                 \
                case 5: pairs_##NR##x5(w, x, y, N, K, add, f); break;                                                 \
                case 6: pairs_##NR##x6(w, x, y, N, K, add, f); break;                                                 \
                case 7: if (MOST > 6) pairs_##NR##x7(w, x, y, N, K, add, f); break;                                   \
                default: if (MOST > 6) pairs_##NR##x8(w, x, y, N, K, add, f);                                         \
                }                                                                                                     \
            }                                                                                                         \
        }                                                                                                             \
    }
PAIRS_OF(1, 8) PAIRS_OF(4, 6)

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define TILES
#include <sys/syscall.h>
#include <unistd.h>
/* Products of tiles: 16 weight rows by 32 numbers, as they lie in memory, times 32 numbers of up to 16 rows of X, packed.
 * So 16 rows of X take one pass over the weights and hardly more time than one row. */
typedef struct { uint8_t palette, start, unused[14]; uint16_t bytes[16]; uint8_t rows[16]; } TileShapes;
static int have_tiles;

/* the tile instructions do not tell the compiler which memory they read */
#define SETTLE_MEMORY() __asm__ volatile("" ::: "memory")

/* the system hands out tile registers to those who ask (ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) */
__attribute__((constructor)) static void ask_for_tiles(void) { have_tiles = !syscall(SYS_arch_prctl, 0x1023, 18); }

/* r[i][j] to r[j][i], 16 x 16 numbers of 32 bits */
INLINE void turn(__m512i *r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int h = 0; h < 2; h++) {
            r[i + 2 * h] = _mm512_unpacklo_epi64(t[i + h], t[i + 2 + h]);
            r[i + 2 * h + 1] = _mm512_unpackhi_epi64(t[i + h], t[i + 2 + h]);
        }
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < 4; i++) {
            t[8 * h + i] = _mm512_shuffle_i32x4(r[8 * h + i], r[8 * h + 4 + i], 0x88);
            t[8 * h + 4 + i] = _mm512_shuffle_i32x4(r[8 * h + i], r[8 * h + 4 + i], 0xdd);
        }
    for (int i = 0; i < 8; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
    }
}

/* 32 numbers of a row of X from k on as bf16, zeros beyond K */
INLINE __m512i rounded32(const float *x, long k, long K) {
    const long left = K - k;
    const __mmask16 low = left >= 16 ? 0xffff : (1u << left) - 1;
    const __mmask16 high = left >= 32 ? 0xffff : left > 16 ? (1u << (left - 16)) - 1 : 0;
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_maskz_loadu_ps(high, x + k + 16), _mm512_maskz_loadu_ps(low, x + k));
}

/* Step s of block b of 16 rows, as the second factor of a tile product: [16 pairs of k][16 rows][2]. */
static void pack_rows(const float *X, uint16_t *packed, long M, long K, long b, long s) {
    const long steps = (K + 31) / 32, count = M - 16 * b < 16 ? M - 16 * b : 16;
    __m512i r[16];
    for (long j = 0; j < 16; j++) r[j] = j < count ? rounded32(X + (16 * b + j) * K, 32 * s, K) : _mm512_setzero_si512();
    turn(r);
    for (long j = 0; j < 16; j++) _mm512_storeu_si512(packed + (b * steps + s) * 512 + 32 * j, r[j]);
}

/* One step: 32 weight rows (tiles 4, 5) against 16 rows of X, or 32. Rows beyond the last and numbers beyond K are zeros. */
#define TILE_STEPS(PAIR, STRIDE)                                                                                      \
    for (long s = 0; s < steps; s++) {                                                                                \
        const uint16_t *w = W + 32 * s; long wide = K;                                                                \
        if (fetch) for (int i = 32; i < 64; i++) /* the same numbers of the next weight rows */                       \
            __builtin_prefetch(W + (long)i * K + 32 * s, 0, 3);                                                       \
        if (count < 32 || 32 * s + 32 > K) {                                                                          \
            const long left = K - 32 * s;                                                                             \
            const __mmask32 mask = left >= 32 ? 0xffffffffu : (1u << left) - 1;                                       \
            for (long i = 0; i < 32; i++)                                                                             \
                _mm512_storeu_si512(edge + 32 * i, i < count ? _mm512_maskz_loadu_epi16(mask, w + i * K)              \
                                                             : _mm512_setzero_si512());                               \
            w = edge, wide = 32;                                                                                      \
            SETTLE_MEMORY();                                                                                          \
        }                                                                                                             \
        _tile_loadd(4, w, 2 * wide);                                                                                  \
        _tile_loadd(5, w + 16 * wide, 2 * wide);                                                                      \
        _tile_loadd(6, x + 16 * STRIDE * s, 2 * STRIDE);                                                              \
        _tile_dpbf16ps(0, 4, 6);                                                                                      \
        _tile_dpbf16ps(1, 5, 6);                                                                                      \
        if (PAIR) {                                                                                                   \
            _tile_loadd(7, x + (steps + s) * 512, 64);                                                                \
            _tile_dpbf16ps(2, 4, 7);                                                                                  \
            _tile_dpbf16ps(3, 5, 7);                                                                                  \
        }                                                                                                             \
    }

/* Y[m][n] of 16 rows of X from `sums` [16 n][16 m] */
INLINE void give_tile(const float *sums, float *Y, long rows, long outs, long N, long add) {
    __m512i r[16];
    const __mmask16 mask = (1u << outs) - 1;
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(sums + 16 * i);
    turn(r);
    for (long j = 0; j < rows; j++) {
        __m512 y = (__m512)r[j];
        if (add) y = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, Y + j * N), y);
        _mm512_mask_storeu_ps(Y + j * N, mask, y);
    }
}

/* Up to 32 weight rows times all rows of X. */
static void tile_unit(const uint16_t *W, const uint16_t *packed, float *Y, long M, long N, long K, long add, long count) {
    const long steps = (K + 31) / 32;
    uint16_t edge[32 * 32];
    float sums[4][256];
    if (M == 1) {
        const uint16_t *x = packed; const int fetch = 1;
        _tile_zero(0); _tile_zero(1);
        TILE_STEPS(0, 2)
        _tile_stored(0, sums[0], 4);
        _tile_stored(1, sums[0] + 16, 4);
        for (long i = 0; i < count; i++) Y[i] = add ? Y[i] + sums[0][i] : sums[0][i];
        return;
    }
    for (long m = 0; m < M; m += 32) {
        const uint16_t *x = packed + m * 32 * steps; const int fetch = m == 0, pair = M - m > 16;
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
        if (pair) { TILE_STEPS(1, 32) } else { TILE_STEPS(0, 32) }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        if (pair) { _tile_stored(2, sums[2], 64); _tile_stored(3, sums[3], 64); }
        for (long h = 0; h < 1 + pair; h++) {
            const long rows = M - m - 16 * h < 16 ? M - m - 16 * h : 16;
            for (long i = 0; i < 2 && 16 * i < count; i++)
                give_tile(sums[2 * h + i], Y + (m + 16 * h) * N + 16 * i, rows, count - 16 * i < 16 ? count - 16 * i : 16,
                          N, add);
        }
    }
}

/* `packed` has room for the rows of X, filled up to a multiple of 16, of K filled up to a multiple of 32. */
static void linear_tiles(const uint16_t *W, const float *X, float *Y, long M, long N, long K, long add, uint16_t *packed) {
    const long steps = (K + 31) / 32, blocks = (M + 15) / 16, units = (N + 31) / 32;
    TileShapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.rows[i] = 16;
        shapes.bytes[i] = M == 1 && i != 4 && i != 5 ? 4 : 64; /* one row of X: a column of one pair */
    }
    if (M == 1)
        for (long s = 0; s < steps; s++) _mm512_storeu_si512(packed + 32 * s, rounded32(X, 32 * s, K));
    _Pragma("omp parallel") {
        TileShapes before;
        if (M > 1) {
            _Pragma("omp for schedule(static)") for (long i = 0; i < blocks * steps; i++)
                pack_rows(X, packed, M, K, i / steps, i % steps);
        }
        /* torch's products use tiles too, and expect the shapes that they left */
        _tile_storeconfig(&before);
        SETTLE_MEMORY();
        _tile_loadconfig(&shapes);
        _Pragma("omp for schedule(static)") for (long u = 0; u < units; u++)
            tile_unit(W + 32 * u * K, packed, Y + 32 * u, M, N, K, add, N - 32 * u < 32 ? N - 32 * u : 32);
        if (before.palette) _tile_loadconfig(&before); else _tile_release();
    }
}
#endif

/* Up to 4 rows memory is the limit: one weight row at a time. Beyond 4 weight rows at once; `rounded` has room for X. */
void linear_bf16(const uint16_t *W, const float *X, float *Y, long M, long N, long K, long add, uint16_t *rounded) {
#if defined(TILES)
    if (have_tiles) { linear_tiles(W, X, Y, M, N, K, add, rounded); return; }
#endif
    const long wide = (K + 31) & ~31L;
    for (long m = 0; m < M; m++)
        for (long k = 0; k < wide; k += 16) {
            const long left = K - k;
            const __mmask16 mask = left >= 16 ? 0xffff : left > 0 ? (1u << left) - 1 : 0;
            const __m256bh low = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(mask, X + m * K + k));
            memcpy(rounded + m * wide + k, &low, 32);
        }
    const uint16_t *x = rounded;
    if (M <= 4) {
        _Pragma("omp parallel for schedule(static)") for (long n = 0; n < N; n++)
            pairs_1(W + n * K, x, Y + n, M, N, K, add, 1);
        return;
    }
    const long quads = N / 4, units = (quads + UNIT - 1) / UNIT;
    _Pragma("omp parallel for schedule(static)") for (long u = 0; u < units; u++) {
        const long t = u * UNIT, count = t + UNIT < quads ? UNIT : quads - t;
        pairs_4(W + 4 * t * K, x, Y + 4 * t, M, N, K, add, count);
    }
    for (long n = 4 * quads; n < N; n++) pairs_1(W + n * K, x, Y + n, M, N, K, add, 1);
}
#else
LINEAR(linear_bf16, uint16_t, fv_bf16, one_bf16)
#endif

/* how products are made: with bf16 tiles or pairs, or fp32 lanes */
#ifndef PRODUCTS
#if LANES == 16
#define PRODUCTS "fp32, 16 lanes"
#else
#define PRODUCTS "fp32, 8 lanes"
#endif
#endif
const char *products(void) {
#if defined(TILES)
    if (have_tiles) return "bf16 tiles";
#endif
    return PRODUCTS;
}

/* Y[m] = w * X[m] / sqrt(mean(X[m]^2) + eps) */
void rms_norm(const float *X, const float *w, float *Y, long M, long D, float eps) {
    _Pragma("omp parallel for schedule(static) if (M * D > 8192)") for (long m = 0; m < M; m++) {
        const float *x = X + m * D; float *y = Y + m * D;
        f8 acc = splat(0.0f); long d = 0;
        for (; d + 8 <= D; d += 8) { f8 v = load_f32(x + d); acc = madd(v, v, acc); }
        float total = sum8(acc);
        for (; d < D; d++) total = fmaf(x[d], x[d], total);
        float scale = 1.0f / sqrtf(total / (float)D + eps);
        for (d = 0; d < D; d++) y[d] = x[d] * scale * w[d];
    }
}

/* Y[m, i] = silu(G[m, i]) * G[m, I + i] for G [M, 2I] */
void silu_mul(const float *G, float *Y, long M, long I) {
    _Pragma("omp parallel for schedule(static) if (M * I > 8192)") for (long m = 0; m < M; m++) {
        const float *gate = G + m * 2 * I, *up = gate + I; float *y = Y + m * I;
        long i = 0;
        for (; i + LANES <= I; i += LANES) {
            const fv g = fv_f32(gate + i), one = (fv){0} + 1.0f;
            const fv r = g / (one + fv_exp(-g)) * fv_f32(up + i);
            memcpy(y + i, &r, sizeof r);
        }
        for (; i < I; i++) {
            f8 g = splat(gate[i]);
            y[i] = (g / (splat(1.0f) + exp8(-g)))[0] * up[i];
        }
    }
}

/* Index of the first row whose request, place or view leaves the caches or the work space, or -1. The caller can
 * thereby get markers wrong without memory being read or written where it must not. `place` or the view may be left
 * out (NULL). */
static long bad_row(const int64_t *place, const int64_t *first, const int64_t *prefix, const uint64_t *ancestors,
                    const int64_t *owner, const int64_t *capacity, long count, long M, long span) {
    for (long m = 0; m < M; m++) {
        if (owner[m] < 0 || owner[m] >= count) return m;
        const int64_t cap = capacity[owner[m]];
        if (cap % 32 || (place && (place[m] < 0 || place[m] >= cap))) return m;
        if (!first) continue;
        const int64_t from = first[m] < prefix[m] ? first[m] : prefix[m];
        const uint64_t bits = ancestors[m];
        if (from < 0 || prefix[m] > cap || bits >> 63 || (!bits && from == prefix[m])) return m;
        const int64_t stop = prefix[m] + (bits ? 64 - __builtin_clzll(bits) : 0);
        if (stop > cap || ((stop + 31) & ~31L) - (from & ~31L) > span) return m;
    }
    return -1;
}

/* Rotate the queries in place and put the rotated keys and the values of M new rows into their caches.
 * QKV [M, (H + 2 KH) E]; cosine, sine [M, E/2] (pairs e, e + E/2); row m goes to position place[m] of cache owner[m]
 * out of `count`; keys are kept transposed, [KH, E, capacity], values [KH, capacity, E].
 * Returns -1, or the first row with a bad place, and then has done nothing. */
long rope_store(float *QKV, const float *cosine, const float *sine, const int64_t *place, const int64_t *owner,
                float *const *keys, float *const *values, const int64_t *capacity, long count, long M, long H, long KH,
                long E) {
    const long bad = bad_row(place, NULL, NULL, NULL, owner, capacity, count, M, 0);
    if (bad >= 0) return bad;
    const long width = (H + 2 * KH) * E, half = E / 2;
    _Pragma("omp parallel for schedule(static) if (M > 8)") for (long m = 0; m < M; m++) {
        float *row = QKV + m * width; const float *c = cosine + m * half, *s = sine + m * half;
        for (long h = 0; h < H + KH; h++) {
            float *x = row + h * E;
            for (long e = 0; e < half; e++) {
                float a = x[e], b = x[e + half];
                x[e] = a * c[e] - b * s[e];
                x[e + half] = b * c[e] + a * s[e];
            }
        }
        const long cap = capacity[owner[m]], at = place[m];
        float *key = keys[owner[m]], *value = values[owner[m]];
        for (long h = 0; h < KH; h++) {
            const float *k = row + (H + h) * E, *v = row + (H + KH + h) * E;
            for (long e = 0; e < E; e++) key[(h * E + e) * cap + at] = k[e];
            memcpy(value + (h * cap + at) * E, v, sizeof(float) * (size_t)E);
        }
    }
    return -1;
}

/* Attention of G query heads of one row over one key head; scores [G, span], out [G, E]. Each head's numbers are made
 * by the same operations whatever G is. */
#define HEADS_AT_ONCE 4
#if defined(_OPENMP)
static long thread_number(void) { return omp_get_thread_num(); }
long scores_alive(void) { return HEADS_AT_ONCE * (long)omp_get_max_threads(); }
#else
static long thread_number(void) { return 0; }
long scores_alive(void) { return HEADS_AT_ONCE; }
#endif
INLINE void attend_heads(const int G, const float *q, const float *key, const float *value, float *score, float *out,
                         long cap, long E, long span, long from, long end, uint64_t bits, float scale) {
    const long extra = bits ? 64 - __builtin_clzll(bits) : 0, stop = end + extra, lo = from & ~31L;
    const long padded = (stop - lo + 31) & ~31L;
    /* whole blocks of 32 from a multiple of 32: the caches are padded to one, and unseen places are masked below */
    enum { PARTS = 32 / LANES };
    for (long s = lo; s < lo + padded; s += 32) {
        fv acc[HEADS_AT_ONCE][PARTS];
        for (int g = 0; g < G; g++) for (int i = 0; i < PARTS; i++) acc[g][i] = (fv){0};
        for (long e = 0; e < E; e++) {
            fv k[PARTS];
            for (int i = 0; i < PARTS; i++) k[i] = fv_f32(key + e * cap + s + LANES * i);
            for (int g = 0; g < G; g++) {
                const fv qe = (fv){0} + q[g * E + e] * scale;
                for (int i = 0; i < PARTS; i++) acc[g][i] = fv_madd(qe, k[i], acc[g][i]);
            }
        }
        for (int g = 0; g < G; g++)
            for (int i = 0; i < PARTS; i++) memcpy(score + g * span + (s - lo) + LANES * i, &acc[g][i], sizeof(fv));
    }
    float inverse[HEADS_AT_ONCE];
    for (int g = 0; g < G; g++) {
        float *mine = score + g * span;
        for (long s = lo; s < from; s++) mine[s - lo] = -INFINITY;
        for (long i = 0; i < extra; i++) if (!(bits >> i & 1)) mine[end + i - lo] = -INFINITY;
        for (long s = stop - lo; s < padded; s++) mine[s] = -INFINITY;
        fv best = fv_f32(mine);
        for (long s = LANES; s < padded; s += LANES) {
            const fv v = fv_f32(mine + s);
            best = fv_larger(v, best);
        }
        float lanes[LANES], top;
        memcpy(lanes, &best, sizeof best);
        top = lanes[0];
        for (int i = 1; i < LANES; i++) top = lanes[i] > top ? lanes[i] : top;
        fv mass = {0};
        for (long s = 0; s < padded; s += LANES) {
            const fv p = fv_exp(fv_f32(mine + s) - top);
            mass += p;
            memcpy(mine + s, &p, sizeof p);
        }
        inverse[g] = 1.0f / fv_sum(mass);
    }
    enum { WIDE = 4 };
    long e = 0;
    for (; e + WIDE * LANES <= E; e += WIDE * LANES) {
        fv acc[HEADS_AT_ONCE][WIDE];
        for (int g = 0; g < G; g++) for (int i = 0; i < WIDE; i++) acc[g][i] = (fv){0};
        for (long s = from; s < stop; s++) {
            if (s >= end && !(bits >> (s - end) & 1)) continue;
            fv v[WIDE];
            for (int i = 0; i < WIDE; i++) v[i] = fv_f32(value + s * E + e + LANES * i);
            for (int g = 0; g < G; g++) {
                const fv p = (fv){0} + score[g * span + s - lo];
                for (int i = 0; i < WIDE; i++) acc[g][i] = fv_madd(p, v[i], acc[g][i]);
            }
        }
        for (int g = 0; g < G; g++)
            for (int i = 0; i < WIDE; i++) {
                const fv y = acc[g][i] * inverse[g];
                memcpy(out + g * E + e + LANES * i, &y, sizeof y);
            }
    }
    for (; e < E; e += 8) /* what is left of a head */
        for (int g = 0; g < G; g++) {
            f8 acc = splat(0.0f);
            for (long s = from; s < stop; s++) {
                if (s >= end && !(bits >> (s - end) & 1)) continue;
                acc = madd(splat(score[g * span + s - lo]), load_f32(value + s * E + e), acc);
            }
            store_f32(out + g * E + e, acc * splat(inverse[g]));
        }
}

/* Attention of M rows, each over its own request's cache, one of `count`.
 * Row m sees cache positions first[m] .. prefix[m]-1, and prefix[m] + i where bit i of ancestors[m] is set (tree
 * drafts; a chain needs no bits). What lies between may hold anything, NaN included. The work array holds the scores
 * that each of `threads` threads is at: [threads, HEADS_AT_ONCE, span]. Query heads that share a key head are taken together, unless there are too few
 * rows to keep all threads at work.
 * Returns -1, or the first row with bad markers, and then has done nothing. */
long attend(const float *QKV, float *out, float *work, const int64_t *first, const int64_t *prefix,
            const uint64_t *ancestors, const int64_t *owner, float *const *keys, float *const *values,
            const int64_t *capacity, long count, long M, long H, long KH, long E, long span, float scale) {
    const long bad = bad_row(NULL, first, prefix, ancestors, owner, capacity, count, M, span);
    if (bad >= 0) return bad;
    const long width = (H + 2 * KH) * E, group = H / KH;
    const long most = M * KH < 8 ? 1 : HEADS_AT_ONCE, chunks = (group + most - 1) / most;
    _Pragma("omp parallel for schedule(static)") for (long task = 0; task < M * KH * chunks; task++) {
        const long m = task / (KH * chunks), kv = task / chunks % KH, chunk = task % chunks;
        const long h = kv * group + chunk * group / chunks, size = kv * group + (chunk + 1) * group / chunks - h;
        const long cap = capacity[owner[m]], from = first[m] < prefix[m] ? first[m] : prefix[m];
        const float *q = QKV + m * width + h * E;
        const float *key = keys[owner[m]] + kv * E * cap, *value = values[owner[m]] + kv * cap * E;
        float *score = work + thread_number() * HEADS_AT_ONCE * span, *y = out + (m * H + h) * E;
#define ATTEND(G) attend_heads(G, q, key, value, score, y, cap, E, span, from, prefix[m], ancestors[m], scale)
        switch (size) {
        case 1: ATTEND(1); break;
        case 2: ATTEND(2); break;
        case 3: ATTEND(3); break;
        default: ATTEND(4);
        }
    }
    return -1;
}

/* What a layer is made of; matrices in bf16 or fp32, norms in fp32. */
typedef struct { const float *norm_in, *norm_mid; const void *qkv, *out, *gate_up, *down; } Layer;

/* `layers` layers of the plain kind (norm, attention, residual, norm, gated MLP, residual) on M rows X [M, D], in place, by
 * the functions above in the order in which a caller would call them: one call in place of twelve a layer.
 * caches[layer][0] are the `count` requests' keys, caches[layer][1] their values. taps[t] is the layer after which X goes to
 * tapped[m, t, :]. `space` has room for M * (D + (H + 2 KH) E + H E + 3 I) numbers.
 * Returns -1, or the first row with bad markers, and then has done nothing. */
long layer_rows(const Layer *layer, long layers, long half, float *X, const float *cosine, const float *sine,
                const int64_t *place, const int64_t *first, const int64_t *prefix, const uint64_t *ancestors,
                const int64_t *owner, float *const *caches, const int64_t *capacity, long count, long M, long D, long I,
                long H, long KH, long E, long span, float scale, float eps, float *work, uint16_t *rounded, float *space,
                const int64_t *taps, long num_taps, float *tapped) {
    const long bad = bad_row(place, first, prefix, ancestors, owner, capacity, count, M, span);
    if (bad >= 0) return bad;
    const long wide = (H + 2 * KH) * E;
    float *normed = space, *qkv = normed + M * D, *mixed = qkv + M * wide, *gate_up = mixed + M * H * E;
    float *inner = gate_up + M * 2 * I;
#define PRODUCT(W, IN, OUT, N, K, ADD)                                                                                \
    if (half) linear_bf16((const uint16_t *)(W), IN, OUT, M, N, K, ADD, rounded);                                     \
    else linear_f32((const float *)(W), IN, OUT, M, N, K, ADD, rounded);
    for (long l = 0; l < layers; l++) {
        float *const *keys = caches + 2 * l * count, *const *values = keys + count;
        rms_norm(X, layer[l].norm_in, normed, M, D, eps);
        PRODUCT(layer[l].qkv, normed, qkv, wide, D, 0)
        rope_store(qkv, cosine, sine, place, owner, keys, values, capacity, count, M, H, KH, E);
        attend(qkv, mixed, work, first, prefix, ancestors, owner, keys, values, capacity, count, M, H, KH, E, span, scale);
        PRODUCT(layer[l].out, mixed, X, D, H * E, 1)
        rms_norm(X, layer[l].norm_mid, normed, M, D, eps);
        PRODUCT(layer[l].gate_up, normed, gate_up, 2 * I, D, 0)
        silu_mul(gate_up, inner, M, I);
        PRODUCT(layer[l].down, inner, X, D, I, 1)
        for (long t = 0; t < num_taps; t++)
            if (taps[t] == l)
                for (long m = 0; m < M; m++) memcpy(tapped + (m * num_taps + t) * D, X + m * D, sizeof(float) * (size_t)D);
    }
    return -1;
}

/* Keys and values of M rows of context X [M, D], the same for all layers, into each layer's caches: `rope_store` of the part of
 * `qkv` behind the queries. `space` has room for M * 2 KH E numbers. Returns as `rope_store`. */
long context_rows(const Layer *layer, long layers, long half, const float *X, const float *cosine, const float *sine,
                  const int64_t *place, const int64_t *owner, float *const *caches, const int64_t *capacity, long count,
                  long M, long D, long H, long KH, long E, uint16_t *rounded, float *space) {
    const long bad = bad_row(place, NULL, NULL, NULL, owner, capacity, count, M, 0), skip = H * E * D;
    if (bad >= 0) return bad;
    for (long l = 0; l < layers; l++) {
        float *const *keys = caches + 2 * l * count, *const *values = keys + count;
        PRODUCT((half ? (const void *)((const uint16_t *)layer[l].qkv + skip) : (const float *)layer[l].qkv + skip), X, space,
                2 * KH * E, D, 0)
        rope_store(space, cosine, sine, place, owner, keys, values, capacity, count, M, 0, KH, E);
    }
    return -1;
}

/* Index of the first largest of N numbers, or -1 where that is no finite number. */
static long first_largest(const float *x, long N) {
    long s = 0, at = 0;
    float best = x[0]; int finite = 1;
    if (N >= LANES) {
        fv top = fv_f32(x);
        __typeof__(top != top) odd = top != top;
        for (s = LANES; s + LANES <= N; s += LANES) {
            const fv v = fv_f32(x + s);
            odd |= v != v;
            top = fv_larger(v, top);
        }
        best = top[0];
        for (int i = 0; i < LANES; i++) {
            finite &= !odd[i];
            if (top[i] > best) best = top[i];
        }
    }
    for (; s < N; s++) {
        finite &= x[s] == x[s];
        if (x[s] > best) best = x[s];
    }
    if (!finite || !isfinite(best)) return -1;
    while (x[at] != best) at++;
    return at;
}

/* Greedy drafting slot by slot. At slot k the first counts[k] blocks still draft: each block's row of logits gets W2 e, e the row
 * of `table` at the token before, and its first largest entry is the next token (through `target_ids`, if there are any).
 * logits [N, W] and embedded [N, R] are slot by slot, as are the tokens found; previous [blocks] holds the anchors and is
 * overwritten. Without a table (of V rows) nothing is added. Returns -1, the first row without a finite largest entry, or -2
 * where a token leaves the table. */
long greedy_walk(const void *table, long V, const void *W2, long half, float *logits, const int64_t *counts, long slots,
                 const int64_t *target_ids, int64_t *previous, int64_t *tokens, float *embedded, long W, long R,
                 uint16_t *rounded) {
    long start = 0;
    for (long k = 0; k < slots; start += counts[k++]) {
        float *rows = logits + start * W;
        const long M = counts[k];
        if (table) {
            float *e = embedded + start * R;
            for (long b = 0; b < M; b++) {
                if (previous[b] < 0 || previous[b] >= V) return -2;
                for (long i = 0; i < R; i++)
                    e[b * R + i] = half ? one_bf16(((const uint16_t *)table)[previous[b] * R + i])
                                        : ((const float *)table)[previous[b] * R + i];
            }
            PRODUCT(W2, e, rows, W, R, 1)
        }
        for (long b = 0; b < M; b++) {
            const long at = first_largest(rows + b * W, W);
            if (at < 0) return start + b;
            tokens[start + b] = previous[b] = target_ids ? target_ids[at] : at;
        }
    }
    return -1;
}
