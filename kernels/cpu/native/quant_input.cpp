// Activations as integers for the multiplication by quantised weights.
//
// A group's step is set by its largest value, and in a group of 32 that one is often alone: an outlier channel. So the quad
// (four neighbours) that holds it gets 15 bits, low + 128 * high, and the rest 8 bits by the largest of the rest: one more
// multiplication for eight, and about a tenth of the error of 8 bits throughout (docs/adr/0010-*.md).
#include <cstdlib>

#include "quant.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

namespace {

constexpr float LARGEST = 127, LARGEST_PAIR = 127 * 128;
constexpr float NEGLIGIBLE = 1e-30f;  // a group below counts as zeros: its step would have no inverse
constexpr int32_t INFINITE = 0x7f800000;

INLINE __m512i magnitudes(vf x) { return _mm512_and_si512((__m512i)x, _mm512_set1_epi32(0x7fffffff)); }

// n of the group's halves; `wide` marks the lanes of the quad with high parts.
INLINE void write_half(__m512i n, __mmask16 wide, int8_t *low, int8_t *high) {
    __m512i h = _mm512_srai_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(64)), 7);
    __m512i l = _mm512_mask_sub_epi32(n, wide, n, _mm512_slli_epi32(h, 7));
    _mm_storeu_si128((__m128i *)low, _mm512_cvtsepi32_epi8(l));
    _mm_storeu_si128((__m128i *)high, _mm512_cvtsepi32_epi8(h));
}

INLINE void quantize_group(const bf16 *x, InputGroup *to) {
    vf a = load_floats(x), b = load_floats(x + LANES);
    __m512i ma = magnitudes(a), mb = magnitudes(b);  // as integers: NaN is the largest of all
    int32_t top = _mm512_reduce_max_epi32(_mm512_max_epi32(ma, mb));
    __m512i tops = _mm512_set1_epi32(top);
    uint32_t where = _mm512_cmpeq_epi32_mask(ma, tops) | (uint32_t)_mm512_cmpeq_epi32_mask(mb, tops) << LANES;
    int quad = __builtin_ctz(where) / 4;
    uint32_t wide = 15u << (quad * 4);
    __mmask16 wa = (__mmask16)wide, wb = (__mmask16)(wide >> LANES);
    int32_t rest = _mm512_reduce_max_epi32(
        _mm512_max_epi32(_mm512_maskz_mov_epi32((__mmask16)~wa, ma), _mm512_maskz_mov_epi32((__mmask16)~wb, mb)));
    float step = bits<float>(rest) / LARGEST, least = bits<float>(top) / LARGEST_PAIR;
    if (step < least) step = least;
    float inverse = bits<float>(top) > NEGLIGIBLE ? 1 / step : 0;
    if (top >= INFINITE) step = bits<float>(0x7fc00000);
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
