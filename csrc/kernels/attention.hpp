// Attention over paged keys and values; prefill chunks, decodes and everything between are the same code.
//
// Inside a block every KV head is contiguous. Elements stand in units of four bytes (one f32, or two bf16), in the order
// that the products want them, with t the token in the block and d the dimension:
//
//   K  tiles of 16 tokens, tokens in the lanes:   [t / 16][d / E][t % 16] of E dimensions         E = 1 for f32, 2 for bf16
//   V  dimensions in the lanes:                   [t / E][d] of E tokens
//
// (With blocks of fewer than 16 tokens the lanes of K are as many as there are; with 1 token V is plain.)
//
// A row's result depends on its query, its keys and its values alone. Keys are walked in chunks of CHUNK and partitions of
// PARTITION tokens at absolute positions; inside a partition runs the online softmax of Milakov and Gimelshein 2018
// (arXiv:1805.02867), and partitions are folded from the oldest on. A chunk or a partition in which a row sees nothing
// changes nothing of it, not one bit, so it does not matter which rows share a tile.
#pragma once

#include "elementwise.hpp"
#include "linear.hpp"
#include "table.hpp"
#include "vec.hpp"

namespace twostroke {
namespace {

constexpr int64_t CHUNK = 64, CHUNK_TILES = CHUNK / LANES;
constexpr int64_t PARTITION = 512;
constexpr float LOWEST = -1e30f;  // the maximum of nothing; finite, so that a difference of two of them is 0

struct F32Storage {
  using Element = float;
  static constexpr int64_t E = 1;
  using Dot = F32Weights;
};

struct Bf16Storage {
  using Element = uint16_t;
  static constexpr int64_t E = 2;
  using Dot = Bf16Weights;
};

INLINE float to_element(float v, float) { return v; }
INLINE uint16_t to_element(float v, uint16_t) {
  f32x16 lanes{};
  lanes[0] = v;
  return to_bf16(lanes)[0];
}

// Where things are in a head of a block.
template <typename S>
struct HeadOrder {
  int64_t block_size, head_dim, lanes, tile_bytes;

  HeadOrder(int64_t block_size, int64_t head_dim)
      : block_size(block_size), head_dim(head_dim), lanes(block_size < LANES ? block_size : LANES),
        tile_bytes(lanes * head_dim * (int64_t)sizeof(typename S::Element)) {}

