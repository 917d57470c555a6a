// Attention of many queries, as in a prompt: blocks of queries by blocks of keys, with two matrix products for each and an
// online softmax between them (Dao 2023, arXiv:2307.08691).
//
// The query heads that share a kv head are rows of one product. Keys and values of a head are packed once, in the order in
// which the products read them. What no query of a block sees is not computed, whatever made the mask: groups of columns
// are hidden from all queries of a block, visible to all, or mixed, and only in mixed ones entries of the mask are read.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../../../utils/parallel.h"
#include "../../../utils/vectors.h"
#include "call.h"
#include "matrix_products.h"

namespace {

constexpr int64_t BLOCK_ROWS = 96;  // of queries, over the heads of a group; a multiple of TILE_ROWS
constexpr int64_t BLOCK_TOKENS = 256;
constexpr int64_t BLOCK_STRIDE = BLOCK_TOKENS + LANES;  // no power of two, whose rows would share lines of the cache
constexpr int64_t ITEMS_OF_THREAD = 2;
constexpr float LOWEST_VISIBLE = -1e30f;  // additive masks hide with -inf, or with the lowest number of a dtype

enum Visibility : uint8_t { HIDDEN, VISIBLE, MIXED };
enum MaskKind { FLOAT32_MASK, BOOL_MASK, BFLOAT16_MASK, FLOAT16_MASK };

// Calls `work(entries)` with the entries of a mask as what they are.
template <typename Work>
inline void with_entries(const Mask& mask, int64_t offset, Work work) {
    switch (mask.is_bool) {
        case FLOAT32_MASK: return work((const float*)mask.entries + offset);
        case BOOL_MASK: return work((const uint8_t*)mask.entries + offset);
        case BFLOAT16_MASK: return work((const BFloat16*)mask.entries + offset);
        case FLOAT16_MASK: return work((const Float16*)mask.entries + offset);
    }
}

inline float score_of_entry(uint8_t entry) { return entry ? 0.0f : -INFINITY; }
template <typename Entry>
inline float score_of_entry(Entry entry) {
    return to_float(entry);
}

// What is added to the scores of `count` columns.
template <typename Entry>
inline void read_entries(const Entry* entries, int64_t stride, int64_t count, float* to) {
    if (stride == 1 && count == LANES)
        for (int lane = 0; lane < LANES; ++lane) to[lane] = score_of_entry(entries[lane]);
    else
        for (int64_t lane = 0; lane < count; ++lane) to[lane] = score_of_entry(entries[lane * stride]);
}

// What some queries see of groups of LANES columns.
struct SeenGroups {
    std::vector<uint8_t> any, all;
    std::vector<float> entries;

    // Adds a row of a mask. A row that hides all tokens with finite numbers sees them all, as its softmax does.
    template <typename Entry>
    void add_row(const Entry* row, int64_t stride, int64_t tokens) {
        bool sees_any = false, is_finite = false;
        for (int64_t group = 0; group * LANES < tokens; ++group) {
            const int64_t count = std::min<int64_t>(LANES, tokens - group * LANES);
            bool all, some;
            if constexpr (sizeof(Entry) == 1) {
                if (stride == 1 && count == LANES) {
                    const uint64_t low = load<uint64_t>(row + group * LANES), high = load<uint64_t>(row + group * LANES + 8);
                    some = low | high, all = (low & high) == 0x0101010101010101;
                    any[group] |= some, this->all[group] &= all, sees_any |= some;
                    continue;
                }
            }
            float scores[LANES] = {};
            read_entries(row + group * LANES * stride, stride, count, scores);
            int visible = 0, unchanged = 0, finite = 0;
            for (int64_t lane = 0; lane < LANES; ++lane) {
                visible += lane < count && !(scores[lane] <= LOWEST_VISIBLE);
                unchanged += scores[lane] == 0.0f;
                finite += scores[lane] != -INFINITY;
            }
            some = visible, all = unchanged == LANES;
            is_finite |= finite;
            any[group] |= some, this->all[group] &= all, sees_any |= some;
        }
        if (!sees_any && is_finite) std::fill(any.begin(), any.end(), 1);
    }

