#include "shared_gather.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "pause.hpp"

namespace twostroke {
namespace {

constexpr int64_t LINE = 64;
constexpr int SPINS = 100;  // some microseconds: the rank that is waited for may need this very core

}  // namespace

struct alignas(LINE) SharedGather::Flag {
  std::atomic<uint64_t> round;
  int64_t sizes[2];  // of the rank's whole gather, by the slot of the round
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "a flag is shared between processes");

int64_t SharedGather::memory_bytes(int size, int64_t slot_bytes) { return size * (LINE + 2 * slot_bytes); }

SharedGather::SharedGather(uintptr_t memory, int rank, int size, int64_t slot_bytes)
    : memory_(reinterpret_cast<uint8_t*>(memory)), rank_(rank), size_(size), slot_bytes_(slot_bytes) {}

SharedGather::Flag& SharedGather::flag(int rank) const {
  return *std::launder(reinterpret_cast<Flag*>(memory_ + rank * LINE));
}

uint8_t* SharedGather::slot(int rank) const {
  return memory_ + size_ * LINE + ((int64_t)(round_ & 1) * size_ + rank) * slot_bytes_;
}

// Of a rank that sends `size` bytes, those of this round.
int64_t SharedGather::part(int64_t size) const { return std::clamp<int64_t>(size - begin_, 0, slot_bytes_); }

void SharedGather::publish() {
  round_++;
  next_ = 0;
  int64_t bytes = part(sizes_[rank_]);
  if (bytes > 0) std::memcpy(slot(rank_), local_ + begin_, (size_t)bytes);
  flag(rank_).sizes[round_ & 1] = sizes_[rank_];
  flag(rank_).round.store(round_, std::memory_order_release);
}

void SharedGather::start(const uint8_t* local, std::vector<uint8_t*> outs, std::vector<int64_t> sizes) {
  local_ = local;
  outs_ = std::move(outs);
  sizes_ = std::move(sizes);
  begin_ = 0;
  end_ = *std::max_element(sizes_.begin(), sizes_.end());
  publish();
}

int SharedGather::advance(int64_t patience_us) {
  using Clock = std::chrono::steady_clock;
  for (;;) {
    for (; next_ < size_; next_++) {
      int64_t bytes = part(sizes_[next_]);
      if (next_ != rank_) {
        const auto& round = flag(next_).round;
        Clock::time_point deadline{};
        for (int spin = 0; round.load(std::memory_order_acquire) < round_; spin++) {
          if (spin < SPINS) {
            pause_a_little();
            continue;
          }
          if (spin == SPINS) deadline = Clock::now() + std::chrono::microseconds(patience_us);
          if (Clock::now() >= deadline) return next_;
          std::this_thread::yield();
        }
        int64_t sent = flag(next_).sizes[round_ & 1];
        if (sent != sizes_[next_]) {
          throw std::runtime_error("it sent " + std::to_string(sent) + " bytes, rank " + std::to_string(rank_) +
                                   " awaited " + std::to_string(sizes_[next_]));
        }
      }
      const uint8_t* from = next_ == rank_ ? local_ + begin_ : slot(next_);
      if (bytes > 0) std::memcpy(outs_[next_] + begin_, from, (size_t)bytes);
    }
    if (begin_ + slot_bytes_ >= end_) return -1;
    begin_ += slot_bytes_;
    publish();
  }
}

}  // namespace twostroke
