// The results of items of work, which are merged at the end.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../../../utils/vectors.h"
#include "call.h"
#include "plan.h"

namespace {

// Result of one item, for each row: sums over tokens weighted by e^(score - highest). Sums of rotated values are apart.
struct Partial {
    int64_t padded_value;
    float *highest, *total, *plain, *rotated;

    float* plain_of(int64_t row) const { return plain + row * padded_value; }
    float* rotated_of(int64_t row) const { return rotated + row * padded_value; }

    // Makes sums of one row those for another highest score.
    void shrink(int64_t row, float factor) const {
        total[row] *= factor;
        for (int64_t channel = 0; channel < padded_value; ++channel) plain_of(row)[channel] *= factor;
        for (int64_t channel = 0; channel < padded_value; ++channel) rotated_of(row)[channel] *= factor;
    }
};

// The results of all items, before any token.
class Partials {
   public:
    Partials(const Call& call, const Plan& plan, float initial_highest)
        : rows_of_reader(call.groups * call.query_tokens), padded_value(rounded_up(call.value_dim + 8)) {
        int64_t count = 0;
        for (const Item& item : plan.items) {
            const int64_t rows = rows_of(item);
            firsts.push_back(count);
            count += 2 * rounded_up(rows) + 2 * rows * padded_value;
        }
        floats.resize(count);
        for (const Item& item : plan.items) {
            const Partial partial = of(plan, &item - plan.items.data());
            std::fill(partial.highest, partial.highest + rows_of(item), initial_highest);
        }
    }

    Partial of(const Plan& plan, int64_t item) {
        const int64_t rows = rows_of(plan.items[item]);
        float* total = floats.data() + firsts[item] + rounded_up(rows);
        float* plain = total + rounded_up(rows);
        return {padded_value, total - rounded_up(rows), total, plain, plain + rows * padded_value};
    }

   private:
    const int64_t rows_of_reader, padded_value;
    std::vector<int64_t> firsts;
    FloatBuffer floats;

    int64_t rows_of(const Item& item) const { return item.run->readers[item.row].size() * rows_of_reader; }
};

}  // namespace
