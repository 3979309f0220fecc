// Pause of a spinning loop between two checks.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace twostroke {

inline void pause_a_little() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

}  // namespace twostroke
