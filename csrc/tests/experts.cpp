// Experts in one call must have the bits of separate experts, and as a part of a layer those of their parts, in every format of
// weights.
#include "experts.hpp"

#include <algorithm>

#include "operators.hpp"
#include "tests/harness.hpp"
#include "threads.hpp"

namespace twostroke::tests {
namespace {

constexpr int64_t EXPERTS = 5, CHOSEN = 2, K = 96, N = 80;

// Matrices of all experts, packed as floats or as codes of 4 bits.
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
    std::vector<int64_t> counts(EXPERTS, 1);
    route(rules, at(logits), 0, 0, m, at(tokens), at(starts), at(places), at(weights), at(counts));
    for (size_t e = 0; e < EXPERTS; e++) expect(counts[e] == 1 + starts[e + 1] - starts[e], "counts of experts");
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
  PackedExperts(inner.all).multiply(at(x), K, at(choice.tokens), at(choice.starts), at(found), m, pairs);
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

// Tests a layer's experts, with a shared expert and a norm of their result, or without both.
template <typename T>
void check_part(const Kernels& kernels, Random& random, int64_t m, Gate gate, bool is_quantized, bool has_more) {
  std::string name = text(kernels.level, ": a layer's experts of ", TYPE_NAME<T>, is_quantized ? " codes" : "", " m=", m,
                          " more=", has_more);
  constexpr int F32 = TYPE<float>;
  Stack<T> inner(kernels, random, N, K, gate, is_quantized), down(kernels, random, K, N, Gate::none, is_quantized);
  PackedExperts gated(inner.all), linears(down.all);
  RouterRules rules{EXPERTS, CHOSEN, false, true, 1.0, 1, 1};
  std::vector<float> of_router = random_elements<float>(random, EXPERTS * K, Values::normal);
  std::vector<uint8_t> packed((size_t)packed_bytes(EXPERTS, K, false, F32));
  pack_linear(at(of_router), at(packed), EXPERTS, K, false, F32);
  PackedLinear router(kernels, at(packed), 0, EXPERTS, K, 0, F32);
  std::vector<T> x = random_elements<T>(random, m * K, Values::normal), stream = random_elements<T>(random, m * K, Values::normal);
  std::vector<T> of_norm = random_elements<T>(random, K, Values::normal);
  HiddenRows hidden{kernels, K, TYPE<T>};
  Norm norm;
  if (has_more) norm = {at(of_norm), 1e-5f, TYPE<T>};

  std::vector<float> wide, logits((size_t)(m * EXPERTS)), weights((size_t)(m * CHOSEN));
  for (T element : x) wide.push_back(value_of(element));
  std::vector<int64_t> tokens((size_t)(m * CHOSEN)), places(tokens.size()), starts(EXPERTS + 1);
  std::vector<T> pairs((size_t)(m * CHOSEN * N)), made((size_t)(m * K)), shared((size_t)(m * N)), expected = stream;
  router.multiply(at(wide), K, 0, at(logits), EXPERTS, m, false);
  route(rules, at(logits), 0, 0, m, at(tokens), at(starts), at(places), at(weights));
  gated.multiply(at(x), K, at(tokens), at(starts), at(pairs), m, m * CHOSEN);
  linears.multiply_and_add(at(pairs), N, at(starts), at(places), at(weights), at(made), m, CHOSEN);
  if (has_more) {
    inner.linears[0].multiply(at(x), K, 0, at(shared), N, m, false);
    down.linears[0].multiply(at(shared), N, at(made), at(made), K, m, false);
  }
  hidden.add(norm, at(made), at(expected), m);

  std::vector<int64_t> counts(EXPERTS);
  Experts part({&router, rules, 0, 0, at(counts), &gated, &linears, has_more ? inner.all[0] : nullptr,
                has_more ? down.all[0] : nullptr});
  std::vector<uint8_t> room((size_t)(m * part.room_bytes()));
  set_num_threads(2);
  part.add_to(hidden, norm, at(x), at(stream), at(x), at(room), m);  // results may overwrite the inputs
  set_num_threads(1);
  expect(same_bits(stream.data(), expected.data(), m * K), name + ": other bits than by parts");
  int64_t num_pairs = 0, num_hit = 0;
  for (int64_t count : counts) num_pairs += count, num_hit += count > 0;
  expect(num_pairs == m * CHOSEN, name + ": counts of experts");
  expect(gated.num_multiplied() == 2 * num_hit && linears.num_multiplied() == 2 * num_hit, name + ": experts multiplied");
}

}  // namespace

void test_experts(const Kernels& kernels) {
  Random random(33);
  for (int64_t m : {1, 3, 17})
    for (bool is_quantized : {false, true}) {
      Gate gate = m == 3 ? Gate::clamped_swiglu : Gate::silu;
      check<float>(kernels, random, m, gate, is_quantized);
      check<uint16_t>(kernels, random, m, gate, is_quantized);
      for (bool has_more : {false, true}) {
        check_part<float>(kernels, random, m, gate, is_quantized, has_more);
        check_part<uint16_t>(kernels, random, m, gate, is_quantized, has_more);
      }
    }
}

}  // namespace twostroke::tests
