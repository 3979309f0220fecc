// All-gather between processes that map the same memory.
//
//   flags  a cache line for each rank: the round that it has written, and the number of bytes
//   slots  [2][ranks], slot_bytes each: rounds alternate, so a round may be written while the previous one is still read
//
// A rank that starts round r + 2 has seen all ranks start r + 1, which they do after reading r. So the slots of r are free.
#pragma once

#include <cstdint>
#include <vector>

namespace twostroke {

class SharedGather {
 public:
  // Bytes that `size` ranks map; they must be zeroed at first.
  static int64_t memory_bytes(int size, int64_t slot_bytes);

  // `memory` starts at a cache line and is mapped by every rank with the same `size` and `slot_bytes`.
  SharedGather(uintptr_t memory, int rank, int size, int64_t slot_bytes);

  // Starts an all-gather of `local`, [num_rows, widths[rank]] bytes, into `out`, [num_rows, sum of widths], with columns in the
  // order of ranks. Both must stay in place until `advance` returns -1.
  void start(const uint8_t* local, uint8_t* out, std::vector<int64_t> widths, int64_t num_rows);

  // Continues the gather for as long as ranks follow each other within `patience_us`: it spins, then yields its core, then
  // returns. Returns the rank that it waits for, or -1 at the end. Throws if a rank has sent an unexpected number of bytes.
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
  int64_t begin_ = 0, end_ = 0;  // byte offset of this round, and bytes of the largest rank
  int next_ = 0;                 // rank whose part of this round is read next
};

}  // namespace twostroke
