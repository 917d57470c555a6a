// Products of a packed side of blocks with other factors: the query for keys, the weights of tokens for values. The scales
// of codes are folded into the factors, so that no block is ever written out in full precision.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "../../../utils/vectors.h"
#include "call.h"
#include "products.h"

namespace {

// weights[i][row] = factors[i][row] * scale[row] for i < R, and zeros up to a multiple of WIDTH rows. totals[i] = the sum of
// factors[i][row] * zero[row]. magnitudes[i] becomes the larger of itself and of the bits of |weights[i]|, lane by lane. Such
// bits are in the order of the numbers, and then come infinity and NaN.
template <int R, typename Parameter>
inline void fold_scales(const float* factors, int64_t factor_stride, const Parameter* scale, const Parameter* zero,
                        int64_t rows, float* weights, float* totals, IntRegister* magnitudes) {
    Register sums[R] = {};
    IntRegister highest[R];  // a copy, because compilers would write to magnitudes each time
    for (int i = 0; i < R; ++i) highest[i] = magnitudes[i];
    for (int64_t row = 0; row < rows; row += WIDTH) {
        const int64_t count = rows - row;
        const Register scales = load_first(scale + row, count), zeros = load_first(zero + row, count);
#pragma GCC unroll 4
        for (int i = 0; i < R; ++i) {
            const Register factor = load_first(factors + i * factor_stride + row, count), weight = factor * scales;
            store_register(weights + i * ROWS_OF_WEIGHTS + row, weight);
            sums[i] += factor * zeros;
            highest[i] = higher(highest[i], (IntRegister)weight & 0x7fffffff);
        }
    }
    for (int i = 0; i < R; ++i) magnitudes[i] = highest[i];
    sums_of_lanes<R>(sums, totals);
}

#if defined(MULTIPLIES_BYTES)
constexpr float LARGEST_WEIGHT = 127 * 256 + 127;
static_assert(255 * ROWS_OF_WEIGHTS * int64_t(LARGEST_WEIGHT) <= INT32_MAX);

// Whether rows of codes of a side can be multiplied by `QuadProducts`.
inline bool fits_integers(const Side& side, const Columns& columns, int64_t rows) {
    return !side.floating && !side.levels && rows % 4 == 0 &&
           (columns.fill_wide() || (side.bits < 8 && columns.fill_wide_twice()));
}

// 64 weights as low and high bytes of integers. The low byte has a sign, so the high one is rounded.
__attribute__((always_inline)) inline void store_quads(const float* weights, float in_unit, uint8_t* low, uint8_t* high) {
    __m512i rounded[4];
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part)
        rounded[part] = _mm512_cvtps_epi32((__m512)(load_register(weights + part * WIDTH) * in_unit));
    const __m512i one = _mm512_packs_epi32(rounded[0], rounded[1]), other = _mm512_packs_epi32(rounded[2], rounded[3]);
    const __m512i mask = _mm512_set1_epi16(0xff), half = _mm512_set1_epi16(128);
    const __m512i lows = _mm512_packus_epi16(_mm512_and_si512(one, mask), _mm512_and_si512(other, mask));
    const __m512i highs = _mm512_packs_epi16(_mm512_srai_epi16(_mm512_add_epi16(one, half), 8),
                                             _mm512_srai_epi16(_mm512_add_epi16(other, half), 8));
    // Each quarter has a word of each part.
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    _mm512_store_si512(low, _mm512_permutexvar_epi32(order, lows));
    _mm512_store_si512(high, _mm512_permutexvar_epi32(order, highs));
}

