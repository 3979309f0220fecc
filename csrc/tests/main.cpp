// The kernels of every level against plain scalar code, without Python: so that they run under the compiler's sanitizers and
// on an emulated processor.
//
//   native_tests [LEVEL ...]      all usable levels where none is named
#include <cstdio>
#include <exception>

#include "cpu.hpp"
#include "operators.hpp"
#include "tests/harness.hpp"

using namespace twostroke;

int main(int count, char** arguments) {
  std::vector<std::string> levels(arguments + 1, arguments + count);
  if (levels.empty()) levels = usable_levels();
  tests::test_threads();
  for (const auto& level : levels) {
    try {
      const Kernels& kernels = kernels_of(level);
      tests::expect(level == kernels.level, "kernels_of(" + level + ") gives " + kernels.level);
      int64_t failures = tests::num_failures(), checks = tests::num_checks();
      tests::test_linear(kernels);
      tests::test_quantized(kernels);
      tests::test_attention(kernels);
      tests::test_elementwise(kernels);
      tests::test_sampling(kernels);
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
