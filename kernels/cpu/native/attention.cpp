// Paged causal attention, in place: keys and values are read where they lie, each once for all query heads of its group.
//
// Layout, in 4-byte units (a unit is a float, or a pair of bf16 along the summed axis):
//   key   [num_blocks, kv_heads, dim / P, block_size]   P = 1 (float) or 2 (bf16): pairs of dims
//   value [num_blocks, kv_heads, block_size / P, dim]                              pairs of tokens
// so that scores fill the lanes with tokens, outputs fill the lanes with dims, and neither needs a sum across lanes.
//
// Arithmetic (online softmax, Milakov & Gimelshein 2018; segments merged as in Flash-Decoding): a row's keys are taken in
// chunks of CHUNK and segments of two chunks, both at fixed positions of the sequence; segments are merged in order. The
// result of a row therefore has the same bits whatever the batch, the prefill chunk, the number of threads.
#include <cstdlib>

#include "pool.h"
#include "step.h"
#include "vec.h"

namespace {

constexpr int MAX_ROWS = 16;
constexpr int CHUNK = 128;

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
        for (; g + 4 <= groups; g += 4)
            score_block<BF16_KV, ROWS, 4, true>(q, key + g, steps, task.block_size, LANES, scores + g * LANES, CHUNK);
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
    for (; d + 4 * LANES <= dim; d += 4 * LANES)
        value_block<BF16_KV, ROWS, 4>(weights, value, first, last, d, acc + d, dim);
    for (; d < dim; d += LANES) value_block<BF16_KV, ROWS, 1>(weights, value, first, last, d, acc + d, dim);
}

