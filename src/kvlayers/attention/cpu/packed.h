// Sums of packed codes: the codes of a block are multiplied as floats, or as integers on CPUs with AVX512-VNNI, and the
// scales are folded into the other factor (the query for keys, the probabilities for values).

#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

#include "../../utils/vectors.h"
#include "call.h"
#include "codes.h"

namespace {

// Vectors of sums that stay in registers beside the factors.
constexpr int MOST_SUMS = WIDTH == 16 ? 16 : 8;

// Products of float weights and of what codes stand for.
template <typename Meaning>
struct FloatProducts {
    typedef OneRow Rows;
    typedef float Weight;  // of a row
    template <int N>
    using Lanes = FloatLanes<N>;

    Meaning meaning;

    template <int N>
    inline Lanes<N> lanes(WordLanes<N> codes) const {
        return meaning.template values<N>(codes);
    }

    template <int N>
    static inline Lanes<N> sum(Lanes<N> sums, Weight weight, Lanes<N> values) {
        return sums + weight * values;
    }

    template <int N>
    inline FloatLanes<N> floats(Lanes<N> sums, int) const {
        return sums;
    }
};

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
// Products of integers, of two rows at once. Weights are integers of 16 bits with a sign, in units of their own for each
// of the R rows of weights: their error is at most 2^-16 of the largest weight of a row, where states in half precision
// have errors of 2^-9 and 2^-12.
struct PairProducts {
    typedef TwoRows Rows;
    typedef int32_t Weight;  // of one row in the lower half, of the next in the upper half
    template <int N>
    using Lanes = IntLanes<N>;

    const float* units;

    template <int N>
    inline Lanes<N> lanes(WordLanes<N> codes) const {
        return (Lanes<N>)codes;
    }

    template <int N>
    static inline Lanes<N> sum(Lanes<N> sums, Weight weight, Lanes<N> codes) {
        if constexpr (N == 16)
            return (Lanes<N>)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(weight));
        else
            return (Lanes<N>)_mm256_dpwssd_epi32((__m256i)sums, (__m256i)codes, _mm256_set1_epi32(weight));
    }

    template <int N>
    inline FloatLanes<N> floats(Lanes<N> sums, int i) const {
        return __builtin_convertvector(sums, FloatLanes<N>) * units[i];
    }
};
#endif

// Rows of codes, as all functions below see them.
template <typename Products>
struct CodeRows {
    const uint8_t* codes;
    int64_t row_bytes, rows, columns, narrowest_bytes, column_group;
    const typename Products::Weight* weights;  // [groups of columns][R][weights]
    int64_t weight_count;  // one for each row, or for each pair of rows

    // Whether `count` columns of a slot, from a multiple of `count` on, always share a group.
    bool shares_groups(int64_t count) const {
        return column_group >= columns || (column_group % count == 0 && narrowest_bytes % count == 0);
    }
};

// acc[i][column] += sum over rows of weights[group of column][i][row] * value[row][column], for i < R, in VECTORS vectors
// of bytes from `offset` and COUNT slots from FIRST. Lanes before `first_lane` were counted already.
template <typename Layout, int R, int N, int VECTORS, int FIRST, typename Products, int... SLOTS>
inline void accumulate_slots(const Products& products, const CodeRows<Products>& of, int64_t offset,
                             int64_t first_lane, float* acc, int64_t acc_stride,
                             std::integer_sequence<int, SLOTS...>) {
    constexpr int COUNT = sizeof...(SLOTS);
    typedef typename Products::Rows Rows;
    typedef typename Products::template Lanes<N> Lanes;
    const uint8_t* from = of.codes + offset;
    const typename Products::Weight* weights[COUNT] = {
        of.weights + std::min((FIRST + SLOTS) * of.narrowest_bytes + offset, of.columns - 1) / of.column_group *
                         of.weight_count * R...};
    Lanes sums[R][VECTORS][COUNT] = {};
    const int64_t step = of.rows / of.weight_count * of.row_bytes;
    for (int64_t at = 0; at < of.weight_count; ++at, from += step) {
        // Fetches the same rows of the next block.
        Rows::prefetch(from + of.rows * of.row_bytes, of.row_bytes);
#pragma GCC unroll 8
        for (int vector = 0; vector < VECTORS; ++vector) {
            const Lanes lanes[COUNT] = {products.template lanes<N>(Layout::template codes<Rows, N, FIRST + SLOTS>(
                from + vector * N, of.narrowest_bytes, of.row_bytes))...};
#pragma GCC unroll 8
            for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
                for (int slot = 0; slot < COUNT; ++slot)
                    sums[i][vector][slot] = Products::template sum<N>(
                        sums[i][vector][slot], weights[slot][i * of.weight_count + at], lanes[slot]);
        }
    }
    // Unrolled, because compilers keep sums in memory if a loop indexes them.
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
        for (int slot = 0; slot < COUNT; ++slot)
#pragma GCC unroll 8
            for (int vector = 0; vector < VECTORS; ++vector) {
                const FloatLanes<N> floats = products.template floats<N>(sums[i][vector][slot], i);
                float* to = acc + i * acc_stride + (FIRST + slot) * of.narrowest_bytes + offset + vector * N;
                if (first_lane == 0) {
                    const FloatLanes<N> total = load<FloatLanes<N>>(to) + floats;
                    std::memcpy(to, &total, sizeof(total));
                } else {
                    for (int64_t lane = first_lane; lane < N; ++lane) to[lane] += floats[lane];
                }
            }
}

