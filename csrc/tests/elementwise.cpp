// Norm and rotary embedding: rows of any width, rows with gaps, several parts.
#include <cmath>

#include "operators.hpp"
#include "tests/harness.hpp"
#include "threads.hpp"

namespace twostroke::tests {
namespace {

constexpr float EPS = 1e-6f;

template <typename T, typename W = T>
void norm_case(const Kernels& kernels, int64_t rows, int64_t parts, int64_t n, int64_t gap, Values values) {
  Random random((uint64_t)(rows * 1000 + parts * 100 + n));
  int64_t stride = parts * n + gap;
  auto x = random_elements<T>(random, rows * stride - gap, values);
  auto weight = random_elements<W>(random, parts * n, Values::normal);
  std::vector<T> y((size_t)(rows * parts * n));
  rms_norm(kernels, at(x), stride, at(weight), at(y), parts * n, rows, parts, n, EPS, TYPE<T>, TYPE<W>);
  std::string name = text(kernels.level, " rms_norm ", TYPE_NAME<T>, " by ", TYPE_NAME<W>, " rows=", rows, " parts=", parts, " n=", n, " ", name_of(values));
  for (int64_t row = 0; row < rows; row++)
    for (int64_t part = 0; part < parts; part++) {
      const T* from = &x[(size_t)(row * stride + part * n)];
      double squares = 0;
      for (int64_t i = 0; i < n; i++) squares += (double)value_of(from[i]) * value_of(from[i]);
      double scale = 1 / std::sqrt(squares / (double)n + (double)EPS);
      for (int64_t i = 0; i < n; i++) {
        // at most two roundings to T, plus those of the sum and the root
        double expected = value_of(from[i]) * scale * value_of(weight[(size_t)(part * n + i)]);
        double tolerance = std::fabs(expected) * (2.1 * ROUNDING<T> + (double)(n + 8) * 0x1p-24) + 1e-37;
        expect_close(value_of(y[(size_t)((row * parts + part) * n + i)]), expected, tolerance, [&] { return name; });
      }
    }
  // the same rows one by one, in place
  std::vector<T> one((size_t)(parts * n));
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t i = 0; i < parts * n; i++) one[(size_t)i] = x[(size_t)(row * stride + i)];
    rms_norm(kernels, at(one), parts * n, at(weight), at(one), parts * n, 1, parts, n, EPS, TYPE<T>, TYPE<W>);
    expect(same_bits(one.data(), &y[(size_t)(row * parts * n)], parts * n), name + " alone and in place");
  }
}

template <typename T>
void rotation_case(const Kernels& kernels, int64_t tokens, int64_t heads, int64_t head_dim, int64_t gap) {
  Random random((uint64_t)(tokens * 1000 + head_dim));
  int64_t stride = heads * head_dim + gap, half = head_dim / 2;
  auto x = random_elements<T>(random, tokens * stride - gap, Values::normal);
  std::vector<T> cos((size_t)(tokens * head_dim)), sin(cos.size());
  for (int64_t token = 0; token < tokens; token++)
    for (int64_t i = 0; i < half; i++) {
      double angle = 100 * random.uniform();
      for (int64_t side = 0; side < 2; side++) {
        size_t place = (size_t)(token * head_dim + side * half + i);
        cos[place] = nearest<T>(std::cos(angle));
        sin[place] = nearest<T>(side ? std::sin(angle) : -std::sin(angle));
      }
    }
  auto y = x;
  rotate(kernels, at(y), stride, tokens, heads, head_dim, at(cos), at(sin), TYPE<T>);
  std::string name = text(kernels.level, " rotate ", TYPE_NAME<T>, " tokens=", tokens, " heads=", heads, " head_dim=", head_dim);
  for (int64_t i = 0; i < (int64_t)x.size(); i++) {
    int64_t token = i / stride, in_row = i % stride, d = in_row % head_dim;
    if (in_row >= heads * head_dim) {
      expect(same_bits(&x[(size_t)i], &y[(size_t)i], 1), [&] { return name + ": between the rows"; });
      continue;
    }
    int64_t partner = d < half ? i + half : i - half;
    size_t angle = (size_t)(token * head_dim + d);
    double a = (double)value_of(x[(size_t)i]) * value_of(cos[angle]), b = (double)value_of(x[(size_t)partner]) * value_of(sin[angle]);
    double tolerance = std::fabs(a + b) * ROUNDING<T> * 1.01 + (std::fabs(a) + std::fabs(b)) * 0x1p-23;
    expect_close(value_of(y[(size_t)i]), a + b, tolerance, [&] { return name; });
  }
}

template <typename T>
void centering_case(const Kernels& kernels, int64_t tokens, int64_t n, int64_t gap) {
  Random random((uint64_t)(tokens * 1000 + n));
  int64_t stride = n + gap;
  auto x = random_elements<T>(random, tokens * stride, Values::normal), mean = random_elements<T>(random, n, Values::normal);
  auto y = x;
  kernels.center(y.data(), stride, mean.data(), n, (Dtype)TYPE<T>, 0, tokens);
  std::string name = text(kernels.level, " center ", TYPE_NAME<T>, " tokens=", tokens, " n=", n);
  for (int64_t i = 0; i < (int64_t)x.size(); i++) {
    int64_t place = i % stride;
    T expected = place < n ? nearest<T>((double)value_of(x[(size_t)i]) - (double)value_of(mean[(size_t)place])) : x[(size_t)i];
    expect(same_bits(&expected, &y[(size_t)i], 1), [&] { return name; });
  }
}

template <typename T>
void all_cases(const Kernels& kernels) {
  for (Values values : ALL_VALUES)
    for (int64_t n : {1, 15, 16, 17, 64, 80, 127}) norm_case<T>(kernels, 3, 1, n, 5, values);
  norm_case<T>(kernels, 1, 1, 1024, 0, Values::normal);
  norm_case<T>(kernels, 5, 3, 80, 7, Values::normal);
  norm_case<T, float>(kernels, 5, 3, 80, 7, Values::normal);
  for (int64_t head_dim : {2, 8, 64, 80, 96, 128, 256}) {
    rotation_case<T>(kernels, 1, 1, head_dim, 0);
    rotation_case<T>(kernels, 4, 3, head_dim, 16);
    centering_case<T>(kernels, 3, head_dim, 16);
  }
}

}  // namespace

void test_elementwise(const Kernels& kernels) {
  for (int threads : {1, 2}) {
    set_num_threads(threads);
    all_cases<float>(kernels);
    all_cases<uint16_t>(kernels);
  }
  set_num_threads(1);
}

}  // namespace twostroke::tests
