// Products against weights of 8 or 4 bits: integers inside a group of k, floats across groups.
//
//   weight  w[n][k] = scale[n][g] * (code[n][k] - zero) - min[n][g]        zero 128 or 8, min only where a format has one
//   input   x[m][k] = scale[m][s] * q[m][k],  q from -127 to 127           made on the fly in spans of 128, row by row
//
// so over a group   sum = scale[n] (SUM code q - zero SUM q) - min[n] SUM q,   and over a span the sum of these times scale[m]
//
// The sums over codes are of integers and hence exact; groups are added in float32 within their span, spans in the order of
// linear.hpp: runs from the first to the last, and the runs in a fixed tree. A row is quantized from its own values alone.
//
// Packed weights: a panel is a sequence of groups, 64 channels each:
//
//   8 bits  [G / 4][4 vectors][16 channels][4 k]       4 bits  [G / 8][4 vectors][16 channels][4 k low, 4 k high halves]
//   scales  float16 [64]                               mins    float16 [64], where the format has them
#pragma once

#include "elementwise.hpp"
#include "linear.hpp"
#include "table.hpp"
#include "vec.hpp"

namespace twostroke {
namespace {

// acc + the sum over four bytes of w (unsigned) times a (signed), per lane.
INLINE i32x16 dot_bytes(i32x16 acc, u32x16 w, uint32_t a) {
#if defined(__AVX512VNNI__)
  return (i32x16)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32((int)a));
#else
  // Bytes 0 and 2, and bytes 1 and 3, as pairs of 16 bits.
  auto pair = [](uint32_t low, uint32_t high) {
    return (uint32_t)(uint16_t)(int16_t)(int8_t)low | (uint32_t)(uint16_t)(int16_t)(int8_t)high << 16;
  };
  uint32_t even = pair(a, a >> 16), odd = pair(a >> 8, a >> 24);
  u32x16 w_even = w & splat(0x00ff00ffu), w_odd = (w >> 8) & splat(0x00ff00ffu);
#if defined(__AVX2__)
  i32x16 out;
  for (int half = 0; half < 2; half++) {
    __m256i we, wo, s;
    std::memcpy(&we, (const char*)&w_even + 32 * half, 32);
    std::memcpy(&wo, (const char*)&w_odd + 32 * half, 32);
    std::memcpy(&s, (const char*)&acc + 32 * half, 32);
    s = _mm256_add_epi32(s, _mm256_madd_epi16(we, _mm256_set1_epi32((int)even)));
    s = _mm256_add_epi32(s, _mm256_madd_epi16(wo, _mm256_set1_epi32((int)odd)));
    std::memcpy((char*)&out + 32 * half, &s, 32);
  }
  return out;
#else
  auto low = [](uint32_t p) { return (int32_t)(int16_t)(uint16_t)p; };
  auto high = [](uint32_t p) { return (int32_t)(int16_t)(uint16_t)(p >> 16); };
  acc += (i32x16)(w_even & splat(0xffffu)) * low(even) + (i32x16)(w_even >> 16) * high(even);
  return acc + (i32x16)(w_odd & splat(0xffffu)) * low(odd) + (i32x16)(w_odd >> 16) * high(odd);
#endif
#endif
}

INLINE f32x16 from_half(const char* p) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_maskz_cvtph_ps((__mmask16)-1, _mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
  f32x16 out;
  for (int half = 0; half < 2; half++) {
    __m256 v = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 16 * half)));
    std::memcpy((char*)&out + 32 * half, &v, 32);
  }
  return out;
#else
  // Shifted into place a half is a float whose exponent is too small by 112; what was subnormal comes right by itself.
  u32x16 bits = __builtin_convertvector(load<u16x16>(p), u32x16);
  f32x16 magnitude = (f32x16)((bits & splat(0x7fffu)) << 13) * splat(0x1p112f);
  return (f32x16)((u32x16)magnitude | (bits & splat(0x8000u)) << 16);
#endif
}

template <int BITS>
constexpr int64_t code_bytes(int64_t group) { return group * PANEL * BITS / 8; }

INLINE int64_t quantized_group_bytes(int bits, int64_t group, bool has_min) {
  return group * PANEL * bits / 8 + PANEL * 2 * (has_min ? 2 : 1);
}

