// Linear maps with quantized weights: the inputs' integers must be exact, the products those of the definition.
#include <algorithm>
#include <cmath>

#include "operators.hpp"
#include "tests/harness.hpp"
#include "tests/linear_oracle.hpp"
#include "threads.hpp"

namespace twostroke::tests {
namespace {

#if defined(__x86_64__)
constexpr int64_t ROWS = 99;  // more than a block of kernels/unpacked.hpp
#else
constexpr int64_t ROWS = 19;  // emulated processors are slow
#endif

// Row as the kernels quantize it: whole numbers in groups of `width`, each with the scale of its largest value.
struct Inputs {
  std::vector<int> q;         // [k]
  std::vector<float> scales;  // [divided_up(k, width)]

  template <typename T>
  Inputs(const T* x, int64_t k, int64_t width) : q((size_t)k), scales((size_t)divided_up(k, width)) {
    for (int64_t i = 0; i < (int64_t)scales.size(); i++) {
      int64_t begin = i * width, end = std::min(begin + width, k);
      float largest = 0;
      for (int64_t j = begin; j < end; j++) largest = std::max(largest, std::fabs(value_of(x[j])));
      if (!(largest > 1e-36f)) continue;
      scales[(size_t)i] = largest / 127.0f;
      float inverse = 127.0f / largest;
      for (int64_t j = begin; j < end; j++) {
        float scaled = value_of(x[j]) * inverse;
        q[(size_t)j] = (int)std::nearbyint(scaled);
      }
    }
  }
};

constexpr WeightFormat plain(int bits, int64_t group, bool has_min = false) { return {bits, group, has_min, false}; }

// ggml's Q5_0 and Q5_1, its K types from Q2_K to Q6_K, and those with tables:
// IQ4_NL, IQ4_XS, MXFP4 and NVFP4.
constexpr WeightFormat OTHERS[] = {
    {5, 32, false, false}, {5, 32, true, false}, {2, 16, true, true}, {3, 16, false, true},
    {4, 32, true, true},   {5, 32, true, true},  {6, 16, false, true},
    {4, 32, false, false, CodeTable::iq4}, {4, 32, false, true, CodeTable::iq4},
    {4, 32, false, false, CodeTable::fp4}, {4, 16, false, false, CodeTable::fp4},
};

// Rows are whole super-blocks, or whole groups where no code means zero.
constexpr int64_t width_of(const WeightFormat& format, int64_t whole, int64_t any) {
  return format.has_super_blocks || format.table != CodeTable::none ? whole : any;
}

template <typename T>
struct Case {
  const Kernels& kernels;
  int64_t n, k;
  WeightFormat format;
  Gate gate;
  bool gated, full;
  int64_t groups, weight_rows;
  std::vector<T> x, residual, y;
  std::vector<uint8_t> codes, packed;
  std::vector<uint16_t> scales, mins, super_scales, super_mins;  // float16; with super-blocks the first two are numbers, and bytes:
  std::vector<float> scale_numbers, min_numbers;
  std::vector<int8_t> scale_bytes, min_bytes;
  std::vector<float> panel_bias, bias;
  std::string name;

