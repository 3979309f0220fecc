// Products against weights of 8, 6, 5 or 4 bits: integers inside a group of k, floats across groups.
//
//   weight  w[n][k] = scale[n][g] * (code[n][k] - zero) - min[n][g]        zero and min as the WeightFormat says
//   input   x[m][k] = scale[m][i] * q[m][k],  q from -127 to 127           made on the fly, row by row: see input_group
//
// so over a group   sum = scale[n] (SUM code q - zero SUM q) - min[n] SUM q,   and where inputs share a scale, the sum of these
// times scale[m]
//
// The sums over codes are of integers and hence exact. Groups whose inputs share a scale are added in float32, then times that
// scale to the sum of the run; a run is of whole spans, from the first to the last, and the runs are added in the fixed tree of
// linear.hpp. A row is quantized from its own values alone.
//
// Packed weights: a panel is a sequence of groups, 64 channels each:
//
//   8 bits  [G / 4][4 vectors][16 channels][4 k]       4 bits  [G / 8][4 vectors][16 channels][4 k low, 4 k high halves]
//   scales  float16 [64]                               mins    float16 [64], where the format has them
//
// Codes of 5 and 6 bits are in units of 32 and 16 k: their low four bits as those of 4 bits, and behind these what is above,
//
//   [4 vectors][16 channels][4 bytes], byte b with the bits of k = b, b + 4, b + 8, ... from the lowest on
//
// In ggml's K types, as they are in their files, scales and mins are whole numbers of a byte, int8 [64] each, and every
// super-block of 256 k begins with what they are multiplied by, float16 [64] each:
//
//   w = d[n] scale[n][g] (code - zero) - dmin[n] min[n][g]
//
// There groups are added times their scale and that of their inputs, and a span's sum is multiplied by d; the mins' share is
// added up by itself, each times the sum of its inputs, and multiplied by dmin. Inside a scale of the inputs these
// are whole numbers below 2^24: exact, though floats hold them.
#pragma once

#include "elementwise.hpp"
#include "linear.hpp"
#include "table.hpp"
#include "vec.hpp"

namespace twostroke {
namespace {

// Arm's products take codes as signed, the others as unsigned; codes of 4 bits are the same number either way, those of 8 come
// without their zero where they are signed.
#if defined(__ARM_NEON)
constexpr bool SIGNED_CODES = true;
#else
constexpr bool SIGNED_CODES = false;
#endif

// A row's inputs in a span as they are, four to a word.
struct ByteInputs {
  const int8_t* q;
  INLINE void arrange(const int8_t* from, int64_t) { q = from; }
};

#if defined(__AVX512VNNI__) || defined(__ARM_NEON)

// acc + the sum over four bytes of w times those of word i of the inputs, per lane.
INLINE i32x16 dot_bytes(i32x16 acc, u32x16 w, const ByteInputs& inputs, int64_t i) {
#if defined(__AVX512VNNI__)
  return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(load<int32_t>(inputs.q + i * 4)));
#else
  int8x16_t four = vreinterpretq_s8_u32(vdupq_n_u32(load<uint32_t>(inputs.q + i * 4)));
  return in_registers([&](auto sum, auto codes) {
#if defined(__ARM_FEATURE_DOTPROD)
    return (Lanes<int32_t, 4>)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, four);
#else
    // two products are at most 2 * 128 * 127, which 16 bits hold
    int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)codes), vget_low_s8(four)), high = vmull_high_s8((int8x16_t)codes, four);
    return (Lanes<int32_t, 4>)vpadalq_s16((int32x4_t)sum, vpaddq_s16(low, high));
#endif
  }, acc, w);
