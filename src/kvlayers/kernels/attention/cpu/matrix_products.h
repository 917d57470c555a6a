// Products of matrices whose right side was packed: panels of columns, and within a panel one step of the sums after the
// other. A step is one number of a column, or two where the CPU multiplies pairs of bfloat16 numbers.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "../../../utils/vectors.h"

namespace {

constexpr int TILE_ROWS = 6;
// Their sums, the columns of a step and one row fit into the registers of AVX-512, or of AVX2.
constexpr int TILE_VECTORS = WIDTH == 16 ? 4 : 2;
constexpr int PANEL = TILE_VECTORS * WIDTH;  // columns; a multiple of LANES

// Memory for numbers that are all written before they are read.
template <typename Number>
struct Uninitialised {
    const std::size_t count;
    Number* const data;

    explicit Uninitialised(std::size_t count) : count(count), data(LineAllocator<Number>().allocate(count)) {}
    Uninitialised(const Uninitialised&) = delete;
    ~Uninitialised() { LineAllocator<Number>().deallocate(data, count); }
};

template <typename Number>
struct Multiplier;

template <>
struct Multiplier<float> {
    static constexpr int PAIR = 1;
    typedef Register Vector;

    static inline Vector load_columns(const float* from) { return load_register(from); }
    static inline Vector spread_row(const float* from) { return spread(*from); }
    static inline Register add(Register sums, Vector row, Vector columns) { return sums + row * columns; }
    static inline void store(float* to, const Register* parts) {
        store_register(to, parts[0]);
        store_register(to + WIDTH, parts[1]);
    }
};

// How states are multiplied.
template <typename State>
struct Factor {
    typedef float Number;
    static inline float of(State state) { return to_float(state); }
};

#if defined(__AVX512BF16__)
template <>
struct Multiplier<BFloat16> {
    static constexpr int PAIR = 2;
    typedef __m512bh Vector;

    static inline Vector load_columns(const BFloat16* from) { return (Vector)_mm512_loadu_si512(from); }
    static inline Vector spread_row(const BFloat16* from) { return (Vector)_mm512_set1_epi32(load<int32_t>(from)); }
    static inline Register add(Register sums, Vector row, Vector columns) {
        return (Register)_mm512_dpbf16_ps((__m512)sums, row, columns);
    }
    static inline void store(BFloat16* to, const Register* parts) {
        const __m512bh numbers = _mm512_cvtne2ps_pbh((__m512)parts[1], (__m512)parts[0]);
        std::memcpy(to, &numbers, sizeof(numbers));
    }
};

template <>
struct Factor<BFloat16> {
    typedef BFloat16 Number;
    static inline BFloat16 of(BFloat16 state) { return state; }
};
#endif

// e^x for x <= 0, as exactly as a weight of this type needs it; 0 below -87, and NaN stays NaN.
template <typename Number>
inline Register weight_of(Register x) {
#if defined(__AVX512F__)
    const __m512 given = (__m512)x;
    const __mmask16 counts = _mm512_cmp_ps_mask(given, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(given, _mm512_set1_ps(1.44269504088896341f)),
                                          _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    Register r = x - (Register)n * 0.693145751953125f;
    r -= (Register)n * 1.42860682030941723e-6f;
    Register p;
    if constexpr (sizeof(Number) == 2) {
        p = 4.1657956e-2f * r + 1.6666637e-1f;
    } else {
        p = 1.9875691500e-4f * r + 1.3981999507e-3f;
        p = p * r + 8.3334519073e-3f;
        p = p * r + 4.1665795894e-2f;
        p = p * r + 1.6666665459e-1f;
    }
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return (Register)_mm512_maskz_scalef_ps(counts, (__m512)p, n);
#else
    return x == x ? exponential(x) : x;
#endif
}

template <int VECTORS, typename Number>
void multiply_tile(const Number* rows, int64_t row_stride, const Number* columns, int64_t steps, float* sums,
                   int64_t sum_stride, bool from_zero) {
    typedef Multiplier<Number> By;
    Register added[TILE_ROWS][VECTORS];
#pragma GCC unroll 8
    for (int row = 0; row < TILE_ROWS; ++row)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v)
            added[row][v] = from_zero ? Register{} : load_register(sums + row * sum_stride + v * WIDTH);
    for (int64_t step = 0; step < steps; ++step) {
        typename By::Vector of_step[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) of_step[v] = By::load_columns(columns + v * WIDTH * By::PAIR);
#pragma GCC unroll 8
        for (int row = 0; row < TILE_ROWS; ++row) {
            const typename By::Vector spread_over = By::spread_row(rows + row * row_stride + step * By::PAIR);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) added[row][v] = By::add(added[row][v], spread_over, of_step[v]);
        }
        columns += PANEL * By::PAIR;
    }
#pragma GCC unroll 8
    for (int row = 0; row < TILE_ROWS; ++row)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) store_register(sums + row * sum_stride + v * WIDTH, added[row][v]);
}

