// Sums of tokens in full or half precision.
//
// Tokens are read in the order of memory, a few rows at once. The prefetcher of a CPU follows them within a page of memory,
// and begins anew with each page and with each run of keys or values, so that instructions fetch ahead as well.

#pragma once

#include <algorithm>
#include <cstdint>

#include "../../../utils/vectors.h"

namespace {

// Channels of a token that are read together, as registers; and floats in the same order.
template <typename State>
struct Single {
    static constexpr int REGISTERS = 1, CHANNELS = WIDTH;

    static inline void load(const State* from, Register* to) { to[0] = load_register(from); }
    static inline void load_floats(const float* from, Register* to) { to[0] = load_register(from); }
    static inline void store_floats(float* to, const Register* from) { store_register(to, from[0]); }
    static void arrange(float*, int64_t) {}
};

template <typename State>
struct Chunk : Single<State> {};

template <>
struct Chunk<BFloat16> {
    static constexpr int REGISTERS = 2, CHANNELS = 2 * WIDTH;

    static inline void set(Pair pair, Register* to) {
        to[0] = pair.even;
        to[1] = pair.odd;
    }

    static inline void load(const BFloat16* from, Register* to) { set(load_pair(from), to); }
    static inline void load_floats(const float* from, Register* to) { set(parted(from), to); }
    static inline void store_floats(float* to, const Register* from) { store_joined(to, {from[0], from[1]}); }

    // Puts the floats of whole chunks into the order of their registers.
    static void arrange(float* floats, int64_t count) {
        for (int64_t channel = 0; channel + CHANNELS <= count; channel += CHANNELS) {
            const Pair pair = parted(floats + channel);
            store_register(floats + channel, pair.even);
            store_register(floats + channel + WIDTH, pair.odd);
        }
    }
};

// How a row of the query is multiplied with states: by its floats, in the order of the registers of a chunk.
template <typename State>
struct Scoring {
    typedef float Query;
    static constexpr int REGISTERS = Chunk<State>::REGISTERS, CHANNELS = Chunk<State>::CHANNELS;

    struct States {
        Register registers[REGISTERS];
    };

    static inline States load(const State* from) {
        States states;
        Chunk<State>::load(from, states.registers);
        return states;
    }

    static inline States load_query(const float* from) {
        States states;
#pragma GCC unroll 2
        for (int part = 0; part < REGISTERS; ++part) states.registers[part] = load_register(from + part * WIDTH);
        return states;
    }

    static inline Register sum(Register sums, States query, States states) {
#pragma GCC unroll 2
        for (int part = 0; part < REGISTERS; ++part) sums += query.registers[part] * states.registers[part];
        return sums;
    }

    static void read_query(const State* from, int64_t count, float* to) {
        for (int64_t channel = 0; channel < count; ++channel) to[channel] = to_float(from[channel]);
        Chunk<State>::arrange(to, count);
    }
};

#if defined(__AVX512BF16__)
// The CPU multiplies bfloat16 numbers without an error, but for subnormal ones, and adds up in floats.
template <>
struct Scoring<BFloat16> {
    typedef BFloat16 Query;
    typedef __m512bh States;
    static constexpr int CHANNELS = 2 * WIDTH;

    static inline States load(const BFloat16* from) { return (States)_mm512_loadu_si512(from); }
    static inline States load_query(const BFloat16* from) { return load(from); }

    static inline Register sum(Register sums, States query, States states) {
        return (Register)_mm512_dpbf16_ps((__m512)sums, query, states);
    }

    static void read_query(const BFloat16* from, int64_t count, BFloat16* to) { std::copy(from, from + count, to); }
};
#endif

// Tokens of which R rows of scores are summed at once.
template <int R>
constexpr int TOKENS_AT_ONCE = R > 2 ? WIDTH / 4 : WIDTH / R;

constexpr int TOKENS_SIDE_BY_SIDE = 2;

// Scores of T tokens for each of R rows of a query, times `scale`.
template <int R, int T, typename State>
inline void score_tokens(const State* keys, int64_t token_stride, int64_t head_dim,
                         const typename Scoring<State>::Query* query, int64_t query_stride, float scale, float* scores,
                         int64_t score_stride) {
    constexpr int CHANNELS = Scoring<State>::CHANNELS;
    constexpr int S = std::min(T, TOKENS_SIDE_BY_SIDE);
    Register sums[WIDTH] = {};
    const int64_t chunked = head_dim / CHANNELS * CHANNELS;
#pragma GCC unroll 8
    for (int first = 0; first < T; first += S)
        for (int64_t channel = 0; channel < chunked; channel += CHANNELS) {
            typename Scoring<State>::States states[S];
#pragma GCC unroll 4
            for (int t = 0; t < S; ++t) {
                const State* from = keys + (first + t) * token_stride + channel;
                prefetch_ahead(from);
                states[t] = Scoring<State>::load(from);
            }
#pragma GCC unroll 4
            for (int i = 0; i < R; ++i) {
                const auto row = Scoring<State>::load_query(query + i * query_stride + channel);
#pragma GCC unroll 4
                for (int t = 0; t < S; ++t)
                    sums[i * T + first + t] = Scoring<State>::sum(sums[i * T + first + t], row, states[t]);
            }
        }
    int64_t channel = chunked;
    for (; channel + WIDTH <= head_dim; channel += WIDTH)
        for (int i = 0; i < R; ++i)
            for (int t = 0; t < T; ++t)
                sums[i * T + t] += load_register(query + i * query_stride + channel) *
                                   load_register(keys + t * token_stride + channel);
    float found[WIDTH];
    store_register(found, sums_of_registers(sums));
    for (; channel < head_dim; ++channel)
        for (int i = 0; i < R; ++i)
            for (int t = 0; t < T; ++t)
                found[i * T + t] +=
                    to_float(query[i * query_stride + channel]) * to_float(keys[t * token_stride + channel]);
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) scores[i * score_stride + t] = scale * found[i * T + t];
}

