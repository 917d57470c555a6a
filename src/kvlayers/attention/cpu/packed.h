// Sums of packed codes times weights. Codes are multiplied as floats, or as integers on CPUs with AVX512-VNNI.

#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "../../utils/vectors.h"
#include "call.h"
#include "codes.h"

namespace {

// Vectors of sums that stay in registers beside the factors.
constexpr int MOST_SUMS = WIDTH == 16 ? 16 : 8;

// Rows that are multiplied at once. Their weights have this distance, whatever their number: compilers make offsets of a
// constant, where they would need a register for each row of weights.
constexpr int64_t ROWS_OF_WEIGHTS = 128;

// Products of float weights and of what codes stand for.
template <typename Meaning>
struct FloatProducts {
    typedef OneRow Rows;
    typedef float Weight;  // of a row
    static constexpr int PARTS = 1, ROWS_OF_WEIGHT = 1;
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
    inline FloatLanes<N> floats(const Lanes<N>* sums, int) const {
        return *sums;
    }
};

#if defined(MULTIPLIES_BYTES)
// Products of integers, of four rows at once. Weights are integers of 15 bits and a sign, in units of their own for each
// of the R rows of weights: their error is at most a 65,000th of the largest weight of a row, where states in half precision
// have errors of 2^-9 and 2^-12. Each is a low and a high byte with signs, because codes are multiplied as bytes.
struct QuadProducts {
    typedef FourRows Rows;
    typedef int32_t Weight;  // bytes of four rows
    static constexpr int PARTS = 2, ROWS_OF_WEIGHT = 4;
    template <int N>
    using Lanes = IntLanes<N>;

    const float* units;

    template <int N>
    inline Lanes<N> lanes(WordLanes<N> codes) const {
        return (Lanes<N>)codes;
    }

    template <int N>
    static inline Lanes<N> sum(Lanes<N> sums, Weight weight, Lanes<N> codes) {
        return (Lanes<N>)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(weight));
    }

    template <int N>
    inline FloatLanes<N> floats(const Lanes<N>* sums, int i) const {
        return __builtin_convertvector(sums[0] + (sums[1] << 8), FloatLanes<N>) * units[i];
    }
};
#endif

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

// Rows of codes, as all functions below see them.
template <typename Products>
struct CodeRows {
    const Columns& columns;
    const uint8_t* codes;
    int64_t count;
    const typename Products::Weight* weights;  // [groups of columns][weight_rows][PARTS][weights of ROWS_OF_WEIGHTS]
    const float* totals;  // [groups of columns][weight_rows], of weighted zeros
    int64_t weight_rows;
};

// The slot at DISTANCE from another one: a constant after a constant.
template <int DISTANCE, int SLOT>
constexpr std::integral_constant<int, SLOT + DISTANCE> slot_after(std::integral_constant<int, SLOT>) {
    return {};
}
template <int DISTANCE>
constexpr int slot_after(int slot) {
    return slot + DISTANCE;
}

// acc[i][column] += totals[group of column][i] + sum over rows of weights[group of column][i][row] * value[row][column], for
// i < R, in VECTORS vectors of bytes from `offset` and as many slots as SLOTS from `first`, all in one group. Lanes before
// `first_lane` were counted already.
template <typename Layout, int R, int N, int VECTORS, typename First, typename Products, int... SLOTS>
__attribute__((noinline)) void accumulate_slots(const Products& products, const CodeRows<Products>& of, int64_t offset,
                                                int64_t first_lane, float* acc, int64_t acc_stride, First first,
                                                std::integer_sequence<int, SLOTS...>) {
    constexpr int COUNT = sizeof...(SLOTS), PARTS = Products::PARTS;
    constexpr int64_t STRIDE = ROWS_OF_WEIGHTS / Products::ROWS_OF_WEIGHT;
    typedef typename Products::Rows Rows;
    typedef typename Products::template Lanes<N> Lanes;
    const Columns& columns = of.columns;
    const int64_t slot_columns = Layout::slot_columns(columns.narrowest_bytes);
    const int64_t weight_row = columns.group(first * slot_columns + offset) * of.weight_rows;
    const typename Products::Weight* weights = of.weights + weight_row * PARTS * STRIDE;
    const uint8_t* from = of.codes + offset;
    Lanes sums[R][VECTORS][COUNT][PARTS] = {};
    const int64_t count = of.count / Products::ROWS_OF_WEIGHT, step = Products::ROWS_OF_WEIGHT * columns.row_bytes;
    for (int64_t at = 0; at < count; ++at, from += step) {
        Rows::prefetch_ahead(from, columns.row_bytes);
#pragma GCC unroll 8
        for (int vector = 0; vector < VECTORS; ++vector) {
            const Lanes lanes[COUNT] = {products.template lanes<N>(Layout::template codes<Rows, N, VECTORS>(
                from, vector, columns.narrowest_bytes, columns.row_bytes, slot_after<SLOTS>(first)))...};
#pragma GCC unroll 8
            for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
                for (int slot = 0; slot < COUNT; ++slot)
#pragma GCC unroll 2
                    for (int part = 0; part < PARTS; ++part)
                        sums[i][vector][slot][part] = Products::template sum<N>(
                            sums[i][vector][slot][part], weights[(i * PARTS + part) * STRIDE + at], lanes[slot]);
        }
    }
    // Unrolled, because compilers keep sums in memory if a loop indexes them.
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
        for (int slot = 0; slot < COUNT; ++slot)
#pragma GCC unroll 8
            for (int vector = 0; vector < VECTORS; ++vector) {
                const FloatLanes<N> floats =
                    products.template floats<N>(sums[i][vector][slot], i) + of.totals[weight_row + i];
                float* to = acc + i * acc_stride + (first + slot) * slot_columns + offset + vector * N;
                if (first_lane == 0) {
                    const FloatLanes<N> total = load<FloatLanes<N>>(to) + floats;
                    std::memcpy(to, &total, sizeof(total));
                } else {
                    for (int64_t lane = first_lane; lane < N; ++lane) to[lane] += floats[lane];
                }
            }
}

