// A kv head: its queries, and the scores and values of the tokens that they attend to.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "../../../utils/hadamard.h"
#include "../../../utils/vectors.h"
#include "block_products.h"
#include "call.h"
#include "dense.h"
#include "plan.h"

namespace {

constexpr int ROWS_AT_ONCE = 4;

inline float mask_entry(const Mask& mask, int64_t offset) {
    if (mask.is_bool) return ((const uint8_t*)mask.entries)[offset] ? 0.0f : -INFINITY;
    return ((const float*)mask.entries)[offset];
}

// The row of the query, or of the result, that stands at `row` of a kv head of one sequence.
template <typename State>
State* row_of(State* base, const Call& call, int64_t sequence, int64_t kv_head, int64_t row, int64_t batch_stride,
              int64_t head_stride, int64_t token_stride) {
    const int64_t head = kv_head * call.groups + row / call.query_tokens;
    return base + sequence * batch_stride + head * head_stride + row % call.query_tokens * token_stride;
}

template <typename State>
State* out_row(const Call& call, int64_t sequence, int64_t kv_head, int64_t row) {
    return row_of((State*)call.out, call, sequence, kv_head, row, call.out_batch, call.out_head, call.out_token);
}

// Memory that a thread keeps for later calls: getting it anew takes a twentieth of the time of a short one.
template <typename State>
struct Memory {
    typedef typename Scoring<State>::Query Query;
    static constexpr size_t MOST_KEPT = 1 << 18;  // numbers of a buffer

    // `query` is scaled; `packed_query` is also multiplied by the factors of packed keys, and `rotated_query` rotated;
    // `dense_query` is as states in full precision are multiplied with it. `offsets` are the products with the means.
    FloatBuffer query, packed_query, rotated_query, offsets;
    std::vector<Query, LineAllocator<Query>> dense_query;
    FloatBuffer scores, mask_rows;  // [ROWS_AT_ONCE][padded_unit]
    BlockProducts products;

    // Frees what many queries needed.
    void free_large() {
        if (query.size() <= MOST_KEPT) return;
        query = packed_query = rotated_query = FloatBuffer();
        dense_query = std::vector<Query, LineAllocator<Query>>();
    }

    static Memory& of_thread() {
        static thread_local Memory memory;
        return memory;
    }
};

// A kv head of one row of a run, with all query rows of its readers. A thread reads one after the other.
template <typename State>
struct Head {
    const Call& call;
    Memory<State>& memory;
    const std::vector<int64_t>* readers = nullptr;
    int64_t segment_row = 0, kv_head = 0, rows = 0;
    const int64_t rows_of_reader, padded_key, padded_value, padded_unit;
    bool has_packed_query = false, has_rotated_query = false;
    const void *factor = nullptr, *mean = nullptr;  // of the packed query

    Head(const Call& call, const Plan& plan, Memory<State>& memory)
        : call(call),
          memory(memory),
          rows_of_reader(call.groups * call.query_tokens),
          padded_key(rounded_up(call.key_dim + 8)),
          padded_value(rounded_up(call.value_dim + 8)),
          padded_unit(rounded_up(plan.largest_unit + 8)) {
        memory.scores.resize(ROWS_AT_ONCE * padded_unit);
        if (call.mask.entries) memory.mask_rows.resize(ROWS_AT_ONCE * padded_unit);
    }

    Head(const Head&) = delete;
    ~Head() { memory.free_large(); }

    void start(const Item& item) {
        readers = &item.run->readers[item.row];
        segment_row = item.row;
        kv_head = item.kv_head;
        rows = readers->size() * rows_of_reader;
    }

    float* scores_of(int i) { return memory.scores.data() + i * padded_unit; }

    const State* query_row(int64_t row) const {
        return row_of((const State*)call.query, call, (*readers)[row / rows_of_reader], kv_head, row % rows_of_reader,
                      call.query_batch, call.query_head, call.query_token);
    }

    void read_query() {
        memory.query.assign(rows * padded_key, 0.0f);
        memory.dense_query.resize(rows * padded_key);
        has_packed_query = has_rotated_query = false;
        for (int64_t row = 0; row < rows; ++row) {
            const State* from = query_row(row);
            for (int64_t channel = 0; channel < call.key_dim; ++channel)
                memory.query[row * padded_key + channel] = to_float(from[channel]) * float(call.scale);
            Scoring<State>::read_query(from, call.key_dim, memory.dense_query.data() + row * padded_key);
        }
    }

    // The sequence of a segment, or of the source of a gathered one, that the head reads.
    int64_t source_row(const Segment& segment) const {
        return segment.gathered.source_rows ? segment.gathered.source_rows[segment_row] : segment_row;
    }

    // A vector of the kv head for the reader of a row.
    const State* smoothing_row(const void* vectors, int64_t row) const {
        const int64_t sequence = (*readers)[row / rows_of_reader];
        return (const State*)vectors + (sequence * call.kv_heads + kv_head) * call.key_dim;
    }

    // Queries for packed keys that are not rotated, and what their products lack.
    const FloatBuffer& smoothed_query(const Packed& packed) {
        if (!has_packed_query || packed.factor != factor || packed.mean != mean) {
            factor = packed.factor;
            mean = packed.mean;
            has_packed_query = true;
            has_rotated_query = false;
            if (factor || mean) smooth_query();
        }
        return factor || mean ? memory.packed_query : memory.query;
    }

