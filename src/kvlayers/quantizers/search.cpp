// The search of `native.py` for the grid of each group, on a CPU: the same steps, with each group in registers.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include "../utils/parallel.h"

namespace {

constexpr int CANDIDATES_AT_ONCE = 32;

// As wide as registers are: compilers compare wider vectors element by element.
#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

inline Floats load(const float* from) {
    Floats vector;
    std::memcpy(&vector, from, sizeof(vector));
    return vector;
}

inline void store(float* to, Floats vector) { std::memcpy(to, &vector, sizeof(vector)); }

inline Floats spread(float number) { return number - Floats{}; }

// Compilers make two instructions of `a < b ? a : b`, where there is one that does the same.
#if defined(__AVX512F__)
inline Floats least(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }

inline Floats most(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
inline Floats least(Floats a, Floats b) { return (Floats)_mm256_min_ps((__m256)a, (__m256)b); }

inline Floats most(Floats a, Floats b) { return (Floats)_mm256_max_ps((__m256)a, (__m256)b); }
#else
inline Floats least(Floats a, Floats b) { return a < b ? a : b; }

inline Floats most(Floats a, Floats b) { return a > b ? a : b; }
#endif

inline float least(float a, float b) { return std::min(a, b); }

inline float most(float a, float b) { return std::max(a, b); }

// The nearest number of bfloat16.
inline Floats to_bfloat16(Floats numbers) {
    Ints bits = (Ints)numbers;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) & int32_t(0xffff0000);
    return (Floats)bits;
}

inline float to_bfloat16(float number) { return to_bfloat16(spread(number))[0]; }

// Halves with halves: one lane after the other would wait for as many additions as there are lanes.
inline float sum(Floats vector) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)vector);
#else
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) vector[lane] += vector[lane + half];
    return vector[0];
#endif
}

}  // namespace

extern "C" {

// The fields below are those of the ctypes structure in `search.py`, in the same order.
struct Search {
    const float* states;  // [groups, size]
    uint8_t* codes;       // [groups, size]
    float* scale;         // [groups]
    float* zero;          // [groups]
    const float* clips;
    int64_t groups, size, bits, clip_count, refits, is_bfloat16, threads;
    double largest_stretch, largest_number, epsilon, smallest_scale;
};
}

namespace {

template <typename Number>
struct GridOf {
    Number scale, zero;
};

typedef GridOf<float> Grid;
typedef GridOf<Floats> Grids;

// Means over a group: of the codes, of the residues, of their squares, and of their products.
struct Moments {
    float code, residue, code_squares, residue_squares, products;
};

class Group {
   public:
    Group(const Search& search) : search(search), padded((search.size + LANES - 1) / LANES * LANES) {
        states.resize(padded);
        weights.resize(padded);
        for (int64_t i = 0; i < padded; ++i) weights[i] = i < search.size ? 1.0f : 0.0f;
        top = float((1 << search.bits) - 1);
        count = float(search.size);
        for (int64_t below = 0; below < search.clip_count; ++below)
            for (int64_t above = 0; above < search.clip_count; ++above) {
                lower_clips.push_back(search.clips[below]);
                upper_clips.push_back(search.clips[above]);
            }
        candidates = lower_clips.size();
        const int64_t whole = (candidates + CANDIDATES_AT_ONCE - 1) / CANDIDATES_AT_ONCE * CANDIDATES_AT_ONCE;
        lower_clips.resize(whole);
        upper_clips.resize(whole);
    }

