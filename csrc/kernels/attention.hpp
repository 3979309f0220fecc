// Attention over paged keys and values; prefill chunks and decodes run the same code.
//
// Keys and values come as chunks in one order and type, for every stored format (kv_fetch.hpp).
//
// A row's result depends only on its query, its keys and its values. Keys are walked in chunks of CHUNK and partitions of
// PARTITION tokens at absolute positions. Within a partition runs the online softmax of Milakov and Gimelshein 2018
// (arXiv:1805.02867), and partitions are folded from the oldest on. A chunk or a partition in which a row sees nothing
// changes no bit of it, so the other rows of its tile do not matter.
#pragma once

#include "attention_items.hpp"
#include "elementwise.hpp"
#include "hadamard.hpp"
#include "kv_fetch.hpp"
#include "table.hpp"
#include "vec.hpp"

namespace twostroke {
namespace {

constexpr float LOWEST = -1e30f;  // maximum of an empty set; finite, so that a difference of two of them is 0

// Not a power of two, or rows would share the same few sets of the cache.
constexpr int64_t ROW_FLOATS = MAX_HEAD_DIM + LANES;

// State of the running softmax of some rows.
struct State {
  float m[ITEM_ROWS], l[ITEM_ROWS];
  alignas(64) float acc[ITEM_ROWS][ROW_FLOATS];

  void clear(int64_t rows, int64_t head_dim) {
    for (int64_t r = 0; r < rows; r++) {
      m[r] = LOWEST;
      l[r] = 0;
      std::memset(acc[r], 0, (size_t)(head_dim + LANES) * 4 > sizeof acc[r] ? sizeof acc[r] : (size_t)(head_dim + LANES) * 4);
    }
  }
};

// Computes scores of ROWS queries for a chunk: q [ROWS], inputs of head_dim, times tiles of 16 keys.
template <typename P, int ROWS>
INLINE void score(f32x16 (&s)[ROWS][CHUNK_TILES], const char* const* q, const ChunkView& view, int64_t units) {
  constexpr int VECTORS = TILE_VECTORS<ROWS>;
  for (int first = 0; first < CHUNK_TILES; first += VECTORS) {
    f32x16 sums[ROWS][VECTORS] = {};
    for (int64_t u = 0; u < units; u++)
      add_step<typename P::Dot>(sums, [&](int r) { return q[r] + u * P::Dot::TERMS * 4; },
                                [&](int v) { return view.k[first + v] + u * LANES * 4; });
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECTORS; v++) s[r][first + v] = sums[r][v];
  }
}

// acc[ROWS][VECTORS] = acc * correction + weights times values, over units of the chunk.
template <typename P, int ROWS, int VECTORS>
INLINE void weigh(float (*acc)[ROW_FLOATS], f32x16 correction, const uint32_t (*weights)[CHUNK],
                  const ChunkView& view, int64_t first_unit, int64_t units, int64_t head_dim, int64_t d) {
  f32x16 sums[ROWS][VECTORS];
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) sums[r][v] = load16(acc[r] + d + v * LANES) * splat(correction[r]);
  constexpr int64_t UNITS_PER_TILE = LANES / P::E;
  for (int64_t u = first_unit; u < units; u++) {
    const char* at = view.v[u / UNITS_PER_TILE] + (u % UNITS_PER_TILE * head_dim + d) * 4;
    add_step<typename P::Dot>(sums, [&](int r) { return (const char*)(weights[r] + u * P::Dot::TERMS); },
                              [&](int v) { return at + v * LANES * 4; });
  }
  for (int r = 0; r < ROWS; r++)
    for (int v = 0; v < VECTORS; v++) store16(acc[r] + d + v * LANES, sums[r][v]);
}

