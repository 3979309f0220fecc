// Products with weights of 8 bits and of 6 to 2: integers within a group of k, floats across groups.
//
//   weight  w[n][k] = scale[n][g] * (code[n][k] - zero) - min[n][g]        zero and min by the WeightFormat
//   input   x[m][k] = scale[m][i] * q[m][k],  q from -127 to 127           computed during the call, per row: see input_group
//
// so over a group   sum = scale[n] (SUM code q - zero SUM q) - min[n] SUM q,   and where inputs share a scale, the sum of these
// times scale[m]
//
// The sums over codes are sums of integers and so exact. Groups whose inputs share a scale are added in float32, and then, times
// that scale, to the sum of the run. A run is a number of whole spans, from the first to the last, and the runs are added in the
// fixed tree of linear.hpp. A row is quantized from its own values alone.
//
// Packed weights: a panel is a sequence of groups, 64 channels each:
//
//   8 bits  [G / 4][4 vectors][16 channels][4 k]       4 bits  [G / 8][4 vectors][16 channels][4 k low, 4 k high halves]
//   scales  float16 [64]                               mins    float16 [64], where the format has them
//
// Codes of 5 and 6 bits are in units of 32 and 16 k: first their low four bits, like codes of 4 bits, then their high bits,
//
//   [4 vectors][16 channels][4 bytes], byte b with the bits of k = b, b + 4, b + 8, ... from the lowest on
//
// Codes of 3 and 2 bits are in units of 16 k,
//
//   [4 vectors][16 channels][4 bytes], byte b with the bits of k = b, b + 4, b + 8 and b + 12, from the lowest on
//
// followed, for 3 bits, by the bits that do not fit there, [2 pairs of vectors][16 channels][4 bytes]. The first vector of a pair
// uses the lower half of byte b, the second the upper half: the bits of k = b + 12, and above them the highest bit of k = b + 8.
//
// Codes of 4 bits may be indices into a table of signed bytes (TABLE_VALUES), whose values then replace code - zero.
//
// In ggml's K types, scales and mins are whole numbers of a byte as in their files, int8 [64] each, and every super-block of
// 256 k starts with their factors, float16 [64] each. With codes of 2 bits, scales and mins have 4 bits and share bytes: the
// scale is in the lower half.
//
//   w = d[n] scale[n][g] (code - zero) - dmin[n] min[n][g]
//
// There groups are multiplied by their scale and that of their inputs and added, and a span's sum is multiplied by d. The mins,
// each times the sum of its inputs, are added separately and multiplied by dmin. Within one scale of the inputs, these are whole
// numbers below 2^24, so floats hold them exactly.
#pragma once

#include "elementwise.hpp"
#include "linear.hpp"
#include "table.hpp"
#include "vec.hpp"

namespace twostroke {
namespace {

// Arm's products take signed codes, the others unsigned ones. Codes of 4 bits are the same number either way; signed codes of
// 8 bits are stored with their zero subtracted.
#if defined(__ARM_NEON)
constexpr bool SIGNED_CODES = true;
#else
constexpr bool SIGNED_CODES = false;
#endif

// Parts of a WeightFormat that a kernel is compiled for.
struct KernelFormat {
  int bits;
  bool has_table;
  bool is_alone;  // each scale of the inputs belongs to one group
  bool has_super_blocks;
  int64_t group;  // 0: taken from the WeightFormat

  // Returns whether the multiplied numbers have 8 bits; for unsigned products they are stored 128 too large.
  constexpr bool has_bytes() const { return bits == 8 || has_table; }

  // Returns a WeightFormat of this kind with constants for everything known at compile time.
  constexpr WeightFormat known(WeightFormat format) const {
    format.bits = bits;
    format.has_super_blocks = has_super_blocks;
    if (!has_table) format.table = CodeTable::none;
    if (group) format.group = group;
    if (has_super_blocks) format.has_min = !has_table && bits != 3 && bits != 6;
    return format;
  }
};

// Values of a CodeTable in a register, or these plus 128, for looking codes up.
struct Lookup {
#if defined(__AVX512F__)
  __m512i values;
#elif defined(__AVX2__)
  __m256i values;
#else
  alignas(16) uint8_t values[16];
#endif

