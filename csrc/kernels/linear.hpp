// Matrix products against packed weights, with a fixed order of summation.
//
// Packed weights: panels of PANEL = 64 channels, 16 to a vector; K innermost, so that a pass streams through memory.
//
//   f32   panel [K][4][16]             one k a step
//   bf16  panel [K / 2][4][16][2]      two k a step (K is padded with a zero)
//
// The last panel is padded with channels of zeros. A result sums K in SEGMENTS runs, each from its first k to its last in one
// accumulator, and the runs in a fixed tree: (s0 + s1) + (s2 + s3). Nothing of this depends on the number of rows, so a
// row's bits do not either; and 2 or 4 ranks that own a half or a quarter of K can form the same tree.
#pragma once

#include "table.hpp"
#include "vec.hpp"

namespace twostroke {
namespace {

constexpr int SEGMENTS = 4;
constexpr int64_t SEGMENT_GRAIN = 32;

struct F32Weights {
  static constexpr int64_t STEP = 1;  // k per step
  using Activation = float;
  using Bits = uint32_t;
  static INLINE f32x16 dot(f32x16 acc, Bits a, const char* w) {
    float value;
    std::memcpy(&value, &a, 4);
    return fma(splat(value), load<f32x16>(w), acc);
  }
};

struct Bf16Weights {
  static constexpr int64_t STEP = 2;
  using Activation = uint16_t;
  using Bits = uint32_t;
  static INLINE f32x16 dot(f32x16 acc, Bits a, const char* w) { return dot_bf16(acc, a, load<u32x16>(w)); }
};

// One tile: ROWS rows of x against the VECTORS vectors of a panel, over [begin, end) steps of K, from zero.
template <typename W, int ROWS, int VECTORS>
INLINE void accumulate(f32x16 (&acc)[ROWS][VECTORS], const char* const* x, const char* w, int64_t begin, int64_t end) {
  constexpr int64_t STEP_BYTES = LANES * PANEL_VECTORS * 4;
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) acc[r][v] = f32x16{};
  for (int64_t step = begin; step < end; step++) {
    const char* at = w + step * STEP_BYTES;
    if constexpr (ROWS == 1) __builtin_prefetch(at + 2048);
    for (int r = 0; r < ROWS; r++) {
      uint32_t a;
      std::memcpy(&a, x[r] + step * 4, 4);
      for (int v = 0; v < VECTORS; v++) acc[r][v] = W::dot(acc[r][v], a, at + v * LANES * 4);
    }
  }
}

INLINE void put(const LinearArgs& args, int64_t row, int64_t channel, f32x16 value) {
  if (args.bias) {
    f32x16 bias{};
    int64_t count = args.n - channel < LANES ? args.n - channel : LANES;
    std::memcpy(&bias, args.bias + channel, (size_t)count * 4);
    value += bias;
  }
  int64_t count = args.n - channel;
  if (args.y_type == Dtype::f32) {
    float* y = (float*)args.y + row * args.ldy + channel;
    if (count >= LANES) store(y, value);
    else std::memcpy(y, &value, (size_t)count * 4);
  } else {
    uint16_t* y = (uint16_t*)args.y + row * args.ldy + channel;
    u16x16 bits = to_bf16(value);
    if (count >= LANES) store(y, bits);
    else std::memcpy(y, &bits, (size_t)count * 2);
  }
}

template <typename W, int ROWS, int VECTORS>
void tile(const LinearArgs& args, const char* panel, int64_t row, int64_t channel) {
  const char* x[ROWS];
  for (int r = 0; r < ROWS; r++) x[r] = (const char*)args.x + (row + r) * args.ldx * (int64_t)sizeof(typename W::Activation);
  int64_t steps = (args.k + W::STEP - 1) / W::STEP;
  int64_t per_segment = (steps + SEGMENTS - 1) / SEGMENTS;
  f32x16 sums[SEGMENTS][ROWS][VECTORS];
  for (int s = 0; s < SEGMENTS; s++) {
    int64_t begin = s * per_segment < steps ? s * per_segment : steps;
    int64_t end = begin + per_segment < steps ? begin + per_segment : steps;
    f32x16 acc[ROWS][VECTORS];
    accumulate<W, ROWS, VECTORS>(acc, x, panel, begin, end);
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECTORS; v++) sums[s][r][v] = acc[r][v];
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) {
      if (channel + v * LANES >= args.n) break;
      put(args, row + r, channel + v * LANES, (sums[0][r][v] + sums[1][r][v]) + (sums[2][r][v] + sums[3][r][v]));
    }
}

template <typename W, int ROWS, int VECTORS>
INLINE void vectors(const LinearArgs& args, const char* panel, int64_t row, int64_t channel) {
  for (int v = 0; v < PANEL_VECTORS; v += VECTORS)
    if (channel + v * LANES < args.n) tile<W, ROWS, VECTORS>(args, panel + v * LANES * 4, row, channel + v * LANES);
}

// Rows in tiles as high as the registers allow, then what is left.
template <typename W, int MOST_ROWS, int VECTORS>
void panels(const LinearArgs& args, int64_t begin, int64_t end) {
  int64_t steps = (args.k + W::STEP - 1) / W::STEP;
  for (int64_t p = begin; p < end; p++) {
    const char* panel = (const char*)args.w + p * steps * PANEL * 4;
    int64_t row = 0, channel = p * PANEL;
    for (; row + MOST_ROWS <= args.m; row += MOST_ROWS) vectors<W, MOST_ROWS, VECTORS>(args, panel, row, channel);
    switch (args.m - row) {
      case 5: if constexpr (MOST_ROWS > 5) vectors<W, 5, VECTORS>(args, panel, row, channel); break;
      case 4: if constexpr (MOST_ROWS > 4) vectors<W, 4, VECTORS>(args, panel, row, channel); break;
      case 3: if constexpr (MOST_ROWS > 3) vectors<W, 3, VECTORS>(args, panel, row, channel); break;
      case 2: if constexpr (MOST_ROWS > 2) vectors<W, 2, VECTORS>(args, panel, row, channel); break;
      case 1: vectors<W, 1, VECTORS>(args, panel, row, channel); break;
    }
  }
}

#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_VECTORS = 4;
#elif defined(__AVX2__)
constexpr int TILE_ROWS = 4, TILE_VECTORS = 1;
#else
constexpr int TILE_ROWS = 4, TILE_VECTORS = 1;
#endif

void linear_panels(const LinearArgs& args, int64_t begin, int64_t end) {
  if (args.x_type == Dtype::f32) panels<F32Weights, TILE_ROWS, TILE_VECTORS>(args, begin, end);
  else panels<Bf16Weights, TILE_ROWS, TILE_VECTORS>(args, begin, end);
}

}  // namespace
}  // namespace twostroke
