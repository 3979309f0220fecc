// Products of quantized.hpp for many rows: the same integers, and the same floats in the same order, so the same bits.
//
// A span of a panel, 128 k of 64 channels, is unpacked once for a block of rows: its codes to bytes, its scales to floats. The
// tiles of the block then only multiply and add, and keep all their sums in registers.
#pragma once

#include <vector>

#include "quantized.hpp"

namespace twostroke {
namespace {

// Smallest number of rows for which unpacking is faster; 0: never. Other formats are cheap to read, and their tiles fit into
// registers without it.
template <KernelFormat F>
constexpr int64_t UNPACKED_ROWS =
    F.has_table || !(F.has_super_blocks || F.bits == 5) ? 0 : F.bits == 4 ? 2 * QUANTIZED_ROWS : QUANTIZED_ROWS + 1;
// Rows that share one unpacking. Their sums stay in the second cache.
constexpr int64_t BLOCK_ROWS = 96;

template <KernelFormat F>
class UnpackedSpan {
 public:
  explicit UnpackedSpan(const QuantizedArgs& args) : args_(args) {}

  // Sets the block of rows, [row, row + count), that add_to takes its rows from.
  void begin_rows(int64_t row, int64_t count) {
    first_row_ = row;
    if (!zero()) return;
    starts_.resize((size_t)(count * args_.groups));
    const int32_t* sums = args_.inputs.sums + row * args_.groups;
    for (size_t i = 0; i < starts_.size(); i++) starts_[i] = -zero() * sums[i];
  }

  // Unpacks span `number` of a panel.
  void unpack(const char* panel, int64_t number) {
    first_group_ = number * per_span();
    groups_ = args_.groups - first_group_ < per_span() ? args_.groups - first_group_ : per_span();
    for (int64_t g = 0; g < groups_; g++) {
      const char* codes = panel + format().group_at(first_group_ + g);
      unpack_group(codes, bytes_ + g * format().group * PANEL);
      for (int v = 0; v < PANEL_VECTORS; v++) {
        store16(scales_[g] + v * LANES, scale_of<F>(codes + format().code_bytes(), v));
        if (format().has_min) store16(mins_[g] + v * LANES, min_of<F>(codes + format().code_bytes(), v));
      }
    }
    ahead_ = panel + format().group_at(first_group_) + groups_ * format().group_bytes();
    if constexpr (!F.has_super_blocks) return;
    const char* header = panel + format().header_at(first_group_);
    for (int v = 0; v < PANEL_VECTORS; v++) {
      store16(d_ + v * LANES, from_half(header + v * LANES * 2));
      if (format().has_min) store16(dmin_ + v * LANES, -from_half(header + PANEL * 2 + v * LANES * 2));
    }
  }

  // Prefetches one of `parts` parts of the next span; all at once, lines would wait for each other.
  INLINE void ask_ahead_of(int64_t parts) {
    int64_t lines = (groups_ * format().group_bytes() / 64 + parts - 1) / parts;
    for (int64_t i = 0; i < lines; i++, ahead_ += 64) {
      __builtin_prefetch(ahead_ + groups_ * format().group_bytes(), 0, 2);
      __builtin_prefetch(ahead_);
    }
  }

  // Prefetches this span's inputs of `count` rows, which are far apart, so the processor cannot predict them.
  INLINE void ask_for_rows(int64_t row, int64_t count) const {
    int64_t stride = args_.groups * format().group;
    const int8_t* at = args_.inputs.q + row * stride + first_group_ * format().group;
    for (int64_t r = 0; r < count; r++, at += stride) {
      __builtin_prefetch(at);
      __builtin_prefetch(at + SPAN / 2);
    }
  }

  // Adds this span to the sums [ROWS][PANEL] of rows [row, row + ROWS).
  template <int ROWS>
  __attribute__((noinline)) void add_to(float* sums, int64_t row) const {
    constexpr int VECTORS = QUANTIZED_VECTORS<ROWS>;
    for (int first = 0; first < PANEL_VECTORS; first += VECTORS) add<ROWS, VECTORS>(sums + first * LANES, row, first);
  }

 private:
  // Returns the format, with constants for everything known at compile time.
  INLINE WeightFormat format() const { return F.known(args_.format); }
  INLINE int64_t per_span() const { return SPAN / format().group; }

  INLINE int32_t zero() const { return format().zero(); }

