// Attention of many queries, in a library of its own: it is compiled after what each step needs.

#include "many_queries.h"

extern "C" {

// The arguments of `kvlayers_attend`, with segments in full precision. If `is_causal`, a query sees the tokens up to its own
// number, and there is no mask. `held` says which tokens a kv head has, [batch, kv_heads, tokens]; null for all.
void kvlayers_attend_many(const Arguments* arguments, const Segment* segments, const int64_t* const* rows,
                          int64_t is_causal, const uint8_t* held) {
    const Call call{*arguments, segments, rows};
    switch (call.dtype) {
        case FLOAT32: return attend_many<float>(call, is_causal, held);
        case BFLOAT16: return attend_many<BFloat16>(call, is_causal, held);
        case FLOAT16: return attend_many<Float16>(call, is_causal, held);
    }
}
}