// Sums of products of rows, a multiple of TILE_ROWS, and `count` packed columns from `first` on, both multiples of LANES.
//
// The columns lie in panels of `panel_stride` numbers, each with at least `steps` steps.
template <typename Number>
void multiply(const Number* rows, int64_t row_stride, int64_t row_count, const Number* columns, int64_t panel_stride,
              int64_t steps, int64_t first, int64_t count, float* sums, int64_t sum_stride, bool from_zero) {
    for (int64_t column = first, end = first + count; column < end;) {
        const int64_t within = column % PANEL, width = std::min<int64_t>(PANEL - within, end - column);
        const Number* from = columns + column / PANEL * panel_stride + within * Multiplier<Number>::PAIR;
        float* to = sums + column - first;
        for (int64_t row = 0; row < row_count; row += TILE_ROWS) {
            const Number* some = rows + row * row_stride;
            float* row_sums = to + row * sum_stride;
            switch (width / WIDTH) {
                case 1: multiply_tile<1>(some, row_stride, from, steps, row_sums, sum_stride, from_zero); break;
                case 2: multiply_tile<2>(some, row_stride, from, steps, row_sums, sum_stride, from_zero); break;
                case 3: multiply_tile<std::min(3, TILE_VECTORS)>(some, row_stride, from, steps, row_sums, sum_stride, from_zero); break;
                case 4: multiply_tile<TILE_VECTORS>(some, row_stride, from, steps, row_sums, sum_stride, from_zero); break;
            }
        }
        column += width;
    }
}

// Numbers that a lane of a vector takes: one float, or two bfloat16 numbers in one word.
template <typename State>
inline Register lane_numbers(const State* from, int64_t count) {
    return load_first(from, count);
}

#if defined(__AVX512BF16__)
template <>
inline Register lane_numbers(const BFloat16* from, int64_t count) {
    const __mmask32 there = count >= 32 ? ~0u : (1u << count) - 1;
    return (Register)_mm512_maskz_loadu_epi16(there, from);
}
#endif

// Packs the keys of at most PANEL tokens, each at an address of its own, as columns, [key numbers][PANEL]. Missing tokens
// are zeros.
template <typename State>
void pack_keys(const State* const* keys, int64_t tokens, int64_t head_dim, typename Factor<State>::Number* to) {
    constexpr int64_t PAIR = Multiplier<typename Factor<State>::Number>::PAIR;
    for (int64_t channel = 0; channel < head_dim; channel += WIDTH * PAIR)
        for (int64_t token = 0; token < PANEL; token += WIDTH) {
            Register rows[WIDTH] = {};
            for (int64_t row = 0; row < std::min<int64_t>(WIDTH, tokens - token); ++row)
                rows[row] = lane_numbers(keys[token + row] + channel, head_dim - channel);
            transpose(rows);
            for (int64_t row = 0; row < std::min<int64_t>(WIDTH, (head_dim - channel + PAIR - 1) / PAIR); ++row)
                std::memcpy(to + (channel / PAIR + row) * PANEL * PAIR + token * PAIR, &rows[row], sizeof(Register));
        }
}

// Packs the values of at most PANEL tokens as steps of sums, [panels of channels][PANEL tokens][PANEL channels].
template <typename State>
void pack_values(const State* const* values, int64_t tokens, int64_t head_dim, typename Factor<State>::Number* to,
                 int64_t panel_stride) {
    typedef typename Factor<State>::Number Number;
    constexpr int64_t PAIR = Multiplier<Number>::PAIR;
    for (int64_t channel = 0; channel < head_dim; channel += WIDTH)
        for (int64_t token = 0; token < PANEL; token += PAIR) {
            Number* step = to + channel / PANEL * panel_stride + token * PANEL + channel % PANEL * PAIR;
            Register words = {};
            if (token < tokens) words = load_first(values[token] + channel, head_dim - channel);
            if constexpr (PAIR == 2) {
                Register second = {};
                if (token + 1 < tokens) second = load_first(values[token + 1] + channel, head_dim - channel);
                // A bfloat16 number is the upper half of a float.
                words = (Register)((IntRegister)second | ((IntRegister)words >> 16 & 0xffff));
            }
            std::memcpy(step, &words, sizeof(words));
        }
}

}  // namespace
