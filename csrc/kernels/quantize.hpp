// Quantization of float32 or bfloat16 weights to codes of 8 and 4 bits, as defined in kernels/quantized_weight.py.
//
// The operations on float32 are the definition's, in the same order, none of them fused. So every level gives the same bits.
#pragma once

#include "elementwise.hpp"
#include "table.hpp"
#include "vec.hpp"

namespace twostroke {
namespace {

constexpr float LARGEST_HALF = 65504.0f;

INLINE f32x16 clamped(f32x16 v, float low, float high) { return larger(smaller(v, splat(high)), splat(low)); }

// Rounds small numbers to whole ones, half to even: adding the magic number shifts every fraction out.
INLINE f32x16 whole(f32x16 v) { return (v + splat(12582912.0f)) - splat(12582912.0f); }

// Rounds to float16, half to even; numbers beyond the largest float16 become the largest.
INLINE f32x16 to_halves(f32x16 v) {
  u32x16 sign = (u32x16)v & splat(0x80000000u);
  f32x16 size = smaller(magnitude(v), splat(LARGEST_HALF));
  u32x16 bits = (u32x16)size;
  f32x16 normal = (f32x16)((bits + splat(0xfffu) + ((bits >> 13) & splat(1u))) & splat(0xffffe000u));
  f32x16 subnormal = (size + splat(0.5f)) - splat(0.5f);  // near 0.5, floats are as far apart as subnormal float16
  return (f32x16)((u32x16)select(size < splat(0x1p-14f), subnormal, normal) | sign);
}

// Returns the bits of `value`, which must be a float16.
inline uint16_t half_bits(float value) {
  uint32_t bits, sign;
  std::memcpy(&sign, &value, 4);
  float shifted = value * 0x1p-112f;
  std::memcpy(&bits, &shifted, 4);
  return (uint16_t)((sign >> 16 & 0x8000u) | (bits & 0x7fffffffu) >> 13);
}

// Returns clamp(round(v / scale), low, high) of sixteen weights, as floats.
INLINE f32x16 codes_of(f32x16 v, f32x16 inverse, float low, float high) { return whole(clamped(v * inverse, low, high)); }

INLINE void store_codes(uint8_t* to, f32x16 codes, float zero, int64_t count) {
  u8x16 bytes = lowest_bytes(to_int(codes + splat(zero)));
  std::memcpy(to, &bytes, (size_t)count);
}

template <typename T>
void quantize_channels_of(const T* weight, int64_t k, uint8_t* codes, uint16_t* scales, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const T* from = weight + row * k;
    uint8_t* to = codes + row * k;
    f32x16 most{};
    in_lanes(k, [&](int64_t i, int64_t n) { most = larger(most, magnitude(get(from + i, n))); });
    f32x16 scale = to_halves(larger(splat(largest_of(most) / 127.0f), splat(1e-7f))), inverse = splat(1.0f) / scale;
    in_lanes(k, [&](int64_t i, int64_t n) { store_codes(to + i, codes_of(get(from + i, n), inverse, -128, 127), 128, n); });
    scales[row] = half_bits(scale[0]);
  }
}

// Sums by adding halves, then lanes: always the same tree. Overwrites v.
template <int VECTORS>
INLINE float sum_of_group(f32x16* v) {
  for (int half = VECTORS / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) v[i] = v[i] + v[i + half];
  return sum_of(v[0]);
}

// Quantizes one group of VECTORS * 16 weights, of which `count` exist; returns the scale. `steps`: see quantize_in_groups.
template <int VECTORS, typename T>
INLINE float quantize_group(const T* from, uint8_t* to, int64_t count, const float* steps, int64_t num_steps) {
  f32x16 v[VECTORS], high{}, low{};
  for (int i = 0; i < VECTORS; i++) {
    int64_t left = count - i * LANES;
    v[i] = left <= 0 ? f32x16{} : get(from + i * LANES, left < LANES ? left : LANES);
    high = larger(high, v[i]);
    low = smaller(low, v[i]);
  }
  float most = largest_of(high), least = folded(low, smaller);
  float extreme = (most >= -least ? most : least) + 0.0f;  // always +0
  alignas(64) float scales[LANES], inverses[LANES];
  f32x16 candidates = to_halves(splat(extreme) / load_some(steps, num_steps));  // the other lanes are not used
  store16(scales, candidates);
  store16(inverses, splat(1.0f) / select(candidates == splat(0.0f), splat(1.0f), candidates));
  float least_error = __builtin_inff(), scale = scales[0], inverse = inverses[0];  // the first one remains where every error is infinite
  auto consider = [&](float other, float other_inverse) {
    f32x16 squares[VECTORS];
    for (int i = 0; i < VECTORS; i++) {
      f32x16 error = codes_of(v[i], splat(other_inverse), -8, 7) * splat(other) - v[i];
      squares[i] = error * error * magnitude(v[i]);
    }
    float error = sum_of_group<VECTORS>(squares);
    if (error < least_error) least_error = error, scale = other, inverse = other_inverse;
  };
  for (int64_t s = 0; s < num_steps; s++) consider(scales[s], inverses[s]);
  f32x16 products[VECTORS], squares[VECTORS];
  for (int i = 0; i < VECTORS; i++) {
    f32x16 codes = codes_of(v[i], splat(inverse), -8, 7);
    products[i] = magnitude(v[i]) * (codes * v[i]);
    squares[i] = magnitude(v[i]) * (codes * codes);
  }
  float of_codes = sum_of_group<VECTORS>(squares);
  float fitted = of_codes > 0.0f ? to_halves(splat(sum_of_group<VECTORS>(products) / of_codes))[0] : 0.0f;
  consider(fitted, 1.0f / (fitted == 0.0f ? 1.0f : fitted));
  for (int i = 0; i < VECTORS; i++) {
    int64_t left = count - i * LANES;
    if (left > 0) store_codes(to + i * LANES, codes_of(v[i], splat(inverse), -8, 7), 8, left < LANES ? left : LANES);
  }
  return scale;
}

template <int VECTORS, typename T>
void quantize_groups_of(const QuantizeArgs& args, const T* weight, int64_t begin, int64_t end) {
  constexpr int64_t group = VECTORS * LANES;
  int64_t k = args.k, groups = (k + group - 1) / group;
  for (int64_t row = begin; row < end; row++)
    for (int64_t g = 0; g < groups; g++) {
      int64_t at = row * k + g * group, count = k - g * group < group ? k - g * group : group;
      float scale = quantize_group<VECTORS>(weight + at, args.codes + at, count, args.steps, args.num_steps);
      args.scales[row * groups + g] = half_bits(scale);
    }
}

void quantize_weight(const QuantizeArgs& args, int64_t begin, int64_t end) {
  with_type(args.type, [&]<typename T>(T) {
    auto* weight = (const T*)args.weight;
    switch (args.group) {
      case 0: return quantize_channels_of(weight, args.k, args.codes, args.scales, begin, end);
      case 32: return quantize_groups_of<2>(args, weight, begin, end);
      case 64: return quantize_groups_of<4>(args, weight, begin, end);
      default: return quantize_groups_of<8>(args, weight, begin, end);
    }
  });
}

}  // namespace
}  // namespace twostroke
