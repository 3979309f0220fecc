// ggml's blocks taken apart into codes, scales and mins: what model/gguf/blocks.py does in torch's operators, to the bit.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "operators.hpp"

namespace twostroke {

// Where the parts of one block go.
struct BlockParts {
  uint8_t *codes, *scales, *mins, *super_scale, *super_min;

  void put_half(uint8_t* to, const uint8_t* from) const { std::memcpy(to, from, 2); }
};

struct BlockType {
  const char* name;
  int64_t block_bytes, block_size, group;
  bool has_super_blocks;
  void (*take_apart)(const uint8_t*, const BlockParts&);

  // Of a block's scales, and of its mins.
  int64_t scale_bytes() const { return block_size / group * (has_super_blocks ? 1 : 2); }
};

// Throws std::invalid_argument for a type that is not known.
const BlockType& block_type(const std::string& name);

// The types that are known, as ggml names them.
std::vector<std::string> ggml_types();

// Blocks of a type, one behind the other, to the parts of a weight whose rows are of whole blocks.
void take_apart(const std::string& type, uintptr_t blocks, int64_t num_blocks, const QuantizedParts& to);

}  // namespace twostroke