  INLINE Lookup(CodeTable table, bool is_signed) {
    alignas(16) uint8_t bytes[16];
    for (int i = 0; i < 16; i++) bytes[i] = (uint8_t)(TABLE_VALUES[(int)table][i] + (is_signed ? 0 : 128));
#if defined(__AVX512F__)
    values = _mm512_maskz_broadcast_i32x4((__mmask16)-1, _mm_load_si128((const __m128i*)bytes));
#elif defined(__AVX2__)
    values = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)bytes));
#else
    std::memcpy(values, bytes, sizeof values);
#endif
  }

  INLINE u32x16 operator()(u32x16 codes) const {
#if defined(__AVX512F__)
    return (u32x16)_mm512_shuffle_epi8(values, (__m512i)codes);
#elif defined(__AVX2__)
    return in_registers([&](auto some) { return (Lanes<uint32_t, 8>)_mm256_shuffle_epi8(values, (__m256i)some); }, codes);
#elif defined(__ARM_NEON)
    uint8x16_t table = vld1q_u8(values);
    return in_registers([&](auto some) { return (Lanes<uint32_t, 4>)vqtbl1q_u8(table, (uint8x16_t)some); }, codes);
#else
    uint8_t bytes[PANEL];
    store(bytes, codes);
    for (uint8_t& byte : bytes) byte = values[byte];
    return load<u32x16>(bytes);
#endif
  }
};

// Lookup of formats without a table.
struct NoLookup {
  INLINE NoLookup(CodeTable, bool) {}
  INLINE u32x16 operator()(u32x16 codes) const { return codes; }
};

template <KernelFormat F>
using LookupOf = std::conditional_t<F.has_table, Lookup, NoLookup>;

// Inputs of a row in a span, unchanged, four per word.
struct ByteInputs {
  const int8_t* q;
  INLINE void arrange(const int8_t* from, int64_t) { q = from; }
};

#if defined(__AVX512VNNI__) || defined(__ARM_NEON)

// Returns acc + the sum over four bytes of w times those of word i of the inputs, per lane.
INLINE i32x16 dot_bytes(i32x16 acc, u32x16 w, const ByteInputs& inputs, int64_t i) {
#if defined(__AVX512VNNI__)
  return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(load<int32_t>(inputs.q + i * 4)));
#else
  int8x16_t four = vreinterpretq_s8_u32(vdupq_n_u32(load<uint32_t>(inputs.q + i * 4)));
  return in_registers([&](auto sum, auto codes) {
#if defined(__ARM_FEATURE_DOTPROD)
    return (Lanes<int32_t, 4>)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, four);
#else
    // the sum of two products is at most 2 * 128 * 127, which fits into 16 bits
    int16x8_t low = vmull_s8(vget_low_s8((int8x16_t)codes), vget_low_s8(four)), high = vmull_high_s8((int8x16_t)codes, four);
    return (Lanes<int32_t, 4>)vpadalq_s16((int32x4_t)sum, vpaddq_s16(low, high));
#endif
  }, acc, w);
#endif
}
using Inputs8 = ByteInputs;
using Inputs4 = ByteInputs;
#else
// Inputs of a row in a span as pairs of 16 bits: of every four the first and the third, the second and the fourth.
struct PairInputs {
  uint32_t even[SPAN / 4], odd[SPAN / 4];
  INLINE void arrange(const int8_t* q, int64_t count) {
    for (int64_t i = 0; i < count / 4; i++) {
      int32_t a = load<int32_t>(q + i * 4);  // bytes are widened in place by shifts that keep their sign
      even[i] = (uint32_t)(a << 24 >> 24 & 0xffff) | (uint32_t)(a << 8 >> 24) << 16;
      odd[i] = (uint32_t)(a << 16 >> 24 & 0xffff) | (uint32_t)(a >> 24) << 16;
    }
  }
};

// Returns acc + the sums of products of neighbouring 16-bit numbers.
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

