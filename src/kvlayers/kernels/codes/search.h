// The search of `native.py` for the grid of each group: the same steps, with a group in each lane of a register.

#pragma once

#include <cmath>
#include <cstdint>

#include "../../utils/vectors.h"

// The fields are those of the ctypes structure in `pack.py`, in the same order.
struct Search {
    int64_t refits, bits;
    double clip_step, largest_stretch, largest_number, epsilon, smallest_scale;
};

namespace {

struct Grids {
    Register scale, zero;
};

// Means over each group: of the codes, of the residues, of their squares, and of their products.
struct Moments {
    Register code, residue, code_squares, residue_squares, products;
};

inline Register where(IntRegister condition, Register yes, Register no) {
    return (Register)((condition & (IntRegister)yes) | (~condition & (IntRegister)no));
}

template <typename State>
class GroupSearch {
   public:
    GroupSearch(const Search& search, int64_t size)
        : search(search), size(size), shifted(size * WIDTH), top(spread(float((1 << search.bits) - 1))),
          count(float(size)) {}

    // Quantizes a group in each lane: its states are `stride` floats apart, its codes WIDTH bytes.
    Grids quantize(const float* states, int64_t stride, uint8_t* codes) {
        Register lowest = load_register(states), highest = lowest;
        for (int64_t at = 1; at < size; ++at) {
            const Register state = load_register(states + at * stride);
            lowest = lower(lowest, state);
            highest = higher(highest, state);
        }
        const Register step = highest / top - lowest / top;
        Grids best = grid(step, lowest);
        if (search.clip_step == 0) {
            write_codes(best, states, stride, codes);
            return best;
        }
        const Register unit = best.scale;
        best = best_clipped(best, step, lowest, states, stride);
        Moments of_best = moments(best, states, stride);
        Register least = error(best, of_best, unit);
        Grids fitted = best;
        Moments of_fitted = of_best;
        for (int64_t round = 0; round < search.refits; ++round) {
            fitted = refit(fitted, of_fitted);
            of_fitted = moments(fitted, states, stride);
            const Register wrong = error(fitted, of_fitted, unit);
            const IntRegister is_better = wrong < least;
            least = where(is_better, wrong, least);
            best = {where(is_better, fitted.scale, best.scale), where(is_better, fitted.zero, best.zero)};
            of_best = {where(is_better, of_fitted.code, of_best.code),
                       where(is_better, of_fitted.residue, of_best.residue),
                       where(is_better, of_fitted.code_squares, of_best.code_squares),
                       where(is_better, of_fitted.residue_squares, of_best.residue_squares),
                       where(is_better, of_fitted.products, of_best.products)};
        }
        write_codes(best, states, stride, codes);
        return stretched(best, of_best);
    }

   private:
    static constexpr int AT_ONCE = 5;  // clipped ranges: a half of `CLIPS`
    static constexpr float NEAR_BELOW[AT_ONCE] = {1, -1, -1, 0, 0.5f}, NEAR_ABOVE[AT_ONCE] = {-1, 1, 0, -1, 0.5f};

    const Search& search;
    const int64_t size;
    FloatBuffer shifted;
    const Register top;
    const float count;

    static Register rounded(Register numbers) { return rounded_to<State>(numbers); }

    // A grid as it is stored: its scale can be a divisor, and the dtype can hold its last state.
    Grids grid(Register scale, Register zero) const {
        const Register largest_number = spread(float(search.largest_number));
        const float epsilon = float(search.epsilon);
        zero = rounded(lower(higher(zero, -largest_number), largest_number));
        const Register largest = (largest_number / top - higher(zero, Register{}) / top) * (1 - epsilon);
        const Register smallest = higher(higher(zero, -zero) * (epsilon / top / 8), spread(float(search.smallest_scale)));
        return {rounded(higher(lower(scale, largest), smallest)), zero};
    }

    Register nearest_codes(Register exact) const { return nearest(lower(higher(exact, Register{}), top)); }

    // The squared errors of grids, in units of their scales. Not inlined: there is a register for each number here.
    __attribute__((noinline)) void errors(const Register* inverses, const Register* offsets, Register* totals) const {
        static_assert(AT_ONCE == 5, "one variable for each");
        Register total[AT_ONCE] = {}, inverse[AT_ONCE], offset[AT_ONCE];
#pragma GCC unroll 5
        for (int i = 0; i < AT_ONCE; ++i) {
            inverse[i] = inverses[i];
            offset[i] = offsets[i];
        }
        for (int64_t at = 0; at < size; ++at) {
            const Register state = load_register(&shifted[at * WIDTH]);
#pragma GCC unroll 5
            for (int i = 0; i < AT_ONCE; ++i) {
                const Register exact = state * inverse[i] + offset[i];
                const Register residue = exact - nearest_codes(exact);
                total[i] += residue * residue;
            }
        }
#pragma GCC unroll 5
        for (int i = 0; i < AT_ONCE; ++i) totals[i] = total[i];
    }