  // Unpacks codes of a group to bytes, [group / 4][4 vectors][16 channels][4 k].
  INLINE void unpack_group(const char* codes, char* to) const {
    using Codes = Unit<F>;
    LookupOf<F> lookup(CodeTable::none, SIGNED_CODES);
    for (int64_t k = 0; k < format().group; k += Codes::K, codes += Codes::BYTES)
      for (int v = 0; v < PANEL_VECTORS; v++) {
        Codes unit(codes + v * LANES * 4, v, lookup);
        char* words = to + k / 4 * STEP_BYTES + v * LANES * 4;
#pragma GCC unroll 4
        for (int64_t i = 0; i < Codes::WORDS; i += Codes::PER_ROW) {
          u32x16 w[Codes::PER_ROW];
          unit.words(w, i);
          for (int64_t j = 0; j < Codes::PER_ROW; j++) store(words + (i + j) * STEP_BYTES, w[j]);
        }
      }
  }

  // Adds the integer products of a group, for ROWS rows and VECTORS vectors.
  template <int ROWS, int VECTORS>
  INLINE void multiply(i32x16 (&acc)[ROWS][VECTORS], const int8_t* q, int64_t stride, const char* bytes) const {
    for (int64_t k = 0; k < format().group; k += 4, bytes += STEP_BYTES) {
      u32x16 w[VECTORS];
      for (int v = 0; v < VECTORS; v++) w[v] = load<u32x16>(bytes + v * LANES * 4);
      for (int r = 0; r < ROWS; r++) {
        ByteInputs inputs{q + r * stride + k};
        for (int v = 0; v < VECTORS; v++) acc[r][v] = dot_bytes(acc[r][v], w[v], inputs, 0);
      }
    }
  }

  // Adds the span for VECTORS vectors, from `first` on; sums start there.
  template <int ROWS, int VECTORS>
  INLINE void add(float* sums, int64_t row, int first) const {
    constexpr bool ALONE = F.is_alone, SUPER = F.has_super_blocks;
    const IntegerInputs& rows = args_.inputs;
    int64_t per_scale = ALONE ? 1 : input_group(format().group) / format().group, stride = args_.groups * format().group;
    f32x16 total[ROWS][VECTORS], part[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECTORS; v++) total[r][v] = SUPER ? f32x16{} : load16(sums + r * PANEL + v * LANES);
    for (int64_t g = 0; g < groups_; g++) {
      int64_t group = first_group_ + g;
      bool begins = ALONE || g % per_scale == 0, ends = ALONE || (g + 1) % per_scale == 0 || g + 1 == groups_;
      i32x16 acc[ROWS][VECTORS];
      for (int r = 0; r < ROWS; r++) {
        i32x16 start = zero() ? splat(starts_[(row + r - first_row_) * args_.groups + group]) : i32x16{};
        for (int v = 0; v < VECTORS; v++) acc[r][v] = start;
      }
      multiply(acc, rows.q + row * stride + group * format().group, stride, bytes_ + g * format().group * PANEL + first * LANES * 4);
      for (int v = 0; v < VECTORS; v++) {
        f32x16 scale = load16(scales_[g] + (first + v) * LANES);
        for (int r = 0; r < ROWS; r++)
          part[r][v] = begins ? to_float(acc[r][v]) * scale : fma(to_float(acc[r][v]), scale, part[r][v]);
      }
      if (!SUPER && format().has_min)
        for (int v = 0; v < VECTORS; v++) {
          f32x16 min = load16(mins_[g] + (first + v) * LANES);
          for (int r = 0; r < ROWS; r++)
            part[r][v] = fma(splat(-(float)rows.sums[(row + r) * args_.groups + group]), min, part[r][v]);
        }
      if (!ends) continue;
      for (int r = 0; r < ROWS; r++) {
        f32x16 scale = splat(rows.scales[(row + r) * args_.input_groups + group / per_scale]);
        for (int v = 0; v < VECTORS; v++) total[r][v] = fma(part[r][v], scale, total[r][v]);
      }
    }
    if constexpr (SUPER) finish_super_block(total, sums, row, first);
    for (int r = 0; r < ROWS; r++)
      for (int v = 0; v < VECTORS; v++) store16(sums + r * PANEL + v * LANES, total[r][v]);
  }

