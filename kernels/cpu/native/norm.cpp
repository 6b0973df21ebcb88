// RMSNorm, residual add + RMSNorm, gated activations. Rows are independent: a row's result never depends on its company.
#include "kernels.h"
#include "pool.h"
#include "step.h"
#include "vec.h"

namespace {

// row(t) for every row, in pieces of at least 16384 elements' work: less isn't worth a second thread.
template <class Row>
void by_rows(int64_t rows, int64_t row_size, int threads, const Row &row) {
    int64_t step = 16384 / (row_size + 1) + 1;
    pool::parallel_for((rows + step - 1) / step, threads, [&](int64_t piece) {
        int64_t last = (piece + 1) * step < rows ? (piece + 1) * step : rows;
        for (int64_t t = piece * step; t < last; t++) row(t);
    });
}

template <class T>
INLINE float sum_of_squares(const T *x, int64_t n) {
    vf a = {}, b = {};
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES) {
        vf u = load_floats(x + i), v = load_floats(x + i + LANES);
        a += u * u;
        b += v * v;
    }
    for (; i < n; i += LANES) {
        vf u = n - i >= LANES ? load_floats(x + i) : load_floats(x + i, (int)(n - i));
        a += u * u;
    }
    return reduce_add(a + b);
}

template <class T, class W>
INLINE void scale_row(const T *x, const W *weight, T *out, int64_t n, float eps) {
    vf factor = splat(1.0f / __builtin_sqrtf(sum_of_squares(x, n) / (float)n + eps));
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store_floats(out + i, load_floats(x + i) * factor * load_floats(weight + i));
    int rest = (int)(n - i);
    if (rest) store_floats(out + i, load_floats(x + i, rest) * factor * load_floats(weight + i, rest), rest);
}

template <class T>
INLINE void add_row(const T *x, T *residual, int64_t n) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store_floats(residual + i, load_floats(x + i) + load_floats(residual + i));
    int rest = (int)(n - i);
    if (rest) store_floats(residual + i, load_floats(x + i, rest) + load_floats(residual + i, rest), rest);
}

template <class T, class W>
void norm(const T *x, T *residual, const W *weight, T *out, int64_t rows, int64_t n, float eps, int threads) {
    by_rows(rows, n, threads, [&](int64_t t) {
        if (residual) add_row(x + t * n, residual + t * n, n);
        scale_row((residual ? residual : x) + t * n, weight, out + t * n, n, eps);
    });
}

template <int KIND>
INLINE vf activate(vf gate) {
    if (KIND == 0) return gate / (1.0f + exp_v(-gate));
    return 0.5f * gate * (1.0f + tanh_v(0.79788456f * (gate + 0.044715f * gate * gate * gate)));
}

template <int KIND, class T>
void gated(const T *gate_up, T *out, int64_t rows, int64_t n, int threads) {
    by_rows(rows, 4 * n, threads, [&](int64_t t) {
        const T *gate = gate_up + t * 2 * n, *up = gate + n;
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES)
            store_floats(out + t * n + i, activate<KIND>(load_floats(gate + i)) * load_floats(up + i));
        int rest = (int)(n - i);
        if (rest) store_floats(out + t * n + i, activate<KIND>(load_floats(gate + i, rest)) * load_floats(up + i, rest), rest);
    });
}

template <class T>
void gated_kind(const T *gate_up, T *out, int64_t rows, int64_t n, int kind, int threads) {
    if (kind == 0)
        gated<0>(gate_up, out, rows, n, threads);
    else
        gated<1>(gate_up, out, rows, n, threads);
}

}  // namespace

extern "C" {

// out = rms_norm(x) * weight, or with a residual: residual += x (in place), out = rms_norm(residual) * weight.
void pt_norm(const void *x, void *residual, const void *weight, void *out, int64_t rows, int64_t n, float eps, int dtype,
             int weight_dtype, int threads) {
    if (dtype == F32) {
        norm((const float *)x, (float *)residual, (const float *)weight, (float *)out, rows, n, eps, threads);
    } else if (weight_dtype == F32) {
        norm((const bf16 *)x, (bf16 *)residual, (const float *)weight, (bf16 *)out, rows, n, eps, threads);
    } else {
        norm((const bf16 *)x, (bf16 *)residual, (const bf16 *)weight, (bf16 *)out, rows, n, eps, threads);
    }
}

// gate_up [rows, 2n] -> out [rows, n]. kind: 0 SiLU, 1 GELU (tanh form).
void pt_gated(const void *gate_up, void *out, int64_t rows, int64_t n, int kind, int dtype, int threads) {
    if (dtype == F32)
        gated_kind((const float *)gate_up, (float *)out, rows, n, kind, threads);
    else
        gated_kind((const bf16 *)gate_up, (bf16 *)out, rows, n, kind, threads);
}
}
