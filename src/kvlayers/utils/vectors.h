// Vectors of floats, of integers and of half-precision numbers, and what they have in common on every machine.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;
constexpr int64_t LINE_BYTES = 64;

inline int64_t rounded_up(int64_t number) { return (number + LANES - 1) / LANES * LANES; }

// Memory that begins with a line of the cache: a load of a register that crosses two lines takes twice the time.
template <typename Element>
struct LineAllocator {
    typedef Element value_type;

    LineAllocator() = default;
    template <typename Other>
    LineAllocator(const LineAllocator<Other>&) {}

    Element* allocate(std::size_t count) {
        return static_cast<Element*>(::operator new(count * sizeof(Element), std::align_val_t(LINE_BYTES)));
    }
    void deallocate(Element* memory, std::size_t) { ::operator delete(memory, std::align_val_t(LINE_BYTES)); }
    bool operator==(const LineAllocator&) const { return true; }
    bool operator!=(const LineAllocator&) const { return false; }
};

typedef std::vector<float, LineAllocator<float>> FloatBuffer;

constexpr int64_t BYTES_AHEAD = 8192;  // two pages of memory: the prefetcher of a CPU begins anew with each

// Fetches what is read soon if memory is read in its order.
inline void prefetch_ahead(const void* from) { __builtin_prefetch((const char*)from + BYTES_AHEAD); }

template <typename Vector, typename Element>
inline Vector load(const Element* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof(vector));
    return vector;
}

struct BFloat16 {
    uint16_t bits;
};

struct Float16 {
    uint16_t bits;
};

inline uint32_t bits_of(float number) {
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof(bits));
    return bits;
}

inline float float_of(uint32_t bits) {
    float number;
    std::memcpy(&number, &bits, sizeof(number));
    return number;
}

inline float to_float(float number) { return number; }

inline float to_float(BFloat16 number) { return float_of(uint32_t(number.bits) << 16); }

constexpr float FLOAT16_TO_FLOAT = 5.192296858534828e33f;  // 2^112, the distance of the exponents

inline float to_float(Float16 number) {
    const uint32_t magnitude = uint32_t(number.bits & 0x7fff) << 13, sign = uint32_t(number.bits & 0x8000) << 16;
    const bool is_finite = (number.bits & 0x7c00) != 0x7c00;
    return float_of((is_finite ? bits_of(float_of(magnitude) * FLOAT16_TO_FLOAT) : magnitude | 0x7f800000) | sign);
}

inline void from_float(float number, float* to) { *to = number; }

inline void from_float(float number, BFloat16* to) {
    const uint32_t bits = bits_of(number);
    if ((bits & 0x7fffffff) > 0x7f800000)
        to->bits = 0x7fc0;
    else
        to->bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void from_float(float number, Float16* to) {
    const uint32_t bits = bits_of(number), magnitude = bits & 0x7fffffff;
    uint32_t half;
    if (magnitude > 0x7f800000)
        half = 0x7e00;
    else if (magnitude >= 0x477ff000)  // rounds to 65536, or beyond
        half = 0x7c00;
    else if (magnitude < 0x38800000)  // below 2^-14: the last bits of a sum with 0.5 are those of a subnormal number
        half = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;
    else
        half = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    to->bits = uint16_t(half | (bits >> 16 & 0x8000));
}

// Vectors as wide as registers are. Sums of several rows and tokens must stay in registers, and compilers compare wider
// vectors element by element.
#ifdef __AVX512F__
constexpr int WIDTH = 16;
#else
constexpr int WIDTH = 8;
#endif

typedef float Register __attribute__((vector_size(WIDTH * 4)));
typedef int32_t IntRegister __attribute__((vector_size(WIDTH * 4)));

inline Register load_register(const float* from) { return load<Register>(from); }

inline Register load_register(const BFloat16* from) {
#if defined(__AVX512F__)
    return (Register)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(from)), 16);
#elif defined(__AVX2__)
    const __m128i halves = load<__m128i>(from);
    return (Register)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
#else
    typedef uint16_t Narrow __attribute__((vector_size(WIDTH * 2)));
    typedef uint32_t Wide __attribute__((vector_size(WIDTH * 4)));
    return (Register)(__builtin_convertvector(load<Narrow>(from), Wide) << 16);
#endif
}

inline Register load_register(const Float16* from) {
#if defined(__AVX512F__)
    return (Register)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__F16C__)
    return (Register)_mm256_cvtph_ps(load<__m128i>(from));
#else
    Register states;
    for (int lane = 0; lane < WIDTH; ++lane) states[lane] = to_float(from[lane]);
    return states;
#endif
}

