// One pool of threads for all kernels. A kernel is divided into items, which the threads take one after the other.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace twostroke {

// Sets the number of computing threads, the caller included. Must not be called while a kernel runs. With CPUs given (Linux
// only), all threads but the caller are pinned to the CPUs after the first. Throws std::runtime_error if the system refuses.
void set_num_threads(int count, const std::vector<int>& cpus = {});
int num_threads();

// Calls work(begin, end) for consecutive ranges that cover [0, count), on all threads; returns when all are done. Ranges go to
// arbitrary threads, so an item's result must not depend on the thread.
void parallel(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& work);

}  // namespace twostroke
