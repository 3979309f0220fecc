#include "stream.hpp"

#include <atomic>

#include "threads.hpp"

namespace twostroke {

uint64_t read_stream(uintptr_t bytes, int64_t num_bytes) {
  constexpr int64_t LINE = 64, CHUNK = 1 << 16, LANES = 8;  // a chunk is about a panel of weights
  std::atomic<uint64_t> total{0};
  parallel(num_bytes / CHUNK + (num_bytes % CHUNK != 0), 1, [&](int64_t begin, int64_t end) {
    const char* from = (const char*)bytes + begin * CHUNK;
    const char* until = (const char*)bytes + (end * CHUNK < num_bytes ? end * CHUNK : num_bytes);
    uint64_t sums[LANES] = {};
    for (; from < until; from += LINE) {
      __builtin_prefetch(from + 4096, 0, 2);  // the distances of linear.hpp
      __builtin_prefetch(from + 2048);
      for (int64_t lane = 0; lane < LANES; lane++) sums[lane] += ((const uint64_t*)from)[lane];
    }
    uint64_t sum = 0;
    for (uint64_t of_lane : sums) sum += of_lane;
    total.fetch_add(sum, std::memory_order_relaxed);
  });
  return total;
}

}  // namespace twostroke
