// Vectors of codes from rows of packed bytes, in the layout of `groups.py`.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../../../utils/vectors.h"
#include "products.h"

namespace {

template <int N>
struct Lanes {
    typedef float Floats __attribute__((vector_size(N * 4)));
    typedef int32_t Ints __attribute__((vector_size(N * 4)));
    typedef uint32_t Words __attribute__((vector_size(N * 4)));
    typedef uint8_t Bytes __attribute__((vector_size(N)));
};

template <int N>
using FloatLanes = typename Lanes<N>::Floats;
template <int N>
using IntLanes = typename Lanes<N>::Ints;
template <int N>
using WordLanes = typename Lanes<N>::Words;

// Bytes as words. Compilers turn this conversion into moves of single elements, so it is an intrinsic if there is one.
template <int N>
inline WordLanes<N> load_words(const uint8_t* from) {
#if defined(__AVX512F__)
    if constexpr (N == 16) return (WordLanes<N>)_mm512_cvtepu8_epi32(load<__m128i>(from));
#endif
#if defined(__AVX2__)
    if constexpr (N == 8) return (WordLanes<N>)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#endif
    return __builtin_convertvector(load<typename Lanes<N>::Bytes>(from), WordLanes<N>);
}

// N / 2 bytes as words, and the same bytes again.
template <int N>
inline WordLanes<N> load_words_twice(const uint8_t* from) {
    uint8_t bytes[N];
    std::memcpy(bytes, from, N / 2);
    std::memcpy(bytes + N / 2, from, N / 2);
    return load_words<N>(bytes);
}

// How many rows of codes a word holds: one, or four as its bytes, which are multiplied at once as integers. A number of
// adjacent `vectors` is read together, of which `load` returns the one at `vector`.
struct OneRow {
    static constexpr uint32_t IN_EACH = 1;

    template <int N, int VECTORS>
    static inline WordLanes<N> load(const uint8_t* from, int vector, int64_t) {
        return load_words<N>(from + vector * N);
    }

    template <int N>
    static inline WordLanes<N> load_twice(const uint8_t* from, int64_t) {
        return load_words_twice<N>(from);
    }

    static inline void prefetch_ahead(const uint8_t* from, int64_t) { ::prefetch_ahead(from); }
};

#if defined(MULTIPLIES_BYTES)
struct FourRows {
    static constexpr uint32_t IN_EACH = 0x01010101;

    template <int N, int VECTORS>
    static inline WordLanes<N> load(const uint8_t* from, int vector, int64_t row_bytes) {
        static_assert(N == 16);
        if constexpr (VECTORS % 2 == 0) {
            // Compilers read the rows of two adjacent vectors once.
            const uint8_t* of_two = from + vector / 2 * 2 * N;
            const __m512i first = rows_of_32(of_two, of_two + row_bytes);
            const __m512i second = rows_of_32(of_two + 2 * row_bytes, of_two + 3 * row_bytes);
            const __m512i words = vector % 2 ? _mm512_set_epi32(31, 23, 15, 7, 30, 22, 14, 6, 29, 21, 13, 5, 28, 20, 12, 4)
                                             : _mm512_set_epi32(27, 19, 11, 3, 26, 18, 10, 2, 25, 17, 9, 1, 24, 16, 8, 0);
            return (WordLanes<N>)columns_of_quarters(_mm512_permutex2var_epi32(first, words, second));
        } else {
            const uint8_t* of_one = from + vector * N;
            const __m512i rows = _mm512_inserti64x4(
                _mm512_castsi256_si512(rows_of_16(of_one, of_one + row_bytes)),
                rows_of_16(of_one + 2 * row_bytes, of_one + 3 * row_bytes), 1);
            const __m512i words = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
            return (WordLanes<N>)columns_of_quarters(_mm512_permutexvar_epi32(words, rows));
        }
    }

    template <int N>
    static inline WordLanes<N> load_twice(const uint8_t* from, int64_t row_bytes) {
        return (WordLanes<N>)_mm512_broadcast_i64x4(eight_columns(from, row_bytes));
    }

    static inline void prefetch_ahead(const uint8_t* from, int64_t row_bytes) {
        for (int row = 0; row < 4; ++row) ::prefetch_ahead(from + row * row_bytes);
    }

 private:
    static inline __m512i rows_of_32(const uint8_t* one, const uint8_t* other) {
        return _mm512_inserti64x4(_mm512_castsi256_si512(::load<__m256i>(one)), ::load<__m256i>(other), 1);
    }