#endif
}
using Inputs8 = ByteInputs;
using Inputs4 = ByteInputs;
#else
// A row's inputs in a span as pairs of 16 bits: of every four the first and the third, the second and the fourth.
struct PairInputs {
  uint32_t even[SPAN / 4], odd[SPAN / 4];
  INLINE void arrange(const int8_t* q, int64_t count) {
    for (int64_t i = 0; i < count / 4; i++) {
      int32_t a = load<int32_t>(q + i * 4);  // bytes are widened in place, by shifts that keep their sign
      even[i] = (uint32_t)(a << 24 >> 24 & 0xffff) | (uint32_t)(a << 8 >> 24) << 16;
      odd[i] = (uint32_t)(a << 16 >> 24 & 0xffff) | (uint32_t)(a >> 24) << 16;
    }
  }
};

// acc + the sums of neighbours' products, which are numbers of 16 bits.
INLINE i32x16 dot_pairs(i32x16 acc, u32x16 w, uint32_t inputs) {
#if defined(__AVX2__)
  auto products = [](auto a, auto b) { return (Lanes<int32_t, 8>)_mm256_madd_epi16((__m256i)a, (__m256i)b); };
  return acc + in_registers(products, w, splat(inputs));
#elif defined(__SSE2__)
  auto products = [](auto a, auto b) { return (Lanes<int32_t, 4>)_mm_madd_epi16((__m128i)a, (__m128i)b); };
  return acc + in_registers(products, w, splat(inputs));
#else
  return acc + (i32x16)(w & splat(0xffffu)) * (int32_t)(int16_t)inputs + (i32x16)(w >> 16) * ((int32_t)inputs >> 16);
#endif
}

INLINE i32x16 dot_bytes(i32x16 acc, u32x16 w, const PairInputs& inputs, int64_t i) {
  acc = dot_pairs(acc, w & splat(0x00ff00ffu), inputs.even[i]);
  return dot_pairs(acc, (u32x16)((Lanes<uint16_t, 32>)w >> 8), inputs.odd[i]);
}
using Inputs8 = PairInputs;
#if defined(__AVX2__)
using Inputs4 = ByteInputs;
#else
using Inputs4 = PairInputs;
#endif
#endif

using QuantizedRows = Integers<int8_t, float, int32_t>;

// Rows [begin, end) of x [m, k] to integers; where a weight's columns are in an order of their own, so are q's: input
// order[i] is the i-th.
template <typename T>
void quantize_rows_of(const T* x, int64_t ldx, const int32_t* order, int64_t k, int64_t group, const QuantizedRows& rows,
                      int64_t begin, int64_t end) {
  const float magic = 12582912.0f;
  int64_t groups = (k + group - 1) / group, padded = groups * group;
  int64_t width = input_group(group), input_groups = (k + width - 1) / width;
  for (int64_t row = begin; row < end; row++) {
    int8_t* to = rows.q + row * padded;
    float* scales = rows.scales + row * input_groups;
    for (int64_t i = 0; i < input_groups; i++) {
      int64_t first = i * width, count = k - first < width ? k - first : width;
      const T* from = x + row * ldx + first;
      T gathered[SPAN];
      if (order) {
        for (int64_t j = 0; j < count; j++) gathered[j] = x[row * ldx + order[first + j]];
        from = gathered;
      }
      f32x16 most{};
      in_lanes(count, [&](int64_t i, int64_t n) { most = larger(most, magnitude(get(from + i, n))); });
      float largest = largest_of(most);
      // so small that its inverse would be infinite: nothing is left of it
      float inverse = largest > 1e-36f ? 127.0f / largest : 0.0f;
      in_lanes(count, [&](int64_t i, int64_t n) {
        u8x16 bytes = lowest_bytes((i32x16)(get(from + i, n) * splat(inverse) + splat(magic)));
        std::memcpy(to + first + i, &bytes, (size_t)n);
      });
      scales[i] = inverse > 0 ? largest / 127.0f : 0.0f;
    }
    std::memset(to + k, 0, (size_t)(padded - k));
    for (int64_t g = 0; g < groups; g++) {
      u32x16 total{};  // of numbers that are 128 too large, for they have no sign then
      for (int64_t i = 0; i < group; i += LANES) total += widened(load<u8x16>(to + g * group + i) ^ (uint8_t)128);
      uint32_t lanes[LANES];
      store(lanes, total);
      int32_t sum = (int32_t)(-128 * group);
      for (int64_t i = 0; i < LANES; i++) sum += (int32_t)lanes[i];
      rows.sums[row * groups + g] = sum;
      rows.weighted[row * groups + g] = (float)sum * scales[g * group / width];
    }
  }
}

