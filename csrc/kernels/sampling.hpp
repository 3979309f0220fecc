// Gumbel-max draws from a row of logits, without a logarithm for each of 150,000 tokens.
//
// The draw is   argmax over t of   (x[t] - peak) / temperature + g[t],   g = -log(-log(u)),   u an odd multiple of 2^-53 made by
// SplitMix64 from the row's key and t (src/twostroke/sampling/noise.py). As -log(u) >= 1 - u, no g is above -log(1 - u), for
// which exponent and fraction of a float32 give a bound that is at most 0.06 too high. A token whose bound does not reach the
// best score so far cannot win; the few others are computed in float64.
//
// Logarithms of two libraries differ by some 1e-15. So a winner by more than SLACK wins with either of them; where it is closer,
// the result is -1 and the caller decides.
#pragma once

#include <cmath>

#include "elementwise.hpp"
#include "table.hpp"
#include "vec.hpp"

namespace twostroke {
namespace {

void argmax(const ArgmaxArgs& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const float* values = args.values + row * args.stride;
    f32x16 best = splat(-__builtin_inff());
    i32x16 place{}, is_nan{};
    int64_t column = 0;
    for (; column + LANES <= args.columns; column += LANES) {
      f32x16 some = load16(values + column);
      i32x16 is_larger = some > best;
      best = select(is_larger, some, best);
      place = (is_larger & splat((int32_t)(column / LANES))) | (~is_larger & place);
      is_nan |= some != some;
    }
    alignas(64) float largest[LANES];
    alignas(64) int32_t vectors[LANES], nans[LANES];
    store(largest, best);
    store(vectors, place);
    store(nans, is_nan);
    int64_t winner = 0;
    bool has_nan = false;
    float most = -__builtin_inff();
    for (int64_t lane = 0; lane < LANES; lane++) {
      int64_t at = vectors[lane] * LANES + lane;
      if (largest[lane] > most || (largest[lane] == most && at < winner)) most = largest[lane], winner = at;
      has_nan |= nans[lane] != 0;
    }
    for (; column < args.columns; column++) {
      if (values[column] > most) most = values[column], winner = column;
      has_nan |= values[column] != values[column];
    }
    if (has_nan)
      for (winner = 0; values[winner] == values[winner];) winner++;
    args.winners[row] = winner;
  }
}

using u64x8 = Lanes<uint64_t, 8>;

constexpr double SLACK = 1e-9;
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;

template <typename U>
INLINE U splitmix64(U z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

// Returns bounds above the noise of sixteen tokens from `first` on, by less than 0.07 where it is positive.
INLINE f32x16 noise_bound(uint64_t key, int64_t first) {
  alignas(64) static constexpr uint64_t IDS[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};
  auto bits = [&](int half) { return splitmix64((load<u64x8>(IDS + 8 * half) + (uint64_t)first) * GOLDEN + key); };
  // 1 - u >= rest / 2^32, and log2(rest) >= exponent + fraction; where rest is 0 the bound is 110, above all noise
  u32x16 rest = ~parts_of<uint32_t, 1>(bits(0), bits(1));
  f32x16 log2_rest = to_float((i32x16)to_float(rest)) * splat(0x1p-23f) - splat(127.0f);
  return (splat(32.0f) - log2_rest) * splat(0.6931472f) + splat(1e-3f);  // more than all rounding errors of this
}

INLINE double noise_of(uint64_t key, int64_t token) {
  uint64_t bits = splitmix64(key + (uint64_t)(token + 1) * GOLDEN) >> 11 | 1;
  return -std::log(-std::log((double)bits * 0x1p-53));
}

// Returns the largest logit of a row; NaN if it has one.
INLINE float peak_of(const float* logits, int64_t n) {
  f32x16 most = splat(-__builtin_inff());
  i32x16 is_nan{};
  in_lanes(n, [&](int64_t i, int64_t count) {
    f32x16 some = get(logits + i, count);
    is_nan |= some != some;
    if (count == LANES) most = larger(some, most);
    else
      for (int64_t at = i; at < n; at++) most = larger(splat(logits[at]), most);
  });
  int32_t nans[LANES];
  store(nans, is_nan);
  for (int32_t found : nans)
    if (found) return __builtin_nanf("");
  return largest_of(most);
}

// Two best scores so far, and the token of the best.
struct Contest {
  int64_t winner = -1;
  double best = -3.7, second = -3.7;  // all noise is above this, and the largest logit counts 0

  void enter(int64_t token, double score) {
    if (score > best) {
      second = best;
      best = score;
      winner = token;
    } else if (score > second) {
      second = score;
    }
  }
};

void gumbel_argmax(const GumbelArgs& args, int64_t begin, int64_t end) {
  constexpr int64_t AT_ONCE = 4 * LANES;  // tokens per comparison with the best score
  for (int64_t row = begin; row < end; row++) {
    const float* logits = args.logits + row * args.stride;
    uint64_t key = (uint64_t)args.keys[row];
    float largest = peak_of(logits, args.vocab_size);
    args.winners[row] = -1;
    if (!std::isfinite(largest)) continue;
    f32x16 peak = splat(largest), temperature = splat(args.temperatures[row]);
    Contest contest;
    for (int64_t first = 0; first < args.vocab_size; first += AT_ONCE) {
      alignas(64) float scaled[AT_ONCE], bounds[AT_ONCE];
      int64_t count = args.vocab_size - first < AT_ONCE ? args.vocab_size - first : AT_ONCE;
      f32x16 most = splat(-__builtin_inff());
      in_lanes(count, [&](int64_t i, int64_t n) {
        f32x16 x = (get(logits + first + i, n) - peak) / temperature, bound = x + noise_bound(key, first + i);
        store16(scaled + i, x);
        store16(bounds + i, bound);
        most = larger(bound, most);  // lanes after the last token cost at most one comparison
      });
      if ((double)largest_of(most) < contest.best - SLACK) continue;
      for (int64_t i = 0; i < count; i++)
        if ((double)bounds[i] >= contest.best - SLACK)
          contest.enter(first + i, (double)scaled[i] + noise_of(key, first + i));
    }
    args.winners[row] = contest.best - contest.second > SLACK ? contest.winner : -1;
  }
}

}  // namespace
}  // namespace twostroke
