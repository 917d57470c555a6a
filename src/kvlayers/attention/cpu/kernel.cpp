// Attention over packed keys and values, on a CPU.
//
// One pass over the tokens with an online softmax: the codes of each block are multiplied as they are, and their scales
// are folded into the other factor (the query for keys, the probabilities for values). No block is ever written out in
// full precision.
//
// It is compiled for one kind of CPU at a time (`utils/native_builds.py`): vectors of floats are as wide as its registers.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "../../utils/hadamard.h"
#include "../../utils/parallel.h"
#include "../../utils/vectors.h"
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

// Memory that a thread keeps for later calls: getting it anew would take a tenth of the time of a short one.
template <typename State>
struct Memory {
    typedef typename Scoring<State>::Query Query;

    // `query` and `rotated_query` are scaled; `dense_query` is as states in full precision are multiplied with it.
    FloatBuffer query, rotated_query;
    std::vector<Query, LineAllocator<Query>> dense_query;
    FloatBuffer scores, mask_rows;  // [ROWS_AT_ONCE][padded_unit]
    BlockProducts products;

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
    bool has_rotated_query = false;

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
        has_rotated_query = false;
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

    const float* packed_query(const Segment& segment) {
        // Products stay the same if both sides are rotated, so the keys need not be rotated back.
        if (!segment.packed.keys_rotated) return memory.query.data();
        if (!has_rotated_query) {
            memory.rotated_query = memory.query;
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
            for (int i = 0; i < R; ++i) fill_zeros(scores_of(i), packed.block_tokens + 8);
            memory.products.template add<R, State>(
                packed.keys, source_row(*unit.segment), kv_head, unit.index, 0, call.key_dim,
                packed_query(*unit.segment) + row * padded_key, padded_key, memory.scores.data(), padded_unit);
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

// Result of one item, for each row: sums over tokens weighted by e^(score - highest). Sums of rotated values are apart.
struct Partial {
    int64_t padded_value;
    float *highest, *total, *plain, *rotated;

    float* plain_of(int64_t row) const { return plain + row * padded_value; }
    float* rotated_of(int64_t row) const { return rotated + row * padded_value; }

    // Makes sums of one row those for another highest score.
    void shrink(int64_t row, float factor) const {
        total[row] *= factor;
        for (int64_t channel = 0; channel < padded_value; ++channel) plain_of(row)[channel] *= factor;
        for (int64_t channel = 0; channel < padded_value; ++channel) rotated_of(row)[channel] *= factor;
    }
};

// The results of all items, before any token.
class Partials {
   public:
    Partials(const Call& call, const Plan& plan, float initial_highest)
        : rows_of_reader(call.groups * call.query_tokens), padded_value(rounded_up(call.value_dim + 8)) {
        int64_t count = 0;
        for (const Item& item : plan.items) {
            const int64_t rows = rows_of(item);
            firsts.push_back(count);
            count += 2 * rounded_up(rows) + 2 * rows * padded_value;
        }
        floats.resize(count);
        for (const Item& item : plan.items) {
            const Partial partial = of(plan, &item - plan.items.data());
            std::fill(partial.highest, partial.highest + rows_of(item), initial_highest);
        }
    }

    Partial of(const Plan& plan, int64_t item) {
        const int64_t rows = rows_of(plan.items[item]);
        float* total = floats.data() + firsts[item] + rounded_up(rows);
        float* plain = total + rounded_up(rows);
        return {padded_value, total - rounded_up(rows), total, plain, plain + rows * padded_value};
    }

   private:
    const int64_t rows_of_reader, padded_value;
    std::vector<int64_t> firsts;
    FloatBuffer floats;

    int64_t rows_of(const Item& item) const { return item.run->readers[item.row].size() * rows_of_reader; }
};

// Calls `work(unit)` for the units of an item that hold a token.
template <typename Work>
void for_units(const Item& item, int64_t kv_heads, Work work) {
    for (int64_t index = item.from; index < item.to; ++index) {
        const Unit unit = item.run->unit(item.row * kv_heads + item.kv_head, index);
        if (unit.holds_tokens()) work(unit);
    }
}

// Calls `work.template rows<R>(row)` for all rows, four at once.
template <typename Work>
void for_rows(int64_t rows, Work work) {
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) work.template rows<4>(row);
    switch (rows - row) {
        case 3: work.template rows<3>(row); break;
        case 2: work.template rows<2>(row); break;
        case 1: work.template rows<1>(row); break;
        default: break;
    }
}

template <typename State>
struct AttendUnit {
    Head<State>& head;
    const Unit& unit;
    const Partial& partial;

    template <int R>
    void rows(int64_t row) {
        const Unit seen = head.call.mask.entries ? head.template read_mask<R>(unit, row) : unit;
        if (seen.holds_tokens()) attend<R>(seen, row);
    }

    template <int R>
    void attend(const Unit& seen, int64_t row) {
        head.template score<R>(seen, row);
        const int64_t padded_end = rounded_up(seen.end);
        Register sums[R] = {};
        for (int i = 0; i < R; ++i) {
            finish_scores(seen, i);
            // A higher score is rare. Sums are in units of the highest one.
            if (exceeds(head.scores_of(i), padded_end, partial.highest[row + i])) raise(seen, i, row + i);
            sums[i] = weigh(head.scores_of(i), padded_end, partial.highest[row + i]);
        }
        float totals[R];
        sums_of_lanes<R>(sums, totals);
        for (int i = 0; i < R; ++i) partial.total[row + i] += std::isnan(partial.highest[row + i]) ? NAN : totals[i];
        head.template combine<R>(seen, partial.plain_of(row), partial.rotated_of(row));
    }

   private:
    void finish_scores(const Unit& seen, int i) const {
        float* scores = head.scores_of(i);
        if (head.call.softcap) head.cap(seen, scores);
        if (head.call.mask.entries) head.add_mask(seen, i, scores);
        // Tokens before and after the valid ones must have no weight.
        for (int64_t token = 0; token < seen.begin; ++token) scores[token] = -INFINITY;
        for (int64_t token = seen.end; token < rounded_up(seen.end); ++token) scores[token] = -INFINITY;
    }

    void raise(const Unit& seen, int i, int64_t row) const {
        const float previous = partial.highest[row], of_unit = largest(head.scores_of(i), rounded_up(seen.end));
        const float highest = previous > of_unit || std::isnan(previous) ? previous : of_unit;
        if (highest != previous && previous != -INFINITY) partial.shrink(row, std::exp(previous - highest));
        partial.highest[row] = highest;
    }

    // Makes scores the weights of their tokens, and returns their sums in each lane.
    static Register weigh(float* scores, int64_t padded_end, float highest) {
        Register sums = {};
        if (highest == -INFINITY) {
            fill_zeros(scores, padded_end);
            return sums;
        }
        for (int64_t token = 0; token < padded_end; token += WIDTH) {
            const Register weight = exponential(load_register(scores + token) - highest);
            store_register(scores + token, weight);
            sums += weight;
        }
        return sums;
    }
};

// Merges the results of all items by their highest scores. Without `normalised`, the sums are only added up.
template <typename State>
void merge(const Call& call, const Plan& plan, Partials& partials, bool normalised) {
    const int64_t rows = call.groups * call.query_tokens, stride = rounded_up(call.value_dim + 8);
    FloatBuffer plain(stride), rotated(stride);
    std::vector<std::pair<Partial, int64_t>> parts;
    for (int64_t index = 0; index < call.batch * call.kv_heads * rows; ++index) {
        const int64_t sequence = index / rows / call.kv_heads, kv_head = index / rows % call.kv_heads;
        const int64_t row = index % rows;
        float highest = -INFINITY, total = 0;
        bool is_nan = false;
        parts.clear();
        for (const Run& run : plan.runs) {
            const int64_t* items = &run.first_items[run.row[sequence] * call.kv_heads + kv_head];
            for (int64_t item = items[0]; item < items[1]; ++item) {
                parts.push_back({partials.of(plan, item), run.place[sequence] * rows + row});
                const float part = parts.back().first.highest[parts.back().second];
                highest = std::max(highest, part);
                is_nan |= std::isnan(part);
            }
        }
        if (call.sinks) {
            const float sink = call.sinks[kv_head * call.groups + row / call.query_tokens];
            highest = std::max(highest, sink);
            is_nan |= std::isnan(sink);
            if (highest != -INFINITY) total = std::exp(sink - highest);
        }
        std::fill(plain.begin(), plain.end(), 0.0f);
        std::fill(rotated.begin(), rotated.end(), 0.0f);
        for (const auto& [part, at] : parts) {
            if (highest == -INFINITY) break;
            const float weight = std::exp(part.highest[at] - highest);
            total += weight * part.total[at];
            for (int64_t channel = 0; channel < call.value_dim; ++channel) {
                plain[channel] += weight * part.plain_of(at)[channel];
                rotated[channel] += weight * part.rotated_of(at)[channel];
            }
        }
        if (plan.rotates_values) rotate(rotated.data(), call.value_dim, rotation_size(call.value_dim));
        State* out = out_row<State>(call, sequence, kv_head, row);
        for (int64_t channel = 0; channel < call.value_dim; ++channel) {
            float state = plain[channel] + rotated[channel];
            // As in torch, a query that may attend to no token gets zeros.
            if (normalised) state = is_nan || std::isnan(total) ? NAN : total > 0 ? state / total : 0.0f;
            from_float(state, out + channel);
        }
    }
}

// Calls `work(head, item index)` for the items of a plan, with a head for each thread.
template <typename State, typename Work>
void for_items(const Call& call, const Plan& plan, Work work) {
    parallel_for(plan.items.size(), call.threads, [&] {
        return [&, head = Head<State>(call, plan, Memory<State>::of_thread())](int64_t index) mutable {
            head.start(plan.items[index]);
            work(head, index);
        };
    });
}

template <typename State>
void attend(const Call& call) {
    const Plan plan(call);
    Partials partials(call, plan, -INFINITY);
    for_items<State>(call, plan, [&](Head<State>& head, int64_t index) {
        const Partial partial = partials.of(plan, index);
        head.read_query();
        for_units(plan.items[index], call.kv_heads,
                  [&](const Unit& unit) { for_rows(head.rows, AttendUnit<State>{head, unit, partial}); });
    });
    merge<State>(call, plan, partials, true);
}

// Scores of every token, for eager attention: out is [batch, heads, query_tokens, tokens].
template <typename State>
struct WriteScores {
    Head<State>& head;
    const Unit& unit;

    template <int R>
    void rows(int64_t row) {
        head.template score<R>(unit, row);
        for (int i = 0; i < R; ++i) {
            const int64_t reader = (*head.readers)[(row + i) / head.rows_of_reader];
            State* out = out_row<State>(head.call, reader, head.kv_head, (row + i) % head.rows_of_reader);
            for (int64_t token = unit.begin; token < unit.end; ++token)
                from_float(head.scores_of(i)[token], out + unit.position + token - unit.begin);
        }
    }
};

template <typename State>
void score(const Call& call) {
    const Plan plan(call);
    for_items<State>(call, plan, [&](Head<State>& head, int64_t index) {
        head.read_query();
        for_units(plan.items[index], call.kv_heads,
                  [&](const Unit& unit) { for_rows(head.rows, WriteScores<State>{head, unit}); });
    });
}

// Values weighted by given weights: query is [batch, heads, query_tokens, tokens].
template <typename State>
struct CombineUnit {
    Head<State>& head;
    const Unit& unit;
    const Partial& partial;

    template <int R>
    void rows(int64_t row) {
        for (int i = 0; i < R; ++i) {
            const State* weights = head.query_row(row + i);
            for (int64_t token = unit.begin; token < unit.end; ++token)
                head.scores_of(i)[token] = to_float(weights[unit.position + token - unit.begin]);
        }
        head.template combine<R>(unit, partial.plain_of(row), partial.rotated_of(row));
    }
};

template <typename State>
void combine(const Call& call) {
    const Plan plan(call);
    Partials partials(call, plan, 0.0f);
    for_items<State>(call, plan, [&](Head<State>& head, int64_t index) {
        const Partial partial = partials.of(plan, index);
        for_units(plan.items[index], call.kv_heads,
                  [&](const Unit& unit) { for_rows(head.rows, CombineUnit<State>{head, unit, partial}); });
    });
    merge<State>(call, plan, partials, false);
}

}  // namespace

extern "C" {

void kvlayers_attend(const Arguments* arguments, const Segment* segments, const int64_t* const* rows) {
    const Call call{*arguments, segments, rows};
    switch (call.dtype) {
        case FLOAT32: return attend<float>(call);
        case BFLOAT16: return attend<BFloat16>(call);
        case FLOAT16: return attend<Float16>(call);
    }
}

void kvlayers_score(const Arguments* arguments, const Segment* segments, const int64_t* const* rows) {
    const Call call{*arguments, segments, rows};
    switch (call.dtype) {
        case FLOAT32: return score<float>(call);
        case BFLOAT16: return score<BFloat16>(call);
        case FLOAT16: return score<Float16>(call);
    }
}

void kvlayers_combine(const Arguments* arguments, const Segment* segments, const int64_t* const* rows) {
    const Call call{*arguments, segments, rows};
    switch (call.dtype) {
        case FLOAT32: return combine<float>(call);
        case BFLOAT16: return combine<BFloat16>(call);
        case FLOAT16: return combine<Float16>(call);
    }
}
}