void quantize_rows(const void* x, int64_t ldx, const int32_t* order, int64_t k, int64_t group, const QuantizedRows& to,
                   Dtype type, int64_t begin, int64_t end) {
  if (type == Dtype::f32) quantize_rows_of((const float*)x, ldx, order, k, group, to, begin, end);
  else quantize_rows_of((const uint16_t*)x, ldx, order, k, group, to, begin, end);
}

// A tile of a group's sums in registers; those of the span are others.
constexpr int INTEGER_REGISTERS = REGISTER_BYTES == 64 ? 12 : REGISTERS / 2;
constexpr int QUANTIZED_ROWS = rows_of_tile(REGISTER_BYTES == 64 ? 6 : 4, INTEGER_REGISTERS);
template <int ROWS>
constexpr int QUANTIZED_VECTORS = vectors_of_tile(ROWS, INTEGER_REGISTERS);

// The codes of 4, 5 and 6 bits of one vector of channels in a unit, as bytes: word 2 j and 2 j + 1 of the unit's inputs.
template <int BITS>
struct Unit {
  static constexpr int64_t K = BITS == 4 ? 8 : BITS == 5 ? 32 : 16, ROWS = K / 8, BYTES = K * PANEL * BITS / 8;
  const char* at;  // the unit, at the vector
  u32x16 above;    // what does not fit in four bits

  explicit INLINE Unit(const char* at) : at(at), above{} {
    if constexpr (BITS > 4) above = load<u32x16>(at + ROWS * PANEL * 4);
  }

  INLINE u32x16 row(int64_t j) const { return load<u32x16>(at + j * PANEL * 4); }
  INLINE u32x16 low(u32x16 row, int64_t j) const { return (row & splat(0x0f0f0f0fu)) | high_bits(2 * j); }
  INLINE u32x16 high(u32x16 row, int64_t j) const { return ((row >> 4) & splat(0x0f0f0f0fu)) | high_bits(2 * j + 1); }

 private:
  // Those of word i, where they belong in a byte.
  INLINE u32x16 high_bits(int64_t i) const {
    if constexpr (BITS == 4) return u32x16{};
    int64_t place = i * (BITS - 4);
    u32x16 moved = place < 4 ? above << (int)(4 - place) : above >> (int)(place - 4);
    return moved & splat(BITS == 5 ? 0x10101010u : 0x30303030u);
  }
};

