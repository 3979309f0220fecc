// Experts in one call against each expert by itself: the same bits, in every format of weights.
#include "experts.hpp"

#include <algorithm>

#include "operators.hpp"
#include "tests/harness.hpp"

namespace twostroke::tests {
namespace {

constexpr int64_t EXPERTS = 5, CHOSEN = 2, K = 96, N = 80;

// The matrices of all experts, packed as floats or as codes of 4 bits.
template <typename T>
struct Stack {
  std::vector<std::vector<uint8_t>> packed;
  std::vector<PackedLinear> linears;
  std::vector<const PackedLinear*> all;

  Stack(const Kernels& kernels, Random& random, int64_t n, int64_t k, Gate gate, bool is_quantized) {
    bool gated = gate != Gate::none;
    int64_t rows = gated ? 2 * n : n;
    WeightFormat format{4, 32, false, false};
    linears.reserve(EXPERTS);
    for (int64_t e = 0; e < EXPERTS; e++) {
      if (is_quantized) {
        std::vector<uint8_t> codes((size_t)(rows * k));
        std::vector<uint16_t> scales((size_t)(rows * format.groups(k)));
        for (auto& code : codes) code = (uint8_t)random.below(16);
        for (auto& scale : scales) scale = nearest_half(0.01 + random.uniform() * 0.1);
        packed.emplace_back((size_t)packed_quantized_bytes(n, k, gated, format));
        pack_quantized({at(codes), at(scales), 0}, at(packed.back()), n, k, gated, format);
        linears.emplace_back(kernels, at(packed.back()), 0, n, k, (int)gate, TYPE<T>, QuantizedInputs{format, 0, true});
      } else {
        std::vector<T> weight = random_elements<T>(random, rows * k, Values::normal);
        packed.emplace_back((size_t)packed_bytes(n, k, gated, TYPE<T>));
        pack_linear(at(weight), at(packed.back()), n, k, gated, TYPE<T>);
        linears.emplace_back(kernels, at(packed.back()), 0, n, k, (int)gate, TYPE<T>);
      }
    }
    for (const auto& linear : linears) all.push_back(&linear);
  }
};

struct Choice {
  std::vector<int64_t> tokens, starts, places;
  std::vector<float> weights;

  Choice(Random& random, int64_t m, bool is_sigmoid) {
    RouterRules rules{EXPERTS, CHOSEN, is_sigmoid, true, 1.0, 1, 1};
    std::vector<float> logits = random_elements<float>(random, m * EXPERTS, Values::normal);
    tokens.resize((size_t)(m * CHOSEN)), places.resize(tokens.size()), weights.resize(tokens.size());
    starts.resize(EXPERTS + 1);
    route(rules, at(logits), 0, 0, m, at(tokens), at(starts), at(places), at(weights));
    for (int64_t row = 0; row < m; row++) {
      float sum = 0;
      for (int64_t i = row * CHOSEN; i < (row + 1) * CHOSEN; i++) {
        sum += weights[(size_t)i];
        expect(tokens[(size_t)places[(size_t)i]] == row, "a pair is of another token");
      }
      expect_close(sum, 1.0, 1e-6, [] { return std::string("sum of weights"); });
    }
    std::vector<float> scales(EXPERTS, 0.5f), halves(weights.size());
    route(rules, at(logits), 0, at(scales), m, at(tokens), at(starts), at(places), at(halves));
    for (size_t i = 0; i < weights.size(); i++) expect(halves[i] == 0.5f * weights[i], "factors of experts");
    expect(starts.front() == 0 && starts.back() == m * CHOSEN && std::is_sorted(starts.begin(), starts.end()), "starts");
  }
};

template <typename T>
void check(const Kernels& kernels, Random& random, int64_t m, Gate gate, bool is_quantized) {
  std::string name = text(kernels.level, ": experts of ", TYPE_NAME<T>, is_quantized ? " codes" : "", " m=", m);
  Stack<T> inner(kernels, random, N, K, gate, is_quantized), down(kernels, random, K, N, Gate::none, is_quantized);
  Choice choice(random, m, is_quantized);
  int64_t pairs = m * CHOSEN;
  std::vector<T> x = random_elements<T>(random, m * K, Values::normal), found((size_t)(pairs * N)), y((size_t)(m * K));
  PackedExperts(inner.all).multiply(at(x), K, at(choice.tokens), at(choice.starts), at(found), pairs);
  std::vector<float> products((size_t)(pairs * K));
  for (int64_t e = 0; e < EXPERTS; e++)
    for (int64_t i = choice.starts[(size_t)e]; i < choice.starts[(size_t)e + 1]; i++) {
      std::vector<T> alone(N), row(x.begin() + choice.tokens[(size_t)i] * K, x.begin() + (choice.tokens[(size_t)i] + 1) * K);
      inner.linears[(size_t)e].multiply(at(row), K, 0, at(alone), N, 1, false);
      expect(same_bits(alone.data(), found.data() + i * N, N), name + ": a gated product has other bits");
      down.linears[(size_t)e].multiply(at(alone), N, 0, (uintptr_t)(products.data() + i * K), K, 1, true);
    }
  PackedExperts(down.all).multiply_and_add(at(found), N, at(choice.starts), at(choice.places), at(choice.weights), at(y), m, CHOSEN);
  for (int64_t row = 0; row < m; row++)
    for (int64_t j = 0; j < K; j++) {
      float sum = 0;
      for (int64_t i = row * CHOSEN; i < (row + 1) * CHOSEN; i++) {
        float product = products[(size_t)(choice.places[(size_t)i] * K + j)] * choice.weights[(size_t)i];
        sum += product;
      }
      T expected = nearest<T>((double)sum);
      expect(same_bits(&expected, &y[(size_t)(row * K + j)], 1), name + ": a sum has other bits");
    }
}

}  // namespace

void test_experts(const Kernels& kernels) {
  Random random(33);
  for (int64_t m : {1, 3, 17})
    for (bool is_quantized : {false, true}) {
      Gate gate = m == 3 ? Gate::clamped_swiglu : Gate::silu;
      check<float>(kernels, random, m, gate, is_quantized);
      check<uint16_t>(kernels, random, m, gate, is_quantized);
    }
}

}  // namespace twostroke::tests
