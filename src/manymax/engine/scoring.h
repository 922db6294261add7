// A soft cap s' = cap tanh(s / cap) of a score and its derivative, for loops over classes.

#pragma once

#include <cmath>

#include "vector_math.h"

namespace {

// tanh(x). With y = -2 |x|, tanh |x| = (1 - e^y) / (1 + e^y). Near 0 the difference would lose its digits: it is taken
// from expm1_of.
template <typename T>
INLINE T tanh_of(T x) {
  const T minus_one = expm1_of(-2 * std::fabs(x));
  return std::copysign(minus_one / (2 + minus_one), x);
}

// The derivative of the capped score s' = cap tanh(s / cap) in s.
template <typename T>
INLINE T slope_of(T capped, T inverse_cap) {
  const T ratio = capped * inverse_cap;
  return 1 - ratio * ratio;
}

// The scores of a few classes under a cap, in place; a masked class, -inf, stays masked.
template <typename T>
INLINE void cap_scores(T* s, int64_t n, T cap, T inverse_cap) {
  constexpr T lowest = -std::numeric_limits<T>::infinity();
  const T half = cap / 2;
  int32_t far = 0;
#pragma omp simd reduction(| : far)
  for (int64_t c = 0; c < n; ++c) far |= (std::fabs(s[c]) > half) & (s[c] > lowest);
  if (!far) {
    // Most scores are well below the cap, where no exponential and no division is needed: half of the time.
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) s[c] = s[c] > lowest ? cap * small_tanh_of(s[c] * inverse_cap) : s[c];
    return;
  }
#pragma omp simd
  for (int64_t c = 0; c < n; ++c) s[c] = s[c] > lowest ? cap * tanh_of(s[c] * inverse_cap) : s[c];
}

// The gradient of the scores before the cap from that after it, in place. A masked class has the gradient 0, with which
// the slope of a score of -inf must not be multiplied.
template <typename T>
INLINE void times_slope(T* g, const T* capped, int64_t n, T inverse_cap) {
#pragma omp simd
  for (int64_t c = 0; c < n; ++c) g[c] = g[c] != 0 ? g[c] * slope_of(capped[c], inverse_cap) : T(0);
}

}  // namespace
