// The arguments of a call, as `call.py` packs them.

#pragma once

#include <cstdint>

// `Multiplication` of `products.h`.
struct Multiplication;

extern "C" {

// The fields of the structures below are those of the formats in `call.py`, in the same order.

struct Dense {
    const void* keys;
    const void* values;
    int64_t key_batch, key_head, key_token;
    int64_t value_batch, value_head, value_token;
    int64_t tokens;
};

struct Side {
    const uint8_t* codes;
    const void* parameters;
    int64_t code_batch, code_head, code_block;
    int64_t parameter_batch, parameter_head, parameter_block;
    int64_t bits, floating, rows, columns, row_group, column_group;
    const float* levels;  // of a codebook, one for each code, at most 16; null if there is none
    const float* fixed_scales;  // [kv_heads], factors of all scales; null if there are none
    void (*multiply)(const Multiplication& of);  // of the library for such codes
};

struct Packed {
    Side keys, values;
    int64_t blocks, block_tokens, first;
    const int32_t* ends;
    int64_t keys_rotated, values_rotated;
    // How the keys were smoothed, [batch, kv_heads, key_dim] in the dtype of the states; null for nothing.
    const void *factor, *mean;
};

// Pieces of the dense or packed tokens, other ones for each kv head of each sequence: [batch, kv_heads, pieces].
struct Gathered {
    const int64_t *starts, *counts, *columns;
    int64_t pieces, width;
    const int64_t* source_rows;  // as Call::rows, for the source
};

struct Segment {
    int64_t is_packed, is_gathered;
    Dense dense;
    Packed packed;
    Gathered gathered;
};

struct Mask {
    const void* entries;
    int64_t batch, head, query, key;
    int64_t is_bool;
};

enum Dtype { FLOAT32, BFLOAT16, FLOAT16 };

struct Arguments {
    const void* query;
    void* out;
    int64_t query_batch, query_head, query_token;
    int64_t out_batch, out_head, out_token;
    int64_t batch, kv_heads, groups, query_tokens, key_dim, value_dim;
    int64_t dtype, threads;
    double scale;
    double softcap;      // limit of the scores, 0 for no limit
    const float* sinks;  // [heads], scores of keys without a value; null for no sinks
    int64_t segment_count;
    Mask mask;
};

// `call.py` packs as many bytes, as a test says.
static_assert(sizeof(void*) == 8 && sizeof(Segment) == 472 && sizeof(Arguments) == 208);

struct Call : Arguments {
    const Segment* segments;
    // For each segment: which of its sequences each sequence of the batch reads; null if each reads its own.
    const int64_t* const* rows;
};
}
