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

// Rotates as `rotate` does. REGISTERS registers stay registers as long as only their numbers are mixed.
template <int REGISTERS>
inline void rotate_in_registers(float* channels, int64_t count, int64_t size) {
    const auto lanes = std::make_integer_sequence<int, WIDTH>();
    const Register norm = spread(1 / std::sqrt(float(size)));
    for (int64_t at = 0; at < count; at += REGISTERS * WIDTH) {
        Register numbers[REGISTERS];
#pragma GCC unroll 16
        for (int i = 0; i < REGISTERS; ++i) {
            numbers[i] = load_register(channels + at + i * WIDTH) * norm;
            if (size > 1) numbers[i] = mixed<1>(numbers[i], lanes);
            if (size > 2) numbers[i] = mixed<2>(numbers[i], lanes);
            if (size > 4) numbers[i] = mixed<4>(numbers[i], lanes);
            if (WIDTH > 8 && size > 8) numbers[i] = mixed<WIDTH / 2>(numbers[i], lanes);
        }
#pragma GCC unroll 16
        for (int apart = 1; apart < REGISTERS; apart *= 2)
#pragma GCC unroll 16
            for (int i = 0; i < REGISTERS; ++i)
                if (!(i & apart)) {
                    const Register one = numbers[i], other = numbers[i + apart];
                    numbers[i] = one + other;
                    numbers[i + apart] = one - other;
                }
#pragma GCC unroll 16
        for (int i = 0; i < REGISTERS; ++i) store_register(channels + at + i * WIDTH, numbers[i]);
    }
    for (int64_t stride = REGISTERS * WIDTH; stride < size; stride *= 2)
        for (int64_t first = 0; first < count; first += 2 * stride)
            for (int64_t at = first; at < first + stride; at += WIDTH) {
                const Register one = load_register(channels + at), other = load_register(channels + at + stride);
                store_register(channels + at, one + other);
                store_register(channels + at + stride, one - other);
            }
}

// Rotates each `size` of `count` channels, in memory for a multiple of WIDTH.
inline void rotate(float* channels, int64_t count, int64_t size) {
    constexpr int COMMON = 64;  // divides the size of most models
    if (size % COMMON == 0)
        rotate_in_registers<COMMON / WIDTH>(channels, count, size);
    else
        rotate_in_registers<1>(channels, count, size);
}

// The largest power of two that divides a number of channels: how many are rotated together.
inline int64_t rotation_size(int64_t channels) { return channels & -channels; }

}  // namespace
