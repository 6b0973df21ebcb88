// The arithmetic of paged attention on one tile: up to MAX_ROWS query rows of a request that share a KV head.
//
// Layout, in 4-byte units (a unit is a float, or a pair of bf16 along the summed axis):
//   key   [num_blocks, kv_heads, dim / P, block_size]   P = 1 (float) or 2 (bf16): pairs of dims
//   value [num_blocks, kv_heads, block_size / P, dim]                              pairs of tokens
// so that scores fill the lanes with tokens, outputs fill the lanes with dims, and neither needs a sum across lanes.
//
// Arithmetic (Flash-Decoding): a row's keys are taken in chunks of CHUNK at fixed positions of the sequence, each with a
// softmax of its own, and merged in order by their maxima (online softmax, Milakov & Gimelshein 2018). The result of a row
// therefore has the same bits whatever the batch, the prefill chunk, the number of threads.
//
// Blocks lie anywhere in memory, 2 kB of a head at a time, too little for a processor's own prefetcher. So a pass with few rows
// to compute fetches what it reads next: the values while it scores the keys, then the next chunk's keys.
#pragma once

#include <type_traits>

#include "step.h"
#include "vec.h"

constexpr int MAX_ROWS = LANES;
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
    bool fetch;       // whether memory is what this tile waits for
};

struct Span {  // some of a request's keys
    int request, kv_head, from, to;
};

struct Partial {  // one chunk's, or the merged, state of a tile
    float *max, *sum, *acc;  // [MAX_ROWS], [MAX_ROWS], [rows, dim]
};

template <bool BF16_KV>
INLINE vf mac(vf acc, vu a, vu b) {
    return BF16_KV ? dot_pairs(acc, a, b) : acc + bits<vf>(a) * bits<vf>(b);
}

// scores[r][g * lanes ...] for ROWS rows and GROUPS lane groups; steps = dim / P. soon: the groups' values, as many units as
// their keys, to FETCH meanwhile.
template <bool BF16_KV, int ROWS, int GROUPS, bool FULL, bool FETCH>
INLINE void score_block(const uint32_t *const *q, const uint32_t *const *key, const uint32_t *const *soon, int steps,
                        int64_t stride, int lanes, float *scores) {
    vf acc[ROWS][GROUPS] = {};
    for (int d = 0; d < steps; d++) {
        vu k[GROUPS];
#pragma GCC unroll 4
        for (int g = 0; g < GROUPS; g++)
            k[g] = FULL ? load<vu>(key[g] + d * stride) : load_units(key[g] + d * stride, lanes);
#pragma GCC unroll 4
        for (int g = 0; g < (FETCH ? GROUPS : 0); g++) __builtin_prefetch(soon[g] + d * LANES);
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
            float *to = scores + r * CHUNK + g * lanes;
            if (FULL)
                store(to, acc[r][g]);
            else
                for (int i = 0; i < lanes; i++) to[i] = acc[r][g][i];
        }
}

template <bool BF16_KV, int ROWS, bool FETCH>
INLINE void score_rows(const Task &task, const uint32_t *const *q, const uint32_t *const *key, const uint32_t *const *soon,
                       int groups, float *scores) {
    int steps = task.dim / (BF16_KV ? 2 : 1), stride = task.block_size, lanes = task.lanes, g = 0;
    if (lanes == LANES) {
        for (; g + WIDE <= groups; g += WIDE)
            score_block<BF16_KV, ROWS, WIDE, true, FETCH>(q, key + g, soon + g, steps, stride, LANES, scores + g * LANES);
        for (; g < groups; g++)
            score_block<BF16_KV, ROWS, 1, true, FETCH>(q, key + g, soon + g, steps, stride, LANES, scores + g * LANES);
    }
    for (; g < groups; g++)
        score_block<BF16_KV, ROWS, 1, false, false>(q, key + g, soon, steps, stride, lanes, scores + g * lanes);
}

