// Positions of a weight's numbers in its panels, for code that writes and reads them; see kernels/quantized.hpp.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/table.hpp"

namespace twostroke {

constexpr int64_t ROW_BYTES = PANEL * 4;  // bytes of a panel's row: four of each channel

inline int64_t num_panels(int64_t channels) { return (channels + PANEL - 1) / PANEL; }

// Channels of a weight with n rows, or of a gated one with 2 n.
inline int64_t channels_of(int64_t n, bool gated) { return gated ? 2 * ((n + LANES - 1) / LANES * LANES) : n; }

// Inputs (k) whose codes are packed together.
constexpr int64_t unit_of(int bits) { return bits == 8 ? 4 : bits == 5 ? 32 : bits == 4 ? 8 : 16; }

// Position in a unit of 3 bits of the bits that do not fit into a channel's row, and their shift there.
inline int64_t rest_at(int64_t channel) { return ROW_BYTES + (channel / (2 * LANES) * LANES + channel % LANES) * 4; }
inline int rest_shift(int64_t channel) { return (int)(channel / LANES % 2 * 4); }

// Packs a unit's codes, a byte each, into a channel's words, ROW_BYTES apart; `unit` must be zeroed.
inline void pack_unit(int bits, const uint8_t* codes, uint8_t* unit, int64_t channel) {
  uint8_t* to = unit + channel * 4;
  auto four = [&](int64_t i) {
    uint32_t word;
    std::memcpy(&word, codes + i * 4, 4);
    return word;
  };
  auto put = [&](uint32_t word) {
    std::memcpy(to, &word, 4);
    to += ROW_BYTES;
  };
  if (bits == 8) return put(four(0));
  if (bits == 2) return put(four(0) | four(1) << 2 | four(2) << 4 | four(3) << 6);
  if (bits == 3) {
    put(four(0) | four(1) << 3 | (four(2) & 0x03030303u) << 6);
    to = unit + rest_at(channel);
    uint32_t of_other;
    std::memcpy(&of_other, to, 4);
    return put(of_other | (four(3) | (four(2) & 0x04040404u) << 1) << rest_shift(channel));
  }
  uint32_t above = 0;
  for (int64_t i = 0; i < unit_of(bits) / 4; i += 2) {
    put((four(i) & 0x0f0f0f0fu) | (four(i + 1) & 0x0f0f0f0fu) << 4);
    for (int64_t j = i; bits > 4 && j < i + 2; j++) above |= (four(j) >> 4 & 0x0f0f0f0fu) << (int)(j * (bits - 4));
  }
  if (bits > 4) put(above);
}

}  // namespace twostroke
