// Draws from a vocabulary must be the winner of scores computed one by one, in any batch.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <vector>

#include "operators.hpp"
#include "tests/harness.hpp"
#include "threads.hpp"

namespace twostroke::tests {
namespace {

// Noise as documented in noise.py: output number `token` of the stream that starts at the key.
double noise(uint64_t key, int64_t token) {
  uint64_t bits = Random(key + (uint64_t)token * 0x9E3779B97F4A7C15).bits() >> 11 | 1;
  return -std::log(-std::log((double)bits * 0x1p-53));
}

enum class Logits { normal, equal, steep, some_excluded, all_but_one_excluded, rising };
constexpr Logits ALL_LOGITS[] = {Logits::normal, Logits::equal,  Logits::steep, Logits::some_excluded, Logits::all_but_one_excluded,
                                 Logits::rising};

std::vector<float> logits_of(Random& random, int64_t count, Logits kind) {
  constexpr float NONE = -std::numeric_limits<float>::infinity();
  std::vector<float> logits((size_t)count);
  for (int64_t i = 0; i < count; i++) {
    auto v = (float)(3 * random.normal());
    switch (kind) {
      case Logits::normal: break;
      case Logits::equal: v = 7.0f; break;
      case Logits::steep: v *= 1e6f; break;
      case Logits::some_excluded: v = random.below(3) ? NONE : v; break;
      case Logits::all_but_one_excluded: v = i == count / 2 ? v : NONE; break;
      case Logits::rising: v = (float)i * 0.01f; break;  // every next token may be the best
    }
    logits[(size_t)i] = v;
  }
  return logits;
}

void check(const Kernels& kernels, int64_t rows, int64_t vocab_size, Logits kind) {
  Random random((uint64_t)(vocab_size + (int)kind));
  int64_t gap = 3, stride = vocab_size + gap;
  auto logits = logits_of(random, rows * stride - gap, kind);
  std::vector<float> peaks, temperatures;
  std::vector<int64_t> keys, winners((size_t)rows), alone(1);
  for (int64_t row = 0; row < rows; row++) {
    float peak = logits[(size_t)(row * stride)];
    for (int64_t i = 0; i < vocab_size; i++) peak = std::max(peak, logits[(size_t)(row * stride + i)]);
    if (!std::isfinite(peak)) logits[(size_t)(row * stride)] = peak = 0;
    peaks.push_back(peak);
    temperatures.push_back((float)std::pow(10.0, 2 * random.uniform() - 1));
    keys.push_back((int64_t)random.bits());
  }
  gumbel_argmax(kernels, at(logits), stride, rows, vocab_size, at(temperatures), at(keys), at(winners));
  for (int64_t row = 0; row < rows; row++) {
    auto r = (size_t)row;
    double best = -INFINITY;
    int64_t winner = -1;
    for (int64_t token = 0; token < vocab_size; token++) {
      float scaled = (logits[(size_t)(row * stride + token)] - peaks[r]) / temperatures[r];
      double score = (double)scaled + noise((uint64_t)keys[r], token);
      if (score > best) best = score, winner = token;
    }
    auto name = [&] { return text(kernels.level, " gumbel_argmax vocab_size=", vocab_size, " kind=", (int)kind, " row=", row); };
    expect(winners[r] == winner, [&] { return text(name(), ": token ", winners[r], ", expected ", winner); });
    std::vector<float> one(logits.begin() + row * stride, logits.begin() + row * stride + vocab_size);
    std::vector<float> its_temperature{temperatures[r]};
    std::vector<int64_t> its_key{keys[r]};
    gumbel_argmax(kernels, at(one), vocab_size, 1, vocab_size, at(its_temperature), at(its_key), at(alone));
    expect(alone[0] == winners[r], [&] { return name() + ": another token alone"; });
  }
}

struct Filters {
  float floor;
  int64_t top_k;  // 0: off
  double top_p;
};
constexpr float NO_FLOOR = -std::numeric_limits<float>::infinity();
constexpr Filters ALL_FILTERS[] = {{NO_FLOOR, 1, 1},    {NO_FLOOR, 7, 1},   {NO_FLOOR, 0, 0.9},     {NO_FLOOR, 0, 1e-9}, {-3.0f, 0, 1},
                                   {0.0f, 0, 1},        {-7.0f, 20, 0.5},   {NO_FLOOR, 900, 0.999}, {NO_FLOOR, 3, 0.97}, {NO_FLOOR, 300, 1},
                                   {-0.5f, 4000, 0.25}, {NO_FLOOR, 0, 0.5}};

// Returns the tokens that pass the filters, by definition: sorted, the largest first and of equal ones the lower id.
std::vector<int64_t> left_by(const Filters& filters, const std::vector<float>& scaled) {
  std::vector<int64_t> order;
  for (size_t i = 0; i < scaled.size(); i++)
    if (scaled[i] > NO_FLOOR && scaled[i] >= filters.floor) order.push_back((int64_t)i);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return scaled[(size_t)a] > scaled[(size_t)b]; });
  auto value = [&](size_t place) { return scaled[(size_t)order[place]]; };
  auto top_k = (size_t)filters.top_k;
  if (top_k && top_k < order.size()) {
    size_t count = top_k;
    while (count < order.size() && value(count) == value(top_k - 1)) count++;
    order.resize(count);
  }
  if (filters.top_p < 1) {
    double mass = 0, before = 0;
    for (size_t i = 0; i < order.size(); i++) mass += std::exp((double)value(i));
    size_t count = 0;
    while (count < order.size() && (count == 0 || before < mass * filters.top_p)) before += std::exp((double)value(count++));
    order.resize(count);
  }
  return order;
}

