// Sixteen lanes where a processor's register holds fewer: GCC's vector for a register, and structs of halves for more.
//
// GCC 12 keeps a vector that is wider than the processor's registers, and every result of it, in memory. It splits a struct of
// two halves down to registers. So a level with registers of sixteen floats uses GCC's vectors alone, and on every other level
// the same operators work on halves (of halves).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace twostroke {
namespace {

#define INLINE inline __attribute__((always_inline))

#if defined(__AVX512F__)
constexpr int REGISTER_BYTES = 64, REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int REGISTER_BYTES = 32, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int REGISTER_BYTES = 16, REGISTERS = 32;
#else
constexpr int REGISTER_BYTES = 16, REGISTERS = 16;
#endif

template <typename V>
struct Halves {
  V low, high;

  // Reinterprets the bits as lanes of another type, like (f32x8)v of a vector.
  template <typename W>
  explicit INLINE operator Halves<W>() const { return {(W)low, (W)high}; }
  INLINE auto operator[](int64_t lane) const {
    constexpr int64_t HALF = sizeof(V) / sizeof(decltype(+low[0]));
    return lane < HALF ? low[lane] : high[lane - HALF];
  }
  INLINE Halves operator-() const { return {-low, -high}; }
  INLINE Halves operator~() const { return {~low, ~high}; }
};

template <typename V>
constexpr bool IS_HALVES = false;
template <typename V>
constexpr bool IS_HALVES<Halves<V>> = true;

#define LANEWISE(op)                                                                     \
  template <typename V>                                                                  \
  INLINE auto operator op(Halves<V> a, Halves<V> b) {                                    \
    return Halves<std::decay_t<decltype(a.low op b.low)>>{a.low op b.low, a.high op b.high}; \
  }                                                                                      \
  template <typename V, typename Scalar>                                                 \
    requires std::is_arithmetic_v<Scalar>                                                \
  INLINE auto operator op(Halves<V> a, Scalar b) {                                       \
    return Halves<std::decay_t<decltype(a.low op b)>>{a.low op b, a.high op b};          \
  }
#define LANEWISE_ASSIGNED(op)       \
  LANEWISE(op)                      \
  template <typename V, typename B> \
  INLINE Halves<V>& operator op##=(Halves<V>& a, B b) { return a = a op b; }
LANEWISE_ASSIGNED(+)
LANEWISE_ASSIGNED(-)
LANEWISE_ASSIGNED(*)
LANEWISE_ASSIGNED(/)
LANEWISE_ASSIGNED(&)
LANEWISE_ASSIGNED(|)
LANEWISE_ASSIGNED(^)
LANEWISE_ASSIGNED(<<)
LANEWISE_ASSIGNED(>>)
LANEWISE(<)
LANEWISE(>)
LANEWISE(<=)
LANEWISE(>=)
LANEWISE(==)
LANEWISE(!=)
#undef LANEWISE_ASSIGNED
#undef LANEWISE

template <typename T, int BYTES, bool FITS = (BYTES <= REGISTER_BYTES)>
struct LanesOf {
  typedef T Type __attribute__((vector_size(BYTES)));
};
template <typename T, int BYTES>
struct LanesOf<T, BYTES, false> {
  using Type = Halves<typename LanesOf<T, BYTES / 2>::Type>;
};
template <typename T, int COUNT>
using Lanes = typename LanesOf<T, COUNT * (int)sizeof(T)>::Type;

// Calls f for each register of v (and of others of its width) and joins the results.
template <typename F, typename V, typename... Others>
INLINE auto in_registers(const F& f, V v, Others... others) {
  if constexpr (IS_HALVES<V>) {
    auto low = in_registers(f, v.low, others.low...);
    return Halves<decltype(low)>{low, in_registers(f, v.high, others.high...)};
  } else {
    return f(v, others...);
  }
}

template <typename V>
INLINE V load(const void* p) {
  if constexpr (IS_HALVES<V>) {
    using Half = decltype(V::low);
    return {load<Half>(p), load<Half>((const char*)p + sizeof(Half))};
  } else {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
  }
}

template <typename V>
INLINE void store(void* p, V v) {
  if constexpr (IS_HALVES<V>) {
    store(p, v.low);
    store((char*)p + sizeof v.low, v.high);
  } else {
    std::memcpy(p, &v, sizeof v);
  }
}

// Returns the same number in all lanes. Subtracts zero, because adding it would change -0, so the compiler could not drop it.
template <typename V, typename Scalar>
INLINE V filled(Scalar a) {
  if constexpr (IS_HALVES<V>) return {filled<decltype(V::low)>(a), filled<decltype(V::low)>(a)};
  else return a - V{};
}

template <typename V, typename Scalar>
INLINE void set_lane(V& v, int64_t lane, Scalar value) {
  if constexpr (IS_HALVES<V>) {
    constexpr int64_t HALF = sizeof v.low / sizeof(Scalar);
    if (lane < HALF) set_lane(v.low, lane, value);
    else set_lane(v.high, lane - HALF, value);
  } else {
    v[lane] = value;
  }
}

template <typename V, size_t... LANE>
INLINE auto split(V v, std::index_sequence<LANE...>) {
  auto low = __builtin_shufflevector(v, v, LANE...);
  return Halves<decltype(low)>{low, __builtin_shufflevector(v, v, (LANE + sizeof...(LANE))...)};
}

// Returns both halves of a vector, even of a single register.
template <typename V>
INLINE auto halves_of(V v) {
  if constexpr (IS_HALVES<V>) return v;
  else return split(v, std::make_index_sequence<sizeof(V) / sizeof(v[0]) / 2>{});
}

template <typename V, size_t... LANE>
INLINE V every_second(V a, V b, std::integral_constant<int, 0>, std::index_sequence<LANE...>) {
  return __builtin_shufflevector(a, b, 2 * LANE...);
}
template <typename V, size_t... LANE>
INLINE V every_second(V a, V b, std::integral_constant<int, 1>, std::index_sequence<LANE...>) {
  return __builtin_shufflevector(a, b, (2 * LANE + 1)...);
}

// Returns lanes FIRST, FIRST + 2, ... of a and then of b as vectors of Narrow: the lower or the upper parts of wider lanes.
template <typename Narrow, int FIRST, typename V>
INLINE auto parts_of(V a, V b) {
  if constexpr (IS_HALVES<V>) {
    auto low = parts_of<Narrow, FIRST>(a.low, a.high);
    return Halves<decltype(low)>{low, parts_of<Narrow, FIRST>(b.low, b.high)};
  } else {
    using Out = Lanes<Narrow, (int)(sizeof(V) / sizeof(Narrow))>;
    return every_second((Out)a, (Out)b, std::integral_constant<int, FIRST>{},
                        std::make_index_sequence<sizeof(V) / sizeof(Narrow)>{});
  }
}

}  // namespace
}  // namespace twostroke