  int64_t head_bytes() const { return block_size * head_dim * (int64_t)sizeof(typename S::Element); }
  // Bytes from the head's start.
  int64_t k(int64_t t, int64_t d) const {
    return t / lanes * tile_bytes + (d / S::E * lanes + t % lanes) * 4 + d % S::E * (int64_t)sizeof(typename S::Element);
  }
  int64_t v(int64_t t, int64_t d) const {
    if (block_size < S::E) return d * (int64_t)sizeof(typename S::Element);
    return (t / S::E * head_dim + d) * 4 + t % S::E * (int64_t)sizeof(typename S::Element);
  }
};

template <typename S>
void write_tokens(const AttentionArgs& args, const int32_t* seq_of_token, int64_t begin, int64_t end) {
  using Element = typename S::Element;
  HeadOrder<S> order(args.block_size, args.head_dim);
  int64_t stride = (args.heads + 2 * args.kv_heads) * args.head_dim;
  for (int64_t token = begin; token < end; token++) {
    int64_t seq = seq_of_token[token];
    int64_t position = args.seq_lens[seq] - args.query_start[seq + 1] + token;
    char* block = args.storage + args.block_table[seq * args.max_blocks + position / args.block_size] * args.block_bytes;
    int64_t t = position % args.block_size;
    const Element* k = (const Element*)args.qkv + token * stride + args.heads * args.head_dim;
    const Element* v = k + args.kv_heads * args.head_dim;
    for (int64_t head = 0; head < args.kv_heads; head++, k += args.head_dim, v += args.head_dim) {
      char* k_head = block + head * order.head_bytes();
      char* v_head = k_head + args.kv_heads * order.head_bytes();
      for (int64_t d = 0; d < args.head_dim; d += S::E) std::memcpy(k_head + order.k(t, d), k + d, 4);
      // The last token clears its neighbour's place in the unit: what an earlier owner left there (a NaN at worst) is
      // multiplied, with a weight of zero, until the neighbour comes.
      if (S::E == 2 && t % 2 == 0 && args.block_size > 1 && position + 1 == args.seq_lens[seq])
        for (int64_t d = 0; d < args.head_dim; d++) {
          uint32_t unit = 0;
          std::memcpy(&unit, v + d, sizeof(Element));
          std::memcpy(v_head + order.v(t, d), &unit, 4);
        }
      else
        for (int64_t d = 0; d < args.head_dim; d++) std::memcpy(v_head + order.v(t, d), v + d, sizeof(Element));
    }
  }
}

// The keys and values of one chunk: where each tile of 16 keys begins.
struct ChunkView {
  const char* k[CHUNK_TILES];
  const char* v[CHUNK_TILES];
};

// Blocks of fewer than 16 tokens are first put together here.
template <typename S>
struct Scratch {
  alignas(64) char k[CHUNK * MAX_HEAD_DIM * sizeof(typename S::Element)];
  alignas(64) char v[CHUNK * MAX_HEAD_DIM * sizeof(typename S::Element) + 64];
};

template <typename S>
INLINE ChunkView view_chunk(const AttentionArgs& args, const HeadOrder<S>& order, int64_t seq, int64_t kv_head,
                            int64_t first_key, int64_t first_needed, int64_t num_keys, Scratch<S>& scratch) {
  ChunkView view;
  const int32_t* table = args.block_table + seq * args.max_blocks;
  int64_t head_at = kv_head * order.head_bytes(), values_at = args.kv_heads * order.head_bytes();
  // Tiles outside of what is seen have no weight; another tile stands in their place.
  int64_t last_key = num_keys - 1;
  if (args.block_size >= LANES) {
    for (int64_t tile = 0; tile < CHUNK_TILES; tile++) {
      int64_t key = first_key + tile * LANES;
      if (key > last_key) key = last_key / LANES * LANES;
      if (key + LANES <= first_needed) key = first_needed / LANES * LANES;
      const char* head = args.storage + table[key / args.block_size] * args.block_bytes + head_at;
      int64_t t = key % args.block_size / LANES * LANES;
      view.k[tile] = head + order.k(t, 0);
      view.v[tile] = head + values_at + order.v(t, 0);
    }
    return view;
  }
  using Element = typename S::Element;
  HeadOrder<S> wide(LANES, args.head_dim);
  for (int64_t tile = 0; tile < CHUNK_TILES; tile++) {
    char *k = scratch.k + tile * wide.tile_bytes, *v = scratch.v + tile * wide.head_bytes();
    view.k[tile] = k;
    view.v[tile] = v;
    for (int64_t i = 0; i < LANES; i++) {
      int64_t key = first_key + tile * LANES + i;
      if (key < first_needed || key > last_key) {
        for (int64_t d = 0; d < args.head_dim; d += S::E) std::memset(k + wide.k(i, d), 0, 4);
        for (int64_t d = 0; d < args.head_dim; d++) std::memset(v + wide.v(i, d), 0, sizeof(Element));
        continue;
      }
      const char* head = args.storage + table[key / args.block_size] * args.block_bytes + head_at;
      int64_t t = key % args.block_size;
      for (int64_t d = 0; d < args.head_dim; d += S::E) std::memcpy(k + wide.k(i, d), head + order.k(t, d), 4);
      for (int64_t d = 0; d < args.head_dim; d++)
        std::memcpy(v + wide.v(i, d), head + values_at + order.v(t, d), sizeof(Element));
    }
  }
  return view;
}

// What the running softmax of some rows has come to.
struct State {
  float m[ITEM_ROWS], l[ITEM_ROWS];
  alignas(64) float acc[ITEM_ROWS][MAX_HEAD_DIM];

