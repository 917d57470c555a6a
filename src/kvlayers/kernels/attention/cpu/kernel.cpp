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

#include "../../../utils/hadamard.h"
#include "../../../utils/parallel.h"
#include "../../../utils/vectors.h"
#include "call.h"
#include "head.h"
#include "partials.h"
#include "plan.h"

namespace {

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

// Calls `work(state, call)` with a state of the dtype of the call.
template <typename Work>
void with_dtype(const Call& call, Work work) {
    switch (call.dtype) {
        case FLOAT32: return work(float(), call);
        case BFLOAT16: return work(BFloat16(), call);
        case FLOAT16: return work(Float16(), call);
    }
}

}  // namespace

extern "C" {

void kvlayers_attend(const Arguments* arguments, const Segment* segments, const int64_t* const* rows) {
    with_dtype({*arguments, segments, rows}, [](auto state, const Call& call) { attend<decltype(state)>(call); });
}

void kvlayers_score(const Arguments* arguments, const Segment* segments, const int64_t* const* rows) {
    with_dtype({*arguments, segments, rows}, [](auto state, const Call& call) { score<decltype(state)>(call); });
}

void kvlayers_combine(const Arguments* arguments, const Segment* segments, const int64_t* const* rows) {
    with_dtype({*arguments, segments, rows}, [](auto state, const Call& call) { combine<decltype(state)>(call); });
}
}
