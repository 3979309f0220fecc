// Matrix products against packed weights, with a fixed order of summation.
//
// Packed weights: panels of PANEL = 64 channels, 16 to a vector; K innermost, so that a pass streams through memory.
//
//   f32   panel [K][4][16]             one k a step
//   bf16  panel [K / 2][4][16][2]      two k a step (K is padded with a zero)
//
// The last panel is padded with channels of zeros. Gated weights, silu(x G^T) * (x U^T), have vectors of G and of U in turn, so
// that a tile holds both factors. A result sums K in SEGMENTS runs, each from its first k to its last in one
// accumulator, and the runs in a fixed tree: (s0 + s1) + (s2 + s3). Nothing of this depends on the number of rows, so a
// row's bits do not either; and 2 or 4 ranks that own a half or a quarter of K can form the same tree.
#pragma once

#include "elementwise.hpp"
#include "table.hpp"
#include "vec.hpp"

namespace twostroke {
namespace {

constexpr int SEGMENTS = 4;

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

template <typename T>
INLINE void put(const LinearArgs& args, int64_t row, int64_t channel, f32x16 value) {
  int64_t count = args.n - channel < LANES ? args.n - channel : LANES;
  if (count <= 0) return;
  if (args.residual) value += get((const T*)args.residual + row * args.ldy + channel, count);
  set((T*)args.y + row * args.ldy + channel, value, count);
}

// Bias, gate and residual on the totals of one row's vectors [first, first + VECTORS) of panel p, and out.
template <typename T, int VECTORS>
INLINE void finish_row(const LinearArgs& args, f32x16 (&total)[VECTORS], int64_t row, int64_t p, int first) {
  if (args.bias)
    for (int v = 0; v < VECTORS; v++) total[v] += load16(args.bias + p * PANEL + (first + v) * LANES);
  if (args.gated)
    for (int v = 0; v < VECTORS; v += 2)
      put<T>(args, row, (p * PANEL_VECTORS + first + v) / 2 * LANES,
             total[v] / (splat(1.0f) + exp(-total[v])) * total[v + 1]);
  else
    for (int v = 0; v < VECTORS; v++) put<T>(args, row, (p * PANEL_VECTORS + first + v) * LANES, total[v]);
}

// The runs' tree.
INLINE f32x16 add_runs(f32x16 s0, f32x16 s1, f32x16 s2, f32x16 s3) { return (s0 + s1) + (s2 + s3); }

// Adds up the runs and writes ROWS rows of the vectors [first, first + VECTORS) of panel p.
template <typename T, int ROWS, int VECTORS>
INLINE void finish(const LinearArgs& args, const f32x16 (&sums)[SEGMENTS][ROWS][VECTORS], int64_t row, int64_t p, int first) {
  for (int r = 0; r < ROWS; r++) {
    f32x16 total[VECTORS];
    for (int v = 0; v < VECTORS; v++) total[v] = add_runs(sums[0][r][v], sums[1][r][v], sums[2][r][v], sums[3][r][v]);
    finish_row<T, VECTORS>(args, total, row + r, p, first);
  }
}

// Calls f<ROWS>(first row): tiles as high as the registers allow, then what is left.
template <int MOST_ROWS, typename F>
INLINE void in_tiles(int64_t m, const F& f) {
  int64_t row = 0;
  for (; row + MOST_ROWS <= m; row += MOST_ROWS) f.template operator()<MOST_ROWS>(row);
  switch (m - row) {
    case 5: if constexpr (MOST_ROWS > 5) f.template operator()<5>(row); break;
    case 4: if constexpr (MOST_ROWS > 4) f.template operator()<4>(row); break;
    case 3: if constexpr (MOST_ROWS > 3) f.template operator()<3>(row); break;
    case 2: if constexpr (MOST_ROWS > 2) f.template operator()<2>(row); break;
    case 1: f.template operator()<1>(row); break;
  }
}

// ROWS rows against the vectors [first, first + VECTORS) of panel p.
template <typename W, int ROWS, int VECTORS>
void tile(const LinearArgs& args, const char* panel, int64_t row, int64_t p, int first) {
  using T = typename W::Activation;
  const char* x[ROWS];
  for (int r = 0; r < ROWS; r++) x[r] = (const char*)args.x + (row + r) * args.ldx * (int64_t)sizeof(T);
  int64_t steps = (args.k + W::STEP - 1) / W::STEP;
  int64_t per_segment = (steps + SEGMENTS - 1) / SEGMENTS;
  f32x16 sums[SEGMENTS][ROWS][VECTORS];
  for (int s = 0; s < SEGMENTS; s++) {
    int64_t begin = s * per_segment < steps ? s * per_segment : steps;
    int64_t end = begin + per_segment < steps ? begin + per_segment : steps;
    f32x16 acc[ROWS][VECTORS];
    accumulate<W, ROWS, VECTORS>(acc, x, panel + first * LANES * 4, begin, end);
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECTORS; v++) sums[s][r][v] = acc[r][v];
  }
  finish<T, ROWS, VECTORS>(args, sums, row, p, first);
}

// All rows against panel p, whose numbers stand at `panel`.
template <typename W, int MOST_ROWS, int VECTORS>
void multiply_panel(const LinearArgs& args, const char* panel, int64_t p) {
  in_tiles<MOST_ROWS>(args.m, [&]<int ROWS>(int64_t row) {
    for (int first = 0; first < PANEL_VECTORS; first += VECTORS) tile<W, ROWS, VECTORS>(args, panel, row, p, first);
  });
}

template <typename W, int MOST_ROWS, int VECTORS>
void panels(const LinearArgs& args, int64_t begin, int64_t end) {
  int64_t steps = (args.k + W::STEP - 1) / W::STEP;
  for (int64_t p = begin; p < end; p++)
    multiply_panel<W, MOST_ROWS, VECTORS>(args, (const char*)args.w + p * steps * PANEL * 4, p);
}

// Sums in registers: 24 of 32 of them, or 12 of 16 (two to a vector of sixteen lanes). Gated panels need an even number.
#if defined(__AVX512F__)
constexpr int TILE_ROWS = 6, TILE_VECTORS = 4;
#else
constexpr int TILE_ROWS = 3, TILE_VECTORS = 2;
#endif

}  // namespace
}  // namespace twostroke

#if defined(__AMX_BF16__)
#include "amx.hpp"
#endif

namespace twostroke {
namespace {

void linear_panels(const LinearArgs& args, int64_t begin, int64_t end) {
  if (args.type == Dtype::f32) return panels<F32Weights, TILE_ROWS, TILE_VECTORS>(args, begin, end);
#if defined(__AMX_BF16__)
  amx_panels(args, begin, end);
#else
  panels<Bf16Weights, TILE_ROWS, TILE_VECTORS>(args, begin, end);
#endif
}

}  // namespace
}  // namespace twostroke