  void clear(int64_t rows, int64_t head_dim) {
    for (int64_t r = 0; r < rows; r++) {
      m[r] = LOWEST;
      l[r] = 0;
      std::memset(acc[r], 0, (size_t)(head_dim + LANES) * 4 > sizeof acc[r] ? sizeof acc[r] : (size_t)(head_dim + LANES) * 4);
    }
  }
};

// Scores of ROWS queries against a chunk: q [ROWS][head_dim] units against tiles of 16 keys.
template <typename S, int ROWS>
INLINE void score(f32x16 (&s)[ROWS][CHUNK_TILES], const char* const* q, const ChunkView& view, int64_t units) {
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < CHUNK_TILES; v++) s[r][v] = f32x16{};
  for (int64_t u = 0; u < units; u++)
    for (int r = 0; r < ROWS; r++) {
      uint32_t a;
      std::memcpy(&a, q[r] + u * 4, 4);
      for (int v = 0; v < CHUNK_TILES; v++) s[r][v] = S::Dot::dot(s[r][v], a, view.k[v] + u * LANES * 4);
    }
}

// acc[ROWS][VECTORS] = acc * correction + weights times values, over some units of the chunk.
template <typename S, int ROWS, int VECTORS>
INLINE void weigh(float (*acc)[MAX_HEAD_DIM], f32x16 correction, const uint32_t (*weights)[CHUNK],
                  const ChunkView& view, int64_t first_unit, int64_t units, int64_t head_dim, int64_t d) {
  f32x16 sums[ROWS][VECTORS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) sums[r][v] = load16(acc[r] + d + v * LANES) * splat(correction[r]);
  constexpr int64_t UNITS_PER_TILE = LANES / S::E;
  for (int64_t u = first_unit; u < units; u++) {
    const char* at = view.v[u / UNITS_PER_TILE] + (u % UNITS_PER_TILE * head_dim + d) * 4;
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECTORS; v++) sums[r][v] = S::Dot::dot(sums[r][v], weights[r][u], at + v * LANES * 4);
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) store16(acc[r] + d + v * LANES, sums[r][v]);
}

// The last, partly filled vector of a head: values are read one by one, so that nothing behind them is.
template <typename S, int ROWS>
INLINE void weigh_rest(float (*acc)[MAX_HEAD_DIM], f32x16 correction, const uint32_t (*weights)[CHUNK],
                       const ChunkView& view, int64_t first_unit, int64_t units, int64_t head_dim, int64_t d) {
  constexpr int64_t UNITS_PER_TILE = LANES / S::E;
  alignas(64) char padded[64] = {};
  size_t count = (size_t)(head_dim - d) * 4;
  f32x16 sums[ROWS];
  for (int r = 0; r < ROWS; r++) sums[r] = load16(acc[r] + d) * splat(correction[r]);
  for (int64_t u = first_unit; u < units; u++) {
    std::memcpy(padded, view.v[u / UNITS_PER_TILE] + (u % UNITS_PER_TILE * head_dim + d) * 4, count);
    for (int r = 0; r < ROWS; r++) sums[r] = S::Dot::dot(sums[r], weights[r][u], padded);
  }
  for (int r = 0; r < ROWS; r++) store16(acc[r] + d, sums[r]);
}

// Asks for the values of a chunk before its scores are computed. Blocks lie anywhere, so the processor does not guess them;
// with few rows there is little else to do while they come.
INLINE void ask_for_values(const ChunkView& view, int64_t tile_bytes) {
  for (int64_t tile = 0; tile < CHUNK_TILES; tile++)
    for (int64_t at = 0; at < tile_bytes; at += 64) __builtin_prefetch(view.v[tile] + at);
}