// weigh for the last, partial vector of a head: values are read one by one, so that nothing after them is read.
template <typename P, int ROWS>
INLINE void weigh_rest(float (*acc)[ROW_FLOATS], f32x16 correction, const uint32_t (*weights)[CHUNK],
                       const ChunkView& view, int64_t first_unit, int64_t units, int64_t head_dim, int64_t d) {
  constexpr int64_t UNITS_PER_TILE = LANES / P::E;
  alignas(64) char padded[64] = {};
  size_t count = (size_t)(head_dim - d) * 4;
  f32x16 sums[ROWS][1];
  for (int r = 0; r < ROWS; r++) sums[r][0] = load16(acc[r] + d) * splat(correction[r]);
  for (int64_t u = first_unit; u < units; u++) {
    std::memcpy(padded, view.v[u / UNITS_PER_TILE] + (u % UNITS_PER_TILE * head_dim + d) * 4, count);
    add_step<typename P::Dot>(sums, [&](int r) { return (const char*)(weights[r] + u * P::Dot::TERMS); },
                              [&](int) { return (const char*)padded; });
  }
  for (int r = 0; r < ROWS; r++) store16(acc[r] + d, sums[r][0]);
}

// Prefetches the values of a chunk before its scores are computed. Blocks lie anywhere, so the processor cannot predict them,
// and with few rows there is little other work while they arrive.
INLINE void ask_for_values(const ChunkView& view, int64_t tile_bytes) {
  for (int64_t tile = 0; tile < CHUNK_TILES; tile++)
    for (int64_t at = 0; at < tile_bytes; at += 64) __builtin_prefetch(view.v[tile] + at);
}

// Returns row r's query as input of the products: transformed for keys in int4, rounded if the products are narrower than T.
template <typename P, typename T>
INLINE const char* inputs_of(const AttentionArgs& args, const T* query, int64_t r) {
  using Input = typename P::Dot::Input;
  using Element = typename P::Element;
  bool transformed = args.format == KvFormat::int4;
  if constexpr (std::is_same_v<T, Element> && std::is_same_v<Input, Element>)
    if (!transformed) return (const char*)query;
  static thread_local Input inputs[ITEM_ROWS][ROW_FLOATS];
  alignas(64) float wide[ROW_FLOATS];
  in_lanes(args.head_dim, [&](int64_t d, int64_t count) { set(wide + d, get(query + d, count), count); });
  if (transformed) hadamard_back(wide, args.head_dim);
  in_lanes(args.head_dim, [&](int64_t d, int64_t count) {
    set(inputs[r] + d, rounded(get(wide + d, count), Element{}), count);
  });
  return (const char*)inputs[r];
}

// Rows of an item: queries, and the keys they see.
struct Rows {
  const char* q[ITEM_ROWS];
  int64_t oldest[ITEM_ROWS], newest[ITEM_ROWS];  // keys; `newest` is rising
  const uint64_t* tree[ITEM_ROWS];               // keys seen from first_own on (see tree_row)
  float slope[ITEM_ROWS];                        // from AttentionArgs::slopes
  int64_t first_own, tree_words;
  KeySpan keys;  // keys of all rows together

  template <typename P>
  Rows(const AttentionArgs& args, const AttentionItem& item, P)
      : first_own(first_own_key(args, item.seq)), tree_words(twostroke::tree_words(args, item.seq)), keys(keys_of(args, item)) {
    int64_t group = args.heads / args.kv_heads, stride = args.token_heads * args.head_dim;
    for (int64_t r = 0; r < item.num_rows; r++) {
      int64_t query = (item.first_row + r) / group, head = item.kv_head * group + (item.first_row + r) % group;
      int64_t at = (args.query_start[item.seq] + query) * stride + head * args.head_dim;
      with_type(args.type, [&]<typename T>(T) { q[r] = inputs_of<P>(args, (const T*)args.qkv + at, r); });
      oldest[r] = oldest_key(args, item.seq, query);
      newest[r] = first_own + query;
      tree[r] = tree_row(args, item.seq, query);
      slope[r] = args.slopes ? args.slopes[head] : 0;
    }
  }

