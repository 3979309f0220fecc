#include "threads.hpp"

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "pause.hpp"

namespace twostroke {
namespace {

// A layer has a dozen kernels of microseconds, so workers spin for the next kernel before they sleep.
constexpr int SPINS = 4000;

bool pin_to([[maybe_unused]] std::thread& thread, [[maybe_unused]] int cpu) {
#ifdef __linux__
  std::vector<cpu_set_t> set((size_t)cpu / CPU_SETSIZE + 1);
  std::memset(set.data(), 0, set.size() * sizeof(cpu_set_t));
  CPU_SET_S((size_t)cpu, set.size() * sizeof(cpu_set_t), set.data());
  return pthread_setaffinity_np(thread.native_handle(), set.size() * sizeof(cpu_set_t), set.data()) == 0;
#else
  return false;
#endif
}

class Pool {
 public:
  explicit Pool(int count, const std::vector<int>& cpus = {}) : cpus_(cpus) {
    for (int i = 1; i < count; i++) threads_.emplace_back([this] { serve(); });
  }

  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      round_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  int size() const { return (int)threads_.size() + 1; }
  const std::vector<int>& cpus() const { return cpus_; }

  // Pins the threads; returns whether the system allowed it for all.
  bool pin() {
    bool pinned = true;
    for (size_t i = 0; i < threads_.size() && i + 1 < cpus_.size(); i++) pinned &= pin_to(threads_[i], cpus_[i + 1]);
    return pinned;
  }

  void run(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& work) {
    work_ = &work;
    count_ = count;
    grain_ = grain;
    next_.store(0, std::memory_order_relaxed);
    busy_.store((int)threads_.size(), std::memory_order_relaxed);
    {
      std::lock_guard lock(mutex_);
      round_.fetch_add(1, std::memory_order_release);
    }
    if (sleepers_.load() > 0) wake_.notify_all();
    take_items();
    while (busy_.load(std::memory_order_acquire) > 0) pause_a_little();
  }

 private:
  // Takes half of a thread's share of the remaining items, repeatedly: first long runs of neighbours, since consecutive weights
  // come from memory faster, and single items last, so that all threads end together.
  void take_items() {
    int64_t begin = next_.load(std::memory_order_relaxed);
    while (begin < count_) {
      int64_t share = (count_ - begin) / (2 * size()) / grain_ * grain_;
      int64_t end = std::min(begin + std::max(share, grain_), count_);
      if (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
      (*work_)(begin, end);
      begin = next_.load(std::memory_order_relaxed);
    }
  }

  void serve() {
    uint64_t seen = 0;
    for (;;) {
      for (int spin = 0; spin < SPINS && round_.load(std::memory_order_acquire) == seen; spin++) pause_a_little();
      if (round_.load(std::memory_order_acquire) == seen) {
        std::unique_lock lock(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [&] { return round_.load(std::memory_order_relaxed) != seen; });
        sleepers_.fetch_sub(1);
      }
      seen = round_.load(std::memory_order_acquire);
      if (stopping_) return;
      take_items();
      busy_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::vector<int> cpus_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> round_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<int64_t> next_{0};
  std::atomic<int> busy_{0};
  bool stopping_ = false;
  const std::function<void(int64_t, int64_t)>* work_ = nullptr;
  int64_t count_ = 0, grain_ = 1;
};

std::unique_ptr<Pool>& pool() {
  static std::unique_ptr<Pool> instance = std::make_unique<Pool>(1);
  return instance;
}

// Lock by which two engines in one process compute alternately.
std::mutex& one_kernel_at_a_time() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace

void set_num_threads(int count, const std::vector<int>& cpus) {
  std::lock_guard lock(one_kernel_at_a_time());
  if (pool()->size() == count && pool()->cpus() == cpus) return;
  pool().reset();
  pool() = std::make_unique<Pool>(count, cpus);
  if (!pool()->pin()) {
    pool() = std::make_unique<Pool>(count);
    throw std::runtime_error("the system does not let threads run on these CPUs");
  }
}

int num_threads() {
  std::lock_guard lock(one_kernel_at_a_time());
  return pool()->size();
}

void parallel(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& work) {
  std::lock_guard lock(one_kernel_at_a_time());
  if (count <= grain || pool()->size() == 1) {
    if (count > 0) work(0, count);
    return;
  }
  pool()->run(count, grain, work);
}

}  // namespace twostroke
