// Quantizes states into packed blocks, in the layout of `groups.py`: rotation, search and packing of each block while
// it is in the first cache of a core.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../../utils/hadamard.h"
#include "../../utils/parallel.h"
#include "../../utils/vectors.h"
#include "search.h"

extern "C" {

// The fields below are those that `cpu_packing.py` packs, in the same order.
struct States {
    const void* states;
    int64_t batch, head, token;  // strides, in numbers
    int64_t head_dim;
};

struct Pack {
    States states, partner;
    uint8_t* codes;
    void* parameters;
    int64_t code_batch, code_head, code_block;
    int64_t parameter_batch, parameter_head, parameter_block;
    int64_t batch, kv_heads, blocks, block_tokens;
    int64_t is_keys, dtype, group, rotation, row_bytes;
    const int64_t* planes;
    int64_t plane_count;
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

    static const State* token_of(const States& side, int64_t batch, int64_t head, int64_t token) {
        return (const State*)side.states + batch * side.batch + head * side.head + token * side.token;
    }

    static bool are_finite(const State* numbers, int64_t count) {
        Register zeros = {};
        int64_t at = 0;
        for (; at + WIDTH <= count; at += WIDTH) zeros += load_register(numbers + at) * 0.0f;
        float zero = sum_of_lanes(zeros);
        for (; at < count; ++at) zero += to_float(numbers[at]) * 0.0f;
        return zero == 0;
    }

    // Loads a token as zeros if it is not finite in one of the sides. Returns whether it is.
    bool load_token(int64_t batch, int64_t head, int64_t token, float* to) const {
        const State* from = token_of(call.states, batch, head, token);
        const State* partner = token_of(call.partner, batch, head, token);
        if (!are_finite(from, head_dim) || !are_finite(partner, call.partner.head_dim)) {
            std::fill(to, to + head_dim, 0.0f);
            return false;
        }
        const Register limit = spread(float(call.limit));
        int64_t at = 0;
        for (; at + WIDTH <= head_dim; at += WIDTH)
            store_register(to + at, lower(higher(load_register(from + at), -limit), limit));
        for (; at < head_dim; ++at) to[at] = std::min(std::max(to_float(from[at]), -limit[0]), limit[0]);
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
        for (int64_t plane = 0; plane < call.plane_count; ++plane) {
            const int width = int(call.planes[plane]);
            const int64_t bytes = call.row_bytes * width / call.search.bits;
            const Bytes mask = Bytes{} + uint8_t((1 << width) - 1);
            for (int64_t byte = 0; byte < bytes; ++byte) {
                Bytes joined = {};
                for (int slot = 0; slot < 8 / width; ++slot) {
                    const Bytes column = load<Bytes>(&codes[(byte + slot * bytes) * WIDTH]);
                    joined |= (column >> below & mask) << (slot * width);
                }
                std::memcpy(&packed[(first + byte) * WIDTH], &joined, WIDTH);
            }
            first += bytes;
            below += width;
        }
        for (int64_t byte = 0; byte < call.row_bytes; byte += WIDTH) {
            Bytes square[WIDTH];
#pragma GCC unroll 16
            for (int i = 0; i < WIDTH; ++i) square[i] = load<Bytes>(&packed[(byte + i) * WIDTH]);
            transpose(square);
            const int64_t bytes = std::min<int64_t>(WIDTH, call.row_bytes - byte);
            for (int64_t row = 0; row < count; ++row)
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

}  // namespace

extern "C" void kvlayers_pack(const Pack* call) {
    if (call->dtype == 0) pack<float>(*call);
    if (call->dtype == 1) pack<BFloat16>(*call);
    if (call->dtype == 2) pack<Float16>(*call);
}
