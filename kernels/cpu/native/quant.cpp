// Packing of quantised weights, the embedding lookup, and the way to the 4- and 8-bit multiplications.
#include "quant.h"

namespace {

INLINE float half_to_float(uint16_t h) {
    float magnitude = bits<float>((uint32_t)(h & 0x7fff) << 13) * 5.192296858534828e33f;  // 2^112 mends the exponent's bias
    return bits<float>(bits<uint32_t>(magnitude) | (uint32_t)(h & 0x8000) << 16);
}

INLINE int code_at(int kind, const uint8_t *codes, int k) {
    if (kind == Q8_0) return (int8_t)codes[k] + 128;
    return k < 16 ? codes[k] & 15 : codes[k - 16] >> 4;
}

// One tile and group: from the file's blocks of 16 rows (null: padding) to the layout of quant.h.
void pack_block(int kind, const uint8_t *const *rows, uint8_t *to, uint8_t *scales, uint8_t *minima) {
    Format f = format_of(kind);
    memset(to, 0, f.code_bytes);
    memset(scales, 0, 32);
    if (f.has_min) memset(minima, 0, 32);
    for (int o = 0; o < LANES; o++) {
        if (!rows[o]) continue;
        const uint8_t *codes = rows[o] + f.codes_at;
        for (int k = 0; k < GROUP; k++) {
            int code = code_at(kind, codes, k), byte = o * 4 + k % 4;
            if (kind == Q8_0)
                to[k / 4 * 64 + byte] = (uint8_t)code;
            else
                to[k / 4 % 4 * 64 + byte] |= (uint8_t)(code << (k / 16 * 4));
        }
        memcpy(scales + o * 2, rows[o], 2);
        if (f.has_min) memcpy(minima + o * 2, rows[o] + 2, 2);
    }
}

template <class T>
INLINE void embed_row(int kind, const uint8_t *blocks, T *out, int64_t size) {
    Format f = format_of(kind);
    for (int64_t g = 0; g < size / GROUP; g++, blocks += f.file_bytes, out += GROUP) {
        uint16_t half[2] = {0, 0};
        memcpy(half, blocks, f.codes_at);
        float scale = half_to_float(half[0]), minimum = half_to_float(half[1]);
        for (int k = 0; k < GROUP; k++)
            from_float(scale * (float)(code_at(kind, blocks + f.codes_at, k) - f.zero) + minimum, out + k);
    }
}

}  // namespace

extern "C" {

// Whether pt_quant_linear multiplies by weights of this kind on this processor.
int pt_quant_supported(int kind) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    return kind == Q4_0 || kind == Q4_1 || kind == Q8_0;
#else
    (void)kind;
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
        int64_t first = t / PANEL * PANEL, width = tiles - first < PANEL ? 1 : PANEL;
        for (int64_t g = 0; g < groups; g++) {
            const uint8_t *rows[LANES];
            for (int o = 0; o < LANES; o++) {
                int64_t row = t * LANES + o;
                rows[o] = row < out_features ? blocks + (row * groups + g) * f.file_bytes : nullptr;
            }
            uint8_t *block = packed + (first * groups + g * width) * f.block_bytes;
            uint8_t *scales = block + width * f.code_bytes + (t - first) * 32, *minima = scales + width * 32;
            pack_block(kind, rows, block + (t - first) * f.code_bytes, scales, minima);
        }
    });
}

// linear: see linear.h. x bf16[rows, in] -> [rows, out] in linear.out_dtype. Returns 0, or 1 where memory ran out.
int pt_quant_linear(const Linear *linear, const void *x, void *out, int64_t rows, int threads) {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    const InputGroup *input = quantize_input(x, rows, linear->in_features, threads);
    if (!input) return 1;
    if (linear->kind == Q8_0)
        quant8_linear(*linear, input, out, rows, threads);
    else
        quant4_linear(*linear, input, out, rows, threads);
    return 0;
#else
    (void)linear, (void)x, (void)out, (void)rows, (void)threads;
    return 1;
#endif
}

// ids -> rows of a table [num_rows, size] as it lies in the file, in dtype. Returns 1, and writes nothing, for an id out of
// range.
int pt_quant_embed(int kind, const uint8_t *blocks, const int64_t *ids, void *out, int64_t count, int64_t num_rows,
                   int64_t size, int dtype) {
    for (int64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= num_rows) return 1;
    int64_t row_bytes = size / GROUP * format_of(kind).file_bytes;
    for (int64_t i = 0; i < count; i++) {
        if (dtype == F32)
            embed_row(kind, blocks + ids[i] * row_bytes, (float *)out + i * size, size);
        else
            embed_row(kind, blocks + ids[i] * row_bytes, (bf16 *)out + i * size, size);
    }
    return 0;
}
}