// As `accumulate_slots`, for all slots, so many at once that their sums stay in registers.
template <typename Layout, int R, int N, int VECTORS, int FIRST = 0, typename Products>
inline void accumulate_vectors(const Products& products, const CodeRows<Products>& of, int64_t offset,
                               int64_t first_lane, float* acc, int64_t acc_stride) {
    constexpr int COUNT = std::min(Layout::SLOTS - FIRST, std::max(1, MOST_SUMS / (R * VECTORS)));
    accumulate_slots<Layout, R, N, VECTORS, FIRST>(products, of, offset, first_lane, acc, acc_stride,
                                                   std::make_integer_sequence<int, COUNT>{});
    if constexpr (FIRST + COUNT < Layout::SLOTS)
        accumulate_vectors<Layout, R, N, VECTORS, FIRST + COUNT>(products, of, offset, first_lane, acc, acc_stride);
}

// As `accumulate_slots`, for all columns. Rows have at least N bytes of the narrowest plane.
template <typename Layout, int R, int N, typename Products>
inline void accumulate_columns(const Products& products, const CodeRows<Products>& of, float* acc, int64_t acc_stride) {
    // No more vectors than a row of keys has in a block of 64 tokens.
    constexpr int VECTORS = std::max(1, std::min(MOST_SUMS / (R * Layout::SLOTS), 64 / (N * Layout::SLOTS)));
    const int64_t bytes = of.narrowest_bytes;
    int64_t offset = 0;
    if (of.shares_groups(VECTORS * N))
        for (; offset + VECTORS * N <= bytes; offset += VECTORS * N)
            accumulate_vectors<Layout, R, N, VECTORS>(products, of, offset, 0, acc, acc_stride);
    if constexpr (VECTORS > 1)
        for (; offset + N <= bytes; offset += N)
            accumulate_vectors<Layout, R, N, 1>(products, of, offset, 0, acc, acc_stride);
    if (offset < bytes)
        accumulate_vectors<Layout, R, N, 1>(products, of, bytes - N, offset - (bytes - N), acc, acc_stride);
}

// As `accumulate_columns`, for rows of few bytes.
template <typename Layout, int R, typename Meaning>
inline void accumulate_narrow(const Meaning& meaning, const CodeRows<FloatProducts<Meaning>>& of, float* acc,
                              int64_t acc_stride) {
    for (int64_t row = 0; row < of.rows; ++row)
        for (int64_t column = 0; column < of.columns; ++column) {
            const uint32_t code = Layout::code(of.codes + row * of.row_bytes, column, of.narrowest_bytes);
            const float value = meaning.template values<8>(WordLanes<8>{} + code)[0];
            const float* weights = of.weights + column / of.column_group * of.rows * R;
            for (int i = 0; i < R; ++i) acc[i * acc_stride + column] += weights[i * of.rows + row] * value;
        }
}

template <typename Layout, int R, typename Products>
void accumulate_layout(const Products& products, CodeRows<Products> of, float* acc, int64_t acc_stride) {
    of.narrowest_bytes = Layout::narrowest_bytes(of.columns);
#if defined(__AVX512F__)
    if (of.narrowest_bytes % 16 == 0 && of.shares_groups(16))
        return accumulate_columns<Layout, R, 16>(products, of, acc, acc_stride);
    if constexpr (Layout::SLOTS > 1)
        if (of.narrowest_bytes == 8 && (of.column_group >= of.columns || of.column_group % 16 == 0)) {
            of.narrowest_bytes = 16;
            return accumulate_columns<Folded<Layout>, R, 16>(products, of, acc, acc_stride);
        }
#endif
    if constexpr (std::is_same<typename Products::Rows, OneRow>::value)
        if (of.narrowest_bytes < 8) return accumulate_narrow<Layout, R>(products.meaning, of, acc, acc_stride);
    accumulate_columns<Layout, R, 8>(products, of, acc, acc_stride);
}

