// Whole operators: packed weights, and a level's kernels run over all items on the pool of threads.
//
// Addresses are integers, as Python hands them over. Shapes and types are checked there, where tensors are; here they are
// taken as they are. Types are numbered as in kernels/table.hpp; an address of 0 says that there is no such tensor.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "attention.hpp"
#include "kernels/table.hpp"

namespace twostroke {

// The kernels of a level. Throws std::invalid_argument where this processor cannot run them.
const Kernels& kernels_of(const std::string& level);

// Bytes of a weight [n, k] in panels; of a gated one n counts the channels of one factor.
int64_t packed_bytes(int64_t n, int64_t k, bool gated, int type);

// The row of the weight that stands in a lane of a panel, or -1: [n, k], or [2 n, k] with G above U.
int64_t row_of_channel(int64_t channel, int64_t n, bool gated);

void pack_linear(uintptr_t weight, uintptr_t packed, int64_t n, int64_t k, bool gated, int type);

// Rows of a packed weight (not a gated one), for embeddings: ids int64 [count], out [count, k].
void unpack_rows(uintptr_t packed, uintptr_t ids, uintptr_t out, int64_t count, int64_t k, int type);

// Rows [from, from + count) of x, the weight that multiplies them, and where their products begin in y.
struct RowGroup {
  uintptr_t w, bias;
  int64_t from, to, count;
};

// x [m, k] with rows ldx elements apart to y [m, n] with rows ldy apart, as those of a residual are; bias in the panels' order, float32; gate is a Gate. In bfloat16 an odd k is read with the
// element behind it, which has to be zero. wide_y: y is float32, see LinearArgs.
void linear(const Kernels& kernels, uintptr_t x, int64_t ldx, std::span<const RowGroup> groups, uintptr_t residual, uintptr_t y,
            int64_t ldy, int64_t m, int64_t n, int64_t k, int gate, int type, bool wide_y);

// The same for quantized weights; see kernels/quantized.hpp.
int64_t packed_quantized_bytes(int64_t n, int64_t k, bool gated, const WeightFormat& format);

// The parts of a quantized weight [rows, k], each contiguous; 0 for those that its format does not have.
struct QuantizedParts {
  uintptr_t codes;         // uint8 [rows, k]
  uintptr_t scales, mins;  // float16 [rows, groups], or int8 where there are super-blocks
  uintptr_t super_scales = 0, super_mins = 0;  // float16 [rows, k / SUPER_BLOCK]
};

void pack_quantized(const QuantizedParts& parts, uintptr_t packed, int64_t n, int64_t k, bool gated, const WeightFormat& format);

// Rows of a packed weight (not a gated one) as float32, for embeddings.
void unpack_quantized_rows(uintptr_t packed, uintptr_t ids, uintptr_t out, int64_t count, int64_t k, const WeightFormat& format);

// A weight [n, k] to codes [n, k] and scales float16 [n, groups]; steps are the candidates tried for a scale.
void quantize_weight(const Kernels& kernels, uintptr_t weight, uintptr_t codes, uintptr_t scales, int64_t n, int64_t k,
                     int64_t group, const std::vector<float>& steps, int type);

// order int32 [k], or none, says which input comes where. Inputs are quantized on the fly, or multiplied as they are.
void quantized_linear(const Kernels& kernels, uintptr_t x, int64_t ldx, std::span<const RowGroup> groups, uintptr_t residual,
                      uintptr_t y, int64_t ldy, int64_t m, int64_t n, int64_t k, int gate, int type, const WeightFormat& format,
                      uintptr_t order, bool quantizes_inputs, bool wide_y);

// The weight is of x's type or float32.
void rms_norm(const Kernels& kernels, uintptr_t x, int64_t x_stride, uintptr_t weight, uintptr_t y, int64_t y_stride,
              int64_t rows, int64_t parts, int64_t n, float eps, int type, int weight_type);

void rotate(const Kernels& kernels, uintptr_t x, int64_t token_stride, int64_t tokens, int64_t heads, int64_t head_dim,
            uintptr_t cos, uintptr_t sin, int type);

// Numbers of bfloat16 as float32.
void widen(uintptr_t x, uintptr_t y, int64_t count);

// y = a + b, of so many elements; y may be either.
void add_rows(const Kernels& kernels, uintptr_t a, uintptr_t b, uintptr_t y, int64_t count, int type);

// One step of the layers that share a KV group; see StepAttention and AttentionArgs. Its arrays outlive it.
StepAttention step_attention(const Kernels& kernels, uintptr_t query_start, uintptr_t seq_lens, uintptr_t block_table, uintptr_t tree,
                             uintptr_t tree_start, int64_t num_seqs, int64_t max_blocks, int64_t heads, int64_t kv_heads,
                             int64_t head_dim, int64_t block_size, int64_t window, int type, int kv_format);

// One layer of it: turns q and k in place, by rms_norm's and rotate's kernels, where there is a norm_weight and a cos; subtracts
// a key_mean from k where there is one; writes K and V; then attends. Returns into how many tasks the attending was cut.
int64_t attention(const StepAttention& step, uintptr_t qkv, int64_t token_heads, uintptr_t storage, int64_t block_bytes, uintptr_t out,
                  float scale, float cap, uintptr_t sinks, uintptr_t slopes, uintptr_t cos, uintptr_t sin, uintptr_t norm_weight,
                  float eps, int weight_type, uintptr_t key_mean);

// See ArgmaxArgs.
void argmax(const Kernels& kernels, uintptr_t values, int64_t stride, int64_t rows, int64_t columns, uintptr_t winners);

// See GumbelArgs.
void gumbel_argmax(const Kernels& kernels, uintptr_t logits, int64_t stride, int64_t rows, int64_t vocab_size,
                   uintptr_t temperatures, uintptr_t keys, uintptr_t winners);

// See FilteredArgs.
void filtered_argmax(const Kernels& kernels, uintptr_t logits, int64_t stride, int64_t rows, int64_t vocab_size,
                     uintptr_t temperatures, uintptr_t keys, uintptr_t floors, uintptr_t top_k, uintptr_t top_p,
                     uintptr_t winners);

}  // namespace twostroke
