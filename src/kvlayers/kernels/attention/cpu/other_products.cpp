// Products of all codes that `whole_products.cpp` does not multiply. See `products.h`.

#include "../../../utils/parallel.h"  // of which every library is given an address when it is loaded
#include "packed.h"

namespace {

struct OtherProducts {
    const Multiplication& of;

    template <int R>
    void rows() {
        if (of.side.floating) return accumulate_layout<Planes<8>, R>(FloatProducts<Float8>(), of);
        switch (of.side.bits) {
            case 1: return few_bits<Planes<1>, R>();
            case 2: return few_bits<Planes<2>, R>();
            case 3: return few_bits<Planes<2, 1>, R>();
            case 4: return look_up<Planes<4>, R>(of.side.levels);
            case 5: return multiply_integers<Planes<4, 1>, R>(of);
            case 6: return multiply_integers<Planes<4, 2>, R>(of);
        }
    }

    template <typename Layout, int R>
    void few_bits() {
#if defined(MULTIPLIES_BYTES)
        if (of.quads) return accumulate_layout<Layout, R>(QuadProducts{of.units}, of);
#endif
        // A look-up in a register of 16 floats takes about as long as a conversion, so it serves rare integers as well.
        if (WIDTH == 16 || of.side.levels) return look_up<Layout, R>(of.side.levels ? of.side.levels : WHOLE_NUMBERS);
        if constexpr (WIDTH == 8) accumulate_layout<Layout, R>(FloatProducts<Integer>(), of);
    }

    template <typename Layout, int R>
    void look_up(const float* levels) {
        accumulate_layout<Layout, R>(FloatProducts<Codebook>{Codebook(levels, of.side.bits)}, of);
    }
};

}  // namespace

extern "C" void kvlayers_multiply(const Multiplication& of) { with_rows(of.rows, OtherProducts{of}); }