// Float weights [groups][R][ROWS_OF_WEIGHTS] as bytes of integers [groups][R][2][ROWS_OF_WEIGHTS], in units[i] for all
// groups of row i.
// False if that is not possible: a weight is not finite, or those of a row are too small or too large.
template <int R>
__attribute__((always_inline)) inline bool round_to_quads(const float* weights, const IntRegister* magnitudes,
                                                          int64_t groups, int64_t rows, float* units, uint8_t* quads) {
    float in_units[R];
    int32_t highest[R];
    highest_lanes<R>(magnitudes, highest);
    for (int i = 0; i < R; ++i) {
        const float magnitude = float_of(highest[i]);
        // A row of zeros, such as one that is masked, must not change how the others are multiplied.
        if (magnitude != 0 && !(magnitude > 1e-30f && magnitude < 1e30f)) return false;
        units[i] = magnitude / LARGEST_WEIGHT;
        in_units[i] = magnitude == 0 ? 0.0f : LARGEST_WEIGHT / magnitude;
    }
    for (int64_t group = 0; group < groups; ++group)
        for (int i = 0; i < R; ++i, weights += ROWS_OF_WEIGHTS, quads += 2 * ROWS_OF_WEIGHTS)
            for (int64_t row = 0; row < rows; row += 4 * WIDTH)
                store_quads(weights + row, in_units[i], quads + row, quads + ROWS_OF_WEIGHTS + row);
    return true;
}
#endif

// Scales, or zeros, as floats: to[group of columns][group of rows]. Compilers vectorize the loop only if the stride is a
// constant.
template <int COLUMN_GROUPS, typename Parameter>
void read_strided(const Parameter* from, int64_t row_groups, float* to) {
    for (int64_t column = 0; column < COLUMN_GROUPS; ++column)
        for (int64_t row = 0; row < row_groups; ++row)
            to[column * row_groups + row] = to_float(from[row * COLUMN_GROUPS + column]);
}

template <typename Parameter>
void read_parameters(const Parameter* from, int64_t row_groups, int64_t column_groups, float* to) {
    switch (column_groups) {
        case 1: return read_strided<1>(from, row_groups, to);
        case 2: return read_strided<2>(from, row_groups, to);
        case 4: return read_strided<4>(from, row_groups, to);
    }
    for (int64_t column = 0; column < column_groups; ++column)
        for (int64_t row = 0; row < row_groups; ++row)
            to[column * row_groups + row] = to_float(from[row * column_groups + column]);
}

// Whether columns that are read together always share a group, whatever the width of codes.
bool groups_hold_whole_vectors(const Side& side) {
    if (side.column_group >= side.columns) return true;
    return side.column_group % 8 == 0 && side.columns % 64 == 0;
}

// Products of a packed side of blocks with rows of factors.
class BlockProducts {
   public:
    // acc[i][column] += sum over rows [begin, end) of a block of factors[i][row] * state[row][column], for i < R.
    template <int R, typename Parameter>
    void add(const Side& of, int64_t batch, int64_t head, int64_t block, int64_t begin, int64_t end, const float* factors,
             int64_t factor_stride, float* acc, int64_t acc_stride) {
        side = &of;
        codes = of.codes + batch * of.code_batch + head * of.code_head + block * of.code_block;
        // Divisions take long, and most sides need none.
        row_groups = of.row_group == 1 ? of.rows : of.rows / of.row_group;
        column_groups = of.column_group == of.columns ? 1 : of.columns / of.column_group;
        const Parameter* given = (const Parameter*)of.parameters + batch * of.parameter_batch +
                                 head * of.parameter_head + block * of.parameter_block;
        const int64_t count = row_groups * column_groups;
        // Fetches the parameters of the next block.
        for (const Parameter* at = given; at < given + 2 * count; at += LINE_BYTES / sizeof(Parameter))
            __builtin_prefetch(at + of.parameter_block);
        const bool folds = of.row_group == 1 && groups_hold_whole_vectors(of);
        // States in float32 have smaller errors than rounded weights.
        constexpr bool AS_INTEGERS = !std::is_same<Parameter, float>::value;
        if (folds && column_groups == 1 && has_zeros() && !of.fixed_scales)
            return add_folded<R, AS_INTEGERS>(given, given + count, begin, end, factors, factor_stride, acc, acc_stride);
        read_as_floats(given, count, head);
        if (folds)
            add_folded<R, AS_INTEGERS>((const float*)scales.data(), (const float*)zeros.data(), begin, end, factors,
                                       factor_stride, acc, acc_stride);
        else
            add_groups<R>(begin, end, factors, factor_stride, acc, acc_stride);
    }

