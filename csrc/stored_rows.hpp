// Weights packed straight from their files: rows of ggml's blocks are read and packed by all threads, a panel at a time, and
// are nowhere in between.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/table.hpp"

namespace twostroke {

// Where the rows of a weight lie.
struct StoredRows {
  const int32_t* files;     // descriptors, one for each row
  const int64_t* offsets;   // bytes from the begin of the file
};

// To panels, to the bit what take_apart and pack_quantized make of them. Rows are [n, k], or [2 n, k] with G above U. The
// memory of the panels is zeroed. Returns false where a row could not be read, or where a scale or a min is no finite number:
// the panels are worth nothing then. Throws std::invalid_argument for a type that is not known.
bool pack_stored(const std::string& type, const StoredRows& rows, uintptr_t packed, int64_t n, int64_t k, bool gated,
                 const WeightFormat& format);

// A checksum of bytes, which tells damage and not malice; by all threads, whose number does not change it.
uint64_t checksum(uintptr_t bytes, int64_t num_bytes);

}  // namespace twostroke
