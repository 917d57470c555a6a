// Products of the most common codes: whole numbers of 4 and of 8 bits. See `products.h`.

#include "../../../utils/parallel.h"  // of which every library is given an address when it is loaded
#include "packed.h"

namespace {

struct WholeProducts {
    const Multiplication& of;

    template <int R>
    void rows() {
        if (of.side.bits == 4)
            multiply_integers<Planes<4>, R>(of);
        else
            multiply_integers<Planes<8>, R>(of);
    }
};

}  // namespace

extern "C" void kvlayers_multiply(const Multiplication& of) { with_rows(of.rows, WholeProducts{of}); }
