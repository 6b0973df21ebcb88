// Activations as integers for the multiplication by quantised weights.
//
// A group's step is set by its largest value, and in a group of 32 that one is often alone: an outlier channel. So the quad
// (four neighbors) that holds it gets 15 bits, low + 128 * high, and the rest 8 bits by the largest of the rest: one more
// multiplication for eight, and about a tenth of the squared error of 8 bits throughout (docs/adr/0010-*.md).
#include <cmath>
#include <cstdlib>

#include "quant.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

namespace {

constexpr float LARGEST = 127, LARGEST_PAIR = 127 * 128;
constexpr float NEGLIGIBLE = 1e-30f;  // a group below counts as zeros: its step would have no inverse

// The largest of eight 64-bit lanes' low 16 bits, in bits 0 to 15, and its lane in bits 16 to 18.
INLINE uint32_t largest(__m512i lanes) {
    __m128i inverted = _mm_xor_si128(_mm512_cvtepi64_epi16(lanes), _mm_set1_epi32(-1));
    return (uint32_t)_mm_cvtsi128_si32(_mm_minpos_epu16(inverted)) ^ 0xffff;
}
INLINE float magnitude(uint32_t largest) { return bits<float>(largest << 16); }

// n of the group's halves; `wide` marks the lanes of the quad with high parts.
INLINE void write_half(__m512i n, __mmask16 wide, int8_t *low, int8_t *high) {
    __m512i h = _mm512_srai_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(64)), 7);
    __m512i l = _mm512_mask_sub_epi32(n, wide, n, _mm512_slli_epi32(h, 7));
    _mm_storeu_si128((__m128i *)low, _mm512_cvtsepi32_epi8(l));
    _mm_storeu_si128((__m128i *)high, _mm512_cvtsepi32_epi8(h));
}

INLINE void quantize_group(const bf16 *x, InputGroup *to) {
    __m512i quads = _mm512_and_si512(_mm512_loadu_si512(x), _mm512_set1_epi16(0x7fff));  // as integers: NaN is the largest
    quads = _mm512_max_epu16(quads, _mm512_ror_epi64(quads, 32));
    quads = _mm512_max_epu16(quads, _mm512_ror_epi64(quads, 16));
    uint32_t first = largest(quads);
    int quad = (int)(first >> 16);
    float top = magnitude(first), rest = magnitude(largest(_mm512_maskz_mov_epi64((__mmask8)~(1 << quad), quads)));
    uint32_t wide = 15u << (quad * 4);
    __mmask16 wa = (__mmask16)wide, wb = (__mmask16)(wide >> LANES);
    float step = rest / LARGEST, least = top / LARGEST_PAIR;
    if (step < least) step = least;
    float inverse = top > NEGLIGIBLE ? 1 / step : 0;
    if (!(top < INFINITY)) step = NAN;
    vf a = load_floats(x), b = load_floats(x + LANES);
    __m512i na = _mm512_cvtps_epi32((__m512)(a * inverse)), nb = _mm512_cvtps_epi32((__m512)(b * inverse));
    int8_t high[GROUP];
    write_half(na, wa, to->low, high);
    write_half(nb, wb, to->low + LANES, high + LANES);
    memcpy(to->high, high + quad * 4, 4);
    to->quad = quad;
    to->scale = step;
    to->sum = step * (float)_mm512_reduce_add_epi32(_mm512_add_epi32(na, nb));
}

struct Scratch {
    void *data = nullptr;
    size_t size = 0;
    ~Scratch() { free(data); }
};
thread_local Scratch scratch;

}  // namespace

const InputGroup *quantize_input(const void *x, int64_t rows, int64_t in_features, int threads) {
    int64_t count = rows * (in_features / GROUP);
    size_t size = (size_t)(count + 1) * sizeof(InputGroup);
    if (size > scratch.size) {
        free(scratch.data);
        scratch.size = 0;
        scratch.data = aligned_alloc(64, (size + 63) / 64 * 64);
        if (!scratch.data) return nullptr;
        scratch.size = size;
    }
    InputGroup *to = (InputGroup *)scratch.data;
    constexpr int64_t STEP = 128;
    pool::parallel_for((count + STEP - 1) / STEP, threads, [&](int64_t piece) {
        int64_t last = (piece + 1) * STEP < count ? (piece + 1) * STEP : count;
        for (int64_t i = piece * STEP; i < last; i++) quantize_group((const bf16 *)x + i * GROUP, to + i);
    });
    return to;
}

#endif
