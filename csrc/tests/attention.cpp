// Paged attention: each request is compared with dense softmax in double, and its bits under every schedule with each other.
#include <algorithm>
#include <cmath>
#include <limits>

#include "operators.hpp"
#include "tests/harness.hpp"
#include "threads.hpp"

namespace twostroke::tests {
namespace {

constexpr KvFormat FORMATS[] = {KvFormat::f32, KvFormat::bf16, KvFormat::int8, KvFormat::int4};
const char* name_of(KvFormat format) {
  return format == KvFormat::f32 ? "f32" : format == KvFormat::bf16 ? "bf16" : format == KvFormat::int8 ? "int8" : "int4";
}
template <typename T>  // type of activations
constexpr KvFormat OWN_FORMAT = TYPE<T> == (int)Dtype::f32 ? KvFormat::f32 : KvFormat::bf16;
bool is_quantized(KvFormat format) { return format == KvFormat::int8 || format == KvFormat::int4; }

// Bytes of one token's K, or V, in one head.
int64_t slot_bytes(KvFormat format, int64_t head_dim) {
  switch (format) {
    case KvFormat::f32: return head_dim * 4;
    case KvFormat::bf16: return head_dim * 2;
    case KvFormat::int8: return head_dim + 4;
    case KvFormat::int4: return head_dim / 2 + 4;
  }
  return 0;
}

// Hadamard transform of each block of a vector, by its definition; the divisors' product is the block size.
int64_t hadamard_block(int64_t n) {
  int64_t block = 1;
  while (n / 2 % (2 * block) == 0 && n / 2 >= 2 * block) block *= 2;
  return n >= 16 && block * 2 == n ? n : block;
}
void hadamard(std::vector<float>& x, float divisor) {
  size_t block = (size_t)hadamard_block((int64_t)x.size());
  for (float& v : x) v /= divisor;
  for (size_t stride = 1; stride < block; stride *= 2) {
    std::vector<float> before = x;
    for (size_t i = 0; i < x.size(); i++)
      x[i] = i / stride % 2 ? before[i - stride] - before[i] : before[i] + before[i + stride];
  }
}

// Whether attention's products are float32: if activations, keys and values are. Otherwise they are bfloat16.
template <typename T>
constexpr bool is_wide(KvFormat format) {
  return std::is_same_v<T, float> && format == KvFormat::f32;
}
template <typename T>
void round_for_products(std::vector<float>& values, KvFormat format) {
  if (is_wide<T>(format)) return;
  for (float& v : values) v = value_of(nearest<uint16_t>(v));
}

// Stored vector as input of the products, transformed for int4; see src/twostroke/config/kv_format.py.
template <typename T>
std::vector<float> stored(const T* x, int64_t n, KvFormat format) {
  std::vector<float> values;
  for (int64_t i = 0; i < n; i++) values.push_back(value_of(x[i]));
  if (is_quantized(format)) {
    bool in_cells = format == KvFormat::int4;
    if (in_cells) hadamard(values, (float)(1 << (int)std::log2(hadamard_block(n)) / 2));
    float levels = in_cells ? 15 : 255, low = values[0], high = values[0];
    for (float v : values) low = std::min(low, v), high = std::max(high, v);
    float zero = half_value(nearest_half(in_cells ? low + (high - low) / 32 : low));
    float step = in_cells ? (high - low) / 16 : (high - zero) / levels;
    float scale = half_value(nearest_half(std::max(0.0f, step))), inverse = scale > 0 ? 1.0f / scale : 0.0f;
    for (float& v : values) {
      float code = std::nearbyint(std::clamp((v - zero) * inverse, 0.0f, levels));
      v = (float)((double)zero + (double)scale * code);
    }
  } else if (format == KvFormat::bf16) {
    for (float& v : values) v = value_of(nearest<uint16_t>(v));
  }
  round_for_products<T>(values, format);
  return values;
}

// Divisor of vectors in int4 that are read.
float read_divisor(int64_t n) { return (float)(1 << ((int)std::log2(hadamard_block(n)) + 1) / 2); }

// Query as input of the products.
template <typename T>
std::vector<float> asked(const T* x, int64_t n, KvFormat format) {
  std::vector<float> values;
  for (int64_t i = 0; i < n; i++) values.push_back(value_of(x[i]));
  if (format == KvFormat::int4) hadamard(values, read_divisor(n));
  round_for_products<T>(values, format);
  return values;
}

struct Shape {
  int64_t heads, kv_heads, head_dim, block_size, window;
  Values values = Values::normal;
  KvFormat format = KvFormat::f32;
  float cap = 0;
  bool has_sinks = false, has_slopes = false;

