// Fetching of keys and values for the products, a chunk at a time.
//
// The products need one order per type, that of f32 or bf16 in kv_format.hpp with tiles of 16 tokens. A chunk stored in that
// order is read in place; any other is decoded into buffers that stay in the cache.
#pragma once

#include <type_traits>
#include <utility>

#include "elementwise.hpp"
#include "kv_format.hpp"
#include "quantized.hpp"

namespace twostroke {
namespace {

constexpr int64_t CHUNK = 64, CHUNK_TILES = CHUNK / LANES;

typedef uint64_t u64x2 __attribute__((vector_size(16)));

// Keys and values of one chunk, in the order of the products: the start of each tile of 16 keys.
struct ChunkView {
  const char* k[CHUNK_TILES];  // [head_dim / E][16] of E dimensions
  const char* v[CHUNK_TILES];  // [16 / E][head_dim] of E tokens
  bool decoded;                // whether they are in buffers, so that no prefetch is needed
};

// Wanted keys of a sequence. Other fetched keys may be anything, but V of a unit with a wanted key is finite.
struct KeyRange {
  int64_t first, last;
  bool has(int64_t key) const { return key >= first && key <= last; }
};

// Sixteen tokens of a head as stored.
template <typename F>
struct StoredTile {
  HeadOrder<F> order;
  const char *k_head, *v_head;
  int64_t t;  // first token, a multiple of 16
};

struct ChunkBuffers {
  static constexpr int64_t BYTES = CHUNK * MAX_HEAD_DIM * 4;
  alignas(64) char stored_k[BYTES];  // blocks of fewer than 16 tokens are joined here
  alignas(64) char stored_v[BYTES];
  alignas(64) char k[BYTES];         // decoded
  alignas(64) char v[BYTES + 64];
};

INLINE ChunkBuffers& chunk_buffers() {
  static thread_local ChunkBuffers buffers;
  return buffers;
}

// Joins small blocks into one of 16 tokens; unwanted tokens are zero.
template <typename F>
StoredTile<F> join_blocks(const AttentionArgs& args, const int32_t* table, int64_t kv_head, int64_t first_key, KeyRange keys,
                          char* k_head, char* v_head) {
  using Element = typename F::Element;
  HeadOrder<F> from(args.block_size, args.head_dim), to(LANES, args.head_dim);
  std::memset(k_head, 0, (size_t)to.head_bytes());
  std::memset(v_head, 0, (size_t)to.head_bytes());
  for (int64_t i = 0; i < LANES; i++) {
    int64_t key = first_key + i;
    if (!keys.has(key)) continue;
    const char* k_from = args.storage + table[key / args.block_size] * args.block_bytes + kv_head * from.head_bytes();
    const char* v_from = k_from + args.kv_heads * from.head_bytes();
    int64_t t = key % args.block_size;
    for (int64_t u = 0; u < from.units; u++) std::memcpy(k_head + to.k(i, u), k_from + from.k(t, u), F::UNIT);
    if (to.v_is_plain())
      std::memcpy(v_head + to.v(i), v_from + from.v(t), (size_t)from.row_bytes);
    else
      for (int64_t d = 0; d < args.head_dim; d++)
        std::memcpy(v_head + to.v(i) + d * to.v_step(), v_from + from.v(t) + d * from.v_step(), sizeof(Element));
    if constexpr (F::QUANTIZED)
      for (auto [head, stored] : {std::pair{k_head, k_from}, std::pair{v_head, v_from}}) {
        std::memcpy(head + to.scale(i), stored + from.scale(t), 2);
        std::memcpy(head + to.zero(i), stored + from.zero(t), 2);
      }
  }
  return {to, k_head, v_head, 0};
}

// Returns the 16 tokens from first_key on, at least one of them wanted.
template <typename F>
INLINE StoredTile<F> find_tile(const AttentionArgs& args, const int32_t* table, int64_t kv_head, int64_t first_key,
                               KeyRange keys, int64_t tile, ChunkBuffers& buffers) {
  HeadOrder<F> order(args.block_size, args.head_dim);
  if (args.block_size < LANES) {
    int64_t at = tile * LANES * MAX_HEAD_DIM * 4;
    return join_blocks<F>(args, table, kv_head, first_key, keys, buffers.stored_k + at, buffers.stored_v + at);
  }
  const char* head = args.storage + table[first_key / args.block_size] * args.block_bytes + kv_head * order.head_bytes();
  return {order, head, head + args.kv_heads * order.head_bytes(), first_key % args.block_size};
}

struct Pair {
  f32x16 even, odd;
};

INLINE f32x16 codes_of(u32x16 codes) { return to_float((i32x16)codes); }

// Returns dimensions 2 u and 2 u + 1 of sixteen tokens. The product with a scale is exact, so fma rounds as kernels/reference.
template <typename F>
INLINE Pair k_pair(const char* tile, int64_t u, f32x16 scale, f32x16 zero) {
  if constexpr (std::is_same_v<F, F32Format>) {
    return {load<f32x16>(tile + u * 128), load<f32x16>(tile + u * 128 + 64)};
  } else if constexpr (std::is_same_v<F, Bf16Format>) {
    u32x16 units = load<u32x16>(tile + u * 64);
    return {first_of_pair(units), second_of_pair(units)};
  } else if constexpr (std::is_same_v<F, Int8Format>) {
    u32x16 units = widened(load<u16x16>(tile + u * 32));
    return {fma(codes_of(units & splat(0xffu)), scale, zero), fma(codes_of(units >> 8), scale, zero)};
  } else {
    u32x16 units = widened(load<u8x16>(tile + u * 16));
    return {fma(codes_of(units & splat(0xfu)), scale, zero), fma(codes_of(units >> 4), scale, zero)};
  }
}

// Returns up to sixteen dimensions, from d on, of one token, whose row (for bf16: whose pair's row) starts at `row`.
INLINE f32x16 v_codes(Int8Format, const char* row, int64_t d, int64_t count) {
  u8x16 bytes{};
  if (count == LANES) bytes = load<u8x16>(row + d);
  else std::memcpy(&bytes, row + d, (size_t)count);
  return codes_of(widened(bytes));
}
INLINE f32x16 v_codes(Int4Format, const char* row, int64_t d, int64_t count) {
  const char* group = row + d / 2;
  if (count == LANES) {
    uint64_t nibbles;
    std::memcpy(&nibbles, group, 8);
    u64x2 halves = {nibbles & 0x0f0f0f0f0f0f0f0fu, nibbles >> 4 & 0x0f0f0f0f0f0f0f0fu};
    return codes_of(widened((u8x16)halves));
  }
  uint8_t codes[LANES] = {};
  int64_t half = count / 2 & (LANES / 2 - 1);  // always below 8; the mask tells the compiler
  for (int64_t j = 0; j < half; j++) {
    codes[j] = (uint8_t)group[j] & 15;
    codes[half + j] = (uint8_t)group[j] >> 4;
  }
  return codes_of(widened(load<u8x16>(codes)));
}

// Returns the same dimensions of tokens t and t + 1, t even.
template <typename F>
INLINE Pair v_pair(const StoredTile<F>& tile, int64_t t, int64_t d, int64_t count, const float* scales, const float* zeros) {
  const char* row = tile.v_head + tile.order.v(tile.t + t);
  int64_t next = tile.order.row_bytes;
  if constexpr (std::is_same_v<F, F32Format>) {
    return {get((const float*)row + d, count), get((const float*)(row + next) + d, count)};
  } else if constexpr (std::is_same_v<F, Bf16Format>) {
    u32x16 units = (u32x16)get((const float*)row + d, count);
    return {first_of_pair(units), second_of_pair(units)};
  } else {
    return {fma(v_codes(F{}, row, d, count), splat(scales[t]), splat(zeros[t])),
            fma(v_codes(F{}, row + next, d, count), splat(scales[t + 1]), splat(zeros[t + 1]))};
  }
}

// Converts two vectors to sixteen units of two bf16.
INLINE u32x16 bf16_units(Pair pair) {
#if defined(__AVX512BF16__)
  alignas(64) static constexpr uint16_t MERGED[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  __m512i joined = (__m512i)_mm512_cvtne2ps_pbh((__m512)pair.odd, (__m512)pair.even);
  return (u32x16)_mm512_permutexvar_epi16(load<__m512i>(MERGED), joined);
#else
  return widened(to_bf16(pair.even)) | widened(to_bf16(pair.odd)) << 16;
#endif
}

INLINE void put_k_pair(F32Products, char* tile, int64_t u, Pair pair) {
  store(tile + u * 128, pair.even);
  store(tile + u * 128 + 64, pair.odd);
}
INLINE void put_k_pair(Bf16Products, char* tile, int64_t u, Pair pair) { store(tile + u * 64, bf16_units(pair)); }

INLINE void put_v_pair(F32Products, char* tile, int64_t head_dim, int64_t t, int64_t d, int64_t count, Pair pair) {
  float* row = (float*)tile + t * head_dim + d;
  set(row, pair.even, count);
  set(row + head_dim, pair.odd, count);
}
INLINE void put_v_pair(Bf16Products, char* tile, int64_t head_dim, int64_t t, int64_t d, int64_t count, Pair pair) {
  set((float*)tile + t / 2 * head_dim + d, (f32x16)bf16_units(pair), count);
}

// Decodes a stored tile, whose first token is first_key, to the products' order and type.
template <typename P, typename F>
void decode_tile(const StoredTile<F>& tile, int64_t first_key, KeyRange keys, char* k, char* v) {
  const HeadOrder<F>& order = tile.order;
  f32x16 k_scale{}, k_zero{};
  float scales[LANES] = {}, zeros[LANES] = {};
  if constexpr (F::QUANTIZED) {
    k_scale = from_half(tile.k_head + order.scale(tile.t));
    k_zero = from_half(tile.k_head + order.zero(tile.t));
    store(scales, from_half(tile.v_head + order.scale(tile.t)));
    store(zeros, from_half(tile.v_head + order.zero(tile.t)));
  }
  const char *k_from = tile.k_head + order.k(tile.t, 0), *v_from = tile.v_head + order.v(tile.t);
  // blocks lie anywhere, so the processor cannot predict them; the values arrive while the keys are decoded
  for (int64_t at = 0; at < LANES * order.row_bytes; at += 64) __builtin_prefetch(v_from + at);
  for (int64_t u = 0; u < order.head_dim / 2; u++) put_k_pair(P{}, k, u, k_pair<F>(k_from, u, k_scale, k_zero));
  for (int64_t t = 0; t < LANES; t += 2) {
    bool even = keys.has(first_key + t), odd = keys.has(first_key + t + 1);
    if (!even && !odd) continue;
    in_lanes(order.head_dim, [&](int64_t d, int64_t count) {
      Pair pair = v_pair(tile, t, d, count, scales, zeros);
      put_v_pair(P{}, v, order.head_dim, t, d, count, {even ? pair.even : f32x16{}, odd ? pair.odd : f32x16{}});
    });
  }
}

// Returns the chunk that starts at first_key, which has at least one wanted key.
template <typename P, typename F>
ChunkView fetch_chunk(const AttentionArgs& args, const AttentionItem& item, int64_t first_key, KeyRange keys) {
  ChunkBuffers& buffers = chunk_buffers();
  constexpr bool AS_IT_LIES = std::is_same_v<typename P::Format, F>;
  const int32_t* table = args.block_table + item.seq * args.max_blocks;
  int64_t tile_bytes = LANES * args.head_dim * (int64_t)sizeof(typename P::Element);
  ChunkView view;
  view.decoded = !AS_IT_LIES;
  for (int64_t tile = 0; tile < CHUNK_TILES; tile++) {
    int64_t key = first_key + tile * LANES;
    bool wanted = key <= keys.last && key + LANES > keys.first;
    if constexpr (AS_IT_LIES) {
      // unwanted tiles have no weight; a wanted one takes their place
      if (key > keys.last) key = keys.last / LANES * LANES;
      if (key + LANES <= keys.first) key = keys.first / LANES * LANES;
      StoredTile<F> stored = find_tile<F>(args, table, item.kv_head, key, keys, tile, buffers);
      view.k[tile] = stored.k_head + stored.order.k(stored.t, 0);
      view.v[tile] = stored.v_head + stored.order.v(stored.t);
    } else {
      char *k = buffers.k + tile * tile_bytes, *v = buffers.v + tile * tile_bytes;
      view.k[tile] = k;
      view.v[tile] = v;
      if (wanted) decode_tile<P>(find_tile<F>(args, table, item.kv_head, key, keys, tile, buffers), key, keys, k, v);
    }
  }
  return view;
}

template <typename P>
using FetchChunk = ChunkView (*)(const AttentionArgs&, const AttentionItem&, int64_t first_key, KeyRange keys);

template <typename P>
FetchChunk<P> fetch_of(KvFormat format) {
  switch (format) {
    case KvFormat::f32: return fetch_chunk<P, F32Format>;
    case KvFormat::bf16: return fetch_chunk<P, Bf16Format>;
    case KvFormat::int8: return fetch_chunk<P, Int8Format>;
    default: return fetch_chunk<P, Int4Format>;
  }
}

}  // namespace
}  // namespace twostroke
