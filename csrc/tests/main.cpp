// Tests of every level's kernels against plain scalar code, without Python, so that they run under the compiler's sanitizers and
// on an emulated processor.
//
//   native_tests [LEVEL[:PART,...] ...]      all usable levels by default, and all parts of a level by default
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <utility>

#include "cpu.hpp"
#include "operators.hpp"
#include "tests/harness.hpp"

using namespace twostroke;

namespace {

constexpr std::pair<const char*, void (*)(const Kernels&)> PARTS[] = {
    {"linear", tests::test_linear},           {"quantized", tests::test_quantized}, {"attention", tests::test_attention},
    {"elementwise", tests::test_elementwise}, {"sampling", tests::test_sampling},
    {"experts", tests::test_experts},
};

// Returns whether a list such as "linear,sampling" has a part; an empty list has all.
bool has(const std::string& parts, const std::string& part) {
  return parts.empty() || ("," + parts + ",").find("," + part + ",") != std::string::npos;
}

}  // namespace

int main(int count, char** arguments) {
  std::vector<std::string> levels(arguments + 1, arguments + count);
  if (levels.empty()) levels = usable_levels();
  tests::test_threads();
  for (const auto& named : levels) {
    size_t colon = named.find(':');
    std::string level = named.substr(0, colon), parts = colon == std::string::npos ? "" : named.substr(colon + 1);
    try {
      const Kernels& kernels = kernels_of(level);
      tests::expect(level == kernels.level, "kernels_of(" + level + ") gives " + kernels.level);
      int64_t failures = tests::num_failures(), checks = tests::num_checks();
      for (auto [part, test] : PARTS)
        if (has(parts, part)) test(kernels);
      if (tests::num_checks() == checks) throw std::invalid_argument("no part is called " + parts);
      std::printf("%-12s %8lld checks, %lld failed\n", level.c_str(), (long long)(tests::num_checks() - checks),
                  (long long)(tests::num_failures() - failures));
      std::fflush(stdout);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s: %s\n", level.c_str(), error.what());
      return 2;
    }
  }
  return tests::num_failures() ? 1 : 0;
}
