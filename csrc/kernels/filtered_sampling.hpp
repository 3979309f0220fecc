// Gumbel-max draws among the tokens that pass min_p, top_k and top_p (src/twostroke/sampling/filters.py), without sorting a row.
//
// The filters keep all tokens down to some value, and of the tokens at that value the first ones. The value of top_k is searched
// among the few tokens that the block maxima do not exclude. The value of top_p is where the probabilities, added from the
// largest down, reach their target: a histogram finds the range that holds it, and the numbers of that range are partitioned
// until one is left.
//
// Sums in another order differ by some 1e-15. Where top_p depends on less than MASS_SLACK of all probability, the result is -1
// and the caller decides, as for two scores that are close.
#pragma once

#include <cmath>
#include <cstring>

#include "sampling.hpp"

namespace twostroke {
namespace {

constexpr double MASS_SLACK = 1e-11;
constexpr float LEAST_LOGIT = -3.402823466e+38f;  // tokens at -inf were excluded before
constexpr int64_t BINS = 1024;                    // bins of a histogram
constexpr float BINS_PER_UNIT = 32;               // so the last bin holds all numbers from -32 down
constexpr int64_t FEW = 2048;                     // numbers that are partitioned without a histogram

// Computes e^x of eight numbers of at most 0, within some units in the last place.
INLINE void exp8(const float* x, double* out) {
  using f64x8 = Lanes<double, 8>;
  using i64x8 = Lanes<int64_t, 8>;
  alignas(64) double wide[8];
  for (int i = 0; i < 8; i++) wide[i] = x[i] > -700.0f ? x[i] : -700.0f;
  constexpr double MAGIC = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to a whole number
  f64x8 v = load<f64x8>(wide), shifted = v * 1.4426950408889634 + MAGIC, n = shifted - MAGIC;
  f64x8 r = v - n * 0.693147180369123816490 - n * 1.90821492927058770002e-10;
  f64x8 p = r * (1.0 / 479001600) + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  store(out, (i64x8)p + ((i64x8)shifted << 52));  // the magic number has no low bits
}

// Weight of a number: 1, or its probability.
struct One {
  static INLINE double of(float) { return 1; }
  static INLINE void of8(const float*, double* out) {
    for (int i = 0; i < 8; i++) out[i] = 1;
  }
};
struct Mass {
  static INLINE double of(float x) { return std::exp((double)x); }
  static INLINE void of8(const float* x, double* out) { exp8(x, out); }
};

template <typename Weight>
double weight_of(const float* x, int64_t n) {
  alignas(64) double sums[8] = {}, weights[8];
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    Weight::of8(x + i, weights);
    for (int lane = 0; lane < 8; lane++) sums[lane] += weights[lane];
  }
  for (; i < n; i++) sums[0] += Weight::of(x[i]);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// Moves numbers with `is_kept` to the front; returns their count.
template <typename F>
INLINE int64_t keep(float* x, int64_t n, const F& is_kept) {
  int64_t kept = 0;
  for (int64_t i = 0; i < n; i++) {
    float value = x[i];
    x[kept] = value;
    kept += is_kept(value);
  }
  return kept;
}

// Point at which the weights of numbers, added from the largest down, reach a target.
struct Reached {
  float value;           // number whose weight reaches it
  double before;         // weight of all numbers above it
  double target, total;  // total: weight of all numbers
};

INLINE int64_t bin_of(float x) {
  float at = -x * BINS_PER_UNIT;
  return at < (float)(BINS - 1) ? (int64_t)at : BINS - 1;
}

// Adds the weight of each number to its bin.
template <typename Weight>
void fill_bins(const float* x, int64_t n, double* bins) {
  alignas(64) double of_eight[8];
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    Weight::of8(x + i, of_eight);
    for (int lane = 0; lane < 8; lane++) bins[bin_of(x[i + lane])] += of_eight[lane];
  }
  for (; i < n; i++) bins[bin_of(x[i])] += Weight::of(x[i]);
}

// Finds the number at which the target, target_of(total weight), is reached, or the smallest one; needs at least one number and
// none above 0. Changes the numbers' order.
template <typename Weight, typename F>
Reached reach(float* x, int64_t n, const F& target_of) {
  double before = 0, total = 0, target;
  if (n > FEW) {
    double bins[BINS] = {};
    fill_bins<Weight>(x, n, bins);
    for (double weight : bins) total += weight;
    target = target_of(total);
    int64_t bin = 0, last = BINS - 1;
    while (bins[last] == 0) last--;
    while (bin < last && before + bins[bin] < target) before += bins[bin++];
    n = keep(x, n, [&](float value) { return bin_of(value) == bin; });
  } else {
    total = weight_of<Weight>(x, n);
    target = target_of(total);
  }
  // [first, last) holds it; numbers above it precede this range. Every second pivot halves the range of the bits instead of the
  // numbers, so that no order of them makes this slow.
  int64_t first = 0, last = n;
  for (bool halves_bits = false;; halves_bits = !halves_bits) {
    float largest = x[first], smallest = x[first];
    for (int64_t i = first + 1; i < last; i++) {
      largest = x[i] > largest ? x[i] : largest;
      smallest = x[i] < smallest ? x[i] : smallest;
    }
    if (largest == smallest) return {largest, before, target, total};
    float pivot = x[(first + last) / 2];
    if (halves_bits) {
      uint32_t low, high;  // for numbers of at most 0 the bits grow as the numbers fall
      std::memcpy(&low, &largest, 4);
      std::memcpy(&high, &smallest, 4);
      low &= 0x7fffffff, high &= 0x7fffffff;
      uint32_t middle = (low + (high - low) / 2) | 0x80000000;
      std::memcpy(&pivot, &middle, 4);
    }
    if (pivot == smallest) pivot = std::nextafter(pivot, 0.0f);  // so that both parts have numbers
    int64_t upper = first;
    for (int64_t i = first; i < last; i++) {
      float value = x[i];
      bool is_upper = value >= pivot;
      x[i] = x[upper];
      x[upper] = value;
      upper += is_upper;
    }
    double weight = weight_of<Weight>(x + first, upper - first);
    if (before + weight < target) {
      before += weight;
      first = upper;
    } else {
      last = upper;
    }
  }
}

// Row of logits minus the largest one, divided by the temperature.
struct ScaledRow {
  const float* logits;
  int64_t vocab_size;
  f32x16 temperature, peak{};