   private:
    const Side* side;
    const uint8_t* codes;
    int64_t row_groups, column_groups;
    FloatBuffer scales, zeros;  // [groups of columns][groups of rows]
    FloatBuffer weights, totals, sums_of_codes;
    std::vector<uint8_t, LineAllocator<uint8_t>> quads;

    bool has_zeros() const { return !side->floating && !side->levels; }

    template <typename Parameter>
    void read_as_floats(const Parameter* given, int64_t count, int64_t head) {
        scales.resize(count);
        zeros.resize(count);
        read_parameters(given, row_groups, column_groups, scales.data());
        if (side->fixed_scales)
            for (float& scale : scales) scale *= side->fixed_scales[head];
        if (has_zeros())
            read_parameters(given + count, row_groups, column_groups, zeros.data());
        else
            std::fill(zeros.begin(), zeros.end(), 0.0f);
    }

    // As `add`, with scales and zeros [groups of columns][rows], which are folded into the factors.
    template <int R, bool AS_INTEGERS, typename Parameter>
    void add_folded(const Parameter* scale, const Parameter* zero, int64_t begin, int64_t end, const float* factors,
                    int64_t factor_stride, float* acc, int64_t acc_stride) {
        const Columns columns(*side, side->column_group);
        weights.resize(column_groups * R * ROWS_OF_WEIGHTS);
        totals.resize(column_groups * R);
        for (int64_t row = begin, rows; row < end; row += rows) {
            rows = std::min(end - row, ROWS_OF_WEIGHTS);
            IntRegister magnitudes[R] = {};
            for (int64_t group = 0; group < column_groups; ++group)
                fold_scales<R>(factors + row, factor_stride, scale + group * row_groups + row,
                               zero + group * row_groups + row, rows, &weights[group * R * ROWS_OF_WEIGHTS],
                               &totals[group * R], magnitudes);
            const uint8_t* of_rows = codes + row * columns.row_bytes;
#if defined(MULTIPLIES_BYTES)
            if constexpr (AS_INTEGERS) {
                quads.resize(column_groups * R * 2 * ROWS_OF_WEIGHTS);
                float units[R];
                if (fits_integers(*side, columns, rows) &&
                    round_to_quads<R>(weights.data(), magnitudes, column_groups, rows, units, quads.data())) {
                    side->multiply({*side, columns, R, of_rows, rows, weights.data(), quads.data(), units, totals.data(), acc,
                                    acc_stride});
                    continue;
                }
            }
#endif
            side->multiply({*side, columns, R, of_rows, rows, weights.data(), nullptr, nullptr, totals.data(), acc,
                            acc_stride});
        }
    }

    // As `add`, one group of rows after the other, if scales differ within a vector of columns: they are folded into the
    // sums.
    template <int R>
    void add_groups(int64_t begin, int64_t end, const float* factors, int64_t factor_stride, float* acc,
                    int64_t acc_stride) {
        const Columns columns(*side, side->columns);
        weights.resize(R * ROWS_OF_WEIGHTS);
        const float no_zeros[R] = {};
        for (int64_t row = begin, rows; row < end; row += rows) {
            const int64_t row_group = row / side->row_group;
            rows = std::min({end - row, (row_group + 1) * side->row_group - row, ROWS_OF_WEIGHTS});
            sums_of_codes.assign(R * acc_stride, 0.0f);
            float sums[R] = {};
            for (int i = 0; i < R; ++i)
                for (int64_t at = 0; at < rows; ++at) {
                    weights[i * ROWS_OF_WEIGHTS + at] = factors[i * factor_stride + row + at];
                    sums[i] += weights[i * ROWS_OF_WEIGHTS + at];
                }
            side->multiply({*side, columns, R, codes + row * columns.row_bytes, rows, weights.data(), nullptr, nullptr,
                            no_zeros, sums_of_codes.data(), acc_stride});
            for (int i = 0; i < R; ++i)
                for (int64_t column = 0; column < side->columns; ++column) {
                    const int64_t at = column / side->column_group * row_groups + row_group;
                    acc[i * acc_stride + column] += scales[at] * sums_of_codes[i * acc_stride + column];
                    if (has_zeros()) acc[i * acc_stride + column] += zeros[at] * sums[i];
                }
        }
    }
};

}  // namespace
