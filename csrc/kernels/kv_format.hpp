// Storage of keys and values: formats, and positions in a block.
//
// Within a block every KV head is contiguous, K and V alike; src/twostroke/config/kv_format.py defines the encoding of a number.
// Numbers are in the order that the products need, t the token in the block, d the dimension; a unit of K holds one dimension
// (f32) or two (all other formats) of a token:
//
//   K     tiles of 16 tokens, tokens in the lanes    [t / 16][unit][t % 16]
//   V     f32, int8   [t][d]
//         bf16        [t / 2][d] of 2 tokens
//         int4        [t][d / 16][8 bytes], byte j with dimension j low and j + 8 high (the last, narrower group: its half)
//   then  int8, int4  float16 scales [t], float16 zeros [t]
//
// Vectors of int4 are transformed (hadamard.hpp).
//
// (With blocks of fewer than 16 tokens, K has as many lanes as tokens; with 1 token, V in bf16 is plain.)
#pragma once

#include "linear.hpp"
#include "table.hpp"
#include "vec.hpp"

namespace twostroke {
namespace {

struct F32Format {
  using Element = float;
  static constexpr bool QUANTIZED = false;
  static constexpr int64_t UNIT = 4, DIMS = 1, TOKENS = 1;  // bytes of a unit of K, its dimensions, tokens side by side in V
  static int64_t row_bytes(int64_t head_dim) { return head_dim * 4; }
};

struct Bf16Format {
  using Element = uint16_t;
  static constexpr bool QUANTIZED = false;
  static constexpr int64_t UNIT = 4, DIMS = 2, TOKENS = 2;
  static int64_t row_bytes(int64_t head_dim) { return head_dim * 2; }
};

struct Int8Format {
  using Element = uint8_t;
  static constexpr bool QUANTIZED = true;
  static constexpr float LEVELS = 255.0f;
  static constexpr int64_t UNIT = 2, DIMS = 2, TOKENS = 1;
  static int64_t row_bytes(int64_t head_dim) { return head_dim; }
};

struct Int4Format {
  using Element = uint8_t;
  static constexpr bool QUANTIZED = true;
  static constexpr float LEVELS = 15.0f;
  static constexpr int64_t UNIT = 1, DIMS = 2, TOKENS = 1;
  static int64_t row_bytes(int64_t head_dim) { return head_dim / 2; }
};

// Operands of the products: type of elements, elements per unit of four bytes, and the format stored in their order.
struct F32Products {
  using Element = float;
  using Dot = F32Weights;
  using Format = F32Format;
  static constexpr int64_t E = 1;
};

struct Bf16Products {
  using Element = uint16_t;
  using Dot = Bf16Weights;
  using Format = Bf16Format;
  static constexpr int64_t E = 2;
};

// Positions in a head of a block, in bytes from its start.
template <typename F>
struct HeadOrder {
  int64_t block_size, head_dim, lanes, units, row_bytes;

  HeadOrder(int64_t block_size, int64_t head_dim)
      : block_size(block_size), head_dim(head_dim), lanes(block_size < LANES ? block_size : LANES),
        units(head_dim / F::DIMS), row_bytes(F::row_bytes(head_dim)) {}

  int64_t head_bytes() const { return block_size * (row_bytes + (F::QUANTIZED ? 4 : 0)); }
  int64_t tile_bytes() const { return lanes * row_bytes; }
  int64_t k(int64_t t, int64_t unit) const { return t / lanes * tile_bytes() + (unit * lanes + t % lanes) * F::UNIT; }
  // Position of a token's first dimension; further ones are v_step() apart.
  int64_t v(int64_t t) const {
    if (block_size < F::TOKENS) return 0;
    return t / F::TOKENS * F::TOKENS * row_bytes + t % F::TOKENS * (int64_t)sizeof(typename F::Element);
  }
  bool v_is_plain() const { return block_size < F::TOKENS || F::TOKENS == 1; }
  int64_t v_step() const { return (v_is_plain() ? 1 : F::TOKENS) * (int64_t)sizeof(typename F::Element); }
  int64_t scale(int64_t t) const { return block_size * row_bytes + t * 2; }
  int64_t zero(int64_t t) const { return scale(t) + block_size * 2; }
};

}  // namespace
}  // namespace twostroke