  Case(const Kernels& kernels, int64_t n, int64_t k, WeightFormat format, Gate gate, bool full, Values values)
      : kernels(kernels), n(n), k(k), format(format), gate(gate), gated(gate != Gate::none), full(full), groups(divided_up(k, format.group)),
        weight_rows(gated ? 2 * n : n) {
    Random random((uint64_t)(n * 1000 + k + format.bits));
    name = text(kernels.level, name_of(gate), format.bits, " bits ", TYPE_NAME<T>, " group=", format.group,
                " min=", format.has_min, " super=", format.has_super_blocks, " table=", (int)format.table, " n=", n, " k=", k, " ", name_of(values));
    x = random_elements<T>(random, ROWS * k, values);
    int highest = (1 << format.bits) - 1;
    for (int64_t i = 0; i < weight_rows * k; i++) {
      int64_t dice = random.below(8);  // often an end of the range, where products are largest
      codes.push_back((uint8_t)(dice == 0 ? 0 : dice == 1 ? highest : random.below(highest + 1)));
    }
    constexpr uint16_t EDGES[] = {0x0001, 0x03ff, 0x0400, 0x0000};  // subnormal halves, the smallest normal one, zero
    auto any_half = [&](double least, double most) {
      return random.below(8) ? nearest_half(least + (most - least) * random.uniform()) : EDGES[random.below(4)];
    };
    if (format.has_super_blocks)
      for (int64_t i = 0; i < weight_rows * k / SUPER_BLOCK; i++) {
        super_scales.push_back(any_half(-0.0005, 0.0005));
        super_mins.push_back(any_half(-0.0005, 0.0005));
      }
    for (int64_t i = 0; i < weight_rows * groups; i++) {
      if (format.has_super_blocks) {
        int64_t most = format.shares_bytes() ? 16 : 64;
        size_t block = (size_t)(i * format.group / SUPER_BLOCK);  // rows are whole super-blocks
        scale_bytes.push_back((int8_t)(format.has_min ? random.below(most) : format.bits == 6 ? random.below(256) - 128 : random.below(64) - 32));
        min_bytes.push_back((int8_t)random.below(most));
        scale_numbers.push_back(half_value(super_scales[block]) * (float)scale_bytes.back());
        min_numbers.push_back(format.has_min ? half_value(super_mins[block]) * (float)min_bytes.back() : 0.0f);
      } else {
        scales.push_back(any_half(0.001, 0.021));
        mins.push_back(nearest_half(0.05 * random.normal()));
        scale_numbers.push_back(half_value(scales.back()));
        min_numbers.push_back(format.has_min ? half_value(mins.back()) : 0.0f);
      }
    }
    packed.resize((size_t)packed_quantized_bytes(n, k, gated, format));
    uintptr_t of_mins = format.has_super_blocks ? at(min_bytes) : at(mins);
    pack_quantized({at(codes), format.has_super_blocks ? at(scale_bytes) : at(scales), format.has_min ? of_mins : 0,
                    at(super_scales), at(super_mins)},
                   at(packed), n, k, gated, format);
    if (full) {
      bias = random_elements<float>(random, weight_rows, Values::normal);
      panel_bias = bias_in_panels(bias, n, gated);
      residual = random_elements<T>(random, ROWS * n, Values::normal);
    }
    y = rows(0, ROWS);
  }

  template <typename Y = T>
  std::vector<Y> rows(int64_t first, int64_t count) const {
    std::vector<Y> found((size_t)(count * n));
    std::vector<T> left;
    std::vector<T> some(x.begin() + first * k, x.begin() + (first + count) * k);
    if (full) left.assign(residual.begin() + first * n, residual.begin() + (first + count) * n);
    RowGroup all{at(packed), at(panel_bias), 0, 0, count};
    quantized_linear(kernels, at(some), k, {&all, 1}, at(left), at(found), n, count, n, k, (int)gate,
                     TYPE<T>, format, 0, true, !std::is_same_v<Y, T>);
    return found;
  }

  // With unquantized inputs, the bits must be those of a linear map with the dequantized weight.
  void check_inputs_as_they_are() const {
    std::vector<T> numbers, padded((size_t)(ROWS * (k + k % 2)));
    for (int64_t i = 0; i < weight_rows * k; i++) {
      int64_t place = i / k * groups + i % k / format.group;
      float number = scale_numbers[(size_t)place] * (float)format.value(codes[(size_t)i]);
      numbers.push_back(nearest<T>(number - min_numbers[(size_t)place]));
    }
    for (int64_t i = 0; i < ROWS * k; i++) padded[(size_t)(i / k * (k + k % 2) + i % k)] = x[(size_t)i];
    std::vector<uint8_t> plain((size_t)packed_bytes(n, k, gated, TYPE<T>));
    pack_linear(at(numbers), at(plain), n, k, gated, TYPE<T>);
    for (int64_t count : {(int64_t)1, (int64_t)5, ROWS}) {
      std::vector<T> found((size_t)(count * n)), expected(found.size());
      RowGroup all{at(packed), at(panel_bias), 0, 0, count}, all_plain{at(plain), at(panel_bias), 0, 0, count};
      quantized_linear(kernels, at(x), k, {&all, 1}, at(residual), at(found), n, count, n, k, (int)gate,
                       TYPE<T>, format, 0, false, false);
      linear(kernels, at(padded), k + k % 2, {&all_plain, 1}, at(residual), at(expected), n, count, n, k, (int)gate, TYPE<T>,
             false);
      expect(same_bits(found.data(), expected.data(), count * n), name + ": other bits than with the numbers themselves");
    }
  }

