// Conversion of ggml's blocks to codes, scales and mins, with the bits of model/gguf/blocks.py.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "operators.hpp"

namespace twostroke {

// Destinations of one block's parts.
struct BlockParts {
  uint8_t *codes, *scales, *mins, *super_scale, *super_min;

  void put_half(uint8_t* to, const uint8_t* from) const { std::memcpy(to, from, 2); }
};

struct BlockType {
  const char* name;
  int64_t block_bytes, block_size, group;
  bool has_super_blocks;
  void (*unpack_blocks)(const uint8_t*, const BlockParts&);

  // Bytes of a block's scales, and of its mins.
  int64_t scale_bytes() const { return block_size / group * (has_super_blocks ? 1 : 2); }
};

// Throws std::invalid_argument for an unknown type.
const BlockType& block_type(const std::string& name);

// Supported types, by ggml's names.
std::vector<std::string> ggml_types();

// Converts consecutive blocks of a type to the parts of a weight whose rows are whole blocks.
void unpack_blocks(const std::string& type, uintptr_t blocks, int64_t num_blocks, const QuantizedParts& to);

}  // namespace twostroke
