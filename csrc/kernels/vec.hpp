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

// Lanes of a where mask is all ones, of b where it is zero.
INLINE f32x16 select(i32x16 mask, f32x16 a, f32x16 b) {
  return (f32x16)(((u32x16)mask & (u32x16)a) | (~(u32x16)mask & (u32x16)b));
}

INLINE f32x16 larger(f32x16 a, f32x16 b) { return select(a > b, a, b); }

// Halves folded onto each other: always the same tree.
template <typename F>
INLINE float folded(f32x16 v, const F& f) {
  v = f(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = f(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = f(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = f(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return v[0];
}

INLINE float sum_of(f32x16 v) {
  return folded(v, [](f32x16 a, f32x16 b) { return a + b; });
}

INLINE float largest_of(f32x16 v) { return folded(v, larger); }

// e^x within 2 units in the last place; 0 below -87 (also for -inf). Lanes do not know each other.
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
  i32x16 exponent = ((i32x16)shifted << 23) + (i32x16{} + 0x3f800000);  // the magic number has no low bits
  return select(vanishes, f32x16{}, p * (f32x16)exponent);
}

// Some of sixteen lanes; the others are zero and untouched.
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

// Rounded to T and back.
INLINE f32x16 rounded(f32x16 v, float) { return v; }
INLINE f32x16 rounded(f32x16 v, uint16_t) { return from_bf16(to_bf16(v)); }

}  // namespace
}  // namespace twostroke
