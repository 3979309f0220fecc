// Helpers of all tests here: numbers to compute with, and checks that report the case in which they failed.
//
// Tensors are vectors of exactly their size, so that AddressSanitizer detects a read or a write after any of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/table.hpp"

namespace twostroke::tests {

// ---------------------------------------------------------------- numbers

// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): the same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits();
  double uniform();               // in [0, 1)
  int64_t below(int64_t limit);   // 0 to limit - 1
  double normal();

 private:
  uint64_t state_;
};

// Kinds of values in a case.
enum class Values {
  normal,
  large,    // products near the end of float32's range
  tiny,     // products below it
  mixed,    // twelve orders of magnitude in one row
  opposed,  // large ones that cancel, and small ones that remain
  sparse,   // zeros of both signs, some others
};
constexpr Values ALL_VALUES[] = {Values::normal, Values::large,   Values::tiny,
                                 Values::mixed,  Values::opposed, Values::sparse};
const char* name_of(Values);

template <typename T>  // float, or uint16_t for bfloat16
constexpr int TYPE = std::is_same_v<T, float> ? (int)Dtype::f32 : (int)Dtype::bf16;
template <typename T>
constexpr const char* TYPE_NAME = std::is_same_v<T, float> ? "f32" : "bf16";
template <typename T>  // half a unit in the last place, relative
constexpr double ROUNDING = std::is_same_v<T, float> ? 0x1p-24 : 0x1p-8;

float value_of(float element);
float value_of(uint16_t element);
float half_value(uint16_t half);

// Rounds to the nearest T by integers alone, unlike the kernels.
template <typename T>
T nearest(double value);
uint16_t nearest_half(double value);  // within the range of halves

template <typename T>
std::vector<T> random_elements(Random&, int64_t count, Values);

// Address of a tensor for operators.hpp; 0 for an empty one.
template <typename T>
uintptr_t at(const std::vector<T>& tensor) { return tensor.empty() ? 0 : (uintptr_t)tensor.data(); }

// ---------------------------------------------------------------- checks

std::string in_digits(double);

// Describes a case for messages: "n=1 k=2".
template <typename... Parts>
std::string text(const Parts&... parts) {
  auto one = [](const auto& part) -> std::string {
    using Part = std::decay_t<decltype(part)>;
    if constexpr (std::is_floating_point_v<Part>) return in_digits(part);
    else if constexpr (std::is_integral_v<Part>) return std::to_string(part);
    else return part;
  };
  std::string whole;
  ((whole += one(parts)), ...);
  return whole;
}

void count_check();
void count_failure(const std::string& what);
int64_t num_checks();
int64_t num_failures();

// `what` describes the case: a text, or a function that makes one only when it is needed.
template <typename What>
void expect(bool holds, const What& what) {
  count_check();
  if (holds) return;
  if constexpr (std::is_invocable_v<What>) count_failure(what());
  else count_failure(what);
}

// Checks |found - expected| <= tolerance; NaN always fails.
template <typename What>
void expect_close(double found, double expected, double tolerance, const What& what) {
  expect(std::fabs(found - expected) <= tolerance, [&] {
    return text(what(), ": ", found, ", expected ", expected, " within ", tolerance);
  });
}

template <typename T>
bool same_bits(const T* a, const T* b, int64_t count) { return std::memcmp(a, b, (size_t)count * sizeof(T)) == 0; }

// ---------------------------------------------------------------- the tests

void test_linear(const Kernels&);
void test_quantized(const Kernels&);
void test_attention(const Kernels&);
void test_elementwise(const Kernels&);
void test_sampling(const Kernels&);
void test_experts(const Kernels&);
void test_threads();

}  // namespace twostroke::tests
