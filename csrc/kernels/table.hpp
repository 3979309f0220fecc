// Kernels of one instruction level as plain functions, which operators.cpp calls and each level provides.
#pragma once

#include <cstdint>

namespace twostroke {

enum class Dtype : int32_t { f32 = 0, bf16 = 1 };
enum class Gate : int32_t { none = 0, silu = 1, gelu_tanh = 2, clamped_swiglu = 3 };
enum class CodeTable : int32_t { none = 0, iq4 = 1, fp4 = 2 };
enum class KvFormat : int32_t { f32 = 0, bf16 = 1, int8 = 2, int4 = 3 };  // see kv_format.hpp

// y[M, N] = x[M, K] W^T + bias (+ residual), or gate(x G^T + ..) * (x U^T + ..); weights in panels (see linear.hpp).
struct LinearArgs {
  const void* x;         // [M, K], rows ldx elements apart, see Kernels::wide_inputs
  int64_t ldx;
  const void* w;         // packed weights
  const float* bias;     // one for each channel of all panels, or null
  const void* residual;  // [M, N] in y's layout, or null
  void* y;               // [M, N], rows ldy elements apart
  int64_t ldy;
  int64_t m, n, k;
  Gate gate;             // none: plain; otherwise vectors of G and U alternate in panels
  Dtype type;            // type of x, weights, residual and y
  bool wide_y;           // y is float32 in any case; its numbers are rounded to the type and widened
};

constexpr int64_t LANES = 16;        // channels per vector
constexpr int64_t PANEL_VECTORS = 4;
constexpr int64_t PANEL = LANES * PANEL_VECTORS;
constexpr int SEGMENTS = 4;          // runs of k that are summed separately
constexpr int64_t SPAN = 128;        // a multiple of every group size; runs of k are whole spans
constexpr int64_t SUPER_BLOCK = 256;  // k of ggml's K types that share a float16; a multiple of every group size
// Returns how many inputs share a scale: as many as numbers of the weight do, but at least 32.
constexpr int64_t input_group(int64_t group) { return group < 32 ? 32 : group; }

// Values of 4-bit codes in each CodeTable: ggml's steps that are finer near zero, and twice the floats e2m1.
constexpr int8_t TABLE_VALUES[][16] = {
    {},
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113},
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
};

// Meaning of a weight's codes, and positions of its parts in a panel; see quantized.hpp.
struct WeightFormat {
  int bits;               // bits of a code: 8, 6, 5, 4, 3 or 2
  int64_t group;          // k that share a scale
  bool has_min;
  bool has_super_blocks;  // scales and mins are bytes, multiplied by one float16 each per SUPER_BLOCK k
  CodeTable table = CodeTable::none;  // indexed by codes of 4 bits, without mins; rows are whole groups

  // Returns the value of a code as a multiple of the scale, before the min is subtracted.
  constexpr int value(int code) const {
    return table == CodeTable::none ? code - zero() : TABLE_VALUES[(int)table][code];
  }
  // Returns the code of 0 before the min is subtracted. Where a super-block has mins, codes count from them.
  constexpr int zero() const { return has_super_blocks && has_min ? 0 : 1 << (bits - 1); }
  constexpr int64_t groups(int64_t k) const { return (k + group - 1) / group; }

  constexpr int64_t code_bytes() const { return group * PANEL * bits / 8; }
  constexpr int64_t scale_bytes() const { return PANEL * (has_super_blocks ? 1 : 2); }
  // Returns whether a byte holds a scale and a min of 4 bits each.
  constexpr bool shares_bytes() const { return has_super_blocks && bits == 2; }
  constexpr int64_t group_bytes() const { return code_bytes() + scale_bytes() * (has_min && !shares_bytes() ? 2 : 1); }
  constexpr int64_t header_bytes() const { return has_super_blocks ? PANEL * 2 * (has_min ? 2 : 1) : 0; }
  // Return the bytes from the panel's start to group g, and to the header of its super-block.
  constexpr int64_t group_at(int64_t g) const { return g * group_bytes() + (g * group / SUPER_BLOCK + 1) * header_bytes(); }
  constexpr int64_t header_at(int64_t g) const {
    return g * group / SUPER_BLOCK * (SUPER_BLOCK / group * group_bytes() + header_bytes());
  }
  constexpr int64_t panel_bytes(int64_t k) const { return groups(k) ? group_at(groups(k) - 1) + group_bytes() : 0; }
};