  // Calls f(first token of a block, its scaled logits, count) for blocks with a logit of at least `bound`.
  template <typename F>
  INLINE void blocks(const float* largest, float bound, const F& f) const {
    for (int64_t first = 0; first < vocab_size; first += SAMPLING_BLOCK) {
      if (largest[first / SAMPLING_BLOCK] < bound) continue;
      alignas(64) float scaled[SAMPLING_BLOCK];
      int64_t count = vocab_size - first < SAMPLING_BLOCK ? vocab_size - first : SAMPLING_BLOCK;
      in_lanes(count, [&](int64_t i, int64_t n) { store16(scaled + i, (get(logits + first + i, n) - peak) / temperature); });
      f(first, scaled, count);
    }
  }

  // Finds the peak and the largest logit of each block; returns the number of blocks, or 0 if the peak is not finite.
  int64_t find_largest(float* largest) {
    int64_t block = 0;
    float highest = -__builtin_inff();
    i32x16 is_nan{};
    for (int64_t first = 0; first < vocab_size; first += SAMPLING_BLOCK, block++) {
      f32x16 most = splat(-__builtin_inff());
      if (first + SAMPLING_BLOCK <= vocab_size)
        for (int64_t i = 0; i < SAMPLING_BLOCK; i += LANES) {
          f32x16 some = load16(logits + first + i);
          is_nan |= some != some;
          most = larger(some, most);
        }
      float found = largest_of(most);
      for (int64_t i = first; i < vocab_size && first + SAMPLING_BLOCK > vocab_size; i++) {
        if (std::isnan(logits[i])) return 0;
        found = logits[i] > found ? logits[i] : found;
      }
      largest[block] = found;
      highest = found > highest ? found : highest;
    }
    int32_t nans[LANES];
    store(nans, is_nan);
    for (int32_t found : nans)
      if (found) return 0;
    if (!std::isfinite(highest)) return 0;
    peak = splat(highest);
    // the same rounding as for all logits, so the scaled largest logit is the largest scaled one
    in_lanes(block, [&](int64_t i, int64_t n) { set(largest + i, (get(largest + i, n) - peak) / temperature, n); });
    return block;
  }
};

int64_t draw_filtered(const FilteredArgs& args, int64_t r) {
  const GumbelArgs& of = args.gumbel;
  ScaledRow row{of.logits + r * of.stride, of.vocab_size, splat(of.temperatures[r])};
  float* largest = args.scratch;
  int64_t num_blocks = row.find_largest(largest);
  if (!num_blocks) return -1;
  float* left = largest + num_blocks;
  float limit = args.floors[r] > LEAST_LOGIT ? args.floors[r] : LEAST_LOGIT;
  int64_t top_k = args.top_k[r], num_left = 0, num_at_limit = of.vocab_size;
  // Copies the numbers of at least `least` into `left`.
  auto gather = [&](float least) {
    num_left = 0;
    row.blocks(largest, least, [&](int64_t, const float* scaled, int64_t count) {
      for (int64_t i = 0; i < count; i++) {
        left[num_left] = scaled[i];
        num_left += scaled[i] >= least;
      }
    });
  };
  auto find_kth = [&](int64_t n) { return reach<One>(left, n, [&](double) { return (double)top_k; }).value; };
  double top_p = args.top_p[r];
  if (top_k < of.vocab_size || top_p < 1) {
    float bound = limit;
    std::memcpy(left, largest, (size_t)num_blocks * 4);
    int64_t num_finite = keep(left, num_blocks, [](float x) { return x >= LEAST_LOGIT; });
    if (top_k <= num_finite) {  // this many blocks have a token of at least this value
      float reached = find_kth(num_finite);
      bound = reached > bound ? reached : bound;
    }
    gather(bound);
    if (num_left >= top_k) {
      limit = find_kth(num_left);
      gather(limit);  // once more, since the search reorders them; ties of the k-th stay
    }
    if (top_p < 1) {
      Reached end = reach<Mass>(left, num_left, [&](double mass) { return mass * top_p; });
      // take tokens at the limit until the mass before the next one reaches the target
      double each = Mass::of(end.value), missing = (end.target - end.before) / each;
      if (std::fabs(missing - std::nearbyint(missing)) * each <= MASS_SLACK * end.total) return -1;
      limit = end.value;
      num_at_limit = missing > 1 ? (int64_t)std::ceil(missing) : 1;
    }
  }
  Contest contest;
  uint64_t key = (uint64_t)of.keys[r];
  row.blocks(largest, limit, [&](int64_t first, const float* scaled, int64_t count) {
    alignas(64) float bounds[SAMPLING_BLOCK];
    in_lanes(count, [&](int64_t i, int64_t n) { store16(bounds + i, get(scaled + i, n) + noise_bound(key, first + i)); });
    for (int64_t i = 0; i < count; i++) {
      if (scaled[i] < limit || (scaled[i] == limit && num_at_limit-- <= 0)) continue;
      if ((double)bounds[i] >= contest.best - SLACK) contest.enter(first + i, (double)scaled[i] + noise_of(key, first + i));
    }
  });
  return contest.best - contest.second > SLACK ? contest.winner : -1;
}

void filtered_argmax(const FilteredArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) args.gumbel.winners[row] = draw_filtered(args, row);
}

}  // namespace
}  // namespace twostroke
