// Attention over packed keys and values, on a CPU.
//
// One pass over the tokens with an online softmax: the codes of each block are multiplied as integers converted to
// floats, and the scales are folded into the other factor (the query for keys, the probabilities for values). No block
// is ever written out in full precision.
//
// `kernel.py` compiles this file with -march=native: a vector of 16 floats is one register or several, depending on the
// machine.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;
constexpr int DENSE_UNIT = 64;
constexpr int ROWS_AT_ONCE = 4;
constexpr double MINIMUM_PIECES = 4;  // of an item of a gathered segment

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

template <typename Vector, typename Element>
inline Vector load(const Element* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof(vector));
    return vector;
}

inline void store(float* to, Floats vector) { std::memcpy(to, &vector, sizeof(vector)); }

// Compilers turn a widening conversion into moves of single elements, so it is written as an intrinsic if there is one.
inline Words widened(Bytes bytes) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif defined(__AVX2__)
    const __m256i low = _mm256_cvtepu8_epi32((__m128i)bytes);
    const __m256i high = _mm256_cvtepu8_epi32(_mm_unpackhi_epi64((__m128i)bytes, (__m128i)bytes));
    Words words;
    std::memcpy(&words, &low, sizeof(low));
    std::memcpy((char*)&words + sizeof(low), &high, sizeof(high));
    return words;
#else
    return __builtin_convertvector(bytes, Words);
#endif
}

inline Words widened(Halves halves) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu16_epi32((__m256i)halves);
#elif defined(__AVX2__)
    __m128i parts[2];
    std::memcpy(parts, &halves, sizeof(parts));
    const __m256i low = _mm256_cvtepu16_epi32(parts[0]), high = _mm256_cvtepu16_epi32(parts[1]);
    Words words;
    std::memcpy(&words, &low, sizeof(low));
    std::memcpy((char*)&words + sizeof(low), &high, sizeof(high));
    return words;
#else
    return __builtin_convertvector(halves, Words);
#endif
}

struct BFloat16 {
    uint16_t bits;
};

inline float to_float(float number) { return number; }

inline float to_float(BFloat16 number) {
    uint32_t bits = uint32_t(number.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof(result));
    return result;
}

inline void from_float(float number, float* to) { *to = number; }

inline void from_float(float number, BFloat16* to) {
    uint32_t bits;
    std::memcpy(&bits, &number, sizeof(bits));
    if ((bits & 0x7fffffff) > 0x7f800000)
        to->bits = 0x7fc0;
    else
        to->bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
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
    return (Register)(widened(load<Halves>(from)) << 16);
#elif defined(__AVX2__)
    const __m128i halves = load<__m128i>(from);
    return (Register)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
#else
    typedef uint16_t Narrow __attribute__((vector_size(WIDTH * 2)));
    typedef uint32_t Wide __attribute__((vector_size(WIDTH * 4)));
    return (Register)(__builtin_convertvector(load<Narrow>(from), Wide) << 16);
#endif
}

inline void store_register(float* to, Register vector) { std::memcpy(to, &vector, sizeof(vector)); }

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

// The largest number; not a number if any is not.
inline float largest(const float* numbers, int64_t count) {
    Register highest = -INFINITY - Register{};
    IntRegister is_nan = {};
    for (int64_t i = 0; i < count; i += WIDTH) {
        const Register given = load_register(numbers + i);
        highest = given > highest ? given : highest;
        is_nan |= given != given;
    }
    float result = -INFINITY;
    for (int lane = 0; lane < WIDTH; ++lane) {
        if (is_nan[lane]) return NAN;
        result = std::max(result, highest[lane]);
    }
    return result;
}

}  // namespace

