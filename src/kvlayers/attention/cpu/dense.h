// Sums of tokens in full or half precision.

#pragma once

#include <algorithm>
#include <cstdint>
#include "vectors.h"

namespace {

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

}  // namespace
