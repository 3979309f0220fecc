#include "operators.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <span>
#include <stdexcept>
#include <vector>

#include "cpu.hpp"
#include "kernels/half.hpp"
#include "panels.hpp"
#include "threads.hpp"

namespace twostroke {

const Kernels& kernels_of(const std::string& level) {
  for (const auto& usable : usable_levels()) {
    if (usable != level) continue;
#define LEVEL(name) \
  if (level == #name) return *kernels_##name();
#include "levels.inc"
#undef LEVEL
  }
  throw std::invalid_argument("level " + level + " is not usable on this processor");
}

// Rows of an element-wise task: enough that starting it costs less than computing it.
static int64_t rows_per_task(int64_t n) { return std::max<int64_t>(1, 16384 / std::max<int64_t>(n, 1)); }

int64_t packed_bytes(int64_t n, int64_t k, bool gated, int type) {
  int64_t step = type == (int)Dtype::bf16 ? 2 : 1;
  return num_panels(channels_of(n, gated)) * PANEL * ((k + step - 1) / step) * 4;
}

int64_t row_of_channel(int64_t channel, int64_t n, bool gated) {
  if (!gated) return channel < n ? channel : -1;
  int64_t vector = channel / LANES, row = vector / 2 * LANES + channel % LANES;
  return row < n ? row + vector % 2 * n : -1;
}

void pack_linear(uintptr_t weight, uintptr_t packed, int64_t n, int64_t k, bool gated, int type) {
  int64_t step = type == (int)Dtype::bf16 ? 2 : 1, element = 4 / step, steps = (k + step - 1) / step;
  const char* from = (const char*)weight;
  char* to = (char*)packed;
  int64_t panels = packed_bytes(n, k, gated, type) / (steps * PANEL * 4);
  parallel(panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; p++)
      for (int64_t c = 0; c < PANEL; c++) {
        int64_t row = row_of_channel(p * PANEL + c, n, gated);
        char* column = to + (p * steps * PANEL + c) * 4;
        for (int64_t s = 0; s < steps; s++, column += PANEL * 4) {
          int64_t count = row < 0 ? 0 : std::min(step, k - s * step);
          if (count < step) std::memset(column, 0, 4);
          std::memcpy(column, from + (row * k + s * step) * element, (size_t)(count * element));
        }
      }
  });
}

void unpack_rows(uintptr_t packed, uintptr_t ids, uintptr_t out, int64_t count, int64_t k, int type) {
  int64_t step = type == (int)Dtype::bf16 ? 2 : 1, element = 4 / step, steps = (k + step - 1) / step;
  parallel(count, rows_per_task(k), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      int64_t row = ((const int64_t*)ids)[i];
      const char* column = (const char*)packed + (row / PANEL * steps * PANEL + row % PANEL) * 4;
      char* to = (char*)out + i * k * element;
      for (int64_t s = 0; s < steps; s++, column += PANEL * 4)
        std::memcpy(to + s * 4, column, (size_t)(std::min(step, k - s * step) * element));
    }
  });
}

// Converts rows of bfloat16 [m, k] to float32 rows of `width`, padded with zeros; valid until the thread's next call.
static const float* widened(const uint16_t* x, int64_t ldx, int64_t m, int64_t k, int64_t width) {
  static thread_local std::vector<float> wide;
  wide.resize((size_t)(m * width));
  float* to = wide.data();
  parallel(m, rows_per_task(k), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const uint16_t* from = x + row * ldx;
      float* row_to = to + row * width;
      for (int64_t i = 0; i < k; i++) row_to[i] = std::bit_cast<float>((uint32_t)from[i] << 16);
      std::fill(row_to + k, row_to + width, 0.0f);
    }
  });
  return to;
}

static int64_t panels_of(const LinearArgs& args) { return num_panels(channels_of(args.n, args.gate != Gate::none)); }

