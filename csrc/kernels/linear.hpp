// Matrix products against packed weights, with a fixed order of summation.
//
// Packed weights: panels of PANEL = 64 channels, 16 per vector; K outermost in a panel, so that a pass streams through memory.
//
//   f32   panel [K][4][16]             one k per step
//   bf16  panel [K / 2][4][16][2]      two k per step (K is padded with a zero)
//
// The last panel is padded with channels of zeros. In gated weights, gate(x G^T) * (x U^T), vectors of G and U alternate, so
// that a tile holds both factors. A result sums K in SEGMENTS runs, each from its first k to its last in one accumulator, and
// the runs in a fixed tree: (s0 + s1) + (s2 + s3). Nothing of this depends on the number of rows, so a row's bits do not
// either; and 2 or 4 ranks that own a half or a quarter of K can form the same tree.
#pragma once

#include "elementwise.hpp"
#include "table.hpp"
#include "vec.hpp"

namespace twostroke {
namespace {

constexpr int64_t STEP_BYTES = PANEL * 4;  // bytes of a panel's step: four of each channel

// One step of K: TERMS multiply-adds, each of four bytes of a row's input with a vector of weights.
struct F32Weights {
  static constexpr int64_t STEP = 1;  // k per step
  static constexpr int TERMS = 1;
  using Element = float;
  using Input = float;  // type of inputs in the products
  static INLINE f32x16 weights(const char* step, int) { return load<f32x16>(step); }
  static INLINE f32x16 add(f32x16 acc, const char* input, f32x16 w) { return fma(splat(load<float>(input)), w, acc); }
};

#if defined(__AVX512BF16__)
struct Bf16Weights {
  static constexpr int64_t STEP = 2;
  static constexpr int TERMS = 1;
  using Element = uint16_t;
  using Input = uint16_t;
  static INLINE u32x16 weights(const char* step, int) { return load<u32x16>(step); }
  static INLINE f32x16 add(f32x16 acc, const char* input, u32x16 w) {
    return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(load<int32_t>(input)), (__m512bh)w);
  }
};
#else
// Without an instruction for it, both factors become float32: weights here, for all rows of a tile at once, inputs before.
struct Bf16Weights {
  static constexpr int64_t STEP = 2;
  static constexpr int TERMS = 2;
  using Element = uint16_t;
  using Input = float;
  static INLINE f32x16 weights(const char* step, int term) {
    u32x16 pairs = load<u32x16>(step);
    return term == 0 ? first_of_pair(pairs) : second_of_pair(pairs);
  }
  static INLINE f32x16 add(f32x16 acc, const char* input, f32x16 w) { return F32Weights::add(acc, input, w); }
};
#endif

constexpr bool WIDE_INPUTS = std::is_same_v<Bf16Weights::Input, float>;

// Returns how many vectors of a panel fit into `registers` registers for ROWS rows.
constexpr int vectors_of_tile(int rows, int registers) {
  int sums = registers / (64 / REGISTER_BYTES);
  return rows * 4 <= sums ? 4 : rows * 2 <= sums ? 2 : 1;
}
constexpr int rows_of_tile(int most, int registers) {
  int sums = registers / (64 / REGISTER_BYTES);
  return most < sums ? most : sums;
}

// Registers for a tile of sums. Weights and inputs need the rest; where a vector is four registers, weights alone need eight.
constexpr int SUM_REGISTERS = REGISTER_BYTES == 64 ? 24 : REGISTERS == 32 ? 16 : 12;
constexpr int TILE_ROWS = rows_of_tile(6, SUM_REGISTERS);
template <int ROWS>
constexpr int TILE_VECTORS = vectors_of_tile(ROWS, SUM_REGISTERS);

// Adds one step of K to a tile. input(r), weights(v): addresses of a row's inputs and a vector's weights.
template <typename W, int ROWS, int VECTORS, typename Input, typename Weights>
INLINE void add_step(f32x16 (&acc)[ROWS][VECTORS], const Input& input, const Weights& weights) {
  for (int term = 0; term < W::TERMS; term++) {
    decltype(W::weights(nullptr, 0)) w[VECTORS];
    for (int v = 0; v < VECTORS; v++) w[v] = W::weights(weights(v), term);
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECTORS; v++) acc[r][v] = W::add(acc[r][v], input(r) + term * 4, w[v]);
  }
}

