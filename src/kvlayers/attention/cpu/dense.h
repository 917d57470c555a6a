// Sums of tokens in full or half precision.
//
// While the keys of a unit are read, its values are fetched into the cache, and while these are read, the keys behind
// them: rows of tokens are too short, and their strides too long, for the prefetcher of a CPU.

#pragma once

#include <algorithm>
#include <cstdint>

#include "vectors.h"

namespace {

// Tokens whose states will be read next. No read of memory that is not there is harmful.
template <typename State>
struct Ahead {
    const State* states;
    int64_t token_stride, row_bytes;

    inline void fetch(int64_t token) const {
        const char* row = (const char*)(states + token * token_stride);
        for (int64_t byte = 0; byte < row_bytes; byte += LINE_BYTES) __builtin_prefetch(row + byte);
    }

    inline void fetch_line(int64_t token, int64_t channel) const {
        __builtin_prefetch(states + token * token_stride + channel);
    }
};

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

// Tokens of which R rows of scores are summed at once.
template <int R>
constexpr int TOKENS_AT_ONCE = R > 2 ? WIDTH / 4 : WIDTH / R;

// Scores of T tokens for each of R rows of an arranged query.
template <int R, int T, typename State>
inline void score_tokens(const State* keys, int64_t token_stride, int64_t head_dim, const float* query,
                         int64_t query_stride, float* scores, int64_t score_stride) {
    constexpr int REGISTERS = Chunk<State>::REGISTERS, CHANNELS = Chunk<State>::CHANNELS;
    Register sums[WIDTH] = {};
    int64_t channel = 0;
    for (; channel + CHANNELS <= head_dim; channel += CHANNELS) {
        Register states[T][REGISTERS];
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) Chunk<State>::load(keys + t * token_stride + channel, states[t]);
#pragma GCC unroll 4
        for (int i = 0; i < R; ++i)
#pragma GCC unroll 2
            for (int part = 0; part < REGISTERS; ++part) {
                const Register row = load_register(query + i * query_stride + channel + part * WIDTH);
#pragma GCC unroll 16
                for (int t = 0; t < T; ++t) sums[i * T + t] += row * states[t][part];
            }
    }
    for (; channel + WIDTH <= head_dim; channel += WIDTH)
        for (int i = 0; i < R; ++i)
            for (int t = 0; t < T; ++t)
                sums[i * T + t] += load_register(query + i * query_stride + channel) *
                                   load_register(keys + t * token_stride + channel);
    float found[WIDTH];
    store_register(found, sums_of_registers(sums));
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) scores[i * score_stride + t] = found[i * T + t];
    for (; channel < head_dim; ++channel)
        for (int i = 0; i < R; ++i)
            for (int t = 0; t < T; ++t)
                scores[i * score_stride + t] +=
                    query[i * query_stride + channel] * to_float(keys[t * token_stride + channel]);
}

template <int R, typename State>
void dense_scores(const State* keys, int64_t token_stride, int64_t tokens, int64_t head_dim, const float* query,
                  int64_t query_stride, float* scores, int64_t score_stride, Ahead<State> ahead) {
    constexpr int T = TOKENS_AT_ONCE<R>;
    int64_t token = 0;
    for (; token + T <= tokens; token += T) {
        for (int t = 0; t < T; ++t) ahead.fetch(token + t);
        score_tokens<R, T>(keys + token * token_stride, token_stride, head_dim, query, query_stride, scores + token,
                           score_stride);
    }
    for (; token < tokens; ++token)
        score_tokens<R, 1>(keys + token * token_stride, token_stride, head_dim, query, query_stride, scores + token,
                           score_stride);
}

// Adds the weighted values of C chunks of channels.
template <int R, int C, typename Chunk, typename State>
inline void combine_chunks(const State* values, int64_t token_stride, int64_t tokens, const float* weights,
                           int64_t weight_stride, float* acc, int64_t acc_stride, int64_t channel, Ahead<State> ahead) {
    constexpr int REGISTERS = Chunk::REGISTERS, CHANNELS = Chunk::CHANNELS;
    Register sums[R][C * REGISTERS];
#pragma GCC unroll 4
    for (int i = 0; i < R; ++i)
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c)
            Chunk::load_floats(acc + i * acc_stride + channel + c * CHANNELS, sums[i] + c * REGISTERS);
    for (int64_t token = 0; token < tokens; ++token) {
        Register states[C * REGISTERS];
        ahead.fetch_line(token, channel);
#pragma GCC unroll 4
        for (int c = 0; c < C; ++c)
            Chunk::load(values + token * token_stride + channel + c * CHANNELS, states + c * REGISTERS);
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
        for (int c = 0; c < C; ++c)
            Chunk::store_floats(acc + i * acc_stride + channel + c * CHANNELS, sums[i] + c * REGISTERS);
}

template <int R, typename State>
void dense_combine(const State* values, int64_t token_stride, int64_t tokens, int64_t head_dim, const float* weights,
                   int64_t weight_stride, float* acc, int64_t acc_stride, Ahead<State> ahead) {
    // Sixteen sums fit into the registers of AVX-512, eight into those of AVX2.
    constexpr int V = WIDTH == 16 ? 4 : R > 2 ? 2 : 4;
    constexpr int C = V / Chunk<State>::REGISTERS, CHANNELS = Chunk<State>::CHANNELS;
    int64_t channel = 0;
    for (; channel + C * CHANNELS <= head_dim; channel += C * CHANNELS)
        combine_chunks<R, C, Chunk<State>>(values, token_stride, tokens, weights, weight_stride, acc, acc_stride, channel,
                                           ahead);
    for (; channel + CHANNELS <= head_dim; channel += CHANNELS)
        combine_chunks<R, 1, Chunk<State>>(values, token_stride, tokens, weights, weight_stride, acc, acc_stride, channel,
                                           ahead);
    for (; channel + WIDTH <= head_dim; channel += WIDTH)
        combine_chunks<R, 1, Single<State>>(values, token_stride, tokens, weights, weight_stride, acc, acc_stride, channel,
                                            ahead);
    for (int64_t token = 0; token < tokens; ++token)
        for (int64_t rest = channel; rest < head_dim; ++rest)
            for (int i = 0; i < R; ++i)
                acc[i * acc_stride + rest] +=
                    weights[i * weight_stride + token] * to_float(values[token * token_stride + rest]);
}

}  // namespace
