// The rotation of `hadamard.py`.

#pragma once

#include <cmath>
#include <cstdint>
#include <utility>

#include "vectors.h"

namespace {

// Sums and differences of the lanes that are STRIDE apart.
template <int STRIDE, int... LANE>
inline Register mixed(Register numbers, std::integer_sequence<int, LANE...>) {
    const Register signs = {(LANE & STRIDE ? -1.0f : 1.0f)...};
    return lanes_of<(LANE ^ STRIDE)...>(numbers, numbers) + numbers * signs;
}

// Rotates each `size` of `count` channels, in memory for a multiple of WIDTH.
inline void rotate(float* channels, int64_t count, int64_t size) {
    const auto lanes = std::make_integer_sequence<int, WIDTH>();
    const Register norm = spread(1 / std::sqrt(float(size)));
    for (int64_t at = 0; at < count; at += WIDTH) {
        Register numbers = load_register(channels + at) * norm;
        if (size > 1) numbers = mixed<1>(numbers, lanes);
        if (size > 2) numbers = mixed<2>(numbers, lanes);
        if (size > 4) numbers = mixed<4>(numbers, lanes);
        if (WIDTH > 8 && size > 8) numbers = mixed<WIDTH / 2>(numbers, lanes);
        store_register(channels + at, numbers);
    }
    for (int64_t stride = WIDTH; stride < size; stride *= 2)
        for (int64_t first = 0; first < count; first += 2 * stride)
            for (int64_t at = first; at < first + stride; at += WIDTH) {
                const Register one = load_register(channels + at), other = load_register(channels + at + stride);
                store_register(channels + at, one + other);
                store_register(channels + at + stride, one - other);
            }
}

// The largest power of two that divides a number of channels: how many are rotated together.
inline int64_t rotation_size(int64_t channels) { return channels & -channels; }

}  // namespace
