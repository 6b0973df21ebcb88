// What every entry point of one step shares. Mirrors the ctypes structures of kernels/cpu/native_lib.py.
#pragma once

#include <cstdint>

enum DType : int32_t { F32 = 0, BF16 = 1 };

struct Step {                      // kernels.metadata.AttentionMetadata
    const int32_t *query_start_loc;  // [B + 1]
    const int32_t *seq_lens;         // [B]
    const int32_t *page_table;       // [B, page_stride]
    const int64_t *slot_mapping;     // [T]
    const int64_t *positions;        // [T]
    int64_t page_stride;
    int32_t num_requests;
    int32_t num_tokens;
    int32_t threads;
};