  // Scales a span's total, which is in units of its super-block, and adds it to the sum of its run.
  template <int ROWS, int VECTORS>
  INLINE void finish_super_block(f32x16 (&total)[ROWS][VECTORS], const float* sums, int64_t row, int first) const {
    for (int v = 0; v < VECTORS; v++) {
      f32x16 d = load16(d_ + (first + v) * LANES);
      for (int r = 0; r < ROWS; r++) total[r][v] = fma(total[r][v], d, load16(sums + r * PANEL + v * LANES));
    }
    if (!format().has_min) return;
    f32x16 below[ROWS][VECTORS] = {};
    for (int64_t g = 0; g < groups_; g++) {
      const float* weighted = args_.inputs.weighted + row * args_.groups + first_group_ + g;
      f32x16 min[VECTORS];
      for (int v = 0; v < VECTORS; v++) min[v] = load16(mins_[g] + (first + v) * LANES);
      for (int r = 0; r < ROWS; r++) {
        f32x16 input = splat(weighted[r * args_.groups]);
        for (int v = 0; v < VECTORS; v++) below[r][v] = fma(input, min[v], below[r][v]);
      }
    }
    for (int v = 0; v < VECTORS; v++) {
      f32x16 dmin = load16(dmin_ + (first + v) * LANES);
      for (int r = 0; r < ROWS; r++) total[r][v] = fma(below[r][v], dmin, total[r][v]);
    }
  }

  static constexpr int64_t MOST_GROUPS = SPAN / 16;
  alignas(64) char bytes_[SPAN * PANEL];  // [SPAN / 4][4 vectors][16 channels][4 k]
  alignas(64) float scales_[MOST_GROUPS][PANEL];
  alignas(64) float mins_[MOST_GROUPS][PANEL];
  alignas(64) float d_[PANEL];
  alignas(64) float dmin_[PANEL];
  const QuantizedArgs& args_;
  std::vector<int32_t> starts_;  // [rows][groups]: initial value of a group's sum, -zero times the sum of the inputs
  const char* ahead_ = nullptr;
  int64_t first_row_ = 0, first_group_ = 0, groups_ = 0;
};

// Sums of a block of rows for a panel, by run.
struct BlockSums {
  alignas(64) float at[SEGMENTS][BLOCK_ROWS][PANEL];
};

template <KernelFormat F>
void unpacked_block(UnpackedSpan<F>& span, BlockSums& sums, const QuantizedArgs& args, const char* panel, int64_t row,
                    int64_t count) {
  int64_t per_segment = (args.spans + SEGMENTS - 1) / SEGMENTS;
  span.begin_rows(row, count);
  for (int s = 0; s < SEGMENTS; s++) {
    std::memset(sums.at[s], 0, (size_t)count * sizeof sums.at[s][0]);
    int64_t last = (s + 1) * per_segment < args.spans ? (s + 1) * per_segment : args.spans;
    for (int64_t number = s * per_segment; number < last; number++) {
      span.unpack(panel, number);
      in_tiles<QUANTIZED_ROWS>(count, [&]<int ROWS>(int64_t first) {
        if (row == 0) span.ask_ahead_of((count + QUANTIZED_ROWS - 1) / QUANTIZED_ROWS);
        span.ask_for_rows(row + first + ROWS, QUANTIZED_ROWS);
        span.template add_to<ROWS>(sums.at[s][first], row + first);
      });
    }
  }
}

// Adds the runs of a block of rows and writes them; a function of its own, so that it is compiled once for all formats.
__attribute__((noinline)) void finish_block(const LinearArgs& args, const BlockSums& sums, int64_t row, int64_t count, int64_t p) {
  with_type(args.type, [&]<typename T>(T) {
    for (int64_t r = 0; r < count; r++) {
      f32x16 total[PANEL_VECTORS];
      for (int v = 0; v < PANEL_VECTORS; v++) {
        auto run = [&](int s) { return load16(sums.at[s][r] + v * LANES); };
        total[v] = add_runs(run(0), run(1), run(2), run(3));
      }
      finish_row<T, PANEL_VECTORS>(args, total, row + r, p, 0);
    }
  });
}

template <KernelFormat F>
void unpacked_panels_of(const QuantizedArgs& args, int64_t begin, int64_t end) {
  static thread_local BlockSums sums;
  UnpackedSpan<F> span(args);
  for (int64_t p = begin; p < end; p++) {
    const char* panel = (const char*)args.linear.w + p * args.format.panel_bytes(args.linear.k);
    for (int64_t row = 0; row < args.linear.m; row += BLOCK_ROWS) {
      int64_t count = args.linear.m - row < BLOCK_ROWS ? args.linear.m - row : BLOCK_ROWS;
      unpacked_block(span, sums, args, panel, row, count);
      finish_block(args.linear, sums, row, count, p);
    }
  }
}

}  // namespace
}  // namespace twostroke
