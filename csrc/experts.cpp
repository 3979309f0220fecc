#include "experts.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>

#include "threads.hpp"

namespace twostroke {
namespace {

constexpr double LEAST_SUM = 1e-20;  // added to the sum of sigmoids before division, as transformers does

int64_t rows_per_task(int64_t n) { return std::max<int64_t>(1, 16384 / std::max<int64_t>(n, 1)); }

// exp(x) as 2^n exp(r) with |r| <= log(2) / 2, by the series of exp. Unlike a library's, its bits are the same on every processor.
double exponential(double x) {
  if (!(x > -700.0)) return std::isnan(x) ? x : 0.0;
  if (x > 700.0) return std::numeric_limits<double>::infinity();
  constexpr double LOG2_E = 1.4426950408889634, LN2_HIGH = 0.6931471803691238, LN2_LOW = 1.9082149292705877e-10;
  constexpr double TERMS[] = {1.0,        1.0,         1.0 / 2,      1.0 / 6,       1.0 / 24,       1.0 / 120,       1.0 / 720,
                              1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600};
  double shifted = x * LOG2_E + 0.5;
  int64_t n = (int64_t)shifted;
  n -= (double)n > shifted;  // rounded down, without a call
  double r = (x - (double)n * LN2_HIGH) - (double)n * LN2_LOW, sum = 0.0;
  for (int i = (int)std::size(TERMS) - 1; i >= 0; i--) sum = sum * r + TERMS[i];
  return sum * std::bit_cast<double>((uint64_t)(n + 1023) << 52);  // a normal number, since |n| is at most 1010
}

// Computes the scores of one token's experts.
void score(const RouterRules& rules, const float* logits, double* scores) {
  int64_t n = rules.num_experts;
  if (rules.is_sigmoid) {
    for (int64_t e = 0; e < n; e++) scores[e] = 1.0 / (1.0 + exponential(-(double)logits[e]));
    return;
  }
  double largest = *std::max_element(logits, logits + n), sum = 0.0;
  for (int64_t e = 0; e < n; e++) sum += scores[e] = exponential((double)logits[e] - largest);
  for (int64_t e = 0; e < n; e++) scores[e] /= sum;
}

constexpr double OUT = -std::numeric_limits<double>::infinity();

// Finds the indices of the largest numbers, in rising order; of equal numbers the first.
void take_largest(const double* values, int64_t count, int64_t num, int64_t* places) {
  int64_t found = 0;  // until the sort, places are ordered by falling number
  for (int64_t i = 0; i < count; i++) {
    int64_t at = found;
    while (at > 0 && values[i] > values[places[at - 1]]) at--;
    if (at == num) continue;
    found = std::min(found + 1, num);
    std::copy_backward(places + at, places + found - 1, places + found);
    places[at] = i;
  }
  std::sort(places, places + num);
}

// Keeps the scores of the groups whose two largest scores have the largest sums.
void keep_groups(const RouterRules& rules, std::vector<double>& choice) {
  int64_t size = rules.num_experts / rules.num_groups;
  std::vector<double> best((size_t)rules.num_groups);
  for (int64_t g = 0; g < rules.num_groups; g++) {
    double first = OUT, second = OUT;
    for (int64_t e = g * size; e < (g + 1) * size; e++) {
      double value = choice[(size_t)e];
      if (value > first) second = first, first = value;
      else if (value > second) second = value;
    }
    best[(size_t)g] = first + second;
  }
  std::vector<int64_t> kept((size_t)rules.num_chosen_groups);
  take_largest(best.data(), rules.num_groups, rules.num_chosen_groups, kept.data());
  for (int64_t e = 0; e < rules.num_experts; e++)
    if (!std::binary_search(kept.begin(), kept.end(), e / size)) choice[(size_t)e] = OUT;
}

// Chooses the experts of one token, in rising order, and their weights.
void choose(const RouterRules& rules, const float* logits, const float* correction, const float* expert_scales, int64_t* chosen,
            float* weights) {
  static thread_local std::vector<double> scores, choice;
  scores.resize((size_t)rules.num_experts);
  score(rules, logits, scores.data());
  choice = scores;
  if (correction)
    for (int64_t e = 0; e < rules.num_experts; e++) choice[(size_t)e] += (double)correction[e];
  if (rules.num_groups > 1) keep_groups(rules, choice);
  take_largest(choice.data(), rules.num_experts, rules.num_chosen, chosen);
  double sum = 0.0;
  for (int64_t i = 0; i < rules.num_chosen; i++) sum += scores[(size_t)chosen[i]];
  if (rules.is_sigmoid) sum += LEAST_SUM;
  for (int64_t i = 0; i < rules.num_chosen; i++) {
    double weight = scores[(size_t)chosen[i]];
    weight = (rules.is_renormalized ? weight / sum : weight) * rules.scale;
    weights[i] = (float)(expert_scales ? weight * (double)expert_scales[chosen[i]] : weight);
  }
}

// Rounds to the nearest, ties to even.
uint16_t to_bf16(float x) {
  uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace

void route(const RouterRules& rules, uintptr_t logits, uintptr_t correction, uintptr_t expert_scales, int64_t m, uintptr_t tokens,
           uintptr_t starts, uintptr_t places, uintptr_t weights, uintptr_t counts) {
  int64_t k = rules.num_chosen, *chosen = (int64_t*)places, *begins = (int64_t*)starts;
  parallel(m, rows_per_task(rules.num_experts * 8), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++)
      choose(rules, (const float*)logits + row * rules.num_experts, (const float*)correction, (const float*)expert_scales,
             chosen + row * k, (float*)weights + row * k);
  });
  std::fill(begins, begins + rules.num_experts + 1, 0);
  for (int64_t i = 0; i < m * k; i++) begins[chosen[i] + 1]++;
  if (counts)
    for (int64_t e = 0; e < rules.num_experts; e++) ((int64_t*)counts)[e] += begins[e + 1];
  for (int64_t e = 0; e < rules.num_experts; e++) begins[e + 1] += begins[e];
  static thread_local std::vector<int64_t> next;
  next.assign(begins, begins + rules.num_experts);
  for (int64_t i = 0; i < m * k; i++) {
    int64_t place = next[(size_t)chosen[i]]++;
    ((int64_t*)tokens)[place] = i / k;
    chosen[i] = place;
  }
}

std::vector<RowGroup> PackedExperts::groups(uintptr_t starts, uintptr_t tokens) const {
  std::vector<RowGroup> found;
  const int64_t* begins = (const int64_t*)starts;
  for (size_t e = 0; e < experts_.size(); e++) {
    int64_t begin = begins[e], count = begins[e + 1] - begin;
    if (count > 0) found.push_back(experts_[e]->group(tokens ? ((const int64_t*)tokens)[begin] : begin, begin, count));
  }
  num_multiplied_ += (int64_t)found.size();
  return found;
}

void PackedExperts::multiply(uintptr_t x, int64_t ldx, uintptr_t tokens, uintptr_t starts, uintptr_t y, int64_t m,
                             int64_t num_pairs) const {
  const PackedLinear& like = *experts_.front();
  int64_t k = like.k(), width = k + k % 2, element = like.type() == (int)Dtype::bf16 ? 2 : 4;
  if (m == 1 && k == width)  // every expert reads the only row
    return like.multiply_groups(x, ldx, groups(starts, tokens), 0, y, like.n(), m, false);
  static thread_local std::vector<char> gathered;
  gathered.resize((size_t)(num_pairs * width * element));
  char* rows = gathered.data();  // inside a lambda the thread-local vector would be a worker's own
  parallel(num_pairs, rows_per_task(k), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      char* row = rows + i * width * element;
      std::memcpy(row, (const char*)x + ((const int64_t*)tokens)[i] * ldx * element, (size_t)(k * element));
      std::memset(row + k * element, 0, (size_t)((width - k) * element));
    }
  });
  like.multiply_groups((uintptr_t)rows, width, groups(starts), 0, y, like.n(), num_pairs, false);
}

