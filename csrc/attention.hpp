// Attention of one layer, distributed over the threads.
#pragma once

#include <vector>

#include "kernels/table.hpp"

namespace twostroke {

// Operations on q and k before K and V are written: a norm of each head, rotary embedding, then subtraction of the mean from k.
// Each of them is optional.
struct QKNormRope {
  const void* cos;     // [num_tokens, head_dim], or null
  const void* sin;     // [num_tokens, head_dim], signed, or null
  const void* weight;  // of the norm [heads of q and k, head_dim], or null
  float eps;
  Dtype weight_type;   // that of q and k, or float32
  const void* key_mean;  // [kv_heads, head_dim] in the type of k, or null
};

// One step of the layers of a KV group. The work is divided once, and every layer then makes the same call.
class StepAttention {
 public:
  // Reads the fields of step that are the same for all layers: all but qkv, storage, out, block_bytes, token_heads, scale, cap,
  // sinks and slopes.
  StepAttention(const Kernels& kernels, const AttentionArgs& step);

  // With the other fields filled in: applies norm and rotation to q and k of qkv in place, writes K and V if qkv has them, then
  // attends. Returns the number of attention tasks.
  int64_t run(const AttentionArgs& layer, const QKNormRope& qk) const;

  const AttentionArgs& step() const { return step_; }

 private:
  // An item, or one partition of it.
  struct Task {
    int64_t item;
    int64_t partition;  // -1: all partitions
    int64_t outcome;    // start of the partition's outcome among all outcomes, in floats
  };
  // Item whose partitions are computed separately, with the start of their outcomes, the oldest first.
  struct SplitItem {
    int64_t item, outcomes;
  };

  void prepare(const AttentionArgs& layer, const QKNormRope& qk) const;

  const Kernels& kernels_;
  AttentionArgs step_;
  std::vector<int32_t> seq_of_token_;
  std::vector<AttentionItem> items_;
  std::vector<Task> tasks_;
  std::vector<SplitItem> split_items_;
  int64_t outcome_floats_ = 0;
};

}  // namespace twostroke
