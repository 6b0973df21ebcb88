// The multiplication by quantised weights: int32 dot products within a group (vpdpbusd), float32 across groups.
//
// Integers are exact, so any order within a group has the same bits; groups are added in order. A row's bits depend on that
// row alone.
#pragma once

#include "quant.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

constexpr int QUANT_ROWS = 8;
constexpr int AHEAD = 8192;  // bytes to fetch ahead: the memory's latency at the memory's rate

INLINE __m512i low_nibbles(__m512i bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
INLINE vf load_halves(const uint8_t *p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE __m512i splat_quad(const int8_t *p) {
    int32_t four;
    memcpy(&four, p, 4);
    return _mm512_set1_epi32(four);
}

// Four codes of each of a tile's outputs.
template <int KIND>
INLINE __m512i quad_of(const uint8_t *codes, int quad) {
    if (KIND == Q8_0) return _mm512_loadu_si512(codes + quad * 64);
    __m512i bytes = _mm512_loadu_si512(codes + quad % 4 * 64);
    return low_nibbles(_mm512_srl_epi16(bytes, _mm_cvtsi32_si128(quad / 4 * 4)));
}

template <int KIND, int ROWS, int TILES>
void tile_pass(const Linear &l, const InputGroup *x, void *out, int64_t row, int64_t tile) {
    constexpr Format F = format_of(KIND);
    constexpr int BLOCK = TILES * F.block_bytes;
    int64_t groups = l.in_features / GROUP;
    const uint8_t *block = (const uint8_t *)l.weights + tile * groups * F.block_bytes;
    x += row * groups;
    vf acc[ROWS][TILES] = {};
    for (int64_t g = 0; g < groups; g++, block += BLOCK, x++) {
        for (int i = 0; i < BLOCK; i += 64) _mm_prefetch((const char *)block + AHEAD + i, _MM_HINT_T0);
        __m512i dot[ROWS][TILES];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++) {
            const InputGroup &in = x[r * groups];
            __m512i high = splat_quad(in.high);
#pragma GCC unroll 2
            for (int t = 0; t < TILES; t++) {
                __m512i w = quad_of<KIND>(block + t * F.code_bytes, in.quad);
                dot[r][t] = _mm512_slli_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), w, high), 7);
            }
        }
#pragma GCC unroll 8
        for (int q = 0; q < QUADS; q++) {
            __m512i w[TILES];
#pragma GCC unroll 2
            for (int t = 0; t < TILES; t++) w[t] = quad_of<KIND>(block + t * F.code_bytes, q);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                __m512i a = splat_quad(x[r * groups].low + q * 4);
#pragma GCC unroll 2
                for (int t = 0; t < TILES; t++) dot[r][t] = _mm512_dpbusd_epi32(dot[r][t], w[t], a);
            }
        }
#pragma GCC unroll 2
        for (int t = 0; t < TILES; t++) {
            const uint8_t *scales = block + TILES * F.code_bytes + t * 32;
            vf scale = load_halves(scales), base = F.has_min ? load_halves(scales + TILES * 32) : scale * -(float)F.zero;
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                const InputGroup &in = x[r * groups];
                __m512 sum = _mm512_fmadd_ps((__m512)base, _mm512_set1_ps(in.sum), (__m512)acc[r][t]);
                acc[r][t] = (vf)_mm512_fmadd_ps((__m512)(scale * in.scale), _mm512_cvtepi32_ps(dot[r][t]), sum);
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int t = 0; t < TILES; t++) store_outputs(l, out, row + r, tile + t, acc[r][t]);
}

template <int KIND>
void multiply_rows(const Linear &l, const InputGroup *x, void *out, int64_t rows, int threads) {
    multiply<PANEL, QUANT_ROWS>(l, rows, threads, [&](int64_t row, auto count, int64_t tile, auto tiles) {
        tile_pass<KIND, count, tiles>(l, x, out, row, tile);
    });
}

#endif
