#include "cpu.hpp"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include <set>

namespace twostroke {
namespace {

#if defined(__x86_64__)
// Tiles are register state that the system has to save, so a process has to request them once.
bool may_use_tiles() {
#if defined(__linux__)
  unsigned eax, ebx, ecx, edx;
  constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24, AMX_INT8 = 1u << 25, ALL = AMX_BF16 | AMX_TILE | AMX_INT8;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || (edx & ALL) != ALL) return false;
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return false;
#endif
}
#endif

}  // namespace

const std::vector<std::string>& usable_levels() {
  static const std::vector<std::string> levels = [] {
    std::vector<std::string> found;
#if defined(__x86_64__)
    found.push_back("portable");
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vnni");
    if (avx2) found.push_back("avx2");
    if (avx512) found.push_back("avx512");
    bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
    if (avx512_bf16) found.push_back("avx512_bf16");
    if (avx512_bf16 && may_use_tiles()) found.push_back("amx");
#elif defined(__aarch64__)
    found.push_back("neon");  // every 64-bit Arm has it
#if defined(__linux__)
    if (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) found.push_back("neon_dotprod");
#endif
#else
    found.push_back("portable");
#endif
#define LEVEL(name) #name,
    static const std::set<std::string> built{
#include "levels.inc"
    };
#undef LEVEL
    std::erase_if(found, [](const std::string& level) { return !built.contains(level); });
    return found;
  }();
  return levels;
}

}  // namespace twostroke
