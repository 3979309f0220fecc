// The kernels of one instruction level, as plain functions: what module.cpp calls and each level fills in.
#pragma once

#include <cstdint>

namespace twostroke {

enum class Dtype : int32_t { f32 = 0, bf16 = 1 };

// y[M, N] = x[M, K] W^T + bias, W packed by pack_linear into panels (see linear.hpp).
struct LinearArgs {
  const void* x;      // [M, K], rows ldx elements apart
  int64_t ldx;
  const void* w;      // packed
  const float* bias;  // [N] or null
  void* y;            // [M, N], rows ldy elements apart
  int64_t ldy;
  int64_t m, n, k;
  Dtype x_type;       // of x and of the packed weights
  Dtype y_type;
};

struct Kernels {
  const char* level;
  // Computes panels [begin, end) of PANEL channels each.
  void (*linear_panels)(const LinearArgs&, int64_t begin, int64_t end);
};

constexpr int64_t LANES = 16;        // channels per vector
constexpr int64_t PANEL_VECTORS = 4;
constexpr int64_t PANEL = LANES * PANEL_VECTORS;

const Kernels* kernels_portable();
const Kernels* kernels_avx2();
const Kernels* kernels_avx512();
const Kernels* kernels_avx512_bf16();

}  // namespace twostroke
