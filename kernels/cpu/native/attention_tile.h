// The arithmetic of paged attention on one tile: up to MAX_ROWS query rows of a request that share a KV head.
//
// Layout, in 4-byte units (a unit is a float, or a pair of bf16 along the summed axis):
//   key   [num_blocks, kv_heads, dim / P, block_size]   P = 1 (float) or 2 (bf16): pairs of dims
//   value [num_blocks, kv_heads, block_size / P, dim]                              pairs of tokens
// so that scores fill the lanes with tokens, outputs fill the lanes with dims, and neither needs a sum across lanes.
//
// Arithmetic (online softmax, Milakov & Gimelshein 2018; segments merged as in Flash-Decoding): a row's keys are taken in
// chunks of CHUNK and segments of two chunks, both at fixed positions of the sequence; segments are merged in order. The
// result of a row therefore has the same bits whatever the batch, the prefill chunk, the number of threads.
#pragma once

#include "step.h"
#include "vec.h"

constexpr int MAX_ROWS = 16;
constexpr int CHUNK = 128;
#if defined(__AVX512F__)
constexpr int WIDE = 4;  // vectors of a register tile beside its four rows
#else
constexpr int WIDE = 1;
#endif

struct Task {
    const Step *step;
    const uint32_t *key, *value;
    const void *q;
    void *out;
    int num_heads, num_kv_heads, group, dim, block_size, lanes, chunk, window;
    float scale, soft_cap;
};

// Up to MAX_ROWS query rows of one request that share a KV head. Row r sees the keys lo[r] <= position < hi[r].
struct Tile {
    int request, kv_head, rows;
    int lo[MAX_ROWS], hi[MAX_ROWS];
    const void *q[MAX_ROWS];
    void *out[MAX_ROWS];
    int first, last;  // the smallest lo, the largest hi
};

struct Partial {  // one segment's, or the merged, state of a tile; acc is [rows, dim]
    float max[MAX_ROWS], sum[MAX_ROWS];
    float *acc;
};

template <bool BF16_KV>
INLINE vf mac(vf acc, vu a, vu b) {
    return BF16_KV ? dot_pairs(acc, a, b) : acc + bits<vf>(a) * bits<vf>(b);
}

// scores[r][g * lanes ...] for ROWS rows and GROUPS lane groups; steps = dim / P.
template <bool BF16_KV, int ROWS, int GROUPS, bool FULL>
INLINE void score_block(const uint32_t *const *q, const uint32_t *const *key, int steps, int64_t stride, int lanes,
                        float *scores, int score_stride) {
    vf acc[ROWS][GROUPS] = {};
    for (int d = 0; d < steps; d++) {
        vu k[GROUPS];
#pragma GCC unroll 4
        for (int g = 0; g < GROUPS; g++)
            k[g] = FULL ? load<vu>(key[g] + d * stride) : load_units(key[g] + d * stride, lanes);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            vu qv = splat_u(q[r][d]);
#pragma GCC unroll 4
            for (int g = 0; g < GROUPS; g++) acc[r][g] = mac<BF16_KV>(acc[r][g], k[g], qv);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int g = 0; g < GROUPS; g++) {
            float *to = scores + r * score_stride + g * lanes;
            if (FULL)
                store(to, acc[r][g]);
            else
                for (int i = 0; i < lanes; i++) to[i] = acc[r][g][i];
        }
}

template <bool BF16_KV, int ROWS>
INLINE void score_rows(const Task &task, const uint32_t *const *q, const uint32_t *const *key, int groups, float *scores) {
    int steps = task.dim / (BF16_KV ? 2 : 1), g = 0;
    if (task.lanes == LANES)
        for (; g + WIDE <= groups; g += WIDE)
            score_block<BF16_KV, ROWS, WIDE, true>(q, key + g, steps, task.block_size, LANES, scores + g * LANES, CHUNK);
    for (; g < groups; g++) {
        float *to = scores + g * task.lanes;
        if (task.lanes == LANES)
            score_block<BF16_KV, ROWS, 1, true>(q, key + g, steps, task.block_size, LANES, to, CHUNK);
        else
            score_block<BF16_KV, ROWS, 1, false>(q, key + g, steps, task.block_size, task.lanes, to, CHUNK);
    }
}