template <int R, typename Products>
void accumulate_integers(const Products& products, int64_t bits, const CodeRows<Products>& of, float* acc,
                         int64_t acc_stride) {
    switch (bits) {
        case 1: return accumulate_layout<Planes<1>, R>(products, of, acc, acc_stride);
        case 2: return accumulate_layout<Planes<2>, R>(products, of, acc, acc_stride);
        case 3: return accumulate_layout<Planes<2, 1>, R>(products, of, acc, acc_stride);
        case 4: return accumulate_layout<Planes<4>, R>(products, of, acc, acc_stride);
        case 5: return accumulate_layout<Planes<4, 1>, R>(products, of, acc, acc_stride);
        case 6: return accumulate_layout<Planes<4, 2>, R>(products, of, acc, acc_stride);
        case 8: return accumulate_layout<Planes<8>, R>(products, of, acc, acc_stride);
    }
}

template <int R>
void accumulate_levels(const FloatProducts<Codebook>& products, int64_t bits,
                       const CodeRows<FloatProducts<Codebook>>& of, float* acc, int64_t acc_stride) {
    switch (bits) {
        case 1: return accumulate_layout<Planes<1>, R>(products, of, acc, acc_stride);
        case 2: return accumulate_layout<Planes<2>, R>(products, of, acc, acc_stride);
        case 3: return accumulate_layout<Planes<2, 1>, R>(products, of, acc, acc_stride);
        case 4: return accumulate_layout<Planes<4>, R>(products, of, acc, acc_stride);
    }
}

// As `accumulate_slots`, with float weights, for rows from `codes` on.
template <int R>
void accumulate(const Side& side, const uint8_t* codes, int64_t row_bytes, int64_t rows, int64_t column_group,
                const float* weights, float* acc, int64_t acc_stride) {
    if (side.floating)
        return accumulate_layout<Planes<8>, R, FloatProducts<Float8>>(
            {}, {codes, row_bytes, rows, side.columns, 0, column_group, weights, rows}, acc, acc_stride);
    if (side.levels)
        return accumulate_levels<R>({Codebook(side.levels, side.bits)}, side.bits,
                                    {codes, row_bytes, rows, side.columns, 0, column_group, weights, rows}, acc,
                                    acc_stride);
    accumulate_integers<R, FloatProducts<Integer>>(
        {}, side.bits, {codes, row_bytes, rows, side.columns, 0, column_group, weights, rows}, acc, acc_stride);
}

int64_t padded_columns(const Side& side) { return side.bits == 8 ? side.columns : (side.columns + 7) / 8 * 8; }

// Whether columns that are read together always share a group, whatever the width of codes.
bool groups_hold_whole_vectors(const Side& side) {
    if (side.column_group >= side.columns) return true;
    return side.column_group % 8 == 0 && side.columns % 64 == 0;
}