// Arguments of one group, from those of all rows.
static LinearArgs of_group(const LinearArgs& all, const RowGroup& group, int64_t element_bytes) {
  LinearArgs own = all;
  if (all.residual) own.residual = (const char*)all.residual + group.to * all.ldy * (all.type == Dtype::f32 ? 4 : 2);
  own.x = (const char*)all.x + group.from * all.ldx * element_bytes;
  own.y = (char*)all.y + group.to * all.ldy * (all.wide_y || all.type == Dtype::f32 ? 4 : 2);
  own.w = (const void*)group.w, own.bias = (const float*)group.bias;
  own.m = group.count;
  return own;
}

// Calls work(group, begin, end) for ranges of panels; the panels of all groups form one list of items.
template <typename Work>
static void parallel_panels(int64_t num_panels, std::span<const RowGroup> groups, const Work& work) {
  parallel(num_panels * (int64_t)groups.size(), 1, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      int64_t first = begin % num_panels, last = std::min(num_panels, first + end - begin);
      work(groups[(size_t)(begin / num_panels)], first, last);
      begin += last - first;
    }
  });
}

constexpr int64_t FEW_PANELS = 4;  // a router of 256 experts has these
constexpr int64_t FEW_ROWS = 24;   // sums of these rows stay in a processor's caches

static bool are_few(const LinearArgs& args) { return panels_of(args) <= FEW_PANELS && args.type == Dtype::f32; }

// Few panels of float32, such as a router's: threads get runs of k, or rows, because most would get no panel.
static void linear_of_few_panels(const Kernels& kernels, const LinearArgs& args) {
  if (args.m > FEW_ROWS) {
    std::vector<RowGroup> groups;
    for (int64_t row = 0; row < args.m; row += FEW_ROWS)
      groups.push_back({(uintptr_t)args.w, (uintptr_t)args.bias, row, row, std::min(FEW_ROWS, args.m - row)});
    return parallel_panels(panels_of(args), groups, [&](const RowGroup& group, int64_t begin, int64_t end) {
      kernels.linear_panels(of_group(args, group, 4), begin, end);
    });
  }
  static thread_local std::vector<float> room;
  int64_t num_runs = panels_of(args) * SEGMENTS;
  room.resize((size_t)(num_runs * args.m * PANEL));
  float* sums = room.data();  // inside a lambda the thread-local vector would be a worker's own
  parallel(num_runs, 1, [&](int64_t begin, int64_t end) { kernels.linear_runs(args, sums, begin, end); });
  kernels.linear_totals(args, sums, 0, panels_of(args));
}

static void grouped_linear(const Kernels& kernels, LinearArgs args, std::span<const RowGroup> groups) {
  bool is_widened = kernels.wide_inputs && args.type == Dtype::bf16;
  if (is_widened) {
    int64_t width = args.k + args.k % 2;
    args.x = widened((const uint16_t*)args.x, args.ldx, args.m, args.k, width);
    args.ldx = width;
  }
  int64_t element_bytes = is_widened || args.type == Dtype::f32 ? 4 : 2;
  if (groups.size() == 1 && are_few(args)) return linear_of_few_panels(kernels, of_group(args, groups[0], element_bytes));
  parallel_panels(panels_of(args), groups, [&](const RowGroup& group, int64_t begin, int64_t end) {
    kernels.linear_panels(of_group(args, group, element_bytes), begin, end);
  });
}

void linear(const Kernels& kernels, uintptr_t x, int64_t ldx, std::span<const RowGroup> groups, uintptr_t residual, uintptr_t y,
            int64_t ldy, int64_t m, int64_t n, int64_t k, int gate, int type, bool wide_y) {
  LinearArgs args{(const void*)x, ldx, nullptr, nullptr, (const void*)residual, (void*)y, ldy, m, n, k,
                  (Gate)gate, (Dtype)type, wide_y};
  grouped_linear(kernels, args, groups);
}

// ---------------------------------------------------------------- quantized weights

