// Experts: the router's choice, the products of all experts as one list of panels, and both as the sparse MLP of a layer.
#pragma once

#include <vector>

#include "layer.hpp"

namespace twostroke {

// Rules of a router's choice; kernels/reference/experts.py defines the numerics.
struct RouterRules {
  int64_t num_experts, num_chosen;
  bool is_sigmoid;  // otherwise a softmax over all experts
  bool is_renormalized;
  double scale;
  int64_t num_groups, num_chosen_groups;
};

// Chooses the experts of each token and sorts the pairs of token and expert by expert.
//
//   logits         float32 [m, num_experts]
//   correction     float32 [num_experts], or 0
//   expert_scales  float32 [num_experts], factors of the weights of each expert, or 0
//   tokens         int64 [m * num_chosen]: the token of each pair
//   starts         int64 [num_experts + 1]: where the pairs of each expert start
//   places         int64 [m, num_chosen]: the pairs of each token, in order of rising expert
//   weights        float32 [m, num_chosen]
//   counts         int64 [num_experts], to which each expert's number of pairs is added, or 0
void route(const RouterRules& rules, uintptr_t logits, uintptr_t correction, uintptr_t expert_scales, int64_t m, uintptr_t tokens,
           uintptr_t starts, uintptr_t places, uintptr_t weights, uintptr_t counts = 0);

// One linear map of all experts, in one format. The maps must outlive it.
class PackedExperts {
 public:
  explicit PackedExperts(std::vector<const PackedLinear*> experts) : experts_(std::move(experts)) {}

  int64_t n() const { return experts_.front()->n(); }
  int type() const { return experts_.front()->type(); }
  // Experts whose weights were multiplied so far, counted in each call.
  int64_t num_multiplied() const { return num_multiplied_; }

  // Maps rows `tokens` of x [m, k] to y [num_pairs, n]; starts as in `route`.
  void multiply(uintptr_t x, int64_t ldx, uintptr_t tokens, uintptr_t starts, uintptr_t y, int64_t m, int64_t num_pairs) const;

  // Maps rows [num_pairs, k] to y [m, n]: the sums of a token's products, each rounded first, times their weights, in float32 in
  // order of rising expert.
  void multiply_and_add(uintptr_t x, int64_t ldx, uintptr_t starts, uintptr_t places, uintptr_t weights, uintptr_t y, int64_t m,
                        int64_t num_chosen) const;

  // Computes these sums alone, from float32 products [m * num_chosen, n], which other ranks may have computed.
  void add(uintptr_t products, uintptr_t places, uintptr_t weights, uintptr_t y, int64_t m, int64_t num_chosen) const;

 private:
  // Returns the experts that have pairs. tokens: row of x for each pair; 0 if x has a row for each pair.
  std::vector<RowGroup> groups(uintptr_t starts, uintptr_t tokens = 0) const;

  std::vector<const PackedLinear*> experts_;
  mutable int64_t num_multiplied_ = 0;  // one thread at a time computes a layer
};

// Parts of a layer's experts. All must outlive it.
struct ExpertParts {
  const PackedLinear* router;                   // float32
  RouterRules rules;
  uintptr_t correction, expert_scales, counts;  // see `route`
  const PackedExperts *gated, *down;
  const PackedLinear *shared_inner, *shared_down;  // expert that computes every token, or null
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
