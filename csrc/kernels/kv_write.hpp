// Writing of keys and values into the storage, a token at a time.
#pragma once

#include <limits>
#include <type_traits>

#include "elementwise.hpp"
#include "hadamard.hpp"
#include "half.hpp"
#include "kv_format.hpp"
#include "quantized.hpp"

namespace twostroke {
namespace {

// Rounds to the nearest half, ties to even; too large numbers become infinite, and NaN stays NaN.
INLINE uint16_t to_half(float value) {
  uint32_t bits, sign;
  std::memcpy(&bits, &value, 4);
  sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (bits < 0x38800000) {  // subnormal: adding 0.5 leaves units of 2^-24 in the lowest bits, rounded like any sum
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, 4);
    return (uint16_t)(sign | (bits - 0x3f000000));
  }
  return (uint16_t)(sign | ((bits + 0xfff + (bits >> 13 & 1)) - 0x38000000) >> 13);
}

// Quantizes one vector of a token to codes from 0 to LEVELS, a byte each: x = zero + scale * code.
template <typename F, typename T>
void quantize_token(const T* x, int64_t n, uint8_t* codes, char* scale_at, char* zero_at) {
  constexpr float INF = std::numeric_limits<float>::infinity(), LARGEST_HALF = 65504.0f;
  const i32x16 lane = lane_numbers();
  f32x16 most = splat(-INF), most_negated = splat(-INF), poison{};
  in_lanes(n, [&](int64_t i, int64_t count) {
    f32x16 v = get(x + i, count);
    i32x16 inside = lane < (int32_t)count;
    most = larger(select(inside, v, splat(-INF)), most);
    most_negated = larger(select(inside, -v, splat(-INF)), most_negated);
    poison += v * splat(0.0f);  // NaN unless all numbers are finite
  });
  constexpr bool IN_CELLS = std::is_same_v<F, Int4Format>;
  float lowest = -largest_of(most_negated) + (sum_of(poison) + 0.0f), highest = largest_of(most);
  float zero = IN_CELLS ? lowest + (highest - lowest) * (1.0f / 32) + 0.0f : lowest;
  zero = zero < -LARGEST_HALF ? -LARGEST_HALF : zero > LARGEST_HALF ? LARGEST_HALF : zero;
  uint16_t zero_half = to_half(zero);
  zero = from_half(zero_half);
  float scale = IN_CELLS ? (highest - lowest) * (1.0f / 16) : (highest - zero) / F::LEVELS;
  uint16_t scale_half = to_half(scale > LARGEST_HALF ? LARGEST_HALF : scale > 0 ? scale : 0.0f);
  scale = from_half(scale_half);
  f32x16 inverse = splat(scale > 0 ? 1.0f / scale : 0.0f);
  const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  in_lanes(n, [&](int64_t i, int64_t count) {
    f32x16 code = (get(x + i, count) - splat(zero)) * inverse;
    code = select(code > f32x16{}, code, f32x16{});
    code = select(code < splat(F::LEVELS), code, splat(F::LEVELS));
    u8x16 bytes = lowest_bytes((i32x16)(code + magic));
    std::memcpy(codes + i, &bytes, (size_t)count);
  });
  std::memcpy(scale_at, &scale_half, 2);
  std::memcpy(zero_at, &zero_half, 2);
}

// Transforms x to the vector that int4 stores.
template <typename T>
INLINE void transform(const T* x, int64_t n, float* to) {
  int64_t block = hadamard_block(n);
  f32x16 factor = splat(HadamardFactors(block).stored);
  in_lanes(n, [&](int64_t i, int64_t count) { set(to + i, get(x + i, count) * factor, count); });
  hadamard(to, n, block);
}

// Packs neighbouring dimensions in pairs, as in units of K.
INLINE void pack_neighbours(uint8_t* codes, int64_t n) {
  for (int64_t u = 0; u < n / 2; u++) codes[u] = (uint8_t)(codes[2 * u] | codes[2 * u + 1] << 4);
}

// Packs groups of 16 dimensions, with the halves of a group in pairs, as in V.
INLINE void pack_halves(uint8_t* codes, int64_t n) {
  in_lanes(n, [&](int64_t i, int64_t count) {
    for (int64_t j = 0; j < count / 2; j++) codes[i / 2 + j] = (uint8_t)(codes[i + j] | codes[i + count / 2 + j] << 4);
  });
}

// Encodes one vector of a token as a row of F: K in the order of its units, V in the order of its dimensions.
template <typename F, typename T>
INLINE void encode(const HeadOrder<F>& order, const T* x, bool keys, char* head, int64_t t, char* row) {
  int64_t n = order.head_dim;
  if constexpr (F::QUANTIZED) {
    uint8_t* codes = (uint8_t*)row;
    if constexpr (std::is_same_v<F, Int4Format>) {
      alignas(64) float transformed[MAX_HEAD_DIM];
      transform(x, n, transformed);
      quantize_token<F>(transformed, n, codes, head + order.scale(t), head + order.zero(t));
      if (keys) pack_neighbours(codes, n);
      else pack_halves(codes, n);
    } else {
      quantize_token<F>(x, n, codes, head + order.scale(t), head + order.zero(t));
    }
  } else if constexpr (std::is_same_v<typename F::Element, T>) {
    std::memcpy(row, x, (size_t)order.row_bytes);
  } else {
    in_lanes(n, [&](int64_t i, int64_t count) { set((typename F::Element*)row + i, get(x + i, count), count); });
  }
}

template <typename F>
INLINE void put_k(const HeadOrder<F>& order, const char* row, char* k_head, int64_t t) {
  for (int64_t u = 0; u < order.units; u++) std::memcpy(k_head + order.k(t, u), row + u * F::UNIT, F::UNIT);
}

template <typename F>
INLINE void put_v(const HeadOrder<F>& order, const char* row, char* v_head, int64_t t, bool is_last) {
  using Element = typename F::Element;
  char* to = v_head + order.v(t);
  if (order.v_is_plain()) {
    std::memcpy(to, row, (size_t)order.row_bytes);
    return;
  }
  int64_t step = order.v_step();
  // The last token clears its neighbour's place in the unit: an old value there (a NaN at worst) would be multiplied, with a
  // weight of zero, until the neighbour is written.
  if (is_last && t % F::TOKENS == 0)
    for (int64_t d = 0; d < order.head_dim; d++) std::memset(to + d * step, 0, (size_t)step);
  for (int64_t d = 0; d < order.head_dim; d++)
    std::memcpy(to + d * step, row + d * (int64_t)sizeof(Element), sizeof(Element));
}

template <typename F, typename T>
void write_tokens(const AttentionArgs& args, const int32_t* seq_of_token, int64_t begin, int64_t end) {
  HeadOrder<F> order(args.block_size, args.head_dim);
  int64_t stride = args.token_heads * args.head_dim;
  char row[MAX_HEAD_DIM * 4];
  for (int64_t token = begin; token < end; token++) {
    int64_t seq = seq_of_token[token];
    int64_t position = args.seq_lens[seq] - args.query_start[seq + 1] + token;
    char* block = args.storage + args.block_table[seq * args.max_blocks + position / args.block_size] * args.block_bytes;
    int64_t t = position % args.block_size;
    const T* k = (const T*)args.qkv + token * stride + args.heads * args.head_dim;
    const T* v = k + args.kv_heads * args.head_dim;
    for (int64_t head = 0; head < args.kv_heads; head++, k += args.head_dim, v += args.head_dim) {
      char* k_head = block + head * order.head_bytes();
      char* v_head = k_head + args.kv_heads * order.head_bytes();
      encode(order, k, true, k_head, t, row);
      put_k(order, row, k_head, t);
      encode(order, v, false, v_head, t, row);
      put_v(order, row, v_head, t, position + 1 == args.seq_lens[seq]);
    }
  }
}

template <typename T>
void write_kv_of(const AttentionArgs& args, const int32_t* seq_of_token, int64_t begin, int64_t end) {
  switch (args.format) {
    case KvFormat::f32: return write_tokens<F32Format, T>(args, seq_of_token, begin, end);
    case KvFormat::bf16: return write_tokens<Bf16Format, T>(args, seq_of_token, begin, end);
    case KvFormat::int8: return write_tokens<Int8Format, T>(args, seq_of_token, begin, end);
    default: return write_tokens<Int4Format, T>(args, seq_of_token, begin, end);
  }
}

void write_kv(const AttentionArgs& args, const int32_t* seq_of_token, int64_t begin, int64_t end) {
  with_type(args.type, [&]<typename T>(T) { write_kv_of<T>(args, seq_of_token, begin, end); });
}

}  // namespace
}  // namespace twostroke