// The first `count` numbers, and zeros in the other lanes.
template <typename State>
inline Register load_first(const State* from, int64_t count) {
    if (count >= WIDTH) return load_register(from);
    State numbers[WIDTH] = {};
    std::copy(from, from + count, numbers);
    return load_register(numbers);
}

inline void store_register(float* to, Register vector) { std::memcpy(to, &vector, sizeof(vector)); }

// Zeros from `to` on, at least `count`: up to a multiple of WIDTH.
inline void fill_zeros(float* to, int64_t count) {
    for (int64_t at = 0; at < count; at += WIDTH) store_register(to + at, Register{});
}

inline Register spread(float number) { return number - Register{}; }

// Compilers make two instructions of `a < b ? a : b`, where there is one that does the same.
inline Register lower(Register a, Register b) {
#if defined(__AVX512F__)
    return (Register)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Register)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return a < b ? a : b;
#endif
}

inline Register higher(Register a, Register b) {
#if defined(__AVX512F__)
    return (Register)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Register)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

// The whole numbers nearest to numbers between -2^22 and 2^22, halves to even.
inline Register nearest(Register numbers) {
#if defined(__AVX512F__)
    return (Register)_mm512_roundscale_ps((__m512)numbers, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
    return (Register)_mm256_round_ps((__m256)numbers, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const Register shifter = spread(12582912.0f);
    return (numbers + shifter) - shifter;
#endif
}

// The lanes PLACE of two vectors, of which those of the second have places from its width on.
template <int... PLACE, typename Vector>
inline Vector lanes_of(Vector first, Vector second) {
#ifdef __clang__
    return __builtin_shufflevector(first, second, PLACE...);
#else
    return __builtin_shuffle(first, second, decltype(first < second){PLACE...});
#endif
}

// The first rows and columns of a step of `transpose`: places where the bit STRIDE is set change with those where it isn't.
template <int STRIDE, typename Vector, int... LANE>
inline void exchange(Vector* rows, std::integer_sequence<int, LANE...>) {
#pragma GCC unroll 16
    for (int row = 0; row < WIDTH; ++row)
        if (!(row & STRIDE)) {
            const Vector one = rows[row], other = rows[row + STRIDE];
            rows[row] = lanes_of<(LANE & STRIDE ? WIDTH + LANE - STRIDE : LANE)...>(one, other);
            rows[row + STRIDE] = lanes_of<(LANE & STRIDE ? WIDTH + LANE : LANE + STRIDE)...>(one, other);
        }
}

// Makes rows of columns. There are WIDTH rows of as many lanes.
template <typename Vector>
inline void transpose(Vector* rows) {
    const auto lanes = std::make_integer_sequence<int, WIDTH>();
    exchange<1>(rows, lanes);
    exchange<2>(rows, lanes);
    exchange<4>(rows, lanes);
    if constexpr (WIDTH > 8) exchange<WIDTH / 2>(rows, lanes);
}

// Finite numbers, as a dtype holds them.
template <typename State>
inline Register rounded_to(Register numbers) {
    State rounded[WIDTH];
    for (int lane = 0; lane < WIDTH; ++lane) from_float(numbers[lane], &rounded[lane]);
    return load_register(rounded);
}

template <>
inline Register rounded_to<float>(Register numbers) {
    return numbers;
}

template <>
inline Register rounded_to<BFloat16>(Register numbers) {
    const IntRegister bits = (IntRegister)numbers;
    return (Register)((bits + 0x7fff + ((bits >> 16) & 1)) & int32_t(0xffff0000));
}

// Integers below 256 as bytes.
inline void store_bytes(uint8_t* to, IntRegister numbers) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)numbers));
#elif defined(__AVX2__)
    const __m256i all = (__m256i)numbers;
    const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    _mm_storel_epi64((__m128i*)to, _mm_packus_epi16(halves, halves));
#else
    typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));
    const Bytes bytes = __builtin_convertvector(numbers, Bytes);
    std::memcpy(to, &bytes, sizeof(bytes));
#endif
}

// Numbers in even places, numbers in odd places.
struct Pair {
    Register even, odd;
};

#if defined(__AVX512F__)
inline Pair parted(const float* from) {
    const __m512i evens = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    const __m512 low = load<__m512>(from), high = load<__m512>(from + WIDTH);
    const __m512i odds = _mm512_add_epi32(evens, _mm512_set1_epi32(1));
    return {(Register)_mm512_permutex2var_ps(low, evens, high), (Register)_mm512_permutex2var_ps(low, odds, high)};
}