  // Sinks by head: above, among and below usual scores.
  std::vector<float> sinks() const { return of_heads(has_sinks, [](int64_t h) { return 6.0f - 3.0f * (float)h; }); }
  std::vector<float> slopes() const { return of_heads(has_slopes, [](int64_t h) { return std::exp2(-1.0f - (float)h); }); }

 private:
  template <typename F>
  std::vector<float> of_heads(bool has, F value) const {
    std::vector<float> values;
    for (int64_t h = 0; has && h < heads; h++) values.push_back(value(h));
    return values;
  }
};

// Head sizes, groups of heads, block sizes and windows, in pairs rather than in all combinations.
constexpr Shape SHAPES[] = {
    {4, 2, 64, 16, 0},   {7, 1, 80, 32, 0},   {2, 2, 96, 1, 0},    {8, 1, 128, 128, 0}, {2, 1, 256, 16, 0},
    {4, 2, 16, 8, 37},   {3, 3, 8, 2, 1},     {6, 1, 24, 4, 200},  {2, 1, 512, 16, 5},  {4, 1, 2, 64, 64},
    {4, 2, 64, 16, 0, Values::large}, {4, 2, 80, 16, 0, Values::tiny}, {4, 2, 96, 16, 50, Values::mixed},
    {4, 2, 64, 8, 0, Values::opposed}, {4, 2, 64, 16, 0, Values::sparse},
};
// Lengths around the borders of blocks and chunks; fewer where values or the format are tested, to save time under sanitizers
// and on emulated processors.
std::vector<int64_t> lens_of(const Shape& shape, KvFormat own) {
  if (shape.values == Values::normal && shape.head_dim < 256 && shape.format == own) return {1, 2, 15, 17, 64, 65, 130};
  return {3, 66};
}

template <typename T>
struct Request {
  Shape shape;
  int64_t len;
  std::vector<T> qkv;          // [len, heads + 2 kv_heads, head_dim]
  std::vector<float> products;  // qkv with K and V as they are read back

  Request(Shape shape, int64_t len, uint64_t seed) : shape(shape), len(len) {
    Random random(seed);
    int64_t d = shape.head_dim, heads = shape.heads + 2 * shape.kv_heads;
    qkv = random_elements<T>(random, len * heads * d, shape.values);
    // Only V gets large values: scores of 1e32 would leave nothing to compare.
    for (int64_t i = 0; i < (int64_t)qkv.size() && shape.values == Values::large; i++)
      if (i / d % heads < shape.heads + shape.kv_heads) qkv[(size_t)i] = nearest<T>(1e-16 * value_of(qkv[(size_t)i]));
    for (int64_t i = 0; i < len * heads; i++)
      for (float v : i % heads < shape.heads ? asked(&qkv[(size_t)(i * d)], d, shape.format) : stored(&qkv[(size_t)(i * d)], d, shape.format))
        products.push_back(v);
  }

  int64_t width() const { return (shape.heads + 2 * shape.kv_heads) * shape.head_dim; }
  // Heads of one token: those of q, then of K, then of V.
  const float* head(int64_t token, int64_t head) const { return &products[(size_t)(token * width() + head * shape.head_dim)]; }
  float scale() const {
    // scores of numbers around a million are scaled down, so that more than one key counts
    double usual = 1 / std::sqrt((double)shape.head_dim);
    return (float)(shape.values == Values::opposed ? usual * 1e-12 : shape.values == Values::mixed ? usual * 1e-11 : usual);
  }