// Quantizes rows [begin, end) of x [m, k] to integers. If a weight's columns have their own order, q has the same: input
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
      // too small numbers, whose inverse would be infinite, become 0
      float inverse = largest > 1e-36f ? 127.0f / largest : 0.0f;
      in_lanes(count, [&](int64_t i, int64_t n) {
        u8x16 bytes = lowest_bytes((i32x16)(get(from + i, n) * splat(inverse) + splat(magic)));
        std::memcpy(to + first + i, &bytes, (size_t)n);
      });
      scales[i] = inverse > 0 ? largest / 127.0f : 0.0f;
    }
    std::memset(to + k, 0, (size_t)(padded - k));
    for (int64_t g = 0; g < groups; g++) {
      u32x16 total{};  // sum of numbers plus 128, which are unsigned
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
  with_type(type, [&]<typename T>(T) { quantize_rows_of((const T*)x, ldx, order, k, group, to, begin, end); });
}

// Registers for a tile of a group's sums; the span's sums use others.
constexpr int INTEGER_REGISTERS = REGISTER_BYTES == 64 ? 12 : REGISTERS / 2;
constexpr int QUANTIZED_ROWS = rows_of_tile(REGISTER_BYTES == 64 ? 6 : 4, INTEGER_REGISTERS);
template <int ROWS>
constexpr int QUANTIZED_VECTORS = vectors_of_tile(ROWS, INTEGER_REGISTERS);

// Codes of fewer than 8 bits of one vector of channels in a unit, as bytes; a word has the codes of four k, and a row of the
// unit several words.
template <KernelFormat F>
struct Unit {
  static constexpr int64_t K = F.bits == 4 ? 8 : F.bits == 5 ? 32 : 16, WORDS = K / 4, BYTES = K * PANEL * F.bits / 8;
  static constexpr int64_t PER_ROW = F.bits < 4 ? 4 : 2;  // words
  static constexpr int LOW = 8 / PER_ROW, ABOVE = F.bits - LOW;  // bits of a code in a row, and after the rows; not for 3 bits
  const char* at;
  u32x16 above;
  LookupOf<F> lookup;

  // at: address of vector v in the unit.
  INLINE Unit(const char* at, int v, const LookupOf<F>& lookup) : at(at), above{}, lookup(lookup) {
    const char* behind = at + WORDS / PER_ROW * STEP_BYTES;
    if constexpr (F.bits == 3) above = load<u32x16>(behind - (v + 1) / 2 * LANES * 4) >> (v % 2 * 4);
    else if constexpr (ABOVE > 0) above = load<u32x16>(behind);
  }

  // Returns words i, i + 1, ... of a row.
  INLINE void words(u32x16 (&found)[PER_ROW], int64_t i) const {
    u32x16 row = load<u32x16>(at + i / PER_ROW * STEP_BYTES);
    if constexpr (F.bits == 3) {
      u32x16 three = splat(0x07070707u);
      found[0] = row & three, found[1] = (row >> 3) & three, found[3] = above & three;
      found[2] = ((row >> 6) & splat(0x03030303u)) | ((above >> 1) & splat(0x04040404u));
      return;
    }
    for (int64_t j = 0; j < PER_ROW; j++) {
      u32x16 moved = j ? row >> (int)(j * LOW) : row;
      found[j] = lookup((moved & splat(0x01010101u * ((1u << LOW) - 1))) | high_bits(i + j));
    }
  }

 private:
  INLINE u32x16 high_bits(int64_t i) const {
    if constexpr (ABOVE == 0) return u32x16{};
    int64_t place = i * ABOVE;
    u32x16 moved = place < LOW ? above << (int)(LOW - place) : above >> (int)(place - LOW);
    return moved & splat(0x01010101u * (((1u << ABOVE) - 1) << LOW));
  }
};

