// Experts: the choice of a router, the products of all experts as one list of panels, and both as a part of a layer.
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

  int64_t n() const { return experts_.front()->n(); }
  int type() const { return experts_.front()->type(); }

  // Rows of x [m, k], whose places `tokens` has, to y [num_pairs, n]; starts as `route` gives them.
  void multiply(uintptr_t x, int64_t ldx, uintptr_t tokens, uintptr_t starts, uintptr_t y, int64_t m, int64_t num_pairs) const;

  // Rows [num_pairs, k] to y [m, n]: the sums of the products of a token, each rounded first, times their weights, in float32 by
  // rising expert.
  void multiply_and_add(uintptr_t x, int64_t ldx, uintptr_t starts, uintptr_t places, uintptr_t weights, uintptr_t y, int64_t m,
                        int64_t num_chosen) const;

  // The second half of it: these sums, of float32 products [m * num_chosen, n] that experts elsewhere may have made.
  void add(uintptr_t products, uintptr_t places, uintptr_t weights, uintptr_t y, int64_t m, int64_t num_chosen) const;

 private:
  // The experts that have pairs. tokens: of pairs, where these are rows of x; 0: x has a row for each pair.
  std::vector<RowGroup> groups(uintptr_t starts, uintptr_t tokens = 0) const;

  std::vector<const PackedLinear*> experts_;
};

// What experts are as a part of a layer. All outlive it.
struct ExpertParts {
  const PackedLinear* router;           // of float32
  RouterRules rules;
  uintptr_t correction, expert_scales;  // see `route`
  const PackedExperts *gated, *down;
  const PackedLinear *shared_inner, *shared_down;  // of the expert that computes every token, or null
};

class Experts : public FeedForward {
 public:
  explicit Experts(const ExpertParts& parts) : parts_(parts) {}

  int64_t room_bytes() const override;
  void add_to(const HiddenRows& hidden, const Norm& norm, uintptr_t x, uintptr_t to, uintptr_t made, uintptr_t room,
              int64_t m) const override;

 private:
  ExpertParts parts_;
};

}  // namespace twostroke