void PackedExperts::multiply_and_add(uintptr_t x, int64_t ldx, uintptr_t starts, uintptr_t places, uintptr_t weights, uintptr_t y,
                                     int64_t m, int64_t num_chosen) const {
  int64_t n = experts_.front()->n();
  static thread_local std::vector<float> products;
  products.resize((size_t)(m * num_chosen * n));
  experts_.front()->multiply_groups(x, ldx, groups(starts), 0, (uintptr_t)products.data(), n, m * num_chosen, true);
  add((uintptr_t)products.data(), places, weights, y, m, num_chosen);
}

void PackedExperts::add(uintptr_t products, uintptr_t places, uintptr_t weights, uintptr_t y, int64_t m, int64_t num_chosen) const {
  const float* from = (const float*)products;
  int64_t n = experts_.front()->n();
  bool is_bf16 = experts_.front()->type() == (int)Dtype::bf16;
  parallel(m, rows_per_task(n * num_chosen), [&](int64_t begin, int64_t end) {
    static thread_local std::vector<float> sums;
    for (int64_t row = begin; row < end; row++) {
      sums.assign((size_t)n, 0.0f);
      float* sum = sums.data();
      for (int64_t i = row * num_chosen; i < (row + 1) * num_chosen; i++) {
        const float* product = from + ((const int64_t*)places)[i] * n;
        float weight = ((const float*)weights)[i];
        for (int64_t j = 0; j < n; j++) sum[j] += product[j] * weight;
      }
      if (is_bf16)
        for (int64_t j = 0; j < n; j++) ((uint16_t*)y)[row * n + j] = to_bf16(sum[j]);
      else
        std::memcpy((float*)y + row * n, sum, (size_t)n * 4);
    }
  });
}

