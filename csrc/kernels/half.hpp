// One float16, for who has no sixteen of them (vec.hpp).
#pragma once

#include <cstdint>
#include <cstring>

namespace twostroke {
namespace {  // compiled once per level, and each keeps its own

// Shifted into place a half is a float whose exponent is too small by 112; what was subnormal comes right by itself.
inline float from_half(uint16_t half) {
  uint32_t bits = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
  float magnitude;
  std::memcpy(&magnitude, &bits, 4);
  magnitude *= 0x1p112f;
  std::memcpy(&bits, &magnitude, 4);
  bits |= sign;
  std::memcpy(&magnitude, &bits, 4);
  return magnitude;
}

}  // namespace
}  // namespace twostroke