// Rows quantized for integer products.
template <typename Q, typename Scale, typename Sum>
struct Integers {
  Q* q;             // [m, groups * group]
  Scale* scales;    // [m, input groups]
  Sum* sums;        // [m, groups]: sums of q
  Scale* weighted;  // [m, groups]: sums times their inputs' scale
};
using IntegerInputs = Integers<const int8_t, const float, const int32_t>;

// LinearArgs for weights of a WeightFormat, multiplied with 8-bit inputs (quantized.hpp, which does not read x) or with x itself
// (decoded.hpp, which does not read inputs).
struct QuantizedArgs {
  LinearArgs linear;
  WeightFormat format;
  int64_t groups;        // the last one is padded with zeros
  int64_t spans;         // number of spans of SPAN k
  int64_t input_groups;  // groups of input_group(group) k, each with its own scale
  IntegerInputs inputs;
  char* decoded;         // room for a panel's numbers, [groups * group][PANEL] of x's type
};

// Quantizes a weight [n, k] to codes of 8 bits with one scale per channel (group 0), or of 4 bits in groups of 32, 64 or 128.
struct QuantizeArgs {
  const void* weight;
  uint8_t* codes;      // [n, k]
  uint16_t* scales;    // float16 [n], or [n, groups]
  const float* steps;  // 4 bits: divisors of a group's extreme that give the candidates for its scale, at most LANES
  int64_t num_steps;
  int64_t k, group;
  Dtype type;
};

// Attention of one layer over a flat batch: consecutive queries of each sequence, which are its last tokens.
//
//   qkv      [num_tokens, token_heads, head_dim], rotated: q, k and v; or q alone, for a layer that reads another layer's K and V
//   storage  blocks of [layers_per_block][K, V][kv_heads][block_size tokens in the order of kv_format.hpp]
//   out      [num_tokens, heads, head_dim]
struct AttentionArgs {
  const void* qkv;
  char* storage;       // address of the layer in block 0
  void* out;
  const int32_t* query_start;  // [num_seqs + 1]
  const int32_t* seq_lens;     // [num_seqs]: lengths after this step
  const int32_t* block_table;  // [num_seqs, max_blocks]
  int64_t num_seqs, max_blocks;
  int64_t block_bytes;  // bytes from one block to the next
  int64_t heads, kv_heads, head_dim, block_size;
  int64_t token_heads;  // heads of each token in qkv
  int64_t window;       // keys a query sees, itself included; 0 for all
  float scale;
  float cap;        // scores become cap * tanh(score / cap); 0 for no cap
  const float* sinks;   // [heads]: score of a key without a value that every query sees, or null
  const float* slopes;  // [heads]: reduction of a score for each token between its query and its key, or null; not with trees
  Dtype type;       // type of qkv and out
  KvFormat format;  // format of the storage
  // Queries of draft trees: bits [query][own token of the step] in whole words per query, from tree + tree_start[seq] on.
  // A start of -1 means a sequence without a tree; without any tree both pointers are null.
  const uint64_t* tree;
  const int64_t* tree_start;  // [num_seqs]
};

// Rows of queries of one sequence that share a KV head: row r is query r / (heads per kv head).
struct AttentionItem {
  int32_t seq, kv_head, first_row, num_rows;
};

// Finds the largest number of each row, the first of equal ones; a NaN is larger than all numbers.
struct ArgmaxArgs {
  const float* values;  // [rows, columns], rows stride elements apart
  int64_t stride, columns;
  int64_t* winners;  // [rows]
};

// Draws by Gumbel-max from softmax(logits / temperature) for each row; see sampling.hpp.
struct GumbelArgs {
  const float* logits;  // [rows, vocab_size], rows stride elements apart
  int64_t stride, vocab_size;
  const float* temperatures;  // [rows], above 0
  const int64_t* keys;        // [rows]: keys of the noise
  int64_t* winners;           // [rows]; -1 where two scores are too close, or the largest logit is not finite
};

