// One layer's attention, handed out to the threads.
#pragma once

#include "kernels/table.hpp"

namespace twostroke {

// Writes the step's K and V, then attends. Returns into how many tasks the attending was cut.
int64_t run_attention(const Kernels& kernels, const AttentionArgs& args);

}  // namespace twostroke
