// Helpers of the tests of linear maps with any kind of weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <numbers>

#include "operators.hpp"
#include "tests/harness.hpp"

namespace twostroke::tests {

inline int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Returns a bias [n], or [2 n] of a gated map, in the order of the panels' channels; zero in the padding of the last panel.
inline std::vector<float> bias_in_panels(const std::vector<float>& bias, int64_t n, bool gated) {
  std::vector<float> found;
  int64_t vectors = divided_up(n, LANES) * (gated ? 2 : 1);
  for (int64_t channel = 0; channel < divided_up(vectors, PANEL_VECTORS) * PANEL; channel++) {
    int64_t row = row_of_channel(channel, n, gated);
    found.push_back(row < 0 ? 0.0f : bias[(size_t)row]);
  }
  return found;
}

// Sum in double, with an error bound for float32 in any order.
struct Sum {
  double value = 0, error = 0;
};

constexpr Gate GATES[] = {Gate::none, Gate::silu, Gate::gelu_tanh, Gate::clamped_swiglu};

inline const char* name_of(Gate gate) {
  constexpr const char* NAMES[] = {" linear ", " silu ", " gelu ", " clamped swiglu "};
  return NAMES[(int)gate];
}

// Returns activation(x) * up, or clamped SwiGLU of both.
inline Sum gated_product(Gate gate, Sum x, Sum up) {
  if (gate == Gate::clamped_swiglu) {
    x.value = std::min(x.value, 7.0);
    up.value = std::clamp(up.value, -7.0, 7.0) + 1.0;
    up.error += std::fabs(up.value) * 0x1p-23;
  }
  double slope = x.value;
  if (gate == Gate::clamped_swiglu) slope = 1.702 * x.value;
  if (gate == Gate::gelu_tanh) slope = 2 * std::sqrt(2 / std::numbers::pi) * (x.value + 0.044715 * x.value * x.value * x.value);
  double active = x.value / (1 + std::exp(-slope));
  // the curves' slopes are at most 1.13; an error of exp's argument is one of its result, and exp and the division have errors
  // of some units in the last place; exp is limited to e^88
  double error = 1.13 * x.error + std::fabs(active) * (1 + std::fabs(slope)) * 0x1p-20 + 1e-35 + std::fabs(x.value) * 1e-38;
  return {active * up.value, error * (std::fabs(up.value) + up.error) + std::fabs(active) * up.error};
}

// Checks a result of type T that is rounded once, the residual included.
template <typename T, typename What>
void expect_rounded(T found, Sum sum, double residual, const What& what) {
  double value = sum.value + residual;
  expect_close(value_of(found), value, sum.error * 1.01 + std::fabs(value) * ROUNDING<T> * 1.01 + 0x1p-126, what);
}

}  // namespace twostroke::tests
