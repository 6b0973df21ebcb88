// Paged causal attention, in place: keys and values are read where they lie, each once for all query heads of its group.
// This file cuts a step into tiles and spreads them over threads; attention_tile.h computes one.
#include <cstdlib>

#include "attention_tile.h"
#include "kernels.h"
#include "pool.h"

namespace {

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
