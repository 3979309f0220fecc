// Instruction levels of this processor.
#pragma once

#include <string>
#include <vector>

namespace twostroke {

// Levels that this module was built with and that this processor can run, best last.
const std::vector<std::string>& usable_levels();

}  // namespace twostroke
