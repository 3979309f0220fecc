// The Hadamard transform of what int4 stores, and of queries and results for it; src/twostroke/config/kv_format.py defines it.
#pragma once

#include <cstdint>

#include "vec.hpp"

namespace twostroke {
namespace {

// Numbers that are transformed together.
inline int64_t hadamard_block(int64_t head_dim) {
  int64_t half = head_dim / 2;
  if (head_dim >= LANES && (head_dim & (head_dim - 1)) == 0) return head_dim;
  return half ? half & -half : 1;
}

// Of a vector that is stored, and of one that is read: their product is the block.
struct HadamardFactors {
  float stored = 1, read = 1;
  explicit HadamardFactors(int64_t block) {
    for (int64_t left = block, turn = 0; left > 1; left /= 2, turn++) (turn % 2 ? stored : read) *= 0.5f;
  }
};

// In place, of each block of x; additions of neighbours come first, as in every other back end.
inline void hadamard(float* x, int64_t n, int64_t block) {
  for (int64_t stride = 1; stride < block; stride *= 2)
    for (int64_t i = 0; i < n; i += 2 * stride)
      for (int64_t j = i; j < i + stride; j++) {
        float first = x[j], second = x[j + stride];
        x[j] = first + second;
        x[j + stride] = first - second;
      }
}

// Back from what is stored; also what a query becomes for keys that are stored so.
inline void hadamard_back(float* x, int64_t n) {
  int64_t block = hadamard_block(n);
  hadamard(x, n, block);
  float factor = HadamardFactors(block).read;
  for (int64_t i = 0; i < n; i++) x[i] *= factor;
}

}  // namespace
}  // namespace twostroke
