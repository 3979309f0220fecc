// Products of quantized.hpp in tiles (Intel AMX): the same integers, and the same floats in the same order, so the same bits.
//
// A span of a panel, 128 k of 64 channels, is first unpacked to signed bytes, which already include the group's zero.
#pragma once

#include "amx.hpp"
#include "quantized.hpp"

namespace twostroke {
namespace {

typedef int8_t i8x64 __attribute__((vector_size(64)));
typedef uint8_t u8x64 __attribute__((vector_size(64)));

// Fewer rows fit into one tile of vector registers, which is faster for them.
constexpr int64_t AMX_QUANTIZED_ROWS = QUANTIZED_ROWS + 1;

// Unpacks codes of one group to [group / 4][4 vectors][16 channels][4 k] signed bytes.
template <KernelFormat F>
INLINE void signed_codes(const char* codes, int64_t group, const WeightFormat& format, char* to) {
  if constexpr (F.bits == 8) {
    for (int64_t at = 0; at < group * PANEL; at += 64) store(to + at, load<u8x64>(codes + at) ^ (uint8_t)0x80);
  } else {
    using Codes = Unit<F>;
    uint8_t zero = F.has_table ? 0 : (uint8_t)format.zero();
    LookupOf<F> lookup(format.table, true);
    for (int64_t k = 0; k < group; k += Codes::K, codes += Codes::BYTES)
      for (int v = 0; v < PANEL_VECTORS; v++) {
        Codes unit(codes + v * 64, v, lookup);
        char* words = to + k / 4 * STEP_BYTES + v * 64;
#pragma GCC unroll 4
        for (int64_t i = 0; i < Codes::WORDS; i += Codes::PER_ROW) {
          u32x16 w[Codes::PER_ROW];
          unit.words(w, i);
          for (int64_t j = 0; j < Codes::PER_ROW; j++) store(words + (i + j) * STEP_BYTES, (u8x64)w[j] - zero);
        }
      }
  }
}

// Computes integer sums of one tile of rows and one vector of channels over a group, in `tile`, and stores them. The tile is
// part of the instruction's name, so its number cannot be a function's argument.
#define SUM_GROUP(tile, q, codes, products)                 \
  do {                                                      \
    _tile_zero(tile);                                       \
    for (int k = 0; k < GROUP; k += 64) {                   \
      TILE_LOAD(4, (q) + k, q_bytes);                     \
      TILE_LOAD(6, (codes) + k / 4 * STEP_BYTES, STEP_BYTES); \
      _tile_dpbssd(tile, 4, 6);                             \
    }                                                       \
    TILE_STORE(tile, products, 64);                       \
  } while (0)

// Product of a span of a panel and a chunk of rows. An item is a tile of rows with a vector of channels: while the products of
// one item are stored, those of the previous one are folded into the sums.
template <KernelFormat F, int GROUP>
struct AmxSpan {
  static constexpr bool SUPER = F.has_super_blocks;
  static constexpr int GROUPS = SPAN / GROUP, PER_SCALE = input_group(GROUP) / GROUP;
  alignas(64) char codes[SPAN * PANEL];
  alignas(64) int32_t products[2][GROUPS][TILE_HEIGHT][LANES];

  const QuantizedArgs& args;
  int64_t group_bytes = args.format.group_bytes(), q_bytes = args.groups * GROUP;
  const char* panel = nullptr;
  const char* span = nullptr;
  const char* ahead = nullptr;  // prefetched next: into the first cache, and a span later into the second
  int64_t first_group = 0, groups = 0;
  bool is_first = false;  // first span of a run, where its sums start

  explicit AmxSpan(const QuantizedArgs& args) : args(args) {}

  void begin(const char* panel, int64_t number, bool begins_run) {
    is_first = begins_run;
    first_group = number * GROUPS;
    groups = args.groups - first_group < GROUPS ? args.groups - first_group : GROUPS;
    this->panel = panel;
    span = panel + args.format.group_at(first_group);
    ahead = span + GROUPS * group_bytes;
    for (int64_t g = 0; g < groups; g++)
      signed_codes<F>(span + g * group_bytes, GROUP, args.format, codes + g * GROUP * PANEL);
  }