// One chunk of keys for ROWS rows.
template <typename S, int ROWS>
void chunk(const AttentionArgs& args, const ChunkView& view, const char* const* q, const int64_t* position,
           int64_t first_key, int64_t first_needed, float* m, float* l, float (*acc)[MAX_HEAD_DIM]) {
  f32x16 s[ROWS][CHUNK_TILES];
  score<S, ROWS>(s, q, view, args.head_dim / S::E);
  alignas(64) uint32_t weights[ROWS][CHUNK];
  f32x16 falls{};  // by how much each row's maximum grew, negative
  float sums[ROWS];
  i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  int64_t last = position[ROWS - 1];  // positions rise
  for (int r = 0; r < ROWS; r++) {
    int64_t newest = position[r] - first_key;
    int64_t oldest = args.window ? newest - args.window + 1 : -1;
    bool all = newest >= CHUNK - 1 && oldest <= 0;
    f32x16 most = splat(LOWEST);
    for (int v = 0; v < CHUNK_TILES; v++) {
      s[r][v] *= splat(args.scale);
      if (!all) {
        i32x16 key = lane + (int32_t)(v * LANES);
        i32x16 seen = (key <= (int32_t)(newest > CHUNK ? CHUNK : newest)) & (key >= (int32_t)(oldest < -1 ? -1 : oldest > CHUNK ? CHUNK : oldest));
        s[r][v] = select(seen, s[r][v], splat(-__builtin_inff()));
      }
      most = larger(most, s[r][v]);
    }
    float highest = largest_of(most);
    highest = highest > m[r] ? highest : m[r];
    falls[r] = m[r] - highest;
    f32x16 total{};
    for (int v = 0; v < CHUNK_TILES; v++) {
      f32x16 weight = exp(s[r][v] - splat(highest));
      total += weight;
      if constexpr (S::E == 2) store((uint16_t*)weights[r] + v * LANES, to_bf16(weight));
      else store(weights[r] + v * LANES, weight);
    }
    sums[r] = sum_of(total);
    m[r] = highest;
  }
  f32x16 correction = exp(falls);
  for (int r = 0; r < ROWS; r++) l[r] = l[r] * correction[r] + sums[r];
  int64_t keys = last - first_key + 1 < CHUNK ? last - first_key + 1 : CHUNK;
  // Only keys that somebody here sees: what is left and right of them may be anything, and zero times a NaN is one.
  int64_t first_unit = first_needed > first_key ? (first_needed - first_key) / S::E : 0;
  int64_t units = (keys + S::E - 1) / S::E;
  constexpr int VECTORS = PANEL_VECTORS;
  int64_t d = 0;
  for (; d + VECTORS * LANES <= args.head_dim; d += VECTORS * LANES)
    weigh<S, ROWS, VECTORS>(acc, correction, weights, view, first_unit, units, args.head_dim, d);
  for (; d + LANES <= args.head_dim; d += LANES) weigh<S, ROWS, 1>(acc, correction, weights, view, first_unit, units, args.head_dim, d);
  if (d < args.head_dim) weigh_rest<S, ROWS>(acc, correction, weights, view, first_unit, units, args.head_dim, d);
}

// Folds a partition, the next one after those in `into`, into the running state.
INLINE void fold(State& into, const State& part, int64_t rows, int64_t head_dim) {
  for (int64_t r = 0; r < rows; r++) {
    float highest = into.m[r] > part.m[r] ? into.m[r] : part.m[r];
    f32x16 keep = exp(splat(into.m[r] - highest)), add = exp(splat(part.m[r] - highest));
    for (int64_t d = 0; d < head_dim; d += LANES)
      store16(into.acc[r] + d, fma(load16(part.acc[r] + d), add, load16(into.acc[r] + d) * keep));
    into.l[r] = into.l[r] * keep[0] + part.l[r] * add[0];
    into.m[r] = highest;
  }
}

