/* CPU kernels for few rows: the ops of a decoder layer for 1..128 tokens, weights bf16 or fp32, all arithmetic fp32.
 *
 * Every output number is computed by the same sequence of operations whatever the number of rows, so a row's result
 * does not depend on its neighbours (batch invariance): a verify pass over gamma + 1 rows gives, bit for bit, the rows
 * that one-token passes give. Loops are written with GCC/Clang vector extensions; 8 floats a vector.
 */
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

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

INLINE f8 pick(i8 mask, f8 yes, f8 no) {
    i8 a, b; memcpy(&a, &yes, 32); memcpy(&b, &no, 32);
    i8 bits = (mask & a) | (~mask & b);
    f8 r; memcpy(&r, &bits, 32); return r;
}

/* e^x to about 2 ulp for x <= 0 (scores less their maximum) and moderate x > 0; below -87 it gives 0 */
INLINE f8 exp8(f8 x) {
    const f8 low = splat(-87.0f), high = splat(88.0f);
    i8 under = x < low;
    x = pick(under, low, x);
    x = pick(x > high, high, x);
    f8 t = x * splat(1.44269504088896341f);
    i8 whole = __builtin_convertvector(t + pick(t < splat(0.0f), splat(-0.5f), splat(0.5f)), i8);
    f8 n = __builtin_convertvector(whole, f8);
    f8 r = x - n * splat(0.693359375f);
    r = r + n * splat(2.12194440e-4f);
    f8 y = splat(1.9875691500e-4f);
    y = madd(y, r, splat(1.3981999507e-3f));
    y = madd(y, r, splat(8.3334519073e-3f));
    y = madd(y, r, splat(4.1665795894e-2f));
    y = madd(y, r, splat(1.6666665459e-1f));
    y = madd(y, r, splat(5.0000001201e-1f));
    y = y * r * r + r + splat(1.0f);
    i8 bits = (whole + 127) << 23;
    f8 scale; memcpy(&scale, &bits, 32);
    y = y * scale;
    return pick(under, splat(0.0f), y);
}

/* Y[m, n] (+)= sum_k W[n, k] X[m, k]; one accumulator of 8 lanes per output, k rising, lanes summed in a fixed order.
 * One weight row at a time, so that memory is read as one stream; AHEAD bytes of it are asked for early. */
#define AHEAD 4608

#define TILE(NAME, T, LOAD, ONE, MR)                                                                                  \
    INLINE void NAME(const T *W, const float *X, float *Y, long N, long K, long add, int fetch) {                     \
        f8 acc[MR];                                                                                                   \
        for (int j = 0; j < MR; j++) acc[j] = splat(0.0f);                                                            \
        long k = 0;                                                                                                   \
        for (; k + 8 <= K; k += 8) {                                                                                  \
            if (fetch && (k * (long)sizeof(T) & 63) == 0) __builtin_prefetch((const char *)(W + k) + AHEAD, 0, 3);    \
            f8 w = LOAD(W + k);                                                                                       \
            for (int j = 0; j < MR; j++) acc[j] = madd(w, load_f32(X + j * K + k), acc[j]);                           \
        }                                                                                                             \
        for (int j = 0; j < MR; j++) {                                                                                \
            float total = sum8(acc[j]);                                                                               \
            for (long t = k; t < K; t++) total = fmaf(ONE(W[t]), X[j * K + t], total);                                \
            Y[j * N] = add ? Y[j * N] + total : total;                                                                \
        }                                                                                                             \
    }

/* The same for 3 weight rows at once: each number of X that is read serves 3 products. Bit for bit the same result.
 * Where asked, the next 3 rows are fetched meanwhile. */