  // Prefetches one of `parts` parts of the next data; all at once, lines would wait for each other.
  INLINE void ask_ahead_of(int64_t parts) {
    int64_t lines = (groups * group_bytes / 64 + parts - 1) / parts;
    for (int64_t i = 0; i < lines; i++, ahead += 64) {
      __builtin_prefetch(ahead + GROUPS * group_bytes, 0, 2);
      __builtin_prefetch(ahead);
    }
  }

  // Computes integer products of rows [row, row + 16) with vector v, separately for each group.
  INLINE void multiply(int64_t row, int v, int slot) {
    const int8_t* q = args.inputs.q + row * q_bytes + first_group * GROUP;
    const char* at = codes + v * 64;
    for (int64_t g = 0; g < groups; g += 4) {
      SUM_GROUP(0, q + g * GROUP, at + g * GROUP * PANEL, products[slot][g]);
      if (g + 1 < groups) SUM_GROUP(1, q + (g + 1) * GROUP, at + (g + 1) * GROUP * PANEL, products[slot][g + 1]);
      if (g + 2 < groups) SUM_GROUP(2, q + (g + 2) * GROUP, at + (g + 2) * GROUP * PANEL, products[slot][g + 2]);
      if (g + 3 < groups) SUM_GROUP(3, q + (g + 3) * GROUP, at + (g + 3) * GROUP * PANEL, products[slot][g + 3]);
    }
  }

  // Adds integers times scales, in the order of accumulate_spans, to sums [rows][PANEL].
  template <bool WHOLE, bool HAS_MIN>
  INLINE void fold(float* sums, int64_t row, int64_t rows, int v, int slot) const {
    int64_t count = WHOLE ? GROUPS : groups;
    const char* scales = span + args.format.code_bytes();
    f32x16 scale[GROUPS], min[SUPER && HAS_MIN ? GROUPS : 1], d{}, dmin{};
    for (int64_t g = 0; g < count; g++) scale[g] = scale_of<F>(scales + g * group_bytes, v);
    if constexpr (SUPER) {
      const char* header = panel + args.format.header_at(first_group) + v * LANES * 2;
      d = from_half(header);
      if constexpr (HAS_MIN) {
        dmin = -from_half(header + PANEL * 2);
        for (int64_t g = 0; g < count; g++) min[g] = min_of<F>(scales + g * group_bytes, v);
      }
    }
    const float* input_scale = args.inputs.scales + row * args.input_groups + first_group / PER_SCALE;
    for (int64_t r = 0; r < rows; r++) {
      f32x16 part, sum{}, inside{};
      if (!is_first) sum = load16(sums + r * PANEL);
      f32x16& total = SUPER ? inside : sum;
      for (int64_t g = 0; g < count; g++) {
        f32x16 products_of_group = __builtin_convertvector(load<i32x16>(products[slot][g][r]), f32x16);
        part = g % PER_SCALE == 0 ? products_of_group * scale[g] : fma(products_of_group, scale[g], part);
        if constexpr (HAS_MIN && !SUPER)
          part = fma(splat(-(float)args.inputs.sums[(row + r) * args.groups + first_group + g]),
                     min_of<F>(scales + g * group_bytes, v), part);
        if ((g + 1) % PER_SCALE && g + 1 < count) continue;
        total = fma(part, splat(input_scale[r * args.input_groups + g / PER_SCALE]), total);
      }
      if constexpr (SUPER) sum = fma(inside, d, sum);
      if constexpr (SUPER && HAS_MIN) {
        f32x16 below{};
        const float* weighted = args.inputs.weighted + (row + r) * args.groups + first_group;
        for (int64_t g = 0; g < count; g++) below = fma(splat(weighted[g]), min[g], below);
        sum = fma(below, dmin, sum);
      }
      store16(sums + r * PANEL, sum);
    }
  }

