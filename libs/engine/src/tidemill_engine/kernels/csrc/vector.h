// Vectors of the widest float registers that the machine has, by GCC's vector extension.
#pragma once
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));

INLINE vf load(const float *p) {
    vf v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(float *p, vf v) { memcpy(p, &v, sizeof v); }

INLINE vf splat(float x) { return x - (vf){0}; }

// Widening loads; spelled out because GCC takes __builtin_convertvector apart lane by lane.
INLINE vi load_u16(const uint16_t *p) {
#if LANES == 16
    return (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
#else
    vi v;
    for (int i = 0; i < LANES; i++) v[i] = p[i];
    return v;
#endif
}

INLINE vi load_u8(const uint8_t *p) {
#if LANES == 16
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    vi v;
    for (int i = 0; i < LANES; i++) v[i] = p[i];
    return v;
#endif
}

INLINE vi load_s8(const int8_t *p) {
#if LANES == 16
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
#else
    vi v;
    for (int i = 0; i < LANES; i++) v[i] = p[i];
    return v;
#endif
}

INLINE vf load_bf16(const uint16_t *p) { return (vf)(load_u16(p) << 16); }

INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }

// IEEE half to float, exact.
INLINE vf load_f16(const uint16_t *p) {
#if LANES == 16
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    vf v;
    for (int i = 0; i < LANES; i++) {
        _Float16 h;
        memcpy(&h, p + i, sizeof h);
        v[i] = (float)h;
    }
    return v;
#endif
}

INLINE float sum_lanes(vf v) {
#if LANES == 16
    return _mm512_reduce_add_ps((__m512)v);
#else
    float s[LANES];
    store(s, v);
    return ((s[0] + s[4]) + (s[1] + s[5])) + ((s[2] + s[6]) + (s[3] + s[7]));
#endif
}

INLINE float max_lanes(vf v) {
    float s[LANES], m;
    store(s, v);
    m = s[0];
    for (int i = 1; i < LANES; i++) m = s[i] > m ? s[i] : m;
    return m;
}

// Lanes of a where the mask is set, of b elsewhere.
INLINE vf choose(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }

INLINE vf vmax(vf a, vf b) { return choose(a > b, a, b); }

// exp with about one unit in the last place; -inf and anything below -87 give 0 or nearly 0, above 88 gives about 2^127.
INLINE vf vexp(vf x) {
    vf low = splat(-87.33654f), high = splat(88.0f);
    vi under = x < low;
    x = vmax(x, low);
    x = choose(x < high, x, high);
    vf scaled = x * 1.44269504088896341f;
    vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vf n = (scaled + magic) - magic;
    vf r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vi exponent = __builtin_convertvector(n, vi) << 23;
    vf result = (vf)((vi)p + exponent);
    return choose(under, splat(0.0f), result);
}