#define TRIO(NAME, T, LOAD, ONE, MR)                                                                                  \
    INLINE void NAME(const T *W, const float *X, float *Y, long N, long K, long add, int fetch) {                     \
        f8 acc[MR][3];                                                                                                \
        for (int j = 0; j < MR; j++) acc[j][0] = acc[j][1] = acc[j][2] = splat(0.0f);                                 \
        long k = 0;                                                                                                   \
        for (; k + 8 <= K; k += 8) {                                                                                  \
            if (fetch && (k * (long)sizeof(T) & 63) == 0)                                                             \
                for (int i = 0; i < 3; i++) __builtin_prefetch(W + (3 + i) * K + k, 0, 3);                            \
            f8 w0 = LOAD(W + k), w1 = LOAD(W + K + k), w2 = LOAD(W + 2 * K + k);                                      \
            for (int j = 0; j < MR; j++) {                                                                            \
                f8 x = load_f32(X + j * K + k);                                                                       \
                acc[j][0] = madd(w0, x, acc[j][0]);                                                                   \
                acc[j][1] = madd(w1, x, acc[j][1]);                                                                   \
                acc[j][2] = madd(w2, x, acc[j][2]);                                                                   \
            }                                                                                                         \
        }                                                                                                             \
        for (int j = 0; j < MR; j++)                                                                                  \
            for (int i = 0; i < 3; i++) {                                                                             \
                float total = sum8(acc[j][i]);                                                                        \
                for (long t = k; t < K; t++) total = fmaf(ONE(W[i * K + t]), X[j * K + t], total);                    \
                Y[j * N + i] = add ? Y[j * N + i] + total : total;                                                    \
            }                                                                                                         \
    }

/* Up to 8 rows memory is the limit: one weight row at a time, for all rows. Beyond, arithmetic is, and so it is where 7
 * or 8 rows are too wide for the first cache: a group of at most 4 rows stays there while UNIT times 3 weight rows
 * pass. What is left of N goes by one weight row.
 * Groups are of nearly equal size: few chains would wait for each other. */
#define UNIT 8
#define WIDE 1024

