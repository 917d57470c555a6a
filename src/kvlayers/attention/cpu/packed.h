// Sums of packed codes: the codes of a block are multiplied as integers converted to floats, and the scales are folded
// into the other factor (the query for keys, the probabilities for values).

#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "call.h"
#include "vectors.h"

namespace {

template <int BITS>
inline Words slot_of(Words bytes, int slot) {
    const Words shifted = bytes >> (slot * BITS);
    return (slot + 1) * BITS == 8 ? shifted : shifted & uint32_t((1 << BITS) - 1);
}

struct Integer {
    static inline Floats value(Words code) { return __builtin_convertvector((Ints)code, Floats); }
};

struct Float8 {
    // Exponent and fraction of e4m3 moved to those of a float, whose exponents are 120 higher.
    static inline Floats value(Words code) {
        const Words bits = ((code & 0x80u) << 24) | ((code & 0x7fu) << 20);
        const Floats scaled = (Floats)bits * 1.329227995784916e36f;
        const Ints is_nan = (Ints)(code & 0x7fu) == 0x7f;
        return (Floats)((Ints)scaled | (is_nan & 0x7fc00000));
    }
};

// Bytes of a row from which the codes of 16 columns are read in each slot; fewer where the row ends.
template <bool WHOLE>
inline Bytes load_bytes(const uint8_t* from, int64_t width) {
    if (WHOLE) return load<Bytes>(from);
    Bytes bytes = {};
    std::memcpy(&bytes, from, width);
    return bytes;
}

// One step of 16 bytes of `accumulate_plane`.
template <int BITS, int R, typename Meaning, bool WHOLE>
inline void accumulate_step(const uint8_t* codes, int64_t row_bytes, int64_t rows, int64_t plane_bytes, int64_t columns,
                            const float* weights, int64_t column_group, float* acc, int64_t acc_stride,
                            int64_t offset) {
    constexpr int SLOTS = 8 / BITS;
    const int64_t width = std::min<int64_t>(LANES, plane_bytes - offset);
    const float* slot_weights[SLOTS];
    Floats sums[R][SLOTS];
#pragma GCC unroll 8
    for (int slot = 0; slot < SLOTS; ++slot) {
        const int64_t column = std::min(slot * plane_bytes + offset, columns - 1);
        slot_weights[slot] = weights + column / column_group * rows * R;
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i) sums[i][slot] = Floats{};
    }
    for (int64_t row = 0; row < rows; ++row) {
        const Words words = widened(load_bytes<WHOLE>(codes + row * row_bytes + offset, width));
#pragma GCC unroll 8
        for (int slot = 0; slot < SLOTS; ++slot) {
            const Floats value = Meaning::value(slot_of<BITS>(words, slot));
#pragma GCC unroll 8
            for (int i = 0; i < R; ++i) sums[i][slot] += slot_weights[slot][i * rows + row] * value;
        }
    }
#pragma GCC unroll 8
    for (int slot = 0; slot < SLOTS; ++slot)
#pragma GCC unroll 8
        for (int i = 0; i < R; ++i) {
            float* to = acc + i * acc_stride + slot * plane_bytes + offset;
            if (WHOLE) {
                store(to, load<Floats>(to) + sums[i][slot]);
            } else {
                float parts[LANES];
                store(parts, sums[i][slot]);
                for (int64_t lane = 0; lane < width; ++lane) to[lane] += parts[lane];
            }
        }
}

// acc[i][column] += sum over rows of weights[group of column][i][row] * code[row][column], for i < R.
template <int BITS, int R, typename Meaning>
void accumulate_plane(const uint8_t* codes, int64_t row_bytes, int64_t rows, int64_t plane_bytes, int64_t columns,
                      const float* weights, int64_t column_group, float* acc, int64_t acc_stride) {
    int64_t offset = 0;
    for (; offset + LANES <= plane_bytes; offset += LANES)
        accumulate_step<BITS, R, Meaning, true>(codes, row_bytes, rows, plane_bytes, columns, weights, column_group, acc,
                                                acc_stride, offset);
    if (offset < plane_bytes)
        accumulate_step<BITS, R, Meaning, false>(codes, row_bytes, rows, plane_bytes, columns, weights, column_group,
                                                 acc, acc_stride, offset);
}