// Adds codes of a group, from vector `first` on, times its inputs, which start at the span's word `word`, to acc. is_first: these
// codes were not read before.
template <KernelFormat F, int ROWS, int VECTORS, typename Table, typename Inputs>
INLINE void add_group(i32x16 (&acc)[ROWS][VECTORS], const char* codes, int first, const Table& lookup, int64_t group,
                      const Inputs* inputs, int64_t word, bool is_first) {
  if constexpr (F.bits == 8) {
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
    using Codes = Unit<F>;
    for (int64_t k = 0; k < group; k += Codes::K, codes += Codes::BYTES, word += Codes::WORDS) {
      for (int64_t row = 0; is_first && row < Codes::BYTES; row += STEP_BYTES) ask_ahead(codes + row);
      for (int v = 0; v < VECTORS; v++) {
        Codes unit(codes + v * LANES * 4, first + v, lookup);
#pragma GCC unroll 4
        for (int64_t i = 0; i < Codes::WORDS; i += Codes::PER_ROW) {
          u32x16 w[Codes::PER_ROW];
          unit.words(w, i);
          for (int r = 0; r < ROWS; r++)
            for (int64_t j = 0; j < Codes::PER_ROW; j++) acc[r][v] = dot_bytes(acc[r][v], w[j], inputs[r], word + i + j);
        }
      }
    }
  }
}

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
// add_group for fewer bits, in sums of 16 bits. Two products are at most 2 * 127 times the largest code. For codes of 4 bits eight
// such sums fit into each half of a word, for 5 bits four, for 6 two; for 3 and 2 more than a unit has. (For 8 bits not even two
// products fit.) Vectors are processed together, in the order of memory, where a group's sums fit into registers; otherwise one
// after the other, since sums and acc need all registers.
template <KernelFormat F, int ROWS, int VECTORS, typename Table>
INLINE void add_group(i32x16 (&acc)[ROWS][VECTORS], const char* codes, int first, const Table& lookup, int64_t group,
                      const ByteInputs* inputs, int64_t word, bool is_first) {
  static_assert(!F.has_bytes());
  using Short = Lanes<int16_t, 32>;
  using Codes = Unit<F>;
  constexpr int64_t FITTING = F.bits == 6 ? 2 : F.bits == 4 ? 8 : 4;  // words
  auto products = [](u32x16 w, const char* q) {
    auto of_register = [](auto a, auto b) { return (Lanes<int16_t, 16>)_mm256_maddubs_epi16((__m256i)a, (__m256i)b); };
    return (Short)in_registers(of_register, w, splat(load<uint32_t>(q)));
  };
  // Without this GCC does all multiplications before the first addition, and keeps the products in memory.
  auto pinned = [](auto some) {
    asm("" : "+x"(some));
    return some;
  };
  constexpr int TOGETHER = F.group > 0 && F.group <= FITTING * 4 ? VECTORS : 1;
  constexpr int64_t ASKED = Codes::BYTES * TOGETHER / VECTORS;
  const char* next = codes;
  for (int begin = 0; begin < VECTORS; begin += TOGETHER) {
    Short sums[ROWS][TOGETHER] = {};
    auto settle = [&] {
      for (int v = 0; v < TOGETHER; v++)
        for (int r = 0; r < ROWS; r++) {
          acc[r][begin + v] = dot_pairs(acc[r][begin + v], (u32x16)sums[r][v], 0x00010001u);
          sums[r][v] = Short{};
        }
    };
#pragma GCC unroll 4
    for (int64_t k = 0; k < group; k += Codes::K, next += ASKED) {
      for (int64_t line = 0; is_first && line < ASKED; line += 64) ask_for_line(next + line);
      const char* at = codes + k / Codes::K * Codes::BYTES + begin * LANES * 4;
#pragma GCC unroll 4
      for (int64_t i = 0; i < Codes::WORDS; i += Codes::PER_ROW) {
        for (int v = 0; v < TOGETHER; v++) {
          u32x16 w[Codes::PER_ROW];
          Codes(at + v * LANES * 4, first + begin + v, lookup).words(w, i);
          for (int r = 0; r < ROWS; r++) {
            const char* q = (const char*)inputs[r].q + (word + k / 4 + i) * 4;
            Short sum = products(w[0], q);
            for (int64_t j = 1; j < Codes::PER_ROW; j++) sum += products(w[j], q + j * 4);
            sums[r][v] = in_registers(pinned, sums[r][v] + sum);
          }
        }
        if (Codes::WORDS >= FITTING && (i + Codes::PER_ROW) % FITTING == 0) settle();
      }
      if (Codes::WORDS < FITTING && ((k + Codes::K) % (FITTING * 4) == 0 || k + Codes::K == group)) settle();
    }
  }
}
#endif

