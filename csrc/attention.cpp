#include "attention.hpp"

#include <algorithm>

#include "kernels/attention_items.hpp"
#include "threads.hpp"

namespace twostroke {
namespace {

std::vector<AttentionItem> cut_into_items(const AttentionArgs& args) {
  std::vector<AttentionItem> items;
  int64_t group = args.heads / args.kv_heads;
  for (int32_t seq = 0; seq < args.num_seqs; seq++) {
    int64_t rows = (args.query_start[seq + 1] - args.query_start[seq]) * group;
    for (int32_t head = 0; head < args.kv_heads; head++)
      for (int64_t row = 0; row < rows; row += ITEM_ROWS)
        items.push_back({seq, head, (int32_t)row, (int32_t)std::min(ITEM_ROWS, rows - row)});
  }
  return items;
}

// Splits an item that is more than half of a thread's share, so that one thread is not still busy with it when the rest are
// idle. Partitions are folded in the same order either way, so this changes no bit.
std::vector<bool> choose_split(const AttentionArgs& args, const std::vector<AttentionItem>& items, int threads) {
  std::vector<bool> split(items.size());
  if (threads == 1) return split;
  std::vector<int64_t> work;
  int64_t total = 0;
  for (const auto& item : items) total += work.emplace_back(keys_of(args, item).num_partitions() * item.num_rows);
  for (size_t i = 0; i < items.size(); i++)
    split[i] = work[i] > items[i].num_rows && 2 * threads * work[i] > total;
  return split;
}

}  // namespace

StepAttention::StepAttention(const Kernels& kernels, const AttentionArgs& step)
    : kernels_(kernels), step_(step), seq_of_token_((size_t)step.query_start[step.num_seqs]), items_(cut_into_items(step)) {
  for (int32_t seq = 0; seq < step.num_seqs; seq++)
    std::fill(seq_of_token_.begin() + step.query_start[seq], seq_of_token_.begin() + step.query_start[seq + 1], seq);
  std::vector<bool> split = choose_split(step, items_, num_threads());
  int64_t row_floats = outcome_row_floats(step.head_dim);
  for (size_t i = 0; i < items_.size(); i++) {
    if (!split[i]) {
      tasks_.push_back({(int64_t)i, -1, 0});
      continue;
    }
    KeySpan keys = keys_of(step, items_[i]);
    split_items_.push_back({(int64_t)i, outcome_floats_});
    for (int64_t p = 0; p < keys.num_partitions(); p++, outcome_floats_ += items_[i].num_rows * row_floats)
      tasks_.push_back({(int64_t)i, keys.first_partition() + p, outcome_floats_});
  }
}

// Work on each token before attention: norm and rotation of its heads, then writing K and V, in one task.
void StepAttention::prepare(const AttentionArgs& layer, const QKNormRope& qk) const {
  bool writes = layer.token_heads > layer.heads;
  if (!writes && !qk.cos && !qk.weight) return;
  int64_t dim = layer.head_dim, stride = layer.token_heads * dim;
  int64_t qk_heads = writes ? layer.heads + layer.kv_heads : layer.heads;
  int64_t tokens_per_task = std::max<int64_t>(1, 16384 / stride);
  void* qkv = const_cast<void*>(layer.qkv);
  void* k = (char*)qkv + layer.heads * dim * (layer.type == Dtype::bf16 ? 2 : 4);
  parallel((int64_t)seq_of_token_.size(), tokens_per_task, [&](int64_t begin, int64_t end) {
    if (qk.weight)
      kernels_.rms_norm(qkv, stride, qk.weight, qkv, stride, qk_heads, dim, qk.eps, layer.type, qk.weight_type, begin, end);
    if (qk.cos) kernels_.rotate(qkv, stride, qk_heads, dim, qk.cos, qk.sin, layer.type, begin, end);
    if (writes && qk.key_mean) kernels_.center(k, stride, qk.key_mean, layer.kv_heads * dim, layer.type, begin, end);
    if (writes) kernels_.write_kv(layer, seq_of_token_.data(), begin, end);
  });
}

int64_t StepAttention::run(const AttentionArgs& layer, const QKNormRope& qk) const {
  prepare(layer, qk);
  static thread_local std::vector<float> room;
  room.resize((size_t)outcome_floats_);
  float* outcomes = room.data();
  parallel((int64_t)tasks_.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const Task& task = tasks_[(size_t)i];
      const AttentionItem& item = items_[(size_t)task.item];
      if (task.partition < 0) kernels_.attend(layer, item);
      else kernels_.attend_partition(layer, item, task.partition, outcomes + task.outcome);
    }
  });
  parallel((int64_t)split_items_.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const SplitItem& split_item = split_items_[(size_t)i];
      kernels_.combine(layer, items_[(size_t)split_item.item], outcomes + split_item.outcomes);
    }
  });
  return (int64_t)tasks_.size();
}

}  // namespace twostroke
