// Linear maps with weights of float32 and bfloat16, plain and gated, with bias and residual, of any rows and widths.
#include "operators.hpp"
#include "tests/harness.hpp"
#include "tests/linear_oracle.hpp"
#include "threads.hpp"

namespace twostroke::tests {
namespace {

constexpr int64_t ROWS = 35;  // whole tiles of every height that the kernels have, and a partial one

struct Shape {
  int64_t n, k;
};
constexpr Shape SHAPES[] = {{1, 1}, {1, 2}, {15, 3}, {16, 16}, {17, 31}, {33, 8}, {63, 64}, {64, 65}, {65, 128}, {130, 257}, {48, 512}};

template <typename T>
struct Case {
  const Kernels& kernels;
  Shape shape;
  Gate gate;
  bool gated, has_bias, has_residual;
  Values values;
  int64_t ldx = 0, weight_rows = 0;
  std::vector<T> x, weight, residual, y;
  std::vector<float> bias, panel_bias;
  std::vector<uint8_t> packed;
  std::string name;

  Case(const Kernels& kernels, Shape shape, Gate gate, bool has_bias, bool has_residual, Values values)
      : kernels(kernels), shape(shape), gate(gate), gated(gate != Gate::none), has_bias(has_bias), has_residual(has_residual), values(values) {
    auto [n, k] = shape;
    Random random((uint64_t)(n * 1000 + k));
    name = text(kernels.level, name_of(gate), TYPE_NAME<T>, " n=", n, " k=", k, " bias=", has_bias,
                " residual=", has_residual, " ", name_of(values));
    ldx = k + k % 2;
    weight_rows = gated ? 2 * n : n;
    x = random_elements<T>(random, ROWS * ldx, values);
    for (int64_t row = 0; row < ROWS && k % 2; row++) x[(size_t)(row * ldx + k)] = 0;
    // the product of two large factors would leave float32's range
    weight = random_elements<T>(random, weight_rows * k, gated ? Values::normal : values);
    packed.resize((size_t)packed_bytes(n, k, gated, TYPE<T>));
    pack_linear(at(weight), at(packed), n, k, gated, TYPE<T>);
    if (has_bias) {
      bias = random_elements<float>(random, weight_rows, Values::normal);
      panel_bias = bias_in_panels(bias, n, gated);
    }
    if (has_residual) residual = random_elements<T>(random, ROWS * n, values);
    y = rows(0, ROWS);
  }

  // Returns the kernel's result for consecutive rows.
  template <typename Y = T>
  std::vector<Y> rows(int64_t first, int64_t count) const {
    std::vector<Y> found((size_t)(count * shape.n));
    std::vector<T> some(x.begin() + first * ldx, x.begin() + (first + count) * ldx), left;
    if (has_residual) left.assign(residual.begin() + first * shape.n, residual.begin() + (first + count) * shape.n);
    RowGroup all{at(packed), at(panel_bias), 0, 0, count};
    linear(kernels, at(some), ldx, {&all, 1}, at(left), at(found), shape.n, count, shape.n, shape.k, (int)gate,
           TYPE<T>, !std::is_same_v<Y, T>);
    return found;
  }

  // Returns one product in double, with an error bound for float32 in any order.
  Sum product(int64_t row, int64_t channel) const {
    double total = 0, magnitude = 0;
    for (int64_t i = 0; i < shape.k; i++) {
      double term = (double)value_of(x[(size_t)(row * ldx + i)]) * value_of(weight[(size_t)(channel * shape.k + i)]);
      total += term;
      magnitude += std::fabs(term);
    }
    if (has_bias) {
      total += bias[(size_t)channel];
      magnitude += std::fabs(bias[(size_t)channel]);
    }
    // Numbers below the smallest normal float may be rounded to zero.
    return {total, magnitude * (double)(shape.k + 8) * 0x1p-24 + (double)shape.k * 0x1p-126};
  }

  void check_values() const {
    for (int64_t row = 0; row < ROWS; row += 1 + row / 8 * 7)
      for (int64_t channel = 0; channel < shape.n; channel++) {
        Sum sum = product(row, channel);
        if (gated) sum = gated_product(gate, sum, product(row, shape.n + channel));
        size_t place = (size_t)(row * shape.n + channel);
        expect_rounded(y[place], sum, has_residual ? value_of(residual[place]) : 0,
                       [&] { return text(name, " row=", row, " channel=", channel); });
      }
  }

  void check_any_batch() const {
    for (int64_t count : {1, 2, 3, 4, 5, 6, 7, 16, 17})
      for (int64_t first : {(int64_t)0, (int64_t)1, ROWS - count}) {
        auto found = rows(first, count);
        expect(same_bits(found.data(), &y[(size_t)(first * shape.n)], count * shape.n),
               text(name, ": other bits in rows ", first, " to ", first + count - 1, " alone"));
      }
  }

  void check_widened() const {
    auto found = rows<float>(0, ROWS);
    for (size_t i = 0; i < y.size(); i++) {
      float expected = value_of(y[i]);
      expect(same_bits(&found[i], &expected, 1), text(name, ": another number as float32 at ", i));
    }
  }

  void check_unpacked() const {
    std::vector<int64_t> ids{shape.n - 1, 0, shape.n / 2};
    std::vector<T> found((size_t)(3 * shape.k));
    unpack_rows(at(packed), at(ids), at(found), 3, shape.k, TYPE<T>);
    for (int64_t i = 0; i < 3; i++)
      expect(same_bits(&found[(size_t)(i * shape.k)], &weight[(size_t)(ids[(size_t)i] * shape.k)], shape.k), name + ": unpacked");
  }
};

template <typename T>
void all_cases(const Kernels& kernels) {
  for (Shape shape : SHAPES)
    for (Gate gate : GATES) {
      Case<T> bare(kernels, shape, gate, false, false, Values::normal), full(kernels, shape, gate, true, true, Values::normal);
      set_num_threads(2);
      auto on_two_threads = full.rows(0, ROWS);
      set_num_threads(1);
      expect(same_bits(on_two_threads.data(), full.y.data(), (int64_t)full.y.size()), full.name + ": other bits on two threads");
      for (const auto* one : {&bare, &full}) {
        one->check_values();
        one->check_any_batch();
        one->check_widened();
      }
      if (gate == Gate::none) bare.check_unpacked();
    }
  for (Values values : ALL_VALUES)
    for (Gate gate : GATES) {
      Case<T> one(kernels, {40, 200}, gate, false, true, values);
      one.check_values();
      one.check_any_batch();
    }
}

}  // namespace

void test_linear(const Kernels& kernels) {
  all_cases<float>(kernels);
  all_cases<uint16_t>(kernels);
}

}  // namespace twostroke::tests
