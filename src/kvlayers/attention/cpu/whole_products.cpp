// Products of the most common codes: whole numbers of 4 and of 8 bits. See `products.h`.

#include "../../utils/parallel.h"  // of which every library is given an address when it is loaded
#include "packed.h"

namespace {

struct WholeProducts {
    const Multiplication& of;

    template <int R>
    void rows() {
        if (of.side.bits == 4)
            multiply<Planes<4>, R>();
        else
            multiply<Planes<8>, R>();
    }

    template <typename Layout, int R>
    void multiply() {
#if defined(MULTIPLIES_BYTES)
        if (of.quads) return accumulate_layout<Layout, R>(QuadProducts{of.units}, of);
#endif
        accumulate_layout<Layout, R>(FloatProducts<Integer>(), of);
    }
};

}  // namespace

extern "C" void kvlayers_multiply(const Multiplication& of) { with_rows(of.rows, WholeProducts{of}); }
