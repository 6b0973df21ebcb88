// What the linear layers share: the call's structure, the split into pieces, the way out.
#pragma once

#include "pool.h"
#include "step.h"
#include "vec.h"

struct Linear {  // mirrored by kernels/cpu/native_lib.py
    const void *weights;
    const float *bias;  // [out_features] or null
    int64_t out_features, in_features, out_stride;
    int32_t kind, dtype, out_dtype;  // kind: of quantised weights; dtype: of dense weights and their input
};

// 16 outputs of one row: adds the bias, rounds, stores those that exist. out: [rows, ...] of out_dtype, rows out_stride apart.
INLINE void store_outputs(const Linear &l, void *out, int64_t row, int64_t tile, vf y) {
    int64_t first = tile * LANES, left = l.out_features - first, at = row * l.out_stride + first;
    int n = left < LANES ? (int)left : LANES;
    if (l.bias) y += n == LANES ? load_floats(l.bias + first) : load_floats(l.bias + first, n);
    if (l.out_dtype == F32)
        n == LANES ? store_floats((float *)out + at, y) : store_floats((float *)out + at, y, n);
    else
        n == LANES ? store_floats((bf16 *)out + at, y) : store_floats((bf16 *)out + at, y, n);
}

// Calls pass(row, count, tile, tiles), both counts as constants, so that every (row, tile of 16 outputs) is met once: strips of up to MAX_ROWS rows, as
// even as they come, by TILES tiles (fewer, down to 1, at the end). A piece is a stream of weights, and long: what is fetched
// ahead of its start and beyond its end costs more than an uneven split.
template <int TILES, int MAX_ROWS, class Pass>
INLINE void multiply(const Linear &l, int64_t rows, int threads, const Pass &pass) {
    constexpr int64_t ROW_BLOCK = 40 * MAX_ROWS, WEIGHTS_PER_PIECE = 1 << 20;
    int64_t tiles = (l.out_features + LANES - 1) / LANES, panels = (tiles + TILES - 1) / TILES;
    int64_t blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    int64_t columns = (tiles * LANES * l.in_features / WEIGHTS_PER_PIECE / threads + 1) * threads;
    if (columns > panels) columns = panels;
    pool::parallel_for(columns * blocks, threads, [&](int64_t piece) {
        int64_t from = piece / columns * ROW_BLOCK, to = from + ROW_BLOCK < rows ? from + ROW_BLOCK : rows;
        int64_t first = panels * (piece % columns) / columns, last = panels * (piece % columns + 1) / columns;
        int64_t strips = (to - from + MAX_ROWS - 1) / MAX_ROWS;
        for (int64_t p = first; p < last; p++)
            for (int64_t s = 0; s < strips; s++) {
                int64_t row = from + (to - from) * s / strips;
                int count = (int)(from + (to - from) * (s + 1) / strips - row);
                with_constant<MAX_ROWS>(count, [&](auto count) {
                    if ((p + 1) * TILES <= tiles)
                        pass(row, count, p * TILES, std::integral_constant<int, TILES>());
                    else
                        for (int64_t t = p * TILES; t < tiles; t++) pass(row, count, t, std::integral_constant<int, 1>());
                });
            }
    });
}
