// Attention's products of bfloat16 in tiles of 16 rows (Intel AMX); the rest is in attention.hpp.
//
//   scores   rows x 32 dimensions   times  16 units of K x 16 keys          (a tile of K as stored)
//   values   rows x 16 keys         times   8 units of V x 16 dimensions    (a tile of V as stored)
//
// A tile may have fewer rows; a row's bits do not depend on their number. Keys that no row sees may be anything, even NaN, and
// zero times NaN is not zero. So only units of V with a wanted key are multiplied, and zeros take the place of the rest.
#pragma once

#include "amx.hpp"
#include "attention.hpp"

namespace twostroke {
namespace {

constexpr int64_t UNITS = LANES / 2;  // units of V in a tile of keys

struct AmxAttentionBuffers {
  alignas(64) uint16_t q[ITEM_ROWS][2 * ROW_FLOATS];
  alignas(64) float scores[TILE_HEIGHT][CHUNK];
  alignas(64) uint32_t weights[TILE_HEIGHT][CHUNK / 2];
  alignas(64) float values[TILE_HEIGHT][PANEL];
  alignas(64) char k_rest[CHUNK_TILES][TILE_STEPS][64];
  alignas(64) char v[CHUNK_TILES][UNITS][ROW_FLOATS * 4];
};

INLINE AmxAttentionBuffers& amx_attention_buffers() {
  static thread_local AmxAttentionBuffers buffers;
  AmxAttentionBuffers* found = &buffers;
  __asm__("" : "+r"(found));  // otherwise the thread-local address is looked up by a call at every use
  return *found;
}

// Products of an item's rows with one chunk after the other.
class InTiles {
 public:
  InTiles(const AttentionArgs& args, const Rows& rows, int64_t num_rows, State& state)
      : args_(args), rows_(rows), num_rows_(num_rows), state_(state), buffers_(amx_attention_buffers()) {
    // 0 to 3 are sums, 4 and 6 queries and keys, 5 and 7 weights and values
    TileConfig config;
    for (int tile = 0; tile < 8; tile++) {
      config.bytes[tile] = tile == 5 ? 32 : 64;
      config.rows[tile] = tile == 7 ? UNITS : 16;
    }
    load_config(config);
    size_t bytes = (size_t)args.head_dim * 2, padded = (size_t)(args.head_dim + 31) / 32 * 64;
    for (int64_t r = 0; r < num_rows; r++) {
      std::memcpy(buffers_.q[r], rows.q[r], bytes);
      std::memset((char*)buffers_.q[r] + bytes, 0, padded - bytes);
    }
  }
  ~InTiles() { _tile_release(); }

  void operator()(const ChunkView& view, int64_t first_key) {
    arrange(view, first_key);
    for (int64_t first = 0; first < num_rows_; first += TILE_HEIGHT) {
      int64_t count = num_rows_ - first < TILE_HEIGHT ? num_rows_ - first : TILE_HEIGHT;
      if (rows_.newest[first + count - 1] < first_key) continue;  // these rows see no key of the chunk
      score(view, first);
      f32x16 correction = weigh(first, count, first_key);
      for (int64_t d = 0; d < args_.head_dim; d += PANEL) add_values(first, count, d, correction);
    }
  }

 private:
  // Finds the tiles of a chunk that can be multiplied in place, and copies the rest.
  void arrange(const ChunkView& view, int64_t first_key) {
    int64_t rest = args_.head_dim / 2 % TILE_STEPS, row_bytes = args_.head_dim * 4;
    for (int64_t tile = 0; tile < CHUNK_TILES; tile++) {
      if (rest) {
        std::memcpy(buffers_.k_rest[tile], view.k[tile] + (args_.head_dim / 2 - rest) * 64, (size_t)rest * 64);
        std::memset(buffers_.k_rest[tile][rest], 0, (size_t)(TILE_STEPS - rest) * 64);
      }
      int64_t key = first_key + tile * LANES;
      int64_t from = rows_.keys.first > key ? (rows_.keys.first - key) / 2 : 0;
      int64_t to = rows_.keys.end - key < LANES ? (rows_.keys.end - key + 1) / 2 : UNITS;
      v_[tile] = to > from ? view.v[tile] : nullptr;
      v_bytes_[tile] = row_bytes;
      if (to <= from || (from == 0 && to == UNITS && args_.head_dim % LANES == 0)) continue;
      for (int64_t unit = 0; unit < UNITS; unit++)
        if (unit >= from && unit < to) std::memcpy(buffers_.v[tile][unit], view.v[tile] + unit * row_bytes, (size_t)row_bytes);
        else std::memset(buffers_.v[tile][unit], 0, (size_t)row_bytes);
      v_[tile] = buffers_.v[tile][0];
      v_bytes_[tile] = ROW_FLOATS * 4;
    }
  }

