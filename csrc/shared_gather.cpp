#include "shared_gather.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "pause.hpp"

namespace twostroke {
namespace {

constexpr int64_t LINE = 64;
constexpr int SPINS = 100;  // some microseconds; the awaited rank may need this core

}  // namespace

struct alignas(LINE) SharedGather::Flag {
  std::atomic<uint64_t> round;
  int64_t sizes[2];  // bytes of the rank's whole gather, by the round's slot
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

// Bytes that a rank sends in this round.
int64_t SharedGather::part(int rank) const { return std::clamp<int64_t>(size_of(rank) - begin_, 0, slot_bytes_); }

// Copies these bytes to the rank's columns; a round may start and end within a row.
void SharedGather::place(int rank, const uint8_t* from, int64_t bytes) const {
  int64_t width = widths_[rank];
  uint8_t* columns = out_ + std::accumulate(widths_.begin(), widths_.begin() + rank, int64_t{0});
  for (int64_t at = begin_, end = begin_ + bytes; at < end;) {
    int64_t row = at / width, column = at % width;
    int64_t count = std::min(width - column, end - at);
    std::memcpy(columns + row * row_bytes_ + column, from, (size_t)count);
    from += count;
    at += count;
  }
}

void SharedGather::publish() {
  round_++;
  next_ = 0;
  int64_t bytes = part(rank_);
  if (bytes > 0) std::memcpy(slot(rank_), local_ + begin_, (size_t)bytes);
  flag(rank_).sizes[round_ & 1] = size_of(rank_);
  flag(rank_).round.store(round_, std::memory_order_release);
}

void SharedGather::start(const uint8_t* local, uint8_t* out, std::vector<int64_t> widths, int64_t num_rows) {
  if ((int)widths.size() != size_) throw std::invalid_argument("a width for each rank");
  local_ = local;
  out_ = out;
  widths_ = std::move(widths);
  num_rows_ = num_rows;
  row_bytes_ = std::accumulate(widths_.begin(), widths_.end(), int64_t{0});
  begin_ = 0;
  end_ = *std::max_element(widths_.begin(), widths_.end()) * num_rows_;
  publish();
}

int SharedGather::advance(int64_t patience_us) {
  using Clock = std::chrono::steady_clock;
  for (;;) {
    for (; next_ < size_; next_++) {
      int64_t bytes = part(next_);
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
        if (sent != size_of(next_)) {
          throw std::runtime_error("it sent " + std::to_string(sent) + " bytes, rank " + std::to_string(rank_) +
                                   " awaited " + std::to_string(size_of(next_)));
        }
      }
      place(next_, next_ == rank_ ? local_ + begin_ : slot(next_), bytes);
    }
    if (begin_ + slot_bytes_ >= end_) return -1;
    begin_ += slot_bytes_;
    publish();
  }
}

}  // namespace twostroke