  void check(const T* out, int64_t token, const std::string& name) const {
    int64_t first = shape.window ? std::max<int64_t>(0, token - shape.window + 1) : 0, d = shape.head_dim;
    std::vector<float> sinks = shape.sinks(), slopes = shape.slopes();
    for (int64_t h = 0; h < shape.heads; h++) {
      int64_t k_head = shape.heads + h / (shape.heads / shape.kv_heads), v_head = k_head + shape.kv_heads;
      std::vector<double> scores;
      double highest = -INFINITY, score_error = 0, total = 0;
      if (shape.has_sinks) highest = sinks[(size_t)h];
      for (int64_t key = first; key <= token; key++) {
        double score = 0, magnitude = 0;
        for (int64_t i = 0; i < d; i++) {
          double term = (double)head(token, h)[i] * head(key, k_head)[i] * scale();
          score += term;
          magnitude += std::fabs(term);
        }
        if (shape.has_slopes) {
          double loss = (double)slopes[(size_t)h] * (double)(token - key);
          score -= loss, magnitude += loss;
        }
        if (shape.cap > 0) score = shape.cap * std::tanh(score / shape.cap), magnitude += shape.cap;
        scores.push_back(score);
        highest = std::max(highest, score);
        score_error = std::max(score_error, magnitude * (double)(d + 4) * 0x1p-24);
      }
      if (shape.has_sinks) total = std::exp(sinks[(size_t)h] - highest);
      for (double& score : scores) total += score = std::exp(score - highest);
      // Weights have the error of their scores, and are rounded before they are multiplied with values.
      double rounding = is_wide<T>(shape.format) ? ROUNDING<float> : ROUNDING<uint16_t>;
      double relative = 4 * score_error + 2.1 * rounding + (double)(token - first + 32) * 0x1p-23;
      std::vector<float> results;
      std::vector<double> magnitudes;
      for (int64_t i = 0; i < d; i++) {
        double value = 0, magnitude = 0;
        for (int64_t key = first; key <= token; key++) {
          double term = scores[(size_t)(key - first)] / total * head(key, v_head)[i];
          value += term;
          magnitude += std::fabs(term);
        }
        results.push_back((float)value);
        magnitudes.push_back(magnitude);
      }
      if (shape.format == KvFormat::int4) {
        hadamard(results, read_divisor(d));
        int64_t block = hadamard_block(d);
        std::vector<double> before = magnitudes;
        for (int64_t i = 0; i < d; i++) {
          double sum = 0;
          for (int64_t j = i / block * block; j < (i / block + 1) * block; j++) sum += before[(size_t)j];
          magnitudes[(size_t)i] = sum / (double)read_divisor(d);
        }
        relative += 12 * 0x1p-23;  // error of the transform's sums, here and in the kernel
      }
      for (int64_t i = 0; i < d; i++) {
        double value = results[(size_t)i], magnitude = magnitudes[(size_t)i];
        expect_close(value_of(out[h * d + i]), value, relative * magnitude + std::fabs(value) * (ROUNDING<T> + 0x1p-23) + 0x1p-120,
                     [&] { return text(name, " len=", len, " token=", token, " head=", h, " d=", i); });
      }
    }
  }
};

// Storage full of NaN, with requests in scattered blocks of it; the second of two layers in each block.
template <typename T>
class Pool {
 public:
  Pool(const Kernels& kernels, std::vector<Request<T>> requests, uint64_t seed = 1)
      : kernels_(kernels), requests_(std::move(requests)), shape_(requests_[0].shape), done_(requests_.size()), sinks_(shape_.sinks()),
        slopes_(shape_.slopes()) {
    int64_t num_blocks = 2;  // without an owner
    for (const auto& request : requests_) {
      blocks_needed_.push_back((request.len + shape_.block_size - 1) / shape_.block_size);
      max_blocks_ = std::max(max_blocks_, blocks_needed_.back() + 1);
      num_blocks += blocks_needed_.back();
      outputs_.emplace_back((size_t)(request.len * shape_.heads * shape_.head_dim));
    }
    for (int64_t i = 0; i < num_blocks; i++) free_.push_back((int32_t)i);
    Random random(seed);
    for (int64_t i = num_blocks - 1; i > 0; i--) std::swap(free_[(size_t)i], free_[(size_t)random.below(i + 1)]);
    layer_bytes_ = 2 * shape_.kv_heads * shape_.block_size * slot_bytes(shape_.format, shape_.head_dim);
    storage_.assign((size_t)(num_blocks * 2 * layer_bytes_), 0xff);  // NaN in every float format
    for (int64_t needed : blocks_needed_) {
      std::vector<int32_t> row((size_t)max_blocks_, -1);
      for (int64_t i = 0; i < needed; i++) row[(size_t)i] = free_.back(), free_.pop_back();
      tables_.push_back(row);
    }
  }

