// Keys, or values, as tensors hold them.

#pragma once

#include <cstdint>

#include "../../utils/vectors.h"

extern "C" struct States {
    const void* states;
    int64_t batch, head, token;  // strides, in numbers
    int64_t head_dim;
};

namespace {

template <typename State>
inline const State* token_of(const States& side, int64_t batch, int64_t head, int64_t token) {
    return (const State*)side.states + batch * side.batch + head * side.head + token * side.token;
}

template <typename State>
inline Register zeros_of(const State* numbers, int64_t count) {
    Register zeros = {};
    for (int64_t at = 0; at < count; at += WIDTH) zeros += load_first(numbers + at, count - at) * 0.0f;
    return zeros;
}

// Whether all numbers of a register are zeros: not if one of the numbers that `zeros_of` had is not finite.
inline bool are_zeros(Register numbers) { return sum_of_lanes(numbers) == 0; }

}  // namespace
