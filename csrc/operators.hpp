// Operators: packed weights, and kernels of a level run over all items on the pool of threads.
//
// Addresses are integers, as Python passes them. Python has checked shapes and types; they are not checked here. Types have the
// codes of kernels/table.hpp; an address of 0 means that there is no such tensor.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "attention.hpp"
#include "kernels/table.hpp"

namespace twostroke {

// Returns the kernels of a level. Throws std::invalid_argument if this processor cannot run them.
const Kernels& kernels_of(const std::string& level);

// Bytes of a weight [n, k] in panels; for a gated one n is the channels of one factor.
int64_t packed_bytes(int64_t n, int64_t k, bool gated, int type);

// Row of the weight in a lane of a panel, or -1; the weight is [n, k], or [2 n, k] with G above U.
int64_t row_of_channel(int64_t channel, int64_t n, bool gated);

void pack_linear(uintptr_t weight, uintptr_t packed, int64_t n, int64_t k, bool gated, int type);

// Unpacks rows of a packed weight without a gate, for embeddings: ids int64 [count], out [count, k].
void unpack_rows(uintptr_t packed, uintptr_t ids, uintptr_t out, int64_t count, int64_t k, int type);

// Rows [from, from + count) of x, the weight that multiplies them, and the start of their products in y.
struct RowGroup {
  uintptr_t w, bias;
  int64_t from, to, count;
};

// Maps x [m, k], rows ldx elements apart, to y [m, n], rows ldy apart; a residual has y's layout. bias is float32 in the panels'
// order; gate is a Gate. In bfloat16 an odd k is read with the element after it, which must be zero. wide_y: y is float32, see
// LinearArgs.
void linear(const Kernels& kernels, uintptr_t x, int64_t ldx, std::span<const RowGroup> groups, uintptr_t residual, uintptr_t y,
            int64_t ldy, int64_t m, int64_t n, int64_t k, int gate, int type, bool wide_y);

// packed_bytes of quantized weights; see kernels/quantized.hpp.
int64_t packed_quantized_bytes(int64_t n, int64_t k, bool gated, const WeightFormat& format);

// Parts of a quantized weight [rows, k], each contiguous; 0 for parts that its format does not have.
struct QuantizedParts {
  uintptr_t codes;         // uint8 [rows, k]
  uintptr_t scales, mins;  // float16 [rows, groups], or int8 with super-blocks
  uintptr_t super_scales = 0, super_mins = 0;  // float16 [rows, k / SUPER_BLOCK]
};

void pack_quantized(const QuantizedParts& parts, uintptr_t packed, int64_t n, int64_t k, bool gated, const WeightFormat& format);

// Unpacks rows of a packed weight without a gate as float32, for embeddings.
void unpack_quantized_rows(uintptr_t packed, uintptr_t ids, uintptr_t out, int64_t count, int64_t k, const WeightFormat& format);

// Quantizes a weight [n, k] to codes [n, k] and scales float16 [n, groups]; steps are the divisors tried for a scale.
void quantize_weight(const Kernels& kernels, uintptr_t weight, uintptr_t codes, uintptr_t scales, int64_t n, int64_t k,
                     int64_t group, const std::vector<float>& steps, int type);

// `linear` for quantized weights. order, int32 [k] or 0, is the input of each column. Inputs are quantized during the call, or
// used as they are.
void quantized_linear(const Kernels& kernels, uintptr_t x, int64_t ldx, std::span<const RowGroup> groups, uintptr_t residual,
                      uintptr_t y, int64_t ldy, int64_t m, int64_t n, int64_t k, int gate, int type, const WeightFormat& format,
                      uintptr_t order, bool quantizes_inputs, bool wide_y);

// The weight has x's type or float32.
void rms_norm(const Kernels& kernels, uintptr_t x, int64_t x_stride, uintptr_t weight, uintptr_t y, int64_t y_stride,
              int64_t rows, int64_t parts, int64_t n, float eps, int type, int weight_type);

void rotate(const Kernels& kernels, uintptr_t x, int64_t token_stride, int64_t tokens, int64_t heads, int64_t head_dim,
            uintptr_t cos, uintptr_t sin, int type);

// Converts bfloat16 to float32.
void widen(uintptr_t x, uintptr_t y, int64_t count);

// y = a + b for `count` elements; y may be a or b.
void add_rows(const Kernels& kernels, uintptr_t a, uintptr_t b, uintptr_t y, int64_t count, int type);

// Plans one step of the layers of a KV group; see StepAttention and AttentionArgs. The arrays must outlive it.
StepAttention step_attention(const Kernels& kernels, uintptr_t query_start, uintptr_t seq_lens, uintptr_t block_table, uintptr_t tree,
                             uintptr_t tree_start, int64_t num_seqs, int64_t max_blocks, int64_t heads, int64_t kv_heads,
                             int64_t head_dim, int64_t block_size, int64_t window, int type, int kv_format);

// Computes one layer: applies norm and rotation to q and k in place if norm_weight and cos are given, subtracts key_mean from k
// if it is given, writes K and V, then attends. Returns the number of attention tasks.
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
