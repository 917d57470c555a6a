// Quantizes states into packed blocks, in the layout of `groups.py`: rotation, search and packing of each block while
// it is in the first cache of a core.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../../utils/hadamard.h"
#include "../../utils/parallel.h"
#include "../../utils/vectors.h"
#include "key_statistics.h"
#include "search.h"
#include "states.h"

extern "C" {

// The fields below are those that `cpu_packing.py` packs, in the same order.
struct Pack {
    States states, partner;
    const float* factors;  // of the channels of each sequence and head, null without
    uint8_t* codes;
    void* parameters;
    int64_t code_batch, code_head, code_block;
    int64_t parameter_batch, parameter_head, parameter_block;
    int64_t batch, kv_heads, blocks, block_tokens;
    int64_t is_keys, dtype, group, rotation, row_bytes;
    double limit;
    Search search;
    int64_t threads;
};
}

namespace {

// One block of one side. Its states lie by columns, so that a register holds the same column of WIDTH rows.
template <typename State>
class BlockPacker {
   public:
    explicit BlockPacker(const Pack& call)
        : call(call),
          head_dim(call.states.head_dim),
          rows(call.is_keys ? head_dim : call.block_tokens),
          columns(call.is_keys ? call.block_tokens : head_dim),
          row_stride(rounded_up(rows)),
          groups(columns / call.group),
          states(columns * row_stride),
          tokens(WIDTH * rounded_up(head_dim)),
          is_finite(call.block_tokens),
          codes((columns + 7) / 8 * 8 * WIDTH),
          packed(rounded_up(call.row_bytes) * WIDTH),
          search(call.search, call.group) {}

    void pack(int64_t batch, int64_t head, int64_t block) {
        for (int64_t token = 0; token < call.block_tokens; ++token) {
            float* to = call.is_keys ? &states[token * row_stride] : &tokens[token % WIDTH * rounded_up(head_dim)];
            is_finite[token] = load_token(batch, head, block * call.block_tokens + token, to);
            const bool is_last = token % WIDTH == WIDTH - 1 || token == call.block_tokens - 1;
            if (!call.is_keys && is_last) store_columns(token / WIDTH * WIDTH);
        }
        uint8_t* to = call.codes + batch * call.code_batch + head * call.code_head + block * call.code_block;
        State* scales = (State*)call.parameters + batch * call.parameter_batch + head * call.parameter_head +
                        block * call.parameter_block;
        for (int64_t row = 0; row < rows; row += WIDTH) {
            const int64_t count = std::min<int64_t>(WIDTH, rows - row);
            for (int64_t group = 0; group < groups; ++group) {
                const int64_t column = group * call.group;
                const Grids found =
                    search.quantize(&states[column * row_stride + row], row_stride, &codes[column * WIDTH]);
                for (int64_t lane = 0; lane < count; ++lane) {
                    State* scale = scales + (row + lane) * groups + group;
                    const bool is_readable = call.is_keys || is_finite[row + lane];
                    from_float(is_readable ? found.scale[lane] : NAN, scale);
                    from_float(is_readable ? found.zero[lane] : NAN, scale + rows * groups);
                }
            }
            write_rows(to + row * call.row_bytes, count);
        }
    }

   private:
    const Pack& call;
    const int64_t head_dim, rows, columns, row_stride, groups;
    FloatBuffer states, tokens;
    std::vector<uint8_t> is_finite, codes, packed;
    GroupSearch<State> search;