template <int R, typename State>
void dense_scores(const State* keys, int64_t token_stride, int64_t tokens, int64_t head_dim,
                  const typename Scoring<State>::Query* query, int64_t query_stride, float scale, float* scores,
                  int64_t score_stride) {
    constexpr int T = TOKENS_AT_ONCE<R>;
    int64_t token = 0;
    for (; token + T <= tokens; token += T)
        score_tokens<R, T>(keys + token * token_stride, token_stride, head_dim, query, query_stride, scale,
                           scores + token, score_stride);
    for (; token < tokens; ++token)
        score_tokens<R, 1>(keys + token * token_stride, token_stride, head_dim, query, query_stride, scale,
                           scores + token, score_stride);
}

// Adds the weighted values of C chunks of channels.
template <typename Chunk, int R, int C, typename State>
inline void combine_chunks(const State* values, int64_t token_stride, int64_t tokens, const float* weights,
                           int64_t weight_stride, float* acc, int64_t acc_stride) {
    constexpr int REGISTERS = Chunk::REGISTERS, CHANNELS = Chunk::CHANNELS;
    Register sums[R][C * REGISTERS];
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) Chunk::load_floats(acc + i * acc_stride + c * CHANNELS, sums[i] + c * REGISTERS);
    for (int64_t token = 0; token < tokens; ++token) {
        Register states[C * REGISTERS];
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) {
            const State* from = values + token * token_stride + c * CHANNELS;
            prefetch_ahead(from);
            Chunk::load(from, states + c * REGISTERS);
        }
#pragma GCC unroll 4
        for (int i = 0; i < R; ++i) {
            const float weight = weights[i * weight_stride + token];
#pragma GCC unroll 4
            for (int v = 0; v < C * REGISTERS; ++v) sums[i][v] += weight * states[v];
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c) Chunk::store_floats(acc + i * acc_stride + c * CHANNELS, sums[i] + c * REGISTERS);
}

// Adds the weighted values of a run of tokens.
template <int R, typename State>
inline void combine_run(const State* values, int64_t token_stride, int64_t tokens, int64_t head_dim,
                        const float* weights, int64_t weight_stride, float* acc, int64_t acc_stride) {
    // Sixteen sums fit into the registers of AVX-512, eight into those of AVX2.
    constexpr int V = WIDTH == 16 ? 4 : R > 2 ? 2 : 4;
    constexpr int C = V / Chunk<State>::REGISTERS, CHANNELS = Chunk<State>::CHANNELS;
    int64_t channel = 0;
    for (; channel + C * CHANNELS <= head_dim; channel += C * CHANNELS)
        combine_chunks<Chunk<State>, R, C>(values + channel, token_stride, tokens, weights, weight_stride,
                                           acc + channel, acc_stride);
    for (; channel + CHANNELS <= head_dim; channel += CHANNELS)
        combine_chunks<Chunk<State>, R, 1>(values + channel, token_stride, tokens, weights, weight_stride,
                                           acc + channel, acc_stride);
    for (; channel + WIDTH <= head_dim; channel += WIDTH)
        combine_chunks<Single<State>, R, 1>(values + channel, token_stride, tokens, weights, weight_stride,
                                            acc + channel, acc_stride);
    for (int64_t token = 0; token < tokens; ++token)
        for (int64_t rest = channel; rest < head_dim; ++rest)
            for (int i = 0; i < R; ++i)
                acc[i * acc_stride + rest] +=
                    weights[i * weight_stride + token] * to_float(values[token * token_stride + rest]);
}

constexpr int64_t RUN_TOKENS = 32;  // their values stay in the nearest cache while each few of their channels are read

template <int R, typename State>
void dense_combine(const State* values, int64_t token_stride, int64_t tokens, int64_t head_dim, const float* weights,
                   int64_t weight_stride, float* acc, int64_t acc_stride) {
    for (int64_t token = 0; token < tokens; token += RUN_TOKENS)
        combine_run<R>(values + token * token_stride, token_stride, std::min(RUN_TOKENS, tokens - token), head_dim,
                       weights + token, weight_stride, acc, acc_stride);
}

}  // namespace
