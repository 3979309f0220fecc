// ggml's blocks taken apart into codes, scales and mins: what model/gguf/blocks.py does in torch's operators, to the bit.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "operators.hpp"

namespace twostroke {

// The types that take_apart knows, as ggml names them.
std::vector<std::string> ggml_types();

// Blocks of a type, one behind the other, to the parts of a weight whose rows are of whole blocks. Throws
// std::invalid_argument for a type that is not known.
void take_apart(const std::string& type, uintptr_t blocks, int64_t num_blocks, const QuantizedParts& to);

}  // namespace twostroke
