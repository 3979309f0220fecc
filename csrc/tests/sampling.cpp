// Draws from a vocabulary: the winner of scores computed one by one, in any batch.
#include <cmath>
#include <limits>

#include "operators.hpp"
#include "tests/harness.hpp"
#include "threads.hpp"

namespace twostroke::tests {
namespace {

// As documented in noise.py: output number `token` of the stream that starts at the key.
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
      case Logits::rising: v = (float)i * 0.01f; break;  // whoever comes next may be the best
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
  gumbel_argmax(kernels, at(logits), stride, rows, vocab_size, at(peaks), at(temperatures), at(keys), at(winners));
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
    std::vector<float> its_peak{peaks[r]}, its_temperature{temperatures[r]};
    std::vector<int64_t> its_key{keys[r]};
    gumbel_argmax(kernels, at(one), vocab_size, 1, vocab_size, at(its_peak), at(its_temperature), at(its_key), at(alone));
    expect(alone[0] == winners[r], [&] { return name() + ": another token alone"; });
  }
}

}  // namespace

void test_sampling(const Kernels& kernels) {
  for (int threads : {1, 2}) {
    set_num_threads(threads);
    for (Logits kind : ALL_LOGITS)
      for (int64_t vocab_size : {1, 2, 15, 16, 17, 63, 64, 65, 1000, 5003}) check(kernels, 5, vocab_size, kind);
  }
  set_num_threads(1);
}

}  // namespace twostroke::tests
