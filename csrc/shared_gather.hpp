// All-gather between processes that map the same memory.
//
//   flags  of each rank, a cache line each: the round that it has written, and how many bytes
//   slots  [2][ranks], slot_bytes each: rounds take turns, so one may be written while the one before is still read
//
// A rank that has begun round r + 2 has seen everybody begin r + 1, which they do when they have read r: so the slots
// of r are free.
#pragma once

#include <cstdint>
#include <vector>

namespace twostroke {

class SharedGather {
 public:
  // Bytes that `size` ranks map, zero at first.
  static int64_t memory_bytes(int size, int64_t slot_bytes);

  // `memory` begins at a cache line and is mapped by every rank with the same `size` and `slot_bytes`.
  SharedGather(uintptr_t memory, int rank, int size, int64_t slot_bytes);

  // Begins an all-gather of `local`, [num_rows, widths[rank]] bytes, into `out`, [num_rows, sum of widths], where every
  // rank's columns follow those of the rank before. They stay where they are until `advance` has come to an end.
  void start(const uint8_t* local, uint8_t* out, std::vector<int64_t> widths, int64_t num_rows);

  // Goes on for as long as everybody comes within `patience_us` of each other: looks, then gives its core away, then
  // gives up for now. Returns the rank that it waits for, or -1 at the end. Throws where a rank has sent another number
  // of bytes than is expected of it.
  int advance(int64_t patience_us);

 private:
  struct Flag;
  Flag& flag(int rank) const;
  uint8_t* slot(int rank) const;
  int64_t size_of(int rank) const { return widths_[rank] * num_rows_; }
  int64_t part(int rank) const;
  void place(int rank, const uint8_t* from, int64_t bytes) const;
  void publish();

  uint8_t* memory_;
  int rank_, size_;
  int64_t slot_bytes_;
  uint64_t round_ = 0;
  const uint8_t* local_ = nullptr;
  uint8_t* out_ = nullptr;
  std::vector<int64_t> widths_;  // bytes of a row, by rank
  int64_t num_rows_ = 0, row_bytes_ = 0;
  int64_t begin_ = 0, end_ = 0;  // of this round, and of the last one: bytes of each rank
  int next_ = 0;                 // rank whose part of this round is read next
};

}  // namespace twostroke