// The largest power of two that is not above a number.
constexpr int power_of_two_within(int number) {
    int power = 1;
    while (2 * power <= number) power *= 2;
    return power;
}

// As `accumulate_slots`, for all slots, SLOTS at once. If these are not all, one function serves any of them: it takes the
// place of several, which would take long to compile, for an instruction more at each vector.
template <typename Layout, int R, int N, int VECTORS, int SLOTS, typename Products>
inline void accumulate_vectors(const Products& products, const CodeRows<Products>& of, int64_t offset,
                               int64_t first_lane, float* acc, int64_t acc_stride) {
    constexpr int COUNT = power_of_two_within(std::min(Layout::SLOTS, SLOTS));
    constexpr auto TOGETHER = std::make_integer_sequence<int, COUNT>{};
    if constexpr (COUNT == Layout::SLOTS)
        accumulate_slots<Layout, R, N, VECTORS>(products, of, offset, first_lane, acc, acc_stride,
                                                std::integral_constant<int, 0>{}, TOGETHER);
    else
        for (int first = 0; first < Layout::SLOTS; first += COUNT)
            accumulate_slots<Layout, R, N, VECTORS>(products, of, offset, first_lane, acc, acc_stride, first, TOGETHER);
}

// As `accumulate_slots`, for all columns, in so many slots at once that sums stay in registers: at most MOST_SLOTS. Rows
// have at least N bytes of the narrowest plane.
template <typename Layout, int R, int N, int MOST_SLOTS, typename Products>
inline void accumulate_columns(const Products& products, const CodeRows<Products>& of, float* acc, int64_t acc_stride) {
    constexpr int MOST = MOST_SUMS / (R * Products::PARTS), SLOTS = std::min(MOST_SLOTS, MOST);
    // No more vectors than a row of keys has in a block of 64 tokens.
    constexpr int VECTORS = std::max(1, std::min(MOST / MOST_SLOTS, 64 / (N * Layout::SLOTS)));
    const int64_t bytes = Layout::slot_columns(of.columns.narrowest_bytes);
    int64_t offset = 0;
    if (of.columns.share_groups(VECTORS * N))
        for (; offset + VECTORS * N <= bytes; offset += VECTORS * N)
            accumulate_vectors<Layout, R, N, VECTORS, SLOTS>(products, of, offset, 0, acc, acc_stride);
    if constexpr (VECTORS > 1)
        for (; offset + N <= bytes; offset += N)
            accumulate_vectors<Layout, R, N, 1, SLOTS>(products, of, offset, 0, acc, acc_stride);
    if (offset < bytes)
        accumulate_vectors<Layout, R, N, 1, SLOTS>(products, of, bytes - N, offset - (bytes - N), acc, acc_stride);
}

// As `accumulate_columns`, in several slots at once if all columns share a group.
template <typename Layout, int R, int N, typename Products>
inline void accumulate_groups(const Products& products, const CodeRows<Products>& of, float* acc, int64_t acc_stride) {
    if (of.columns.is_one_group())
        accumulate_columns<Layout, R, N, Layout::SLOTS>(products, of, acc, acc_stride);
    else
        accumulate_columns<Layout, R, N, 1>(products, of, acc, acc_stride);
}