#define LINEAR(NAME, T, LOAD, ONE)                                                                                    \
    TILE(NAME##_1, T, LOAD, ONE, 1) TILE(NAME##_2, T, LOAD, ONE, 2)                                                   \
    TILE(NAME##_3, T, LOAD, ONE, 3) TILE(NAME##_4, T, LOAD, ONE, 4)                                                   \
    TILE(NAME##_5, T, LOAD, ONE, 5) TILE(NAME##_6, T, LOAD, ONE, 6)                                                   \
    TILE(NAME##_7, T, LOAD, ONE, 7) TILE(NAME##_8, T, LOAD, ONE, 8)                                                   \
    TRIO(NAME##_3x1, T, LOAD, ONE, 1) TRIO(NAME##_3x2, T, LOAD, ONE, 2)                                               \
    TRIO(NAME##_3x3, T, LOAD, ONE, 3) TRIO(NAME##_3x4, T, LOAD, ONE, 4)                                               \
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
        const long groups = (M + 3) / 4;                                                                              \
        for (long g = 0; g < groups; g++) {                                                                           \
            const long m = g * M / groups, size = (g + 1) * M / groups - m; const int f = g == 0;                     \
            for (long t = 0; t < count; t++) {                                                                        \
                const T *w = W + 3 * t * K; const float *x = X + m * K; float *y = Y + m * N + 3 * t;                 \
                switch (size) {                                                                                       \
                case 1: NAME##_3x1(w, x, y, N, K, add, f); break;                                                     \
                case 2: NAME##_3x2(w, x, y, N, K, add, f); break;                                                     \
                case 3: NAME##_3x3(w, x, y, N, K, add, f); break;                                                     \
                default: NAME##_3x4(w, x, y, N, K, add, f);                                                           \
                }                                                                                                     \
            }                                                                                                         \
        }                                                                                                             \
    }                                                                                                                 \
    void NAME(const T *W, const float *X, float *Y, long M, long N, long K, long add) {                               \
        if (M <= 6 || (M <= 8 && K <= WIDE)) {                                                                        \
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

LINEAR(linear_bf16, uint16_t, load_bf16, one_bf16)
LINEAR(linear_f32, float, load_f32, one_f32)

/* Y[m] = w * X[m] / sqrt(mean(X[m]^2) + eps) */
void rms_norm(const float *X, const float *w, float *Y, long M, long D, float eps) {
    for (long m = 0; m < M; m++) {
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
    _Pragma("omp parallel for schedule(static) if (M * I > 16384)") for (long m = 0; m < M; m++) {
        const float *gate = G + m * 2 * I, *up = gate + I; float *y = Y + m * I;
        long i = 0;
        for (; i + 8 <= I; i += 8) {
            f8 g = load_f32(gate + i);
            store_f32(y + i, g / (splat(1.0f) + exp8(-g)) * load_f32(up + i));
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
    for (long m = 0; m < M; m++) {
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

/* acc += p * value, 8 `parts` numbers */
INLINE void add_scaled(f8 *acc, int parts, float p, const float *value) {
    for (int i = 0; i < parts; i++) acc[i] = madd(splat(p), load_f32(value + 8 * i), acc[i]);
}

/* Attention of M rows, each over its own request's cache, one of `count`.
 * Row m sees cache positions first[m] .. prefix[m]-1, and prefix[m] + i where bit i of ancestors[m] is set (tree
 * drafts; a chain needs no bits). What lies between may hold anything, NaN included. The work array holds a row of
 * scores per thread-owned (row, head): [M, H, span].
 * Returns -1, or the first row with bad markers, and then has done nothing. */
long attend(const float *QKV, float *out, float *work, const int64_t *first, const int64_t *prefix,
            const uint64_t *ancestors, const int64_t *owner, float *const *keys, float *const *values,
            const int64_t *capacity, long count, long M, long H, long KH, long E, long span, float scale) {
    const long bad = bad_row(NULL, first, prefix, ancestors, owner, capacity, count, M, span);
    if (bad >= 0) return bad;
    const long width = (H + 2 * KH) * E, group = H / KH;
    _Pragma("omp parallel for schedule(static)") for (long task = 0; task < M * H; task++) {
        const long m = task / H, h = task % H, kv = h / group, cap = capacity[owner[m]];
        const float *q = QKV + m * width + h * E;
        const float *key = keys[owner[m]] + kv * E * cap, *value = values[owner[m]] + kv * cap * E;
        float *score = work + task * span;
        const long end = prefix[m], from = first[m] < end ? first[m] : end, lo = from & ~31L;
        const uint64_t bits = ancestors[m];
        const long extra = bits ? 64 - __builtin_clzll(bits) : 0;
        const long stop = end + extra;
        /* whole blocks of 32 from a multiple of 32: the caches are padded to one, and unseen places are masked below */
        for (long s = lo; s < stop; s += 32) {
            f8 acc[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
            for (long e = 0; e < E; e++) {
                const float *k = key + e * cap + s; const f8 qe = splat(q[e] * scale);
                for (int i = 0; i < 4; i++) acc[i] = madd(qe, load_f32(k + 8 * i), acc[i]);
            }
            for (int i = 0; i < 4; i++) store_f32(score + (s - lo) + 8 * i, acc[i]);
        }
        float top = -INFINITY;
        for (long s = from; s < end; s++) top = score[s - lo] > top ? score[s - lo] : top;
        for (long i = 0; i < extra; i++)
            if (bits >> i & 1) top = score[end + i - lo] > top ? score[end + i - lo] : top;
        const long padded = (stop - lo + 31) & ~31L;
        for (long s = lo; s < from; s++) score[s - lo] = -INFINITY;
        for (long i = 0; i < extra; i++) if (!(bits >> i & 1)) score[end + i - lo] = -INFINITY;
        for (long s = stop - lo; s < padded; s++) score[s] = -INFINITY;
        f8 mass = splat(0.0f);
        for (long s = 0; s < padded; s += 8) {
            f8 p = exp8(load_f32(score + s) - splat(top));
            mass += p;
            store_f32(score + s, p);
        }
        const float inverse = 1.0f / sum8(mass);
        float *y = out + (m * H + h) * E;
        for (long e = 0; e < E; e += 64) {
            const int parts = E - e < 64 ? (int)((E - e) / 8) : 8;
            f8 acc[8];
            for (int i = 0; i < 8; i++) acc[i] = splat(0.0f);
            if (parts == 8)
                for (long s = from; s < end; s++) add_scaled(acc, 8, score[s - lo], value + s * E + e);
            else
                for (long s = from; s < end; s++) add_scaled(acc, parts, score[s - lo], value + s * E + e);
            for (long i = 0; i < extra; i++)
                if (bits >> i & 1) add_scaled(acc, parts, score[end + i - lo], value + (end + i) * E + e);
            for (int i = 0; i < parts; i++) store_f32(y + e + 8 * i, acc[i] * splat(inverse));
        }
    }
    return -1;
}
