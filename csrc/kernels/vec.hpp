// Sixteen lanes on every processor, and the few operations on them that need a particular instruction.
//
// A level is one compilation of level.cpp. The compiler never contracts a*b+c (-ffp-contract=off): where a product and a sum
// are to be rounded once, the code says fma().
#pragma once

#include "lanes.hpp"

#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace twostroke {
namespace {

using f32x16 = Lanes<float, 16>;
using u32x16 = Lanes<uint32_t, 16>;
using i32x16 = Lanes<int32_t, 16>;
using u16x16 = Lanes<uint16_t, 16>;
using u8x16 = Lanes<uint8_t, 16>;

INLINE f32x16 splat(float a) { return filled<f32x16>(a); }
INLINE u32x16 splat(uint32_t a) { return filled<u32x16>(a); }
INLINE i32x16 splat(int32_t a) { return filled<i32x16>(a); }

// Returns 0 to 15.
INLINE i32x16 lane_numbers() {
  alignas(64) static constexpr int32_t NUMBERS[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load<i32x16>(NUMBERS);
}

// Returns a * b + c, rounded once where the processor can.
INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  auto of_register = [](auto x, auto y, auto z) { return (Lanes<float, 8>)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z); };
  return in_registers(of_register, a, b, c);
#elif defined(__ARM_NEON)
  auto of_register = [](auto x, auto y, auto z) {
    return (Lanes<float, 4>)vfmaq_f32((float32x4_t)z, (float32x4_t)x, (float32x4_t)y);
  };
  return in_registers(of_register, a, b, c);
#else
  return a * b + c;
#endif
}

// ---------------------------------------------------------------- numbers of other types

INLINE f32x16 to_float(i32x16 v) {
  return in_registers([](auto x) { return __builtin_convertvector(x, Lanes<float, sizeof x / 4>); }, v);
}
INLINE f32x16 to_float(u32x16 v) {
  return in_registers([](auto x) { return __builtin_convertvector(x, Lanes<float, sizeof x / 4>); }, v);
}
INLINE i32x16 to_int(f32x16 v) {
  return in_registers([](auto x) { return __builtin_convertvector(x, Lanes<int32_t, sizeof x / 4>); }, v);
}

// Widens sixteen small integers, one per lane; by an intrinsic, since GCC 12 splits a conversion.
INLINE u32x16 widened(u16x16 v) {
#if defined(__AVX512F__)
  return (u32x16)_mm512_maskz_cvtepu16_epi32((__mmask16)-1, (__m256i)v);
#elif defined(__AVX2__)
  return {(Lanes<uint32_t, 8>)_mm256_cvtepu16_epi32(_mm256_castsi256_si128((__m256i)v)),
          (Lanes<uint32_t, 8>)_mm256_cvtepu16_epi32(_mm256_extracti128_si256((__m256i)v, 1))};
#else
  return in_registers([](auto x) {
    using Wide = Lanes<uint32_t, 4>;
    return Halves<Wide>{(Wide)__builtin_shufflevector(x, decltype(x){}, 0, 8, 1, 9, 2, 10, 3, 11),
                        (Wide)__builtin_shufflevector(x, decltype(x){}, 4, 12, 5, 13, 6, 14, 7, 15)};
  }, v);
#endif
}
INLINE u32x16 widened(u8x16 v) {
#if defined(__AVX512F__)
  return (u32x16)_mm512_maskz_cvtepu8_epi32((__mmask16)-1, (__m128i)v);
#elif defined(__AVX2__)
  return {(Lanes<uint32_t, 8>)_mm256_cvtepu8_epi32((__m128i)v),
          (Lanes<uint32_t, 8>)_mm256_cvtepu8_epi32(_mm_unpackhi_epi64((__m128i)v, (__m128i)v))};
#else
  using Wide = Lanes<uint16_t, 8>;
  return widened(u16x16{(Wide)__builtin_shufflevector(v, u8x16{}, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
                        (Wide)__builtin_shufflevector(v, u8x16{}, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)});
#endif
}

// Converts sixteen signed bytes to floats.
INLINE f32x16 from_bytes(const void* p) {
#if defined(__AVX512F__)
  return to_float((i32x16)_mm512_maskz_cvtepi8_epi32((__mmask16)-1, _mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
  auto eight = [&](int64_t first) {
    return (Lanes<int32_t, 8>)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)((const char*)p + first)));
  };
  return to_float(i32x16{eight(0), eight(8)});
#else
  return to_float((i32x16)(widened(load<u8x16>(p)) << 24) >> 24);
#endif
}