// acc[r][0 .. VECS * 16) = sum over j of weights[r][j] * value[j][...]. soon[j]: keys to FETCH meanwhile, a line a vector.
template <bool BF16_KV, int ROWS, int VECS, bool FETCH>
INLINE void value_block(const uint32_t *weights, const uint32_t *const *value, const uint32_t *const *soon, int64_t stride,
                        int first, int last, int offset, float *acc, int acc_stride) {
    vf sum[ROWS][VECS] = {};
    for (int j = first; j < last; j++) {
        vu x[VECS];
#pragma GCC unroll 4
        for (int v = 0; v < VECS; v++) x[v] = load<vu>(value[j] + offset + v * LANES);
#pragma GCC unroll 4
        for (int v = 0; v < (FETCH ? VECS : 0); v++) __builtin_prefetch(soon[j] + (offset / LANES + v) * stride);
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

template <bool BF16_KV, int ROWS, bool FETCH>
INLINE void value_rows(const Task &task, const uint32_t *weights, const uint32_t *const *value, const uint32_t *const *soon,
                       int first, int last, float *acc) {
    int dim = task.dim, stride = task.block_size, d = 0;
    for (; d + WIDE * LANES <= dim; d += WIDE * LANES)
        value_block<BF16_KV, ROWS, WIDE, FETCH>(weights, value, soon, stride, first, last, d, acc + d, dim);
    for (; d < dim; d += LANES)
        value_block<BF16_KV, ROWS, 1, FETCH>(weights, value, soon, stride, first, last, d, acc + d, dim);
}

// Calls pass(first row, number of rows, whether to fetch) for up to four rows at a time; the latter two are constants. The
// first four fetch for all.
template <class Pass>
INLINE void in_fours(int rows, bool fetch, const Pass &pass) {
    for (int r = 0; r < rows; r += 4)
        with_constant<4>(rows - r, [&](auto count) {
            if (fetch && !r)
                pass(r, count, std::true_type());
            else
                pass(r, count, std::false_type());
        });
}

INLINE float largest(vf v) {
    float a[LANES];
    store(a, v);
    for (int w = LANES / 2; w; w /= 2)
        for (int i = 0; i < w; i++) a[i] = a[i] > a[i + w] ? a[i] : a[i + w];
    return a[0];
}

INLINE vf visible_score(const Task &task, const float *scores, int position, int lo, int hi) {
    vf s = load<vf>(scores) * task.scale;
    if (task.soft_cap > 0) s = task.soft_cap * tanh_v(s / task.soft_cap);
    if (position >= lo && position + LANES <= hi) return s;
    vi p = iota() + position;
    return (p >= lo) & (p < hi) ? s : splat(NEG_INF);
}

// Turns one row's scores of a chunk into weights. scores[0] is the key at `position`; n is a multiple of 16. A row that sees
// none of these keys gets weights of 0.
template <bool BF16_KV>
INLINE void soften(const Task &task, Partial &part, int r, float *scores, int position, int n, int lo, int hi,
                   uint32_t *weights) {
    vf top = splat(NEG_INF);
    for (int i = 0; i < n; i += LANES) {
        vf s = visible_score(task, scores + i, position + i, lo, hi);
        store(scores + i, s);
        top = vmax(top, s);
    }
    float max = largest(top), base = max == NEG_INF ? 0.0f : max;
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
    part.max[r] = max;
    part.sum[r] = reduce_add(total);
}

// A pair of tokens of which only one may be read: a copy with the other zeroed (a slot that was never written can hold NaN).
INLINE const uint32_t *edge_pair(const uint32_t *pair, uint32_t mask, int dim, uint32_t *scratch) {
    for (int d = 0; d < dim; d++) scratch[d] = pair[d] & mask;
    return scratch;
}

// Addresses of the keys and values of `groups` lane groups, from the first of the span on.
template <int P>
INLINE void locate(const Task &task, const Span &span, int groups, const uint32_t **key, const uint32_t **value) {
    const int32_t *page = task.step->page_table + span.request * task.step->page_stride + span.from / task.block_size;
    int64_t head_units = (int64_t)task.block_size * task.dim / P;
    int slot = span.from % task.block_size;
    for (int g = 0; g < groups; g++) {
        int64_t head = ((int64_t)*page * task.num_kv_heads + span.kv_head) * head_units;
        key[g] = task.key + head + slot;
        value[g] = task.value + head + (int64_t)(slot / P) * task.dim;
        slot += task.lanes;
        if (slot == task.block_size) slot = 0, page++;
    }
}

// soon[j], j < count: the keys of the span's first chunk, as evenly as the chunk's values are walked through.
template <int P>
INLINE void locate_next(const Task &task, const Span &span, int count, const uint32_t **soon) {
    const uint32_t *key[CHUNK / LANES], *value[CHUNK / LANES];
    int left = span.to - span.from, groups = ((left < task.chunk ? left : task.chunk) + LANES - 1) / LANES, j = 0;
    locate<P>(task, span, groups, key, value);
    for (int g = 0; g < groups; g++)
        for (int i = 0; i < LANES / P; i++) soon[j++] = key[g] + (int64_t)i * (task.dim / LANES) * task.block_size;
    for (; j < count; j++) soon[j] = (const uint32_t *)task.q;
}

// The tile's rows over the keys of one chunk, from `begin` on. next: what this thread reads after that.
template <bool BF16_KV>
void chunk_pass(const Task &task, const Tile &tile, int begin, const Span &next, Partial part) {
    constexpr int P = BF16_KV ? 2 : 1;
    const uint32_t *key[CHUNK / 2], *group_value[CHUNK / 2], *value[CHUNK], *soon[CHUNK];
    uint32_t edge[2][512], weights[MAX_ROWS * CHUNK];
    float scores[MAX_ROWS * CHUNK];
    int end = begin + task.chunk, from = begin > tile.first ? begin : tile.first, to = end < tile.last ? end : tile.last;
    int skip = (from - begin) / task.lanes, at = skip * task.lanes, groups = (to - begin + task.lanes - 1) / task.lanes - skip;
    locate<P>(task, {tile.request, tile.kv_head, begin + at, to}, groups, key, group_value);
    for (int g = 0, j = at / P; g < groups; g++)
        for (int i = 0; i < task.lanes / P; i++) value[j++] = group_value[g] + i * task.dim;
    int first = (from - begin) / P, last = (to - begin + P - 1) / P;
    if (BF16_KV && begin + 2 * first < from) value[first] = edge_pair(value[first], 0xffff0000u, task.dim, edge[0]);
    if (BF16_KV && begin + 2 * last > to) value[last - 1] = edge_pair(value[last - 1], 0x0000ffffu, task.dim, edge[1]);

    store(part.max, splat(NEG_INF));
    store(part.sum, splat(0.0f));
    const uint32_t *const *q = (const uint32_t *const *)tile.q;
    bool fetch = tile.fetch && task.lanes == LANES;
    in_fours(tile.rows, fetch, [&](int r, auto rows, auto fetching) {
        score_rows<BF16_KV, rows, fetching>(task, q + r, key, group_value, groups, scores + r * CHUNK + at);
    });
    int aligned = at / LANES * LANES, n = (to - begin + LANES - 1) / LANES * LANES - aligned;
    for (int r = 0; r < tile.rows; r++)
        soften<BF16_KV>(task, part, r, scores + r * CHUNK + aligned, begin + aligned, n, tile.lo[r],
                        tile.hi[r] < to ? tile.hi[r] : to, weights + r * CHUNK + aligned / P);
    fetch = fetch && next.from < next.to;
    if (fetch) locate_next<P>(task, next, last, soon);
    in_fours(tile.rows, fetch, [&](int r, auto rows, auto fetching) {
        value_rows<BF16_KV, rows, fetching>(task, weights + r * CHUNK, value, soon, first, last, part.acc + r * task.dim);
    });
}

INLINE void clear(Partial &part, int rows, int dim) {
    store(part.max, splat(NEG_INF));
    store(part.sum, splat(0.0f));
    memset(part.acc, 0, sizeof(float) * rows * dim);
}

INLINE void merge(Partial &whole, const Partial &part, int rows, int dim) {
    vf ours = load<vf>(whole.max), theirs = load<vf>(part.max), max = vmax(ours, theirs);
    vf base = max == NEG_INF ? splat(0.0f) : max, a = exp_v(ours - base), b = exp_v(theirs - base);
    store(whole.max, max);
    store(whole.sum, load<vf>(whole.sum) * a + load<vf>(part.sum) * b);
    for (int r = 0; r < rows; r++)
        for (int d = r * dim; d < (r + 1) * dim; d += LANES)
            store(whole.acc + d, load<vf>(whole.acc + d) * a[r] + load<vf>(part.acc + d) * b[r]);
}

template <class T>
void finish(const Tile &tile, const Partial &whole, int dim) {
    for (int r = 0; r < tile.rows; r++) {
        float factor = whole.sum[r] > 0 ? 1.0f / whole.sum[r] : 0.0f;
        for (int d = 0; d < dim; d += LANES)
            store_floats((T *)tile.out[r] + d, load<vf>(whole.acc + r * dim + d) * factor);
    }
}
