// Attention of many queries, in a library of its own: it is compiled after what each step needs.

#include "many_queries.h"

extern "C" {

// The arguments of `kvlayers_attend`, with one segment in full precision. If `is_causal`, a query sees the tokens up to its
// own number, and there is no mask.
void kvlayers_attend_many(const Arguments* arguments, const Segment* segment, int64_t is_causal) {
    const Call call{*arguments, segment, nullptr};
    switch (call.dtype) {
        case FLOAT32: return attend_many<float>(call, is_causal);
        case BFLOAT16: return attend_many<BFloat16>(call, is_causal);
        case FLOAT16: return attend_many<Float16>(call, is_causal);
    }
}
}