INLINE vf visible_score(const Task &task, const float *scores, int position, int lo, int hi) {
    vf s = load<vf>(scores) * task.scale;
    if (task.soft_cap > 0) s = task.soft_cap * tanh_v(s / task.soft_cap);
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
        vf p = exp_v(load<vf>(scores + i) - base);
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

void clear(Partial &part, int rows, int dim) {
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

void merge(Partial &whole, const Partial &part, int rows, int dim) {
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

struct Plan {  // how one request's rows are cut into tiles
    int queries_per_tile, heads_per_tile, head_tiles, query_tiles, first_segment, segments;
    bool split;  // few rows, long context: segments are separate pieces of work
};

Plan plan_request(const Task &task, int request) {
    const Step &step = *task.step;
    int queries = step.query_start_loc[request + 1] - step.query_start_loc[request], context = step.seq_lens[request];
    Plan p;
    p.heads_per_tile = task.group < MAX_ROWS ? task.group : MAX_ROWS;
    p.head_tiles = (task.group + p.heads_per_tile - 1) / p.heads_per_tile;
    p.queries_per_tile = MAX_ROWS / p.heads_per_tile;
    p.query_tiles = (queries + p.queries_per_tile - 1) / p.queries_per_tile;
    int lo = task.window ? context - queries - task.window + 1 : 0;
    p.first_segment = lo > 0 ? lo / (2 * task.chunk) : 0;
    p.segments = (context + 2 * task.chunk - 1) / (2 * task.chunk);
    p.split = p.query_tiles == 1 && p.segments - p.first_segment > 1;
    return p;
}

Tile make_tile(const Task &task, const Plan &p, int request, int kv_head, int head_tile, int query_tile, int element) {
    const Step &step = *task.step;
    int start = step.query_start_loc[request], queries = step.query_start_loc[request + 1] - start;
    int from = query_tile * p.queries_per_tile, to = from + p.queries_per_tile < queries ? from + p.queries_per_tile : queries;
    int head_from = head_tile * p.heads_per_tile;
    int head_to = head_from + p.heads_per_tile < task.group ? head_from + p.heads_per_tile : task.group;
    Tile tile;
    tile.request = request;
    tile.kv_head = kv_head;
    tile.rows = 0;
    for (int i = from; i < to; i++) {
        int hi = step.seq_lens[request] - queries + i + 1, lo = task.window && hi > task.window ? hi - task.window : 0;
        if (i == from) tile.first = lo;
        tile.last = hi;
        for (int h = head_from; h < head_to; h++, tile.rows++) {
            int64_t row = (int64_t)(start + i) * task.num_heads + kv_head * task.group + h;
            tile.lo[tile.rows] = lo;
            tile.hi[tile.rows] = hi;
            tile.q[tile.rows] = (const char *)task.q + row * task.dim * element;
            tile.out[tile.rows] = (char *)task.out + row * task.dim * element;
        }
    }
    return tile;
}

struct Item {
    int request, kv_head, head_tile, query_tile, segment;  // segment < 0: all of them
    int64_t partial;                                       // index of the first partial of its tile, for split work
};

// Lists the work. Returns the number of items, or of partials through *partials; items may be null to count only.
int64_t list_items(const Task &task, Item *items, int64_t *partials) {
    int64_t n = 0, held = 0;
    for (int request = 0; request < task.step->num_requests; request++) {
        Plan p = plan_request(task, request);
        for (int kv_head = 0; kv_head < task.num_kv_heads; kv_head++)
            for (int head_tile = 0; head_tile < p.head_tiles; head_tile++)
                for (int query_tile = p.query_tiles - 1; query_tile >= 0; query_tile--) {  // the longest first
                    int from = p.split ? p.first_segment : -1, to = p.split ? p.segments : 0;
                    for (int s = from; s < to; s++, n++)
                        if (items) items[n] = {request, kv_head, head_tile, query_tile, s, held};
                    if (p.split) held += to - from;
                }
    }
    *partials = held;
    return n;
}

constexpr int64_t partial_floats(int dim) { return (int64_t)MAX_ROWS * (dim + 2); }

template <bool BF16_KV, class T>
void run_item(const Task &task, const Item &item, float *workspace) {
    Plan p = plan_request(task, item.request);
    Tile tile = make_tile(task, p, item.request, item.kv_head, item.head_tile, item.query_tile, sizeof(T));
    alignas(64) float part_acc[MAX_ROWS * 512], whole_acc[MAX_ROWS * 512];
    Partial part, whole;
    part.acc = part_acc;
    whole.acc = whole_acc;
    if (item.segment >= 0) {
        segment_pass<BF16_KV>(task, tile, item.segment, part);
        float *to = workspace + (item.partial + item.segment - p.first_segment) * partial_floats(task.dim);
        memcpy(to, part.max, sizeof part.max);
        memcpy(to + MAX_ROWS, part.sum, sizeof part.sum);
        memcpy(to + 2 * MAX_ROWS, part.acc, sizeof(float) * tile.rows * task.dim);
        return;
    }
    clear(whole, tile.rows, task.dim);
    for (int s = tile.first / (2 * task.chunk); s * 2 * task.chunk < tile.last; s++) {
        segment_pass<BF16_KV>(task, tile, s, part);
        merge(whole, part, tile.rows, task.dim);
    }
    finish<T>(tile, whole, task.dim);
}

template <class T>
void merge_item(const Task &task, const Item &item, float *workspace) {
    Plan p = plan_request(task, item.request);
    if (item.segment != p.first_segment) return;
    Tile tile = make_tile(task, p, item.request, item.kv_head, item.head_tile, item.query_tile, sizeof(T));
    alignas(64) float whole_acc[MAX_ROWS * 512];
    Partial part, whole;
    whole.acc = whole_acc;
    clear(whole, tile.rows, task.dim);
    for (int s = p.first_segment; s < p.segments; s++) {
        float *from = workspace + (item.partial + s - p.first_segment) * partial_floats(task.dim);
        memcpy(part.max, from, sizeof part.max);
        memcpy(part.sum, from + MAX_ROWS, sizeof part.sum);
        part.acc = from + 2 * MAX_ROWS;
        merge(whole, part, tile.rows, task.dim);
    }
    finish<T>(tile, whole, task.dim);
}

int64_t visible_keys(const Step &step) {
    int64_t total = 0;
    for (int b = 0; b < step.num_requests; b++)
        total += (int64_t)step.seq_lens[b] * (step.query_start_loc[b + 1] - step.query_start_loc[b]);
    return total;
}

template <bool BF16_KV, class T>
int run(const Task &task) {
    int64_t partials, count = list_items(task, nullptr, &partials);
    Item *items = (Item *)malloc(sizeof(Item) * (count ? count : 1));
    float *workspace = (float *)malloc(sizeof(float) * (partials ? partials * partial_floats(task.dim) : 1));
    if (!items || !workspace) {
        free(items);
        free(workspace);
        return 1;
    }
    list_items(task, items, &partials);
    bool alone = visible_keys(*task.step) * task.num_heads * task.dim < 131072;
    int threads = alone ? 1 : task.step->threads;
    pool::parallel_for(count, threads, [&](int64_t i) { run_item<BF16_KV, T>(task, items[i], workspace); });
    for (int64_t i = 0; partials && i < count; i++)
        if (items[i].segment >= 0) merge_item<T>(task, items[i], workspace);
    free(items);
    free(workspace);
    return 0;
}

int lane_group(int block_size) {
    int g = block_size < LANES ? block_size : LANES;
    while (block_size % g || g % 2) g--;
    return g;
}

}  // namespace

extern "C" {

// q [T, H, D] -> out [T, H * D], both of the cache's dtype. dim: a multiple of 16, at most 512; block_size even. window 0 is
// full attention, soft_cap 0 none. Returns 0, or 1 where memory ran out.
int pt_attention(const Step *step, const void *q, void *out, const void *key, const void *value, int num_heads,
                 int num_kv_heads, int dim, int block_size, int window, float scale, float soft_cap, int dtype) {
    int lanes = lane_group(block_size);
    int group = num_heads / num_kv_heads, chunk = CHUNK / lanes * lanes;
    Task task = {step, (const uint32_t *)key, (const uint32_t *)value, q, out, num_heads, num_kv_heads, group, dim, block_size,
                 lanes, chunk, window, scale, soft_cap};
    return dtype == F32 ? run<false, float>(task) : run<true, bf16>(task);
}
}
