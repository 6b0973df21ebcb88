// Sixteen-lane vectors in the compiler's own vector extension: one source for AVX-512, AVX2, NEON and plain scalar code.
// Intrinsics appear only where the extension has no word for the instruction (bf16 and int8 dot products, rounding).
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));

constexpr int LANES = 16;
constexpr float NEG_INF = -__builtin_inff();

INLINE vf splat(float x) { return vf{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE vi splat_i(int32_t x) { return vi{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE vu splat_u(uint32_t x) { return vu{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE vi iota() { return vi{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

template <class V, class T>
INLINE V load(const T *p) {
    V v;
    memcpy(&v, p, sizeof(V));
    return v;
}
template <class V, class T>
INLINE void store(T *p, V v) { memcpy(p, &v, sizeof(V)); }

template <class To, class From>
INLINE To bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "bits: sizes differ");
    To y;
    memcpy(&y, &x, sizeof(To));
    return y;
}

// First n lanes of p, zero in the rest; never reads past p[n - 1].
INLINE vu load_units(const uint32_t *p, int n) {
#if defined(__AVX512F__)
    return (vu)_mm512_maskz_loadu_epi32((__mmask16)((1u << n) - 1), p);
#else
    vu v = {};
    for (int i = 0; i < n; i++) v[i] = p[i];
    return v;
#endif
}

INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }

INLINE float reduce_max(vf v) {
    float m = v[0];
    for (int i = 1; i < LANES; i++) m = v[i] > m ? v[i] : m;
    return m;
}
INLINE float reduce_add(vf v) {
    float a[LANES];
    store(a, v);
    for (int w = LANES / 2; w; w /= 2)
        for (int i = 0; i < w; i++) a[i] += a[i + w];
    return a[0];
}

// Calls pass(n) with n, of 1 .. MAX, as a constant: a bound by which the compiler can unroll.
template <int MAX, class Pass>
INLINE void with_constant(int n, const Pass &pass) {
    if constexpr (MAX > 1)
        if (n < MAX) return with_constant<MAX - 1>(n, pass);
    pass(std::integral_constant<int, MAX>());
}

struct bf16 {
    uint16_t u;
};

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) { return bits<float>((uint32_t)x.u << 16); }

INLINE void from_float(float x, float *out) { *out = x; }
INLINE void from_float(float x, bf16 *out) {
    uint32_t u = bits<uint32_t>(x);
    out->u = (u & 0x7fffffff) > 0x7f800000 ? (uint16_t)((u >> 16) | 0x40) : (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

INLINE vf load_floats(const float *p) { return load<vf>(p); }
INLINE vf load_floats(const bf16 *p) {
#if defined(__AVX512F__)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#else
    vf v;
    for (int i = 0; i < LANES; i++) v[i] = to_float(p[i]);
    return v;
#endif
}
INLINE void store_floats(float *p, vf v) { store(p, v); }
INLINE void store_floats(bf16 *p, vf v) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh((__m512)v));
#else
    for (int i = 0; i < LANES; i++) from_float(v[i], p + i);
#endif
}
template <class T>
INLINE vf load_floats(const T *p, int n) {
    vf v = {};
    for (int i = 0; i < n; i++) v[i] = to_float(p[i]);
    return v;
}
template <class T>
INLINE void store_floats(T *p, vf v, int n) {
    T all[LANES];
    store_floats(all, v);
    memcpy(p, all, n * sizeof(T));
}

// acc + a.low * b.low + a.high * b.high over bf16 pairs: one vdpbf16ps.
INLINE vf dot_pairs(vf acc, vu a, vu b) {
#if defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc += bits<vf>(a & 0xffff0000u) * bits<vf>(b & 0xffff0000u);
    return acc + bits<vf>(a << 16) * bits<vf>(b << 16);
#endif
}

// e^x to about 1 ulp by a degree-6 polynomial on [-ln2/2, ln2/2]; 0 below -87 (minus infinity included), exactly 1 at 0.
INLINE vf exp_v(vf x) {
    vf clamped = vmin(vmax(x, splat(-87.0f)), splat(88.0f));
    vf shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the rounded integer
    vf n = shifted - 12582912.0f;
    vf r = clamped - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vf p = r * 1.3888889e-3f + 8.3333333e-3f;
    p = p * r + 4.1666667e-2f;
    p = p * r + 1.6666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    vi scale = (bits<vi>(shifted) << 23) + 0x3f800000;
    return x < -87.0f ? splat(0.0f) : p * bits<vf>(scale);
}
// e^x to about 1e-5, for weights that are rounded to bf16 next. Same ends as exp_v: 0 below -87, exactly 1 at 0.
INLINE vf exp_short(vf x) {
    vf y = vmin(vmax(x, splat(-87.0f)), splat(88.0f)) * 1.44269504f;
    vf shifted = y + 12582912.0f;
    vf r = y - (shifted - 12582912.0f);
    vf p = r * 1.3333558e-3f + 9.6181291e-3f;
    p = p * r + 5.5504109e-2f;
    p = p * r + 2.4022651e-1f;
    p = p * r + 6.9314718e-1f;
    p = p * r + 1.0f;
    vi scale = (bits<vi>(shifted) << 23) + 0x3f800000;
    return x < -87.0f ? splat(0.0f) : p * bits<vf>(scale);
}
INLINE float exp_s(float x) { return exp_v(splat(x))[0]; }

INLINE vf tanh_v(vf x) {
    vf e = exp_v(vmin(vmax(x + x, splat(-60.0f)), splat(60.0f)));
    return (e - 1.0f) / (e + 1.0f);
}