namespace {

// Allocates parts of a room, each for m rows.
struct Parts {
  uintptr_t next;
  int64_t m;

  uintptr_t take(int64_t row_bytes) {
    uintptr_t part = next;
    next += (uintptr_t)(m * row_bytes);
    return part;
  }
};

int64_t room_for_longs(int64_t n) { return room_for(2 * n, (int)Dtype::f32); }

}  // namespace

int64_t Experts::room_bytes() const {
  constexpr int F32 = (int)Dtype::f32;
  int64_t k = parts_.rules.num_chosen;
  int type = parts_.gated->type();
  return (type == F32 ? 0 : room_for(parts_.router->k(), F32)) + room_for(parts_.rules.num_experts, F32) + 2 * room_for_longs(k) +
         room_for(k, F32) + room_for(k * parts_.gated->n(), type) +
         (parts_.shared_inner ? room_for(parts_.shared_inner->n(), type) : 0);
}

void Experts::add_to(const HiddenRows& hidden, const Norm& norm, uintptr_t x, uintptr_t to, uintptr_t made, uintptr_t room,
                     int64_t m) const {
  constexpr int F32 = (int)Dtype::f32;
  int64_t num_experts = parts_.rules.num_experts, k = parts_.rules.num_chosen, n = parts_.gated->n();
  static thread_local std::vector<int64_t> begins;
  begins.resize((size_t)num_experts + 1);
  Parts parts{room, m};
  uintptr_t starts = (uintptr_t)begins.data(), in_float32 = x, logits = parts.take(room_for(num_experts, F32));
  uintptr_t tokens = parts.take(room_for_longs(k)), places = parts.take(room_for_longs(k)), weights = parts.take(room_for(k, F32));
  uintptr_t inner = parts.take(room_for(k * n, hidden.type)), shared = 0;

  if (hidden.type != F32) {
    in_float32 = parts.take(room_for(hidden.size, F32));
    widen(x, in_float32, m * hidden.size);
  }
  parts_.router->multiply(in_float32, hidden.size, 0, logits, num_experts, m, false);
  route(parts_.rules, logits, parts_.correction, parts_.expert_scales, m, tokens, starts, places, weights,
        parts_.counts);
  parts_.gated->multiply(x, hidden.size, tokens, starts, inner, m, m * k);
  if (parts_.shared_inner) {  // before its input may be overwritten
    shared = parts.take(room_for(parts_.shared_inner->n(), hidden.type));
    parts_.shared_inner->multiply(x, hidden.size, 0, shared, parts_.shared_inner->n(), m, false);
  }
  parts_.down->multiply_and_add(inner, n, starts, places, weights, made, m, k);
  if (parts_.shared_down) parts_.shared_down->multiply(shared, parts_.shared_inner->n(), made, made, hidden.size, m, false);
  hidden.add(norm, made, to, m);
}

}  // namespace twostroke
