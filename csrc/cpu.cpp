#include "cpu.hpp"

namespace twostroke {

const std::vector<std::string>& usable_levels() {
  static const std::vector<std::string> levels = [] {
    std::vector<std::string> found{"portable"};
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vnni");
    if (avx2) found.push_back("avx2");
    if (avx512) found.push_back("avx512");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) found.push_back("avx512_bf16");
#endif
    return found;
  }();
  return levels;
}

}  // namespace twostroke