  // Returns the keys from first_key on that row r sees by its tree, one bit each.
  uint64_t tree_bits(int64_t r, int64_t first_key) const {
    int64_t own = first_key - first_own;
    if (own <= -CHUNK) return ~0ull;
    if (own < 0) return tree[r][0] << -own | ((1ull << -own) - 1);
    int64_t word = own / 64, shift = own % 64;
    uint64_t bits = word < tree_words ? tree[r][word] >> shift : 0;
    if (shift && word + 1 < tree_words) bits |= tree[r][word + 1] << (64 - shift);
    return bits;
  }
};

// Returns bit i in lane i.
INLINE u32x16 lane_bits() {
  alignas(64) static constexpr uint32_t BITS[LANES] = {0x1,   0x2,   0x4,   0x8,   0x10,   0x20,   0x40,   0x80,
                                                       0x100, 0x200, 0x400, 0x800, 0x1000, 0x2000, 0x4000, 0x8000};
  return load<u32x16>(BITS);
}

INLINE int32_t clamped(int64_t value) { return (int32_t)(value < -1 ? -1 : value > CHUNK ? CHUNK : value); }

// Turns a row's scores into the weights of its keys [first_key, first_key + CHUNK), as inputs of the products, and updates the
// row's maximum m. Returns the sum of the weights.
template <typename P>
INLINE float weights_of(const AttentionArgs& args, const Rows& rows, int64_t row, int64_t first_key, f32x16 (&s)[CHUNK_TILES],
                        float& m, uint32_t* weights) {
  int64_t newest = rows.newest[row] - first_key, oldest = rows.oldest[row] - first_key;
  uint64_t bits = rows.tree[row] ? rows.tree_bits(row, first_key) : ~0ull;
  bool all = newest >= CHUNK - 1 && oldest <= 0 && bits == ~0ull;
  f32x16 most = splat(LOWEST);
  for (int v = 0; v < CHUNK_TILES; v++) {
    s[v] *= splat(args.scale);
    // tanh(y) = 1 - 2 / (1 + exp(2 y))
    if (args.cap > 0) s[v] = splat(args.cap) - splat(2 * args.cap) / (splat(1.0f) + exp(s[v] * splat(2 / args.cap)));
    if (args.slopes) s[v] = fma(to_float(lane_numbers() + (int32_t)(v * LANES - newest)), splat(rows.slope[row]), s[v]);
    if (!all) {
      i32x16 key = lane_numbers() + (int32_t)(v * LANES);
      i32x16 seen = (key <= clamped(newest)) & (key >= clamped(oldest));
      seen &= (splat((uint32_t)(bits >> v * LANES)) & lane_bits()) != 0;
      s[v] = select(seen, s[v], splat(-__builtin_inff()));
    }
    most = larger(most, s[v]);
  }
  float highest = largest_of(most);
  m = highest > m ? highest : m;
  f32x16 total{};
  for (int v = 0; v < CHUNK_TILES; v++) {
    f32x16 weight = exp(s[v] - splat(m));
    total += weight;
    using Input = typename P::Dot::Input;
    if constexpr (std::is_same_v<Input, typename P::Element>) store16((Input*)weights + v * LANES, weight);
    else store16((Input*)weights + v * LANES, rounded(weight, typename P::Element{}));
  }
  return sum_of(total);
}