template <int R>
void accumulate(const Side& side, const uint8_t* codes, int64_t row_bytes, int64_t rows, int64_t padded,
                const float* weights, int64_t column_group, float* acc, int64_t acc_stride, std::vector<float>& scratch) {
    const int64_t columns = side.columns;
    const int64_t plane = padded / 8;
    if (side.floating)
        accumulate_plane<8, R, Float8>(codes, row_bytes, rows, columns, columns, weights, column_group, acc, acc_stride);
    else if (side.bits == 8)
        accumulate_plane<8, R, Integer>(codes, row_bytes, rows, columns, columns, weights, column_group, acc, acc_stride);
    else if (side.bits == 4)
        accumulate_plane<4, R, Integer>(codes, row_bytes, rows, 4 * plane, columns, weights, column_group, acc, acc_stride);
    else if (side.bits == 2)
        accumulate_plane<2, R, Integer>(codes, row_bytes, rows, 2 * plane, columns, weights, column_group, acc, acc_stride);
    else if (side.bits == 1)
        accumulate_plane<1, R, Integer>(codes, row_bytes, rows, plane, columns, weights, column_group, acc, acc_stride);
    else {
        const int64_t count = rows * R * ((columns + column_group - 1) / column_group);
        scratch.resize(count);
        for (int64_t i = 0; i < count; ++i) scratch[i] = 4 * weights[i];
        accumulate_plane<2, R, Integer>(codes, row_bytes, rows, 2 * plane, columns, weights, column_group, acc, acc_stride);
        accumulate_plane<1, R, Integer>(codes + 2 * plane, row_bytes, rows, plane, columns, scratch.data(), column_group, acc,
                                        acc_stride);
    }
}

int64_t padded_columns(const Side& side) { return side.bits == 8 ? side.columns : (side.columns + 7) / 8 * 8; }

int64_t plane_bytes_of(const Side& side) {
    if (side.bits == 8) return side.columns;
    return padded_columns(side) / 8 * (side.bits == 3 ? 1 : side.bits);
}

// Whether 16 columns that are read together always share a group, in every slot of a byte.
bool groups_hold_whole_vectors(const Side& side) {
    if (side.column_group >= side.columns) return true;
    return side.column_group % LANES == 0 && plane_bytes_of(side) % LANES == 0;
}

struct Buffers {
    std::vector<float> weights, scratch, unit, parameters, zeros;
};

// acc[i][column] += sum over rows from `begin` to `end` of factors[i][row] * state[row][column], for i < R.
template <int R, typename Parameter>
void multiply(const Side& side, int64_t batch, int64_t head, int64_t block, int64_t begin, int64_t end,
              const float* factors, int64_t factor_stride, float* acc, int64_t acc_stride, Buffers& buffers) {
    const uint8_t* codes = side.codes + batch * side.code_batch + head * side.code_head + block * side.code_block;
    const Parameter* given = (const Parameter*)side.parameters + batch * side.parameter_batch +
                             head * side.parameter_head + block * side.parameter_block;
    const int64_t padded = padded_columns(side), row_bytes = padded * side.bits / 8;
    const int64_t row_groups = side.rows / side.row_group, column_groups = side.columns / side.column_group;
    const int64_t count = row_groups * column_groups;
    const bool has_zero = !side.floating;
    buffers.parameters.resize((2 * count) + LANES);
    for (int64_t i = 0; i < count * (has_zero ? 2 : 1); ++i) buffers.parameters[i] = to_float(given[i]);
    const float* scale = buffers.parameters.data();
    const float* zero = scale + count;

    if (side.row_group == 1 && groups_hold_whole_vectors(side)) {
        // Each row has a scale for each group of its columns: the scales are folded into the factors.
        const int64_t rows = end - begin;
        buffers.weights.resize(column_groups * rows * R);
        buffers.zeros.assign(R * column_groups, 0.0f);
        float* weights = buffers.weights.data();
        for (int64_t group = 0; group < column_groups; ++group)
            for (int i = 0; i < R; ++i) {
                float total = 0;
                for (int64_t row = 0; row < rows; ++row) {
                    const int64_t at = (row + begin) * column_groups + group;
                    const float factor = factors[i * factor_stride + row + begin];
                    weights[(group * R + i) * rows + row] = factor * scale[at];
                    if (has_zero) total += factor * zero[at];
                }
                buffers.zeros[i * column_groups + group] = total;
            }
        accumulate<R>(side, codes + begin * row_bytes, row_bytes, rows, padded, weights, side.column_group, acc, acc_stride,
                      buffers.scratch);
        if (has_zero)
            for (int i = 0; i < R; ++i)
                for (int64_t group = 0; group < column_groups; ++group) {
                    const float total = buffers.zeros[i * column_groups + group];
                    float* to = acc + i * acc_stride + group * side.column_group;
                    for (int64_t column = 0; column < side.column_group; ++column) to[column] += total;
                }
        return;
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
        accumulate<R>(side, codes + row_begin * row_bytes, row_bytes, rows, padded, buffers.weights.data(), side.columns,
                      buffers.unit.data(), acc_stride, buffers.scratch);
        for (int i = 0; i < R; ++i)
            for (int64_t column = 0; column < side.columns; ++column) {
                const int64_t at = row_group * column_groups + column / side.column_group;
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
