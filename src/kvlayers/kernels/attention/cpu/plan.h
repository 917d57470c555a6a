// The tokens of a call as runs of units, and the items of work that threads share.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "call.h"

namespace {

// Tokens. Fewer would part the reads of keys and of values into runs that are too short for the prefetcher of a CPU.
constexpr int64_t UNIT_TOKENS = 256;
constexpr int64_t MINIMUM_TOKENS = 256;  // of an item
constexpr double MINIMUM_PIECES = 4;  // of an item of a gathered segment

struct Unit {
    const Segment* segment;
    int64_t index;  // first token within a dense segment, or the packed block
    int64_t begin, end;  // valid tokens within the unit
    int64_t position;  // column of the first valid token in the mask

    bool holds_tokens() const { return end > begin; }
};

// Consecutive segments of which the sequences of the batch read the same rows, or one gathered segment.
struct Run {
    const Segment* gathered;  // null if all heads read the same units
    int64_t first_column;
    std::vector<Unit> units;
    std::vector<std::vector<int64_t>> readers;  // for each row, the sequences of the batch that read it
    std::vector<int64_t> row, place;  // for each sequence of the batch: its row, and its place among the readers
    std::vector<int64_t> counts;  // for each row and kv head: units that hold a token
    std::vector<int64_t> first_items;  // for each row and kv head, and at the end: the first of its items

    // Units of each head, and pieces that hold no token.
    int64_t length() const { return gathered ? gathered->gathered.pieces : int64_t(units.size()); }

    // A unit of the head at `head` among those of all rows. It may hold no token.
    Unit unit(int64_t head, int64_t index) const {
        if (!gathered) return units[index];
        const Gathered& tables = gathered->gathered;
        const int64_t at = head * tables.pieces + index, start = tables.starts[at];
        const int64_t begin = gathered->is_packed && start == 0 ? gathered->packed.first : 0;
        return {gathered, start, begin, begin + tables.counts[at], first_column + tables.columns[at]};
    }
};

void add_units(const Segment& segment, int64_t& position, std::vector<Unit>& units) {
    if (!segment.is_packed) {
        for (int64_t start = 0; start < segment.dense.tokens; start += UNIT_TOKENS) {
            const int64_t count = std::min(UNIT_TOKENS, segment.dense.tokens - start);
            units.push_back({&segment, start, 0, count, position});
            position += count;
        }
        return;
    }
    const Packed& packed = segment.packed;
    for (int64_t block = 0; block < packed.blocks; ++block) {
        const int64_t begin = block == 0 ? packed.first : 0;
        const int64_t end = packed.ends ? packed.ends[block] : packed.block_tokens;
        if (end <= begin) continue;
        units.push_back({&segment, block, begin, end, position});
        position += end - begin;
    }
}

// How many splits to make of the units of each head of a run, so that every thread has work.
int64_t splits_for(const Call& call, const Run& run, double share_of_work) {
    const int64_t heads = run.readers.size() * call.kv_heads;
    if (call.threads <= 1 || heads % call.threads == 0) return 1;
    const int64_t wanted = std::ceil(4 * call.threads * share_of_work / heads);
    int64_t tokens = 0;
    for (const Unit& unit : run.units) tokens += unit.end - unit.begin;
    return std::max<int64_t>(1, std::min<int64_t>(wanted, tokens / MINIMUM_TOKENS));
}

struct Item {
    const Run* run;
    int64_t row, kv_head;
    int64_t from, to;  // units
};

// The work of one call: items that any thread may take.
struct Plan {
    std::vector<Run> runs;
    std::vector<Item> items;
    int64_t largest_unit = UNIT_TOKENS;
    bool rotates_values = false;

    explicit Plan(const Call& call) {
        int64_t position = 0;
        for (int64_t i = 0; i < call.segment_count; ++i) {
            const Segment& segment = call.segments[i];
            if (segment.is_packed) {
                largest_unit = std::max(largest_unit, segment.packed.block_tokens);
                rotates_values |= segment.packed.values_rotated != 0;
            }
            if (segment.is_gathered) {
                add_gathered(call, segment, position);
                position += segment.gathered.width;
                continue;
            }
            if (i == 0 || call.rows[i] != call.rows[i - 1] || runs.back().gathered) add_run(call, call.rows[i]);
            add_units(segment, position, runs.back().units);
        }
        double work = 0;
        for (Run& run : runs) {
            if (!run.gathered) run.counts.assign(run.readers.size() * call.kv_heads, run.units.size());
            for (const int64_t count : run.counts) work += count;
        }
        for (Run& run : runs) {
            if (run.gathered)
                add_items_by_head(call, run, work);
            else
                add_items(call, run, run.units.size() * call.batch * call.kv_heads / std::max(work, 1.0));
            run.first_items.push_back(items.size());
        }
    }

    void add_items(const Call& call, Run& run, double share_of_work) {
        const int64_t splits = splits_for(call, run, share_of_work), count = run.units.size();
        for (int64_t head = 0; head < int64_t(run.counts.size()); ++head) {
            run.first_items.push_back(items.size());
            for (int64_t split = 0; split < splits; ++split)
                items.push_back({&run, head / call.kv_heads, head % call.kv_heads, count * split / splits,
                                 count * (split + 1) / splits});
        }
    }

    // Heads have different numbers of pieces: those with many have more items.
    void add_items_by_head(const Call& call, Run& run, double work) {
        const double wanted = std::max(MINIMUM_PIECES, call.threads > 1 ? work / (8 * call.threads) : work);
        for (int64_t head = 0; head < int64_t(run.counts.size()); ++head) {
            const int64_t splits = std::max<int64_t>(1, std::llround(run.counts[head] / wanted));
            run.first_items.push_back(items.size());
            int64_t from = 0, seen = 0;
            for (int64_t split = 0; split < splits; ++split) {
                // Pieces up to which this share of those that hold a token has been seen.
                const int64_t share = run.counts[head] * (split + 1) / splits;
                int64_t to = from;
                for (; to < run.length() && seen < share; ++to) seen += run.unit(head, to).holds_tokens();
                items.push_back({&run, head / call.kv_heads, head % call.kv_heads, from, to});
                from = to;
            }
        }
    }

    void add_gathered(const Call& call, const Segment& segment, int64_t position) {
        add_run(call, nullptr);
        Run& run = runs.back();
        run.gathered = &segment;
        run.first_column = position;
        run.counts.assign(call.batch * call.kv_heads, 0);
        for (int64_t head = 0; head < int64_t(run.counts.size()); ++head)
            for (int64_t index = 0; index < run.length(); ++index)
                run.counts[head] += run.unit(head, index).holds_tokens();
    }

    void add_run(const Call& call, const int64_t* rows) {
        Run run{};
        for (int64_t sequence = 0; sequence < call.batch; ++sequence) {
            const int64_t row = rows ? rows[sequence] : sequence;
            if (row >= int64_t(run.readers.size())) run.readers.resize(row + 1);
            run.row.push_back(row);
            run.place.push_back(run.readers[row].size());
            run.readers[row].push_back(sequence);
        }
        runs.push_back(std::move(run));
    }
};

}  // namespace
