// Packing of weights directly from their files: all threads read and pack rows of ggml's blocks, a panel at a time, without a
// copy in between.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/table.hpp"

namespace twostroke {

// Locations of a weight's rows.
struct StoredRows {
  const int32_t* files;     // descriptors, one for each row
  const int64_t* offsets;   // bytes from the start of the file
};

// Packs rows into panels, with the bits of unpack_blocks and pack_quantized. Rows are [n, k], or [2 n, k] with G above U. The
// memory of the panels must be zeroed. Returns false, with unusable panels, if a row could not be read, or a scale or min is not
// finite. Throws std::invalid_argument for an unknown type.
bool pack_stored(const std::string& type, const StoredRows& rows, uintptr_t packed, int64_t n, int64_t k, bool gated,
                 const WeightFormat& format);

// Checksum that detects damage, not manipulation. All threads compute it, and their number does not change it.
uint64_t checksum(uintptr_t bytes, int64_t num_bytes);

}  // namespace twostroke
