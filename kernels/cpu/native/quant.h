// GGUF's 4- and 8-bit formats, repacked. Every format is unsigned codes: w = scale * (code - zero) + minimum.
//
// Sixteen output rows fill the lanes, so no dot product needs a sum across lanes. A tile (16 outputs) is, for each group of
// 32 k,
//   codes uint8[256] (4 bit) or uint8[512] (8 bit) | scale fp16[16] | minimum fp16[16] (Q4_1 only)
// 4 bit: [8 k][output][2 words of 4 nibbles], word i of byte-quad j holding k = 8 j + i, + 2, + 4, + 6 from the low end.
// 8 bit: [4 k][output][4 k].
#pragma once

#include "linear.h"
#include "vec.h"

constexpr int GROUP = 32;

enum Kind : int { Q4_0 = 0, Q4_1 = 1, Q8_0 = 2 };

struct Format {
    int file_bytes, codes_at, code_bytes, block_bytes, zero;
    bool has_min;
};

constexpr Format format_of(int kind) {
    return kind == Q4_0   ? Format{18, 2, 256, 288, 8, false}
           : kind == Q4_1 ? Format{20, 4, 256, 320, 0, true}
                          : Format{34, 2, 512, 544, 128, false};
}

#if defined(__AVX512F__)
INLINE vf load_halves(const uint8_t *p) { return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
#endif

// x bf16[rows, in] -> out. Return 0, or 1 where memory ran out. Each in a file of its own, where the processor has it.
int quant4_linear(const Linear &l, const void *x, void *out, int64_t rows, int threads);
int quant8_linear(const Linear &l, const void *x, void *out, int64_t rows, int threads);
