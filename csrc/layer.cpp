#include "layer.hpp"

#include <algorithm>

namespace twostroke {
namespace {

int64_t element_bytes(int type) { return type == (int)Dtype::bf16 ? 2 : 4; }

}  // namespace

int64_t room_for(int64_t n, int type) { return (n * element_bytes(type) + 63) / 64 * 64; }

void PackedLinear::multiply(uintptr_t x, int64_t ldx, uintptr_t residual, uintptr_t y, int64_t ldy, int64_t m, bool wide_y) const {
  RowGroup all = group(0, 0, m);
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

void HiddenRows::norm(const Norm& norm, uintptr_t x, uintptr_t y, int64_t m) const {
  rms_norm(kernels, x, size, norm.weight, y, size, m, 1, size, norm.eps, type, norm.weight_type);
}

void HiddenRows::add(const Norm& of_made, uintptr_t made, uintptr_t to, int64_t m) const {
  if (of_made.weight) norm(of_made, made, made, m);
  add_rows(kernels, to, made, to, m * size, type);
}

void HiddenRows::add(const Norm& of_made, const PackedLinear& linear, uintptr_t x, int64_t ldx, uintptr_t to, uintptr_t room,
                     int64_t m) const {
  if (!of_made.weight) return linear.multiply(x, ldx, to, to, size, m, false);
  linear.multiply(x, ldx, 0, room, size, m, false);
  add(of_made, room, to, m);
}

int64_t GatedMlp::room_bytes() const { return room_for(inner_.n(), inner_.type()); }

void GatedMlp::add_to(const HiddenRows& hidden, const Norm& norm, uintptr_t x, uintptr_t to, uintptr_t made, uintptr_t room,
                      int64_t m) const {
  inner_.multiply(x, hidden.size, 0, room, inner_.n(), m, false);
  hidden.add(norm, down_, room, inner_.n(), to, made, m);
}

DecoderLayer::DecoderLayer(const Kernels& kernels, const LayerParts& parts, int64_t hidden_size, int64_t q_size, int type)
    : parts_(parts), hidden_{kernels, hidden_size, type}, q_size_(q_size) {
  for (const PackedLinear* part : parts.qkv) qkv_size_ += part->n();
}

int64_t DecoderLayer::room_bytes() const {
  int type = hidden_.type;
  return room_for(hidden_.size, type) +
         std::max(room_for(qkv_size_, type) + room_for(q_size_, type), parts_.feed_forward->room_bytes());
}

void DecoderLayer::run(const StepAttention& step, uintptr_t x, uintptr_t room, int64_t m, uintptr_t storage, int64_t block_bytes,
                       uintptr_t cos, uintptr_t sin, uintptr_t key_mean) const {
  static thread_local std::vector<char> kept;
  if (!room) {
    kept.resize((size_t)(m * room_bytes()) + 64);
    room = ((uintptr_t)kept.data() + 63) / 64 * 64;
  }
  uintptr_t normed = room, qkv = room + (uintptr_t)(m * room_for(hidden_.size, hidden_.type));
  uintptr_t attended = qkv + (uintptr_t)(m * room_for(qkv_size_, hidden_.type));
  auto after = [&](const Norm& before, uintptr_t rows) {  // the rows, normed if there is a norm
    if (before.weight) hidden_.norm(before, rows, normed, m);
    return before.weight ? normed : rows;
  };

  uintptr_t from = after(parts_.attention_norm, x), to = qkv;
  for (const PackedLinear* part : parts_.qkv) {
    part->multiply(from, hidden_.size, 0, to, qkv_size_, m, false);
    to += (uintptr_t)(part->n() * element_bytes(hidden_.type));
  }
  const AttentionArgs& shape = step.step();
  const Norm& of_heads = parts_.head_norm;
  attention(step, qkv, qkv_size_ / shape.head_dim, storage, block_bytes, attended, parts_.scale, parts_.cap, parts_.sinks,
            parts_.slopes, cos, sin, of_heads.weight, of_heads.eps, of_heads.weight_type, key_mean);
  hidden_.add(parts_.attention_out_norm, *parts_.output, attended, q_size_, x, normed, m);

  uintptr_t behind = qkv;  // attention's buffers are free here
  parts_.feed_forward->add_to(hidden_, parts_.mlp_out_norm, after(parts_.mlp_norm, x), x, normed, behind, m);
}

}  // namespace twostroke
