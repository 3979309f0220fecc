// Attention over paged keys and values; prefill chunks, decodes and everything between are the same code.
//
// Keys and values come as chunks in one order and type, whatever they are stored in (kv_fetch.hpp).
//
// A row's result depends on its query, its keys and its values alone. Keys are walked in chunks of CHUNK and partitions of
// PARTITION tokens at absolute positions; inside a partition runs the online softmax of Milakov and Gimelshein 2018
// (arXiv:1805.02867), and partitions are folded from the oldest on. A chunk or a partition in which a row sees nothing
// changes nothing of it, not one bit, so it does not matter which rows share a tile.
#pragma once

#include "elementwise.hpp"
#include "kv_fetch.hpp"
#include "table.hpp"
#include "vec.hpp"

namespace twostroke {
namespace {

constexpr int64_t PARTITION = 512;
constexpr float LOWEST = -1e30f;  // the maximum of nothing; finite, so that a difference of two of them is 0

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
template <typename P, int ROWS>
INLINE void score(f32x16 (&s)[ROWS][CHUNK_TILES], const char* const* q, const ChunkView& view, int64_t units) {
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < CHUNK_TILES; v++) s[r][v] = f32x16{};
  for (int64_t u = 0; u < units; u++)
    for (int r = 0; r < ROWS; r++) {
      uint32_t a;
      std::memcpy(&a, q[r] + u * 4, 4);
      for (int v = 0; v < CHUNK_TILES; v++) s[r][v] = P::Dot::dot(s[r][v], a, view.k[v] + u * LANES * 4);
    }
}

// acc[ROWS][VECTORS] = acc * correction + weights times values, over some units of the chunk.
template <typename P, int ROWS, int VECTORS>
INLINE void weigh(float (*acc)[MAX_HEAD_DIM], f32x16 correction, const uint32_t (*weights)[CHUNK],
                  const ChunkView& view, int64_t first_unit, int64_t units, int64_t head_dim, int64_t d) {
  f32x16 sums[ROWS][VECTORS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) sums[r][v] = load16(acc[r] + d + v * LANES) * splat(correction[r]);
  constexpr int64_t UNITS_PER_TILE = LANES / P::E;
  for (int64_t u = first_unit; u < units; u++) {
    const char* at = view.v[u / UNITS_PER_TILE] + (u % UNITS_PER_TILE * head_dim + d) * 4;
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECTORS; v++) sums[r][v] = P::Dot::dot(sums[r][v], weights[r][u], at + v * LANES * 4);
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) store16(acc[r] + d + v * LANES, sums[r][v]);
}

// The last, partly filled vector of a head: values are read one by one, so that nothing behind them is.
template <typename P, int ROWS>
INLINE void weigh_rest(float (*acc)[MAX_HEAD_DIM], f32x16 correction, const uint32_t (*weights)[CHUNK],
                       const ChunkView& view, int64_t first_unit, int64_t units, int64_t head_dim, int64_t d) {
  constexpr int64_t UNITS_PER_TILE = LANES / P::E;
  alignas(64) char padded[64] = {};
  size_t count = (size_t)(head_dim - d) * 4;
  f32x16 sums[ROWS];
  for (int r = 0; r < ROWS; r++) sums[r] = load16(acc[r] + d) * splat(correction[r]);
  for (int64_t u = first_unit; u < units; u++) {
    std::memcpy(padded, view.v[u / UNITS_PER_TILE] + (u % UNITS_PER_TILE * head_dim + d) * 4, count);
    for (int r = 0; r < ROWS; r++) sums[r] = P::Dot::dot(sums[r], weights[r][u], padded);
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
template <typename P, int ROWS>
void chunk(const AttentionArgs& args, const ChunkView& view, const char* const* q, const int64_t* position,
           int64_t first_key, int64_t first_needed, float* m, float* l, float (*acc)[MAX_HEAD_DIM]) {
  f32x16 s[ROWS][CHUNK_TILES];
  score<P, ROWS>(s, q, view, args.head_dim / P::E);
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
      if constexpr (P::E == 2) store((uint16_t*)weights[r] + v * LANES, to_bf16(weight));
      else store(weights[r] + v * LANES, weight);
    }
    sums[r] = sum_of(total);
    m[r] = highest;
  }
  f32x16 correction = exp(falls);
  for (int r = 0; r < ROWS; r++) l[r] = l[r] * correction[r] + sums[r];
  int64_t keys = last - first_key + 1 < CHUNK ? last - first_key + 1 : CHUNK;
  // Only keys that somebody here sees: what is left and right of them may be anything, and zero times a NaN is one.
  int64_t first_unit = first_needed > first_key ? (first_needed - first_key) / P::E : 0;
  int64_t units = (keys + P::E - 1) / P::E;
  constexpr int VECTORS = PANEL_VECTORS;
  int64_t d = 0;
  for (; d + VECTORS * LANES <= args.head_dim; d += VECTORS * LANES)
    weigh<P, ROWS, VECTORS>(acc, correction, weights, view, first_unit, units, args.head_dim, d);
  for (; d + LANES <= args.head_dim; d += LANES) weigh<P, ROWS, 1>(acc, correction, weights, view, first_unit, units, args.head_dim, d);
  if (d < args.head_dim) weigh_rest<P, ROWS>(acc, correction, weights, view, first_unit, units, args.head_dim, d);
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

template <typename P>
void attend_item(const AttentionArgs& args, const AttentionItem& item) {
  using Element = typename P::Element;
  static thread_local State total, part;
  const FetchChunk<P> fetch = fetch_of<P>(args.format);
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
      ChunkView view = fetch(args, item, key, {first_needed, num_keys - 1});
      if (rows <= 6 && !view.decoded) ask_for_values(view, LANES * args.head_dim * (int64_t)sizeof(Element));
      for (int64_t r = 0; r < rows;) {
        int64_t count = rows - r < 6 ? rows - r : 6;
        if (position[r + count - 1] < key) {  // a tile that sees nothing of this chunk
          r += count;
          continue;
        }
        switch (count) {
          case 6: chunk<P, 6>(args, view, q + r, position + r, key, first_needed, part.m + r, part.l + r, part.acc + r); break;
          case 5: chunk<P, 5>(args, view, q + r, position + r, key, first_needed, part.m + r, part.l + r, part.acc + r); break;
          case 4: chunk<P, 4>(args, view, q + r, position + r, key, first_needed, part.m + r, part.l + r, part.acc + r); break;
          case 3: chunk<P, 3>(args, view, q + r, position + r, key, first_needed, part.m + r, part.l + r, part.acc + r); break;
          case 2: chunk<P, 2>(args, view, q + r, position + r, key, first_needed, part.m + r, part.l + r, part.acc + r); break;
          default: chunk<P, 1>(args, view, q + r, position + r, key, first_needed, part.m + r, part.l + r, part.acc + r); break;
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

void attend(const AttentionArgs& args, const AttentionItem& item) {
  if (args.type == Dtype::f32) attend_item<F32Products>(args, item);
  else attend_item<Bf16Products>(args, item);
}

}  // namespace
}  // namespace twostroke
