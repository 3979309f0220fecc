// The products of quantized.hpp in tiles (Intel AMX): the same integers, the same floats in the same order, hence the same bits.
//
// A span of a panel, 128 k of 64 channels, is first laid out as signed bytes; what a group's zero takes away is then zero.
#pragma once

#include "amx.hpp"
#include "quantized.hpp"

namespace twostroke {
namespace {

typedef int8_t i8x64 __attribute__((vector_size(64)));
typedef uint8_t u8x64 __attribute__((vector_size(64)));

// Fewer rows than this cost less one by one.
constexpr int64_t AMX_QUANTIZED_ROWS = 5;

// Codes of one group to [group / 4][4 vectors][16 channels][4 k] signed bytes.
template <int BITS>
INLINE void signed_codes(const char* codes, int64_t group, char* to) {
  for (int64_t at = 0; at < group * PANEL * BITS / 8; at += 64) {
    u8x64 w = load<u8x64>(codes + at);
    if constexpr (BITS == 8) {
      store(to + at, w ^ (uint8_t)0x80);
    } else {
      int64_t row = at / STEP_BYTES * 2 * STEP_BYTES + at % STEP_BYTES;
      store(to + row, (w & (uint8_t)0x0f) - (uint8_t)8);
      store(to + row + STEP_BYTES, (w >> 4) - (uint8_t)8);
    }
  }
}

// Integer sums of one tile of rows and one vector of channels over a group, left in `tile` and put where they are read. A tile
// is named in the instruction, so this cannot be a function of its number.
#define SUM_GROUP(tile, q, codes, products)                 \
  do {                                                      \
    _tile_zero(tile);                                       \
    for (int k = 0; k < GROUP; k += 64) {                   \
      _tile_loadd(4, (q) + k, q_bytes);                     \
      _tile_loadd(6, (codes) + k / 4 * STEP_BYTES, STEP_BYTES); \
      _tile_dpbssd(tile, 4, 6);                             \
    }                                                       \
    _tile_stored(tile, products, 64);                       \
  } while (0)

template <int BITS, int GROUP>
struct AmxSpan {
  static constexpr int GROUPS = SPAN / GROUP, AT_ONCE = GROUPS < 4 ? GROUPS : 4;
  alignas(64) char codes[SPAN * PANEL];
  alignas(64) int32_t products[AT_ONCE][TILE_HEIGHT][LANES];
  f32x16 parts[TILE_HEIGHT];

  INLINE void unpack(const char* span, int64_t groups, int64_t group_bytes) {
    for (int64_t g = 0; g < groups; g++) {
      ask_for(span + (g + 2 * GROUPS) * group_bytes, group_bytes);
      signed_codes<BITS>(span + g * group_bytes, GROUP, codes + g * GROUP * PANEL);
    }
  }

  static INLINE void ask_for(const char* from, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(from + at);
  }

  // Adds this span's share for one tile of rows and one vector of channels to sums [rows][PANEL].
  INLINE void add_to(float* sums, const QuantizedArgs& args, const char* span, int64_t group_bytes, int64_t first_group,
                     int64_t groups, int64_t row, int64_t rows, int v) {
    int64_t q_bytes = args.groups * GROUP;
    for (int64_t g = 0; g < groups; g += AT_ONCE) {
      int64_t count = groups - g < AT_ONCE ? groups - g : AT_ONCE;
      const int8_t* q = args.q + row * q_bytes + (first_group + g) * GROUP;
      const char* at = codes + g * GROUP * PANEL + v * 64;
      SUM_GROUP(0, q, at, products[0]);
      if constexpr (AT_ONCE > 1)
        if (count > 1) SUM_GROUP(1, q + GROUP, at + GROUP * PANEL, products[1]);
      if constexpr (AT_ONCE > 2) {
        if (count > 2) SUM_GROUP(2, q + 2 * GROUP, at + 2 * GROUP * PANEL, products[2]);
        if (count > 3) SUM_GROUP(3, q + 3 * GROUP, at + 3 * GROUP * PANEL, products[3]);
      }
      const char* scales = span + g * group_bytes + code_bytes<BITS>(GROUP) + v * LANES * 2;
      if (count == AT_ONCE && !args.has_min) fold<AT_ONCE, false>(sums, args, scales, group_bytes, first_group + g, count, row, rows, v, g == 0, g + count == groups);
      else fold<0, true>(sums, args, scales, group_bytes, first_group + g, count, row, rows, v, g == 0, g + count == groups);
    }
  }