// GumbelArgs for draws among the tokens that pass min_p, top_k and top_p; see filtered_sampling.hpp.
struct FilteredArgs {
  GumbelArgs gumbel;
  const float* floors;   // [rows], log(min_p), or -inf
  const int64_t* top_k;  // [rows], at least 1; vocab_size where it is off
  const double* top_p;   // [rows], 1 where it is off
  float* scratch;        // filtered_scratch(vocab_size) floats for each running thread
};

struct Kernels {
  const char* level;
  bool wide_inputs;  // linear_panels and decoded_panels need inputs of bfloat16 as float32 (an even number)
  // Computes panels [begin, end) of PANEL channels each.
  void (*linear_panels)(const LinearArgs&, int64_t begin, int64_t end);
  // linear_panels for float32 in two steps, with the same bits: runs [begin, end) of k, SEGMENTS per panel, then totals of panels.
  // sums: [panels * SEGMENTS, m, PANEL].
  void (*linear_runs)(const LinearArgs&, float* sums, int64_t begin, int64_t end);
  void (*linear_totals)(const LinearArgs&, const float* sums, int64_t begin, int64_t end);
  void (*quantized_panels)(const QuantizedArgs&, int64_t begin, int64_t end);
  void (*decoded_panels)(const QuantizedArgs&, int64_t begin, int64_t end);
  // Quantizes rows [begin, end) of x [m, k] in groups; order [k], or null, is the input of each column.
  void (*quantize_rows)(const void* x, int64_t ldx, const int32_t* order, int64_t k, int64_t group,
                        const Integers<int8_t, float, int32_t>& to, Dtype, int64_t begin, int64_t end);
  // Quantizes rows [begin, end) of a weight.
  void (*quantize_weight)(const QuantizeArgs&, int64_t begin, int64_t end);
  // Stores K and V of tokens [begin, end) of the flat batch, which belong to the sequences seq_of_token.
  void (*write_kv)(const AttentionArgs&, const int32_t* seq_of_token, int64_t begin, int64_t end);
  // Attends for one item to all keys it sees.
  void (*attend)(const AttentionArgs&, const AttentionItem&);
  // attend in two steps, with the same bits: each partition separately, then all of them, the oldest first. An outcome has
  // num_rows x outcome_row_floats(head_dim) floats.
  void (*attend_partition)(const AttentionArgs&, const AttentionItem&, int64_t partition, float* outcome);
  void (*combine)(const AttentionArgs&, const AttentionItem&, const float* outcomes);
  // y[row][part] = x[row][part] / rms(x[row][part]) * weight[part], for rows [begin, end) of `parts` parts of n elements.
  // The types are those of x and of the weight, which has x's type or float32.
  void (*rms_norm)(const void* x, int64_t x_stride, const void* weight, void* y, int64_t y_stride, int64_t parts, int64_t n,
                   float eps, Dtype, Dtype, int64_t begin, int64_t end);
  // Rotates heads [tokens, heads, head_dim] in place by cos and signed sin [tokens, head_dim].
  void (*rotate)(void* x, int64_t token_stride, int64_t heads, int64_t head_dim, const void* cos, const void* sin, Dtype,
                 int64_t begin, int64_t end);
  // Subtracts mean [n] from k [tokens, n] in place.
  void (*center)(void* k, int64_t token_stride, const void* mean, int64_t n, Dtype, int64_t begin, int64_t end);
  // y[i] = a[i] + b[i], for i in [begin, end).
  void (*add)(const void* a, const void* b, void* y, Dtype, int64_t begin, int64_t end);
  void (*argmax)(const ArgmaxArgs&, int64_t begin, int64_t end);
  void (*gumbel_argmax)(const GumbelArgs&, int64_t begin, int64_t end);
  void (*filtered_argmax)(const FilteredArgs&, int64_t begin, int64_t end);
};

constexpr int64_t MAX_HEAD_DIM = 512;
constexpr int64_t SAMPLING_BLOCK = 4 * LANES;  // logits processed together
// Floats for the largest logit of each block, and for every logit.
constexpr int64_t filtered_scratch(int64_t vocab_size) { return vocab_size / SAMPLING_BLOCK + 1 + vocab_size; }
constexpr int64_t ITEM_ROWS = 48;  // most rows of an attention item

#define LEVEL(name) const Kernels* kernels_##name();
#include "levels.inc"  // levels that this module is built with, by CMakeLists.txt
#undef LEVEL

}  // namespace twostroke
