// Matrix products in tiles of 16 rows (Intel AMX), against the unchanged panels of linear.hpp.
//
// Sixteen steps of two k of a panel are four tiles side by side, which is the order that the instruction needs:
//
//            <- 4 vectors of 16 channels, 64 bytes each ->
//   step  0  | tile 0 | tile 1 | tile 2 | tile 3 |
//   ...      |        |        |        |        |            a row of x: 32 k of it are a row of the other factor
//   step 15  |        |        |        |        |
//
// For one element, TDPBF16PS adds the even k and the odd k of its 32 in one chain each, then both, then that to the sum. The
// levels below use another order, so bits differ between levels. But the order is the same for every row of a tile and for
// every number of rows, including one, so every product of bfloat16 here uses tiles.
#pragma once

#include "linear.hpp"

namespace twostroke {
namespace {

constexpr int64_t TILE_STEPS = 16;  // steps of K in a tile: 64 bytes of a row of x
constexpr int64_t TILE_HEIGHT = 16;
constexpr int64_t CHUNK_HEIGHT = 8;  // tiles of rows multiplied with a run of weights while it is in the first cache
constexpr int64_t TILE_BYTES = TILE_STEPS * STEP_BYTES;  // bytes of four tiles side by side

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

// Instructions with the tile in their name. GCC 12's intrinsics do not tell the compiler that loads read memory.
#define TILE_LOAD(tile, from, row_bytes) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(row_bytes)) : "memory")
#define TILE_STORE(tile, to, row_bytes) \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(row_bytes)) : "memory")

INLINE void load_config(const TileConfig& config) { __asm__ volatile("ldtilecfg %0" ::"m"(config)); }

// Tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 the weights of the same k.
INLINE void configure_tiles(int64_t rows, int64_t x_bytes) {
  TileConfig config;
  for (int tile = 0; tile < 8; tile++) {
    config.bytes[tile] = (uint16_t)(tile == 4 || tile == 5 ? x_bytes : 64);
    config.rows[tile] = (uint8_t)(tile < 6 ? rows : x_bytes / 4);
  }
  load_config(config);
}

INLINE void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Last steps of a run if they do not fill a tile: a copy, padded with zeros.
struct Rest {
  alignas(64) char x[TILE_HEIGHT][64];
  alignas(64) char w[TILE_BYTES];

  // Copies weights of `vectors` vectors from `weights` on; memory after the last of them need not exist.
  Rest(const char* from, int64_t x_bytes, int64_t rows, const char* weights, int64_t vectors, int64_t steps) {
    std::memset(this, 0, sizeof *this);
    for (int64_t r = 0; r < rows; r++) std::memcpy(x[r], from + r * x_bytes, (size_t)steps * 4);
    std::memcpy(w, weights, (size_t)((steps - 1) * STEP_BYTES + vectors * 64));
  }
};

// Panel of bfloat16 in memory. With few rows its reads limit the speed, and the processor itself prefetches less far ahead.
struct PanelInMemory {
  const char* panel;

  const char* numbers() const { return panel; }

  // Must be called before the first `steps` of K are read.
  static INLINE void needs(int64_t) {}

  // Must be called where VECTORS vectors of a step are read for the first time. One tile of rows reads all four and waits for
  // memory: prefetching in two steps, as linear.hpp does, was 5 % slower there, and 10 % faster for two tiles.
  template <int VECTORS>
  static INLINE void prefetch(const char* w) {
    for (int64_t step = 0; step < TILE_STEPS; step++)
      for (int v = 0; v < VECTORS; v++) {
        const char* at = w + step * STEP_BYTES + v * 64;
        if constexpr (VECTORS == PANEL_VECTORS) __builtin_prefetch(at + 2 * TILE_BYTES);
        else __builtin_prefetch(at + 2 * TILE_BYTES, 0, 2), __builtin_prefetch(at + TILE_BYTES);
      }
  }
};

// Product of one tile of rows and the four vectors of a panel.
struct OneByFour {
  const char* x;
  float* sums;

  static INLINE void add(const char* a, int64_t a_bytes, const char* w) {
    TILE_LOAD(4, a, a_bytes);
    TILE_LOAD(6, w, STEP_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    TILE_LOAD(7, w + 64, STEP_BYTES);
    _tile_dpbf16ps(1, 4, 7);
    TILE_LOAD(6, w + 128, STEP_BYTES);
    _tile_dpbf16ps(2, 4, 6);
    TILE_LOAD(7, w + 192, STEP_BYTES);
    _tile_dpbf16ps(3, 4, 7);
  }

  // Adds steps [begin, end) of K.
  template <typename Panel>
  INLINE void run(int64_t x_bytes, int64_t rows, Panel& panel, int64_t begin, int64_t end) const {
    const char* w = panel.numbers() + begin * STEP_BYTES;
    int64_t step = 0, steps = end - begin;
    clear_sums();
    for (; step + TILE_STEPS <= steps; step += TILE_STEPS) {
      panel.needs(begin + step + TILE_STEPS);
      panel.template prefetch<4>(w + step * STEP_BYTES);
      add(x + step * 4, x_bytes, w + step * STEP_BYTES);
    }
    if (step < steps) {
      panel.needs(end);
      Rest rest(x + step * 4, x_bytes, rows, w + step * STEP_BYTES, 4, steps - step);
      add(rest.x[0], 64, rest.w);
    }
    TILE_STORE(0, sums, STEP_BYTES);
    TILE_STORE(1, sums + 16, STEP_BYTES);
    TILE_STORE(2, sums + 32, STEP_BYTES);
    TILE_STORE(3, sums + 48, STEP_BYTES);
  }
};

// Product of two tiles of rows and two vectors: each loaded tile is used twice.
struct TwoByTwo {
  const char *x, *x2;
  float *sums, *sums2;