// Upper 16 bits of every lane, and its lowest 8.
INLINE u16x16 upper_halves(u32x16 v) {
#if defined(__AVX512F__)
  return (u16x16)_mm512_maskz_cvtepi32_epi16((__mmask16)-1, (__m512i)(v >> 16));
#else
  return parts_of<uint16_t, 1>(v.low, v.high);
#endif
}
INLINE u8x16 lowest_bytes(i32x16 v) {
#if defined(__AVX512F__)
  return (u8x16)_mm512_maskz_cvtepi32_epi8((__mmask16)-1, (__m512i)v);
#else
  auto halves = halves_of(parts_of<uint16_t, 0>(v.low, v.high));
  return parts_of<uint8_t, 0>(halves.low, halves.high);
#endif
}

INLINE f32x16 from_half(const void* p) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_maskz_cvtph_ps((__mmask16)-1, _mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  const __m128i* at = (const __m128i*)p;
  return {(Lanes<float, 8>)_mm256_cvtph_ps(_mm_loadu_si128(at)), (Lanes<float, 8>)_mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
#elif defined(__ARM_NEON)
  auto four = [&](int64_t first) { return (Lanes<float, 4>)vcvt_f32_f16(load<float16x4_t>((const char*)p + first * 2)); };
  return {{four(0), four(4)}, {four(8), four(12)}};
#else
  // A half shifted into place is a float whose exponent is too small by 112; this also holds for subnormal halves.
  u32x16 bits = widened(load<u16x16>(p));
  f32x16 magnitude = (f32x16)((bits & splat(0x7fffu)) << 13) * splat(0x1p112f);
  return (f32x16)((u32x16)magnitude | (bits & splat(0x8000u)) << 16);
#endif
}

// Rounds sixteen floats to bf16, to nearest even; NaN stays NaN.
INLINE u16x16 to_bf16(f32x16 v) {
#if defined(__AVX512BF16__)
  return (u16x16)_mm512_cvtneps_pbh((__m512)v);
#else
  u32x16 bits = (u32x16)v;
  u32x16 rounded = bits + splat(0x7fffu) + ((bits >> 16) & splat(1u));
  u32x16 is_nan = (u32x16)(v != v);
  rounded = (is_nan & (bits | splat(0x400000u))) | (~is_nan & rounded);
  return upper_halves(rounded);
#endif
}

INLINE f32x16 from_bf16(u16x16 v) { return (f32x16)(widened(v) << 16); }

// Convert one of two bf16 per lane to float; the first is in the lane's lower half.
INLINE f32x16 first_of_pair(u32x16 pairs) { return (f32x16)(pairs << 16); }
INLINE f32x16 second_of_pair(u32x16 pairs) { return (f32x16)(pairs & splat(0xffff0000u)); }

// ---------------------------------------------------------------- lanes beside lanes

// Returns lanes of a where mask is all ones, of b where it is zero.
INLINE f32x16 select(i32x16 mask, f32x16 a, f32x16 b) {
  return (f32x16)(((u32x16)mask & (u32x16)a) | (~(u32x16)mask & (u32x16)b));
}

// a < b ? a : b and a > b ? a : b, for any number of lanes.
struct Smaller {
  template <typename V>
  INLINE V operator()(V a, V b) const {
    if constexpr (IS_HALVES<V>) return {(*this)(a.low, b.low), (*this)(a.high, b.high)};
#if defined(__AVX512F__)
    else if constexpr (sizeof(V) == 64) return (V)_mm512_maskz_min_ps((__mmask16)-1, (__m512)a, (__m512)b);
#endif
    else return a < b ? a : b;
  }
};
struct Larger {
  template <typename V>
  INLINE V operator()(V a, V b) const {
    if constexpr (IS_HALVES<V>) return {(*this)(a.low, b.low), (*this)(a.high, b.high)};
#if defined(__AVX512F__)
    else if constexpr (sizeof(V) == 64) return (V)_mm512_maskz_max_ps((__mmask16)-1, (__m512)a, (__m512)b);
#endif
    else return a > b ? a : b;
  }
};
constexpr Smaller smaller;
constexpr Larger larger;

INLINE f32x16 magnitude(f32x16 v) { return (f32x16)((u32x16)v & splat(0x7fffffffu)); }

// Reduces a vector by halves: always the same tree.
template <typename V, typename F>
INLINE float folded(V v, const F& f) {
  if constexpr (sizeof(V) > 16) {
    auto halves = halves_of(v);
    return folded(f(halves.low, halves.high), f);
  } else {
    v = f(v, (V)__builtin_shufflevector(v, v, 2, 3, 0, 1));
    v = f(v, (V)__builtin_shufflevector(v, v, 1, 0, 3, 2));
    return v[0];
  }
}

INLINE float sum_of(f32x16 v) {
  return folded(v, [](auto a, auto b) { return a + b; });
}

INLINE float largest_of(f32x16 v) { return folded(v, larger); }

// Returns e^x within 2 units in the last place; 0 below -87 (also for -inf). Lanes are independent.
INLINE f32x16 exp(f32x16 x) {
  i32x16 vanishes = x < splat(-87.0f);
  x = select(vanishes, splat(-87.0f), x);
  x = select(x > splat(88.0f), splat(88.0f), x);
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
  f32x16 shifted = fma(x, splat(1.44269504f), splat(magic));
  f32x16 n = shifted - splat(magic);
  f32x16 r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  f32x16 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r + splat(1.0f));
  i32x16 exponent = ((i32x16)shifted << 23) + splat(0x3f800000);  // the magic number has no low bits
  return select(vanishes, f32x16{}, p * (f32x16)exponent);
}