  // Computes the next tokens of some requests: (request, count).
  void step(const std::vector<std::pair<size_t, int64_t>>& work, bool with_trees = false) {
    std::vector<T> qkv, out;
    std::vector<uint64_t> tree;
    std::vector<int64_t> tree_start;
    std::vector<int32_t> starts{0}, lens, table;
    for (auto [which, count] : work) {
      const auto& request = requests_[which];
      auto begin = request.qkv.begin() + done_[which] * request.width();
      qkv.insert(qkv.end(), begin, begin + count * request.width());
      starts.push_back(starts.back() + (int32_t)count);
      lens.push_back((int32_t)(done_[which] + count));
      auto row = tables_[which];
      // Blocks that no query sees any more must not be read.
      if (shape_.window)
        for (int64_t i = 0; i < std::max<int64_t>(0, done_[which] - shape_.window + 1) / shape_.block_size; i++) row[(size_t)i] = -1;
      table.insert(table.end(), row.begin(), row.end());
      // A tree that is a chain, which changes nothing. Only for some requests, so that a batch has both kinds.
      int64_t words = (count + 63) / 64;
      tree_start.push_back(which % 2 ? -1 : (int64_t)tree.size());
      for (int64_t query = 0; query < count && which % 2 == 0; query++)
        for (int64_t word = 0; word < words; word++) {
          int64_t seen = std::clamp<int64_t>(query + 1 - 64 * word, 0, 64);
          tree.push_back(seen == 64 ? ~0ull : (1ull << seen) - 1);
        }
    }
    if (!with_trees) tree.clear(), tree_start.clear();
    out.resize((size_t)(starts.back() * shape_.heads * shape_.head_dim));
    StepAttention planned =
        step_attention(kernels_, at(starts), at(lens), at(table), at(tree), at(tree_start), (int64_t)work.size(), max_blocks_,
                       shape_.heads, shape_.kv_heads, shape_.head_dim, shape_.block_size, shape_.window, TYPE<T>, (int)shape_.format);
    attention(planned, at(qkv), shape_.heads + 2 * shape_.kv_heads, at(storage_) + (uintptr_t)layer_bytes_, 2 * layer_bytes_, at(out),
              requests_[0].scale(), shape_.cap, at(sinks_), at(slopes_), 0, 0, 0, 0, 0, 0);
    int64_t row_elements = shape_.heads * shape_.head_dim, from = 0;
    for (auto [which, count] : work) {
      std::copy_n(out.begin() + from, count * row_elements, outputs_[which].begin() + done_[which] * row_elements);
      from += count * row_elements;
      done_[which] += count;
    }
  }

  // Computes random pieces of random requests until all are done.
  void run_any_schedule(uint64_t seed) {
    Random random(seed);
    for (;;) {
      std::vector<std::pair<size_t, int64_t>> work;
      bool is_done = true;
      for (size_t i = 0; i < requests_.size(); i++) {
        int64_t left = requests_[i].len - done_[i];
        is_done = is_done && !left;
        if (left && random.below(3)) work.push_back({i, random.below(2) ? 1 + random.below(std::min<int64_t>(left, 3)) : 1 + random.below(left)});
      }
      if (is_done) return;
      if (!work.empty()) step(work);
    }
  }

  const std::vector<T>& output(size_t which) const { return outputs_[which]; }

