// GGUF's 4- and 8-bit formats, repacked. Every format is unsigned codes: w = scale * (code - zero) + minimum.
//
// Sixteen output rows (a tile) fill the lanes, so no dot product needs a sum across lanes. Two tiles are a panel, the last one
// may be alone. Panels lie behind each other, so a thread reads its weights as one stream. A panel is, for each group of 32 k,
//   the tiles' codes uint8[256] (4 bit) or uint8[512] (8 bit) | their scales fp16[16] | their minima fp16[16] (Q4_1 only)
// 8 bit: [quad of k][output][4 k]. 4 bit: the same in the low half of each byte for quads 0 to 3, in the high half for 4 to 7.
#pragma once

#include "linear.h"
#include "vec.h"

constexpr int GROUP = 32, QUADS = GROUP / 4, PANEL = 2;

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

// 32 activations as integers, x = scale * n: int8, but for one quad (that of the largest) which is low + 128 * high.
struct alignas(16) InputGroup {
    int8_t low[GROUP], high[4];
    int32_t quad;  // the one that high belongs to
    float scale, sum;  // sum: of the 32 x
};

// x bf16[rows, in] -> [rows, in / 32]. Memory of the calling thread, good until its next call; null where it ran out.
const InputGroup *quantize_input(const void *x, int64_t rows, int64_t in_features, int threads);

// x [rows, in / 32] -> out. In files of their own, which compile side by side.
void quant4_linear(const Linear &l, const InputGroup *x, void *out, int64_t rows, int threads);
void quant8_linear(const Linear &l, const InputGroup *x, void *out, int64_t rows, int threads);