// Attends to one chunk of keys with ROWS rows, from row `first` on.
template <typename P, int ROWS>
void chunk(const AttentionArgs& args, const ChunkView& view, const Rows& rows, int64_t first, int64_t first_key, State& state) {
  f32x16 s[ROWS][CHUNK_TILES];
  score<P, ROWS>(s, rows.q + first, view, args.head_dim / P::E);
  alignas(64) uint32_t weights[ROWS][CHUNK];
  f32x16 falls{};  // negative growth of each row's maximum
  float sums[ROWS];
  float *m = state.m + first, *l = state.l + first;
  for (int r = 0; r < ROWS; r++) {
    float before = m[r];
    sums[r] = weights_of<P>(args, rows, first + r, first_key, s[r], m[r], weights[r]);
    set_lane(falls, r, before - m[r]);
  }
  f32x16 correction = exp(falls);
  for (int r = 0; r < ROWS; r++) l[r] = l[r] * correction[r] + sums[r];
  int64_t last = rows.newest[first + ROWS - 1];
  int64_t keys = last - first_key + 1 < CHUNK ? last - first_key + 1 : CHUNK;
  // Only keys that some row sees: keys before and after them may be anything, and zero times NaN is NaN.
  int64_t first_unit = rows.keys.first > first_key ? (rows.keys.first - first_key) / P::E : 0;
  int64_t units = (keys + P::E - 1) / P::E;
  float(*acc)[ROW_FLOATS] = state.acc + first;
  constexpr int VECTORS = TILE_VECTORS<ROWS>;
  int64_t d = 0;
  for (; d + VECTORS * LANES <= args.head_dim; d += VECTORS * LANES)
    weigh<P, ROWS, VECTORS>(acc, correction, weights, view, first_unit, units, args.head_dim, d);
  for (; VECTORS > 1 && d + LANES <= args.head_dim; d += LANES)
    weigh<P, ROWS, 1>(acc, correction, weights, view, first_unit, units, args.head_dim, d);
  if (d < args.head_dim) weigh_rest<P, ROWS>(acc, correction, weights, view, first_unit, units, args.head_dim, d);
}

// Folds the next partition into the running state `into`.
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

// Folds in each head's sink, like a last partition of one key without a value.
INLINE void fold_sinks(const AttentionArgs& args, const AttentionItem& item, State& into, State& part) {
  int64_t group = args.heads / args.kv_heads;
  part.clear(item.num_rows, args.head_dim);
  for (int64_t r = 0; r < item.num_rows; r++) {
    part.m[r] = args.sinks[item.kv_head * group + (item.first_row + r) % group];
    part.l[r] = 1;
  }
  fold(into, part, item.num_rows, args.head_dim);
}

// Products of an item's rows with one chunk after the other, in vectors.
template <typename P>
struct InVectors {
  const AttentionArgs& args;
  const Rows& rows;
  int64_t num_rows;
  State& state;

  INLINE void operator()(const ChunkView& view, int64_t first_key) const {
    in_tiles<TILE_ROWS>(num_rows, [&]<int ROWS>(int64_t r) {
      if (rows.newest[r + ROWS - 1] >= first_key)  // otherwise these rows see no key of the chunk
        chunk<P, ROWS>(args, view, rows, r, first_key, state);
    });
  }
};

template <typename P>
struct ProductsOf {
  using Type = InVectors<P>;
};

}  // namespace
}  // namespace twostroke

#if defined(__AMX_BF16__)
#include "amx_attention.hpp"
#endif