    void quantize(int64_t index) {
        const float* from = search.states + index * search.size;
        std::copy(from, from + search.size, states.begin());
        std::fill(states.begin() + search.size, states.end(), from[0]);
        Floats lows = load(&states[0]), highs = lows;
        for (int64_t at = LANES; at < padded; at += LANES) {
            lows = least(lows, load(&states[at]));
            highs = most(highs, load(&states[at]));
        }
        float lowest = lows[0], highest = highs[0];
        for (int lane = 1; lane < LANES; ++lane) {
            lowest = std::min(lowest, lows[lane]);
            highest = std::max(highest, highs[lane]);
        }
        const float step = highest / top - lowest / top;

        Grid best = grid<float>(step, lowest);
        if (search.clip_count > 1) {
            const float unit = best.scale;
            float smallest = INFINITY;
            // A lane for each candidate: nothing has to be added up across lanes. The first has no clips.
            for (int64_t first = 0; first < candidates; first += CANDIDATES_AT_ONCE) {
                float scales[CANDIDATES_AT_ONCE], zeros[CANDIDATES_AT_ONCE], wrong[CANDIDATES_AT_ONCE];
                errors(step, lowest, unit, first, scales, zeros, wrong);
                for (int64_t at = 0; at < std::min<int64_t>(CANDIDATES_AT_ONCE, candidates - first); ++at)
                    if (first + at == 0 || wrong[at] < smallest) {
                        best = {scales[at], zeros[at]};
                        smallest = wrong[at];
                    }
            }
            const auto consider = [&](Grid candidate) {
                const float wrong = error(candidate, unit);
                if (wrong < smallest) {
                    best = candidate;
                    smallest = wrong;
                }
            };
            Grid fitted = best;
            for (int64_t round = 0; round < search.refits; ++round) {
                fitted = refit(fitted);
                consider(fitted);
            }
            write_codes(best, index);
            best = stretched(best);
        } else {
            write_codes(best, index);
        }
        search.scale[index] = best.scale;
        search.zero[index] = best.zero;
    }

   private:
    const Search& search;
    const int64_t padded;
    std::vector<float> states, weights, lower_clips, upper_clips;
    int64_t candidates;
    float top, count;

    template <typename Number>
    Number rounded(Number number) const {
        return search.is_bfloat16 ? to_bfloat16(number) : number;
    }

    // A grid as it is stored: its scale can be a divisor, and the dtype can hold its last state.
    template <typename Number>
    GridOf<Number> grid(Number scale, Number zero) const {
        const Number largest_number = float(search.largest_number) - Number{};
        const float epsilon = float(search.epsilon);
        zero = rounded(least(most(zero, -largest_number), largest_number));
        const Number largest = (largest_number / top - most(zero, Number{}) / top) * (1 - epsilon);
        const Number smallest = most(most(zero, -zero) * (epsilon / top / 8), float(search.smallest_scale) - Number{});
        return {rounded(most(least(scale, largest), smallest)), zero};
    }

    // Exact codes are clamped before they are rounded, which gives the same result and keeps them small.
    void code(Grid on, int64_t at, Floats* codes, Floats* residues) const {
        const Floats shifter = spread(12582912.0f);
        const Floats exact = (load(&states[at]) - on.zero) / on.scale;
        *codes = (least(most(exact, Floats{}), spread(top)) + shifter) - shifter;
        *residues = exact - *codes;
    }

    // With the inverse of the scale: codes for a comparison need not be exactly those of a division.
    float error(Grid on, float unit) const {
        const Floats shifter = spread(12582912.0f), highest = spread(top);
        const float inverse = 1 / on.scale;
        Floats total = {};
        for (int64_t at = 0; at < padded; at += LANES) {
            const Floats exact = (load(&states[at]) - on.zero) * inverse;
            const Floats residues = exact - ((least(most(exact, Floats{}), highest) + shifter) - shifter);
            total += residues * residues * load(&weights[at]);
        }
        const float ratio = on.scale / unit;
        return sum(total) * ratio * ratio;
    }

