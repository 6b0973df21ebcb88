#include "quant_tile.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

void quant8_linear(const Linear &l, const InputGroup *x, void *out, int64_t rows, int threads) {
    multiply_rows<Q8_0>(l, x, out, rows, threads);
}

#endif