    // Of the queries [first, first + count) of a head of the mask.
    void find(const Mask& mask, int64_t plane, int64_t first, int64_t count, int64_t tokens, uint8_t* to) {
        const int64_t groups = (tokens + LANES - 1) / LANES;
        any.assign(groups, 0), all.assign(groups, 1);
        for (int64_t query = first; query < first + (mask.query ? count : 1); ++query)
            with_entries(mask, plane + query * mask.query,
                         [&](auto* row) { add_row(row, mask.key, tokens); });
        for (int64_t group = 0; group < groups; ++group)
            to[group] = !any[group] ? HIDDEN : all[group] && (group + 1) * LANES <= tokens ? VISIBLE : MIXED;
    }
};

struct Prompt : Call {
    bool is_causal;
    const uint8_t* held;  // which tokens a kv head has, [batch, kv_heads, tokens]; null for all
    int64_t tokens, block_queries, query_blocks, column_groups;
    int64_t mask_sequences, mask_heads;  // that differ
    std::vector<uint8_t> visibility;     // [mask_sequences, mask_heads, query_blocks, column_groups], of a mask

    Prompt(const Call& call, bool is_causal, const uint8_t* held)
        : Call(call), is_causal(is_causal), held(held), tokens(tokens_of(call)),
          block_queries(std::max<int64_t>(1, std::min(BLOCK_ROWS / call.groups, call.query_tokens))),
          query_blocks((call.query_tokens + block_queries - 1) / block_queries),
          column_groups((tokens + LANES - 1) / LANES),
          mask_sequences(mask.batch ? batch : 1), mask_heads(mask.head ? kv_heads * groups : 1) {
        if (!mask.entries) return;
        visibility.resize(mask_sequences * mask_heads * query_blocks * column_groups);
        parallel_for(mask_sequences * mask_heads * query_blocks, threads, [&] {
            return [&, seen = SeenGroups()](int64_t index) mutable {
                const int64_t plane = index / query_blocks, first = index % query_blocks * block_queries;
                seen.find(mask, plane / mask_heads * mask.batch + plane % mask_heads * mask.head, first,
                          std::min(block_queries, query_tokens - first), tokens, visibility.data() + index * column_groups);
            };
        });
    }

    static int64_t tokens_of(const Call& call) {
        int64_t tokens = 0;
        for (int64_t segment = 0; segment < call.segment_count; ++segment) tokens += call.segments[segment].dense.tokens;
        return tokens;
    }

    // Calls `work(keys, values)` with the addresses of `count` tokens of a head, from `token` on.
    template <typename State, typename Work>
    void for_tokens(int64_t sequence, int64_t kv_head, int64_t token, int64_t count, Work work) const {
        const State *keys[PANEL], *values[PANEL];
        int64_t segment = 0, start = 0;
        for (int64_t place = 0; place < count; ++place) {
            while (token + place >= start + segments[segment].dense.tokens) start += segments[segment++].dense.tokens;
            const Dense& dense = segments[segment].dense;
            const int64_t row = rows[segment] ? rows[segment][sequence] : sequence, at = token + place - start;
            keys[place] = (const State*)dense.keys + row * dense.key_batch + kv_head * dense.key_head + at * dense.key_token;
            values[place] = (const State*)dense.values + row * dense.value_batch + kv_head * dense.value_head +
                            at * dense.value_token;
        }
        work(keys, values);
    }

    const uint8_t* held_by(int64_t sequence, int64_t kv_head) const {
        return held ? held + (sequence * kv_heads + kv_head) * tokens : nullptr;
    }

    // What the heads of a kv head see in a block of queries, of the tokens that it has.
    void find_visibility(int64_t sequence, int64_t kv_head, int64_t block, uint8_t* to) const {
        find_shown(sequence, kv_head, block, to);
        const uint8_t* own = held_by(sequence, kv_head);
        for (int64_t group = 0; own && group < column_groups; ++group) {
            const int64_t first = group * LANES, count = std::min<int64_t>(LANES, tokens - first);
            const int64_t there = count - std::count(own + first, own + first + count, 0);
            if (!there) to[group] = HIDDEN;
            if (there < LANES && to[group] == VISIBLE) to[group] = MIXED;
        }
    }