void check_filtered(const Kernels& kernels, int64_t vocab_size, Logits kind, bool has_equals) {
  Random random((uint64_t)(vocab_size + 10 * (int)kind + has_equals));
  constexpr int64_t ROWS = std::size(ALL_FILTERS);
  int64_t stride = vocab_size + 3;
  auto logits = logits_of(random, ROWS * stride, kind);
  if (has_equals)
    for (float& logit : logits) logit = std::round(logit * 4) / 4;
  std::vector<float> peaks, temperatures, floors;
  std::vector<double> top_ps;
  std::vector<int64_t> keys, top_ks, winners((size_t)ROWS);
  for (int64_t row = 0; row < ROWS; row++) {
    float peak = logits[(size_t)(row * stride)];
    for (int64_t i = 0; i < vocab_size; i++) peak = std::max(peak, logits[(size_t)(row * stride + i)]);
    if (!std::isfinite(peak)) logits[(size_t)(row * stride)] = peak = 0;
    const Filters& filters = ALL_FILTERS[row];
    peaks.push_back(peak);
    temperatures.push_back((float)std::pow(10.0, 2 * random.uniform() - 1));
    keys.push_back((int64_t)random.bits());
    floors.push_back(filters.floor);
    top_ks.push_back(filters.top_k && filters.top_k < vocab_size ? filters.top_k : vocab_size);
    top_ps.push_back(filters.top_p);
  }
  filtered_argmax(kernels, at(logits), stride, ROWS, vocab_size, at(temperatures), at(keys), at(floors), at(top_ks),
                  at(top_ps), at(winners));
  int num_open = 0;
  for (int64_t row = 0; row < ROWS; row++) {
    auto r = (size_t)row;
    std::vector<float> scaled;
    for (int64_t i = 0; i < vocab_size; i++) scaled.push_back((logits[(size_t)(row * stride + i)] - peaks[r]) / temperatures[r]);
    double best = -INFINITY;
    int64_t winner = -1;
    for (int64_t token : left_by(ALL_FILTERS[row], scaled)) {
      double score = (double)scaled[(size_t)token] + noise((uint64_t)keys[r], token);
      if (score > best || (score == best && token < winner)) best = score, winner = token;
    }
    num_open += winners[r] < 0;
    expect(winners[r] < 0 || winners[r] == winner, [&] {
      return text(kernels.level, " filtered_argmax vocab_size=", vocab_size, " kind=", (int)kind, " row=", row, ": token ",
                  winners[r], ", expected ", winner);
    });
  }
  // with equal logits, sums may reach a half or nine tenths of all exactly
  expect(num_open <= (kind == Logits::equal ? ROWS : has_equals ? 4 : 1), [&] {
    return text(kernels.level, " filtered_argmax vocab_size=", vocab_size, " kind=", (int)kind, ": ", num_open, " rows left open");
  });
}

}  // namespace

void test_sampling(const Kernels& kernels) {
  for (int threads : {1, 2}) {
    set_num_threads(threads);
    for (Logits kind : ALL_LOGITS)
      for (int64_t vocab_size : {1, 2, 15, 16, 17, 63, 64, 65, 1000, 5003}) check(kernels, 5, vocab_size, kind);
    for (Logits kind : ALL_LOGITS)
      for (int64_t vocab_size : {1, 2, 16, 63, 65, 1000, 5003, 40009})
        for (bool has_equals : {false, true}) check_filtered(kernels, vocab_size, kind, has_equals);
  }
  set_num_threads(1);
}

}  // namespace twostroke::tests
