// The door between Python and the kernels: raw addresses in, nothing copied, the GIL released.
//
// Shapes and types are checked in Python (kernels/native), where tensors are; what arrives here is taken as it is.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <stdexcept>

#include "cpu.hpp"
#include "kernels/table.hpp"
#include "threads.hpp"

namespace nb = nanobind;
using namespace twostroke;

namespace {

const Kernels* table_of(const std::string& level) {
#if defined(__x86_64__)
  if (level == "avx512_bf16") return kernels_avx512_bf16();
  if (level == "avx512") return kernels_avx512();
  if (level == "avx2") return kernels_avx2();
#endif
  return kernels_portable();
}

const Kernels* active = table_of(usable_levels().back());

void use_level(const std::string& level) {
  for (const auto& usable : usable_levels())
    if (usable == level) {
      active = table_of(level);
      return;
    }
  throw std::invalid_argument("level " + level + " is not usable on this processor");
}

int64_t packed_bytes(int64_t n, int64_t k, int type) {
  int64_t step = type == (int)Dtype::bf16 ? 2 : 1;
  return (n + PANEL - 1) / PANEL * PANEL * ((k + step - 1) / step) * 4;
}

// weight [n, k] row-major to panels.
void pack_linear(uintptr_t weight, uintptr_t packed, int64_t n, int64_t k, int type) {
  int64_t step = type == (int)Dtype::bf16 ? 2 : 1, element = 4 / step, steps = (k + step - 1) / step;
  const char* from = (const char*)weight;
  char* to = (char*)packed;
  parallel((n + PANEL - 1) / PANEL, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; p++)
      for (int64_t c = 0; c < PANEL; c++) {
        int64_t channel = p * PANEL + c;
        char* column = to + (p * steps * PANEL + c) * 4;
        for (int64_t s = 0; s < steps; s++, column += PANEL * 4) {
          if (channel >= n) {
            std::memset(column, 0, 4);
            continue;
          }
          int64_t count = k - s * step < step ? k - s * step : step;
          if (count < step) std::memset(column, 0, 4);
          std::memcpy(column, from + (channel * k + s * step) * element, (size_t)(count * element));
        }
      }
  });
}

void linear(uintptr_t x, int64_t ldx, uintptr_t w, uintptr_t bias, uintptr_t y, int64_t ldy, int64_t m, int64_t n,
            int64_t k, int x_type, int y_type) {
  LinearArgs args{(const void*)x, ldx, (const void*)w, (const float*)bias, (void*)y, ldy, m, n, k, (Dtype)x_type,
                  (Dtype)y_type};
  const Kernels* kernels = active;
  parallel((n + PANEL - 1) / PANEL, 1, [&](int64_t begin, int64_t end) { kernels->linear_panels(args, begin, end); });
}

}  // namespace

NB_MODULE(_native, m) {
  auto release = nb::call_guard<nb::gil_scoped_release>();
  m.def("levels", [] { return usable_levels(); });
  m.def("level", [] { return std::string(active->level); });
  m.def("use_level", &use_level);
  m.def("set_num_threads", &set_num_threads, release);
  m.def("num_threads", &num_threads);
  m.def("packed_bytes", &packed_bytes);
  m.def("pack_linear", &pack_linear, release);
  m.def("linear", &linear, release);
}
