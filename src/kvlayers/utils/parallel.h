// Loops on the threads of torch's OpenMP runtime: those of a second runtime would compete with them. The runtime is
// not linked but given by address when the library is loaded, so that one file runs with every build of torch.

#pragma once

#include <atomic>
#include <cstdint>

// The entry point of `#pragma omp parallel` in libgomp, which libomp and libiomp5 have too.
typedef void (*StartParallel)(void (*work)(void*), void* data, unsigned threads, unsigned flags);

namespace {

StartParallel start_parallel = nullptr;

}  // namespace

// Without this call, or with null, loops run on one thread.
extern "C" void kvlayers_set_start_parallel(StartParallel start) { start_parallel = start; }

namespace {

template <typename MakeWorker>
struct Loop {
    const MakeWorker& make_worker;
    const int64_t count;
    std::atomic<int64_t> next{0};

    static void run(void* loop) {
        Loop& self = *(Loop*)loop;
        auto worker = self.make_worker();
        for (int64_t index; (index = self.next.fetch_add(1, std::memory_order_relaxed)) < self.count;) worker(index);
    }
};

// Calls worker(index) for each index below the count, with a worker that each thread makes of its own. A thread takes the
// next index when it is done with one.
template <typename MakeWorker>
void parallel_for(int64_t count, int64_t threads, const MakeWorker& make_worker) {
    Loop<MakeWorker> loop{make_worker, count};
    // As many threads as torch uses, even for fewer indices: libgomp ends the threads that a smaller team leaves out.
    if (start_parallel && threads > 1 && count > 1)
        start_parallel(Loop<MakeWorker>::run, &loop, unsigned(threads), 0);
    else
        Loop<MakeWorker>::run(&loop);
}

}  // namespace
