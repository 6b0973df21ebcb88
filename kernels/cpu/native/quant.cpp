// Linear layers on GGUF's 4- and 8-bit weights: exact int32 dot products (vpdpbusd) within a group of 32, float32 across groups.
//
// Activations become two int8 codes, x = scale * (coarse + fine / 128), scaled per row and group. The coarse code alone is
// llama.cpp's arithmetic for these formats; it changes one first choice in thirty against float32, with the fine code it is
// one in seventy, as in bf16 (docs/adr/0007). Reading weights bounds small batches, where the second code costs nothing.
// Weights are repacked once: 16 output rows fill the lanes, so no dot product needs a sum across lanes. A tile (16 outputs) is
//   blocks x { codes, uint8[256] (4 bit) or uint8[512] (8 bit) | scale, fp16[16] | minimum, fp16[16] (Q4_1 only) }
// with codes [step of 4 k][output][4 k]; 4-bit codes of steps 2j and 2j + 1 share a byte (low, high).
// Every format is unsigned codes: w = scale * (code - zero) + minimum, zero = 8 (Q4_0), 0 (Q4_1), 128 (Q8_0).
// The order of summation is that of the groups: a row's bits don't depend on the batch or on the number of threads.
#include <cstdlib>

#include "linear.h"
#include "vec.h"

namespace {

constexpr int GROUP = 32;
constexpr int STEPS = GROUP / 4;
constexpr int MAX_ROWS = 6;
constexpr int FINE_BITS = 7, FINE = 1 << FINE_BITS;

enum Kind : int { Q4_0 = 0, Q4_1 = 1, Q8_0 = 2 };

INLINE float half_to_float(uint16_t h) {
    float magnitude = bits<float>((uint32_t)(h & 0x7fff) << 13) * 5.192296858534828e33f;  // 2^112 mends the exponent's bias
    return bits<float>(bits<uint32_t>(magnitude) | (uint32_t)(h & 0x8000) << 16);
}

struct Format {
    int file_bytes, codes_at, code_bytes, block_bytes, zero;
    bool has_min;
};

constexpr Format format_of(int kind) {
    return kind == Q4_0   ? Format{18, 2, 256, 288, 8, false}
           : kind == Q4_1 ? Format{20, 4, 256, 320, 0, true}
                          : Format{34, 2, 512, 544, 128, false};
}

INLINE int code_at(int kind, const uint8_t *codes, int k) {
    if (kind == Q8_0) return (int8_t)codes[k] + 128;
    return k < 16 ? codes[k] & 15 : codes[k - 16] >> 4;
}

// One tile and block: from [16 rows] file blocks (null: padding) to the layout above.
void pack_block(int kind, const uint8_t *const *rows, uint8_t *to) {
    Format f = format_of(kind);
    memset(to, 0, f.block_bytes);
    for (int o = 0; o < LANES; o++) {
        if (!rows[o]) continue;
        const uint8_t *codes = rows[o] + f.codes_at;
        for (int k = 0; k < GROUP; k++) {
            int step = k / 4, code = code_at(kind, codes, k);
            if (kind == Q8_0)
                to[step * 64 + o * 4 + k % 4] = (uint8_t)code;
            else
                to[step / 2 * 64 + o * 4 + k % 4] |= (uint8_t)(code << (step % 2 * 4));
        }
        memcpy(to + f.code_bytes + o * 2, rows[o], 2);
        if (f.has_min) memcpy(to + f.code_bytes + 32 + o * 2, rows[o] + 2, 2);
    }
}

struct Activations {  // codes [rows, groups, 2, 32]; scale, sum [rows, groups]; sum: of the values, or of the codes times -zero
    int8_t *codes;
    float *scale;
    void *sum;
};

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

// x in [-127, 127] -> a coarse code at to[0 ..], a fine one at to[GROUP ..]: x = coarse + fine / FINE. Returns the codes' sum.
INLINE int quantize_lanes(vf x, int8_t *to) {
    __m512i coarse = _mm512_cvtps_epi32((__m512)x);
    __m512i fine = _mm512_cvtps_epi32((__m512)((x - (vf)_mm512_cvtepi32_ps(coarse)) * (float)FINE));
    _mm_storeu_si128((__m128i *)to, _mm512_cvtsepi32_epi8(coarse));
    _mm_storeu_si128((__m128i *)(to + GROUP), _mm512_cvtsepi32_epi8(fine));
    return _mm512_reduce_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(coarse, FINE_BITS), fine));
}

template <class T>
INLINE void quantize_row(const T *x, int size, int8_t *codes, float *scale, float *sum_f, int32_t *sum_i, int zero) {
    for (int g = 0; g < size / GROUP; g++) {
        vf a = load_floats(x + g * GROUP), b = load_floats(x + g * GROUP + LANES);
        float top = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps((__m512)a), _mm512_abs_ps((__m512)b)));
        float inverse = top > 0 ? 127.0f / top : 0.0f;
        int total = quantize_lanes(a * inverse, codes + g * 2 * GROUP) + quantize_lanes(b * inverse, codes + g * 2 * GROUP + LANES);
        scale[g] = top / (127.0f * FINE);
        if (sum_f)
            sum_f[g] = (float)total * scale[g];
        else
            sum_i[g] = -zero * total;
    }
}