// Prefetches weights, one row of a panel's vectors at a time: into the second cache early, so that more memory reads are in
// flight, and into the first cache late.
INLINE void ask_for_line(const char* line) {
  __builtin_prefetch(line + 4096, 0, 2);
  __builtin_prefetch(line + 2048);
}
INLINE void ask_ahead(const char* row) {
  for (int64_t at = 0; at < STEP_BYTES; at += 64) ask_for_line(row + at);
}

// Computes one tile: ROWS rows of x times VECTORS vectors of a panel, over [begin, end) steps of K, from zero. is_first: these
// weights were not read before.
template <typename W, int ROWS, int VECTORS>
INLINE void accumulate(f32x16 (&acc)[ROWS][VECTORS], const char* const* x, const char* w, int64_t begin, int64_t end,
                       bool is_first) {
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) acc[r][v] = f32x16{};
  for (int64_t step = begin; step < end; step++) {
    const char* at = w + step * STEP_BYTES;
    if (is_first) ask_ahead(at);
    add_step<W, ROWS, VECTORS>(acc, [&](int r) { return x[r] + step * W::TERMS * 4; }, [&](int v) { return at + v * LANES * 4; });
  }
}

template <typename T>
INLINE void put(const LinearArgs& args, int64_t row, int64_t channel, f32x16 value) {
  int64_t count = args.n - channel < LANES ? args.n - channel : LANES;
  if (count <= 0) return;
  if (args.residual) value += get((const T*)args.residual + row * args.ldy + channel, count);
  if (args.wide_y) set((float*)args.y + row * args.ldy + channel, rounded(value, T{}), count);
  else set((T*)args.y + row * args.ldy + channel, value, count);
}

// Returns the up projection multiplied by its activated gate x. SiLU is x / (1 + exp(-x)), and the tanh formula of GELU is
// x / (1 + exp(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x^3). Clamped SwiGLU is x / (1 + exp(-1.702 x)) (1 + up), with x at
// most 7 and up from -7 to 7.
INLINE f32x16 gated(Gate gate, f32x16 x, f32x16 up) {
  if (gate == Gate::clamped_swiglu) {
    f32x16 limit = splat(7.0f);
    x = select(x > limit, limit, x);
    up = select(up > limit, limit, select(up < -limit, -limit, up)) + splat(1.0f);
  }
  f32x16 slope = x;
  if (gate == Gate::gelu_tanh) slope = x * fma(x * x, splat(0.07135481282553325f), splat(1.5957691216057308f));
  if (gate == Gate::clamped_swiglu) slope = x * splat(1.702f);
  return x / (splat(1.0f) + exp(-slope)) * up;
}

// Applies bias, gate and residual to the totals of one row's vectors [first, first + VECTORS) of panel p, and writes them.
template <typename T, int VECTORS>
INLINE void finish_row(const LinearArgs& args, f32x16 (&total)[VECTORS], int64_t row, int64_t p, int first) {
  if (args.bias)
    for (int v = 0; v < VECTORS; v++) total[v] += load16(args.bias + p * PANEL + (first + v) * LANES);
  if (args.gate != Gate::none)
    for (int v = 0; v < VECTORS; v += 2)
      put<T>(args, row, (p * PANEL_VECTORS + first + v) / 2 * LANES,
             gated(args.gate, total[v], total[v + 1]));
  else
    for (int v = 0; v < VECTORS; v++) put<T>(args, row, (p * PANEL_VECTORS + first + v) * LANES, total[v]);
}

// Adds the runs in their fixed tree.
INLINE f32x16 add_runs(f32x16 s0, f32x16 s1, f32x16 s2, f32x16 s3) { return (s0 + s1) + (s2 + s3); }

// Adds the runs and writes ROWS rows of panel p.
template <typename T, int ROWS>
INLINE void finish(const LinearArgs& args, const f32x16 (&sums)[SEGMENTS][ROWS][PANEL_VECTORS], int64_t row, int64_t p) {
  for (int r = 0; r < ROWS; r++) {
    f32x16 total[PANEL_VECTORS];
    for (int v = 0; v < PANEL_VECTORS; v++) total[v] = add_runs(sums[0][r][v], sums[1][r][v], sums[2][r][v], sums[3][r][v]);
    finish_row<T, PANEL_VECTORS>(args, total, row + r, p, 0);
  }
}