    void smooth_query() {
        memory.packed_query = memory.query;
        memory.offsets.assign(rows, 0.0f);
        for (int64_t row = 0; row < rows; ++row) {
            float* query = memory.packed_query.data() + row * padded_key;
            const State* means = mean ? smoothing_row(mean, row) : nullptr;
            const State* factors = factor ? smoothing_row(factor, row) : nullptr;
            for (int64_t channel = 0; channel < call.key_dim; ++channel) {
                if (means) memory.offsets[row] += query[channel] * to_float(means[channel]);
                if (factors) query[channel] *= to_float(factors[channel]);
            }
        }
    }

    const float* packed_query(const Segment& segment) {
        const FloatBuffer& query = smoothed_query(segment.packed);
        // Products stay the same if both sides are rotated, so the keys need not be rotated back.
        if (!segment.packed.keys_rotated) return query.data();
        if (!has_rotated_query) {
            memory.rotated_query = query;
            for (int64_t row = 0; row < rows; ++row)
                rotate(memory.rotated_query.data() + row * padded_key, call.key_dim, rotation_size(call.key_dim));
            has_rotated_query = true;
        }
        return memory.rotated_query.data();
    }

    const State* keys_of(const Unit& unit) const {
        const Dense& dense = unit.segment->dense;
        return (const State*)dense.keys + source_row(*unit.segment) * dense.key_batch + kv_head * dense.key_head +
               (unit.index + unit.begin) * dense.key_token;
    }

    const State* values_of(const Unit& unit) const {
        const Dense& dense = unit.segment->dense;
        return (const State*)dense.values + source_row(*unit.segment) * dense.value_batch + kv_head * dense.value_head +
               (unit.index + unit.begin) * dense.value_token;
    }

    // Scores of rows [row, row + R) for the unit's tokens, without the mask: scores[i][token within the unit].
    template <int R>
    void score(const Unit& unit, int64_t row) {
        if (unit.segment->is_packed) {
            const Packed& packed = unit.segment->packed;
            const float* query = packed_query(*unit.segment) + row * padded_key;
            for (int i = 0; i < R; ++i)
                std::fill_n(scores_of(i), packed.block_tokens + 8, packed.mean ? memory.offsets[row + i] : 0.0f);
            memory.products.template add<R, State>(packed.keys, source_row(*unit.segment), kv_head, unit.index, 0,
                                                   call.key_dim, query, padded_key, memory.scores.data(), padded_unit);
        } else {
            const Dense& dense = unit.segment->dense;
            dense_scores<R>(keys_of(unit), dense.key_token, unit.end - unit.begin, call.key_dim,
                            memory.dense_query.data() + row * padded_key, padded_key, float(call.scale),
                            memory.scores.data() + unit.begin, padded_unit);
        }
    }

    // Adds the unit's values, weighted by scores[i][token within the unit], to plain or rotated sums.
    template <int R>
    void combine(const Unit& unit, float* plain_sums, float* rotated_sums) {
        if (unit.segment->is_packed) {
            const Packed& packed = unit.segment->packed;
            memory.products.template add<R, State>(
                packed.values, source_row(*unit.segment), kv_head, unit.index, unit.begin, unit.end, memory.scores.data(),
                padded_unit, packed.values_rotated ? rotated_sums : plain_sums, padded_value);
        } else {
            const Dense& dense = unit.segment->dense;
            dense_combine<R>(values_of(unit), dense.value_token, unit.end - unit.begin, call.value_dim,
                             memory.scores.data() + unit.begin, padded_unit, plain_sums, padded_value);
        }
    }

    // Scores below the soft cap, as models that have one compute them before their mask.
    void cap(const Unit& unit, float* row_scores) const {
        const float limit = call.softcap;
        for (int64_t token = 0; token < unit.end; token += WIDTH)
            store_register(row_scores + token, limit * hyperbolic_tangent(load_register(row_scores + token) / limit));
    }

    // Reads the mask of rows [row, row + R) for the unit, and returns its part from the first to the last token that at
    // least one row sees. Packed blocks are read from their beginning.
    template <int R>
    Unit read_mask(const Unit& unit, int64_t row) {
        const Mask& mask = call.mask;
        int64_t seen_begin = unit.end, seen_end = unit.begin, previous = -1;
        for (int i = 0; i < R; ++i) {
            const int64_t within = (row + i) % rows_of_reader, head = kv_head * call.groups + within / call.query_tokens;
            const int64_t base = (*readers)[(row + i) / rows_of_reader] * mask.batch + head * mask.head +
                                 within % call.query_tokens * mask.query + unit.position * mask.key;
            float* to = memory.mask_rows.data() + i * padded_unit;
            // Heads often share a row of the mask.
            if (base == previous) {
                std::copy(to - padded_unit + unit.begin, to - padded_unit + unit.end, to + unit.begin);
                continue;
            }
            for (int64_t token = unit.begin; token < unit.end; ++token)
                to[token] = mask_entry(mask, base + (token - unit.begin) * mask.key);
            int64_t end = unit.end;
            while (end > seen_end && to[end - 1] == -INFINITY) --end;
            seen_end = end;
            int64_t begin = unit.begin;
            while (begin < seen_begin && to[begin] == -INFINITY) ++begin;
            seen_begin = begin;
            previous = base;
        }
        Unit seen = unit;
        seen.end = seen_end;
        if (!unit.segment->is_packed) {
            seen.begin = seen_begin;
            seen.position += seen_begin - unit.begin;
        }
        return seen;
    }

    void add_mask(const Unit& unit, int i, float* row_scores) const {
        const float* entries = memory.mask_rows.data() + i * padded_unit;
        for (int64_t token = unit.begin; token < unit.end; ++token) row_scores[token] += entries[token];
    }
};

}  // namespace