INLINE vf load_halves(const uint8_t *p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }

// out[r][t * 16 ..] for ROWS rows and TILES tiles of 16 outputs.
template <int KIND, int ROWS, int TILES>
INLINE void micro(const uint8_t *weights, int64_t tile_bytes, int groups, const Activations &x, int64_t row, vf acc[ROWS][TILES]) {
    constexpr Format F = format_of(KIND);
    const int8_t *codes[ROWS];
    const float *scale[ROWS];
    const void *sum[ROWS];
    for (int r = 0; r < ROWS; r++) {
        codes[r] = x.codes + (row + r) * groups * GROUP * 2;
        scale[r] = x.scale + (row + r) * groups;
        sum[r] = (const float *)x.sum + (row + r) * groups;
    }
    for (int g = 0; g < groups; g++) {
        const uint8_t *block = weights + (int64_t)g * F.block_bytes;
        __m512i dot[ROWS][TILES];
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
            for (int t = 0; t < TILES; t++)
                dot[r][t] = _mm512_setzero_si512();
#pragma GCC unroll 16
        for (int s = 0; s < 2 * STEPS; s++) {
            if (s == STEPS) {
#pragma GCC unroll 6
                for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
                    for (int t = 0; t < TILES; t++) {
                        dot[r][t] = _mm512_slli_epi32(dot[r][t], FINE_BITS);
                        if (F.zero) dot[r][t] = _mm512_add_epi32(dot[r][t], _mm512_set1_epi32(((const int32_t *)sum[r])[g]));
                    }
            }
            __m512i w[TILES];
#pragma GCC unroll 2
            for (int t = 0; t < TILES; t++) {
                const uint8_t *from = block + t * tile_bytes;
                if (KIND == Q8_0) {
                    w[t] = _mm512_loadu_si512(from + s % STEPS * 64);
                } else {
                    w[t] = _mm512_loadu_si512(from + s % STEPS / 2 * 64);
                    if (s % 2) w[t] = _mm512_srli_epi16(w[t], 4);
                    w[t] = _mm512_and_si512(w[t], _mm512_set1_epi8(15));
                }
            }
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) {
                int32_t four;
                memcpy(&four, codes[r] + g * 2 * GROUP + s * 4, 4);
                __m512i a = _mm512_set1_epi32(four);
#pragma GCC unroll 2
                for (int t = 0; t < TILES; t++) dot[r][t] = _mm512_dpbusd_epi32(dot[r][t], w[t], a);
            }
        }
#pragma GCC unroll 2
        for (int t = 0; t < TILES; t++) {
            const uint8_t *scales = block + t * tile_bytes + F.code_bytes;
            vf d = load_halves(scales), m = F.has_min ? load_halves(scales + 32) : splat(0);
#pragma GCC unroll 6
            for (int r = 0; r < ROWS; r++) {
                acc[r][t] += (vf)_mm512_cvtepi32_ps(dot[r][t]) * (d * scale[r][g]);
                if (F.has_min) acc[r][t] += m * ((const float *)sum[r])[g];
            }
        }
    }
}

template <int KIND, int ROWS, int TILES>
void tile_pass(const Linear &l, const Activations &x, void *out, int64_t row, int64_t tile) {
    int groups = (int)(l.in_features / GROUP);
    int64_t tile_bytes = (int64_t)groups * format_of(KIND).block_bytes;
    vf acc[ROWS][TILES] = {};
    micro<KIND, ROWS, TILES>((const uint8_t *)l.weights + tile * tile_bytes, tile_bytes, groups, x, row, acc);
    for (int r = 0; r < ROWS; r++)
        for (int t = 0; t < TILES; t++) store_outputs(l, out, row + r, tile + t, acc[r][t]);
}

template <int KIND, int TILES>
void rows_pass(const Linear &l, const Activations &x, void *out, int64_t row, int rows, int64_t tile) {
    switch (rows) {
        case 1: return tile_pass<KIND, 1, TILES>(l, x, out, row, tile);
        case 2: return tile_pass<KIND, 2, TILES>(l, x, out, row, tile);
        case 3: return tile_pass<KIND, 3, TILES>(l, x, out, row, tile);
        case 4: return tile_pass<KIND, 4, TILES>(l, x, out, row, tile);
        case 5: return tile_pass<KIND, 5, TILES>(l, x, out, row, tile);
        default: return tile_pass<KIND, 6, TILES>(l, x, out, row, tile);
    }
}

