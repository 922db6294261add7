// Sampled softmax of rows that share their negatives: losses, and the gradient in place of the scores. kernel.py has
// the same in torch, where it takes six passes over the scores.
//
// The logit of a negative is s_j - log q_j - shift; all logits are taken relative to the score of the positive, which
// costs no digits where scores have a large offset in common.

#include "rows.h"

namespace {

// The logits of a row in place of its scores; returns the largest, or nan if a score is nan or +inf.
template <typename T>
T logits(T* s, int64_t k, T offset, const T* log_q) {
  T top = -std::numeric_limits<T>::infinity();
  int bad = 0;
  if (log_q) {
#pragma omp simd reduction(max : top) reduction(| : bad)
    for (int64_t j = 0; j < k; ++j) {
      const T logit = (s[j] - offset) - log_q[j];
      bad |= !(logit < std::numeric_limits<T>::infinity());  // a comparison with nan is false
      top = logit > top ? logit : top;
      s[j] = logit;
    }
  } else {
#pragma omp simd reduction(max : top) reduction(| : bad)
    for (int64_t j = 0; j < k; ++j) {
      const T logit = s[j] - offset;
      bad |= !(logit < std::numeric_limits<T>::infinity());
      top = logit > top ? logit : top;
      s[j] = logit;
    }
  }
  return bad ? std::numeric_limits<T>::quiet_NaN() : top;
}

// loss = log(exp(c_y) + sum_j exp(c_j)) - c_y. Row r of the gradient is scale[r] times what the scores are replaced by.
template <typename T>
void rows(T* scores, int64_t n, int64_t stride, int64_t k, const T* positive, const T* logit, const T* log_q,
          const T* shift, const T* coefficient, T* loss, T* grad_positive, T* scale, int threads) {
#pragma omp parallel for schedule(dynamic, 4) num_threads(threads)
  for (int64_t r = 0; r < n; ++r) {
    T* const s = scores + r * stride;
    const T own = logit[r];
    const T largest = logits(s, k, positive[r] + (shift ? shift[r] : 0), log_q);
    if (!std::isfinite(own) || std::isnan(largest)) {  // the caller looks at the loss and says what is wrong
      loss[r] = grad_positive[r] = scale[r] = std::numeric_limits<T>::quiet_NaN();
      continue;
    }
    const T top = std::max(own, largest);
    const double others = exponentials(s, k, top), whole = others + std::exp(static_cast<double>(own - top));
    loss[r] = static_cast<T>(std::log(whole) + (top - own));
    if (!coefficient) continue;
    scale[r] = static_cast<T>(coefficient[r] / whole);
    // p_y - 1 = -(1 - p_y), without the difference: where p_y is nearly 1 it would have no digits.
    grad_positive[r] = static_cast<T>(-coefficient[r] * (others / whole));
  }
}

}  // namespace

#define EXPORT(T, SUFFIX)                                                                                              \
  NATIVE void sampled_softmax_rows_##SUFFIX(T* scores, int64_t n, int64_t stride, int64_t k, const T* positive,        \
                                            const T* logit, const T* log_q, const T* shift, const T* coefficient,      \
                                            T* loss, T* grad_positive, T* scale, int threads) {                        \
    rows(scores, n, stride, k, positive, logit, log_q, shift, coefficient, loss, grad_positive, scale, threads);       \
  }

EXPORT(float, float32)
EXPORT(double, float64)