    // What the mask shows: the same to all heads if it is.
    void find_shown(int64_t sequence, int64_t kv_head, int64_t block, uint8_t* to) const {
        if (!mask.entries) {
            const int64_t first = block * block_queries, end = std::min(first + block_queries, query_tokens);
            for (int64_t group = 0; group < column_groups; ++group) {
                const int64_t begin = group * LANES, last = begin + LANES - 1;
                to[group] = is_causal && begin >= end ? HIDDEN
                            : last >= tokens || (is_causal && last > first) ? MIXED : VISIBLE;
            }
            return;
        }
        const int64_t plane = (mask.batch ? sequence : 0) * mask_heads;
        for (int64_t head = 0; head < (mask.head ? groups : 1); ++head) {
            const int64_t row = plane + (mask.head ? kv_head * groups + head : 0);
            const uint8_t* found = visibility.data() + (row * query_blocks + block) * column_groups;
            for (int64_t group = 0; group < column_groups; ++group)
                to[group] = !head || to[group] == found[group] ? found[group] : uint8_t(MIXED);
        }
    }
};

// The keys and values of some heads, as the products read them.
template <typename State>
struct PackedHeads {
    typedef typename Factor<State>::Number Number;
    static constexpr int64_t PAIR = Multiplier<Number>::PAIR;

    const Prompt& prompt;
    const int64_t key_numbers, value_panels, padded_tokens;
    Uninitialised<Number> keys, values;

    PackedHeads(const Prompt& prompt, int64_t heads)
        : prompt(prompt),
          key_numbers((prompt.key_dim + PAIR - 1) / PAIR * PAIR),
          value_panels((prompt.value_dim + PANEL - 1) / PANEL),
          padded_tokens((prompt.tokens + PANEL - 1) / PANEL * PANEL),
          keys(heads * keys_of_head()),
          values(heads * values_of_head()) {}

    int64_t keys_of_head() const { return padded_tokens * key_numbers; }
    int64_t values_of_head() const { return value_panels * PANEL * padded_tokens; }

    // Packs a panel of tokens of each of the heads [first, first + count) of all sequences.
    void pack(int64_t first, int64_t count) {
        const int64_t panels = padded_tokens / PANEL;
        parallel_for(count * panels, prompt.threads, [&] {
            return [&](int64_t index) {
                const int64_t place = index / panels, head = first + place, token = index % panels * PANEL;
                const int64_t there = std::min<int64_t>(PANEL, prompt.tokens - token);
                prompt.for_tokens<State>(
                    head / prompt.kv_heads, head % prompt.kv_heads, token, there,
                    [&](const State* const* token_keys, const State* const* token_values) {
                        pack_keys(token_keys, there, prompt.key_dim,
                                  keys.data + place * keys_of_head() + token * key_numbers);
                        pack_values(token_values, there, prompt.value_dim,
                                    values.data + place * values_of_head() + token * PANEL, padded_tokens * PANEL);
                    });
            };
        });
    }
};

// Memory of a thread for one block of queries.
template <typename State>
struct QueryBlock {
    typedef typename Factor<State>::Number Number;

    const Prompt& prompt;
    const PackedHeads<State>& packed;
    const int64_t padded_value;
    int64_t sequence = 0, kv_head = 0, first = 0, rows = 0, padded_rows = 0;
    bool is_empty = true;  // before the first token
    std::vector<uint8_t> visibility;
    std::vector<Number, LineAllocator<Number>> query, weights;
    FloatBuffer scores, sums, highest, total;