namespace twostroke {
namespace {

// Attends to one partition of keys with all rows of an item, from an empty state.
template <typename P>
void attend_keys(const AttentionArgs& args, const AttentionItem& item, const Rows& rows, int64_t partition, State& state) {
  const FetchChunk<P> fetch = fetch_of<P>(args.format);
  state.clear(item.num_rows, args.head_dim);
  int64_t begin = partition * PARTITION, end = begin + PARTITION < rows.keys.end ? begin + PARTITION : rows.keys.end;
  if (begin < rows.keys.first) begin = rows.keys.first / CHUNK * CHUNK;
  typename ProductsOf<P>::Type products{args, rows, item.num_rows, state};
  for (int64_t key = begin; key < end; key += CHUNK) {
    ChunkView view = fetch(args, item, key, {rows.keys.first, rows.keys.end - 1});
    if (item.num_rows <= 6 && !view.decoded) ask_for_values(view, LANES * args.head_dim * (int64_t)sizeof(typename P::Element));
    products(view, key);
  }
}

template <typename T>
void write_out(const AttentionArgs& args, const AttentionItem& item, const State& state) {
  int64_t group = args.heads / args.kv_heads;
  for (int64_t r = 0; r < item.num_rows; r++) {
    int64_t query = (item.first_row + r) / group, head = item.kv_head * group + (item.first_row + r) % group;
    T* out = (T*)args.out + ((args.query_start[item.seq] + query) * args.heads + head) * args.head_dim;
    f32x16 scale = splat(1.0f / state.l[r]);
    alignas(64) float wide[ROW_FLOATS];
    const float* weighed = state.acc[r];
    if (args.format == KvFormat::int4) {
      in_lanes(args.head_dim, [&](int64_t d, int64_t count) { set(wide + d, load16(weighed + d), count); });
      hadamard_back(wide, args.head_dim);
      weighed = wide;
    }
    // adding zero makes +0 of -0, whose sign would depend on the number of empty chunks
    in_lanes(args.head_dim, [&](int64_t d, int64_t count) { set(out + d, get(weighed + d, count) * scale + f32x16{}, count); });
  }
}

// Calls f with the type of attention's products: float32 where keys and values are stored in it, otherwise bfloat16, for every
// type of activations. Narrower keys and values gain nothing from wider products, which no matrix unit has.
template <typename F>
INLINE void with_products(const AttentionArgs& args, const F& f) {
  if (args.type == Dtype::f32 && args.format == KvFormat::f32) f(F32Products{});
  else f(Bf16Products{});
}

// Keeps a thread-local address, which the compiler would look up by a call at every use.
INLINE State& found(State* state) {
  __asm__("" : "+r"(state));
  return *state;
}
INLINE State& partition_state() {
  static thread_local State state;
  return found(&state);
}
INLINE State& total_state() {
  static thread_local State state;
  return found(&state);
}

void attend(const AttentionArgs& args, const AttentionItem& item) {
  with_products(args, [&]<typename P>(P) {
    Rows rows(args, item, P{});
    State &total = total_state(), &part = partition_state();
    total.clear(item.num_rows, args.head_dim);
    for (int64_t i = 0; i < rows.keys.num_partitions(); i++) {
      attend_keys<P>(args, item, rows, rows.keys.first_partition() + i, part);
      fold(total, part, item.num_rows, args.head_dim);
    }
    if (args.sinks) fold_sinks(args, item, total, part);
    with_type(args.type, [&]<typename T>(T) { write_out<T>(args, item, total); });
  });
}

void attend_partition(const AttentionArgs& args, const AttentionItem& item, int64_t partition, float* outcome) {
  State& part = partition_state();
  with_products(args, [&]<typename P>(P) {
    Rows rows(args, item, P{});
    attend_keys<P>(args, item, rows, partition, part);
  });
  int64_t row_floats = outcome_row_floats(args.head_dim);
  for (int64_t r = 0; r < item.num_rows; r++, outcome += row_floats) {
    outcome[0] = part.m[r];
    outcome[1] = part.l[r];
    std::memcpy(outcome + LANES, part.acc[r], (size_t)(row_floats - LANES) * 4);
  }
}

void combine(const AttentionArgs& args, const AttentionItem& item, const float* outcomes) {
  State &total = total_state(), &part = partition_state();
  int64_t row_floats = outcome_row_floats(args.head_dim);
  total.clear(item.num_rows, args.head_dim);
  for (int64_t i = 0; i < keys_of(args, item).num_partitions(); i++) {
    for (int64_t r = 0; r < item.num_rows; r++, outcomes += row_floats) {
      part.m[r] = outcomes[0];
      part.l[r] = outcomes[1];
      std::memcpy(part.acc[r], outcomes + LANES, (size_t)(row_floats - LANES) * 4);
    }
    fold(total, part, item.num_rows, args.head_dim);
  }
  if (args.sinks) fold_sinks(args, item, total, part);
  with_type(args.type, [&]<typename T>(T) { write_out<T>(args, item, total); });
}

}  // namespace
}  // namespace twostroke