  INLINE void fold(float* sums, int64_t row, int64_t rows, int v, int slot) const {
    if (args.format.has_min && groups == GROUPS && SUPER) fold<true, true>(sums, row, rows, v, slot);
    else if (args.format.has_min) fold<false, true>(sums, row, rows, v, slot);
    else if (groups == GROUPS) fold<true, false>(sums, row, rows, v, slot);
    else fold<false, false>(sums, row, rows, v, slot);
  }

  // Adds this span's share for `count` tiles of rows to sums.
  void add_to(float (*sums)[TILE_HEIGHT][PANEL], const RowTiles& tiles, int64_t first, int64_t count) {
    auto row_of = [&](int64_t item) { return tiles.first_row(first + item / PANEL_VECTORS); };
    auto vector_of = [](int64_t item) { return (int)(item % PANEL_VECTORS); };
    auto fold_item = [&](int64_t item) {
      fold(sums[item / PANEL_VECTORS][0] + vector_of(item) * LANES, row_of(item), tiles.height, vector_of(item), item % 2);
    };
    int64_t items = count * PANEL_VECTORS;
    multiply(row_of(0), 0, 0);
    for (int64_t item = 1; item < items; item++) {
      multiply(row_of(item), vector_of(item), item % 2);
      ask_ahead_of(items - 1);
      fold_item(item - 1);
    }
    fold_item(items - 1);
  }
};

// finish_chunk as a function of its own, so that it is compiled once for all formats.
__attribute__((noinline)) void finish_chunk_of_type(const LinearArgs& args, const ChunkSums& sums, const RowTiles& tiles,
                                                    int64_t first, int64_t count, int64_t p) {
  if (args.type == Dtype::f32) finish_chunk<float>(args, sums, tiles, first, count, p);
  else finish_chunk<uint16_t>(args, sums, tiles, first, count, p);
}

template <KernelFormat F, int GROUP>
void amx_quantized_panels(const QuantizedArgs& args, int64_t begin, int64_t end) {
  ChunkSums& sums = chunk_sums();
  AmxSpan<F, GROUP> span(args);
  RowTiles tiles{args.linear.m};
  int64_t per_segment = (args.spans + SEGMENTS - 1) / SEGMENTS;
  configure_tiles(tiles.height, GROUP < 64 ? GROUP : 64);
  for (int64_t p = begin; p < end; p++) {
    const char* panel = (const char*)args.linear.w + p * args.format.panel_bytes(args.linear.k);
    for (int64_t first = 0; first < tiles.count; first += CHUNK_HEIGHT) {
      int64_t count = tiles.count - first < CHUNK_HEIGHT ? tiles.count - first : CHUNK_HEIGHT;
      for (int s = 0; s < SEGMENTS; s++) {
        int64_t begin_of = s * per_segment, last = begin_of + per_segment < args.spans ? begin_of + per_segment : args.spans;
        if (begin_of >= last) std::memset(sums.at[s], 0, (size_t)count * sizeof sums.at[s][0]);
        for (int64_t number = begin_of; number < last; number++) {
          span.begin(panel, number, number == begin_of);
          span.add_to(sums.at[s], tiles, first, count);
        }
      }
      finish_chunk_of_type(args.linear, sums, tiles, first, count, p);
    }
  }
  _tile_release();
}

// Computes the products in tiles if that is faster; returns whether it did.
INLINE bool quantized_in_tiles(const QuantizedArgs& args, int64_t begin, int64_t end) {
  if (args.linear.m < AMX_QUANTIZED_ROWS) return false;
  of_format(args.format, [&]<KernelFormat F>() {
    if constexpr (!F.is_alone) return amx_quantized_panels<F, 16>(args, begin, end);
    else if constexpr (F.group == 32) return amx_quantized_panels<F, 32>(args, begin, end);
    else if (args.format.group == 64) return amx_quantized_panels<F, 64>(args, begin, end);
    else return amx_quantized_panels<F, 128>(args, begin, end);
  });
  return true;
}

}  // namespace
}  // namespace twostroke