    QueryBlock(const Prompt& prompt, const PackedHeads<State>& packed)
        : prompt(prompt), packed(packed), padded_value(packed.value_panels * PANEL), visibility(prompt.column_groups) {
        const int64_t most = (prompt.block_queries * prompt.groups + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
        query.resize(most * packed.key_numbers), weights.resize(most * BLOCK_STRIDE);
        scores.resize(most * BLOCK_STRIDE), sums.resize(most * padded_value);
        highest.resize(most), total.resize(most);
    }

    int64_t head_of(int64_t row) const { return kv_head * prompt.groups + row % prompt.groups; }
    int64_t query_of(int64_t row) const { return first + row / prompt.groups; }

    void attend(int64_t head, int64_t place, int64_t block) {
        sequence = head / prompt.kv_heads, kv_head = head % prompt.kv_heads;
        first = block * prompt.block_queries;
        rows = std::min(prompt.block_queries, prompt.query_tokens - first) * prompt.groups;
        padded_rows = (rows + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
        std::fill(highest.begin(), highest.end(), -INFINITY);
        std::fill(total.begin(), total.end(), 0.0f);
        is_empty = true;
        read_queries();
        prompt.find_visibility(sequence, kv_head, block, visibility.data());
        const int64_t most = BLOCK_TOKENS / LANES;
        for (int64_t begin = 0, end; begin < prompt.column_groups; begin = end) {
            for (end = begin; end < prompt.column_groups && end - begin < most && visibility[end] != HIDDEN;) ++end;
            if (end == begin)
                ++end;
            else
                add_tokens(place, begin, end);
        }
        write();
    }

    void read_queries() {
        for (int64_t row = 0; row < padded_rows; ++row) {
            Number* to = query.data() + row * packed.key_numbers;
            std::fill_n(to, packed.key_numbers, Number{});
            if (row >= rows) continue;
            const State* from = (const State*)prompt.query + sequence * prompt.query_batch +
                                head_of(row) * prompt.query_head + query_of(row) * prompt.query_token;
            for (int64_t channel = 0; channel < prompt.key_dim; ++channel) to[channel] = Factor<State>::of(from[channel]);
        }
    }

    // Adds the tokens of the column groups [begin, end).
    void add_tokens(int64_t place, int64_t begin, int64_t end) {
        const int64_t token = begin * LANES, count = (end - begin) * LANES;
        const Number* keys = packed.keys.data + place * packed.keys_of_head();
        multiply(query.data(), packed.key_numbers, padded_rows, keys, packed.key_numbers * PANEL,
                 packed.key_numbers / Multiplier<Number>::PAIR, token, count, scores.data(), BLOCK_STRIDE, true);
        bool is_plain = prompt.scale > 0 && !prompt.softcap;
        for (int64_t group = begin; group < end; ++group) is_plain &= visibility[group] == VISIBLE;
        for (int64_t row = 0; row < rows; ++row) {
            float* row_scores = scores.data() + row * BLOCK_STRIDE;
            if (!is_plain) change_scores(row, begin, end, row_scores);
            weigh(row, row_scores, count, is_plain ? float(prompt.scale) : 1.0f);
        }
        const Number* values = packed.values.data + place * packed.values_of_head() + token * PANEL;
        multiply(weights.data(), BLOCK_STRIDE, padded_rows, values, packed.padded_tokens * PANEL,
                 count / Multiplier<Number>::PAIR, 0, padded_value_read(), sums.data(), padded_value, is_empty);
        is_empty = false;
    }

    int64_t padded_value_read() const { return rounded_up(prompt.value_dim); }

    // Scores with their scale, soft cap and mask.
    void change_scores(int64_t row, int64_t begin, int64_t end, float* row_scores) const {
        const float scale = prompt.scale, cap = prompt.softcap;
        const int64_t query = query_of(row), last = prompt.is_causal ? std::min(query + 1, prompt.tokens) : prompt.tokens;
        const Mask& mask = prompt.mask;
        const uint8_t* held = prompt.held_by(sequence, kv_head);
        const int64_t base = sequence * mask.batch + head_of(row) * mask.head + query * mask.query;
        for (int64_t group = begin; group < end; ++group, row_scores += LANES) {
            for (int lane = 0; lane < LANES; lane += WIDTH) {
                const Register scaled = scale * load_register(row_scores + lane);
                store_register(row_scores + lane, cap ? cap * hyperbolic_tangent(scaled / cap) : scaled);
            }
            if (visibility[group] != MIXED) continue;
            const int64_t column = group * LANES, there = std::min<int64_t>(LANES, last - column);
            for (int64_t lane = std::max<int64_t>(0, there); lane < LANES; ++lane) row_scores[lane] = -INFINITY;
            for (int64_t lane = 0; held && lane < there; ++lane)
                if (!held[column + lane]) row_scores[lane] = -INFINITY;
            if (!mask.entries || there <= 0) continue;
            float entries[LANES] = {};
            with_entries(mask, base + column * mask.key,
                         [&](auto* from) { read_entries(from, mask.key, there, entries); });
            for (int lane = 0; lane < LANES; ++lane) row_scores[lane] += entries[lane];
        }
    }

    // The weights of some tokens, e^(factor * score - highest). What was added before shrinks.
    void weigh(int64_t row, const float* row_scores, int64_t count, float factor) {
        Register tops = load_register(row_scores);
        for (int64_t token = WIDTH; token < count; token += WIDTH) tops = higher(tops, load_register(row_scores + token));
        const float raised = std::max(highest[row], factor * highest_lane(tops));
        // If a query has seen no token yet, -inf - -inf would not be a number.
        const float reference = raised == -INFINITY ? 0.0f : raised;
        const Register negative = spread(-reference);
        Number* to = weights.data() + row * BLOCK_STRIDE;
        Register added[2] = {};
        for (int64_t token = 0; token < count; token += 2 * WIDTH) {
            Register parts[2];
            for (int part = 0; part < 2; ++part) {
                // LANES is a multiple of WIDTH, but perhaps not of two.
                if (token + part * WIDTH >= count) {
                    parts[part] = Register{};
                    continue;
                }
                parts[part] = weight_of<Number>(factor * load_register(row_scores + token + part * WIDTH) + negative);
                added[part] += parts[part];
            }
            Multiplier<Number>::store(to + token, parts);
        }
        if (raised != highest[row]) {
            const float shrink = std::exp(highest[row] - reference);
            total[row] *= shrink;
            float* row_sums = sums.data() + row * padded_value;
            if (!is_empty)
                for (int64_t channel = 0; channel < padded_value; channel += WIDTH)
                    store_register(row_sums + channel, shrink * load_register(row_sums + channel));
            highest[row] = raised;
        }
        total[row] += sum_of_lanes(added[0] + added[1]);
    }

    void write() {
        for (int64_t row = 0; row < rows; ++row) {
            float all = total[row], shrink = 1.0f;
            if (prompt.sinks) {
                const float sink = prompt.sinks[head_of(row)], raised = std::max(highest[row], sink);
                shrink = std::exp(highest[row] - raised);
                all = all * shrink + std::exp(sink - raised);
            }
            State* to = (State*)prompt.out + sequence * prompt.out_batch + head_of(row) * prompt.out_head +
                        query_of(row) * prompt.out_token;
            const float* from = sums.data() + row * padded_value;
            // As in torch, a query that may attend to no token gets zeros.
            const float factor = is_empty || all == 0.0f ? 0.0f : shrink / all;
            for (int64_t channel = 0; channel < prompt.value_dim; ++channel)
                from_float(factor == 0.0f ? 0.0f : from[channel] * factor, to + channel);
        }
    }
};

template <typename State>
void attend_many(const Call& call, bool is_causal, const uint8_t* held) {
    const Prompt prompt(call, is_causal, held);
    const int64_t heads = prompt.batch * prompt.kv_heads;
    // As many heads at once as all threads need, since their packed states take memory.
    const int64_t at_once = std::min(heads, (ITEMS_OF_THREAD * prompt.threads + prompt.query_blocks - 1) / prompt.query_blocks);
    PackedHeads<State> packed(prompt, at_once);
    for (int64_t head = 0; head < heads; head += at_once) {
        const int64_t count = std::min(at_once, heads - head);
        packed.pack(head, count);
        parallel_for(count * prompt.query_blocks, prompt.threads, [&] {
            return [&, block = QueryBlock<State>(prompt, packed)](int64_t index) mutable {
                // The last blocks of a causal prompt first: they take the longest.
                block.attend(head + index % count, index % count, prompt.query_blocks - 1 - index / count);
            };
        });
    }
}

}  // namespace