// weights[i][row] = factors[i][row] * scale[row] for i < R, totals[i] = the sum over rows of factors[i][row] * zero[row],
// and highest[i] = the bits of the largest magnitude of a weight, or what it was before if that is more. Bits of
// magnitudes are in the order of magnitudes, infinity and NaN the highest.
template <int R>
void fold_scales(const float* factors, int64_t factor_stride, const float* scale, const float* zero, int64_t rows,
                 float* weights, float* totals, int32_t* highest) {
    Register sums[R] = {};
    IntRegister magnitudes[R] = {};
    int64_t row = 0;
    for (; row + WIDTH <= rows; row += WIDTH) {
        const Register scales = load_register(scale + row), zeros = load_register(zero + row);
#pragma GCC unroll 4
        for (int i = 0; i < R; ++i) {
            const Register factor = load_register(factors + i * factor_stride + row), weight = factor * scales;
            store_register(weights + i * rows + row, weight);
            sums[i] += factor * zeros;
            const IntRegister magnitude = (IntRegister)weight & 0x7fffffff;
            magnitudes[i] = magnitude > magnitudes[i] ? magnitude : magnitudes[i];
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i) {
        totals[i] = sum_of_lanes(sums[i]);
        highest[i] = std::max(highest[i], highest_lane(magnitudes[i]));
    }
    for (; row < rows; ++row)
        for (int i = 0; i < R; ++i) {
            const float factor = factors[i * factor_stride + row], weight = factor * scale[row];
            weights[i * rows + row] = weight;
            totals[i] += factor * zero[row];
            highest[i] = std::max<int32_t>(highest[i], bits_of(weight) & 0x7fffffff);
        }
}

struct Buffers {
    FloatBuffer weights, unit, parameters;
    std::vector<int32_t, LineAllocator<int32_t>> pairs;
};

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
constexpr float LARGEST_WEIGHT = 32767;

// Whether rows of codes of a side are wide enough for `PairProducts`, and the sum over all rows stays below 2^31.
bool fits_integers(const Side& side, int64_t rows) {
    const int64_t narrowest = side.bits & -side.bits, largest_code = (1 << side.bits) - 1;
    return !side.floating && !side.levels && padded_columns(side) * narrowest >= 64 &&
           largest_code * rows * int64_t(LARGEST_WEIGHT) <= INT32_MAX;
}

// Float weights [groups][R][rows], with 2 * WIDTH more floats behind them, as pairs of integers [groups][R][rows / 2],
// in units[i] for all groups of row i. `highest` is as in `fold_scales`.
// False if that is not possible: a weight is not finite, or those of a row are too small or too large.
template <int R>
bool round_to_pairs(const float* weights, const int32_t* highest, int64_t groups, int64_t rows, float* units,
                    Buffers& buffers) {
    float in_units[R];
    for (int i = 0; i < R; ++i) {
        const float magnitude = float_of(highest[i]);
        // A row of zeros, such as one that is masked, must not change how the others are multiplied.
        if (magnitude != 0 && !(magnitude > 1e-30f && magnitude < 1e30f)) return false;
        units[i] = magnitude / LARGEST_WEIGHT;
        in_units[i] = magnitude == 0 ? 0.0f : LARGEST_WEIGHT / magnitude;
    }
    const int64_t half = rows / 2;
    buffers.pairs.resize(groups * R * half + WIDTH);
    for (int64_t at = 0; at < groups * R; ++at)
        // The last store of a row may write past its end: the next row overwrites that.
        for (int64_t pair = 0; pair < half; pair += WIDTH) {
            const Pair rounded = parted(weights + at * rows + 2 * pair);
            const IntRegister first = nearest_integers(rounded.even * in_units[at % R]);
            const IntRegister second = nearest_integers(rounded.odd * in_units[at % R]);
            const IntRegister both = (first & 0xffff) | second << 16;
            std::memcpy(buffers.pairs.data() + at * half + pair, &both, sizeof(both));
        }
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
    // Fetches the parameters of the next block.
    for (const Parameter* at = given; at < given + 2 * count; at += LINE_BYTES / sizeof(Parameter))
        __builtin_prefetch(at + side.parameter_block);
    buffers.parameters.resize(2 * count);
    float *scale = buffers.parameters.data(), *zero = scale + count;
    read_parameters(given, row_groups, column_groups, scale);
    if (side.fixed_scales)
        for (int64_t group = 0; group < count; ++group) scale[group] *= side.fixed_scales[head];
    if (has_zero)
        read_parameters(given + count, row_groups, column_groups, zero);
    else
        std::fill(zero, zero + count, 0.0f);

    if (side.row_group == 1 && groups_hold_whole_vectors(side)) {
        // Each row has a scale for each group of its columns: the scales are folded into the factors.
        const int64_t rows = end - begin;
        buffers.weights.resize(column_groups * rows * R + 2 * WIDTH);
        float* weights = buffers.weights.data();
        int32_t highest[R] = {};
        for (int64_t group = 0; group < column_groups; ++group) {
            float totals[R];
            fold_scales<R>(factors + begin, factor_stride, scale + group * row_groups + begin,
                           zero + group * row_groups + begin, rows, weights + group * R * rows, totals, highest);
            if (!has_zero) continue;
            for (int i = 0; i < R; ++i) {
                float* to = acc + i * acc_stride + group * side.column_group;
                for (int64_t column = 0; column < side.column_group; ++column) to[column] += totals[i];
            }
        }
        const uint8_t* first = codes + begin * row_bytes;
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
        if constexpr (!std::is_same<Parameter, float>::value) {
            float units[R];
            if (rows % 2 == 0 && fits_integers(side, rows) &&
                round_to_pairs<R>(weights, highest, column_groups, rows, units, buffers))
                return accumulate_integers<R, PairProducts>(
                    {units}, side.bits,
                    {first, row_bytes, rows, side.columns, 0, side.column_group, buffers.pairs.data(), rows / 2}, acc,
                    acc_stride);
        }
#endif
        return accumulate<R>(side, first, row_bytes, rows, side.column_group, weights, acc, acc_stride);
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
        accumulate<R>(side, first, row_bytes, rows, side.columns, buffers.weights.data(), buffers.unit.data(), acc_stride);
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
