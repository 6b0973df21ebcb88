// Paged causal attention, in place: keys and values are read where they lie, each once for all query heads of its group.
// This file cuts a step into tiles and spreads them over threads; attention_tile.h computes one.
#include <cstdlib>

#include "attention_tile.h"
#include "kernels.h"
#include "pool.h"

namespace {

struct Plan {  // how one request's rows are cut into tiles
    int queries_per_tile, heads_per_tile, head_tiles, query_tiles, first_chunk, chunks;
    bool split;  // chunks are separate pieces of work
};

// crowded: whether there are tiles enough to keep all threads busy.
Plan plan_request(const Task &task, int request, bool crowded) {
    constexpr int LONG = 16;  // chunks
    const Step &step = *task.step;
    int queries = step.query_start_loc[request + 1] - step.query_start_loc[request], context = step.seq_lens[request];
    Plan p;
    p.heads_per_tile = task.group < MAX_ROWS ? task.group : MAX_ROWS;
    p.head_tiles = (task.group + p.heads_per_tile - 1) / p.heads_per_tile;
    p.queries_per_tile = MAX_ROWS / p.heads_per_tile;
    p.query_tiles = (queries + p.queries_per_tile - 1) / p.queries_per_tile;
    int lo = task.window ? context - queries - task.window + 1 : 0;
    p.first_chunk = lo > 0 ? lo / task.chunk : 0;
    p.chunks = (context + task.chunk - 1) / task.chunk;
    p.split = p.query_tiles == 1 && p.chunks - p.first_chunk > (crowded ? LONG : 1);
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
    tile.fetch = to - from == 1;
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
    int request, kv_head, head_tile, query_tile;
    int chunk;        // < 0: all of them
    int split;        // of split tiles, which one
    int64_t partial;  // of a split tile, its first partial
};

struct Work {
    int64_t items, partials;
    int splits;
};

// Lists the work; items may be null to count only.
Work list_items(const Task &task, bool crowded, Item *items) {
    Work work = {0, 0, 0};
    for (int request = 0; request < task.step->num_requests; request++) {
        Plan p = plan_request(task, request, crowded);
        for (int kv_head = 0; kv_head < task.num_kv_heads; kv_head++)
            for (int head_tile = 0; head_tile < p.head_tiles; head_tile++)
                for (int query_tile = p.query_tiles - 1; query_tile >= 0; query_tile--) {  // the longest first
                    int from = p.split ? p.first_chunk : -1, to = p.split ? p.chunks : 0;
                    for (int c = from; c < to; c++, work.items++)
                        if (items)
                            items[work.items] = {request, kv_head, head_tile, query_tile, c, work.splits, work.partials};
                    if (p.split) work.splits++, work.partials += to - from;
                }
    }
    return work;
}

constexpr int64_t partial_floats(int dim) { return (int64_t)MAX_ROWS * (dim + 2); }

Partial partial_at(float *memory, int64_t index, int dim) {
    float *at = memory + index * partial_floats(dim);
    return {at, at + MAX_ROWS, at + 2 * MAX_ROWS};
}

struct Run {
    const Task &task;
    bool crowded;
    int64_t count;
    const Item *items;
    float *partials;
    int *left;  // of each split tile, the chunks that nobody has computed yet

    // The keys that the thread which has item i is likely to want next: pieces are taken in order.
    Span after(int64_t i) const {
        int64_t n = i + task.step->threads;
        if (n >= count) return {0, 0, 0, 0};
        int context = task.step->seq_lens[items[n].request];
        int chunk = items[n].chunk < 0 ? plan_request(task, items[n].request, crowded).first_chunk : items[n].chunk;
        return {items[n].request, items[n].kv_head, chunk * task.chunk, context};
    }

    template <bool BF16_KV, class T>
    void item(int64_t i) const {
        const Item &it = items[i];
        Plan p = plan_request(task, it.request, crowded);
        Tile tile = make_tile(task, p, it.request, it.kv_head, it.head_tile, it.query_tile, sizeof(T));
        alignas(64) float memory[2 * MAX_ROWS * (512 + 2)];
        Partial whole = partial_at(memory, 0, task.dim), part = partial_at(memory, 1, task.dim);
        if (it.chunk >= 0) {
            int64_t index = it.partial + it.chunk - p.first_chunk;
            chunk_pass<BF16_KV>(task, tile, it.chunk * task.chunk, after(i), partial_at(partials, index, task.dim));
            if (__atomic_sub_fetch(&left[it.split], 1, __ATOMIC_ACQ_REL)) return;
            clear(whole, tile.rows, task.dim);  // the last one to come merges, in order
            for (int c = 0; c < p.chunks - p.first_chunk; c++)
                merge(whole, partial_at(partials, it.partial + c, task.dim), tile.rows, task.dim);
        } else {
            clear(whole, tile.rows, task.dim);
            for (int begin = tile.first / task.chunk * task.chunk; begin < tile.last; begin += task.chunk) {
                Span next = {it.request, it.kv_head, begin + task.chunk, tile.last};
                chunk_pass<BF16_KV>(task, tile, begin, next.from < next.to ? next : after(i), part);
                merge(whole, part, tile.rows, task.dim);
            }
        }
        finish<T>(tile, whole, task.dim);
    }
};

int64_t visible_keys(const Step &step) {
    int64_t total = 0;
    for (int b = 0; b < step.num_requests; b++)
        total += (int64_t)step.seq_lens[b] * (step.query_start_loc[b + 1] - step.query_start_loc[b]);
    return total;
}

template <bool BF16_KV, class T>
int run(const Task &task) {
    constexpr int64_t ALONE = 32768, TILES_A_THREAD = 8;
    int threads = visible_keys(*task.step) * task.num_heads * task.dim < ALONE ? 1 : task.step->threads;
    bool crowded = threads == 1 || list_items(task, true, nullptr).items >= TILES_A_THREAD * threads;
    Work work = list_items(task, crowded, nullptr);
    Item *items = (Item *)malloc(sizeof(Item) * (work.items + 1));
    float *partials = (float *)malloc(sizeof(float) * (work.partials * partial_floats(task.dim) + 1));
    int *left = (int *)calloc(work.splits + 1, sizeof(int));
    bool enough = items && partials && left;
    if (enough) {
        list_items(task, crowded, items);
        for (int64_t i = 0; i < work.items; i++) left[items[i].split] += items[i].chunk >= 0;
        Run step = {task, crowded, work.items, items, partials, left};
        pool::parallel_for(work.items, threads, [&](int64_t i) { step.item<BF16_KV, T>(i); });
    }
    free(items);
    free(partials);
    free(left);
    return !enough;
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