inline void store_joined(float* to, Pair pair) {
    const __m512i first = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    store_register(to, (Register)_mm512_permutex2var_ps((__m512)pair.even, first, (__m512)pair.odd));
    store_register(to + WIDTH, (Register)_mm512_permutex2var_ps((__m512)pair.even, second, (__m512)pair.odd));
}
#elif defined(__AVX2__)
inline Pair parted(const float* from) {
    const __m256 low = load<__m256>(from), high = load<__m256>(from + WIDTH);
    const __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(low, high, 0x88));
    const __m256d odd = _mm256_castps_pd(_mm256_shuffle_ps(low, high, 0xdd));
    return {(Register)_mm256_permute4x64_pd(even, 0xd8), (Register)_mm256_permute4x64_pd(odd, 0xd8)};
}

inline void store_joined(float* to, Pair pair) {
    const __m256 low = _mm256_unpacklo_ps((__m256)pair.even, (__m256)pair.odd);
    const __m256 high = _mm256_unpackhi_ps((__m256)pair.even, (__m256)pair.odd);
    store_register(to, (Register)_mm256_permute2f128_ps(low, high, 0x20));
    store_register(to + WIDTH, (Register)_mm256_permute2f128_ps(low, high, 0x31));
}
#else
inline Pair parted(const float* from) {
    Pair pair;
    for (int lane = 0; lane < WIDTH; ++lane) {
        pair.even[lane] = from[2 * lane];
        pair.odd[lane] = from[2 * lane + 1];
    }
    return pair;
}

inline void store_joined(float* to, Pair pair) {
    for (int lane = 0; lane < WIDTH; ++lane) {
        to[2 * lane] = pair.even[lane];
        to[2 * lane + 1] = pair.odd[lane];
    }
}
#endif

// A word holds two numbers, and a float is a bfloat16 with 16 more bits: one instruction makes each of them a float,
// where one number after the other takes two.
inline Pair load_pair(const BFloat16* from) {
    typedef uint32_t WordRegister __attribute__((vector_size(WIDTH * 4)));
    const WordRegister words = load<WordRegister>(from);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    return {(Register)(words << 16), (Register)(words & 0xffff0000u)};
#else
    return {(Register)(words & 0xffff0000u), (Register)(words << 16)};
#endif
}

inline float sum_of_lanes(Register vector) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)vector);
#else
    for (int half = WIDTH / 2; half; half /= 2)
        for (int lane = 0; lane < half; ++lane) vector[lane] += vector[lane + half];
    return vector[0];
#endif
}

inline float highest_lane(Register vector) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)vector);
#else
    for (int half = WIDTH / 2; half; half /= 2)
        for (int lane = 0; lane < half; ++lane) vector[lane] = std::max(vector[lane], vector[lane + half]);
    return vector[0];
#endif
}

inline int32_t highest_lane(IntRegister vector) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)vector);
#else
    for (int half = WIDTH / 2; half; half /= 2)
        for (int lane = 0; lane < half; ++lane) vector[lane] = std::max(vector[lane], vector[lane + half]);
    return vector[0];
#endif
}

inline IntRegister higher(IntRegister a, IntRegister b) { return a > b ? a : b; }

// Two vectors of half the lanes each: lanes where the bit STRIDE isn't set are of the first one.
template <int STRIDE, typename Vector, typename Join, int... LANE>
inline Vector halved(Vector first, Vector second, Join join, std::integer_sequence<int, LANE...>) {
    return join(lanes_of<(LANE & STRIDE ? WIDTH + LANE - STRIDE : LANE)...>(first, second),
                lanes_of<(LANE & STRIDE ? WIDTH + LANE : LANE + STRIDE)...>(first, second));
}

// All lanes of each of COUNT vectors joined to one, at once. COUNT is at most 4.
template <int COUNT, typename Vector, typename Element, typename Join>
__attribute__((always_inline)) inline void join_lanes(const Vector* vectors, Element* to, Join join) {
    constexpr int HALF = WIDTH / 2, QUARTER = WIDTH / 4;
    const auto lanes = std::make_integer_sequence<int, WIDTH>();
    const Vector pair = halved<HALF>(vectors[0], vectors[COUNT > 1 ? 1 : 0], join, lanes);
    const Vector other = COUNT > 2 ? halved<HALF>(vectors[COUNT > 2 ? 2 : 0], vectors[COUNT > 3 ? 3 : 0], join, lanes) : pair;
    Vector joined = halved<QUARTER>(pair, other, join, lanes);
    if constexpr (WIDTH > 8) joined = halved<2>(joined, joined, join, lanes);
    joined = halved<1>(joined, joined, join, lanes);
    for (int i = 0; i < COUNT; ++i) to[i] = joined[i % 2 * HALF + i / 2 * QUARTER];
}

