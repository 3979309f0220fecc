// Sixteen lanes on every processor: GCC's vector types, and the few operations that need an instruction by name.
//
// A level is one compilation of level.cpp. Nothing here contracts a*b+c by itself (-ffp-contract=off): where a product
// and a sum are to be rounded once, the code says fma().
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace twostroke {
namespace {

typedef float f32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

#define INLINE inline __attribute__((always_inline))

template <typename V>
INLINE V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <typename V>
INLINE void store(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

INLINE f32x16 splat(float a) { return f32x16{} + a; }
INLINE u32x16 splat(uint32_t a) { return u32x16{} + a; }

// a * b + c, rounded once where the processor can.
INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  f32x16 out;
  for (int half = 0; half < 2; half++) {
    __m256 x, y, z;
    std::memcpy(&x, (const char*)&a + 32 * half, 32);
    std::memcpy(&y, (const char*)&b + 32 * half, 32);
    std::memcpy(&z, (const char*)&c + 32 * half, 32);
    z = _mm256_fmadd_ps(x, y, z);
    std::memcpy((char*)&out + 32 * half, &z, 32);
  }
  return out;
#elif defined(__ARM_NEON)
  f32x16 out;
  for (int part = 0; part < 4; part++) {
    float32x4_t x, y, z;
    std::memcpy(&x, (const char*)&a + 16 * part, 16);
    std::memcpy(&y, (const char*)&b + 16 * part, 16);
    std::memcpy(&z, (const char*)&c + 16 * part, 16);
    z = vfmaq_f32(z, x, y);
    std::memcpy((char*)&out + 16 * part, &z, 16);
  }
  return out;
#else
  return a * b + c;
#endif
}

// acc += a[0] * w[.][0] + a[1] * w[.][1]: a pair of bf16 times sixteen pairs of bf16.
INLINE f32x16 dot_bf16(f32x16 acc, uint32_t a, u32x16 w) {
#if defined(__AVX512BF16__)
  return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)w);
#else
  uint32_t low = a << 16, high = a & 0xffff0000u;
  float a0, a1;
  std::memcpy(&a0, &low, 4);
  std::memcpy(&a1, &high, 4);
  acc = fma(splat(a0), (f32x16)(w << 16), acc);
  return fma(splat(a1), (f32x16)(w & splat(0xffff0000u)), acc);
#endif
}

// Sixteen floats to bf16, to nearest even; NaN stays NaN.
INLINE u16x16 to_bf16(f32x16 v) {
#if defined(__AVX512BF16__)
  return (u16x16)_mm512_cvtneps_pbh((__m512)v);
#else
  u32x16 bits = (u32x16)v;
  u32x16 rounded = bits + splat(0x7fffu) + ((bits >> 16) & splat(1u));
  u32x16 is_nan = (u32x16)(v != v);
  rounded = (is_nan & (bits | splat(0x400000u))) | (~is_nan & rounded);
  return __builtin_convertvector(rounded >> 16, u16x16);
#endif
}

INLINE f32x16 from_bf16(u16x16 v) { return (f32x16)(__builtin_convertvector(v, u32x16) << 16); }

}  // namespace
}  // namespace twostroke
