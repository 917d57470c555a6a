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
constexpr int MAX_DENSE = 4;
constexpr int ROWS_AT_ONCE = 4;

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

inline Floats spread(float number) { return number - Floats{}; }

inline float sum(Floats vector) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)vector);
#endif
    float parts[LANES];
    store(parts, vector);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; ++i) parts[i] += parts[i + width];
    return parts[0];
}

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

inline Floats load_floats(const float* from) { return load<Floats>(from); }

inline Floats load_floats(const BFloat16* from) {
    const Words bits = widened(load<Halves>(from)) << 16;
    return (Floats)bits;
}

// e^x for x <= 0, to within two units in the last place; 0 below -87.
inline Floats exponential(Floats x) {
    const Ints tiny = x < -87.0f;
    x = (Floats)((~tiny & (Ints)x));
    const Floats shifter = spread(12582912.0f);
    Floats n = x * 1.44269504088896341f + shifter;
    const Ints exponent = (Ints)n << 23;
    n -= shifter;
    Floats r = x - n * 0.693145751953125f;
    r -= n * 1.42860682030941723e-6f;
    Floats p = spread(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const Ints bits = (Ints)p + exponent;
    return (Floats)(~tiny & bits);
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
    int64_t key_rotation, value_rotation;
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
    int64_t dense_before, dense_after;
    Dense dense[MAX_DENSE];
    Packed packed;
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

template <int R, typename State>
void dense_scores(const State* keys, int64_t token_stride, int64_t tokens, int64_t head_dim, const float* query,
                  int64_t query_stride, float* scores, int64_t score_stride) {
    const int64_t whole = head_dim / LANES * LANES;
    for (int64_t token = 0; token < tokens; ++token) {
        const State* key = keys + token * token_stride;
        Floats sums[R] = {};
        for (int64_t channel = 0; channel < whole; channel += LANES) {
            const Floats state = load_floats(key + channel);
            for (int i = 0; i < R; ++i) sums[i] += load<Floats>(query + i * query_stride + channel) * state;
        }
        for (int i = 0; i < R; ++i) {
            float score = sum(sums[i]);
            for (int64_t channel = whole; channel < head_dim; ++channel)
                score += query[i * query_stride + channel] * to_float(key[channel]);
            scores[i * score_stride + token] = score;
        }
    }
}

template <int R, typename State>
void dense_combine(const State* values, int64_t token_stride, int64_t tokens, int64_t head_dim, const float* weights,
                   int64_t weight_stride, float* acc, int64_t acc_stride) {
    constexpr int VECTORS = 4;
    int64_t channel = 0;
    for (; channel + VECTORS * LANES <= head_dim; channel += VECTORS * LANES) {
        Floats sums[R][VECTORS];
        for (int i = 0; i < R; ++i)
            for (int v = 0; v < VECTORS; ++v) sums[i][v] = load<Floats>(acc + i * acc_stride + channel + v * LANES);
        for (int64_t token = 0; token < tokens; ++token)
            for (int v = 0; v < VECTORS; ++v) {
                const Floats state = load_floats(values + token * token_stride + channel + v * LANES);
                for (int i = 0; i < R; ++i) sums[i][v] += weights[i * weight_stride + token] * state;
            }
        for (int i = 0; i < R; ++i)
            for (int v = 0; v < VECTORS; ++v) store(acc + i * acc_stride + channel + v * LANES, sums[i][v]);
    }
    for (int64_t token = 0; token < tokens; ++token)
        for (int64_t rest = channel; rest < head_dim; ++rest)
            for (int i = 0; i < R; ++i)
                acc[i * acc_stride + rest] +=
                    weights[i * weight_stride + token] * to_float(values[token * token_stride + rest]);
}

// The tokens as a sequence of units

struct Unit {
    int64_t dense;  // index of the dense segment, -1 for a packed block
    int64_t index;  // first token within the segment, or the block
    int64_t begin, end;  // valid tokens within the unit
    int64_t position;  // column of the first valid token in the mask
};

std::vector<Unit> units_of(const Call& call) {
    std::vector<Unit> units;
    int64_t position = 0;
    const auto add_dense = [&](int64_t segment) {
        const int64_t tokens = call.dense[segment].tokens;
        for (int64_t start = 0; start < tokens; start += DENSE_UNIT) {
            const int64_t count = std::min<int64_t>(DENSE_UNIT, tokens - start);
            units.push_back({segment, start, 0, count, position});
            position += count;
        }
    };
    for (int64_t segment = 0; segment < call.dense_before; ++segment) add_dense(segment);
    for (int64_t block = 0; block < call.packed.blocks; ++block) {
        const int64_t begin = block == 0 ? call.packed.first : 0;
        const int64_t end = call.packed.ends ? call.packed.ends[block] : call.packed.block_tokens;
        if (end <= begin) continue;
        units.push_back({-1, block, begin, end, position});
        position += end - begin;
    }
    for (int64_t segment = 0; segment < call.dense_after; ++segment) add_dense(call.dense_before + segment);
    return units;
}

inline float mask_entry(const Mask& mask, int64_t offset) {
    if (mask.is_bool) return ((const uint8_t*)mask.entries)[offset] ? 0.0f : -INFINITY;
    return ((const float*)mask.entries)[offset];
}

// The rotation of `hadamard.py`, which is its own inverse: a fast Walsh-Hadamard transform of each `size` channels.
void rotate(float* channels, int64_t count, int64_t size) {
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

// A kv head of one sequence, with all query rows that attend to it.
template <typename State>
struct Head {
    const Call& call;
    int64_t batch, kv_head, rows, padded_key, padded_value, padded_block;
    std::vector<float> query, packed_query, scores;
    Buffers buffers;

    Head(const Call& call, int64_t batch, int64_t kv_head)
        : call(call), batch(batch), kv_head(kv_head), rows(call.groups * call.query_tokens) {
        padded_key = rounded_up(call.key_dim + 8);
        padded_value = rounded_up(call.value_dim + 8);
        padded_block = rounded_up(std::max<int64_t>(DENSE_UNIT, call.packed.block_tokens) + 8);
        scores.resize(ROWS_AT_ONCE * padded_block);
    }

    const State* row_of(const void* base, int64_t row, int64_t batch_stride, int64_t head_stride,
                        int64_t token_stride) const {
        const int64_t head = kv_head * call.groups + row / call.query_tokens;
        return (const State*)base + batch * batch_stride + head * head_stride +
               row % call.query_tokens * token_stride;
    }

    void read_query() {
        query.assign(rows * padded_key, 0.0f);
        for (int64_t row = 0; row < rows; ++row) {
            const State* from = row_of(call.query, row, call.query_batch, call.query_head, call.query_token);
            for (int64_t channel = 0; channel < call.key_dim; ++channel)
                query[row * padded_key + channel] = to_float(from[channel]) * float(call.scale);
        }
        // Products stay the same if both sides are rotated, so the keys need not be rotated back.
        packed_query = query;
        if (call.packed.key_rotation > 1)
            for (int64_t row = 0; row < rows; ++row)
                rotate(packed_query.data() + row * padded_key, call.key_dim, call.packed.key_rotation);
    }

    // Scores of rows [row, row + R) for the unit's tokens, without the mask: scores[i][token within the unit].
    template <int R>
    void score(const Unit& unit, int64_t row) {
        if (unit.dense >= 0) {
            const Dense& dense = call.dense[unit.dense];
            const State* keys = (const State*)dense.keys + batch * dense.key_batch + kv_head * dense.key_head +
                                unit.index * dense.key_token;
            dense_scores<R>(keys, dense.key_token, unit.end, call.key_dim, query.data() + row * padded_key, padded_key,
                            scores.data(), padded_block);
        } else {
            std::fill(scores.begin(), scores.begin() + R * padded_block, 0.0f);
            multiply<R, State>(call.packed.keys, batch, kv_head, unit.index, 0, call.key_dim,
                               packed_query.data() + row * padded_key, padded_key, scores.data(), padded_block,
                               buffers);
        }
    }

    // Adds the unit's values, weighted by scores[i][token within the unit], to dense or packed sums.
    template <int R>
    void combine(const Unit& unit, float* dense_sums, float* packed_sums) {
        if (unit.dense >= 0) {
            const Dense& dense = call.dense[unit.dense];
            const State* values = (const State*)dense.values + batch * dense.value_batch + kv_head * dense.value_head +
                                  unit.index * dense.value_token;
            dense_combine<R>(values, dense.value_token, unit.end, call.value_dim, scores.data(), padded_block, dense_sums,
                             padded_value);
        } else {
            multiply<R, State>(call.packed.values, batch, kv_head, unit.index, unit.begin, unit.end, scores.data(),
                               padded_block, packed_sums, padded_value, buffers);
        }
    }

    void add_mask(const Unit& unit, int64_t row, float* row_scores) const {
        const Mask& mask = call.mask;
        const int64_t head = kv_head * call.groups + row / call.query_tokens;
        const int64_t base = batch * mask.batch + head * mask.head + row % call.query_tokens * mask.query;
        for (int64_t token = unit.begin; token < unit.end; ++token)
            row_scores[token] += mask_entry(mask, base + (unit.position + token - unit.begin) * mask.key);
    }
};

// Result of one split of the units: sums over tokens weighted by e^(score - highest), for each row.
struct Partial {
    std::vector<float> highest, total, dense, packed;
};

template <typename State, int R>
void attend_unit(Head<State>& head, const Unit& unit, int64_t row, Partial& partial) {
    head.template score<R>(unit, row);
    const int64_t stride = head.padded_value;
    float* dense = partial.dense.data() + row * stride;
    float* packed = partial.packed.data() + row * stride;
    for (int i = 0; i < R; ++i) {
        float* scores = head.scores.data() + i * head.padded_block;
        if (head.call.mask.entries) head.add_mask(unit, row + i, scores);
        float highest = partial.highest[row + i];
        bool is_nan = false;
        for (int64_t token = unit.begin; token < unit.end; ++token) {
            highest = std::max(highest, scores[token]);
            is_nan |= std::isnan(scores[token]);
        }
        if (is_nan) highest = NAN;
        // Tokens before and after the valid ones must have no weight.
        for (int64_t token = 0; token < unit.begin; ++token) scores[token] = -INFINITY;
        const int64_t padded_end = rounded_up(unit.end);
        for (int64_t token = unit.end; token < padded_end; ++token) scores[token] = -INFINITY;
        if (highest == -INFINITY) {
            std::fill(scores, scores + padded_end, 0.0f);
            continue;
        }
        const float previous = partial.highest[row + i];
        if (highest != previous && previous != -INFINITY) {
            const float shrink = std::exp(previous - highest);
            partial.total[row + i] *= shrink;
            for (int64_t channel = 0; channel < stride; ++channel) dense[i * stride + channel] *= shrink;
            for (int64_t channel = 0; channel < stride; ++channel) packed[i * stride + channel] *= shrink;
        }
        partial.highest[row + i] = highest;
        Floats total = {};
        for (int64_t token = 0; token < padded_end; token += LANES) {
            const Floats weight = exponential(load<Floats>(scores + token) - highest);
            store(scores + token, weight);
            total += weight;
        }
        partial.total[row + i] += std::isnan(highest) ? NAN : sum(total);
    }
    head.template combine<R>(unit, dense, packed);
}

template <typename State>
void attend_rows(Head<State>& head, const Unit& unit, Partial& partial) {
    int64_t row = 0;
    for (; row + 4 <= head.rows; row += 4) attend_unit<State, 4>(head, unit, row, partial);
    switch (head.rows - row) {
        case 3: attend_unit<State, 3>(head, unit, row, partial); break;
        case 2: attend_unit<State, 2>(head, unit, row, partial); break;
        case 1: attend_unit<State, 1>(head, unit, row, partial); break;
        default: break;
    }
}

// How many splits to make of the units, so that every thread has work.
int64_t splits_for(const Call& call, int64_t units) {
    const int64_t heads = call.batch * call.kv_heads;
    if (call.threads <= 1 || heads % call.threads == 0) return 1;
    const int64_t wanted = (4 * call.threads + heads - 1) / heads;
    return std::max<int64_t>(1, std::min(wanted, units / 4));
}

template <typename State>
void attend(const Call& call) {
    const std::vector<Unit> units = units_of(call);
    const int64_t heads = call.batch * call.kv_heads, splits = splits_for(call, units.size());
    std::vector<Partial> partials(heads * splits);
#pragma omp parallel for schedule(dynamic, 1) num_threads(call.threads)
    for (int64_t item = 0; item < heads * splits; ++item) {
        const int64_t index = item / splits, split = item % splits;
        Head<State> head(call, index / call.kv_heads, index % call.kv_heads);
        head.read_query();
        Partial& partial = partials[item];
        partial.highest.assign(head.rows, -INFINITY);
        partial.total.assign(head.rows, 0.0f);
        partial.dense.assign(head.rows * head.padded_value, 0.0f);
        partial.packed.assign(head.rows * head.padded_value, 0.0f);
        const int64_t count = units.size(), from = count * split / splits, to = count * (split + 1) / splits;
        for (int64_t unit = from; unit < to; ++unit) attend_rows(head, units[unit], partial);
    }
    for (int64_t index = 0; index < heads; ++index) {
        Head<State> head(call, index / call.kv_heads, index % call.kv_heads);
        std::vector<float> dense(head.padded_value), packed(head.padded_value);
        for (int64_t row = 0; row < head.rows; ++row) {
            const Partial* parts = partials.data() + index * splits;
            float highest = -INFINITY, total = 0;
            bool is_nan = false;
            for (int64_t split = 0; split < splits; ++split) {
                highest = std::max(highest, parts[split].highest[row]);
                is_nan |= std::isnan(parts[split].highest[row]);
            }
            std::fill(dense.begin(), dense.end(), 0.0f);
            std::fill(packed.begin(), packed.end(), 0.0f);
            for (int64_t split = 0; split < splits && highest > -INFINITY; ++split) {
                const float weight = std::exp(parts[split].highest[row] - highest);
                total += weight * parts[split].total[row];
                for (int64_t channel = 0; channel < call.value_dim; ++channel) {
                    dense[channel] += weight * parts[split].dense[row * head.padded_value + channel];
                    packed[channel] += weight * parts[split].packed[row * head.padded_value + channel];
                }
            }
            if (call.packed.value_rotation > 1) rotate(packed.data(), call.value_dim, call.packed.value_rotation);
            State* out = (State*)head.row_of(call.out, row, call.out_batch, call.out_head, call.out_token);
            for (int64_t channel = 0; channel < call.value_dim; ++channel) {
                // As in torch, a query that may attend to no token gets zeros.
                const float state = total > 0 ? (dense[channel] + packed[channel]) / total : 0.0f;
                from_float(is_nan || std::isnan(total) ? NAN : state, out + channel);
            }
        }
    }
}

// Scores of every token, for eager attention: out is [batch, heads, query_tokens, tokens].
template <typename State, int R>
void write_scores(Head<State>& head, const Unit& unit, int64_t row) {
    head.template score<R>(unit, row);
    const Call& call = head.call;
    for (int i = 0; i < R; ++i) {
        State* out = (State*)head.row_of(call.out, row + i, call.out_batch, call.out_head, call.out_token);
        for (int64_t token = unit.begin; token < unit.end; ++token)
            from_float(head.scores[i * head.padded_block + token], out + unit.position + token - unit.begin);
    }
}

template <typename State>
void score(const Call& call) {
    const std::vector<Unit> units = units_of(call);
    const int64_t heads = call.batch * call.kv_heads, splits = splits_for(call, units.size());
#pragma omp parallel for schedule(dynamic, 1) num_threads(call.threads)
    for (int64_t item = 0; item < heads * splits; ++item) {
        const int64_t index = item / splits, split = item % splits;
        Head<State> head(call, index / call.kv_heads, index % call.kv_heads);
        head.read_query();
        const int64_t count = units.size(), from = count * split / splits, to = count * (split + 1) / splits;
        for (int64_t unit = from; unit < to; ++unit) {
            int64_t row = 0;
            for (; row + 4 <= head.rows; row += 4) write_scores<State, 4>(head, units[unit], row);
            for (; row < head.rows; ++row) write_scores<State, 1>(head, units[unit], row);
        }
    }
}

// Values weighted by given weights: query is [batch, heads, query_tokens, tokens].
template <typename State, int R>
void combine_unit(Head<State>& head, const Unit& unit, int64_t row, float* dense, float* packed) {
    const Call& call = head.call;
    for (int i = 0; i < R; ++i) {
        const State* weights = head.row_of(call.query, row + i, call.query_batch, call.query_head, call.query_token);
        float* to = head.scores.data() + i * head.padded_block;
        for (int64_t token = unit.begin; token < unit.end; ++token)
            to[token] = to_float(weights[unit.position + token - unit.begin]);
    }
    head.template combine<R>(unit, dense + row * head.padded_value, packed + row * head.padded_value);
}

template <typename State>
void combine(const Call& call) {
    const std::vector<Unit> units = units_of(call);
    const int64_t heads = call.batch * call.kv_heads;
#pragma omp parallel for schedule(dynamic, 1) num_threads(call.threads)
    for (int64_t index = 0; index < heads; ++index) {
        Head<State> head(call, index / call.kv_heads, index % call.kv_heads);
        std::vector<float> dense(head.rows * head.padded_value), packed(head.rows * head.padded_value);
        for (const Unit& unit : units) {
            int64_t row = 0;
            for (; row + 4 <= head.rows; row += 4) combine_unit<State, 4>(head, unit, row, dense.data(), packed.data());
            for (; row < head.rows; ++row) combine_unit<State, 1>(head, unit, row, dense.data(), packed.data());
        }
        for (int64_t row = 0; row < head.rows; ++row) {
            float* from_packed = packed.data() + row * head.padded_value;
            if (call.packed.value_rotation > 1) rotate(from_packed, call.value_dim, call.packed.value_rotation);
            State* out = (State*)head.row_of(call.out, row, call.out_batch, call.out_head, call.out_token);
            for (int64_t channel = 0; channel < call.value_dim; ++channel)
                from_float(dense[row * head.padded_value + channel] + from_packed[channel], out + channel);
        }
    }
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
