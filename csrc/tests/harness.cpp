#include "tests/harness.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

namespace twostroke::tests {

uint64_t Random::bits() {
  uint64_t z = state_ += 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

double Random::uniform() { return (double)(bits() >> 11) * 0x1p-53; }

int64_t Random::below(int64_t limit) { return (int64_t)(bits() % (uint64_t)limit); }

double Random::normal() {  // Box and Muller, 1958
  return std::sqrt(-2 * std::log(1 - uniform())) * std::cos(6.283185307179586 * uniform());
}

const char* name_of(Values values) {
  switch (values) {
    case Values::normal: return "normal";
    case Values::large: return "large";
    case Values::tiny: return "tiny";
    case Values::mixed: return "mixed";
    case Values::opposed: return "opposed";
    case Values::sparse: return "sparse";
  }
  return "?";
}

float value_of(float element) { return element; }

float value_of(uint16_t element) {
  uint32_t bits = (uint32_t)element << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

float half_value(uint16_t half) {  // IEEE 754: sign, 5 bits of exponent, 10 of fraction
  int exponent = half >> 10 & 31, fraction = half & 1023;
  double magnitude = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
  return (float)(half & 0x8000 ? -magnitude : magnitude);
}

template <>
float nearest<float>(double value) { return (float)value; }

template <>
uint16_t nearest<uint16_t>(double value) {
  float single = (float)value;
  uint32_t bits;
  std::memcpy(&bits, &single, 4);
  uint32_t kept = bits >> 16, lost = bits & 0xffff;
  if (lost > 0x8000 || (lost == 0x8000 && kept % 2)) kept++;
  return (uint16_t)kept;
}

uint16_t nearest_half(double value) {
  int exponent = -13;
  if (value != 0) std::frexp(value, &exponent);
  exponent = std::max(exponent, -13);  // halves below 2^-14 are whole multiples of 2^-24
  auto digits = (int)std::nearbyint(std::ldexp(std::fabs(value), 11 - exponent));
  // the leading one of a normal half, and a carry out of its fraction, are added to the exponent
  return (uint16_t)((std::signbit(value) ? 0x8000 : 0) + (exponent + 13) * 1024 + digits);
}

template <typename T>
std::vector<T> random_elements(Random& random, int64_t count, Values values) {
  std::vector<T> elements((size_t)count);
  for (int64_t i = 0; i < count; i++) {
    double v = random.normal();
    switch (values) {
      case Values::normal: break;
      case Values::large: v *= 1e16; break;
      case Values::tiny: v *= 1e-20; break;
      case Values::mixed: v *= std::pow(10.0, 12 * random.uniform() - 6); break;
      case Values::opposed: v = i % 4 == 0 ? 1e6 : i % 4 == 1 ? -1e6 : v; break;
      case Values::sparse: v = random.below(4) ? (random.below(2) ? 0.0 : -0.0) : v; break;
    }
    elements[(size_t)i] = nearest<T>(v);
  }
  return elements;
}
template std::vector<float> random_elements<float>(Random&, int64_t, Values);
template std::vector<uint16_t> random_elements<uint16_t>(Random&, int64_t, Values);

namespace {
int64_t failures = 0, checks = 0;
constexpr int64_t MOST_MESSAGES = 20;
}  // namespace

std::string in_digits(double value) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%.9g", value);
  return digits;
}

void count_check() { checks++; }

void count_failure(const std::string& what) {
  if (failures++ < MOST_MESSAGES) std::fprintf(stderr, "FAILED %s\n", what.c_str());
}

int64_t num_checks() { return checks; }
int64_t num_failures() { return failures; }

}  // namespace twostroke::tests
