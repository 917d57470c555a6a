// Sums of packed codes times weights. Codes are multiplied as floats, or as integers on CPUs with AVX512-VNNI.

#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>

#include "../../../utils/vectors.h"
#include "codes.h"
#include "products.h"

namespace {

// Vectors of sums that stay in registers beside the factors.
constexpr int MOST_SUMS = WIDTH == 16 ? 16 : 8;

// Products of float weights and of what codes stand for.
template <typename Meaning>
struct FloatProducts {
    typedef OneRow Rows;
    typedef float Weight;  // of a row
    static constexpr int PARTS = 1, ROWS_OF_WEIGHT = 1;
    template <int N>
    using Lanes = FloatLanes<N>;

    Meaning meaning;

    static const Weight* weights(const Multiplication& of) { return of.weights; }

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

    static const Weight* weights(const Multiplication& of) { return (const Weight*)of.quads; }

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
__attribute__((noinline)) void accumulate_slots(const Products& products, const Multiplication& of, int64_t offset,
                                                int64_t first_lane, First first, std::integer_sequence<int, SLOTS...>) {
    constexpr int COUNT = sizeof...(SLOTS), PARTS = Products::PARTS;
    constexpr int64_t STRIDE = ROWS_OF_WEIGHTS / Products::ROWS_OF_WEIGHT;
    typedef typename Products::Rows Rows;
    typedef typename Products::template Lanes<N> Lanes;
    const Columns& columns = of.columns;
    const int64_t slot_columns = Layout::slot_columns(columns.narrowest_bytes);
    const int64_t weight_row = columns.group(first * slot_columns + offset) * of.rows;
    const typename Products::Weight* weights = Products::weights(of) + weight_row * PARTS * STRIDE;
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
                float* to = of.acc + i * of.acc_stride + (first + slot) * slot_columns + offset + vector * N;
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
inline void accumulate_vectors(const Products& products, const Multiplication& of, int64_t offset, int64_t first_lane) {
    constexpr int COUNT = power_of_two_within(std::min(Layout::SLOTS, SLOTS));
    constexpr auto TOGETHER = std::make_integer_sequence<int, COUNT>{};
    if constexpr (COUNT == Layout::SLOTS)
        accumulate_slots<Layout, R, N, VECTORS>(products, of, offset, first_lane, std::integral_constant<int, 0>{},
                                                TOGETHER);
    else
        for (int first = 0; first < Layout::SLOTS; first += COUNT)
            accumulate_slots<Layout, R, N, VECTORS>(products, of, offset, first_lane, first, TOGETHER);
}

// As `accumulate_slots`, for all columns, in so many slots at once that sums stay in registers: at most MOST_SLOTS. Rows
// have at least N bytes of the narrowest plane.
template <typename Layout, int R, int N, int MOST_SLOTS, typename Products>
inline void accumulate_columns(const Products& products, const Multiplication& of) {
    constexpr int MOST = MOST_SUMS / (R * Products::PARTS), SLOTS = std::min(MOST_SLOTS, MOST);
    // No more vectors than a row of keys has in a block of 64 tokens.
    constexpr int VECTORS = std::max(1, std::min(MOST / MOST_SLOTS, 64 / (N * Layout::SLOTS)));
    const int64_t bytes = Layout::slot_columns(of.columns.narrowest_bytes);
    int64_t offset = 0;
    if (of.columns.share_groups(VECTORS * N))
        for (; offset + VECTORS * N <= bytes; offset += VECTORS * N)
            accumulate_vectors<Layout, R, N, VECTORS, SLOTS>(products, of, offset, 0);
    if constexpr (VECTORS > 1)
        for (; offset + N <= bytes; offset += N)
            accumulate_vectors<Layout, R, N, 1, SLOTS>(products, of, offset, 0);
    if (offset < bytes)
        accumulate_vectors<Layout, R, N, 1, SLOTS>(products, of, bytes - N, offset - (bytes - N));
}

// As `accumulate_columns`, in several slots at once if all columns share a group.
template <typename Layout, int R, int N, typename Products>
inline void accumulate_groups(const Products& products, const Multiplication& of) {
    if (of.columns.is_one_group())
        accumulate_columns<Layout, R, N, Layout::SLOTS>(products, of);
    else
        accumulate_columns<Layout, R, N, 1>(products, of);
}

// As `accumulate_columns`, for rows of few bytes.
template <typename Layout, int R, typename Meaning>
inline void accumulate_narrow(const Meaning& meaning, const Multiplication& of) {
    const Columns& columns = of.columns;
    for (int64_t column = 0; column < columns.count; ++column)
        for (int i = 0; i < R; ++i) of.acc[i * of.acc_stride + column] += of.totals[columns.group(column) * of.rows + i];
    for (int64_t row = 0; row < of.count; ++row)
        for (int64_t column = 0; column < columns.count; ++column) {
            const uint32_t code = Layout::code(of.codes + row * columns.row_bytes, column, columns.narrowest_bytes);
            const float value = meaning.template values<8>(WordLanes<8>{} + code)[0];
            const float* weights = of.weights + columns.group(column) * of.rows * ROWS_OF_WEIGHTS;
            for (int i = 0; i < R; ++i) of.acc[i * of.acc_stride + column] += weights[i * ROWS_OF_WEIGHTS + row] * value;
        }
}

template <typename Layout, int R, typename Products>
void accumulate_layout(const Products& products, const Multiplication& of) {
#if defined(__AVX512F__)
    if (of.columns.fill_wide()) return accumulate_groups<Layout, R, 16>(products, of);
    if constexpr (Layout::SLOTS > 1)
        if (of.columns.fill_wide_twice())
            return accumulate_groups<Folded<Layout>, R, 16>(products, of);
#endif
    if constexpr (Products::PARTS == 1) {
        if (of.columns.narrowest_bytes < 8) return accumulate_narrow<Layout, R>(products.meaning, of);
        if constexpr (WIDTH == 8)
            accumulate_groups<Layout, R, 8>(products, of);
        else
            // Rows that fill no register are rare, and compiling takes long: one function serves all numbers of rows.
            for (int i = 0; i < R; ++i) {
                Multiplication of_row = of;
                of_row.weights += i * ROWS_OF_WEIGHTS;
                of_row.totals += i;
                of_row.acc += i * of.acc_stride;
                accumulate_groups<Layout, 1, 8>(products, of_row);
            }
    }
}

// Whole numbers, by quads where there are some.
template <typename Layout, int R>
void multiply_integers(const Multiplication& of) {
#if defined(MULTIPLIES_BYTES)
    if (of.quads) return accumulate_layout<Layout, R>(QuadProducts{of.units}, of);
#endif
    accumulate_layout<Layout, R>(FloatProducts<Integer>(), of);
}

// Calls `work.template rows<R>()` for the R rows of weights.
template <typename Work>
inline void with_rows(int rows, Work work) {
    switch (rows) {
        case 1: return work.template rows<1>();
        case 2: return work.template rows<2>();
        case 3: return work.template rows<3>();
        case 4: return work.template rows<4>();
    }
}

}  // namespace