  void check_widened() const {
    auto found = rows<float>(0, ROWS);
    for (size_t i = 0; i < y.size(); i++) {
      float expected = value_of(y[i]);
      expect(same_bits(&found[i], &expected, 1), text(name, ": another number as float32 at ", i));
    }
  }

  // Tests inputs in another order, with the order that restores them.
  void check_order() const {
    std::vector<int32_t> order;
    for (int64_t i = 0; i < k; i++) order.push_back((int32_t)i);
    Random random(1);
    for (int64_t i = k - 1; i > 0; i--) std::swap(order[(size_t)i], order[(size_t)random.below(i + 1)]);
    std::vector<T> shuffled(x.size()), found(y.size());
    for (int64_t row = 0; row < ROWS; row++)
      for (int64_t i = 0; i < k; i++) shuffled[(size_t)(row * k + order[(size_t)i])] = x[(size_t)(row * k + i)];
    RowGroup all{at(packed), at(panel_bias), 0, 0, ROWS};
    quantized_linear(kernels, at(shuffled), k, {&all, 1}, at(residual), at(found), n, ROWS, n, k, (int)gate,
                     TYPE<T>, format, at(order), true, false);
    expect(same_bits(found.data(), y.data(), (int64_t)y.size()), name + ": other bits with inputs in order");
  }

  Sum product(const Inputs& inputs, int64_t channel) const {
    double total = 0, magnitude = 0;
    for (int64_t g = 0; g < groups; g++) {
      double scale = scale_numbers[(size_t)(channel * groups + g)], min = min_numbers[(size_t)(channel * groups + g)];
      int64_t product = 0, sum = 0;
      for (int64_t i = g * format.group; i < std::min((g + 1) * format.group, k); i++) {
        product += format.value(codes[(size_t)(channel * k + i)]) * inputs.q[(size_t)i];
        sum += inputs.q[(size_t)i];
      }
      double factor = inputs.scales[(size_t)(g * format.group / input_group(format.group))];
      total += factor * (scale * (double)product - min * (double)sum);
      magnitude += factor * (std::fabs(scale * (double)product) + std::fabs(min * (double)sum));
    }
    if (full) {
      total += bias[(size_t)channel];
      magnitude += std::fabs(bias[(size_t)channel]);
    }
    return {total, magnitude * (double)(2 * groups + 10) * 0x1p-24 + 0x1p-120};
  }

  void check_values() const {
    for (int64_t row = 0; row < ROWS; row += 3) {
      Inputs inputs(&x[(size_t)(row * k)], k, input_group(format.group));
      for (int64_t channel = 0; channel < n; channel++) {
        Sum sum = product(inputs, channel);
        if (gated) sum = gated_product(gate, sum, product(inputs, n + channel));
        size_t place = (size_t)(row * n + channel);
        expect_rounded(y[place], sum, full ? value_of(residual[place]) : 0,
                       [&] { return text(name, " row=", row, " channel=", channel); });
      }
    }
  }

  void check_any_batch() const {
    for (int64_t count : {(int64_t)1, (int64_t)2, (int64_t)3, (int64_t)4, (int64_t)5, (int64_t)6, (int64_t)7, (int64_t)16, ROWS - 2})
      for (int64_t first : {(int64_t)0, (int64_t)1, ROWS - count}) {
        auto found = rows(first, count);
        expect(same_bits(found.data(), &y[(size_t)(first * n)], count * n),
               text(name, ": other bits in rows ", first, " to ", first + count - 1, " alone"));
      }
  }

