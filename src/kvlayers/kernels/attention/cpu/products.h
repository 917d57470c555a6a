// What a library of products is asked for, such as `whole_products.cpp`. They are libraries of their own, because compiling
// them takes longer than all other code: attention in full precision need not wait for them.

#pragma once

#include <algorithm>
#include <cstdint>

#include "call.h"

// Whether four rows of codes are multiplied at once, as bytes.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define MULTIPLIES_BYTES
#endif

namespace {

// Rows that are multiplied at once. Their weights have this distance, whatever their number: compilers make offsets of a
// constant, where they would need a register for each row of weights.
constexpr int64_t ROWS_OF_WEIGHTS = 128;

}  // namespace

// How the columns of a row of codes lie.
struct Columns {
    int64_t count, in_group, row_bytes;
    int64_t narrowest_bytes;  // of the narrowest plane

    Columns(const Side& side, int64_t in_group) : count(side.columns), in_group(in_group) {
        const int64_t padded = side.bits == 8 ? count : (count + 7) / 8 * 8;
        row_bytes = padded * side.bits / 8;
        narrowest_bytes = padded * (side.bits & -side.bits) / 8;
    }

    bool is_one_group() const { return in_group >= count; }

    // The group of a column. Divisions of 64 bits take long.
    int64_t group(int64_t column) const {
        return is_one_group() ? 0 : uint32_t(std::min(column, count - 1)) / uint32_t(in_group);
    }

    // Whether `together` columns of a slot, from a multiple of `together` on, always share a group.
    bool share_groups(int64_t together) const {
        return is_one_group() || (in_group % together == 0 && narrowest_bytes % together == 0);
    }

    // Whether the columns of a slot, or those of two slots, fill vectors of 16.
    bool fill_wide() const { return narrowest_bytes >= 16 && share_groups(16); }
    bool fill_wide_twice() const { return narrowest_bytes == 8 && (is_one_group() || in_group % 16 == 0); }
};

// Products of `rows` (1 to 4) rows of weights and of what rows of codes stand for. They are added to acc[row][column], as is
// totals[group of columns][row].
struct Multiplication {
    const Side& side;
    const Columns& columns;
    int rows;
    const uint8_t* codes;
    int64_t count;  // rows of codes
    const float* weights;  // [groups of columns][rows][ROWS_OF_WEIGHTS]
    const uint8_t* quads;  // the weights as `round_to_quads` makes them, null if there are none: faster where bytes are multiplied
    const float* units;    // [rows], of quads
    const float* totals;
    float* acc;
    int64_t acc_stride;
};
