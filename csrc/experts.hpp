// Experts: the choice of a router, and the products of all experts as one list of panels.
#pragma once

#include <vector>

#include "layer.hpp"

namespace twostroke {

// How a router chooses; see kernels/reference/experts.py, whose numerics these are.
struct RouterRules {
  int64_t num_experts, num_chosen;
  bool is_sigmoid;  // else a softmax over all experts
  bool is_renormalized;
  double scale;
  int64_t num_groups, num_chosen_groups;
};

// Chooses the experts of each token and sorts the pairs of both by expert.
//
//   logits         float32 [m, num_experts]
//   correction     float32 [num_experts], or 0
//   expert_scales  float32 [num_experts], factors of the weights of each expert, or 0
//   tokens         int64 [m * num_chosen]: the token of each pair
//   starts         int64 [num_experts + 1]: where the pairs of each expert begin
//   places         int64 [m, num_chosen]: the pairs of each token, by rising expert
//   weights        float32 [m, num_chosen]
void route(const RouterRules& rules, uintptr_t logits, uintptr_t correction, uintptr_t expert_scales, int64_t m, uintptr_t tokens,
           uintptr_t starts, uintptr_t places, uintptr_t weights);

// The same map of all experts, in one format. All outlive it.
class PackedExperts {
 public:
  explicit PackedExperts(std::vector<const PackedLinear*> experts) : experts_(std::move(experts)) {}

  // Rows of x, whose places `tokens` has, to y [num_pairs, n]; starts as `route` gives them.
  void multiply(uintptr_t x, int64_t ldx, uintptr_t tokens, uintptr_t starts, uintptr_t y, int64_t num_pairs) const;

  // Rows [num_pairs, k] to y [m, n]: the sums of the products of a token, each rounded first, times their weights, in float32 by
  // rising expert.
  void multiply_and_add(uintptr_t x, int64_t ldx, uintptr_t starts, uintptr_t places, uintptr_t weights, uintptr_t y, int64_t m,
                        int64_t num_chosen) const;

  // The second half of it: these sums, of float32 products [m * num_chosen, n] that experts elsewhere may have made.
  void add(uintptr_t products, uintptr_t places, uintptr_t weights, uintptr_t y, int64_t m, int64_t num_chosen) const;

 private:
  std::vector<RowGroup> groups(uintptr_t starts) const;

  std::vector<const PackedLinear*> experts_;
};

}  // namespace twostroke
