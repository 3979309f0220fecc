// One pool of threads for all kernels. A kernel is cut into items; threads take them one after the other.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace twostroke {

// How many threads compute, the caller included. Not while a kernel runs. All but the caller are pinned to the CPUs behind the
// first, where some are named (on Linux). Throws std::runtime_error where the system refuses.
void set_num_threads(int count, const std::vector<int>& cpus = {});
int num_threads();

// Calls work(begin, end) for consecutive ranges that make up [0, count), on all threads; returns when all are done.
// Which thread gets which range is chance, so an item's result must not depend on it.
void parallel(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& work);

}  // namespace twostroke
