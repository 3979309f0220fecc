#include "ggml_blocks.hpp"

#include <bit>
#include <cmath>
#include <stdexcept>

#include "kernels/half.hpp"
#include "threads.hpp"

namespace twostroke {
namespace {

constexpr int64_t BLOCKS_PER_TASK = 64;
constexpr float LARGEST_SCALE = 65504.0f;

using Parts = BlockParts;

float float_of(const uint8_t* half) {
  uint16_t bits;
  std::memcpy(&bits, half, 2);
  if ((bits & 0x7c00) != 0x7c00) return from_half(bits);
  return std::bit_cast<float>((uint32_t)(bits & 0x8000) << 16 | 0x7f800000u | (uint32_t)(bits & 0x3ff) << 13);
}

// Writes a float16, rounded half to even.
void put_rounded(uint8_t* to, float value) {
  uint32_t sign = std::bit_cast<uint32_t>(value) >> 16 & 0x8000, half;
  float size = std::fabs(value);
  uint32_t bits = std::bit_cast<uint32_t>(size);
  if (!(size == size)) half = 0x7e00;
  else if (size >= 65520.0f) half = 0x7c00;
  // near 0.5, floats are as far apart as subnormal float16
  else if (size < 0x1p-14f) half = (uint32_t)(((size + 0.5f) - 0.5f) * 0x1p24f);
  else half = (bits + 0xfff + (bits >> 13 & 1) - (112u << 23)) >> 13;
  uint16_t rounded = (uint16_t)(sign | half);
  std::memcpy(to, &rounded, 2);
}

// Copies a scale; an infinite one becomes the largest float16.
void put_scale(uint8_t* to, const uint8_t* half) {
  uint16_t bits;
  std::memcpy(&bits, half, 2);
  if ((bits & 0x7fff) == 0x7c00) bits--;
  std::memcpy(to, &bits, 2);
}

// Unpacks sixteen bytes with two codes each; the low halves come first.
void nibbles(const uint8_t* from, int64_t count, uint8_t* to) {
  for (int64_t i = 0; i < count; i++) to[i] = from[i] & 15;
  for (int64_t i = 0; i < count; i++) to[count + i] = from[i] >> 4;
}

void q4_0(const uint8_t* b, const Parts& to) {
  put_scale(to.scales, b);
  nibbles(b + 2, 16, to.codes);
}

void q4_1(const uint8_t* b, const Parts& to) {
  put_scale(to.scales, b);
  put_rounded(to.mins, -float_of(b + 2) - float_of(b) * 8);
  nibbles(b + 4, 16, to.codes);
}

void fifth_bits(const uint8_t* from, uint8_t* codes) {
  uint32_t bits;
  std::memcpy(&bits, from, 4);
  for (int64_t i = 0; i < 32; i++) codes[i] |= (uint8_t)((bits >> i & 1) << 4);
}

void q5_0(const uint8_t* b, const Parts& to) {
  put_scale(to.scales, b);
  nibbles(b + 6, 16, to.codes);
  fifth_bits(b + 2, to.codes);
}

void q5_1(const uint8_t* b, const Parts& to) {
  put_scale(to.scales, b);
  put_rounded(to.mins, -float_of(b + 2) - float_of(b) * 16);
  nibbles(b + 8, 16, to.codes);
  fifth_bits(b + 4, to.codes);
}

void q8_0(const uint8_t* b, const Parts& to) {
  put_scale(to.scales, b);
  for (int64_t i = 0; i < 32; i++) to.codes[i] = b[2 + i] ^ 128;
}

// Unpacks bits 0 and 1 of 32 bytes, then 2 and 3, and so on: 128 codes.
void pairs(const uint8_t* from, uint8_t* to) {
  for (int64_t part = 0; part < 4; part++)
    for (int64_t i = 0; i < 32; i++) to[part * 32 + i] = from[i] >> (2 * part) & 3;
}

void q2_k(const uint8_t* b, const Parts& to) {
  for (int64_t g = 0; g < 16; g++) to.scales[g] = b[g] & 15, to.mins[g] = b[g] >> 4;
  for (int64_t half = 0; half < 2; half++) pairs(b + 16 + half * 32, to.codes + half * 128);
  to.put_half(to.super_scale, b + 80);
  to.put_half(to.super_min, b + 82);
}

void q3_k(const uint8_t* b, const Parts& to) {
  for (int64_t half = 0; half < 2; half++) pairs(b + 32 + half * 32, to.codes + half * 128);
  for (int64_t bit = 0; bit < 8; bit++)
    for (int64_t i = 0; i < 32; i++) to.codes[bit * 32 + i] |= (uint8_t)((b[i] >> bit & 1) << 2);
  for (int64_t g = 0; g < 16; g++) {
    int low = b[96 + g % 8] >> (g < 8 ? 0 : 4) & 15, high = b[104 + g % 4] >> (g / 4 * 2) & 3;
    to.scales[g] = (uint8_t)((low | high << 4) - 32);
  }
  to.put_half(to.super_scale, b + 108);
}

// Unpacks eight scales and eight mins of 6 bits from 12 bytes: the first four of each are whole, the rest are split.
void six_bit_scales(const uint8_t* b, const Parts& to) {
  for (int64_t i = 0; i < 4; i++) {
    to.scales[i] = b[i] & 63;
    to.mins[i] = b[4 + i] & 63;
    to.scales[4 + i] = (uint8_t)((b[8 + i] & 15) | b[i] >> 6 << 4);
    to.mins[4 + i] = (uint8_t)(b[8 + i] >> 4 | b[4 + i] >> 6 << 4);
  }
}

void q4_k(const uint8_t* b, const Parts& to) {
  to.put_half(to.super_scale, b);
  to.put_half(to.super_min, b + 2);
  six_bit_scales(b + 4, to);
  for (int64_t part = 0; part < 4; part++) nibbles(b + 16 + part * 32, 32, to.codes + part * 64);
}

void q5_k(const uint8_t* b, const Parts& to) {
  to.put_half(to.super_scale, b);
  to.put_half(to.super_min, b + 2);
  six_bit_scales(b + 4, to);
  for (int64_t part = 0; part < 4; part++) nibbles(b + 48 + part * 32, 32, to.codes + part * 64);
  for (int64_t bit = 0; bit < 8; bit++)
    for (int64_t i = 0; i < 32; i++) to.codes[bit * 32 + i] |= (uint8_t)((b[16 + i] >> bit & 1) << 4);
}

void q6_k(const uint8_t* b, const Parts& to) {
  for (int64_t half = 0; half < 2; half++) {
    uint8_t* codes = to.codes + half * 128;
    uint8_t high[128];
    pairs(b + 128 + half * 32, high);
    nibbles(b + half * 64, 64, codes);
    for (int64_t i = 0; i < 128; i++) codes[i] |= (uint8_t)(high[i] << 4);
  }
  std::memcpy(to.scales, b + 192, 16);
  to.put_half(to.super_scale, b + 208);
}

void iq4_xs(const uint8_t* b, const Parts& to) {
  to.put_half(to.super_scale, b);
  for (int64_t g = 0; g < 8; g++) {
    int low = b[4 + g / 2] >> (g % 2 * 4) & 15, high = b[2 + g / 4] >> (g % 4 * 2) & 3;
    to.scales[g] = (uint8_t)((low | high << 4) - 32);
    nibbles(b + 8 + g * 16, 16, to.codes + g * 32);
  }
}

void mxfp4(const uint8_t* b, const Parts& to) {
  put_rounded(to.scales, std::fmin(std::ldexp(1.0f, b[0] - 128), LARGEST_SCALE));
  nibbles(b + 1, 16, to.codes);
}

constexpr BlockType TYPES[] = {
    {"Q4_0", 18, 32, 32, false, q4_0},  {"Q4_1", 20, 32, 32, false, q4_1},  {"Q5_0", 22, 32, 32, false, q5_0},
    {"Q5_1", 24, 32, 32, false, q5_1},  {"Q8_0", 34, 32, 32, false, q8_0},  {"Q2_K", 84, 256, 16, true, q2_k},
    {"Q3_K", 110, 256, 16, true, q3_k}, {"Q4_K", 144, 256, 32, true, q4_k}, {"Q5_K", 176, 256, 32, true, q5_k},
    {"Q6_K", 210, 256, 16, true, q6_k}, {"IQ4_NL", 18, 32, 32, false, q4_0}, {"IQ4_XS", 136, 256, 32, true, iq4_xs},
    {"MXFP4", 17, 32, 32, false, mxfp4},
};

}  // namespace

std::vector<std::string> ggml_types() {
  std::vector<std::string> names;
  for (const BlockType& type : TYPES) names.emplace_back(type.name);
  return names;
}

const BlockType& block_type(const std::string& name) {
  for (const BlockType& type : TYPES)
    if (name == type.name) return type;
  throw std::invalid_argument("blocks of type " + name);
}

void unpack_blocks(const std::string& name, uintptr_t blocks, int64_t num_blocks, const QuantizedParts& to) {
  const BlockType& type = block_type(name);
  int64_t scale_bytes = type.scale_bytes();
  parallel(num_blocks, BLOCKS_PER_TASK, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      type.unpack_blocks((const uint8_t*)blocks + i * type.block_bytes,
                      {(uint8_t*)to.codes + i * type.block_size, (uint8_t*)to.scales + i * scale_bytes,
                       (uint8_t*)to.mins + i * scale_bytes, (uint8_t*)to.super_scales + i * 2, (uint8_t*)to.super_mins + i * 2});
  });
}

}  // namespace twostroke
