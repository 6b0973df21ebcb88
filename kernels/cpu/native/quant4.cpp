// Linear layers on 4-bit weights: bf16 products of code and activation (vdpbf16ps; both factors are exact), float32 sums.
//
// y = sum over groups of scale * dot(codes, x) + minimum * sum(x): nothing is rounded but the float32 sums, so the result is
// closer to the file's weights than their bf16 form is. Groups are added in order: a row's bits depend on that row alone.
#include <cstdlib>

#include "quant.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__)

namespace {

constexpr int PAIRS = GROUP / 2;
constexpr int MAX_ROWS = 8;

struct Input {
    const uint32_t *pairs;  // bf16 pairs, [rows, groups, PAIRS]
    const float *sums;      // of each group, [rows, groups]; unused without minima
};

// Codes as bf16, to be looked up by words of which the low four bits count: the table repeats for the fifth.
INLINE __m512i code_table(int zero) {
    alignas(64) bf16 table[32];
    for (int i = 0; i < 32; i++) from_float((float)(i % 16 - zero), table + i);
    return _mm512_load_si512(table);
}

template <int KIND, int ROWS, int TILES>
void tile_pass(const Linear &l, const Input &x, void *out, int64_t row, int64_t tile) {
    constexpr Format F = format_of(KIND);
    int64_t groups = l.in_features / GROUP, tile_bytes = groups * F.block_bytes;
    const uint8_t *block = (const uint8_t *)l.weights + tile * tile_bytes;
    const uint32_t *pairs = x.pairs + row * groups * PAIRS;
    const float *sums = x.sums + row * groups;
    const __m512i table = code_table(F.zero);
    vf acc[ROWS][TILES] = {};
    for (int64_t g = 0; g < groups; g++, block += F.block_bytes) {
        vf dot[ROWS][TILES] = {};
#pragma GCC unroll 16
        for (int p = 0; p < PAIRS; p++) {
            vu w[TILES];
#pragma GCC unroll 2
            for (int t = 0; t < TILES; t++) {
                __m512i words = _mm512_loadu_si512(block + t * tile_bytes + p / 4 * 64);
                if (p % 4) words = _mm512_srli_epi16(words, p % 4 * 4);
                w[t] = (vu)_mm512_permutexvar_epi16(words, table);
            }
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                vu a = splat_u(pairs[(r * groups + g) * PAIRS + p]);
#pragma GCC unroll 2
                for (int t = 0; t < TILES; t++) dot[r][t] = dot_pairs(dot[r][t], w[t], a);
            }
        }
#pragma GCC unroll 2
        for (int t = 0; t < TILES; t++) {
            const uint8_t *scales = block + t * tile_bytes + F.code_bytes;
            vf scale = load_halves(scales), minimum = F.has_min ? load_halves(scales + 32) : splat(0);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                acc[r][t] += scale * dot[r][t];
                if (F.has_min) acc[r][t] += minimum * sums[r * groups + g];
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int t = 0; t < TILES; t++) store_outputs(l, out, row + r, tile + t, acc[r][t]);
}

template <int KIND, int TILES>
void rows_pass(const Linear &l, const Input &x, void *out, int64_t row, int rows, int64_t tile) {
    switch (rows) {
        case 1: return tile_pass<KIND, 1, TILES>(l, x, out, row, tile);
        case 2: return tile_pass<KIND, 2, TILES>(l, x, out, row, tile);
        case 3: return tile_pass<KIND, 3, TILES>(l, x, out, row, tile);
        case 4: return tile_pass<KIND, 4, TILES>(l, x, out, row, tile);
        case 5: return tile_pass<KIND, 5, TILES>(l, x, out, row, tile);
        case 6: return tile_pass<KIND, 6, TILES>(l, x, out, row, tile);
        case 7: return tile_pass<KIND, 7, TILES>(l, x, out, row, tile);
        default: return tile_pass<KIND, 8, TILES>(l, x, out, row, tile);
    }
}

template <int KIND>
void multiply_rows(const Linear &l, const Input &x, void *out, int64_t rows, int threads) {
    multiply<2, MAX_ROWS>(l, rows, threads, [&](int64_t row, int count, int64_t tile, int tiles) {
        if (tiles == 2)
            rows_pass<KIND, 2>(l, x, out, row, count, tile);
        else
            rows_pass<KIND, 1>(l, x, out, row, count, tile);
    });
}

}  // namespace

int quant4_linear(const Linear &l, const void *x, void *out, int64_t rows, int threads) {
    if (l.kind == Q4_0) {
        multiply_rows<Q4_0>(l, {(const uint32_t *)x, nullptr}, out, rows, threads);
        return 0;
    }
    int64_t groups = l.in_features / GROUP;
    float *sums = (float *)malloc(sizeof(float) * (rows * groups + 1));
    if (!sums) return 1;
    constexpr int64_t STEP = 32;
    pool::parallel_for((rows + STEP - 1) / STEP, threads, [&](int64_t piece) {
        int64_t last = (piece + 1) * STEP < rows ? (piece + 1) * STEP : rows;
        for (int64_t i = piece * STEP * groups; i < last * groups; i++) {
            const bf16 *group = (const bf16 *)x + i * GROUP;
            sums[i] = _mm512_reduce_add_ps((__m512)(load_floats(group) + load_floats(group + LANES)));
        }
    });
    multiply_rows<Q4_1>(l, {(const uint32_t *)x, sums}, out, rows, threads);
    free(sums);
    return 0;
}

#endif