// Return scales and mins of the v-th vector of channels from `scales` on; with super-blocks, whole numbers.
template <KernelFormat F>
INLINE f32x16 scale_of(const char* scales, int v) {
  if constexpr (!F.has_super_blocks) return from_half(scales + v * LANES * 2);
  else if constexpr (F.bits == 2) return to_float(widened(load<u8x16>(scales + v * LANES) & (uint8_t)15));
  else return from_bytes(scales + v * LANES);
}
template <KernelFormat F>
INLINE f32x16 min_of(const char* scales, int v) {
  if constexpr (!F.has_super_blocks) return from_half(scales + (PANEL + v * LANES) * 2);
  else if constexpr (F.bits == 2) return to_float(widened(load<u8x16>(scales + v * LANES)) >> 4);
  else return from_bytes(scales + PANEL + v * LANES);
}

// Adds a span's sums `inside`, in units of a super-block's scales and mins, to the sums of its run.
template <KernelFormat F, int ROWS, int VECTORS>
INLINE void add_span(f32x16 (&sum)[ROWS][VECTORS], const f32x16 (&inside)[ROWS][VECTORS], const QuantizedArgs& args,
                     const char* panel, int64_t row, int first, int64_t first_group, int64_t count) {
  const WeightFormat format = F.known(args.format);
  const char* header = panel + format.header_at(first_group) + first * LANES * 2;
  for (int v = 0; v < VECTORS; v++) {
    f32x16 d = from_half(header + v * LANES * 2);
    for (int r = 0; r < ROWS; r++) sum[r][v] = fma(inside[r][v], d, sum[r][v]);
  }
  if (!format.has_min) return;
  for (int v = 0; v < VECTORS; v++) {
    f32x16 dmin = -from_half(header + PANEL * 2 + v * LANES * 2), below[ROWS] = {};
    for (int64_t g = first_group; g < first_group + count; g++) {
      f32x16 min = min_of<F>(panel + format.group_at(g) + format.code_bytes(), first + v);
      for (int r = 0; r < ROWS; r++) below[r] = fma(splat(args.inputs.weighted[(row + r) * args.groups + g]), min, below[r]);
    }
    for (int r = 0; r < ROWS; r++) sum[r][v] = fma(below[r], dmin, sum[r][v]);
  }
}

// Sums spans [begin, end) of inputs for ROWS rows and VECTORS vectors of a panel, from zero.
template <KernelFormat F, int ROWS, int VECTORS>
INLINE void accumulate_spans(f32x16 (&sum)[ROWS][VECTORS], const QuantizedArgs& args, const char* panel, int64_t row,
                             int first, int64_t begin, int64_t end) {
  constexpr bool ALONE = F.is_alone, SUPER = F.has_super_blocks;
  using CodeInputs = std::conditional_t<F.has_bytes(), Inputs8, Inputs4>;
  const WeightFormat format = F.known(args.format);
  const IntegerInputs& rows = args.inputs;
  LookupOf<F> lookup(format.table, SIGNED_CODES);
  int32_t zero = !F.has_bytes() ? format.zero() : SIGNED_CODES ? 0 : 128;
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
      add_group<F, ROWS, VECTORS>(acc, codes, first, lookup, group, inputs, (g - first_group) * group / 4, row == 0 && first == 0);
      for (int v = 0; v < VECTORS; v++) {
        f32x16 scale = scale_of<F>(scales, v);
        for (int r = 0; r < ROWS; r++)
          part[r][v] = begins ? to_float(acc[r][v]) * scale : fma(to_float(acc[r][v]), scale, part[r][v]);
      }
      if (!SUPER && format.has_min)
        for (int v = 0; v < VECTORS; v++) {
          f32x16 min = min_of<F>(scales, v);
          for (int r = 0; r < ROWS; r++)
            part[r][v] = fma(splat(-(float)rows.sums[(row + r) * args.groups + g]), min, part[r][v]);
        }
      if (!ends) continue;
      for (int r = 0; r < ROWS; r++) {
        f32x16 scale = splat(rows.scales[(row + r) * args.input_groups + g / per_scale]);
        for (int v = 0; v < VECTORS; v++) total[r][v] = fma(part[r][v], scale, total[r][v]);
      }
    }
    if constexpr (SUPER) add_span<F>(sum, inside, args, panel, row, first, first_group, last - first_group);
  }
}

// finish as a function of its own, so that it is compiled once for all formats.
template <int ROWS>
__attribute__((noinline)) void finish_tile(const LinearArgs& args, const f32x16 (&sums)[SEGMENTS][ROWS][PANEL_VECTORS],
                                           int64_t row, int64_t p) {
  if (args.type == Dtype::f32) finish<float, ROWS>(args, sums, row, p);
  else finish<uint16_t, ROWS>(args, sums, row, p);
}

