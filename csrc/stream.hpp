// Streaming read of memory: what the kernels' reading of weights is limited by.
#pragma once

#include <cstdint>

namespace twostroke {

// Reads num_bytes (a multiple of 64) on all threads, in order and prefetched as the kernels prefetch weights, and does next to
// nothing with them. Returns the sum of their words, so that no read can be left out.
uint64_t read_stream(uintptr_t bytes, int64_t num_bytes);

}  // namespace twostroke