    // Loads a token as zeros if it is not finite in one of the sides. Returns whether it is.
    bool load_token(int64_t batch, int64_t head, int64_t token, float* to) const {
        const State* from = token_of<State>(call.states, batch, head, token);
        const Register limit = spread(float(call.limit));
        const float* factors = call.factors ? call.factors + (batch * call.kv_heads + head) * head_dim : nullptr;
        Register zeros = zeros_of(token_of<State>(call.partner, batch, head, token), call.partner.head_dim);
        for (int64_t at = 0; at < head_dim; at += WIDTH) {
            Register numbers = load_first(from + at, head_dim - at);
            zeros += numbers * 0.0f;
            if (factors) numbers = rounded_to<State>(numbers / load_first(factors + at, head_dim - at));
            store_register(to + at, lower(higher(numbers, -limit), limit));
        }
        if (!are_zeros(zeros)) {
            std::fill(to, to + head_dim, 0.0f);
            return false;
        }
        if (call.rotation > 1) rotate(to, head_dim, call.rotation);
        return true;
    }

    // Makes WIDTH rows of states from as many tokens.
    void store_columns(int64_t row) {
        for (int64_t first = 0; first < head_dim; first += WIDTH) {
            Register square[WIDTH];
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; ++i) square[i] = load_register(&tokens[i * rounded_up(head_dim) + first]);
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; ++i)
                if (first + i < head_dim) store_register(&states[(first + i) * row_stride + row], square[i]);
        }
    }

    // Packs the codes of some rows, see `groups.py`.
    void write_rows(uint8_t* to, int64_t count) {
        typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));
        int64_t first = 0;
        int below = 0;
        for (int width = 8; width; width /= 2) {
            if (!(call.search.bits & width)) continue;
            const int64_t bytes = call.row_bytes * width / call.search.bits * WIDTH;
            // Eight codes at once: shifts leave no bits in another byte, as they are masked in between.
            const uint64_t mask = ((1 << width) - 1) * 0x0101010101010101u;
            for (int64_t at = 0; at < bytes; at += sizeof(mask)) {
                uint64_t joined = 0;
                for (int slot = 0; slot < 8 / width; ++slot)
                    joined |= (load<uint64_t>(&codes[slot * bytes + at]) >> below & mask) << (slot * width);
                std::memcpy(&packed[first + at], &joined, sizeof(joined));
            }
            first += bytes;
            below += width;
        }
        for (int64_t byte = 0; byte < call.row_bytes; byte += WIDTH) {
            Bytes square[WIDTH];
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; ++i) square[i] = load<Bytes>(&packed[(byte + i) * WIDTH]);
            transpose(square);
            const int64_t bytes = call.row_bytes - byte;
            for (int64_t row = 0; row < count; ++row)
                if (bytes >= WIDTH)  // a number of bytes that is known is copied at once
                    std::memcpy(to + row * call.row_bytes + byte, &square[row], WIDTH);
                else
                    std::memcpy(to + row * call.row_bytes + byte, &square[row], bytes);
        }
    }
};

template <typename State>
void pack(const Pack& call) {
    parallel_for(call.batch * call.kv_heads * call.blocks, call.threads, [&] {
        return [&, packer = BlockPacker<State>(call)](int64_t index) mutable {
            const int64_t heads = index / call.blocks;
            packer.pack(heads / call.kv_heads, heads % call.kv_heads, index % call.blocks);
        };
    });
}

template <typename State>
void describe_keys(const KeyStatistics& call) {
    parallel_for(call.batch * call.kv_heads * call.blocks, call.threads, [&] {
        return [&, of_block = KeyBlock<State>(call)](int64_t index) mutable {
            const int64_t heads = index / call.blocks;
            of_block.describe(heads / call.kv_heads, heads % call.kv_heads, index % call.blocks);
        };
    });
}

}  // namespace

extern "C" void kvlayers_pack(const Pack* call) {
    if (call->dtype == 0) pack<float>(*call);
    if (call->dtype == 1) pack<BFloat16>(*call);
    if (call->dtype == 2) pack<Float16>(*call);
}

extern "C" void kvlayers_describe_keys(const KeyStatistics* call) {
    if (call->dtype == 0) describe_keys<float>(*call);
    if (call->dtype == 1) describe_keys<BFloat16>(*call);
    if (call->dtype == 2) describe_keys<Float16>(*call);
}
