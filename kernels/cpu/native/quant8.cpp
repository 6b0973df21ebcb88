// Linear layers on 8-bit weights: int32 dot products within a group (vpdpbusd), float32 across groups.
//
// Activations become two int8 codes, x = scale * (coarse + fine / 128), scaled per row and group of 32: an error below 1e-4 of
// the output's norm. The coarse code alone, llama.cpp's arithmetic for this format, costs 5e-3 and one first choice in thirty;
// small batches wait for the weights anyway. Groups are added in order: a row's bits depend on that row alone.
#include <cstdlib>

#include "quant.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

namespace {

constexpr Format F = format_of(Q8_0);
constexpr int STEPS = GROUP / 4;
constexpr int MAX_ROWS = 6;
constexpr int FINE_BITS = 7, FINE = 1 << FINE_BITS;

struct Codes {
    int8_t *codes;    // [rows, groups, 2, GROUP]: coarse, fine
    float *scale;     // [rows, groups], of the fine codes
    int32_t *offset;  // [rows, groups]: what the weights' zero adds to a dot product
};

// x in [-127, 127] -> a coarse code at to[0 ..], a fine one at to[GROUP ..]. Returns their sum in units of the fine.
INLINE int quantize_lanes(vf x, int8_t *to) {
    __m512i coarse = _mm512_cvtps_epi32((__m512)x);
    __m512i fine = _mm512_cvtps_epi32((__m512)((x - (vf)_mm512_cvtepi32_ps(coarse)) * (float)FINE));
    _mm_storeu_si128((__m128i *)to, _mm512_cvtsepi32_epi8(coarse));
    _mm_storeu_si128((__m128i *)(to + GROUP), _mm512_cvtsepi32_epi8(fine));
    return _mm512_reduce_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(coarse, FINE_BITS), fine));
}

INLINE void quantize_group(const bf16 *x, const Codes &c, int64_t group) {
    vf a = load_floats(x), b = load_floats(x + LANES);
    float top = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps((__m512)a), _mm512_abs_ps((__m512)b)));
    float inverse = top > 0 ? 127.0f / top : 0.0f;
    int8_t *to = c.codes + group * 2 * GROUP;
    int total = quantize_lanes(a * inverse, to) + quantize_lanes(b * inverse, to + LANES);
    c.scale[group] = top / (127.0f * FINE);
    c.offset[group] = -F.zero * total;
}

template <int ROWS, int TILES>
void tile_pass(const Linear &l, const Codes &x, void *out, int64_t row, int64_t tile) {
    int64_t groups = l.in_features / GROUP, tile_bytes = groups * F.block_bytes, first = row * groups;
    const uint8_t *block = (const uint8_t *)l.weights + tile * tile_bytes;
    vf acc[ROWS][TILES] = {};
    for (int64_t g = 0; g < groups; g++, block += F.block_bytes) {
        __m512i dot[ROWS][TILES];
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int t = 0; t < TILES; t++) dot[r][t] = _mm512_setzero_si512();
#pragma GCC unroll 16
        for (int s = 0; s < 2 * STEPS; s++) {
            if (s == STEPS) {  // the coarse codes are through
#pragma GCC unroll 6
                for (int r = 0; r < ROWS; r++) {
                    __m512i offset = _mm512_set1_epi32(x.offset[first + r * groups + g]);
#pragma GCC unroll 2
                    for (int t = 0; t < TILES; t++)
                        dot[r][t] = _mm512_add_epi32(_mm512_slli_epi32(dot[r][t], FINE_BITS), offset);
                }
            }
            __m512i w[TILES];
#pragma GCC unroll 2
            for (int t = 0; t < TILES; t++) w[t] = _mm512_loadu_si512(block + t * tile_bytes + s % STEPS * 64);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) {
                int32_t four;
                memcpy(&four, x.codes + (first + r * groups + g) * 2 * GROUP + s * 4, 4);
                __m512i a = _mm512_set1_epi32(four);
#pragma GCC unroll 2
                for (int t = 0; t < TILES; t++) dot[r][t] = _mm512_dpbusd_epi32(dot[r][t], w[t], a);
            }
        }
#pragma GCC unroll 2
        for (int t = 0; t < TILES; t++) {
            vf scale = load_halves(block + t * tile_bytes + F.code_bytes);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++)
                acc[r][t] += (vf)_mm512_cvtepi32_ps(dot[r][t]) * (scale * x.scale[first + r * groups + g]);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int t = 0; t < TILES; t++) store_outputs(l, out, row + r, tile + t, acc[r][t]);
}

template <int TILES>
void rows_pass(const Linear &l, const Codes &x, void *out, int64_t row, int rows, int64_t tile) {
    switch (rows) {
        case 1: return tile_pass<1, TILES>(l, x, out, row, tile);
        case 2: return tile_pass<2, TILES>(l, x, out, row, tile);
        case 3: return tile_pass<3, TILES>(l, x, out, row, tile);
        case 4: return tile_pass<4, TILES>(l, x, out, row, tile);
        case 5: return tile_pass<5, TILES>(l, x, out, row, tile);
        default: return tile_pass<6, TILES>(l, x, out, row, tile);
    }
}

}  // namespace

int quant8_linear(const Linear &l, const void *x, void *out, int64_t rows, int threads) {
    int64_t groups = l.in_features / GROUP;
    char *scratch = (char *)malloc((size_t)rows * groups * (2 * GROUP + 8) + 1);
    if (!scratch) return 1;
    Codes codes;
    codes.scale = (float *)scratch;
    codes.offset = (int32_t *)(scratch + rows * groups * 4);
    codes.codes = (int8_t *)(scratch + rows * groups * 8);
    constexpr int64_t STEP = 16;
    pool::parallel_for((rows + STEP - 1) / STEP, threads, [&](int64_t piece) {
        int64_t last = (piece + 1) * STEP < rows ? (piece + 1) * STEP : rows;
        for (int64_t i = piece * STEP * groups; i < last * groups; i++) quantize_group((const bf16 *)x + i * GROUP, codes, i);
    });
    multiply<2, MAX_ROWS>(l, rows, threads, [&](int64_t row, int count, int64_t tile, int tiles) {
        if (tiles == 2)
            rows_pass<2>(l, codes, out, row, count, tile);
        else
            rows_pass<1>(l, codes, out, row, count, tile);
    });
    free(scratch);
    return 0;
}

#endif