// ---------------------------------------------------------------- memory

// Loads the first `count` of sixteen lanes; the rest are zero and their memory is not read.
INLINE f32x16 load_some(const float* p, int64_t count) {
  f32x16 v{};
  std::memcpy(&v, p, (size_t)count * 4);
  return v;
}
INLINE f32x16 load_some(const uint16_t* p, int64_t count) {
  u16x16 v{};
  std::memcpy(&v, p, (size_t)count * 2);
  return from_bf16(v);
}
INLINE void store_some(float* p, f32x16 v, int64_t count) { std::memcpy(p, &v, (size_t)count * 4); }
INLINE void store_some(uint16_t* p, f32x16 v, int64_t count) {
  u16x16 bits = to_bf16(v);
  std::memcpy(p, &bits, (size_t)count * 2);
}
INLINE f32x16 load16(const float* p) { return load<f32x16>(p); }
INLINE f32x16 load16(const uint16_t* p) { return from_bf16(load<u16x16>(p)); }
INLINE void store16(float* p, f32x16 v) { store(p, v); }
INLINE void store16(uint16_t* p, f32x16 v) { store(p, to_bf16(v)); }

// Rounds to T and back.
INLINE f32x16 rounded(f32x16 v, float) { return v; }
INLINE f32x16 rounded(f32x16 v, uint16_t) { return from_bf16(to_bf16(v)); }

}  // namespace
}  // namespace twostroke