// Rows [begin, end) of x [m, k] to q [m, groups * group], scales [m, spans] and sums [m, groups]; where a weight's
// columns are in an order of their own, so are q's: input order[i] is the i-th.
template <typename T>
void quantize_rows_of(const T* x, int64_t ldx, const int32_t* order, int64_t k, int64_t group, int64_t groups, int8_t* q,
                      float* scales, int32_t* sums, int64_t begin, int64_t end) {
  typedef int8_t i8x16 __attribute__((vector_size(16)));
  const float magic = 12582912.0f;
  int64_t padded = groups * group, spans = (k + SPAN - 1) / SPAN;
  for (int64_t row = begin; row < end; row++) {
    int8_t* to = q + row * padded;
    for (int64_t span = 0; span < spans; span++) {
      int64_t first = span * SPAN, count = k - first < SPAN ? k - first : SPAN;
      const T* from = x + row * ldx + first;
      T gathered[SPAN];
      if (order) {
        for (int64_t i = 0; i < count; i++) gathered[i] = x[row * ldx + order[first + i]];
        from = gathered;
      }
      f32x16 most{};
      in_lanes(count, [&](int64_t i, int64_t n) {
        f32x16 v = get(from + i, n);
        most = larger(most, (f32x16)((u32x16)v & splat(0x7fffffffu)));
      });
      float largest = largest_of(most);
      // so small that its inverse would be infinite: nothing is left of it
      float inverse = largest > 1e-36f ? 127.0f / largest : 0.0f;
      in_lanes(count, [&](int64_t i, int64_t n) {
        i32x16 rounded = (i32x16)(get(from + i, n) * splat(inverse) + splat(magic)) - (i32x16{} + 0x4b400000);
        i8x16 bytes = __builtin_convertvector(rounded, i8x16);
        std::memcpy(to + first + i, &bytes, (size_t)n);
      });
      scales[row * spans + span] = inverse > 0 ? largest / 127.0f : 0.0f;
    }
    std::memset(to + k, 0, (size_t)(padded - k));
    for (int64_t g = 0; g < groups; g++) {
      i32x16 total{};
      for (int64_t i = 0; i < group; i += LANES) total += __builtin_convertvector(load<i8x16>(to + g * group + i), i32x16);
      int32_t lanes[16], sum = 0;
      std::memcpy(lanes, &total, 64);
      for (int i = 0; i < 16; i++) sum += lanes[i];
      sums[row * groups + g] = sum;
    }
  }
}

void quantize_rows(const void* x, int64_t ldx, const int32_t* order, int64_t k, int64_t group, int64_t groups, int8_t* q,
                   float* scales, int32_t* sums, Dtype type, int64_t begin, int64_t end) {
  if (type == Dtype::f32)
    quantize_rows_of((const float*)x, ldx, order, k, group, groups, q, scales, sums, begin, end);
  else
    quantize_rows_of((const uint16_t*)x, ldx, order, k, group, groups, q, scales, sums, begin, end);
}