extern "C" {

// The fields below match the ctypes structures in `kernel.py`, in the same order.

struct Dense {
    const void* keys;
    const void* values;
    int64_t key_batch, key_head, key_token;
    int64_t value_batch, value_head, value_token;
    int64_t tokens;
};

struct Side {
    const uint8_t* codes;
    const void* parameters;
    int64_t code_batch, code_head, code_block;
    int64_t parameter_batch, parameter_head, parameter_block;
    int64_t bits, floating, rows, columns, row_group, column_group;
};

struct Packed {
    Side keys, values;
    int64_t blocks, block_tokens, first;
    const int32_t* ends;
    int64_t keys_rotated, values_rotated;
};

// Pieces of the dense or packed tokens, other ones for each kv head of each sequence: [batch, kv_heads, pieces].
struct Gathered {
    const int64_t *starts, *counts, *columns;
    int64_t pieces, width;
    const int64_t* source_rows;  // as Call::rows, for the source
};

struct Segment {
    int64_t is_packed, is_gathered;
    Dense dense;
    Packed packed;
    Gathered gathered;
};

struct Mask {
    const void* entries;
    int64_t batch, head, query, key;
    int64_t is_bool;
};

struct Call {
    const void* query;
    void* out;
    int64_t query_batch, query_head, query_token;
    int64_t out_batch, out_head, out_token;
    int64_t batch, kv_heads, groups, query_tokens, key_dim, value_dim;
    int64_t is_bfloat16, threads;
    double scale;
    Mask mask;
    int64_t segment_count;
    const Segment* const* segments;
    // For each segment: which of its sequences each sequence of the batch reads; null if each reads its own.
    const int64_t* const* rows;
};
}

namespace {

inline int64_t rounded_up(int64_t number) { return (number + LANES - 1) / LANES * LANES; }

// Sums of codes

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

// Dense tokens

// Tokens of which R rows of scores are summed at once.
template <int R>
constexpr int TOKENS_AT_ONCE = R > 2 ? WIDTH / 4 : WIDTH / R;

// Scores of T tokens for each of R rows.
template <int R, int T, typename State>
inline void score_tokens(const State* keys, int64_t token_stride, int64_t head_dim, const float* query,
                         int64_t query_stride, float* scores, int64_t score_stride) {
    const int64_t whole = head_dim / WIDTH * WIDTH;
    Register sums[WIDTH] = {};
    for (int64_t channel = 0; channel < whole; channel += WIDTH) {
        Register states[T];
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) states[t] = load_register(keys + t * token_stride + channel);
#pragma GCC unroll 4
        for (int i = 0; i < R; ++i) {
            const Register row = load_register(query + i * query_stride + channel);
#pragma GCC unroll 16
            for (int t = 0; t < T; ++t) sums[i * T + t] += row * states[t];
        }
    }
    float found[WIDTH];
    store_register(found, sums_of_registers(sums));
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) scores[i * score_stride + t] = found[i * T + t];
    for (int64_t channel = whole; channel < head_dim; ++channel)
        for (int i = 0; i < R; ++i)
            for (int t = 0; t < T; ++t)
                scores[i * score_stride + t] +=
                    query[i * query_stride + channel] * to_float(keys[t * token_stride + channel]);
}

template <int R, typename State>
void dense_scores(const State* keys, int64_t token_stride, int64_t tokens, int64_t head_dim, const float* query,
                  int64_t query_stride, float* scores, int64_t score_stride) {
    constexpr int T = TOKENS_AT_ONCE<R>;
    int64_t token = 0;
    for (; token + T <= tokens; token += T)
        score_tokens<R, T>(keys + token * token_stride, token_stride, head_dim, query, query_stride, scores + token,
                           score_stride);
    for (; token < tokens; ++token)
        score_tokens<R, 1>(keys + token * token_stride, token_stride, head_dim, query, query_stride, scores + token,
                           score_stride);
}