// acc[r][0 .. VECS * 16) += sum over j of weights[r][j] * value[j][...].
template <bool BF16_KV, int ROWS, int VECS>
INLINE void value_block(const uint32_t *weights, const uint32_t *const *value, int first, int last, int offset, float *acc,
                        int acc_stride) {
    vf sum[ROWS][VECS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) sum[r][v] = load<vf>(acc + r * acc_stride + v * LANES);
    for (int j = first; j < last; j++) {
        vu x[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) x[v] = load<vu>(value[j] + offset + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            vu w = splat_u(weights[r * CHUNK + j]);
#pragma GCC unroll 4
            for (int v = 0; v < VECS; v++) sum[r][v] = mac<BF16_KV>(sum[r][v], x[v], w);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) store(acc + r * acc_stride + v * LANES, sum[r][v]);
}

template <bool BF16_KV, int ROWS>
INLINE void value_rows(const uint32_t *weights, const uint32_t *const *value, int first, int last, int dim, float *acc) {
    int d = 0;
    for (; d + WIDE * LANES <= dim; d += WIDE * LANES)
        value_block<BF16_KV, ROWS, WIDE>(weights, value, first, last, d, acc + d, dim);
    for (; d < dim; d += LANES) value_block<BF16_KV, ROWS, 1>(weights, value, first, last, d, acc + d, dim);
}

INLINE vf visible_score(const Task &task, const float *scores, int position, int lo, int hi) {
    vf s = load<vf>(scores) * task.scale;
    if (task.soft_cap > 0) s = task.soft_cap * tanh_v(s / task.soft_cap);
    if (position >= lo && position + LANES <= hi) return s;
    vi p = iota() + position;
    return (p >= lo) & (p < hi) ? s : splat(NEG_INF);
}

// Turns one row's scores of a chunk into weights, rescales the row's sums. scores[0] is the key at `position`; n is a
// multiple of 16. A row that sees none of these keys gets weights of 0.
template <bool BF16_KV>
INLINE void soften(const Task &task, Partial &part, int r, float *scores, int position, int n, int lo, int hi,
                   uint32_t *weights) {
    vf top = splat(part.max[r]);
    for (int i = 0; i < n; i += LANES) {
        vf s = visible_score(task, scores + i, position + i, lo, hi);
        store(scores + i, s);
        top = vmax(top, s);
    }
    float max = reduce_max(top), base = max == NEG_INF ? 0.0f : max;
    vf total = {};
    for (int i = 0; i < n; i += LANES) {
        vf p = load<vf>(scores + i) - base;
        p = BF16_KV ? exp_short(p) : exp_v(p);
        total += p;
        if (BF16_KV)
            store_floats((bf16 *)weights + i, p);
        else
            store(weights + i, p);
    }
    if (max != part.max[r]) {
        float factor = exp_s(part.max[r] - base);
        part.sum[r] *= factor;
        for (int d = 0; d < task.dim; d += LANES)
            store(part.acc + r * task.dim + d, load<vf>(part.acc + r * task.dim + d) * factor);
        part.max[r] = max;
    }
    part.sum[r] += reduce_add(total);
}

// A pair of tokens of which only one may be read: a copy with the other zeroed (a slot that was never written can hold NaN).
INLINE const uint32_t *edge_pair(const uint32_t *pair, uint32_t mask, int dim, uint32_t *scratch) {
    for (int d = 0; d < dim; d++) scratch[d] = pair[d] & mask;
    return scratch;
}

template <bool BF16_KV>
INLINE void chunk_pass(const Task &task, const Tile &tile, int begin, int end, Partial &part) {
    constexpr int P = BF16_KV ? 2 : 1;
    const int32_t *pages = task.step->page_table + tile.request * task.step->page_stride;
    int64_t head_units = (int64_t)task.block_size * task.dim / P;
    const uint32_t *key[CHUNK], *value[CHUNK];
    uint32_t edge[2][512], weights[MAX_ROWS * CHUNK];
    float scores[MAX_ROWS * CHUNK];
    int from = begin > tile.first ? begin : tile.first, to = end < tile.last ? end : tile.last;
    int skip = (from - begin) / task.lanes, groups = (to - begin + task.lanes - 1) / task.lanes;
    for (int g = skip; g < groups; g++) {
        int position = begin + g * task.lanes;
        key[g] = task.key + ((int64_t)pages[position / task.block_size] * task.num_kv_heads + tile.kv_head) * head_units +
                 position % task.block_size;
    }
    int first = (from - begin) / P, last = (to - begin + P - 1) / P;
    for (int j = first; j < last; j++) {
        int position = begin + j * P;
        value[j] = task.value + ((int64_t)pages[position / task.block_size] * task.num_kv_heads + tile.kv_head) * head_units +
                   (int64_t)(position % task.block_size / P) * task.dim;
    }
    if (BF16_KV && begin + 2 * first < from) value[first] = edge_pair(value[first], 0xffff0000u, task.dim, edge[0]);
    if (BF16_KV && begin + 2 * last > to) value[last - 1] = edge_pair(value[last - 1], 0x0000ffffu, task.dim, edge[1]);

    const uint32_t *const *q = (const uint32_t *const *)tile.q;
    int r = 0, at = skip * task.lanes;
    for (; r + 4 <= tile.rows; r += 4)
        score_rows<BF16_KV, 4>(task, q + r, key + skip, groups - skip, scores + r * CHUNK + at);
    if (tile.rows - r == 3) score_rows<BF16_KV, 3>(task, q + r, key + skip, groups - skip, scores + r * CHUNK + at);
    if (tile.rows - r == 2) score_rows<BF16_KV, 2>(task, q + r, key + skip, groups - skip, scores + r * CHUNK + at);
    if (tile.rows - r == 1) score_rows<BF16_KV, 1>(task, q + r, key + skip, groups - skip, scores + r * CHUNK + at);

    int aligned = at / LANES * LANES, n = (to - begin + LANES - 1) / LANES * LANES - aligned;
    for (r = 0; r < tile.rows; r++)
        soften<BF16_KV>(task, part, r, scores + r * CHUNK + aligned, begin + aligned, n, tile.lo[r],
                        tile.hi[r] < to ? tile.hi[r] : to, weights + r * CHUNK + aligned / P);
    for (r = 0; r + 4 <= tile.rows; r += 4)
        value_rows<BF16_KV, 4>(weights + r * CHUNK, value, first, last, task.dim, part.acc + r * task.dim);
    if (tile.rows - r == 3)
        value_rows<BF16_KV, 3>(weights + r * CHUNK, value, first, last, task.dim, part.acc + r * task.dim);
    if (tile.rows - r == 2)
        value_rows<BF16_KV, 2>(weights + r * CHUNK, value, first, last, task.dim, part.acc + r * task.dim);
    if (tile.rows - r == 1)
        value_rows<BF16_KV, 1>(weights + r * CHUNK, value, first, last, task.dim, part.acc + r * task.dim);
}

INLINE void clear(Partial &part, int rows, int dim) {
    for (int r = 0; r < rows; r++) part.max[r] = NEG_INF, part.sum[r] = 0;
    memset(part.acc, 0, sizeof(float) * rows * dim);
}

template <bool BF16_KV>
void segment_pass(const Task &task, const Tile &tile, int segment, Partial &part) {
    clear(part, tile.rows, task.dim);
    for (int c = 0; c < 2; c++) {
        int begin = (segment * 2 + c) * task.chunk, end = begin + task.chunk;
        if (begin < tile.last && end > tile.first) chunk_pass<BF16_KV>(task, tile, begin, end, part);
    }
}

INLINE void merge(Partial &whole, const Partial &part, int rows, int dim) {
    for (int r = 0; r < rows; r++) {
        float max = whole.max[r] > part.max[r] ? whole.max[r] : part.max[r];
        if (max == NEG_INF) continue;
        float a = exp_s(whole.max[r] - max), b = exp_s(part.max[r] - max);
        whole.max[r] = max;
        whole.sum[r] = whole.sum[r] * a + part.sum[r] * b;
        for (int d = r * dim; d < (r + 1) * dim; d += LANES)
            store(whole.acc + d, load<vf>(whole.acc + d) * a + load<vf>(part.acc + d) * b);
    }
}

template <class T>
void finish(const Tile &tile, const Partial &whole, int dim) {
    for (int r = 0; r < tile.rows; r++) {
        float factor = whole.sum[r] > 0 ? 1.0f / whole.sum[r] : 0.0f;
        for (int d = 0; d < dim; d += LANES)
            store_floats((T *)tile.out[r] + d, load<vf>(whole.acc + r * dim + d) * factor);
    }
}