  // Integers times scales, in the order of accumulate_spans; KNOWN groups or, if it is 0, `count`.
  template <int KNOWN, bool MAY_HAVE_MIN>
  INLINE void fold(float* sums, const QuantizedArgs& args, const char* scales, int64_t group_bytes, int64_t first_group,
                   int64_t count, int64_t row, int64_t rows, int v, bool begins, bool ends) {
    int64_t groups = KNOWN ? KNOWN : count, span = first_group / GROUPS;
    f32x16 scale[AT_ONCE], min[AT_ONCE];
    for (int64_t g = 0; g < groups; g++) {
      scale[g] = from_half(scales + g * group_bytes);
      if (MAY_HAVE_MIN && args.has_min) min[g] = from_half(scales + g * group_bytes + PANEL * 2);
    }
    for (int64_t r = 0; r < rows; r++) {
      f32x16 part = begins ? f32x16{} : parts[r];
      for (int64_t g = 0; g < groups; g++) {
        part = fma(__builtin_convertvector(load<i32x16>(products[g][r]), f32x16), scale[g], part);
        if (MAY_HAVE_MIN && args.has_min)
          part = fma(splat(-(float)args.sums[(row + r) * args.groups + first_group + g]), min[g], part);
      }
      float* sum = sums + r * PANEL + v * LANES;
      if (ends) store16(sum, fma(part, splat(args.scales[(row + r) * args.spans + span]), load16(sum)));
      else parts[r] = part;
    }
  }
};

template <typename T, int BITS, int GROUP>
void amx_quantized_panels(const QuantizedArgs& args, int64_t begin, int64_t end) {
  static thread_local ChunkSums sums;
  static thread_local AmxSpan<BITS, GROUP> work;
  RowTiles tiles{args.linear.m};
  int64_t group_bytes = quantized_group_bytes(BITS, GROUP, args.has_min), per_span = SPAN / GROUP;
  int64_t per_segment = (args.spans + SEGMENTS - 1) / SEGMENTS;
  configure_tiles(tiles.height, GROUP < 64 ? GROUP : 64);
  for (int64_t p = begin; p < end; p++) {
    const char* panel = (const char*)args.linear.w + p * args.groups * group_bytes;
    for (int64_t first = 0; first < tiles.count; first += CHUNK_HEIGHT) {
      int64_t count = tiles.count - first < CHUNK_HEIGHT ? tiles.count - first : CHUNK_HEIGHT;
      for (int s = 0; s < SEGMENTS; s++) {
        std::memset(sums.at[s], 0, (size_t)count * sizeof sums.at[s][0]);
        int64_t last = (s + 1) * per_segment < args.spans ? (s + 1) * per_segment : args.spans;
        for (int64_t span = s * per_segment; span < last; span++) {
          int64_t group = span * per_span, groups = args.groups - group < per_span ? args.groups - group : per_span;
          const char* at = panel + group * group_bytes;
          work.unpack(at, groups, group_bytes);
          for (int64_t t = 0; t < count; t++)
            for (int v = 0; v < PANEL_VECTORS; v++)
              work.add_to(sums.at[s][t][0], args, at, group_bytes, group, groups, tiles.first_row(first + t), tiles.height, v);
        }
      }
      finish_chunk<T>(args.linear, sums, tiles, first, count, p);
    }
  }
  _tile_release();
}

// Whether these products are taken in tiles; if so they are done.
INLINE bool quantized_in_tiles(const QuantizedArgs& args, int64_t begin, int64_t end) {
  if (args.linear.m < AMX_QUANTIZED_ROWS) return false;
  auto of_group = [&]<typename T, int BITS>() {
    switch (args.group) {
      case 16: return amx_quantized_panels<T, BITS, 16>(args, begin, end);
      case 32: return amx_quantized_panels<T, BITS, 32>(args, begin, end);
      case 64: return amx_quantized_panels<T, BITS, 64>(args, begin, end);
      default: return amx_quantized_panels<T, BITS, 128>(args, begin, end);
    }
  };
  auto of_bits = [&]<typename T>() {
    if (args.bits == 8) of_group.template operator()<T, 8>();
    else of_group.template operator()<T, 4>();
  };
  if (args.linear.type == Dtype::f32) of_bits.operator()<float>();
  else of_bits.operator()<uint16_t>();
  return true;
}

}  // namespace
}  // namespace twostroke
