// What blocks of keys say of the vectors that smooth them: the statistics of `smoothing.py`, which says what they are for.

#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>

#include "states.h"

// The fields are those that `cpu_packing.py` packs, in the same order.
extern "C" struct KeyStatistics {
    States keys;
    int64_t block;   // stride of the blocks, in numbers
    float* units;    // of each block
    float* vectors;  // means, then variances, then variances around circles, of the channels of each block
    int64_t batch, kv_heads, blocks, block_tokens, pieces, dtype;
    double largest_exact, largest_variation;
    int64_t threads;
};

namespace {

// One block of one head. The loops over channels are those that compilers make vectors of.
template <typename State>
class KeyBlock {
   public:
    explicit KeyBlock(const KeyStatistics& call)
        : call(call),
          channels(call.keys.head_dim),
          stride(rounded_up(channels)),
          tokens(call.block_tokens / call.pieces * call.pieces),
          keys(tokens * stride),
          squares(stride),
          of_tokens(tokens),
          means(call.pieces * channels),
          variances(call.pieces * channels) {}

    void describe(int64_t batch, int64_t head, int64_t block) {
        const int64_t index = (batch * call.kv_heads + head) * call.blocks + block;
        const int64_t apart = call.batch * call.kv_heads * call.blocks * channels;
        float* mean = call.vectors + index * channels;
        float *variance = mean + apart, *around_circles = variance + apart;
        call.units[index] = scale_tokens(batch, head, block);
        average_pieces();
        take_middle(means, channels, mean);
        take_middle(variances, channels, variance);
        std::copy(variance, variance + channels, around_circles);
        if (channels % 2) return;
        lower_to_circles(mean, 1, channels / 2, around_circles);
        lower_to_circles(mean, 2, 1, around_circles);
    }

   private:
    const KeyStatistics& call;
    const int64_t channels, stride, tokens;
    FloatBuffer keys, squares, of_tokens, means, variances;

    // Loads the tokens in units of the largest number of most pieces, and those that do not count as zeros. Afterwards
    // `of_tokens` says which tokens count. Returns the unit.
    float scale_tokens(int64_t batch, int64_t head, int64_t block) {
        FloatBuffer largest_of(call.pieces);
        for (int64_t token = 0; token < tokens; ++token) {
            const State* from = token_of<State>(call.keys, batch, head, token) + block * call.block;
            Register highest = {};
            for (int64_t at = 0; at < channels; at += WIDTH) {
                const Register numbers = load_first(from + at, channels - at);
                store_register(&keys[token * stride + at], numbers);
                highest = higher(highest, higher(numbers, -numbers));
            }
            const bool is_finite = are_zeros(zeros_of(from, channels));
            of_tokens[token] = is_finite ? highest_lane(highest) : INFINITY;
            float& largest = largest_of[token % call.pieces];
            if (is_finite) largest = std::max(largest, of_tokens[token]);
        }
        float unit;
        take_middle(largest_of, 1, &unit);
        unit = std::max(unit, FLT_MIN);
        for (int64_t token = 0; token < tokens; ++token) {
            float* key = &keys[token * stride];
            of_tokens[token] = of_tokens[token] / unit <= float(call.largest_exact);
            if (of_tokens[token])
                for (int64_t at = 0; at < channels; ++at) key[at] /= unit;
            else
                std::fill(key, key + channels, 0.0f);
        }
        return unit;
    }

    // Finds the means and the variances of the tokens of each piece that count.
    void average_pieces() {
        std::fill(means.begin(), means.end(), 0.0f);
        std::fill(variances.begin(), variances.end(), 0.0f);
        FloatBuffer counts(call.pieces);
        for (int64_t token = 0; token < tokens; ++token) {
            const float* key = &keys[token * stride];
            float* sum = &means[token % call.pieces * channels];
            counts[token % call.pieces] += of_tokens[token];
            for (int64_t at = 0; at < channels; ++at) sum[at] += key[at];
        }
        divide(means, counts);
        for (int64_t token = 0; token < tokens; ++token) {
            const float *key = &keys[token * stride], *mean = &means[token % call.pieces * channels];
            float* sum = &variances[token % call.pieces * channels];
            if (of_tokens[token])
                for (int64_t at = 0; at < channels; ++at) sum[at] += (key[at] - mean[at]) * (key[at] - mean[at]);
        }
        divide(variances, counts);
    }

    void divide(FloatBuffer& sums, const FloatBuffer& counts) const {
        for (int64_t piece = 0; piece < call.pieces; ++piece)
            for (int64_t at = 0; at < channels; ++at) sums[piece * channels + at] /= std::max(counts[piece], 1.0f);
    }

    // The medians over the pieces, whose numbers are sorted by exchanges of neighbours.
    void take_middle(FloatBuffer& of_pieces, int64_t count, float* to) const {
        for (int64_t round = 0; round < call.pieces; ++round)
            for (int64_t piece = round % 2; piece + 1 < call.pieces; piece += 2) {
                float *first = &of_pieces[piece * count], *second = first + count;
                for (int64_t at = 0; at < count; ++at) {
                    const float one = first[at], other = second[at];
                    first[at] = std::min(one, other);
                    second[at] = std::max(one, other);
                }
            }
        const float *low = &of_pieces[(call.pieces - 1) / 2 * count], *high = &of_pieces[call.pieces / 2 * count];
        // Halved first: the sum of two of the largest numbers would overflow.
        for (int64_t at = 0; at < count; ++at) to[at] = low[at] / 2 + high[at] / 2;
    }

    // Lowers the variances of pairs of channels that go in a circle to that of its radius. The channels of pair `i` are
    // `i * step` and, `apart` from it, its other one.
    void lower_to_circles(const float* mean, int64_t step, int64_t apart, float* variance) {
        const int64_t pairs = channels / 2;
        FloatBuffer sums(3 * pairs);
        float *radii = &sums[0], *radius_squares = radii + pairs, *roots = radius_squares + pairs;
        for (int64_t token = 0; token < tokens; ++token) {
            const float* key = &keys[token * stride];
            if (!of_tokens[token]) continue;
            for (int64_t at = 0; at < channels; ++at) squares[at] = (key[at] - mean[at]) * (key[at] - mean[at]);
            for (int64_t pair = 0; pair < pairs; ++pair) {
                const float radius = squares[pair * step] + squares[pair * step + apart];
                radii[pair] += radius;
                radius_squares[pair] += radius * radius;
                roots[pair] += std::sqrt(radius);
            }
        }
        for (int64_t pair = 0; pair < pairs; ++pair) {
            const float radius = radii[pair] / tokens, root = roots[pair] / tokens;
            if (radius_squares[pair] / tokens >= (1 + float(call.largest_variation)) * radius * radius) continue;
            for (float* of : {&variance[pair * step], &variance[pair * step + apart]})
                *of = std::min(*of, std::max(radius - root * root, 0.0f));
        }
    }
};

}  // namespace
