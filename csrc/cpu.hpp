// What this processor can do, and which of the compiled levels to use.
#pragma once

#include <string>
#include <vector>

namespace twostroke {

// Levels that this module was built with and this processor can run, best last.
const std::vector<std::string>& usable_levels();

}  // namespace twostroke
