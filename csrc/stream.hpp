// Streaming read of memory, to measure the rate that limits the kernels' reads of weights.
#pragma once

#include <cstdint>

namespace twostroke {

// Reads num_bytes, a multiple of 64, on all threads, prefetched as the kernels prefetch weights, and does little else.
// Returns the sum of their 64-bit words, so that no read can be left out.
uint64_t read_stream(uintptr_t bytes, int64_t num_bytes);

}  // namespace twostroke