template <KernelFormat F, int ROWS>
void quantized_tile(const QuantizedArgs& args, const char* panel, int64_t row, int64_t p) {
  constexpr int VECTORS = QUANTIZED_VECTORS<ROWS>;
  int64_t per_segment = (args.spans + SEGMENTS - 1) / SEGMENTS;
  f32x16 sums[SEGMENTS][ROWS][PANEL_VECTORS];
  for (int s = 0; s < SEGMENTS; s++) {
    int64_t begin = s * per_segment < args.spans ? s * per_segment : args.spans;
    int64_t end = begin + per_segment < args.spans ? begin + per_segment : args.spans;
    for (int first = 0; first < PANEL_VECTORS; first += VECTORS) {
      f32x16 sum[ROWS][VECTORS];
      accumulate_spans<F>(sum, args, panel, row, first, begin, end);
      for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) sums[s][r][first + v] = sum[r][v];
    }
  }
  finish_tile<ROWS>(args.linear, sums, row, p);
}

template <KernelFormat F>
void quantized_panels_of(const QuantizedArgs& args, int64_t begin, int64_t end) {
  int64_t panel_bytes = args.format.panel_bytes(args.linear.k);
  for (int64_t p = begin; p < end; p++) {
    const char* panel = (const char*)args.linear.w + p * panel_bytes;
    in_tiles<QUANTIZED_ROWS>(args.linear.m, [&]<int ROWS>(int64_t row) { quantized_tile<F, ROWS>(args, panel, row, p); });
  }
}

// Calls f<KernelFormat>() for a format; only formats in use are compiled. Tables have groups of 32 or 16.
template <typename F>
INLINE void of_format(const WeightFormat& format, const F& f) {
  bool has_table = format.table != CodeTable::none;
  auto with = [&]<int BITS, bool TABLE, bool ALONE, bool SUPER, int64_t GROUP>() {
    f.template operator()<KernelFormat{BITS, TABLE, ALONE, SUPER, GROUP}>();
  };
  if (format.has_super_blocks) switch (format.bits) {
    case 2: return with.template operator()<2, false, false, true, 16>();
    case 3: return with.template operator()<3, false, false, true, 16>();
    case 5: return with.template operator()<5, false, true, true, 32>();
    case 6: return with.template operator()<6, false, false, true, 16>();
    default:
      if (has_table) with.template operator()<4, true, true, true, 32>();
      else with.template operator()<4, false, true, true, 32>();
      return;
  }
  if (format.bits == 5) return with.template operator()<5, false, true, false, 32>();
  bool is_alone = format.group == input_group(format.group);
  if (has_table) {
    if (is_alone) with.template operator()<4, true, true, false, 32>();
    else with.template operator()<4, true, false, false, 16>();
    return;
  }
  auto of_bits = [&]<bool ALONE, int64_t GROUP>() {
    if (format.bits == 8) with.template operator()<8, false, ALONE, false, GROUP>();
    else with.template operator()<4, false, ALONE, false, GROUP>();
  };
  if (format.group == 32) of_bits.template operator()<true, 32>();
  else if (is_alone) of_bits.template operator()<true, 0>();
  else of_bits.template operator()<false, 0>();
}

}  // namespace
}  // namespace twostroke

#if defined(__AMX_INT8__)
#include "amx_quantized.hpp"
#endif
#if defined(__AVX512VNNI__)
#include "unpacked.hpp"
#endif

namespace twostroke {
namespace {

void quantized_panels(const QuantizedArgs& args, int64_t begin, int64_t end) {
#if defined(__AMX_INT8__)
  if (quantized_in_tiles(args, begin, end)) return;
#endif
  of_format(args.format, [&]<KernelFormat F>() {
#if defined(__AVX512VNNI__)
    if constexpr (UNPACKED_ROWS<F> > 0)
      if (args.linear.m >= UNPACKED_ROWS<F>) return unpacked_panels_of<F>(args, begin, end);
#endif
    quantized_panels_of<F>(args, begin, end);
  });
}

}  // namespace
}  // namespace twostroke
