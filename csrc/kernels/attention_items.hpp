// Items and partitions of attention's work, and the keys that a query sees; shared by scheduling code and kernels.
#pragma once

#include "table.hpp"

namespace twostroke {
namespace {  // compiled once per level, with a copy in each

constexpr int64_t PARTITION = 512;  // keys, at absolute positions, of one separate running softmax

// Returns the key of a sequence's first token in this step. Earlier keys were written before.
inline int64_t first_own_key(const AttentionArgs& args, int64_t seq) {
  return args.seq_lens[seq] - (args.query_start[seq + 1] - args.query_start[seq]);
}

// Words of a tree's mask: the step's own tokens that a query sees, one bit each; null where it sees all before it.
inline int64_t tree_words(const AttentionArgs& args, int64_t seq) {
  return (args.query_start[seq + 1] - args.query_start[seq] + 63) / 64;
}
inline const uint64_t* tree_row(const AttentionArgs& args, int64_t seq, int64_t query) {
  if (!args.tree_start || args.tree_start[seq] < 0) return nullptr;
  return args.tree + args.tree_start[seq] + query * tree_words(args, seq);
}

// Returns the first key in a query's window. The position of a tree's query after the first is the number of tokens it sees.
inline int64_t oldest_key(const AttentionArgs& args, int64_t seq, int64_t query) {
  if (!args.window) return 0;
  int64_t own = query + 1;
  if (const uint64_t* row = tree_row(args, seq, query)) {
    own = 0;
    for (int64_t word = 0; word < tree_words(args, seq); word++) own += __builtin_popcountll(row[word]);
  }
  int64_t oldest = first_own_key(args, seq) + own - args.window;
  return oldest > 0 ? oldest : 0;
}

struct KeySpan {
  int64_t first, end;
  int64_t first_partition() const { return first / PARTITION; }
  int64_t num_partitions() const { return (end - 1) / PARTITION - first_partition() + 1; }
};

// Returns the keys that any row of an item sees.
inline KeySpan keys_of(const AttentionArgs& args, const AttentionItem& item) {
  int64_t group = args.heads / args.kv_heads;
  int64_t first_query = item.first_row / group, last_query = (item.first_row + item.num_rows - 1) / group;
  int64_t first = oldest_key(args, item.seq, first_query);
  for (int64_t query = first_query + 1; query <= last_query; query++) {
    int64_t oldest = oldest_key(args, item.seq, query);
    if (oldest < first) first = oldest;
  }
  return {first, first_own_key(args, item.seq) + last_query + 1};
}

// Floats of a partition's outcome for a row: the maximum, the sum and, from the next vector on, the weighted values.
inline int64_t outcome_row_floats(int64_t head_dim) { return LANES + (head_dim + LANES - 1) / LANES * LANES; }

}  // namespace
}  // namespace twostroke