// acc + codes times inputs of a group, whose first input is the span's word `word`. is_first: nobody has read these codes yet.
template <int BITS, int ROWS, int VECTORS, typename Inputs>
INLINE void add_group(i32x16 (&acc)[ROWS][VECTORS], const char* codes, int64_t group, const Inputs* inputs, int64_t word,
                      bool is_first) {
  if constexpr (BITS == 8) {
    for (int64_t k = 0; k < group; k += 4, word++) {
      const char* at = codes + k * PANEL;
      if (is_first) ask_ahead(at);
      for (int v = 0; v < VECTORS; v++) {
        u32x16 w = load<u32x16>(at + v * LANES * 4);
        if constexpr (SIGNED_CODES) w ^= splat(0x80808080u);
        for (int r = 0; r < ROWS; r++) acc[r][v] = dot_bytes(acc[r][v], w, inputs[r], word);
      }
    }
  } else {
    using Codes = Unit<BITS>;
    for (int64_t k = 0; k < group; k += Codes::K, codes += Codes::BYTES, word += Codes::K / 4) {
      for (int64_t row = 0; is_first && row < Codes::BYTES; row += STEP_BYTES) ask_ahead(codes + row);
      for (int v = 0; v < VECTORS; v++) {
        Codes unit(codes + v * LANES * 4);
#pragma GCC unroll 4
        for (int64_t j = 0; j < Codes::ROWS; j++) {
          u32x16 w = unit.row(j), low = unit.low(w, j), high = unit.high(w, j);
          for (int r = 0; r < ROWS; r++)
            acc[r][v] = dot_bytes(dot_bytes(acc[r][v], low, inputs[r], word + 2 * j), high, inputs[r], word + 2 * j + 1);
        }
      }
    }
  }
}

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
// The same of 4, 5 and 6 bits in sums of 16: two products are at most 2 * 127 times the largest code, and of 4 bits eight such
// sums fit in each half of a word, of 5 four, of 6 two. (Codes of 8 bits are too large for this: two products alone would not.)
template <int BITS, int ROWS, int VECTORS>
INLINE void add_group(i32x16 (&acc)[ROWS][VECTORS], const char* codes, int64_t group, const ByteInputs* inputs, int64_t word,
                      bool is_first) {
  static_assert(BITS < 8);
  using Short = Lanes<int16_t, 32>;
  using Codes = Unit<BITS>;
  constexpr int64_t FITTING = (BITS == 4 ? 32 : BITS == 5 ? 16 : 8);  // k
  constexpr int64_t ROWS_FITTING = BITS == 4 ? 1 : FITTING / 8;       // of a unit; of 4 bits several units fit
  auto products = [](u32x16 w, const char* q) {
    auto of_register = [](auto a, auto b) { return (Lanes<int16_t, 16>)_mm256_maddubs_epi16((__m256i)a, (__m256i)b); };
    return (Short)in_registers(of_register, w, splat(load<uint32_t>(q)));
  };
  auto settle = [&](Short (&sums)[ROWS][VECTORS], int v) {
    for (int r = 0; r < ROWS; r++) {
      acc[r][v] = dot_pairs(acc[r][v], (u32x16)sums[r][v], 0x00010001u);
      sums[r][v] = Short{};
    }
  };
  Short sums[ROWS][VECTORS] = {};
  for (int64_t k = 0; k < group; k += Codes::K, codes += Codes::BYTES, word += Codes::K / 4) {
    for (int64_t row = 0; is_first && row < Codes::BYTES; row += STEP_BYTES) ask_ahead(codes + row);
    for (int v = 0; v < VECTORS; v++) {
      Codes unit(codes + v * LANES * 4);
#pragma GCC unroll 4
      for (int64_t j = 0; j < Codes::ROWS; j++) {
        u32x16 w = unit.row(j), low = unit.low(w, j), high = unit.high(w, j);
        for (int r = 0; r < ROWS; r++) {
          const char* q = (const char*)inputs[r].q + (word + 2 * j) * 4;
          sums[r][v] += products(low, q) + products(high, q + 4);
        }
        if (BITS > 4 && (j + 1) % ROWS_FITTING == 0) settle(sums, v);
      }
      if (BITS == 4 && ((k + Codes::K) % FITTING == 0 || k + Codes::K == group)) settle(sums, v);
    }
  }
}
#endif

