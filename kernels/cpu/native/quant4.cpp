#include "quant_tile.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)

void quant4_linear(const Linear &l, const InputGroup *x, void *out, int64_t rows, int threads) {
    if (l.kind == Q4_0)
        multiply_rows<Q4_0>(l, x, out, rows, threads);
    else
        multiply_rows<Q4_1>(l, x, out, rows, threads);
}

#endif