// As `accumulate_columns`, for rows of few bytes.
template <typename Layout, int R, typename Meaning>
inline void accumulate_narrow(const Meaning& meaning, const CodeRows<FloatProducts<Meaning>>& of, float* acc,
                              int64_t acc_stride) {
    const Columns& columns = of.columns;
    for (int64_t column = 0; column < columns.count; ++column)
        for (int i = 0; i < R; ++i) acc[i * acc_stride + column] += of.totals[columns.group(column) * of.weight_rows + i];
    for (int64_t row = 0; row < of.count; ++row)
        for (int64_t column = 0; column < columns.count; ++column) {
            const uint32_t code = Layout::code(of.codes + row * columns.row_bytes, column, columns.narrowest_bytes);
            const float value = meaning.template values<8>(WordLanes<8>{} + code)[0];
            const float* weights = of.weights + columns.group(column) * of.weight_rows * ROWS_OF_WEIGHTS;
            for (int i = 0; i < R; ++i) acc[i * acc_stride + column] += weights[i * ROWS_OF_WEIGHTS + row] * value;
        }
}

template <typename Layout, int R, typename Products>
void accumulate_layout(const Products& products, const CodeRows<Products>& of, float* acc, int64_t acc_stride) {
#if defined(__AVX512F__)
    if (of.columns.fill_wide()) return accumulate_groups<Layout, R, 16>(products, of, acc, acc_stride);
    if constexpr (Layout::SLOTS > 1)
        if (of.columns.fill_wide_twice())
            return accumulate_groups<Folded<Layout>, R, 16>(products, of, acc, acc_stride);
#endif
    if constexpr (Products::PARTS == 1) {
        if (of.columns.narrowest_bytes < 8) return accumulate_narrow<Layout, R>(products.meaning, of, acc, acc_stride);
        if constexpr (WIDTH == 8)
            accumulate_groups<Layout, R, 8>(products, of, acc, acc_stride);
        else
            // Rows that fill no register are rare, and compiling takes long: one function serves all numbers of rows.
            for (int i = 0; i < R; ++i)
                accumulate_groups<Layout, 1, 8>(
                    products, {of.columns, of.codes, of.count, of.weights + i * ROWS_OF_WEIGHTS, of.totals + i, of.weight_rows},
                    acc + i * acc_stride, acc_stride);
    }
}

template <int R, typename Products>
void accumulate_few_bits(const Products& products, int64_t bits, const CodeRows<Products>& of, float* acc,
                         int64_t acc_stride) {
    switch (bits) {
        case 1: return accumulate_layout<Planes<1>, R>(products, of, acc, acc_stride);
        case 2: return accumulate_layout<Planes<2>, R>(products, of, acc, acc_stride);
        case 3: return accumulate_layout<Planes<2, 1>, R>(products, of, acc, acc_stride);
    }
}

template <int R, typename Products>
void accumulate_many_bits(const Products& products, int64_t bits, const CodeRows<Products>& of, float* acc,
                          int64_t acc_stride) {
    switch (bits) {
        case 4: return accumulate_layout<Planes<4>, R>(products, of, acc, acc_stride);
        case 5: return accumulate_layout<Planes<4, 1>, R>(products, of, acc, acc_stride);
        case 6: return accumulate_layout<Planes<4, 2>, R>(products, of, acc, acc_stride);
        case 8: return accumulate_layout<Planes<8>, R>(products, of, acc, acc_stride);
    }
}

template <int R, typename Products>
void accumulate_integers(const Products& products, int64_t bits, const CodeRows<Products>& of, float* acc,
                         int64_t acc_stride) {
    if (bits < 4) return accumulate_few_bits<R>(products, bits, of, acc, acc_stride);
    accumulate_many_bits<R>(products, bits, of, acc, acc_stride);
}

// As `accumulate_slots`, with float weights.
template <int R>
void accumulate_floats(const Side& side, const Columns& columns, const uint8_t* codes, int64_t count, const float* weights,
                       const float* totals, float* acc, int64_t acc_stride) {
    if (side.floating)
        return accumulate_layout<Planes<8>, R, FloatProducts<Float8>>({}, {columns, codes, count, weights, totals, R}, acc,
                                                                      acc_stride);
    // A look-up in a register of 16 floats takes about as long as a conversion, so it serves rare integers as well.
    if (side.levels || (WIDTH == 16 && side.bits < 4)) {
        const FloatProducts<Codebook> products = {Codebook(side.levels ? side.levels : WHOLE_NUMBERS, side.bits)};
        const CodeRows<FloatProducts<Codebook>> of = {columns, codes, count, weights, totals, R};
        if (side.bits == 4) return accumulate_layout<Planes<4>, R>(products, of, acc, acc_stride);
        return accumulate_few_bits<R>(products, side.bits, of, acc, acc_stride);
    }
    const FloatProducts<Integer> products = {};
    const CodeRows<FloatProducts<Integer>> of = {columns, codes, count, weights, totals, R};
    if constexpr (WIDTH == 8)
        if (side.bits < 4) return accumulate_few_bits<R>(products, side.bits, of, acc, acc_stride);
    accumulate_many_bits<R>(products, side.bits, of, acc, acc_stride);
}

// Whether columns that are read together always share a group, whatever the width of codes.
bool groups_hold_whole_vectors(const Side& side) {
    if (side.column_group >= side.columns) return true;
    return side.column_group % 8 == 0 && side.columns % 64 == 0;
}

}  // namespace
