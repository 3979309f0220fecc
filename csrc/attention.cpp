#include "attention.hpp"

#include <algorithm>
#include <vector>

#include "kernels/attention_items.hpp"
#include "threads.hpp"

namespace twostroke {
namespace {

// One item, or one partition of it.
struct Task {
  int64_t item;
  int64_t partition;  // -1: all of them
  float* outcome;
};

// An item whose partitions are computed apart: where their outcomes stand, the oldest first.
struct SplitItem {
  int64_t item;
  const float* outcomes;
};

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

// An item is split where one thread would still be busy with it when the others have nothing left: where it is more than
// half of a thread's share. Partitions are folded in the same order either way, so this changes no bit.
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

void write_all(const Kernels& kernels, const AttentionArgs& args) {
  std::vector<int32_t> seq_of_token((size_t)args.query_start[args.num_seqs]);
  for (int32_t seq = 0; seq < args.num_seqs; seq++)
    std::fill(seq_of_token.begin() + args.query_start[seq], seq_of_token.begin() + args.query_start[seq + 1], seq);
  int64_t tokens_per_task = std::max<int64_t>(1, 16384 / (2 * args.kv_heads * args.head_dim));
  parallel((int64_t)seq_of_token.size(), tokens_per_task, [&](int64_t begin, int64_t end) {
    kernels.write_kv(args, seq_of_token.data(), begin, end);
  });
}

}  // namespace

int64_t run_attention(const Kernels& kernels, const AttentionArgs& args) {
  if (args.token_heads > args.heads) write_all(kernels, args);
  std::vector<AttentionItem> items = cut_into_items(args);
  std::vector<bool> split = choose_split(args, items, num_threads());
  int64_t row_floats = outcome_row_floats(args.head_dim), num_floats = 0;
  for (size_t i = 0; i < items.size(); i++)
    if (split[i]) num_floats += keys_of(args, items[i]).num_partitions() * items[i].num_rows * row_floats;
  static thread_local std::vector<float> outcomes;
  outcomes.resize((size_t)num_floats);
  float* next = outcomes.data();
  std::vector<Task> tasks;
  std::vector<SplitItem> split_items;
  for (size_t i = 0; i < items.size(); i++) {
    if (!split[i]) {
      tasks.push_back({(int64_t)i, -1, nullptr});
      continue;
    }
    KeySpan keys = keys_of(args, items[i]);
    split_items.push_back({(int64_t)i, next});
    for (int64_t p = 0; p < keys.num_partitions(); p++, next += items[i].num_rows * row_floats)
      tasks.push_back({(int64_t)i, keys.first_partition() + p, next});
  }
  parallel((int64_t)tasks.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const Task& task = tasks[(size_t)i];
      const AttentionItem& item = items[(size_t)task.item];
      if (task.partition < 0) kernels.attend(args, item);
      else kernels.attend_partition(args, item, task.partition, task.outcome);
    }
  });
  parallel((int64_t)split_items.size(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const SplitItem& split_item = split_items[(size_t)i];
      kernels.combine(args, items[(size_t)split_item.item], split_item.outcomes);
    }
  });
  return (int64_t)tasks.size();
}

}  // namespace twostroke