// Adds the weighted values of V vectors of channels.
template <int R, int V, typename State>
inline void combine_channels(const State* values, int64_t token_stride, int64_t tokens, const float* weights,
                             int64_t weight_stride, float* acc, int64_t acc_stride) {
    Register sums[R][V];
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[i][v] = load_register(acc + i * acc_stride + v * WIDTH);
    for (int64_t token = 0; token < tokens; ++token) {
        Register states[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) states[v] = load_register(values + token * token_stride + v * WIDTH);
#pragma GCC unroll 4
        for (int i = 0; i < R; ++i) {
            const float weight = weights[i * weight_stride + token];
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sums[i][v] += weight * states[v];
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) store_register(acc + i * acc_stride + v * WIDTH, sums[i][v]);
}

template <int R, typename State>
void dense_combine(const State* values, int64_t token_stride, int64_t tokens, int64_t head_dim, const float* weights,
                   int64_t weight_stride, float* acc, int64_t acc_stride) {
    // Sixteen sums fit into the registers of AVX-512, eight into those of AVX2.
    constexpr int V = WIDTH == 16 ? 4 : R > 2 ? 2 : 4;
    int64_t channel = 0;
    for (; channel + V * WIDTH <= head_dim; channel += V * WIDTH)
        combine_channels<R, V>(values + channel, token_stride, tokens, weights, weight_stride, acc + channel, acc_stride);
    for (; channel + WIDTH <= head_dim; channel += WIDTH)
        combine_channels<R, 1>(values + channel, token_stride, tokens, weights, weight_stride, acc + channel, acc_stride);
    for (int64_t token = 0; token < tokens; ++token)
        for (int64_t rest = channel; rest < head_dim; ++rest)
            for (int i = 0; i < R; ++i)
                acc[i * acc_stride + rest] +=
                    weights[i * weight_stride + token] * to_float(values[token * token_stride + rest]);
}

// The tokens as runs of units

struct Unit {
    const Segment* segment;
    int64_t index;  // first token within a dense segment, or the packed block
    int64_t begin, end;  // valid tokens within the unit
    int64_t position;  // column of the first valid token in the mask

    bool holds_tokens() const { return end > begin; }
};

// Consecutive segments of which the sequences of the batch read the same rows, or one gathered segment.
struct Run {
    const Segment* gathered;  // null if all heads read the same units
    int64_t first_column;
    std::vector<Unit> units;
    std::vector<std::vector<int64_t>> readers;  // for each row, the sequences of the batch that read it
    std::vector<int64_t> row, place;  // for each sequence of the batch: its row, and its place among the readers
    std::vector<int64_t> counts;  // for each row and kv head: units that hold a token
    std::vector<int64_t> first_items;  // for each row and kv head, and at the end: the first of its items

    // Units of each head, and pieces that hold no token.
    int64_t length() const { return gathered ? gathered->gathered.pieces : int64_t(units.size()); }

    // A unit of the head at `head` among those of all rows. It may hold no token.
    Unit unit(int64_t head, int64_t index) const {
        if (!gathered) return units[index];
        const Gathered& tables = gathered->gathered;
        const int64_t at = head * tables.pieces + index, start = tables.starts[at];
        const int64_t begin = gathered->is_packed && start == 0 ? gathered->packed.first : 0;
        return {gathered, start, begin, begin + tables.counts[at], first_column + tables.columns[at]};
    }
};

void add_units(const Segment& segment, int64_t& position, std::vector<Unit>& units) {
    if (!segment.is_packed) {
        for (int64_t start = 0; start < segment.dense.tokens; start += DENSE_UNIT) {
            const int64_t count = std::min<int64_t>(DENSE_UNIT, segment.dense.tokens - start);
            units.push_back({&segment, start, 0, count, position});
            position += count;
        }
        return;
    }
    const Packed& packed = segment.packed;
    for (int64_t block = 0; block < packed.blocks; ++block) {
        const int64_t begin = block == 0 ? packed.first : 0;
        const int64_t end = packed.ends ? packed.ends[block] : packed.block_tokens;
        if (end <= begin) continue;
        units.push_back({&segment, block, begin, end, position});
        position += end - begin;
    }
}

// How many splits to make of the units of each head of a run, so that every thread has work.
int64_t splits_for(const Call& call, const Run& run, double share_of_work) {
    const int64_t heads = run.readers.size() * call.kv_heads;
    if (call.threads <= 1 || heads % call.threads == 0) return 1;
    const int64_t wanted = std::ceil(4 * call.threads * share_of_work / heads);
    return std::max<int64_t>(1, std::min<int64_t>(wanted, run.units.size() / 4));
}

struct Item {
    const Run* run;
    int64_t row, kv_head;
    int64_t from, to;  // units
};

// The work of one call: items that any thread may take.
struct Plan {
    std::vector<Run> runs;
    std::vector<Item> items;
    int64_t largest_unit = DENSE_UNIT;

    explicit Plan(const Call& call) {
        int64_t position = 0;
        for (int64_t i = 0; i < call.segment_count; ++i) {
            const Segment& segment = *call.segments[i];
            if (segment.is_packed) largest_unit = std::max(largest_unit, segment.packed.block_tokens);
            if (segment.is_gathered) {
                add_gathered(call, segment, position);
                position += segment.gathered.width;
                continue;
            }
            if (i == 0 || call.rows[i] != call.rows[i - 1] || runs.back().gathered) add_run(call, call.rows[i]);
            add_units(segment, position, runs.back().units);
        }
        double work = 0;
        for (Run& run : runs) {
            if (!run.gathered) run.counts.assign(run.readers.size() * call.kv_heads, run.units.size());
            for (const int64_t count : run.counts) work += count;
        }
        for (Run& run : runs) {
            if (run.gathered)
                add_items_by_head(call, run, work);
            else
                add_items(call, run, run.units.size() * call.batch * call.kv_heads / std::max(work, 1.0));
            run.first_items.push_back(items.size());
        }
    }

    void add_items(const Call& call, Run& run, double share_of_work) {
        const int64_t splits = splits_for(call, run, share_of_work), count = run.units.size();
        for (int64_t head = 0; head < int64_t(run.counts.size()); ++head) {
            run.first_items.push_back(items.size());
            for (int64_t split = 0; split < splits; ++split)
                items.push_back({&run, head / call.kv_heads, head % call.kv_heads, count * split / splits,
                                 count * (split + 1) / splits});
        }
    }

    // Heads have different numbers of pieces: those with many have more items.
    void add_items_by_head(const Call& call, Run& run, double work) {
        const double wanted = std::max(MINIMUM_PIECES, call.threads > 1 ? work / (8 * call.threads) : work);
        for (int64_t head = 0; head < int64_t(run.counts.size()); ++head) {
            const int64_t splits = std::max<int64_t>(1, std::llround(run.counts[head] / wanted));
            run.first_items.push_back(items.size());
            int64_t from = 0, seen = 0;
            for (int64_t split = 0; split < splits; ++split) {
                // Pieces up to which this share of those that hold a token has been seen.
                const int64_t share = run.counts[head] * (split + 1) / splits;
                int64_t to = from;
                for (; to < run.length() && seen < share; ++to) seen += run.unit(head, to).holds_tokens();
                items.push_back({&run, head / call.kv_heads, head % call.kv_heads, from, to});
                from = to;
            }
        }
    }

    void add_gathered(const Call& call, const Segment& segment, int64_t position) {
        add_run(call, nullptr);
        Run& run = runs.back();
        run.gathered = &segment;
        run.first_column = position;
        run.counts.assign(call.batch * call.kv_heads, 0);
        for (int64_t head = 0; head < int64_t(run.counts.size()); ++head)
            for (int64_t index = 0; index < run.length(); ++index)
                run.counts[head] += run.unit(head, index).holds_tokens();
    }

    void add_run(const Call& call, const int64_t* rows) {
        Run run{};
        for (int64_t sequence = 0; sequence < call.batch; ++sequence) {
            const int64_t row = rows ? rows[sequence] : sequence;
            if (row >= int64_t(run.readers.size())) run.readers.resize(row + 1);
            run.row.push_back(row);
            run.place.push_back(run.readers[row].size());
            run.readers[row].push_back(sequence);
        }
        runs.push_back(std::move(run));
    }
};

inline float mask_entry(const Mask& mask, int64_t offset) {
    if (mask.is_bool) return ((const uint8_t*)mask.entries)[offset] ? 0.0f : -INFINITY;
    return ((const float*)mask.entries)[offset];
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

// The row of the query, or of the result, that stands at `row` of a kv head of one sequence.
template <typename State>
State* row_of(State* base, const Call& call, int64_t sequence, int64_t kv_head, int64_t row, int64_t batch_stride,
              int64_t head_stride, int64_t token_stride) {
    const int64_t head = kv_head * call.groups + row / call.query_tokens;
    return base + sequence * batch_stride + head * head_stride + row % call.query_tokens * token_stride;
}

template <typename State>
State* out_row(const Call& call, int64_t sequence, int64_t kv_head, int64_t row) {
    return row_of((State*)call.out, call, sequence, kv_head, row, call.out_batch, call.out_head, call.out_token);
}

// A kv head of one row of a run, with all query rows of its readers.
template <typename State>
struct Head {
    const Call& call;
    const std::vector<int64_t>& readers;
    int64_t segment_row, kv_head, rows_of_reader, rows, padded_key, padded_value, padded_block;
    std::vector<float> query, rotated_query, scores;
    Buffers buffers;

    Head(const Call& call, const Plan& plan, const Item& item)
        : call(call),
          readers(item.run->readers[item.row]),
          segment_row(item.row),
          kv_head(item.kv_head),
          rows_of_reader(call.groups * call.query_tokens),
          rows(readers.size() * rows_of_reader) {
        padded_key = rounded_up(call.key_dim + 8);
        padded_value = rounded_up(call.value_dim + 8);
        padded_block = rounded_up(plan.largest_unit + 8);
        scores.resize(ROWS_AT_ONCE * padded_block);
    }

    const State* query_row(int64_t row) const {
        return row_of((const State*)call.query, call, readers[row / rows_of_reader], kv_head, row % rows_of_reader,
                      call.query_batch, call.query_head, call.query_token);
    }

    void read_query() {
        query.assign(rows * padded_key, 0.0f);
        for (int64_t row = 0; row < rows; ++row) {
            const State* from = query_row(row);
            for (int64_t channel = 0; channel < call.key_dim; ++channel)
                query[row * padded_key + channel] = to_float(from[channel]) * float(call.scale);
        }
    }

    // The sequence of a segment, or of the source of a gathered one, that the head reads.
    int64_t source_row(const Segment& segment) const {
        return segment.gathered.source_rows ? segment.gathered.source_rows[segment_row] : segment_row;
    }

    // Products stay the same if both sides are rotated, so the keys need not be rotated back.
    const float* query_for(const Segment& segment) {
        if (!segment.is_packed || !segment.packed.keys_rotated) return query.data();
        if (rotated_query.empty()) {
            rotated_query = query;
            for (int64_t row = 0; row < rows; ++row) rotate(rotated_query.data() + row * padded_key, call.key_dim);
        }
        return rotated_query.data();
    }

    // Scores of rows [row, row + R) for the unit's tokens, without the mask: scores[i][token within the unit].
    template <int R>
    void score(const Unit& unit, int64_t row) {
        const float* rows_of_query = query_for(*unit.segment) + row * padded_key;
        if (unit.segment->is_packed) {
            std::fill(scores.begin(), scores.begin() + R * padded_block, 0.0f);
            multiply<R, State>(unit.segment->packed.keys, source_row(*unit.segment), kv_head, unit.index, 0, call.key_dim,
                               rows_of_query, padded_key, scores.data(), padded_block, buffers);
        } else {
            const Dense& dense = unit.segment->dense;
            const State* keys = (const State*)dense.keys + source_row(*unit.segment) * dense.key_batch + kv_head * dense.key_head +
                                unit.index * dense.key_token;
            dense_scores<R>(keys, dense.key_token, unit.end, call.key_dim, rows_of_query, padded_key, scores.data(),
                            padded_block);
        }
    }

    // Adds the unit's values, weighted by scores[i][token within the unit], to plain or rotated sums.
    template <int R>
    void combine(const Unit& unit, float* plain_sums, float* rotated_sums) {
        if (unit.segment->is_packed) {
            const Packed& packed = unit.segment->packed;
            multiply<R, State>(packed.values, source_row(*unit.segment), kv_head, unit.index, unit.begin, unit.end, scores.data(),
                               padded_block, packed.values_rotated ? rotated_sums : plain_sums, padded_value, buffers);
        } else {
            const Dense& dense = unit.segment->dense;
            const State* values = (const State*)dense.values + source_row(*unit.segment) * dense.value_batch +
                                  kv_head * dense.value_head + unit.index * dense.value_token;
            dense_combine<R>(values, dense.value_token, unit.end, call.value_dim, scores.data(), padded_block,
                             plain_sums, padded_value);
        }
    }

    void add_mask(const Unit& unit, int64_t row, float* row_scores) const {
        const Mask& mask = call.mask;
        const int64_t within = row % rows_of_reader, head = kv_head * call.groups + within / call.query_tokens;
        const int64_t base = readers[row / rows_of_reader] * mask.batch + head * mask.head +
                             within % call.query_tokens * mask.query;
        for (int64_t token = unit.begin; token < unit.end; ++token)
            row_scores[token] += mask_entry(mask, base + (unit.position + token - unit.begin) * mask.key);
    }
};

// Result of one item: sums over tokens weighted by e^(score - highest), for each row. Sums of rotated values are apart.
struct Partial {
    std::vector<float> highest, total, plain, rotated;

    void clear(int64_t rows, int64_t padded_value, float initial) {
        highest.assign(rows, initial);
        total.assign(rows, 0.0f);
        plain.assign(rows * padded_value, 0.0f);
        rotated.assign(rows * padded_value, 0.0f);
    }
};

// Calls `work(unit)` for the units of an item that hold a token.
template <typename Work>
void for_units(const Item& item, int64_t kv_heads, Work work) {
    for (int64_t index = item.from; index < item.to; ++index) {
        const Unit unit = item.run->unit(item.row * kv_heads + item.kv_head, index);
        if (unit.holds_tokens()) work(unit);
    }
}

// Calls `work.template rows<R>(row)` for all rows, four at once.
template <typename Work>
void for_rows(int64_t rows, Work work) {
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) work.template rows<4>(row);
    switch (rows - row) {
        case 3: work.template rows<3>(row); break;
        case 2: work.template rows<2>(row); break;
        case 1: work.template rows<1>(row); break;
        default: break;
    }
}

template <typename State>
struct AttendUnit {
    Head<State>& head;
    const Unit& unit;
    Partial& partial;

    template <int R>
    void rows(int64_t row) {
        head.template score<R>(unit, row);
        const int64_t stride = head.padded_value;
        float* plain = partial.plain.data() + row * stride;
        float* rotated = partial.rotated.data() + row * stride;
        for (int i = 0; i < R; ++i) {
            float* scores = head.scores.data() + i * head.padded_block;
            if (head.call.mask.entries) head.add_mask(unit, row + i, scores);
            // Tokens before and after the valid ones must have no weight.
            for (int64_t token = 0; token < unit.begin; ++token) scores[token] = -INFINITY;
            const int64_t padded_end = rounded_up(unit.end);
            for (int64_t token = unit.end; token < padded_end; ++token) scores[token] = -INFINITY;
            const float previous = partial.highest[row + i], of_unit = largest(scores, padded_end);
            const float highest = previous > of_unit || std::isnan(previous) ? previous : of_unit;
            if (highest == -INFINITY) {
                std::fill(scores, scores + padded_end, 0.0f);
                continue;
            }
            if (highest != previous && previous != -INFINITY) {
                const float shrink = std::exp(previous - highest);
                partial.total[row + i] *= shrink;
                for (int64_t channel = 0; channel < stride; ++channel) plain[i * stride + channel] *= shrink;
                for (int64_t channel = 0; channel < stride; ++channel) rotated[i * stride + channel] *= shrink;
            }
            partial.highest[row + i] = highest;
            Register total = {};
            for (int64_t token = 0; token < padded_end; token += WIDTH) {
                const Register weight = exponential(load_register(scores + token) - highest);
                store_register(scores + token, weight);
                total += weight;
            }
            float sum_of_weights = 0.0f;
            for (int lane = 0; lane < WIDTH; ++lane) sum_of_weights += total[lane];
            partial.total[row + i] += std::isnan(highest) ? NAN : sum_of_weights;
        }
        head.template combine<R>(unit, plain, rotated);
    }
};

// Merges the results of all items by their highest scores. Without `normalised`, the sums are only added up.
template <typename State>
void merge(const Call& call, const Plan& plan, const std::vector<Partial>& partials, bool normalised) {
    const int64_t rows = call.groups * call.query_tokens, stride = rounded_up(call.value_dim + 8);
    std::vector<float> plain(stride), rotated(stride);
    std::vector<std::pair<const Partial*, int64_t>> parts;
    for (int64_t index = 0; index < call.batch * call.kv_heads * rows; ++index) {
        const int64_t sequence = index / rows / call.kv_heads, kv_head = index / rows % call.kv_heads;
        const int64_t row = index % rows;
        float highest = -INFINITY, total = 0;
        bool is_nan = false;
        parts.clear();
        for (const Run& run : plan.runs) {
            const int64_t* items = &run.first_items[run.row[sequence] * call.kv_heads + kv_head];
            for (int64_t item = items[0]; item < items[1]; ++item) {
                parts.push_back({&partials[item], run.place[sequence] * rows + row});
                const float part = parts.back().first->highest[parts.back().second];
                highest = std::max(highest, part);
                is_nan |= std::isnan(part);
            }
        }
        std::fill(plain.begin(), plain.end(), 0.0f);
        std::fill(rotated.begin(), rotated.end(), 0.0f);
        for (const auto& [part, at] : parts) {
            if (highest == -INFINITY) break;
            const float weight = std::exp(part->highest[at] - highest);
            total += weight * part->total[at];
            for (int64_t channel = 0; channel < call.value_dim; ++channel) {
                plain[channel] += weight * part->plain[at * stride + channel];
                rotated[channel] += weight * part->rotated[at * stride + channel];
            }
        }
        rotate(rotated.data(), call.value_dim);
        State* out = out_row<State>(call, sequence, kv_head, row);
        for (int64_t channel = 0; channel < call.value_dim; ++channel) {
            float state = plain[channel] + rotated[channel];
            // As in torch, a query that may attend to no token gets zeros.
            if (normalised) state = is_nan || std::isnan(total) ? NAN : total > 0 ? state / total : 0.0f;
            from_float(state, out + channel);
        }
    }
}

template <typename State>
void attend(const Call& call) {
    const Plan plan(call);
    const int64_t items = plan.items.size();
    std::vector<Partial> partials(items);
#pragma omp parallel for schedule(dynamic, 1) num_threads(call.threads)
    for (int64_t index = 0; index < items; ++index) {
        const Item& item = plan.items[index];
        Head<State> head(call, plan, item);
        head.read_query();
        partials[index].clear(head.rows, head.padded_value, -INFINITY);
        for_units(item, call.kv_heads, [&](const Unit& unit) {
            for_rows(head.rows, AttendUnit<State>{head, unit, partials[index]});
        });
    }
    merge<State>(call, plan, partials, true);
}

// Scores of every token, for eager attention: out is [batch, heads, query_tokens, tokens].
template <typename State>
struct WriteScores {
    Head<State>& head;
    const Unit& unit;

    template <int R>
    void rows(int64_t row) {
        head.template score<R>(unit, row);
        for (int i = 0; i < R; ++i) {
            const int64_t reader = head.readers[(row + i) / head.rows_of_reader];
            State* out = out_row<State>(head.call, reader, head.kv_head, (row + i) % head.rows_of_reader);
            for (int64_t token = unit.begin; token < unit.end; ++token)
                from_float(head.scores[i * head.padded_block + token], out + unit.position + token - unit.begin);
        }
    }
};

template <typename State>
void score(const Call& call) {
    const Plan plan(call);
    const int64_t items = plan.items.size();
#pragma omp parallel for schedule(dynamic, 1) num_threads(call.threads)
    for (int64_t index = 0; index < items; ++index) {
        const Item& item = plan.items[index];
        Head<State> head(call, plan, item);
        head.read_query();
        for_units(item, call.kv_heads,
                  [&](const Unit& unit) { for_rows(head.rows, WriteScores<State>{head, unit}); });
    }
}

// Values weighted by given weights: query is [batch, heads, query_tokens, tokens].
template <typename State>
struct CombineUnit {
    Head<State>& head;
    const Unit& unit;
    Partial& partial;

    template <int R>
    void rows(int64_t row) {
        for (int i = 0; i < R; ++i) {
            const State* weights = head.query_row(row + i);
            float* to = head.scores.data() + i * head.padded_block;
            for (int64_t token = unit.begin; token < unit.end; ++token)
                to[token] = to_float(weights[unit.position + token - unit.begin]);
        }
        const int64_t first = row * head.padded_value;
        head.template combine<R>(unit, partial.plain.data() + first, partial.rotated.data() + first);
    }
};

template <typename State>
void combine(const Call& call) {
    const Plan plan(call);
    const int64_t items = plan.items.size();
    std::vector<Partial> partials(items);
#pragma omp parallel for schedule(dynamic, 1) num_threads(call.threads)
    for (int64_t index = 0; index < items; ++index) {
        const Item& item = plan.items[index];
        Head<State> head(call, plan, item);
        partials[index].clear(head.rows, head.padded_value, 0.0f);
        for_units(item, call.kv_heads, [&](const Unit& unit) {
            for_rows(head.rows, CombineUnit<State>{head, unit, partials[index]});
        });
    }
    merge<State>(call, plan, partials, false);
}

}  // namespace

extern "C" {

void kvlayers_attend(const Call* call) {
    if (call->is_bfloat16)
        attend<BFloat16>(*call);
    else
        attend<float>(*call);
}

void kvlayers_score(const Call* call) {
    if (call->is_bfloat16)
        score<BFloat16>(*call);
    else
        score<float>(*call);
}

void kvlayers_combine(const Call* call) {
    if (call->is_bfloat16)
        combine<BFloat16>(*call);
    else
        combine<float>(*call);
}
}