    static inline __m256i rows_of_16(const uint8_t* one, const uint8_t* other) {
        return _mm256_inserti128_si256(_mm256_castsi128_si256(::load<__m128i>(one)), ::load<__m128i>(other), 1);
    }

    // Words with a byte of each row, of rows whose words follow each other in a quarter: [column][row] of [row][column].
    static inline __m128i bytes_of_columns() {
        return _mm_set_epi8(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    }

    static inline __m512i columns_of_quarters(__m512i words) {
        return _mm512_shuffle_epi8(words, _mm512_broadcast_i32x4(bytes_of_columns()));
    }

    static inline __m256i eight_columns(const uint8_t* from, int64_t row_bytes) {
        const __m256i rows = _mm256_set_epi64x(::load<int64_t>(from + 3 * row_bytes), ::load<int64_t>(from + 2 * row_bytes),
                                               ::load<int64_t>(from + row_bytes), ::load<int64_t>(from));
        const __m256i words = _mm256_permutevar8x32_epi32(rows, _mm256_set_epi32(7, 5, 3, 1, 6, 4, 2, 0));
        return _mm256_shuffle_epi8(words, _mm256_broadcastsi128_si256(bytes_of_columns()));
    }
};
#endif

// Codes in planes of some of their bits, the lowest bits first and the narrowest plane last. Columns are read in as many
// slots as a byte of the narrowest plane has: its column `j` of slot `s` is column `j + s * narrowest_bytes` of a row.
template <int... WIDTHS>
struct Planes;

template <int FIRST, int... OTHERS>
struct Planes<FIRST, OTHERS...> {
    static constexpr int WIDTH_COUNT = 1 + sizeof...(OTHERS);
    static constexpr int ALL_WIDTHS[WIDTH_COUNT] = {FIRST, OTHERS...};
    static constexpr int NARROWEST = ALL_WIDTHS[WIDTH_COUNT - 1];
    static constexpr int SLOTS = 8 / NARROWEST;

    static int64_t slot_columns(int64_t narrowest_bytes) { return narrowest_bytes; }

    // Codes of N columns of a slot, those of `vector` among VECTORS that are read together. `from` is the byte of the first
    // column of them all in the narrowest plane, if the row began with it.
    template <typename Rows, int N, int VECTORS, int PLANE = 0, int BELOW = 0, typename Slot>
    static inline WordLanes<N> codes(const uint8_t* from, int vector, int64_t narrowest_bytes, int64_t row_bytes,
                                     Slot slot) {
        constexpr int OF_PLANE = ALL_WIDTHS[PLANE], RATIO = OF_PLANE / NARROWEST;
        const uint8_t* of_plane = from + (BELOW / NARROWEST + slot % RATIO) * narrowest_bytes;
        WordLanes<N> words = Rows::template load<N, VECTORS>(of_plane, vector, row_bytes);
        words = moved<Rows, OF_PLANE, BELOW, RATIO>(words, slot);
        if constexpr (PLANE + 1 < WIDTH_COUNT)
            words |= codes<Rows, N, VECTORS, PLANE + 1, BELOW + OF_PLANE>(from, vector, narrowest_bytes, row_bytes, slot);
        return words;
    }

    // As `codes`, if the narrowest plane has N / 2 bytes: the N columns are those of two slots, 2 * slot and the next.
    template <typename Rows, int N, int PLANE = 0, int BELOW = 0, typename Slot>
    static inline WordLanes<N> codes_of_two(const uint8_t* from, int64_t row_bytes, Slot slot) {
        constexpr int OF_PLANE = ALL_WIDTHS[PLANE], RATIO = OF_PLANE / NARROWEST;
        constexpr uint32_t MASK = ((1u << OF_PLANE) - 1) * Rows::IN_EACH;
        const uint32_t lowest_of_first = 2 * slot / RATIO * OF_PLANE;
        const uint8_t* of_plane = from + (BELOW / NARROWEST + 2 * slot % RATIO) * (N / 2);
        WordLanes<N> words;
        if constexpr (RATIO == 1) {
            WordLanes<N> lowest;
            for (int lane = 0; lane < N; ++lane) lowest[lane] = lowest_of_first + lane / (N / 2) * OF_PLANE;
            words = Rows::template load_twice<N>(of_plane, row_bytes) >> lowest & MASK;
        } else {
            words = Rows::template load<N, 1>(of_plane, 0, row_bytes) >> lowest_of_first & MASK;
        }
        words = words << BELOW;
        if constexpr (PLANE + 1 < WIDTH_COUNT)
            words |= codes_of_two<Rows, N, PLANE + 1, BELOW + OF_PLANE>(from, row_bytes, slot);
        return words;
    }