  void score(const ChunkView& view, int64_t first) const {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    auto add = [](const char* q, const char* k0, const char* k1, const char* k2, const char* k3) {
      TILE_LOAD(4, q, ROW_FLOATS * 4);
      TILE_LOAD(6, k0, 64);
      _tile_dpbf16ps(0, 4, 6);
      TILE_LOAD(6, k1, 64);
      _tile_dpbf16ps(1, 4, 6);
      TILE_LOAD(6, k2, 64);
      _tile_dpbf16ps(2, 4, 6);
      TILE_LOAD(6, k3, 64);
      _tile_dpbf16ps(3, 4, 6);
    };
    const char* q = (const char*)buffers_.q[first];
    int64_t units = args_.head_dim / 2, whole = units / TILE_STEPS * TILE_STEPS;
    for (int64_t at = 0; at < whole * 64; at += TILE_STEPS * 64, q += 64)
      add(q, view.k[0] + at, view.k[1] + at, view.k[2] + at, view.k[3] + at);
    if (whole < units)
      add(q, buffers_.k_rest[0][0], buffers_.k_rest[1][0], buffers_.k_rest[2][0], buffers_.k_rest[3][0]);
    TILE_STORE(0, buffers_.scores[0], CHUNK * 4);
    TILE_STORE(1, buffers_.scores[0] + 16, CHUNK * 4);
    TILE_STORE(2, buffers_.scores[0] + 32, CHUNK * 4);
    TILE_STORE(3, buffers_.scores[0] + 48, CHUNK * 4);
  }

  // Turns scores into weights; returns the factors of the sums so far.
  f32x16 weigh(int64_t first, int64_t count, int64_t first_key) {
    f32x16 falls{}, sums{};
    float *m = state_.m + first, *l = state_.l + first;
    for (int64_t r = 0; r < count; r++) {
      f32x16 s[CHUNK_TILES];
      for (int64_t v = 0; v < CHUNK_TILES; v++) s[v] = load16(buffers_.scores[r] + v * LANES);
      float before = m[r];
      sums[r] = weights_of<Bf16Products>(args_, rows_, first + r, first_key, s, m[r], buffers_.weights[r]);
      falls[r] = before - m[r];
    }
    f32x16 correction = exp(falls);
    for (int64_t r = 0; r < count; r++) l[r] = l[r] * correction[r] + sums[r];
    return correction;
  }

  // Adds the values of four vectors of dimensions from d on.
  void add_values(int64_t first, int64_t count, int64_t d, f32x16 correction) {
    int64_t vectors = (args_.head_dim - d + LANES - 1) / LANES;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t tile = 0; tile < CHUNK_TILES; tile++) {
      if (!v_[tile]) continue;
      const char* v = v_[tile] + d * 4;
      TILE_LOAD(5, (const char*)buffers_.weights[0] + tile * LANES * 2, CHUNK * 2);
      TILE_LOAD(7, v, v_bytes_[tile]);
      _tile_dpbf16ps(0, 5, 7);
      if (vectors > 1) {
        TILE_LOAD(7, v + 64, v_bytes_[tile]);
        _tile_dpbf16ps(1, 5, 7);
      }
      if (vectors > 2) {
        TILE_LOAD(7, v + 128, v_bytes_[tile]);
        _tile_dpbf16ps(2, 5, 7);
      }
      if (vectors > 3) {
        TILE_LOAD(7, v + 192, v_bytes_[tile]);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    TILE_STORE(0, buffers_.values[0], STEP_BYTES);
    if (vectors > 1) TILE_STORE(1, buffers_.values[0] + 16, STEP_BYTES);
    if (vectors > 2) TILE_STORE(2, buffers_.values[0] + 32, STEP_BYTES);
    if (vectors > 3) TILE_STORE(3, buffers_.values[0] + 48, STEP_BYTES);
    if (vectors > PANEL_VECTORS) vectors = PANEL_VECTORS;
    for (int64_t r = 0; r < count; r++) {
      float* acc = state_.acc[first + r] + d;
      for (int64_t v = 0; v < vectors; v++)
        store16(acc + v * LANES, fma(load16(acc + v * LANES), splat(correction[r]), load16(buffers_.values[r] + v * LANES)));
    }
  }

  const AttentionArgs& args_;
  const Rows& rows_;
  int64_t num_rows_;
  State& state_;
  AmxAttentionBuffers& buffers_;
  const char* v_[CHUNK_TILES];
  int64_t v_bytes_[CHUNK_TILES];
};

template <>
struct ProductsOf<Bf16Products> {
  using Type = InTiles;
};

}  // namespace
}  // namespace twostroke