  void check_unpacked() const {
    std::vector<int64_t> ids{n - 1, 0, n / 2};
    std::vector<float> found((size_t)(3 * k));
    unpack_quantized_rows(at(packed), at(ids), at(found), 3, k, format);
    for (int64_t i = 0; i < 3 * k; i++) {
      int64_t row = ids[(size_t)(i / k)], place = row * groups + i % k / format.group;
      float min = min_numbers[(size_t)place];
      float product = scale_numbers[(size_t)place] * (float)format.value(codes[(size_t)(row * k + i % k)]);
      expect_close(found[(size_t)i], product - min, 0x1p-23 * (std::fabs(product) + std::fabs(min)), [&] { return name + ": unpacked"; });
    }
  }
};

// Tests that the inputs' integers are exactly those of the definition, and zero after the last k.
template <typename T>
void check_inputs(const Kernels& kernels, int64_t k, int64_t group, Values values) {
  Random random((uint64_t)k);
  int64_t groups = divided_up(k, group), width = input_group(group), input_groups = divided_up(k, width), gap = 3;
  auto x = random_elements<T>(random, ROWS * (k + gap) - gap, values);
  std::vector<int8_t> q((size_t)(ROWS * groups * group), 77);
  std::vector<float> scales((size_t)(ROWS * input_groups));
  std::vector<int32_t> sums((size_t)(ROWS * groups));
  std::vector<float> weighted(sums.size());
  kernels.quantize_rows(x.data(), k + gap, nullptr, k, group, {q.data(), scales.data(), sums.data(), weighted.data()}, (Dtype)TYPE<T>,
                        0, ROWS);
  std::string name = text(kernels.level, " quantize_rows ", TYPE_NAME<T>, " k=", k, " group=", group, " ", name_of(values));
  for (int64_t row = 0; row < ROWS; row++) {
    Inputs expected(&x[(size_t)(row * (k + gap))], k, width);
    const int8_t* found = &q[(size_t)(row * groups * group)];
    for (int64_t i = 0; i < groups * group; i++) expect(found[i] == (i < k ? expected.q[(size_t)i] : 0), [&] { return name + ": a code"; });
    expect(same_bits(&scales[(size_t)(row * input_groups)], expected.scales.data(), input_groups), name + ": scales");
    for (int64_t g = 0; g < groups; g++) {
      int32_t sum = 0;
      for (int64_t i = g * group; i < (g + 1) * group; i++) sum += found[i];
      size_t place = (size_t)(row * groups + g);
      expect(sums[place] == sum, name + ": a sum");
      float product = (float)sum * expected.scales[(size_t)(g * group / width)];
      expect(same_bits(&weighted[place], &product, 1), name + ": a sum times its scale");
    }
  }
}

// Tests codes of weights: 8 bits by their definition; 4 bits, which try many candidates, are no worse than the first one.
template <typename T>
void check_weights(const Kernels& kernels, int64_t n, int64_t k, int64_t group, Values values) {
  Random random((uint64_t)(n + k));
  auto weight = random_elements<T>(random, n * k, values);
  int64_t width = group ? group : k, groups = divided_up(k, width);
  std::vector<uint8_t> codes((size_t)(n * k));
  std::vector<uint16_t> scales((size_t)(n * groups));
  quantize_weight(kernels, at(weight), at(codes), at(scales), n, k, group, {-8.0f, -7.0f, 7.0f}, TYPE<T>);
  std::string name = text(kernels.level, " quantize_weight ", TYPE_NAME<T>, " k=", k, " group=", group, " ", name_of(values));
  for (int64_t i = 0; i < n * groups; i++) {
    int64_t first = i / groups * k + i % groups * width, count = std::min(width, k - i % groups * width);
    double scale = half_value(scales[(size_t)i]), extreme = 0, error = 0, first_error = 0;
    for (int64_t j = first; j < first + count; j++)
      if (double v = value_of(weight[(size_t)j]); std::fabs(v) > std::fabs(extreme)) extreme = v;
    float first_scale = half_value(nearest_half(std::clamp(extreme / -8, -65504.0, 65504.0)));
    for (int64_t j = first; j < first + count; j++) {
      double v = value_of(weight[(size_t)j]), found = scale * (codes[(size_t)j] - (group ? 8 : 128));
      error += (found - v) * (found - v) * std::fabs(v);  // large weights count more
      double code = first_scale ? std::clamp(std::nearbyint(v / first_scale), -8.0, 7.0) : 0;
      first_error += (code * first_scale - v) * (code * first_scale - v) * std::fabs(v);
      if (!group && std::fabs(extreme) < 65504 * 127.0)  // rounded to the nearest code by a reciprocal
        expect_close(found, v, scale * 0.50001, [&] { return name + ": a code"; });
      expect(!group || codes[(size_t)j] < 16, [&] { return name + ": more than 4 bits"; });
    }
    if (group) expect(error <= first_error * 1.0001, [&] { return text(name, ": error ", error, ", that of the first step ", first_error); });
  }
}

// Tests the largest sums, with every code and every input at an end of its range: no register may overflow.
void check_largest(const Kernels& kernels, WeightFormat format) {
  constexpr int64_t N = 16, K = 512;
  int highest = (1 << format.bits) - 1;
  std::vector<uint16_t> halves((size_t)(N * K / format.group), nearest_half(1.0));
  std::vector<int8_t> bytes(halves.size(), format.shares_bytes() ? 15 : format.has_min ? 63 : -128), mins(2 * halves.size(), 0);  // large enough for float16, too
  double scale = format.has_super_blocks ? bytes[0] : 1;
  for (int code : {0, highest})
    for (float input : {1.0f, -1.0f}) {
      std::vector<uint8_t> codes((size_t)(N * K), (uint8_t)code);
      std::vector<uint8_t> packed((size_t)packed_quantized_bytes(N, K, false, format));
      pack_quantized({at(codes), format.has_super_blocks ? at(bytes) : at(halves), format.has_min ? at(mins) : 0, at(halves), at(halves)},
                     at(packed), N, K, false, format);
      std::vector<float> x((size_t)(ROWS * K), input), y((size_t)(ROWS * N));
      RowGroup all{at(packed), 0, 0, 0, ROWS};
      quantized_linear(kernels, at(x), K, {&all, 1}, 0, at(y), N, ROWS, N, K, false, TYPE<float>, format, 0, true, false);
      double expected = (double)input * scale * format.value(code) * (double)K;
      for (float found : y)
        expect_close(found, expected, std::fabs(expected) * 1e-5,
                     [&] { return text(kernels.level, " largest sums, ", format.bits, " bits group=", format.group, " table=", (int)format.table); });
    }
}

template <typename T>
void all_cases(const Kernels& kernels) {
  for (Values values : {Values::normal, Values::tiny, Values::mixed, Values::sparse})
    for (int64_t group : {0, 32, 64, 128})
      for (int64_t k : {1, 16, 37, 128, 300}) check_weights<T>(kernels, 3, k, group, values);
  for (Values values : ALL_VALUES)
    for (int64_t k : {1, 16, 37, 128, 300})
      for (int64_t group : {16, 128}) check_inputs<T>(kernels, k, group, values);
  for (int bits : {8, 4})
    for (int64_t group : {16, 32, 64, 128})
      for (bool has_min : {false, true}) {
        WeightFormat format = plain(bits, group, has_min);
        for (auto [n, k] : {std::pair<int64_t, int64_t>{1, 16}, {17, 37}, {70, 300}}) {
          Case<T> bare(kernels, n, k, format, Gate::none, false, Values::normal);
          bare.check_values();
          bare.check_unpacked();
          bare.check_inputs_as_they_are();
        }
      }
  for (WeightFormat format : OTHERS)
    for (auto [n, k] : {std::pair<int64_t, int64_t>{1, 256}, {17, 512}, {70, 1280}}) {
      Case<T> bare(kernels, n, k, format, Gate::none, false, Values::normal);
      bare.check_values();
      bare.check_unpacked();
      bare.check_inputs_as_they_are();
    }
  std::vector<WeightFormat> formats{plain(8, 128), plain(4, 32), plain(4, 64, true)};
  formats.insert(formats.end(), std::begin(OTHERS), std::end(OTHERS));
  for (WeightFormat format : formats)
    for (Gate gate : GATES) {
      Case<T> full(kernels, 70, width_of(format, 768, 700), format, gate, true, Values::normal);
      full.check_values();
      full.check_any_batch();
      full.check_order();
      full.check_widened();
      full.check_inputs_as_they_are();
      set_num_threads(2);
      auto on_two_threads = full.rows(0, ROWS);
      set_num_threads(1);
      expect(same_bits(on_two_threads.data(), full.y.data(), (int64_t)full.y.size()), full.name + ": other bits on two threads");
      for (Values values : ALL_VALUES) Case<T>(kernels, 20, width_of(format, 256, 200), format, gate, false, values).check_values();
    }
}

}  // namespace

void test_quantized(const Kernels& kernels) {
  for (int bits : {8, 4})
    for (int64_t group : {16, 32, 64, 128}) check_largest(kernels, plain(bits, group));
  for (WeightFormat format : OTHERS) check_largest(kernels, format);
  all_cases<float>(kernels);
  all_cases<uint16_t>(kernels);
}

}  // namespace twostroke::tests
