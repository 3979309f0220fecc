#include "layer.hpp"

#include <algorithm>

namespace twostroke {
namespace {

int64_t element_bytes(int type) { return type == (int)Dtype::bf16 ? 2 : 4; }

// Bytes of a row in a room whose parts begin at whole cache lines.
int64_t row_bytes(int64_t n, int type) { return (n * element_bytes(type) + 63) / 64 * 64; }

}  // namespace

void PackedLinear::multiply(uintptr_t x, int64_t ldx, uintptr_t residual, uintptr_t y, int64_t ldy, int64_t m, bool wide_y) const {
  RowGroup all = group(0, m);
  multiply_groups(x, ldx, {&all, 1}, residual, y, ldy, m, wide_y);
}

void PackedLinear::multiply_groups(uintptr_t x, int64_t ldx, std::span<const RowGroup> groups, uintptr_t residual, uintptr_t y,
                                   int64_t ldy, int64_t m, bool wide_y) const {
  if (quantized_)
    quantized_linear(kernels_, x, ldx, groups, residual, y, ldy, m, n_, k_, gate_, type_, quantized_->format, quantized_->order,
                     quantized_->are_quantized, wide_y);
  else
    linear(kernels_, x, ldx, groups, residual, y, ldy, m, n_, k_, gate_, type_, wide_y);
}

DecoderLayer::DecoderLayer(const Kernels& kernels, const LayerParts& parts, int64_t hidden_size, int64_t q_size, int type)
    : kernels_(kernels), parts_(parts), hidden_size_(hidden_size), q_size_(q_size), inner_size_(parts.inner->n()), type_(type) {
  for (const PackedLinear* part : parts.qkv) qkv_size_ += part->n();
}

int64_t DecoderLayer::room_bytes() const {
  return row_bytes(hidden_size_, type_) +
         std::max(row_bytes(qkv_size_, type_) + row_bytes(q_size_, type_), row_bytes(inner_size_, type_));
}

void DecoderLayer::norm(const Norm& norm, uintptr_t x, uintptr_t y, int64_t m) const {
  rms_norm(kernels_, x, hidden_size_, norm.weight, y, hidden_size_, m, 1, hidden_size_, norm.eps, type_, norm.weight_type);
}

void DecoderLayer::add(const PackedLinear& linear, const Norm& of_output, uintptr_t x, int64_t ldx, uintptr_t to, uintptr_t room,
                       int64_t m) const {
  if (!of_output.weight) return linear.multiply(x, ldx, to, to, hidden_size_, m, false);
  linear.multiply(x, ldx, 0, room, hidden_size_, m, false);
  norm(of_output, room, room, m);
  add_rows(kernels_, to, room, to, m * hidden_size_, type_);
}

void DecoderLayer::run(const StepAttention& step, uintptr_t x, uintptr_t room, int64_t m, uintptr_t storage, int64_t block_bytes,
                       uintptr_t cos, uintptr_t sin, uintptr_t key_mean) const {
  static thread_local std::vector<char> kept;
  if (!room) {
    kept.resize((size_t)(m * room_bytes()) + 64);
    room = ((uintptr_t)kept.data() + 63) / 64 * 64;
  }
  uintptr_t normed = room, qkv = room + (uintptr_t)(m * row_bytes(hidden_size_, type_)), inner = qkv;
  uintptr_t attended = qkv + (uintptr_t)(m * row_bytes(qkv_size_, type_));
  auto after = [&](const Norm& before, uintptr_t rows) {  // the rows, or what a norm makes of them
    if (before.weight) norm(before, rows, normed, m);
    return before.weight ? normed : rows;
  };

  uintptr_t from = after(parts_.attention_norm, x), to = qkv;
  for (const PackedLinear* part : parts_.qkv) {
    part->multiply(from, hidden_size_, 0, to, qkv_size_, m, false);
    to += (uintptr_t)(part->n() * element_bytes(type_));
  }
  const AttentionArgs& shape = step.step();
  const Norm& of_heads = parts_.head_norm;
  attention(step, qkv, qkv_size_ / shape.head_dim, storage, block_bytes, attended, parts_.scale, parts_.cap, parts_.sinks,
            parts_.slopes, cos, sin, of_heads.weight, of_heads.eps, of_heads.weight_type, key_mean);
  add(*parts_.output, parts_.attention_out_norm, attended, q_size_, x, normed, m);

  parts_.inner->multiply(after(parts_.mlp_norm, x), hidden_size_, 0, inner, inner_size_, m, false);
  add(*parts_.down, parts_.mlp_out_norm, inner, inner_size_, x, normed, m);
}

}  // namespace twostroke