    // The range, or the clipped one, with the least squared error. Arithmetic starts from the lowest state and with the
    // inverse of the scale: codes for a comparison need not be exactly those of a division.
    Grids best_clipped(Grids best, Register step, Register lowest, const float* states, int64_t stride) {
        for (int64_t at = 0; at < size; ++at)
            store_register(&shifted[at * WIDTH], load_register(states + at * stride) - lowest);
        const Register unit = best.scale;
        Register least = spread(INFINITY), even = Register{};
        for (const bool is_even : {true, false}) {
            Grids grids[AT_ONCE];
            Register inverses[AT_ONCE], offsets[AT_ONCE], totals[AT_ONCE];
#pragma GCC unroll 5
            for (int i = 0; i < AT_ONCE; ++i) {
                const Register low = higher(even + float(search.clip_step) * (is_even ? i : NEAR_BELOW[i]), Register{});
                const Register high = higher(even + float(search.clip_step) * (is_even ? i : NEAR_ABOVE[i]), Register{});
                grids[i] = grid(step * (1 - low - high), lowest + step * (top * low));
                inverses[i] = 1 / grids[i].scale;
                offsets[i] = (lowest - grids[i].zero) * inverses[i];
            }
            errors(inverses, offsets, totals);
#pragma GCC unroll 5
            for (int i = 0; i < AT_ONCE; ++i) {
                const Register ratio = grids[i].scale / unit, wrong = totals[i] * ratio * ratio;
                const IntRegister is_better = wrong < least;
                least = where(is_better, wrong, least);
                if (is_even) even = where(is_better, spread(float(search.clip_step) * i), even);
                best = {where(is_better, grids[i].scale, best.scale), where(is_better, grids[i].zero, best.zero)};
            }
        }
        return best;
    }

    Moments moments(Grids on, const float* states, int64_t stride) const {
        const Register inverse = 1 / on.scale;
        Moments sums = {};
        for (int64_t at = 0; at < size; ++at) {
            const Register exact = (load_register(states + at * stride) - on.zero) * inverse;
            const Register codes = nearest_codes(exact), residues = exact - codes;
            sums.code += codes;
            sums.residue += residues;
            sums.code_squares += codes * codes;
            sums.residue_squares += residues * residues;
            sums.products += codes * residues;
        }
        return {sums.code / count, sums.residue / count, sums.code_squares / count, sums.residue_squares / count,
                sums.products / count};
    }

    // In units of `unit`, because squares of the largest states would overflow.
    Register error(Grids on, const Moments& of, Register unit) const {
        const Register ratio = on.scale / unit;
        return of.residue_squares * ratio * ratio;
    }

    Grids refit(Grids from, const Moments& of) const {
        const Register variance = of.code_squares - of.code * of.code;
        const Register slope = (of.products - of.code * of.residue) / higher(variance, spread(0.5f / count));
        const Register zero = rounded(from.zero + from.scale * (of.residue - slope * of.code));
        const Register moved = (from.zero - zero) / from.scale;
        const Register growth = (of.products + moved * of.code) / higher(of.code_squares, spread(1 / count));
        return grid(from.scale * (1 + growth), zero);
    }

    Grids stretched(Grids from, const Moments& of) const {
        const Register variance = of.code_squares - of.code * of.code;
        const Register covariance = of.products - of.code * of.residue;
        const Register residue_variance = of.residue_squares - of.residue * of.residue;
        const Register stretch = (covariance + residue_variance) / higher(variance + covariance, spread(1 / count));
        const Register largest = spread(float(search.largest_stretch));
        const Register scale = from.scale * (1 + lower(higher(stretch, Register{}), largest));
        const Register mean = from.scale * (of.code + of.residue);
        const Grids stored = grid(scale, from.zero + (mean - scale * of.code));
        const Register exact = (mean + (from.zero - stored.zero)) / higher(of.code, spread(1 / count));
        return grid(lower(higher(exact, scale * 0.95f), scale * 1.05f), stored.zero);
    }

    void write_codes(Grids on, const float* states, int64_t stride, uint8_t* codes) const {
        for (int64_t at = 0; at < size; ++at) {
            const Register exact = (load_register(states + at * stride) - on.zero) / on.scale;
            store_bytes(codes + at * WIDTH, nearest_integers(nearest_codes(exact)));
        }
    }
};

}  // namespace