int64_t packed_quantized_bytes(int64_t n, int64_t k, bool gated, const WeightFormat& format) {
  return num_panels(channels_of(n, gated)) * format.panel_bytes(k);
}

// Quantizes weight [n, k] to codes and float16 scales; see QuantizeArgs.
void quantize_weight(const Kernels& kernels, uintptr_t weight, uintptr_t codes, uintptr_t scales, int64_t n, int64_t k, int64_t group,
                     const std::vector<float>& steps, int type) {
  if (steps.size() > (size_t)LANES) throw std::invalid_argument("more steps than lanes");
  QuantizeArgs args{(const void*)weight, (uint8_t*)codes, (uint16_t*)scales, steps.data(), (int64_t)steps.size(), k, group, (Dtype)type};
  parallel(n, rows_per_task(k), [&](int64_t begin, int64_t end) { kernels.quantize_weight(args, begin, end); });
}

// Returns the code of k = j of a unit.
static int code_in_unit(int bits, const uint8_t* unit, int64_t channel, int64_t j) {
  const uint8_t* column = unit + channel * 4 + j % 4;
  if (bits == 8) return *column;
  if (bits == 2) return *column >> (int)(j / 4) * 2 & 3;
  if (bits == 3) {
    int rest = unit[rest_at(channel) + j % 4] >> rest_shift(channel);
    return j < 8 ? *column >> (int)(j / 4) * 3 & 7 : j < 12 ? *column >> 6 | (rest >> 1 & 4) : rest & 7;
  }
  int low = column[j / 8 * ROW_BYTES] >> (j % 8 < 4 ? 0 : 4) & 15;
  if (bits == 4) return low;
  int above = column[unit_of(bits) / 8 * ROW_BYTES] >> (int)(j / 4) * (bits - 4);
  return low | (above & ((1 << (bits - 4)) - 1)) << 4;
}

void pack_quantized(const QuantizedParts& parts, uintptr_t packed, int64_t n, int64_t k, bool gated, const WeightFormat& format) {
  int64_t group = format.group, groups = format.groups(k), super_blocks = k / SUPER_BLOCK, unit = unit_of(format.bits);
  parallel(num_panels(channels_of(n, gated)), 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; p++) {
      uint8_t* panel = (uint8_t*)packed + p * format.panel_bytes(k);
      std::memset(panel, 0, (size_t)format.panel_bytes(k));
      for (int64_t c = 0; c < PANEL; c++) {
        int64_t row = row_of_channel(p * PANEL + c, n, gated);
        if (row < 0) continue;
        for (int64_t g = 0; g < groups; g++) {
          uint8_t *to = panel + format.group_at(g), *scales = to + format.code_bytes();
          const uint8_t* codes = (const uint8_t*)parts.codes + row * k + g * group;
          uint8_t filled[SPAN];
          if (k - g * group < group) {
            // inputs after the last k are zero, so any code would do; this is the code of zero
            std::memset(filled, format.zero(), sizeof filled);
            std::memcpy(filled, codes, (size_t)(k - g * group));
            codes = filled;
          }
          for (int64_t j = 0; j < group; j += unit) pack_unit(format.bits, codes + j, to + j * PANEL * format.bits / 8, c);
          auto put_scale = [&](uintptr_t from, uint8_t* scales_to) {
            if (format.has_super_blocks) scales_to[c] = ((const uint8_t*)from)[row * groups + g];
            else ((uint16_t*)scales_to)[c] = ((const uint16_t*)from)[row * groups + g];
          };
          put_scale(parts.scales, scales);
          if (format.shares_bytes()) scales[c] |= (uint8_t)(((const uint8_t*)parts.mins)[row * groups + g] << 4);
          else if (format.has_min) put_scale(parts.mins, scales + format.scale_bytes());
          if (!format.has_super_blocks || g * group % SUPER_BLOCK) continue;
          int64_t block = row * super_blocks + g * group / SUPER_BLOCK;
          uint16_t* header = (uint16_t*)(panel + format.header_at(g));
          header[c] = ((const uint16_t*)parts.super_scales)[block];
          if (format.has_min) header[PANEL + c] = ((const uint16_t*)parts.super_mins)[block];
        }
      }
    }
  });
}

