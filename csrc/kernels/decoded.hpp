// Products of quantized weights with unquantized inputs: codes are dequantized to the inputs' type just before they are
// multiplied. The products have the bits of linear.hpp with the dequantized weight.
#pragma once

#include "kv_fetch.hpp"
#include "linear.hpp"
#include "quantized.hpp"

namespace twostroke {
namespace {

// Offset of codes as floats, subtracted together with their zero: 8-bit codes are fastest as part of 256's mantissa.
template <int BITS>
constexpr float BASE = BITS == 8 ? 256.0f : 0.0f;

// Returns the codes that start at bit AT of every lane, plus the base; for formats with a table, the table's values.
template <KernelFormat F, int AT>
INLINE f32x16 based_codes(u32x16 word) {
  if constexpr (F.has_table) {
    return to_float((i32x16)(word << (24 - AT)) >> 24);
  } else if constexpr (F.bits == 8) {
    constexpr int PLACE = 15;  // position in 256's mantissa
    u32x16 moved = AT < PLACE ? word << (AT < PLACE ? PLACE - AT : 0) : word >> (AT < PLACE ? 0 : AT - PLACE);
    return (f32x16)((moved & splat(0xffu << PLACE)) | splat(0x43800000u));
  } else if constexpr (F.bits != 4) {
    return to_float((word >> AT) & splat(0x3fu));  // one byte each
  } else {
#if defined(__AVX512F__)
    alignas(64) static constexpr float CODES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (f32x16)_mm512_permutexvar_ps((__m512i)(word >> AT), _mm512_load_ps(CODES));  // uses 4 bits
#else
    return codes_of((word >> AT) & splat(0xfu));
#endif
  }
}

// Numbers of one vector of channels in a group, (code - zero) scale - min. The product is exact in float32.
template <KernelFormat F, bool HAS_MIN>
struct Numbers {
  f32x16 scale, offset, min;

  Numbers(const WeightFormat& format, const char* panel, int64_t g, int v) : min{} {
    const char* scales = panel + format.group_at(g) + format.code_bytes();
    scale = scale_of<F>(scales, v);
    if constexpr (HAS_MIN) min = min_of<F>(scales, v);
    if constexpr (F.has_super_blocks) {
      const char* header = panel + format.header_at(g) + v * LANES * 2;
      scale = from_half(header) * scale;
      if constexpr (HAS_MIN) min = from_half(header + PANEL * 2) * min;
    }
    offset = scale * splat(-(BASE<F.bits> + (float)format.zero()));
  }

  template <int AT>
  INLINE f32x16 of(u32x16 word) const {
    f32x16 codes = based_codes<F, AT>(word);
    if constexpr (F.has_table) return codes * scale;
    f32x16 number = fma(codes, scale, offset);
    if constexpr (HAS_MIN) number = number - min;
    return number;
  }
};

INLINE void put_k(F32Weights, char* to, f32x16 even, f32x16 odd) {
  store(to, even);
  store(to + PANEL * 4, odd);
}
INLINE void put_k(Bf16Weights, char* to, f32x16 even, f32x16 odd) { store(to, bf16_units({even, odd})); }

// Panel that is decoded as needed, in pieces of 32 k: small enough that the processor overlaps decoding and products. It is one
// piece ahead, so that numbers are not read right after they were written.
template <typename W, KernelFormat F, bool HAS_MIN>
struct DecodedPanel {
  static constexpr int64_t PIECE = 32, TWO_K = 2 / W::STEP * PANEL * 4;
  const QuantizedArgs& args;
  const char* panel;
  int64_t group = args.format.group, width = args.groups * group;
  int64_t piece = group < PIECE ? group : PIECE, decoded = 0;
  LookupOf<F> lookup{args.format.table, true};

  const char* numbers() const { return args.decoded; }

  // Must be called before the first `steps` of K are read.
  INLINE void needs(int64_t steps) {
    for (; decoded < width && decoded < steps * W::STEP + piece; decoded += piece) decode(decoded);
  }

  template <int VECTORS>
  static INLINE void prefetch(const char*) {}

 private:
  INLINE void decode(int64_t first) const {
    const char* codes = panel + args.format.group_at(first / group) + first % group * PANEL * F.bits / 8;
    for (int v = 0; v < PANEL_VECTORS; v++) {
      Numbers<F, HAS_MIN> numbers(args.format, panel, first / group, v);
      const char* from = codes + v * LANES * 4;
      char* to = args.decoded + first / 2 * TWO_K + v * LANES * 4;
      if constexpr (F.has_table || (F.bits != 4 && F.bits != 8)) {
        using Codes = Unit<F>;
        for (int64_t k = 0; k < piece; k += Codes::K, from += Codes::BYTES) {
          for (int64_t row = 0; row < Codes::BYTES; row += PANEL * 4) __builtin_prefetch(from + row + 4096);
          Codes unit(from, v, lookup);
#pragma GCC unroll 4
          for (int64_t i = 0; i < Codes::WORDS; i += Codes::PER_ROW) {
            u32x16 words[Codes::PER_ROW];
            unit.words(words, i);
            for (u32x16 word : words) {
              put_k(W{}, to, numbers.template of<0>(word), numbers.template of<8>(word));
              put_k(W{}, to + TWO_K, numbers.template of<16>(word), numbers.template of<24>(word));
              to += 2 * TWO_K;
            }
          }
        }
        continue;
      }
      constexpr int64_t K = 32 / F.bits;  // k per word
      for (int64_t k = 0; k < piece; k += K, from += PANEL * 4, to += K / 2 * TWO_K) {
        __builtin_prefetch(from + 4096);
        u32x16 word = load<u32x16>(from);
        put_k(W{}, to, numbers.template of<0>(word), numbers.template of<8>(word));
        put_k(W{}, to + TWO_K, numbers.template of<16>(word), numbers.template of<24>(word));
        if constexpr (F.bits == 4) {
          put_k(W{}, to + 2 * TWO_K, numbers.template of<4>(word), numbers.template of<12>(word));
          put_k(W{}, to + 3 * TWO_K, numbers.template of<20>(word), numbers.template of<28>(word));
        }
      }
    }
  }
};

template <typename W, KernelFormat F, bool HAS_MIN>
void decoded_panels_of(const QuantizedArgs& args, int64_t begin, int64_t end) {
  int64_t panel_bytes = args.format.panel_bytes(args.linear.k);
  auto each = [&](auto&& multiply) {
    for (int64_t p = begin; p < end; p++) {
      DecodedPanel<W, F, HAS_MIN> panel{args, (const char*)args.linear.w + p * panel_bytes};
      multiply(panel, p);
    }
  };
#if defined(__AMX_BF16__)
  if constexpr (W::STEP == 2) {
    TilePanels panels(args.linear);
    return each([&](auto& panel, int64_t p) { panels.multiply(panel, p); });
  }
#endif
  each([&](auto& panel, int64_t p) {
    panel.needs((args.linear.k + W::STEP - 1) / W::STEP);
    multiply_panel<W>(args.linear, panel.numbers(), p);
  });
}

void decoded_panels(const QuantizedArgs& args, int64_t begin, int64_t end) {
  auto of_type = [&]<typename W>(W) {
    of_format(args.format, [&]<KernelFormat F>() {
      if (!F.has_table && args.format.has_min) decoded_panels_of<W, F, !F.has_table>(args, begin, end);
      else decoded_panels_of<W, F, false>(args, begin, end);
    });
  };
  if (args.linear.type == Dtype::f32) of_type(F32Weights{});
  else of_type(Bf16Weights{});
}

}  // namespace
}  // namespace twostroke
