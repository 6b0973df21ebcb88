// The entry points that one file here calls of another. What they do is said where they are defined.
#pragma once

#include "step.h"

struct Linear;

extern "C" {

void pt_norm(const void *x, void *residual, const void *weight, void *out, int64_t rows, int64_t n, float eps, int dtype,
             int weight_dtype, int threads);
void pt_gated(const void *gate_up, void *out, int64_t rows, int64_t n, int kind, int dtype, int threads);
void pt_rope(const Step *step, const void *qkv, void *q_out, void *key, void *value, const float *cos_sin,
             const float *q_norm, const float *k_norm, float eps, int rotary_dim, int num_heads, int num_kv_heads, int dim,
             int block_size, int dtype, int kv_dtype);
int pt_attention(const Step *step, const void *q, void *out, const void *key, const void *value, int num_heads,
                 int num_kv_heads, int dim, int block_size, int window, float scale, float soft_cap, int dtype);
int pt_quant_linear(const Linear *linear, const void *x, void *out, int64_t rows, int threads);
void pt_dense_linear(const Linear *linear, const void *x, void *out, int64_t rows, int threads);
}