// Adds a span's sums `inside`, in the units of a super-block's scales and mins, to the sums of its run.
template <int ROWS, int VECTORS>
INLINE void add_span(f32x16 (&sum)[ROWS][VECTORS], const f32x16 (&inside)[ROWS][VECTORS], const QuantizedArgs& args,
                     const char* panel, int64_t row, int first, int64_t first_group, int64_t count) {
  const WeightFormat& format = args.format;
  const char* header = panel + format.header_at(first_group) + first * LANES * 2;
  for (int v = 0; v < VECTORS; v++) {
    f32x16 d = from_half(header + v * LANES * 2);
    for (int r = 0; r < ROWS; r++) sum[r][v] = fma(inside[r][v], d, sum[r][v]);
  }
  if (!format.has_min) return;
  for (int v = 0; v < VECTORS; v++) {
    f32x16 dmin = -from_half(header + PANEL * 2 + v * LANES * 2), below[ROWS] = {};
    for (int64_t g = first_group; g < first_group + count; g++) {
      f32x16 min = from_bytes(panel + format.group_at(g) + format.code_bytes() + PANEL + (first + v) * LANES);
      for (int r = 0; r < ROWS; r++) below[r] = fma(splat(args.inputs.weighted[(row + r) * args.groups + g]), min, below[r]);
    }
    for (int r = 0; r < ROWS; r++) sum[r][v] = fma(below[r], dmin, sum[r][v]);
  }
}

// Spans [begin, end) of inputs for ROWS rows and VECTORS vectors of a panel, from zero. ALONE: a scale of the inputs belongs to
// one group. SUPER: the format has super-blocks.
template <int BITS, bool ALONE, bool SUPER, int ROWS, int VECTORS>
INLINE void accumulate_spans(f32x16 (&sum)[ROWS][VECTORS], const QuantizedArgs& args, const char* panel, int64_t row,
                             int first, int64_t begin, int64_t end) {
  using CodeInputs = std::conditional_t<BITS == 8, Inputs8, Inputs4>;
  const WeightFormat& format = args.format;
  const IntegerInputs& rows = args.inputs;
  int32_t zero = BITS == 8 && SIGNED_CODES ? 0 : format.zero();
  int64_t group = format.group, per_span = SPAN / group, per_scale = ALONE ? 1 : input_group(group) / group;
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) sum[r][v] = f32x16{};
  for (int64_t span = begin; span < end; span++) {
    f32x16 part[ROWS][VECTORS], inside[ROWS][VECTORS] = {};
    auto& total = [&]() -> auto& {
      if constexpr (SUPER) return inside;
      else return sum;
    }();
    int64_t first_group = span * per_span, last = first_group + per_span < args.groups ? first_group + per_span : args.groups;
    CodeInputs inputs[ROWS];
    for (int r = 0; r < ROWS; r++)
      inputs[r].arrange(rows.q + ((row + r) * args.groups + first_group) * group, (last - first_group) * group);
    for (int64_t g = first_group; g < last; g++) {
      const char* codes = panel + format.group_at(g) + first * LANES * 4;
      const char* scales = panel + format.group_at(g) + format.code_bytes() + first * LANES * (SUPER ? 1 : 2);
      bool begins = ALONE || g % per_scale == 0, ends = ALONE || (g + 1) % per_scale == 0 || g + 1 == last;
      i32x16 acc[ROWS][VECTORS];
      for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) acc[r][v] = splat(-zero * rows.sums[(row + r) * args.groups + g]);
      add_group<BITS, ROWS, VECTORS>(acc, codes, group, inputs, (g - first_group) * group / 4, row == 0 && first == 0);
      for (int v = 0; v < VECTORS; v++) {
        f32x16 scale = SUPER ? from_bytes(scales + v * LANES) : from_half(scales + v * LANES * 2);
        for (int r = 0; r < ROWS; r++)
          part[r][v] = begins ? to_float(acc[r][v]) * scale : fma(to_float(acc[r][v]), scale, part[r][v]);
      }
      if (!SUPER && format.has_min)
        for (int v = 0; v < VECTORS; v++) {
          f32x16 min = from_half(scales + PANEL * 2 + v * LANES * 2);
          for (int r = 0; r < ROWS; r++)
            part[r][v] = fma(splat(-(float)rows.sums[(row + r) * args.groups + g]), min, part[r][v]);
        }
      if (!ends) continue;
      for (int r = 0; r < ROWS; r++) {
        f32x16 scale = splat(rows.scales[(row + r) * args.input_groups + g / per_scale]);
        for (int v = 0; v < VECTORS; v++) total[r][v] = fma(part[r][v], scale, total[r][v]);
      }
    }
    if constexpr (SUPER) add_span(sum, inside, args, panel, row, first, first_group, last - first_group);
  }
}

