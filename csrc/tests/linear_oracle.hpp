// What the tests of linear maps share, whatever the weights are made of.
#pragma once

#include <cmath>

#include "operators.hpp"
#include "tests/harness.hpp"

namespace twostroke::tests {

inline int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A bias [n], or [2 n] of a gated map, in the order of the panels' channels; zero where the last panel is filled up.
inline std::vector<float> bias_in_panels(const std::vector<float>& bias, int64_t n, bool gated) {
  std::vector<float> found;
  int64_t vectors = divided_up(n, LANES) * (gated ? 2 : 1);
  for (int64_t channel = 0; channel < divided_up(vectors, PANEL_VECTORS) * PANEL; channel++) {
    int64_t row = row_of_channel(channel, n, gated);
    found.push_back(row < 0 ? 0.0f : bias[(size_t)row]);
  }
  return found;
}

// A sum in double, and how far float32 may be from it whatever its order.
struct Sum {
  double value = 0, error = 0;
};

// silu(gate) * up
inline Sum gated_product(Sum gate, Sum up) {
  double silu = gate.value / (1 + std::exp(-gate.value));
  // silu's slope is 1.1 at most; exp and the division err by some units in the last place
  double error = 1.1 * gate.error + std::fabs(silu) * 0x1p-20 + 1e-35;
  return {silu * up.value, error * (std::fabs(up.value) + up.error) + std::fabs(silu) * up.error};
}

// A result of type T: rounded once, the residual included.
template <typename T, typename What>
void expect_rounded(T found, Sum sum, double residual, const What& what) {
  double value = sum.value + residual;
  expect_close(value_of(found), value, sum.error * 1.01 + std::fabs(value) * ROUNDING<T> * 1.01 + 0x1p-126, what);
}

}  // namespace twostroke::tests