template <int COUNT>
inline void sums_of_lanes(const Register* vectors, float* to) {
    join_lanes<COUNT>(vectors, to, [](Register a, Register b) { return a + b; });
}

template <int COUNT>
inline void highest_lanes(const IntRegister* vectors, int32_t* to) {
    join_lanes<COUNT>(vectors, to, [](IntRegister a, IntRegister b) { return higher(a, b); });
}

// The sums of WIDTH vectors, in their order.
inline Register sums_of_registers(const Register* vectors) {
#if defined(__AVX512F__)
    __m512 quarters[4];
    for (int i = 0; i < 4; ++i) {
        const __m512* from = (const __m512*)vectors + 4 * i;
        const __m512 low = _mm512_add_ps(_mm512_unpacklo_ps(from[0], from[1]), _mm512_unpackhi_ps(from[0], from[1]));
        const __m512 high = _mm512_add_ps(_mm512_unpacklo_ps(from[2], from[3]), _mm512_unpackhi_ps(from[2], from[3]));
        const __m512d a = _mm512_castps_pd(low), b = _mm512_castps_pd(high);
        quarters[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    __m512 halves[2];
    for (int i = 0; i < 2; ++i)
        halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(quarters[2 * i], quarters[2 * i + 1], 0x88),
                                  _mm512_shuffle_f32x4(quarters[2 * i], quarters[2 * i + 1], 0xdd));
    return (Register)_mm512_add_ps(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                                 _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
#elif defined(__AVX2__)
    const __m256* from = (const __m256*)vectors;
    const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(from[0], from[1]), _mm256_hadd_ps(from[2], from[3]));
    const __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(from[4], from[5]), _mm256_hadd_ps(from[6], from[7]));
    return (Register)_mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
#else
    Register sums = {};
    for (int i = 0; i < WIDTH; ++i)
        for (int lane = 0; lane < WIDTH; ++lane) sums[i] += vectors[i][lane];
    return sums;
#endif
}

// The integers nearest to numbers between -2^22 and 2^22: their bits in the fraction of a float that has no smaller ones.
inline IntRegister nearest_integers(Register numbers) {
    const Register shifter = 12582912.0f - Register{};
    return (IntRegister)(numbers + shifter) - (IntRegister)shifter;
}

// e^x for x <= 0, to within two units in the last place; 0 below -87.
inline Register exponential(Register x) {
    const IntRegister tiny = x < -87.0f;
    x = (Register)((~tiny & (IntRegister)x));
    const Register shifter = 12582912.0f - Register{};
    Register n = x * 1.44269504088896341f + shifter;
    const IntRegister exponent = (IntRegister)n << 23;
    n -= shifter;
    Register r = x - n * 0.693145751953125f;
    r -= n * 1.42860682030941723e-6f;
    Register p = 1.9875691500e-4f - Register{};
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const IntRegister bits = (IntRegister)p + exponent;
    return (Register)(~tiny & bits);
}

// tanh(x), to within some units in the last place.
inline Register hyperbolic_tangent(Register x) {
    const IntRegister sign = (IntRegister)x & int32_t(0x80000000);
    const Register magnitude = (Register)((IntRegister)x ^ sign), square = x * x;
    const Register e = exponential(-2.0f * magnitude);
    // Near 0 the difference would keep few digits.
    const Register series = (((square * -0.0539682540f + 0.133333333f) * square - 0.333333333f) * square + 1.0f) * magnitude;
    const Register result = magnitude < 0.1f ? series : (1.0f - e) / (1.0f + e);
    return (Register)((IntRegister)result | sign);
}

// Whether a number is above the limit, or not comparable with it.
inline bool exceeds(const float* numbers, int64_t count, float limit) {
    const Register limits = spread(limit);
#if defined(__AVX512F__)
    __mmask16 found = 0;
    for (int64_t i = 0; i < count; i += WIDTH)
        found |= _mm512_cmp_ps_mask((__m512)load_register(numbers + i), (__m512)limits, _CMP_NLE_UQ);
    return found;
#else
    IntRegister within = IntRegister{} - 1;
    for (int64_t i = 0; i < count; i += WIDTH) within &= load_register(numbers + i) <= limits;
    return highest_lane(within) == 0;
#endif
}

// The largest number, or NaN if any number is NaN.
inline float largest(const float* numbers, int64_t count) {
    Register highest = -INFINITY - Register{};
    IntRegister is_nan = {};
    for (int64_t i = 0; i < count; i += WIDTH) {
        const Register given = load_register(numbers + i);
        highest = given > highest ? given : highest;
        is_nan |= given != given;
    }
    // A true comparison is -1 in its lane.
    return highest_lane(-is_nan) ? NAN : highest_lane(highest);
}

}  // namespace