void unpack_quantized_rows(uintptr_t packed, uintptr_t ids, uintptr_t out, int64_t count, int64_t k, const WeightFormat& format) {
  int64_t group = format.group, groups = format.groups(k), unit = unit_of(format.bits);
  parallel(count, rows_per_task(k), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      int64_t row = ((const int64_t*)ids)[i], c = row % PANEL;
      float* to = (float*)out + i * k;
      const uint8_t* panel = (const uint8_t*)packed + row / PANEL * format.panel_bytes(k);
      for (int64_t g = 0; g < groups; g++) {
        const uint8_t *codes = panel + format.group_at(g), *scales = codes + format.code_bytes();
        const uint16_t* header = (const uint16_t*)(panel + format.header_at(g));
        auto scale_at = [&](const uint8_t* from, float factor) {
          return format.has_super_blocks ? factor * (float)(int8_t)from[c] : from_half(((const uint16_t*)from)[c]);
        };
        float scale, min = 0.0f;
        if (format.shares_bytes()) {
          scale = from_half(header[c]) * (float)(scales[c] & 15);
          min = from_half(header[PANEL + c]) * (float)(scales[c] >> 4);
        } else {
          scale = scale_at(scales, from_half(header[c]));
          if (format.has_min) min = scale_at(scales + format.scale_bytes(), from_half(header[PANEL + c]));
        }
        for (int64_t j = 0; j < group && g * group + j < k; j++) {
          const uint8_t* of_unit = codes + j / unit * unit * PANEL * format.bits / 8;
          to[g * group + j] = scale * (float)format.value(code_in_unit(format.bits, of_unit, c, j % unit)) - min;
        }
      }
    }
  });
}

// Returns inputs in the order of a weight's columns, padded with a zero to an even length, since pairs are read.
template <typename T>
static const T* inputs_in_order(const T* x, int64_t ldx, const int32_t* order, int64_t m, int64_t k) {
  static thread_local std::vector<T> ordered;
  int64_t width = k + k % 2;
  ordered.assign((size_t)(m * width), 0);
  T* to = ordered.data();
  parallel(m, rows_per_task(k), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++)
      for (int64_t i = 0; i < k; i++) to[row * width + i] = x[row * ldx + (order ? order[i] : i)];
  });
  return to;
}

static void decoded_linear(const Kernels& kernels, QuantizedArgs args, std::span<const RowGroup> groups, const int32_t* order) {
  LinearArgs& linear = args.linear;
  bool is_f32 = linear.type == Dtype::f32, is_widened = kernels.wide_inputs && !is_f32;
  if (order || linear.k % 2) {
    linear.x = is_f32 ? (const void*)inputs_in_order((const float*)linear.x, linear.ldx, order, linear.m, linear.k)
                      : inputs_in_order((const uint16_t*)linear.x, linear.ldx, order, linear.m, linear.k);
    linear.ldx = linear.k + linear.k % 2;
  }
  if (is_widened) {
    int64_t width = linear.k + linear.k % 2;
    linear.x = widened((const uint16_t*)linear.x, linear.ldx, linear.m, linear.k, width);
    linear.ldx = width;
  }
  int64_t element_bytes = is_widened || is_f32 ? 4 : 2;
  size_t num_bytes = (size_t)(args.groups * args.format.group * PANEL * (is_f32 ? 4 : 2));
  parallel_panels(panels_of(linear), groups, [&](const RowGroup& group, int64_t begin, int64_t end) {
    static thread_local std::vector<char> room;
    room.resize(std::max(room.size(), num_bytes + 64));
    QuantizedArgs mine = args;
    mine.linear = of_group(args.linear, group, element_bytes);
    mine.decoded = room.data() + (64 - (uintptr_t)room.data() % 64) % 64;
    kernels.decoded_panels(mine, begin, end);
  });
}

