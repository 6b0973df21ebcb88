// Linear layers on dense weights, float32 or bf16 (products of bf16 are exact, sums are float32: vdpbf16ps).
//
// Weights are repacked once into tiles of 16 outputs, in 4-byte units (a float, or a pair of bf16 along k). MAX_TILES tiles
// are a panel [unit of k][tile][output], so a thread reads one stream; tiles that fill no panel lie by themselves.
// Outputs fill the lanes and k runs in order, so a row's bits don't depend on the batch or on the number of threads.
#include "linear.h"

namespace {

constexpr int MAX_ROWS = 6;
constexpr int AHEAD = 4096 / 4;  // units to fetch ahead
#if defined(__AVX512F__)
constexpr int MAX_TILES = 4;
#else
constexpr int MAX_TILES = 1;  // a tile's vector is several registers here
#endif

template <bool BF16>
INLINE vf mac(vf acc, vu a, vu b) {
    return BF16 ? dot_pairs(acc, a, b) : acc + bits<vf>(a) * bits<vf>(b);
}

template <bool BF16, int ROWS, int TILES>
void tile_pass(const Linear &l, const uint32_t *x, void *out, int64_t row, int64_t tile) {
    int64_t units = l.in_features / (BF16 ? 2 : 1);
    const uint32_t *weights = (const uint32_t *)l.weights + tile * units * LANES, *in[ROWS];
    for (int r = 0; r < ROWS; r++) in[r] = x + (row + r) * units;
    vf acc[ROWS][TILES] = {};
    for (int64_t k = 0; k < units; k++, weights += TILES * LANES) {
        vu w[TILES];
#pragma GCC unroll 4
        for (int t = 0; t < TILES; t++) {
            __builtin_prefetch(weights + t * LANES + AHEAD);
            w[t] = load<vu>(weights + t * LANES);
        }
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
            vu a = splat_u(in[r][k]);
#pragma GCC unroll 4
            for (int t = 0; t < TILES; t++) acc[r][t] = mac<BF16>(acc[r][t], w[t], a);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int t = 0; t < TILES; t++) store_outputs(l, out, row + r, tile + t, acc[r][t]);
}

template <bool BF16>
void run(const Linear &l, const uint32_t *x, void *out, int64_t rows, int threads) {
    multiply<MAX_TILES, MAX_ROWS>(l, rows, threads, [&](int64_t row, auto count, int64_t tile, auto tiles) {
        tile_pass<BF16, count, tiles>(l, x, out, row, tile);
    });
}

}  // namespace

extern "C" {

// Bytes of the packed form; in_features is even for bf16.
int64_t pt_dense_bytes(int64_t out_features, int64_t in_features, int dtype) {
    return (out_features + LANES - 1) / LANES * LANES * in_features * (dtype == F32 ? 4 : 2);
}

// weights: [out_features, in_features] of dtype -> packed.
void pt_dense_pack(const void *weights, void *packed, int64_t out_features, int64_t in_features, int dtype, int threads) {
    int64_t units = in_features / (dtype == F32 ? 1 : 2), tiles = (out_features + LANES - 1) / LANES;
    const uint32_t *from = (const uint32_t *)weights;
    uint32_t *to = (uint32_t *)packed;
    pool::parallel_for(tiles, threads, [&](int64_t t) {
        int64_t first = t / MAX_TILES * MAX_TILES, width = MAX_TILES;
        if (first + width > tiles) first = t, width = 1;
        for (int64_t k = 0; k < units; k++)
            for (int64_t o = 0; o < LANES; o++) {
                int64_t row = t * LANES + o, at = first * units + k * width + t - first;
                to[at * LANES + o] = row < out_features ? from[row * units + k] : 0;
            }
    });
}

// linear: see linear.h. x [rows, in] in linear.dtype -> [rows, out] in linear.out_dtype.
void pt_dense_linear(const Linear *linear, const void *x, void *out, int64_t rows, int threads) {
    if (linear->dtype == F32)
        run<false>(*linear, (const uint32_t *)x, out, rows, threads);
    else
        run<true>(*linear, (const uint32_t *)x, out, rows, threads);
}
}
