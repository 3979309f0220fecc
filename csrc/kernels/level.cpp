// Compiled once per instruction level; CMakeLists.txt sets the flags and the level's name.
#include "attention.hpp"
#include "decoded.hpp"
#include "elementwise.hpp"
#include "kv_write.hpp"
#include "filtered_sampling.hpp"
#include "linear.hpp"
#include "quantize.hpp"
#include "quantized.hpp"
#include "sampling.hpp"
#include "table.hpp"

namespace twostroke {

#define NAME_OF(level) #level
#define TEXT_OF(level) NAME_OF(level)
#define JOIN(a, b) a##b
#define FUNCTION_OF(level) JOIN(kernels_, level)

const Kernels* FUNCTION_OF(TWOSTROKE_LEVEL)() {
  static const Kernels table{TEXT_OF(TWOSTROKE_LEVEL), WIDE_INPUTS, linear_panels, linear_runs, linear_totals, quantized_panels,
                             decoded_panels, quantize_rows, quantize_weight, write_kv, attend, attend_partition, combine, rms_norm, rotate, center, add,
                             argmax, gumbel_argmax, filtered_argmax};
  return &table;
}

}  // namespace twostroke