    // The code of one column of a row.
    static inline uint32_t code(const uint8_t* row, int64_t column, int64_t narrowest_bytes) {
        uint32_t code = 0;
        for (int plane = 0, below = 0; plane < WIDTH_COUNT; ++plane) {
            const int width = ALL_WIDTHS[plane];
            const int64_t bytes = width / NARROWEST * narrowest_bytes;
            code |= (row[column % bytes] >> (column / bytes * width) & ((1u << width) - 1)) << below;
            row += bytes;
            below += width;
        }
        return code;
    }

 private:
    // The bits of a slot's codes that are in words of a plane, at their place in a code.
    template <typename Rows, int OF_PLANE, int BELOW, int RATIO, int SLOT, typename Words>
    static inline Words moved(Words words, std::integral_constant<int, SLOT>) {
        constexpr int LOWEST = SLOT / RATIO * OF_PLANE;
        if constexpr (LOWEST > BELOW) words = words >> (LOWEST - BELOW);
        if constexpr (LOWEST < BELOW) words = words << (BELOW - LOWEST);
        if constexpr (OF_PLANE < 8) words &= (((1u << OF_PLANE) - 1) << BELOW) * Rows::IN_EACH;
        return words;
    }

    template <typename Rows, int OF_PLANE, int BELOW, int RATIO, typename Words>
    static inline Words moved(Words words, int slot) {
        if constexpr (OF_PLANE < 8) words = words >> uint32_t(slot / RATIO * OF_PLANE);
        if constexpr (OF_PLANE < 8) words &= ((1u << OF_PLANE) - 1) * Rows::IN_EACH;
        return words << BELOW;
    }
};

// A layout whose slots are two slots of another one, which are too narrow for registers.
template <typename Layout>
struct Folded {
    static constexpr int SLOTS = Layout::SLOTS / 2;

    static int64_t slot_columns(int64_t narrowest_bytes) { return 2 * narrowest_bytes; }

    template <typename Rows, int N, int, typename Slot>
    static inline WordLanes<N> codes(const uint8_t* from, int, int64_t, int64_t row_bytes, Slot slot) {
        return Layout::template codes_of_two<Rows, N>(from, row_bytes, slot);
    }
};

// What codes stand for, before the scale.
struct Integer {
    template <int N>
    inline FloatLanes<N> values(WordLanes<N> codes) const {
        return __builtin_convertvector((typename Lanes<N>::Ints)codes, FloatLanes<N>);
    }
};

struct Float8 {
    // Exponent and fraction of e4m3 moved to those of a float, whose exponents are 120 higher.
    template <int N>
    inline FloatLanes<N> values(WordLanes<N> codes) const {
        typedef typename Lanes<N>::Ints Ints;
        const WordLanes<N> bits = ((codes & 0x80u) << 24) | ((codes & 0x7fu) << 20);
        const FloatLanes<N> scaled = (FloatLanes<N>)bits * 1.329227995784916e36f;
        const Ints is_nan = (Ints)(codes & 0x7fu) == 0x7f;
        return (FloatLanes<N>)((Ints)scaled | (is_nan & 0x7fc00000));
    }
};

constexpr float WHOLE_NUMBERS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Levels of a codebook, looked up in registers: two of 8 floats, or one of 16.
struct Codebook {
    float levels[16] = {};

    Codebook(const float* from, int64_t bits) { std::memcpy(levels, from, sizeof(float) << bits); }

    template <int N>
    inline FloatLanes<N> values(WordLanes<N> codes) const {
#if defined(__AVX512F__)
        if constexpr (N == 16) return (FloatLanes<N>)_mm512_permutexvar_ps((__m512i)codes, _mm512_loadu_ps(levels));
#endif
#if defined(__AVX2__)
        if constexpr (N == 8) {
            const __m256i at = (__m256i)codes;
            const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(levels), at);
            const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(levels + 8), at);
            return (FloatLanes<N>)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(at, 28)));
        }
#endif
        FloatLanes<N> found;
        for (int lane = 0; lane < N; ++lane) found[lane] = levels[codes[lane]];
        return found;
    }
};

}  // namespace