template <int KIND>
void quantize_rows(const Linear &l, const void *input, int64_t from, int64_t to, const Activations &x) {
    constexpr Format F = format_of(KIND);
    int64_t size = l.in_features, groups = size / GROUP;
    for (int64_t r = from; r < to; r++) {
        float *sum_f = F.has_min ? (float *)x.sum + r * groups : nullptr;
        int32_t *sum_i = F.has_min ? nullptr : (int32_t *)x.sum + r * groups;
        int8_t *codes = x.codes + r * size * 2;
        float *scale = x.scale + r * groups;
        if (l.dtype == F32)
            quantize_row((const float *)input + r * size, (int)size, codes, scale, sum_f, sum_i, F.zero);
        else
            quantize_row((const bf16 *)input + r * size, (int)size, codes, scale, sum_f, sum_i, F.zero);
    }
}

template <int KIND>
int run(const Linear &l, const void *input, void *out, int64_t rows, int threads) {
    int64_t groups = l.in_features / GROUP;
    char *scratch = (char *)malloc((size_t)rows * (2 * l.in_features + 8 * groups) + 64);
    if (!scratch) return 1;
    Activations x;
    x.scale = (float *)scratch;
    x.sum = scratch + rows * groups * 4;
    x.codes = (int8_t *)scratch + rows * groups * 8;
    constexpr int64_t ROWS = 16;
    pool::parallel_for((rows + ROWS - 1) / ROWS, threads, [&](int64_t piece) {
        quantize_rows<KIND>(l, input, piece * ROWS, (piece + 1) * ROWS < rows ? (piece + 1) * ROWS : rows, x);
    });
    multiply<2, MAX_ROWS>(l, rows, threads, [&](int64_t row, int count, int64_t tile, int tiles) {
        if (tiles == 2)
            rows_pass<KIND, 2>(l, x, out, row, count, tile);
        else
            rows_pass<KIND, 1>(l, x, out, row, count, tile);
    });
    free(scratch);
    return 0;
}

#endif

}  // namespace

extern "C" {

// 1 where pt_quant_linear runs (AVX-512 VNNI).
int pt_quant_supported(void) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    return 1;
#else
    return 0;
#endif
}

// Bytes of the packed form.
int64_t pt_quant_bytes(int kind, int64_t out_features, int64_t in_features) {
    return (out_features + LANES - 1) / LANES * (in_features / GROUP) * format_of(kind).block_bytes;
}

// blocks: [out_features, in_features / 32] of the file's encoding -> packed.
void pt_quant_pack(int kind, const uint8_t *blocks, uint8_t *packed, int64_t out_features, int64_t in_features, int threads) {
    Format f = format_of(kind);
    int64_t groups = in_features / GROUP, tiles = (out_features + LANES - 1) / LANES;
    pool::parallel_for(tiles, threads, [&](int64_t t) {
        for (int64_t g = 0; g < groups; g++) {
            const uint8_t *rows[LANES];
            for (int o = 0; o < LANES; o++) {
                int64_t row = t * LANES + o;
                rows[o] = row < out_features ? blocks + (row * groups + g) * f.file_bytes : nullptr;
            }
            pack_block(kind, rows, packed + (t * groups + g) * f.block_bytes);
        }
    });
}

// linear: see linear.h. x [rows, in] in linear.dtype -> [rows, out] in linear.out_dtype. Returns 0, or 1 where memory ran out.
int pt_quant_linear(const Linear *linear, const void *x, void *out, int64_t rows, int threads) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    if (linear->kind == Q4_0) return run<Q4_0>(*linear, x, out, rows, threads);
    if (linear->kind == Q4_1) return run<Q4_1>(*linear, x, out, rows, threads);
    return run<Q8_0>(*linear, x, out, rows, threads);
#else
    (void)linear, (void)x, (void)out, (void)rows, (void)threads;
    return 1;
#endif
}

// ids -> rows of a table [num_rows, size] as it lies in the file, in dtype. Returns 1, and nothing else, for an id out of range.
int pt_quant_embed(int kind, const uint8_t *blocks, const int64_t *ids, void *out, int64_t count, int64_t num_rows,
                   int64_t size, int dtype) {
    Format f = format_of(kind);
    int64_t groups = size / GROUP;
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= num_rows) return 1;
    for (int64_t i = 0; i < count; i++)
        for (int64_t g = 0; g < groups; g++) {
            const uint8_t *block = blocks + (ids[i] * groups + g) * f.file_bytes;
            uint16_t half[2];
            memcpy(half, block, f.codes_at);
            float scale = half_to_float(half[0]), low = f.has_min ? half_to_float(half[1]) : 0.0f;
            int64_t at = i * size + g * GROUP;
            for (int k = 0; k < GROUP; k++) {
                float value = scale * (float)(code_at(kind, block + f.codes_at, k) - f.zero) + low;
                if (dtype == F32)
                    ((float *)out)[at + k] = value;
                else
                    from_float(value, (bf16 *)out + at + k);
            }
        }
    return 0;
}
}