static void integer_linear(const Kernels& kernels, QuantizedArgs args, std::span<const RowGroup> groups, const int32_t* order) {
  const LinearArgs& linear = args.linear;
  static thread_local std::vector<int8_t> q;
  static thread_local std::vector<float> scales, weighted;
  static thread_local std::vector<int32_t> sums;
  int64_t width = args.groups * args.format.group;
  q.resize((size_t)(linear.m * width));
  scales.resize((size_t)(linear.m * args.input_groups));
  sums.resize((size_t)(linear.m * args.groups));
  weighted.resize(sums.size());
  // inside a lambda the thread-local vectors would be a worker's own
  Integers<int8_t, float, int32_t> rows{q.data(), scales.data(), sums.data(), weighted.data()};
  parallel(linear.m, rows_per_task(linear.k), [&](int64_t begin, int64_t end) {
    kernels.quantize_rows(linear.x, linear.ldx, order, linear.k, args.format.group, rows, linear.type, begin, end);
  });
  parallel_panels(panels_of(linear), groups, [&](const RowGroup& group, int64_t begin, int64_t end) {
    QuantizedArgs mine = args;
    mine.linear = of_group(linear, group, linear.type == Dtype::f32 ? 4 : 2);
    int64_t from = group.from;
    mine.inputs = {rows.q + from * width, rows.scales + from * args.input_groups, rows.sums + from * args.groups,
                   rows.weighted + from * args.groups};
    kernels.quantized_panels(mine, begin, end);
  });
}

void quantized_linear(const Kernels& kernels, uintptr_t x, int64_t ldx, std::span<const RowGroup> groups, uintptr_t residual,
                      uintptr_t y, int64_t ldy, int64_t m, int64_t n, int64_t k, int gate, int type, const WeightFormat& format,
                      uintptr_t order, bool quantizes_inputs, bool wide_y) {
  LinearArgs linear{(const void*)x, ldx, nullptr, nullptr, (const void*)residual, (void*)y, ldy, m, n, k,
                    (Gate)gate, (Dtype)type, wide_y};
  auto parts_of = [k](int64_t width) { return (k + width - 1) / width; };
  QuantizedArgs args{linear, format, format.groups(k), parts_of(SPAN), parts_of(input_group(format.group)), {}, nullptr};
  (quantizes_inputs ? integer_linear : decoded_linear)(kernels, args, groups, (const int32_t*)order);
}

void rms_norm(const Kernels& kernels, uintptr_t x, int64_t x_stride, uintptr_t weight, uintptr_t y, int64_t y_stride, int64_t rows,
              int64_t parts, int64_t n, float eps, int type, int weight_type) {
  parallel(rows, rows_per_task(parts * n), [&](int64_t begin, int64_t end) {
    kernels.rms_norm((const void*)x, x_stride, (const void*)weight, (void*)y, y_stride, parts, n, eps, (Dtype)type,
                     (Dtype)weight_type, begin, end);
  });
}

void rotate(const Kernels& kernels, uintptr_t x, int64_t token_stride, int64_t tokens, int64_t heads, int64_t head_dim, uintptr_t cos,
            uintptr_t sin, int type) {
  parallel(tokens, rows_per_task(heads * head_dim), [&](int64_t begin, int64_t end) {
    kernels.rotate((void*)x, token_stride, heads, head_dim, (const void*)cos, (const void*)sin, (Dtype)type, begin, end);
  });
}

void widen(uintptr_t x, uintptr_t y, int64_t count) {
  parallel(count, rows_per_task(1), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) ((float*)y)[i] = std::bit_cast<float>((uint32_t)((const uint16_t*)x)[i] << 16);
  });
}