template <typename S>
void attend_item(const AttentionArgs& args, const AttentionItem& item) {
  using Element = typename S::Element;
  static thread_local State total, part;
  static thread_local Scratch<S> scratch;
  HeadOrder<S> order(args.block_size, args.head_dim);
  int64_t group = args.heads / args.kv_heads, rows = item.num_rows;
  int64_t first_token = args.query_start[item.seq], num_tokens = args.query_start[item.seq + 1] - first_token;
  int64_t first_position = args.seq_lens[item.seq] - num_tokens;
  int64_t stride = (args.heads + 2 * args.kv_heads) * args.head_dim;
  const char* q[ITEM_ROWS];
  int64_t position[ITEM_ROWS] = {};
  for (int64_t r = 0; r < rows; r++) {
    int64_t query = (item.first_row + r) / group, head = item.kv_head * group + (item.first_row + r) % group;
    q[r] = (const char*)((const Element*)args.qkv + (first_token + query) * stride + head * args.head_dim);
    position[r] = first_position + query;
  }
  int64_t num_keys = position[rows - 1] + 1;
  int64_t first_needed = args.window && position[0] - args.window + 1 > 0 ? position[0] - args.window + 1 : 0;
  total.clear(rows, args.head_dim);
  for (int64_t partition = first_needed / PARTITION * PARTITION; partition < num_keys; partition += PARTITION) {
    part.clear(rows, args.head_dim);
    int64_t first_chunk = partition > first_needed / CHUNK * CHUNK ? partition : first_needed / CHUNK * CHUNK;
    int64_t end = partition + PARTITION < num_keys ? partition + PARTITION : num_keys;
    for (int64_t key = first_chunk; key < end; key += CHUNK) {
      ChunkView view = view_chunk<S>(args, order, item.seq, item.kv_head, key, first_needed, num_keys, scratch);
      if (rows <= 6) ask_for_values(view, LANES * args.head_dim * (int64_t)sizeof(Element));
      for (int64_t r = 0; r < rows;) {
        int64_t count = rows - r < 6 ? rows - r : 6;
        if (position[r + count - 1] < key) {  // a tile that sees nothing of this chunk
          r += count;
          continue;
        }
        switch (count) {
          case 6: chunk<S, 6>(args, view, q + r, position + r, key, first_needed, part.m + r, part.l + r, part.acc + r); break;
          case 5: chunk<S, 5>(args, view, q + r, position + r, key, first_needed, part.m + r, part.l + r, part.acc + r); break;
          case 4: chunk<S, 4>(args, view, q + r, position + r, key, first_needed, part.m + r, part.l + r, part.acc + r); break;
          case 3: chunk<S, 3>(args, view, q + r, position + r, key, first_needed, part.m + r, part.l + r, part.acc + r); break;
          case 2: chunk<S, 2>(args, view, q + r, position + r, key, first_needed, part.m + r, part.l + r, part.acc + r); break;
          default: chunk<S, 1>(args, view, q + r, position + r, key, first_needed, part.m + r, part.l + r, part.acc + r); break;
        }
        r += count;
      }
    }
    fold(total, part, rows, args.head_dim);
  }
  for (int64_t r = 0; r < rows; r++) {
    int64_t query = (item.first_row + r) / group, head = item.kv_head * group + (item.first_row + r) % group;
    Element* out = (Element*)args.out + ((first_token + query) * args.heads + head) * args.head_dim;
    f32x16 scale = splat(1.0f / total.l[r]);
    // adding zero makes -0 of 0: which of them it is could tell how many empty chunks there were
    in_lanes(args.head_dim, [&](int64_t d, int64_t count) { set(out + d, load16(total.acc[r] + d) * scale + f32x16{}, count); });
  }
}

void write_kv(const AttentionArgs& args, const int32_t* seq_of_token, int64_t begin, int64_t end) {
  if (args.type == Dtype::f32) write_tokens<F32Storage>(args, seq_of_token, begin, end);
  else write_tokens<Bf16Storage>(args, seq_of_token, begin, end);
}

void attend(const AttentionArgs& args, const AttentionItem& item) {
  if (args.type == Dtype::f32) attend_item<F32Storage>(args, item);
  else attend_item<Bf16Storage>(args, item);
}

}  // namespace
}  // namespace twostroke
