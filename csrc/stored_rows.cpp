#include "stored_rows.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <vector>

#include "ggml_blocks.hpp"
#include "operators.hpp"
#include "panels.hpp"
#include "threads.hpp"

namespace twostroke {
namespace {

constexpr int64_t MOST_GROUPS = 16;  // per block

// Parts of one block.
struct Block {
  uint8_t codes[SUPER_BLOCK], scales[MOST_GROUPS * 2], mins[MOST_GROUPS * 2], super_scale[2], super_min[2];
};

bool is_finite(const uint8_t* halves, int64_t count) {
  bool found = true;
  for (int64_t i = 0; i < count; i++) found &= (halves[2 * i + 1] & 0x7c) != 0x7c;
  return found;
}

bool is_finite(const Block& block, const WeightFormat& format, int64_t groups) {
  if (format.has_super_blocks) return is_finite(block.super_scale, 1) && (!format.has_min || is_finite(block.super_min, 1));
  return is_finite(block.scales, groups) && (!format.has_min || is_finite(block.mins, groups));
}

// Packs a block's `groups` groups into channel c of a panel, starting at group `first`.
template <int BITS>
void put_block(const Block& block, const WeightFormat& format, int64_t first, int64_t groups, int64_t c, uint8_t* panel) {
  int64_t scale_size = format.has_super_blocks ? 1 : 2;
  for (int64_t g = 0; g < groups; g++) {
    uint8_t *to = panel + format.group_at(first + g), *scales = to + format.code_bytes() + c * scale_size;
    const uint8_t* codes = block.codes + g * format.group;
    constexpr int64_t UNIT = unit_of(BITS);
    for (int64_t j = 0; j < format.group; j += UNIT) pack_unit(BITS, codes + j, to + j * PANEL * BITS / 8, c);
    std::memcpy(scales, block.scales + g * scale_size, (size_t)scale_size);
    if (format.shares_bytes()) *scales |= (uint8_t)(block.mins[g] << 4);
    else if (format.has_min) std::memcpy(scales + format.scale_bytes(), block.mins + g * scale_size, (size_t)scale_size);
  }
  if (!format.has_super_blocks) return;
  uint8_t* header = panel + format.header_at(first) + c * 2;
  std::memcpy(header, block.super_scale, 2);
  if (format.has_min) std::memcpy(header + PANEL * 2, block.super_min, 2);
}

using PutBlock = void (*)(const Block&, const WeightFormat&, int64_t, int64_t, int64_t, uint8_t*);

PutBlock put_block_of(int bits) {
  constexpr PutBlock OF_BITS[] = {put_block<2>, put_block<3>, put_block<4>, put_block<5>, put_block<6>, nullptr, put_block<8>};
  return OF_BITS[bits - 2];
}

bool read_whole(int file, int64_t offset, uint8_t* to, int64_t num_bytes) {
  while (num_bytes > 0) {
    ssize_t count = pread(file, to, (size_t)num_bytes, (off_t)offset);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    to += count, offset += count, num_bytes -= count;
  }
  return true;
}

// Reads the rows of a panel's channels (-1: none), row_bytes each; neighbours in a file are read at once.
bool read_panel(const StoredRows& rows, const int64_t (&row_of)[PANEL], int64_t row_bytes, uint8_t* to) {
  for (int64_t c = 0, count; c < PANEL; c += count) {
    int64_t row = row_of[c];
    count = 1;
    if (row < 0) continue;
    auto is_next = [&](int64_t other) {
      return other >= 0 && rows.files[other] == rows.files[row] && rows.offsets[other] == rows.offsets[row] + count * row_bytes;
    };
    while (c + count < PANEL && is_next(row_of[c + count])) count++;
    if (!read_whole(rows.files[row], rows.offsets[row], to + c * row_bytes, count * row_bytes)) return false;
  }
  return true;
}

}  // namespace

uint64_t checksum(uintptr_t bytes, int64_t num_bytes) {
  constexpr int64_t CHUNK = 1 << 20, LANES_AT_ONCE = 4, STEP = LANES_AT_ONCE * 8;
  constexpr uint64_t PRIME = 0x9e3779b97f4a7c15u;
  int64_t chunks = (num_bytes + CHUNK - 1) / CHUNK;
  std::vector<uint64_t> of_chunks((size_t)chunks);
  auto mix = [](uint64_t sum, uint64_t word) { return (std::rotl(sum, 23) ^ word) * PRIME; };
  parallel(chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const uint8_t* from = (const uint8_t*)bytes + i * CHUNK;
      int64_t size = std::min(CHUNK, num_bytes - i * CHUNK);
      uint64_t lanes[LANES_AT_ONCE] = {1, 2, 3, 4}, words[LANES_AT_ONCE];
      for (int64_t at = 0; at < size; at += STEP) {
        std::memset(words, 0, STEP);
        std::memcpy(words, from + at, (size_t)std::min(STEP, size - at));
        for (int64_t lane = 0; lane < LANES_AT_ONCE; lane++) lanes[lane] = mix(lanes[lane], words[lane]);
      }
      uint64_t sum = (uint64_t)size;
      for (uint64_t lane : lanes) sum = mix(sum, lane);
      of_chunks[(size_t)i] = sum;
    }
  });
  uint64_t sum = (uint64_t)num_bytes;
  for (uint64_t of_chunk : of_chunks) sum = mix(sum, of_chunk);
  return sum;
}

bool pack_stored(const std::string& name, const StoredRows& rows, uintptr_t packed, int64_t n, int64_t k, bool gated,
                 const WeightFormat& format) {
  const BlockType& type = block_type(name);
  int64_t blocks = k / type.block_size, row_bytes = blocks * type.block_bytes, groups = type.block_size / type.group;
  PutBlock put = put_block_of(format.bits);
  std::atomic<bool> failed{false};
  parallel(num_panels(channels_of(n, gated)), 1, [&](int64_t begin, int64_t end) {
    std::vector<uint8_t> room((size_t)(PANEL * row_bytes));
    for (int64_t p = begin; p < end && !failed; p++) {
      int64_t row_of[PANEL];
      for (int64_t c = 0; c < PANEL; c++) row_of[c] = row_of_channel(p * PANEL + c, n, gated);
      bool is_good = read_panel(rows, row_of, row_bytes, room.data());
      uint8_t* panel = (uint8_t*)packed + p * format.panel_bytes(k);
      for (int64_t b = 0; b < blocks && is_good; b++)
        for (int64_t c = 0; c < PANEL; c++) {
          if (row_of[c] < 0) continue;
          Block block;
          type.unpack_blocks(room.data() + c * row_bytes + b * type.block_bytes,
                          {block.codes, block.scales, block.mins, block.super_scale, block.super_min});
          is_good &= is_finite(block, format, groups);
          put(block, format, b * groups, groups, c, panel);
        }
      if (!is_good) failed = true;
    }
  });
  return !failed;
}

}  // namespace twostroke
