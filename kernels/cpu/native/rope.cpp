// Per-head RMSNorm (optional), RoPE ("rotate half") and the KV-cache write, one pass over the merged QKV projection.
#include "kernels.h"
#include "pool.h"
#include "step.h"
#include "vec.h"

namespace {

struct Heads {
    int num_heads, num_kv_heads, dim, block_size, rotary_dim;
    float eps;
};

// One head, normed and rotated, in K. dim is a multiple of 16.
template <class T, class K>
INLINE void prepare_head(const T *src, const float *norm_weight, const float *cos, const float *sin, const Heads &h, K *out) {
    alignas(64) float in[512], x[512];
    vf squares = {};
    for (int d = 0; d < h.dim; d += LANES) {
        vf v = load_floats(src + d);
        squares += v * v;
        store(in + d, v);
    }
    if (norm_weight) {
        vf factor = splat(1.0f / __builtin_sqrtf(reduce_add(squares) / (float)h.dim + h.eps));
        for (int d = 0; d < h.dim; d += LANES) store(in + d, load<vf>(in + d) * factor * load<vf>(norm_weight + d));
    }
    int half = h.rotary_dim / 2;
    for (int d = 0; d < half; d++) {
        x[d] = in[d] * cos[d] - in[d + half] * sin[d];
        x[d + half] = in[d + half] * cos[d] + in[d] * sin[d];
    }
    for (int d = h.rotary_dim; d < h.dim; d++) x[d] = in[d];
    for (int d = 0; d < h.dim; d += LANES) store_floats(out + d, load<vf>(x + d));
}

// A token's line of each of the key's 4-byte units: all of them are about to be written, and few are in the cache.
template <class K>
INLINE void fetch_key(const K *key, int64_t block_head, int offset, const Heads &h) {
    constexpr int PACK = 4 / sizeof(K);
    const K *base = key + block_head * h.dim * h.block_size + (int64_t)offset * PACK;
    for (int d = 0; d < h.dim; d += PACK) __builtin_prefetch(base + (int64_t)d * h.block_size, 1);
}

template <class K>
INLINE void write_key(const K *x, K *key, int64_t block_head, int offset, const Heads &h) {
    constexpr int PACK = 4 / sizeof(K);
    K *base = key + block_head * h.dim * h.block_size + (int64_t)offset * PACK;
    for (int d = 0; d < h.dim; d += PACK) memcpy(base + (int64_t)d * h.block_size, x + d, 4);
}

template <class T, class K>
INLINE void write_value(const T *src, K *value, int64_t block_head, int offset, const Heads &h) {
    constexpr int PACK = 4 / sizeof(K);
    K *base = value + (block_head * h.block_size + offset / PACK * PACK) * h.dim + offset % PACK;
    for (int d = 0; d < h.dim; d++) from_float(to_float(src[d]), base + d * PACK);
}

template <class T, class K>
void rope(const Step &step, const T *qkv, T *q_out, K *key, K *value, const float *cos_sin, const float *q_norm,
          const float *k_norm, const Heads &h) {
    int64_t width = (int64_t)(h.num_heads + 2 * h.num_kv_heads) * h.dim;
    auto token = [&](int64_t t) {
        int64_t slot = step.slot_mapping[t], block_head = slot / h.block_size * h.num_kv_heads;
        int offset = (int)(slot % h.block_size);
        for (int head = 0; slot >= 0 && head < h.num_kv_heads; head++) fetch_key(key, block_head + head, offset, h);
        const float *cos = cos_sin + step.positions[t] * h.rotary_dim, *sin = cos + h.rotary_dim / 2;
        const T *src = qkv + t * width;
        T *out = q_out + t * h.num_heads * h.dim;
        for (int head = 0; head < h.num_heads; head++, src += h.dim, out += h.dim)
            prepare_head(src, q_norm, cos, sin, h, out);
        K x[512];
        for (int head = 0; slot >= 0 && head < h.num_kv_heads; head++, src += h.dim) {
            prepare_head(src, k_norm, cos, sin, h, x);
            write_key(x, key, block_head + head, offset, h);
            write_value(src + (int64_t)h.num_kv_heads * h.dim, value, block_head + head, offset, h);
        }
    };
    // Neighbors in a prompt write to the same lines: few pieces there.
    int64_t tokens = step.num_tokens == step.num_requests ? 4 : 16, pieces = (step.num_tokens + tokens - 1) / tokens;
    pool::parallel_for(pieces, step.threads, [&](int64_t piece) {
        for (int64_t t = piece * tokens; t < (piece + 1) * tokens && t < step.num_tokens; t++) token(t);
    });
}

}  // namespace

extern "C" {

// qkv [T, (H + 2 KVH) * D] -> q_out [T, H, D]; key and value written in the layout of attention.cpp. dim <= 512.
void pt_rope(const Step *step, const void *qkv, void *q_out, void *key, void *value, const float *cos_sin,
             const float *q_norm, const float *k_norm, float eps, int rotary_dim, int num_heads, int num_kv_heads, int dim,
             int block_size, int dtype, int kv_dtype) {
    Heads h = {num_heads, num_kv_heads, dim, block_size, rotary_dim, eps};
    if (dtype == F32 && kv_dtype == F32)
        rope(*step, (const float *)qkv, (float *)q_out, (float *)key, (float *)value, cos_sin, q_norm, k_norm, h);
    else if (dtype == F32)
        rope(*step, (const float *)qkv, (float *)q_out, (bf16 *)key, (bf16 *)value, cos_sin, q_norm, k_norm, h);
    else if (kv_dtype == F32)
        rope(*step, (const bf16 *)qkv, (bf16 *)q_out, (float *)key, (float *)value, cos_sin, q_norm, k_norm, h);
    else
        rope(*step, (const bf16 *)qkv, (bf16 *)q_out, (bf16 *)key, (bf16 *)value, cos_sin, q_norm, k_norm, h);
}
}