    // The candidates from `first` on, and their errors.
    void errors(float step, float lowest, float unit, int64_t first, float* scales, float* zeros, float* wrong) const {
        constexpr int VECTORS = CANDIDATES_AT_ONCE / LANES;
        const Floats shifter = spread(12582912.0f), highest = spread(top);
        Grids grids[VECTORS];
        Floats inverse[VECTORS], totals[VECTORS] = {};
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; ++i) {
            const Floats low = load(&lower_clips[first + i * LANES]), high = load(&upper_clips[first + i * LANES]);
            grids[i] = grid<Floats>(step * (1 - low - high), lowest + step * (top * low));
            inverse[i] = 1 / grids[i].scale;
        }
        for (int64_t at = 0; at < search.size; ++at)
#pragma GCC unroll 4
            for (int i = 0; i < VECTORS; ++i) {
                const Floats exact = (states[at] - grids[i].zero) * inverse[i];
                const Floats residues = exact - ((least(most(exact, Floats{}), highest) + shifter) - shifter);
                totals[i] += residues * residues;
            }
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; ++i) {
            const Floats ratio = grids[i].scale / unit;
            store(scales + i * LANES, grids[i].scale);
            store(zeros + i * LANES, grids[i].zero);
            store(wrong + i * LANES, totals[i] * ratio * ratio);
        }
    }

    Moments moments(Grid on) const {
        Floats code_sum = {}, residue_sum = {}, code_squares = {}, residue_squares = {}, products = {};
        for (int64_t at = 0; at < padded; at += LANES) {
            Floats codes, residues;
            code(on, at, &codes, &residues);
            const Floats weight = load(&weights[at]);
            codes *= weight;
            residues *= weight;
            code_sum += codes;
            residue_sum += residues;
            code_squares += codes * codes;
            residue_squares += residues * residues;
            products += codes * residues;
        }
        return {sum(code_sum) / count, sum(residue_sum) / count, sum(code_squares) / count,
                sum(residue_squares) / count, sum(products) / count};
    }

    Grid refit(Grid from) const {
        const Moments of = moments(from);
        const float variance = of.code_squares - of.code * of.code;
        const float slope = (of.products - of.code * of.residue) / std::max(variance, 0.5f / count);
        const float zero = rounded(from.zero + from.scale * (of.residue - slope * of.code));
        const float moved = (from.zero - zero) / from.scale;
        const float growth = (of.products + moved * of.code) / std::max(of.code_squares, 1 / count);
        return grid<float>(from.scale * (1 + growth), zero);
    }

    Grid stretched(Grid from) const {
        const Moments of = moments(from);
        const float variance = of.code_squares - of.code * of.code;
        const float covariance = of.products - of.code * of.residue;
        const float residue_variance = of.residue_squares - of.residue * of.residue;
        const float stretch = (covariance + residue_variance) / std::max(variance + covariance, 1 / count);
        const float scale = from.scale * (1 + std::min(std::max(stretch, 0.0f), float(search.largest_stretch)));
        const float mean = from.scale * (of.code + of.residue);
        const Grid stored = grid<float>(scale, from.zero + (mean - scale * of.code));
        const float exact = (mean + (from.zero - stored.zero)) / std::max(of.code, 1 / count);
        return grid<float>(std::min(std::max(exact, scale * 0.95f), scale * 1.05f), stored.zero);
    }

    void write_codes(Grid on, int64_t index) const {
        uint8_t* to = search.codes + index * search.size;
        for (int64_t at = 0; at < padded; at += LANES) {
            Floats codes, residues;
            code(on, at, &codes, &residues);
            const Bytes bytes = __builtin_convertvector(__builtin_convertvector(codes, Ints), Bytes);
            std::memcpy(to + at, &bytes, std::min<int64_t>(LANES, search.size - at));
        }
    }
};

constexpr int64_t GROUPS_AT_ONCE = 64;

}  // namespace

extern "C" void kvlayers_search(const Search* search) {
    const int64_t runs = (search->groups + GROUPS_AT_ONCE - 1) / GROUPS_AT_ONCE;
    parallel_for(runs, search->threads, [&](int64_t run) {
        Group group(*search);
        const int64_t end = std::min(search->groups, (run + 1) * GROUPS_AT_ONCE);
        for (int64_t index = run * GROUPS_AT_ONCE; index < end; ++index) group.quantize(index);
    });
}
