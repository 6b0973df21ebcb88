// From logits to tokens: temperature; top-k; top-p of what top-k left; min-p; then one uniform number picks from the
// cumulative distribution. Rows that cut by rank accumulate from the likeliest token down, equal ones by id; the others in
// the order of the vocabulary. One thread computes a row, in an order of its own: its token depends on nothing else.
#include <algorithm>
#include <cstdlib>

#include "pool.h"
#include "vec.h"

namespace {

constexpr int64_t NOTHING = -1;
constexpr int CHUNK = 16 * LANES;      // tokens whose weights are summed up before they join the total
constexpr float WIDEST = 88.0f;        // exp_v is 0 below -87
constexpr float FIRST_CUT = 8.0f;      // candidates within e^-8 of the likeliest: nearly always enough

struct Row {
    const float *logits;
    int64_t vocab, top_k;  // top_k 0: off
    float best, inverse_temperature, top_p, min_p;
    double number;  // in [0, 1)
};

INLINE bool any(vi mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#else
    int32_t found = 0;
    for (int l = 0; l < LANES; l++) found |= mask[l];
    return found;
#endif
}

// Relative to the likeliest token's; n: lanes that exist, the others' are 0.
INLINE vf weights_at(const Row &row, int64_t i, int n) {
    vf x = n == LANES ? load_floats(row.logits + i) : load_floats(row.logits + i, n);
    vf w = exp_v((x - row.best) * row.inverse_temperature);
    w = w < row.min_p ? splat(0.0f) : w;
    return n == LANES ? w : (iota() < n ? w : splat(0.0f));
}

INLINE int lanes_at(const Row &row, int64_t i) { return row.vocab - i < LANES ? (int)(row.vocab - i) : LANES; }

float chunk_weight(const Row &row, int64_t begin) {
    int64_t end = std::min(begin + CHUNK, row.vocab);
    vf sum = {};
    for (int64_t i = begin; i < end; i += LANES) sum += weights_at(row, i, lanes_at(row, i));
    return reduce_add(sum);
}

double total_weight(const Row &row) {
    double total = 0;
    for (int64_t begin = 0; begin < row.vocab; begin += CHUNK) total += chunk_weight(row, begin);
    return total;
}

// The first token in the order of the vocabulary whose cumulative weight exceeds number * total.
int64_t draw_in_order(const Row &row) {
    double target = row.number * total_weight(row), before = 0;
    int64_t last = 0;
    for (int64_t begin = 0; begin < row.vocab; begin += CHUNK) {
        float sum = chunk_weight(row, begin);
        if (sum == 0) continue;
        last = begin;
        if (before + sum > target) break;
        before += sum;
    }
    int64_t found = last;  // rounding may leave the target at the chunk's very end: then its last likely token
    for (int64_t i = last; i < std::min(last + CHUNK, row.vocab); i++) {
        float w = weights_at(row, i, 1)[0];
        if (w == 0) continue;
        found = i;
        before += w;
        if (before > target) break;
    }
    return found;
}

// Rises as a token gets less likely; equal ones rise with their ids.
INLINE uint64_t rank_key(float logit, int64_t id) {
    uint32_t u = bits<uint32_t>(logit + 0.0f);  // -0 is 0
    u = u & 0x80000000u ? u : ~u & 0x7fffffffu;
    return (uint64_t)u << 32 | (uint64_t)id;
}

INLINE bool within(const Row &row, int64_t i, float cut) {
    return (row.logits[i] - row.best) * row.inverse_temperature >= -cut;
}

// Calls keep(i) for the tokens whose scores are within `cut` of the best, in the order of the vocabulary.
template <class Keep>
INLINE void for_candidates(const Row &row, float cut, const Keep &keep) {
    for (int64_t i = 0; i < row.vocab; i += LANES) {
        int n = lanes_at(row, i);
        vf x = n == LANES ? load_floats(row.logits + i) : load_floats(row.logits + i, n);
        if (n == LANES && !any((x - row.best) * row.inverse_temperature >= splat(-cut))) continue;
        for (int l = 0; l < n; l++)
            if (within(row, i + l, cut)) keep(i + l);
    }
}

// How wide a cut holds all that the row's limits keep: enough tokens for top-k, or enough weight for top-p.
float wide_enough(const Row &row, double total, int64_t *count) {
    for (float cut = FIRST_CUT;; cut *= 2) {
        double weight = 0;
        int64_t found = 0;
        for_candidates(row, cut, [&](int64_t i) {
            found++;
            weight += weights_at(row, i, 1)[0];
        });
        *count = found;
        if (cut >= WIDEST || (row.top_k ? found >= row.top_k : weight >= (double)row.top_p * total)) return cut;
    }
}

// Among the best by rank. Returns NOTHING - 1 where memory ran out.
int64_t draw_by_rank(const Row &row) {
    int64_t count;
    double total = row.top_k ? 0 : total_weight(Row{row.logits, row.vocab, 0, row.best, row.inverse_temperature, 1, 0, 0});
    Row unlimited = row;
    unlimited.min_p = 0;  // min-p cuts last, so it must not change what top-p is a share of
    float cut = wide_enough(unlimited, total, &count);
    uint64_t *keys = (uint64_t *)malloc(sizeof(uint64_t) * count);
    float *weights = (float *)malloc(sizeof(float) * count);
    if (!keys || !weights) {
        free(keys), free(weights);
        return NOTHING - 1;
    }
    int64_t n = 0;
    for_candidates(row, cut, [&](int64_t i) { keys[n++] = rank_key(row.logits[i], i); });
    int64_t kept = row.top_k && row.top_k < count ? row.top_k : count;
    if (kept < count) std::nth_element(keys, keys + kept, keys + count);
    std::sort(keys, keys + kept);
    double whole = 0;
    for (int64_t i = 0; i < kept; i++) {
        weights[i] = weights_at(unlimited, (int64_t)(uint32_t)keys[i], 1)[0];
        whole += weights[i];
    }
    if (!row.top_k) whole = total;
    double before = 0;
    int64_t last = 0;
    for (; last < kept && (last == 0 || (before < row.top_p * whole && weights[last] >= row.min_p)); last++)
        before += weights[last];
    double target = row.number * before, cumulative = 0;
    int64_t place = 0;
    for (; place + 1 < last; place++)
        if ((cumulative += weights[place]) > target) break;
    int64_t token = (int64_t)(uint32_t)keys[place];
    free(keys), free(weights);
    return token;
}

// The largest logit's id, the lowest of equal ones; NOTHING where one is NaN or +inf, or none is finite.
int64_t argmax(const float *logits, int64_t vocab) {
    vf most = splat(NEG_INF);
    vi strange = {};
    for (int64_t i = 0; i < vocab; i += LANES) {
        int n = vocab - i < LANES ? (int)(vocab - i) : LANES;
        vf x = n == LANES ? load_floats(logits + i) : (iota() < n ? load_floats(logits + i, n) : splat(NEG_INF));
        strange |= (x != x) | (x == -NEG_INF);
        most = vmax(most, x);
    }
    float best = reduce_max(most);
    if (any(strange) || best == NEG_INF) return NOTHING;
    for (int64_t i = 0; i < vocab; i++)
        if (logits[i] == best) return i;
    return NOTHING;
}

uint64_t mix(uint64_t x) {  // splitmix64's finaliser
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

double uniform(uint64_t seed, uint64_t position) {  // server.sampling.random.uniforms
    constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15ull;
    return (double)(mix(mix(seed + GOLDEN) + position * GOLDEN) >> 11) * 0x1p-53;
}

}  // namespace

extern "C" {

// logits f32[rows, vocab], rows `stride` apart -> out i64[rows], -1 where there is nothing to choose from. temperature 0 is
// greedy, top_k <= 0 off. Returns 1 where memory ran out.
int pt_sample(const float *logits, int64_t stride, int64_t rows, int64_t vocab, const float *temperature, const int32_t *top_k,
              const float *top_p, const float *min_p, const int64_t *seeds, const int64_t *positions, int64_t *out,
              int threads) {
    pool::parallel_for(rows, threads, [&](int64_t r) {
        const float *x = logits + r * stride;
        out[r] = argmax(x, vocab);
        if (out[r] == NOTHING || temperature[r] == 0) return;
        Row row = {x, vocab, top_k[r] > 0 ? top_k[r] : 0, x[out[r]], 1.0f / temperature[r], top_p[r], min_p[r],
                   uniform((uint64_t)seeds[r], (uint64_t)positions[r])};
        out[r] = row.top_k || row.top_p < 1.0f ? draw_by_rank(row) : draw_in_order(row);
    });
    for (int64_t r = 0; r < rows; r++)
        if (out[r] < NOTHING) return 1;
    return 0;
}
}
