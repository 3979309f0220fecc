// Decoder layer in one call, made of operators that are bound to their weights once.
#pragma once

#include <optional>
#include <vector>

#include "attention.hpp"
#include "operators.hpp"

namespace twostroke {

// Settings of a quantized weight's products; see quantized_linear.
struct QuantizedInputs {
  WeightFormat format;
  uintptr_t order;
  bool are_quantized;
};

// Packed weight and its bias; see `linear` and `quantized_linear`. Both must outlive it.
class PackedLinear {
 public:
  PackedLinear(const Kernels& kernels, uintptr_t w, uintptr_t bias, int64_t n, int64_t k, int gate, int type,
               std::optional<QuantizedInputs> quantized = {})
      : kernels_(kernels), w_(w), bias_(bias), n_(n), k_(k), gate_(gate), type_(type), quantized_(quantized) {}

  int64_t n() const { return n_; }
  int64_t k() const { return k_; }
  int type() const { return type_; }

  // Maps x [m, k], rows ldx elements apart, to y [m, n], rows ldy apart; a residual has y's layout.
  void multiply(uintptr_t x, int64_t ldx, uintptr_t residual, uintptr_t y, int64_t ldy, int64_t m, bool wide_y) const;

  // Maps groups of the m rows of x, each by the group's own weight; the weights differ only in their numbers.
  void multiply_groups(uintptr_t x, int64_t ldx, std::span<const RowGroup> groups, uintptr_t residual, uintptr_t y, int64_t ldy,
                       int64_t m, bool wide_y) const;

  RowGroup group(int64_t from, int64_t to, int64_t count) const { return {w_, bias_, from, to, count}; }

 private:
  const Kernels& kernels_;
  uintptr_t w_, bias_;
  int64_t n_, k_;
  int gate_, type_;
  std::optional<QuantizedInputs> quantized_;
};

// RMS norm; a weight of 0 means no norm.
struct Norm {
  uintptr_t weight = 0;
  float eps = 0;
  int weight_type = 0;
};

// Rows of hidden states, with the additions that parts of a layer make to them.
struct HiddenRows {
  const Kernels& kernels;
  int64_t size;  // numbers in a row
  int type;

  void norm(const Norm& norm, uintptr_t x, uintptr_t y, int64_t m) const;
  // to += norm(made), or += made without a norm; made is changed.
  void add(const Norm& norm, uintptr_t made, uintptr_t to, int64_t m) const;
  // to += norm(linear(x)), or += linear(x) without a norm; room is for the norm's input.
  void add(const Norm& norm, const PackedLinear& linear, uintptr_t x, int64_t ldx, uintptr_t to, uintptr_t room, int64_t m) const;
};

// Feed-forward half of a layer: an MLP, or experts. Its parts must outlive it.
class FeedForward {
 public:
  virtual ~FeedForward() = default;

  // Bytes of room for each row.
  virtual int64_t room_bytes() const = 0;

  // to += norm(f(x)), or += f(x) without a norm. made is room for rows of hidden states; x may lie there.
  virtual void add_to(const HiddenRows& hidden, const Norm& norm, uintptr_t x, uintptr_t to, uintptr_t made, uintptr_t room,
                      int64_t m) const = 0;
};

// MLP down(inner(x)), where inner is gated.
class GatedMlp : public FeedForward {
 public:
  GatedMlp(const PackedLinear& inner, const PackedLinear& down) : inner_(inner), down_(down) {}

  int64_t room_bytes() const override;
  void add_to(const HiddenRows& hidden, const Norm& norm, uintptr_t x, uintptr_t to, uintptr_t made, uintptr_t room,
              int64_t m) const override;

 private:
  const PackedLinear &inner_, &down_;
};

// Layer y = x + out_norm(output(attention(norm(x)))), then y + out_norm(feed_forward(norm(y))). Each norm is optional.
struct LayerParts {
  Norm attention_norm, attention_out_norm, mlp_norm, mlp_out_norm;
  Norm head_norm;                         // of each head of q and k
  std::vector<const PackedLinear*> qkv;   // consecutive ranges of q, k and v
  const PackedLinear* output;
  const FeedForward* feed_forward;
  float scale, cap;                       // see AttentionArgs, also for the next two
  uintptr_t sinks, slopes;
};

constexpr int64_t ROOM_KEPT = 1 << 20;

// Bytes of n numbers in a room whose parts start at cache lines.
int64_t room_for(int64_t n, int type);

class DecoderLayer {
 public:
  // The weights of both must outlive it. q_size: numbers in a row of q.
  DecoderLayer(const Kernels& kernels, const LayerParts& parts, int64_t hidden_size, int64_t q_size, int type);

  // Bytes of room for each row of x.
  int64_t room_bytes() const;

  // Computes x [m, hidden_size] in place; storage and block_bytes as for `attention`; cos and sin of the rotation, and key_mean,
  // or 0. room may be 0 where at most ROOM_KEPT bytes are needed, since each thread keeps so much.
  void run(const StepAttention& step, uintptr_t x, uintptr_t room, int64_t m, uintptr_t storage, int64_t block_bytes, uintptr_t cos,
           uintptr_t sin, uintptr_t key_mean) const;

 private:
  LayerParts parts_;
  HiddenRows hidden_;
  int64_t q_size_, qkv_size_ = 0;
};

}  // namespace twostroke