// Calls f<ROWS>(first row) for tiles as high as the registers allow, then for the rest.
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

// Sums run s of K for ROWS rows and a panel.
template <typename W, int ROWS>
INLINE void sum_run(const LinearArgs& args, const char* panel, int64_t row, int s, f32x16 (&sums)[ROWS][PANEL_VECTORS]) {
  constexpr int VECTORS = TILE_VECTORS<ROWS>;
  const char* x[ROWS];
  for (int r = 0; r < ROWS; r++) x[r] = (const char*)args.x + (row + r) * args.ldx * (int64_t)sizeof(typename W::Input);
  int64_t steps = (args.k + W::STEP - 1) / W::STEP;
  int64_t per_segment = (steps + SEGMENTS - 1) / SEGMENTS;
  int64_t begin = s * per_segment < steps ? s * per_segment : steps;
  int64_t end = begin + per_segment < steps ? begin + per_segment : steps;
  for (int first = 0; first < PANEL_VECTORS; first += VECTORS) {
    f32x16 acc[ROWS][VECTORS];
    accumulate<W, ROWS, VECTORS>(acc, x, panel + first * LANES * 4, begin, end, row == 0 && first == 0);
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECTORS; v++) sums[r][first + v] = acc[r][v];
  }
}

// Multiplies ROWS rows with panel p, one run of K after the other, so that a run's weights stay in a cache for the next vectors.
template <typename W, int ROWS>
void tile(const LinearArgs& args, const char* panel, int64_t row, int64_t p) {
  f32x16 sums[SEGMENTS][ROWS][PANEL_VECTORS];
  for (int s = 0; s < SEGMENTS; s++) sum_run<W, ROWS>(args, panel, row, s, sums[s]);
  finish<typename W::Element, ROWS>(args, sums, row, p);
}

// Multiplies all rows with panel p, whose numbers are at `panel`.
template <typename W>
void multiply_panel(const LinearArgs& args, const char* panel, int64_t p) {
  in_tiles<TILE_ROWS>(args.m, [&]<int ROWS>(int64_t row) { tile<W, ROWS>(args, panel, row, p); });
}

template <typename W>
void panels(const LinearArgs& args, int64_t begin, int64_t end) {
  int64_t steps = (args.k + W::STEP - 1) / W::STEP;
  for (int64_t p = begin; p < end; p++) multiply_panel<W>(args, (const char*)args.w + p * steps * PANEL * 4, p);
}

}  // namespace
}  // namespace twostroke

#if defined(__AMX_BF16__)
#include "amx.hpp"
#endif

namespace twostroke {
namespace {

void linear_panels(const LinearArgs& args, int64_t begin, int64_t end) {
  if (args.type == Dtype::f32) return panels<F32Weights>(args, begin, end);
#if defined(__AMX_BF16__)
  amx_panels(args, begin, end);
#else
  panels<Bf16Weights>(args, begin, end);
#endif
}

void linear_runs(const LinearArgs& args, float* sums, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++)
    in_tiles<TILE_ROWS>(args.m, [&]<int ROWS>(int64_t row) {
      f32x16 of_run[ROWS][PANEL_VECTORS];
      const char* panel = (const char*)args.w + i / SEGMENTS * args.k * STEP_BYTES;
      sum_run<F32Weights, ROWS>(args, panel, row, (int)(i % SEGMENTS), of_run);
      for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < PANEL_VECTORS; v++) store16(sums + (i * args.m + row + r) * PANEL + v * LANES, of_run[r][v]);
    });
}

void linear_totals(const LinearArgs& args, const float* sums, int64_t begin, int64_t end) {
  for (int64_t p = begin; p < end; p++)
    for (int64_t row = 0; row < args.m; row++) {
      auto run = [&](int64_t s, int64_t v) { return load16(sums + ((p * SEGMENTS + s) * args.m + row) * PANEL + v * LANES); };
      f32x16 total[PANEL_VECTORS];
      for (int v = 0; v < PANEL_VECTORS; v++) total[v] = add_runs(run(0, v), run(1, v), run(2, v), run(3, v));
      finish_row<float, PANEL_VECTORS>(args, total, row, p, 0);
    }
}

}  // namespace
}  // namespace twostroke
