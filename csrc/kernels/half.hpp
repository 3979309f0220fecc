// Conversion of a single float16 (vec.hpp converts sixteen).
#pragma once

#include <cstdint>
#include <cstring>

namespace twostroke {
namespace {  // compiled once per level, with a copy in each

// A half shifted into place is a float whose exponent is too small by 112; this also holds for subnormal halves.
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
