// Sums of packed codes: the codes of a block are multiplied as integers converted to floats, and the scales are folded
// into the other factor (the query for keys, the probabilities for values).

#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "call.h"
#include "codes.h"
#include "vectors.h"

namespace {

// Vectors of sums that stay in registers beside the factors.
constexpr int MOST_SUMS = WIDTH == 16 ? 16 : 8;

// Rows of codes, as all functions below see them.
struct CodeRows {
    const uint8_t* codes;
    int64_t row_bytes, rows, columns, narrowest_bytes, column_group;
    const float* weights;  // [groups of columns][R][rows]

    // Whether `count` columns of a slot, from a multiple of `count` on, always share a group.
    bool shares_groups(int64_t count) const {
        return column_group >= columns || (column_group % count == 0 && narrowest_bytes % count == 0);
    }
};

// acc[i][column] += sum over rows of weights[group of column][i][row] * value[row][column], for i < R, in VECTORS vectors
// of bytes from `offset` and COUNT slots from FIRST. Lanes before `first_lane` were counted already.
template <typename Layout, typename Meaning, int R, int N, int VECTORS, int FIRST, int... SLOTS>
inline void accumulate_slots(const Meaning& meaning, const CodeRows& of, int64_t offset, int64_t first_lane, float* acc, int64_t acc_stride,
                             std::integer_sequence<int, SLOTS...>) {
    constexpr int COUNT = sizeof...(SLOTS);
    const uint8_t* from = of.codes + offset;
    const float* weights[COUNT] = {
        of.weights +
        std::min((FIRST + SLOTS) * of.narrowest_bytes + offset, of.columns - 1) / of.column_group * of.rows * R...};
    FloatLanes<N> sums[R][VECTORS][COUNT] = {};
    for (int64_t row = 0; row < of.rows; ++row, from += of.row_bytes) {
#pragma GCC unroll 8
        for (int vector = 0; vector < VECTORS; ++vector) {
            const FloatLanes<N> values[COUNT] = {meaning.template values<N>(
                Layout::template codes<N, FIRST + SLOTS>(from + vector * N, of.narrowest_bytes))...};
#pragma GCC unroll 8
            for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
                for (int slot = 0; slot < COUNT; ++slot)
                    sums[i][vector][slot] += weights[slot][i * of.rows + row] * values[slot];
        }
    }
    for (int i = 0; i < R; ++i)
        for (int slot = 0; slot < COUNT; ++slot)
            for (int vector = 0; vector < VECTORS; ++vector) {
                float* to = acc + i * acc_stride + (FIRST + slot) * of.narrowest_bytes + offset + vector * N;
                for (int64_t lane = first_lane; lane < N; ++lane) to[lane] += sums[i][vector][slot][lane];
            }
}

// As `accumulate_slots`, for all slots, so many at once that their sums stay in registers.
template <typename Layout, typename Meaning, int R, int N, int VECTORS, int FIRST = 0>
inline void accumulate_vectors(const Meaning& meaning, const CodeRows& of, int64_t offset, int64_t first_lane, float* acc,
                               int64_t acc_stride) {
    constexpr int COUNT = std::min(Layout::SLOTS - FIRST, std::max(1, MOST_SUMS / (R * VECTORS)));
    accumulate_slots<Layout, Meaning, R, N, VECTORS, FIRST>(meaning, of, offset, first_lane, acc, acc_stride,
                                                           std::make_integer_sequence<int, COUNT>{});
    if constexpr (FIRST + COUNT < Layout::SLOTS)
        accumulate_vectors<Layout, Meaning, R, N, VECTORS, FIRST + COUNT>(meaning, of, offset, first_lane, acc, acc_stride);
}

// As `accumulate_slots`, for all columns.
template <typename Layout, typename Meaning, int R, int N>
inline void accumulate_columns(const Meaning& meaning, const CodeRows& of, float* acc, int64_t acc_stride) {
    constexpr int VECTORS = std::max(1, MOST_SUMS / (R * Layout::SLOTS));
    const int64_t bytes = of.narrowest_bytes;
    int64_t offset = 0;
    if (of.shares_groups(VECTORS * N))
        for (; offset + VECTORS * N <= bytes; offset += VECTORS * N)
            accumulate_vectors<Layout, Meaning, R, N, VECTORS>(meaning, of, offset, 0, acc, acc_stride);
    if constexpr (VECTORS > 1)
        for (; offset + N <= bytes; offset += N)
            accumulate_vectors<Layout, Meaning, R, N, 1>(meaning, of, offset, 0, acc, acc_stride);
    if (offset < bytes && bytes >= N)
        accumulate_vectors<Layout, Meaning, R, N, 1>(meaning, of, bytes - N, offset - (bytes - N), acc, acc_stride);
    else if (offset < bytes)
        for (int64_t row = 0; row < of.rows; ++row)
            for (int64_t column = 0; column < of.columns; ++column) {
                const uint32_t code = Layout::code(of.codes + row * of.row_bytes, column, bytes);
                const float value = meaning.template values<8>(WordLanes<8>{} + code)[0];
                const float* weights = of.weights + column / of.column_group * of.rows * R;
                for (int i = 0; i < R; ++i) acc[i * acc_stride + column] += weights[i * of.rows + row] * value;
            }
}

template <typename Layout, typename Meaning, int R>
void accumulate_layout(const Meaning& meaning, CodeRows of, float* acc, int64_t acc_stride) {
    of.narrowest_bytes = Layout::narrowest_bytes(of.columns);
#if defined(__AVX512F__)
    if (of.narrowest_bytes % 16 == 0 && of.shares_groups(16))
        return accumulate_columns<Layout, Meaning, R, 16>(meaning, of, acc, acc_stride);
#endif
    accumulate_columns<Layout, Meaning, R, 8>(meaning, of, acc, acc_stride);
}

template <int R>
void accumulate(const Side& side, const CodeRows& of, float* acc, int64_t acc_stride) {
    if (side.floating) return accumulate_layout<Planes<8>, Float8, R>({}, of, acc, acc_stride);
    if (side.levels) {
        const Codebook book(side.levels, side.bits);
        switch (side.bits) {
            case 1: return accumulate_layout<Planes<1>, Codebook, R>(book, of, acc, acc_stride);
            case 2: return accumulate_layout<Planes<2>, Codebook, R>(book, of, acc, acc_stride);
            case 3: return accumulate_layout<Planes<2, 1>, Codebook, R>(book, of, acc, acc_stride);
            case 4: return accumulate_layout<Planes<4>, Codebook, R>(book, of, acc, acc_stride);
        }
    }
    switch (side.bits) {
        case 1: return accumulate_layout<Planes<1>, Integer, R>({}, of, acc, acc_stride);
        case 2: return accumulate_layout<Planes<2>, Integer, R>({}, of, acc, acc_stride);
        case 3: return accumulate_layout<Planes<2, 1>, Integer, R>({}, of, acc, acc_stride);
        case 4: return accumulate_layout<Planes<4>, Integer, R>({}, of, acc, acc_stride);
        case 5: return accumulate_layout<Planes<4, 1>, Integer, R>({}, of, acc, acc_stride);
        case 6: return accumulate_layout<Planes<4, 2>, Integer, R>({}, of, acc, acc_stride);
        case 8: return accumulate_layout<Planes<8>, Integer, R>({}, of, acc, acc_stride);
    }
}

int64_t padded_columns(const Side& side) { return side.bits == 8 ? side.columns : (side.columns + 7) / 8 * 8; }

// Whether columns that are read together always share a group, whatever the width of codes.
bool groups_hold_whole_vectors(const Side& side) {
    if (side.column_group >= side.columns) return true;
    return side.column_group % 8 == 0 && side.columns % 64 == 0;
}

inline float dot(const float* a, const float* b, int64_t count) {
    FloatLanes<8> sums = {};
    int64_t at = 0;
    for (; at + 8 <= count; at += 8) sums += load<FloatLanes<8>>(a + at) * load<FloatLanes<8>>(b + at);
    float total = 0;
    for (int lane = 0; lane < 8; ++lane) total += sums[lane];
    for (; at < count; ++at) total += a[at] * b[at];
    return total;
}

struct Buffers {
    FloatBuffer weights, unit, parameters;
};

// Scales, or zeros, as floats: to[group of columns][group of rows].
template <typename Parameter>
void read_parameters(const Parameter* from, int64_t row_groups, int64_t column_groups, float* to) {
    for (int64_t column = 0; column < column_groups; ++column)
        for (int64_t row = 0; row < row_groups; ++row) to[column * row_groups + row] = to_float(from[row * column_groups + column]);
}

// acc[i][column] += sum over rows from `begin` to `end` of factors[i][row] * state[row][column], for i < R.
template <int R, typename Parameter>
void multiply(const Side& side, int64_t batch, int64_t head, int64_t block, int64_t begin, int64_t end,
              const float* factors, int64_t factor_stride, float* acc, int64_t acc_stride, Buffers& buffers) {
    const uint8_t* codes = side.codes + batch * side.code_batch + head * side.code_head + block * side.code_block;
    const Parameter* given = (const Parameter*)side.parameters + batch * side.parameter_batch +
                             head * side.parameter_head + block * side.parameter_block;
    const int64_t row_bytes = padded_columns(side) * side.bits / 8;
    const int64_t row_groups = side.rows / side.row_group, column_groups = side.columns / side.column_group;
    const int64_t count = row_groups * column_groups;
    const bool has_zero = !side.floating && !side.levels;
    buffers.parameters.resize(2 * count);
    float *scale = buffers.parameters.data(), *zero = scale + count;
    read_parameters(given, row_groups, column_groups, scale);
    if (has_zero) read_parameters(given + count, row_groups, column_groups, zero);

    if (side.row_group == 1 && groups_hold_whole_vectors(side)) {
        // Each row has a scale for each group of its columns: the scales are folded into the factors.
        const int64_t rows = end - begin;
        buffers.weights.resize(column_groups * rows * R);
        float* weights = buffers.weights.data();
        for (int64_t group = 0; group < column_groups; ++group)
            for (int i = 0; i < R; ++i) {
                const float *factor = factors + i * factor_stride + begin, *of_row = scale + group * row_groups + begin;
                float* weight = weights + (group * R + i) * rows;
                for (int64_t row = 0; row < rows; ++row) weight[row] = factor[row] * of_row[row];
                if (!has_zero) continue;
                const float total = dot(factor, zero + group * row_groups + begin, rows);
                float* to = acc + i * acc_stride + group * side.column_group;
                for (int64_t column = 0; column < side.column_group; ++column) to[column] += total;
            }
        const CodeRows of = {codes + begin * row_bytes, row_bytes, rows, side.columns, 0, side.column_group, weights};
        return accumulate<R>(side, of, acc, acc_stride);
    }

    // Scales differ within a vector of columns: they are folded into the sums, once for each group of rows.
    for (int64_t row_begin = begin; row_begin < end;) {
        const int64_t row_group = row_begin / side.row_group;
        const int64_t row_end = std::min(end, (row_group + 1) * side.row_group), rows = row_end - row_begin;
        buffers.weights.resize(rows * R);
        buffers.unit.assign(R * acc_stride, 0.0f);
        float totals[R] = {};
        for (int i = 0; i < R; ++i)
            for (int64_t row = 0; row < rows; ++row) {
                const float factor = factors[i * factor_stride + row + row_begin];
                buffers.weights[i * rows + row] = factor;
                totals[i] += factor;
            }
        const uint8_t* first = codes + row_begin * row_bytes;
        const CodeRows of = {first, row_bytes, rows, side.columns, 0, side.columns, buffers.weights.data()};
        accumulate<R>(side, of, buffers.unit.data(), acc_stride);
        for (int i = 0; i < R; ++i)
            for (int64_t column = 0; column < side.columns; ++column) {
                const int64_t at = column / side.column_group * row_groups + row_group;
                acc[i * acc_stride + column] += scale[at] * buffers.unit[i * acc_stride + column];
                if (has_zero) acc[i * acc_stride + column] += zero[at] * totals[i];
            }
        row_begin = row_end;
    }
}

// The rotation of `hadamard.py`, which is its own inverse: a fast Walsh-Hadamard transform of each `size` channels.
void rotate(float* channels, int64_t count) {
    const int64_t size = count & -count;
    const float norm = 1.0f / std::sqrt(float(size));
    for (int64_t run = 0; run < count; run += size)
        for (int64_t half = 1; half < size; half *= 2)
            for (int64_t start = run; start < run + size; start += 2 * half)
                for (int64_t i = start; i < start + half; ++i) {
                    const float a = channels[i], b = channels[i + half];
                    channels[i] = a + b;
                    channels[i + half] = a - b;
                }
    for (int64_t i = 0; i < count; ++i) channels[i] *= norm;
}

}  // namespace