// See finish; by itself, so that it is compiled once for all formats.
template <int ROWS>
__attribute__((noinline)) void finish_tile(const LinearArgs& args, const f32x16 (&sums)[SEGMENTS][ROWS][PANEL_VECTORS],
                                           int64_t row, int64_t p) {
  if (args.type == Dtype::f32) finish<float, ROWS>(args, sums, row, p);
  else finish<uint16_t, ROWS>(args, sums, row, p);
}

template <int BITS, bool ALONE, bool SUPER, int ROWS>
void quantized_tile(const QuantizedArgs& args, const char* panel, int64_t row, int64_t p) {
  constexpr int VECTORS = QUANTIZED_VECTORS<ROWS>;
  int64_t per_segment = (args.spans + SEGMENTS - 1) / SEGMENTS;
  f32x16 sums[SEGMENTS][ROWS][PANEL_VECTORS];
  for (int s = 0; s < SEGMENTS; s++) {
    int64_t begin = s * per_segment < args.spans ? s * per_segment : args.spans;
    int64_t end = begin + per_segment < args.spans ? begin + per_segment : args.spans;
    for (int first = 0; first < PANEL_VECTORS; first += VECTORS) {
      f32x16 sum[ROWS][VECTORS];
      accumulate_spans<BITS, ALONE, SUPER>(sum, args, panel, row, first, begin, end);
      for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) sums[s][r][first + v] = sum[r][v];
    }
  }
  finish_tile<ROWS>(args.linear, sums, row, p);
}

template <int BITS, bool ALONE, bool SUPER>
void quantized_panels_of(const QuantizedArgs& args, int64_t begin, int64_t end) {
  int64_t panel_bytes = args.format.panel_bytes(args.linear.k);
  for (int64_t p = begin; p < end; p++) {
    const char* panel = (const char*)args.linear.w + p * panel_bytes;
    in_tiles<QUANTIZED_ROWS>(args.linear.m,
                             [&]<int ROWS>(int64_t row) { quantized_tile<BITS, ALONE, SUPER, ROWS>(args, panel, row, p); });
  }
}

// Calls f<BITS, ALONE, SUPER>() for a format: whether a scale of the inputs belongs to one group, and whether there are
// super-blocks. Of 8 bits there are none, and of 6 bits there are groups of 16 alone.
template <typename F>
INLINE void of_format(const WeightFormat& format, const F& f) {
  bool is_alone = format.group == input_group(format.group);
  auto of_bits = [&]<bool ALONE>() {
    if (format.bits == 8) return f.template operator()<8, ALONE, false>();
    if constexpr (ALONE)
      if (format.bits == 5)
        return format.has_super_blocks ? f.template operator()<5, ALONE, true>() : f.template operator()<5, ALONE, false>();
    if constexpr (!ALONE)
      if (format.bits == 6) return f.template operator()<6, ALONE, true>();
    return format.has_super_blocks ? f.template operator()<4, ALONE, true>() : f.template operator()<4, ALONE, false>();
  };
  if (is_alone) of_bits.template operator()<true>();
  else of_bits.template operator()<false>();
}

}  // namespace
}  // namespace twostroke

#if defined(__AMX_INT8__)
#include "amx_quantized.hpp"
#endif

namespace twostroke {
namespace {

void quantized_panels(const QuantizedArgs& args, int64_t begin, int64_t end) {
#if defined(__AMX_INT8__)
  if (quantized_in_tiles(args, begin, end)) return;
#endif
  of_format(args.format, [&]<int BITS, bool ALONE, bool SUPER>() { quantized_panels_of<BITS, ALONE, SUPER>(args, begin, end); });
}

}  // namespace
}  // namespace twostroke
