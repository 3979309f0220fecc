// One layer's attention, handed out to the threads.
#pragma once

#include <vector>

#include "kernels/table.hpp"

namespace twostroke {

// What is done to q and k before K and V are written: a norm over each head, then rotation; and k loses its mean. Each where
// there is one.
struct HeadTurn {
  const void* cos;     // [num_tokens, head_dim], or null
  const void* sin;     // the same, signed
  const void* weight;  // of the norm [turned heads, head_dim], or null
  float eps;
  Dtype weight_type;   // that of q and k, or float32
  const void* key_mean;  // [kv_heads, head_dim] in the type of k, or null
};

// One step of the layers that share a KV group. How its work is cut up is found once; every layer is then the same call.
class StepAttention {
 public:
  // Of step the fields that are the same for all layers are read: all but qkv, storage, out, block_bytes, token_heads, scale,
  // cap, sinks and slopes.
  StepAttention(const Kernels& kernels, const AttentionArgs& step);

  // With the other fields filled in: turns q and k of qkv in place, writes K and V where they are there, then attends. Returns
  // into how many tasks the attending was cut.
  int64_t run(const AttentionArgs& layer, const HeadTurn& turn) const;

  const AttentionArgs& step() const { return step_; }

 private:
  // One item, or one partition of it.
  struct Task {
    int64_t item;
    int64_t partition;  // -1: all of them
    int64_t outcome;    // where among all outcomes that of the partition begins, in floats
  };
  // An item whose partitions are computed apart: where their outcomes begin, the oldest first.
  struct SplitItem {
    int64_t item, outcomes;
  };

  void prepare(const AttentionArgs& layer, const HeadTurn& turn) const;

  const Kernels& kernels_;
  AttentionArgs step_;
  std::vector<int32_t> seq_of_token_;
  std::vector<AttentionItem> items_;
  std::vector<Task> tasks_;
  std::vector<SplitItem> split_items_;
  int64_t outcome_floats_ = 0;
};

}  // namespace twostroke
