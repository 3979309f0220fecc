// Hadamard transform of K and V in int4, and of queries and results; src/twostroke/config/kv_format.py defines it.
#pragma once

#include <cstdint>

#include "vec.hpp"

namespace twostroke {
namespace {

// Returns how many numbers are transformed together.
inline int64_t hadamard_block(int64_t head_dim) {
  int64_t half = head_dim / 2;
  if (head_dim >= LANES && (head_dim & (head_dim - 1)) == 0) return head_dim;
  return half ? half & -half : 1;
}

// Divisors of stored vectors and of vectors that are read; their product is the block size.
struct HadamardFactors {
  float stored = 1, read = 1;
  explicit HadamardFactors(int64_t block) {
    for (int64_t left = block, turn = 0; left > 1; left /= 2, turn++) (turn % 2 ? stored : read) *= 0.5f;
  }
};

// Transforms each block of x in place; neighbours are added first, as in every backend.
inline void hadamard(float* x, int64_t n, int64_t block) {
  for (int64_t stride = 1; stride < block; stride *= 2)
    for (int64_t i = 0; i < n; i += 2 * stride)
      for (int64_t j = i; j < i + stride; j++) {
        float first = x[j], second = x[j + stride];
        x[j] = first + second;
        x[j + stride] = first - second;
      }
}

// Inverts the transform of a stored vector; also applied to a query where keys are stored transformed.
inline void hadamard_back(float* x, int64_t n) {
  int64_t block = hadamard_block(n);
  hadamard(x, n, block);
  float factor = HadamardFactors(block).read;
  for (int64_t i = 0; i < n; i++) x[i] *= factor;
}

}  // namespace
}  // namespace twostroke