void add_rows(const Kernels& kernels, uintptr_t a, uintptr_t b, uintptr_t y, int64_t count, int type) {
  parallel(count, rows_per_task(1), [&](int64_t begin, int64_t end) {
    kernels.add((const void*)a, (const void*)b, (void*)y, (Dtype)type, begin, end);
  });
}

StepAttention step_attention(const Kernels& kernels, uintptr_t query_start, uintptr_t seq_lens, uintptr_t block_table, uintptr_t tree,
                             uintptr_t tree_start, int64_t num_seqs, int64_t max_blocks, int64_t heads, int64_t kv_heads,
                             int64_t head_dim, int64_t block_size, int64_t window, int type, int kv_format) {
  AttentionArgs step{};
  step.query_start = (const int32_t*)query_start;
  step.seq_lens = (const int32_t*)seq_lens;
  step.block_table = (const int32_t*)block_table;
  step.tree = (const uint64_t*)tree;
  step.tree_start = (const int64_t*)tree_start;
  step.num_seqs = num_seqs, step.max_blocks = max_blocks;
  step.heads = heads, step.kv_heads = kv_heads, step.head_dim = head_dim, step.block_size = block_size;
  step.window = window;
  step.type = (Dtype)type, step.format = (KvFormat)kv_format;
  return StepAttention(kernels, step);
}

int64_t attention(const StepAttention& step, uintptr_t qkv, int64_t token_heads, uintptr_t storage, int64_t block_bytes, uintptr_t out,
                  float scale, float cap, uintptr_t sinks, uintptr_t slopes, uintptr_t cos, uintptr_t sin, uintptr_t norm_weight,
                  float eps, int weight_type, uintptr_t key_mean) {
  AttentionArgs layer = step.step();
  layer.qkv = (const void*)qkv, layer.token_heads = token_heads;
  layer.storage = (char*)storage, layer.block_bytes = block_bytes;
  layer.out = (void*)out;
  layer.scale = scale, layer.cap = cap;
  layer.sinks = (const float*)sinks, layer.slopes = (const float*)slopes;
  return step.run(layer, {(const void*)cos, (const void*)sin, (const void*)norm_weight, eps, (Dtype)weight_type,
                          (const void*)key_mean});
}

void argmax(const Kernels& kernels, uintptr_t values, int64_t stride, int64_t rows, int64_t columns, uintptr_t winners) {
  ArgmaxArgs args{(const float*)values, stride, columns, (int64_t*)winners};
  parallel(rows, rows_per_task(columns), [&](int64_t begin, int64_t end) { kernels.argmax(args, begin, end); });
}

void gumbel_argmax(const Kernels& kernels, uintptr_t logits, int64_t stride, int64_t rows, int64_t vocab_size,
                   uintptr_t temperatures, uintptr_t keys, uintptr_t winners) {
  GumbelArgs args{(const float*)logits, stride, vocab_size, (const float*)temperatures, (const int64_t*)keys, (int64_t*)winners};
  parallel(rows, rows_per_task(vocab_size), [&](int64_t begin, int64_t end) { kernels.gumbel_argmax(args, begin, end); });
}

void filtered_argmax(const Kernels& kernels, uintptr_t logits, int64_t stride, int64_t rows, int64_t vocab_size,
                     uintptr_t temperatures, uintptr_t keys, uintptr_t floors, uintptr_t top_k, uintptr_t top_p,
                     uintptr_t winners) {
  FilteredArgs args{{(const float*)logits, stride, vocab_size, (const float*)temperatures, (const int64_t*)keys, (int64_t*)winners},
                    (const float*)floors, (const int64_t*)top_k, (const double*)top_p, nullptr};
  parallel(rows, 1, [&](int64_t begin, int64_t end) {
    static thread_local std::vector<float> scratch;
    scratch.resize((size_t)filtered_scratch(vocab_size));
    FilteredArgs own = args;
    own.scratch = scratch.data();
    kernels.filtered_argmax(own, begin, end);
  });
}

}  // namespace twostroke
