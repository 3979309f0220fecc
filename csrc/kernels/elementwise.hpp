// Norm and rotary embedding, a row at a time. Sums always use sixteen lanes and one tree.
#pragma once

#include <cmath>

#include "table.hpp"
#include "vec.hpp"

namespace twostroke {
namespace {

// Calls f(index of the first element, count) for pieces of sixteen and the rest.
template <typename F>
INLINE void in_lanes(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) f(i, LANES);
  if (i < n) f(i, n - i);
}

// Calls f with a number of the activations' type.
template <typename F>
INLINE void with_type(Dtype type, const F& f) {
  if (type == Dtype::f32) f(float{});
  else f(uint16_t{});
}

template <typename T>
INLINE f32x16 get(const T* p, int64_t count) { return count == LANES ? load16(p) : load_some(p, count); }

template <typename T>
INLINE void set(T* p, f32x16 v, int64_t count) {
  if (count == LANES) store16(p, v);
  else store_some(p, v, count);
}

template <typename T, typename W>
void rms_norm_rows(const T* x, int64_t x_stride, const W* weight, T* y, int64_t y_stride, int64_t parts, int64_t n, float eps,
                   int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++)
    for (int64_t part = 0; part < parts; part++) {
      const T* from = x + row * x_stride + part * n;
      const W* factor = weight + part * n;
      T* to = y + row * y_stride + part * n;
      f32x16 squares{};
      in_lanes(n, [&](int64_t i, int64_t count) {
        f32x16 v = get(from + i, count);
        squares = fma(v, v, squares);
      });
      f32x16 scale = splat(1.0f / std::sqrt(sum_of(squares) / (float)n + eps));
      in_lanes(n, [&](int64_t i, int64_t count) {
        // rounded to the weight's type before it is applied, as the models were trained
        set(to + i, rounded(get(from + i, count) * scale, W{}) * get(factor + i, count), count);
      });
    }
}

void rms_norm(const void* x, int64_t x_stride, const void* weight, void* y, int64_t y_stride, int64_t parts, int64_t n,
              float eps, Dtype type, Dtype weight_type, int64_t begin, int64_t end) {
  auto run = [&](auto element, auto factor) {
    using T = decltype(element);
    using W = decltype(factor);
    rms_norm_rows((const T*)x, x_stride, (const W*)weight, (T*)y, y_stride, parts, n, eps, begin, end);
  };
  if (type == Dtype::f32) run(float{}, float{});
  else if (weight_type == Dtype::f32) run(uint16_t{}, float{});
  else run(uint16_t{}, uint16_t{});
}

template <typename T>
void rotate_rows(T* x, int64_t token_stride, int64_t heads, int64_t head_dim, const T* cos, const T* sin, int64_t begin,
                 int64_t end) {
  int64_t half = head_dim / 2;
  for (int64_t token = begin; token < end; token++) {
    const T *c = cos + token * head_dim, *s = sin + token * head_dim;
    for (int64_t head = 0; head < heads; head++) {
      T* row = x + token * token_stride + head * head_dim;
      in_lanes(half, [&](int64_t i, int64_t count) {
        f32x16 low = get(row + i, count), high = get(row + half + i, count);
        set(row + i, fma(low, get(c + i, count), high * get(s + i, count)), count);
        set(row + half + i, fma(high, get(c + half + i, count), low * get(s + half + i, count)), count);
      });
    }
  }
}

void rotate(void* x, int64_t token_stride, int64_t heads, int64_t head_dim, const void* cos, const void* sin, Dtype type,
            int64_t begin, int64_t end) {
  with_type(type, [&]<typename T>(T) {
    rotate_rows((T*)x, token_stride, heads, head_dim, (const T*)cos, (const T*)sin, begin, end);
  });
}

void center(void* k, int64_t token_stride, const void* mean, int64_t n, Dtype type, int64_t begin, int64_t end) {
  with_type(type, [&]<typename T>(T) {
    const T* from = (const T*)mean;
    for (int64_t token = begin; token < end; token++) {
      T* row = (T*)k + token * token_stride;
      in_lanes(n, [&](int64_t i, int64_t count) { set(row + i, get(row + i, count) - get(from + i, count), count); });
    }
  });
}

void add(const void* a, const void* b, void* y, Dtype type, int64_t begin, int64_t end) {
  with_type(type, [&]<typename T>(T) {
    const T *from = (const T*)a + begin, *other = (const T*)b + begin;
    T* to = (T*)y + begin;
    in_lanes(end - begin, [&](int64_t i, int64_t count) { set(to + i, get(from + i, count) + get(other + i, count), count); });
  });
}

}  // namespace
}  // namespace twostroke