 private:
  const Kernels& kernels_;
  std::vector<Request<T>> requests_;
  Shape shape_;
  std::vector<int64_t> done_, blocks_needed_;
  int64_t max_blocks_ = 0, layer_bytes_ = 0;
  std::vector<int32_t> free_;
  std::vector<std::vector<int32_t>> tables_;
  std::vector<float> sinks_, slopes_;
  std::vector<uint8_t> storage_;
  std::vector<std::vector<T>> outputs_;
};

// Computes one request alone, in one pass.
template <typename T>
std::vector<T> alone(const Kernels& kernels, const Request<T>& request) {
  Pool<T> pool(kernels, {request});
  pool.step({{0, request.len}});
  return pool.output(0);
}

template <typename T>
void expect_same(const std::vector<T>& found, const std::vector<T>& expected, const std::string& name) {
  expect(same_bits(found.data(), expected.data(), (int64_t)expected.size()), name);
}

template <typename T>
void check_shape(const Kernels& kernels, Shape shape) {
  std::string name = text(kernels.level, " attention ", TYPE_NAME<T>, " heads=", shape.heads, "/", shape.kv_heads, " head_dim=",
                          shape.head_dim, " block_size=", shape.block_size, " window=", shape.window, " cap=", shape.cap, shape.has_sinks ? " sinks" : "", shape.has_slopes ? " slopes" : "", " kv=", name_of(shape.format), " ", name_of(shape.values));
  std::vector<Request<T>> requests;
  std::vector<std::vector<T>> expected;
  for (int64_t len : lens_of(shape, OWN_FORMAT<T>)) {
    requests.emplace_back(shape, len, (uint64_t)len);
    expected.push_back(alone(kernels, requests.back()));
    for (int64_t token : {(int64_t)0, len / 2, len - 1})
      requests.back().check(&expected.back()[(size_t)(token * shape.heads * shape.head_dim)], token, name);
  }
  for (int threads : {1, 2}) {
    set_num_threads(threads);
    Pool<T> pool(kernels, requests, (uint64_t)threads);
    pool.run_any_schedule((uint64_t)(threads + shape.head_dim));
    for (size_t i = 0; i < requests.size(); i++)
      expect_same(pool.output(i), expected[i], text(name, ": other bits in a batch, len=", requests[i].len, " threads=", threads));
  }
  set_num_threads(1);
  if (shape.window || shape.has_slopes) return;  // trees have no slopes, and are not tested with windows
  std::vector<std::pair<size_t, int64_t>> all;
  for (size_t i = 0; i < requests.size(); i++) all.push_back({i, requests[i].len});
  Pool<T> trees(kernels, requests);
  trees.step(all, true);
  for (size_t i = 0; i < requests.size(); i++) expect_same(trees.output(i), expected[i], name + ": other bits as a tree");
}

// The block size must not change a result.
template <typename T>
void check_block_sizes(const Kernels& kernels, KvFormat format) {
  Shape shape{4, 2, 80, 16, 50, Values::normal, format};
  auto expected = alone(kernels, Request<T>(shape, 100, 7));
  for (int64_t block_size : {1, 2, 8, 64, 128}) {
    shape.block_size = block_size;
    expect_same(alone(kernels, Request<T>(shape, 100, 7)), expected,
                text(kernels.level, " attention ", TYPE_NAME<T>, " kv=", name_of(format), ": other bits with blocks of ", block_size));
  }
}

// Tests contexts of more than one partition, with the last tokens in pieces.
template <typename T>
void check_long_context(const Kernels& kernels, int64_t window) {
  Shape shape{1, 1, 8, 16, window};
  Request<T> request(shape, 1030, 3);
  auto expected = alone(kernels, request);
  std::string name = text(kernels.level, " attention ", TYPE_NAME<T>, " window=", window);
  for (int64_t token : {511, 512, 1023, 1024, 1029}) request.check(&expected[(size_t)(token * 8)], token, name);
  Pool<T> pool(kernels, {request});
  for (int64_t count : {505, 6, 1, 1, 300, 211, 1, 5}) pool.step({{0, count}});
  expect_same(pool.output(0), expected, name + ": other bits in pieces");
}

// A NaN in one request must not affect others.
template <typename T>
void check_nan(const Kernels& kernels, KvFormat format) {
  Shape shape{4, 2, 64, 8, 0, Values::normal, format};
  Request<T> good(shape, 100, 1), bad(shape, 90, 2);
  for (auto& element : bad.qkv) element = nearest<T>(std::numeric_limits<double>::quiet_NaN());
  Pool<T> pool(kernels, {good, bad});
  pool.step({{0, 60}, {1, 50}});
  pool.step({{1, 40}, {0, 40}});
  std::string name = text(kernels.level, " attention ", TYPE_NAME<T>);
  expect_same(pool.output(0), alone(kernels, good), name + ": a neighbour's NaN is seen");
  bool all = true;
  for (T element : pool.output(1)) all = all && std::isnan(value_of(element));
  expect(all, name + ": NaN is lost");
}

template <typename T>
void all_cases(const Kernels& kernels) {
  constexpr KvFormat own = OWN_FORMAT<T>;
  for (Shape shape : SHAPES) {
    shape.format = own;
    check_shape<T>(kernels, shape);
  }
  for (Shape shape : {Shape{4, 2, 64, 16, 0}, Shape{2, 1, 256, 16, 37}}) {
    shape.format = own;
    shape.cap = 1.5f;
    check_shape<T>(kernels, shape);
    shape.cap = 0;
    shape.has_sinks = true;
    check_shape<T>(kernels, shape);
    shape.has_slopes = true;
    check_shape<T>(kernels, shape);
  }
  for (KvFormat format : FORMATS) {
    if (format != own)
      for (Shape shape : {Shape{4, 2, 64, 16, 0}, Shape{7, 1, 80, 32, 0}, Shape{2, 1, 128, 8, 37}, Shape{2, 2, 24, 1, 0}}) {
        shape.format = format;
        check_shape<T>(kernels, shape);
      }
    check_block_sizes<T>(kernels, format);
    check_nan<T>(kernels, format);
  }
  for (int64_t window : {0, 600}) check_long_context<T>(kernels, window);
}

}  // namespace

void test_attention(const Kernels& kernels) {
  all_cases<float>(kernels);
  all_cases<uint16_t>(kernels);
}

}  // namespace twostroke::tests