  static INLINE void add(const char* a, const char* a2, int64_t a_bytes, const char* w) {
    TILE_LOAD(6, w, STEP_BYTES);
    TILE_LOAD(4, a, a_bytes);
    _tile_dpbf16ps(0, 4, 6);
    TILE_LOAD(7, w + 64, STEP_BYTES);
    _tile_dpbf16ps(1, 4, 7);
    TILE_LOAD(5, a2, a_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }

  template <bool FIRST, typename Panel>
  INLINE void run(int64_t x_bytes, const Panel& panel, const char* w, int64_t steps) const {
    clear_sums();
    int64_t step = 0;
    for (; step + TILE_STEPS <= steps; step += TILE_STEPS) {
      if constexpr (FIRST) panel.template prefetch<2>(w + step * STEP_BYTES);
      add(x + step * 4, x2 + step * 4, x_bytes, w + step * STEP_BYTES);
    }
    if (step < steps) {
      Rest rest(x + step * 4, x_bytes, TILE_HEIGHT, w + step * STEP_BYTES, 2, steps - step);
      Rest rest2(x2 + step * 4, x_bytes, TILE_HEIGHT, w + step * STEP_BYTES, 2, steps - step);
      add(rest.x[0], rest2.x[0], 64, rest.w);
    }
    TILE_STORE(0, sums, STEP_BYTES);
    TILE_STORE(1, sums + 16, STEP_BYTES);
    TILE_STORE(2, sums2, STEP_BYTES);
    TILE_STORE(3, sums2 + 16, STEP_BYTES);
  }
};

// Division of m rows into tiles. The last tile starts early enough to be full; rows computed twice get the same results.
struct RowTiles {
  int64_t m, height = m < TILE_HEIGHT ? m : TILE_HEIGHT, count = (m + TILE_HEIGHT - 1) / TILE_HEIGHT;

  int64_t first_row(int64_t tile) const { return tile + 1 < count ? tile * TILE_HEIGHT : m - height; }
};

// Sums of a chunk of rows for one panel, for each run of K.
struct alignas(64) ChunkSums {
  float at[SEGMENTS][CHUNK_HEIGHT][TILE_HEIGHT][PANEL];
};

// One buffer per thread for all products: it takes room on the thread's stack, where one for each format would not fit.
INLINE ChunkSums& chunk_sums() {
  static thread_local ChunkSums sums;
  return sums;
}

// Adds the runs of `count` tiles and writes the results.
template <typename T>
INLINE void finish_chunk(const LinearArgs& args, const ChunkSums& sums, const RowTiles& tiles, int64_t first, int64_t count,
                         int64_t p) {
  for (int64_t t = 0; t < count; t++)
    for (int64_t row = (first + t) * TILE_HEIGHT; row < tiles.first_row(first + t) + tiles.height; row++) {
      int64_t r = row - tiles.first_row(first + t);
      f32x16 total[PANEL_VECTORS];
      for (int v = 0; v < PANEL_VECTORS; v++) {
        auto run = [&](int s) { return load16(sums.at[s][t][r] + v * LANES); };
        total[v] = add_runs(run(0), run(1), run(2), run(3));
      }
      finish_row<T, PANEL_VECTORS>(args, total, row, p, 0);
    }
}

// Products of all rows with one panel after the other.
struct TilePanels {
  const LinearArgs& args;
  RowTiles tiles{args.m};
  int64_t steps = (args.k + 1) / 2, per_segment = (steps + SEGMENTS - 1) / SEGMENTS, x_bytes = args.ldx * 2;

  explicit TilePanels(const LinearArgs& args) : args(args) { configure_tiles(tiles.height, 64); }
  ~TilePanels() { _tile_release(); }

  const char* x_of(int64_t tile, int64_t step) const { return (const char*)args.x + tiles.first_row(tile) * x_bytes + step * 4; }

  // Multiplies all rows with panel p.
  template <typename Panel>
  INLINE void multiply(Panel& panel, int64_t p) const {
    ChunkSums& sums = chunk_sums();
    for (int64_t first = 0; first < tiles.count; first += CHUNK_HEIGHT) {
      int64_t count = tiles.count - first < CHUNK_HEIGHT ? tiles.count - first : CHUNK_HEIGHT, pairs = count / 2 * 2;
      for (int s = 0; s < SEGMENTS; s++) {
        int64_t begin = s * per_segment < steps ? s * per_segment : steps;
        int64_t end = begin + per_segment < steps ? begin + per_segment : steps;
        if (pairs) panel.needs(end);
        for (int half = 0; half < 2; half++)
          for (int64_t t = 0; t < pairs; t += 2) {
            const char* w = panel.numbers() + begin * STEP_BYTES + half * 128;
            float *to = sums.at[s][t][0] + half * 32, *to2 = sums.at[s][t + 1][0] + half * 32;
            TwoByTwo both{x_of(first + t, begin), x_of(first + t + 1, begin), to, to2};
            if (t == 0) both.run<true>(x_bytes, panel, w, end - begin);
            else both.run<false>(x_bytes, panel, w, end - begin);
          }
        if (pairs < count) OneByFour{x_of(first + pairs, begin), sums.at[s][pairs][0]}.run(x_bytes, tiles.height, panel, begin, end);
      }
      finish_chunk<uint16_t>(args, sums, tiles, first, count, p);
    }
  }
};

void amx_panels(const LinearArgs& args, int64_t begin, int64_t end) {
  TilePanels panels(args);
  for (int64_t p = begin; p < end; p++) {
    PanelInMemory panel{(const char*)args.w + p * panels.steps * STEP_BYTES};
    panels.multiply(panel, p);
  }
}

}  // namespace
}  // namespace twostroke