// Spans [begin, end) of inputs for ROWS rows and VECTORS vectors of a panel, from zero.
template <int BITS, int ROWS, int VECTORS>
INLINE void accumulate_spans(f32x16 (&sum)[ROWS][VECTORS], const QuantizedArgs& args, const char* panel, int64_t row,
                             int first, int64_t begin, int64_t end) {
  constexpr int32_t ZERO = 1 << (BITS - 1);
  int64_t group_bytes = quantized_group_bytes(BITS, args.group, args.has_min), per_span = SPAN / args.group;
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) sum[r][v] = f32x16{};
  for (int64_t span = begin; span < end; span++) {
    f32x16 part[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECTORS; v++) part[r][v] = f32x16{};
    int64_t last = (span + 1) * per_span < args.groups ? (span + 1) * per_span : args.groups;
    for (int64_t g = span * per_span; g < last; g++) {
      const char* codes = panel + g * group_bytes + first * LANES * 4;
      const char* scales = panel + g * group_bytes + code_bytes<BITS>(args.group) + first * LANES * 2;
      const int8_t* q[ROWS];
      i32x16 acc[ROWS][VECTORS];
      for (int r = 0; r < ROWS; r++) {
        int64_t at = (row + r) * args.groups + g;
        q[r] = args.q + at * args.group;
        for (int v = 0; v < VECTORS; v++) acc[r][v] = i32x16{} - ZERO * args.sums[at];
      }
      for (int64_t k = 0; k < args.group; k += 32 / BITS) {
        const char* at = codes + k * PANEL * BITS / 8;
        if constexpr (ROWS == 1) __builtin_prefetch(at + 4096);
        for (int v = 0; v < VECTORS; v++) {
          u32x16 w = load<u32x16>(at + v * LANES * 4);
          u32x16 low = w & splat(0x0f0f0f0fu), high = (w >> 4) & splat(0x0f0f0f0fu);
          for (int r = 0; r < ROWS; r++) {
            uint32_t a;
            std::memcpy(&a, q[r] + k, 4);
            if constexpr (BITS == 8) {
              acc[r][v] = dot_bytes(acc[r][v], w, a);
            } else {
              uint32_t b;
              std::memcpy(&b, q[r] + k + 4, 4);
              acc[r][v] = dot_bytes(dot_bytes(acc[r][v], low, a), high, b);
            }
          }
        }
      }
      for (int v = 0; v < VECTORS; v++) {
        f32x16 scale = from_half(scales + v * LANES * 2);
        for (int r = 0; r < ROWS; r++) part[r][v] = fma(__builtin_convertvector(acc[r][v], f32x16), scale, part[r][v]);
      }
      if (args.has_min)
        for (int v = 0; v < VECTORS; v++) {
          f32x16 min = from_half(scales + PANEL * 2 + v * LANES * 2);
          for (int r = 0; r < ROWS; r++)
            part[r][v] = fma(splat(-(float)args.sums[(row + r) * args.groups + g]), min, part[r][v]);
        }
    }
    for (int r = 0; r < ROWS; r++) {
      f32x16 scale = splat(args.scales[(row + r) * args.spans + span]);
      for (int v = 0; v < VECTORS; v++) sum[r][v] = fma(part[r][v], scale, sum[r][v]);
    }
  }
}

template <typename T, int BITS, int ROWS, int VECTORS>
void quantized_tile(const QuantizedArgs& args, const char* panel, int64_t row, int64_t p, int first) {
  int64_t per_segment = (args.spans + SEGMENTS - 1) / SEGMENTS;
  f32x16 sums[SEGMENTS][ROWS][VECTORS];
  for (int s = 0; s < SEGMENTS; s++) {
    int64_t begin = s * per_segment < args.spans ? s * per_segment : args.spans;
    int64_t end = begin + per_segment < args.spans ? begin + per_segment : args.spans;
    accumulate_spans<BITS, ROWS, VECTORS>(sums[s], args, panel, row, first, begin, end);
  }
  finish<T, ROWS, VECTORS>(args.linear, sums, row, p, first);
}

template <typename T, int BITS, int MOST_ROWS, int VECTORS>
void quantized_panels_of(const QuantizedArgs& args, int64_t begin, int64_t end) {
  int64_t panel_bytes = args.groups * quantized_group_bytes(BITS, args.group, args.has_min);
  for (int64_t p = begin; p < end; p++) {
    const char* panel = (const char*)args.linear.w + p * panel_bytes;
    in_tiles<MOST_ROWS>(args.linear.m, [&]<int ROWS>(int64_t row) {
      // few rows leave registers for more channels, and more sums that do not wait for each other
      constexpr int WIDTH = 2 * ROWS <= MOST_ROWS ? 2 * VECTORS : VECTORS;
      for (int first = 0; first < PANEL_VECTORS; first += WIDTH)
        quantized_tile<T, BITS, ROWS, WIDTH>(args, panel, row, p, first);
    });
  }
}

// Each sum takes an integer and a float register.
#if defined(__AVX512F__)
constexpr int QUANTIZED_ROWS = 6, QUANTIZED_VECTORS = 2;
#else
constexpr int QUANTIZED_ROWS = 2, QUANTIZED_VECTORS = 2;
#endif

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
  auto run = [&]<typename T>(T) {
    if (args.bits == 8) quantized_panels_of<T, 8, QUANTIZED_ROWS, QUANTIZED_VECTORS>(args, begin, end);
    else quantized_panels_of<T, 4, QUANTIZED_ROWS, QUANTIZED_VECTORS>(args, begin, end);
  };
  if (args.linear.type == Dtype::f32) run(float{});
  else run(uint16_t{});
}

}  // namespace
}  // namespace twostroke
