// PSL of rows of scores: for each positive y of a row the terms h_c = g(s_c - s_y)^(1 / tau) and their slopes
// r_c = g'(s_c - s_y) / g(s_c - s_y), for one of three functions g. kernel.py has the formulas and the same in torch.
//
// Terms are powers, with exponents of 40 and more: they are computed as exponentials of log g / tau, relative to the
// largest of the row.

#include "rows.h"

namespace {

// The functions g, numbered as in kernel.py.
enum Activation : int { RELU = 0, TANH = 1, ATAN = 2 };

template <typename T>
struct Term {
  T log, slope;  // log g(d), -inf where g is 0, and its derivative
};

template <int activation, typename T>
INLINE Term<T> term_of(T d) {
  constexpr T lowest = -std::numeric_limits<T>::infinity();
  if (activation == TANH) {
    // 1 + tanh(d) = 2 / (1 + e^(-2 d)), whose logarithm keeps its digits far below 0, where the sum has none.
    const T a = exp_of(-2 * std::fabs(d));
    return {T(0.693147180559945309) + (d < 0 ? 2 * d : T(0)) - log1p_of(a), 2 * (d < 0 ? T(1) : a) / (1 + a)};
  }
  const T g = 1 + (activation == RELU ? d : atan_of(d));
  const T live = g > 0 ? g : T(1);
  return {g > 0 ? log_of(live) : lowest, (g > 0 ? T(1) : T(0)) / (activation == RELU ? live : live * (1 + d * d))};
}

// What a pass over a row finds for one positive: the largest log h, and relative to it sum h and sum h r.
struct Sums {
  double reference, total, slopes;
};

// The sums of a row whose largest score is `top`; with `keep`, h r takes the place of the scores.
template <int activation, bool keep, typename T>
__attribute__((noinline)) Sums sum_terms(T* s, int64_t classes, T label, T top, T exponent) {
  const T reference = term_of<activation>(top - label).log * exponent;
  if (!std::isfinite(reference)) {  // every class is below the cut of g, or masked
    if (keep) std::fill(s, s + classes, T(0));
    return {-std::numeric_limits<double>::infinity(), 0, 0};
  }
  double total = 0, slopes = 0;
  for (int64_t start = 0; start < classes; start += PIECE) {
    const int64_t end = std::min(classes, start + PIECE);
    T part = 0, part_slopes = 0;
#pragma omp simd reduction(+ : part, part_slopes)
    for (int64_t c = start; c < end; ++c) {
      const Term<T> term = term_of<activation>(s[c] - label);
      const T h = exp_of(term.log * exponent - reference), moved = h * term.slope;
      part += h;
      part_slopes += moved;
      if (keep) s[c] = moved;
    }
    total += part;
    slopes += part_slopes;
  }
  return {static_cast<double>(reference), total, slopes};
}

// sum_p shares_p h r in place of the scores, from the shares and references of the n positives of a row. Pieces
// outside, positives inside: each of them reads the scores.
template <int activation, typename T>
void write_gradient(T* s, int64_t classes, const T* labels, const T* references, const T* shares, int64_t n,
                    T exponent) {
  for (int64_t start = 0; start < classes; start += PIECE) {
    const int64_t size = std::min(classes - start, PIECE);
    T gradient[PIECE] = {};
    for (int64_t p = 0; p < n; ++p) {
      const T label = labels[p], reference = references[p], share = shares[p];
      if (share == 0) continue;
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) {
        const Term<T> term = term_of<activation>(s[start + i] - label);
        gradient[i] += share * (exp_of(term.log * exponent - reference) * term.slope);
      }
    }
    std::copy(gradient, gradient + size, s + start);
  }
}

// The sums for all positives of all rows. A row has its scores replaced if it can have one positive alone.
template <int activation, typename T>
void sums(T* scores, int64_t n, int64_t stride, int64_t classes, const T* labels, int64_t positives, T exponent, T* top,
          double* reference, double* total, double* slopes, int threads) {
  for_rows(scores, n, stride, classes, threads, [&](int64_t r, Row<T>& row) {
    top[r] = row.scan(nullptr, r);
    for (int64_t k = r * positives; k < (r + 1) * positives; ++k) {
      // A missing positive has the label +inf; nan and +inf among the scores are the caller's to report.
      const T highest = std::isfinite(labels[k]) && std::isfinite(top[r]) ? top[r] : -std::numeric_limits<T>::infinity();
      const Sums found = positives == 1
                             ? sum_terms<activation, true>(row.scores, classes, labels[k], highest, exponent)
                             : sum_terms<activation, false>(row.scores, classes, labels[k], highest, exponent);
      reference[k] = found.reference;
      total[k] = found.total;
      slopes[k] = found.slopes;
    }
  });
}

template <int activation, typename T>
void gradients(T* scores, int64_t n, int64_t stride, int64_t classes, const T* labels, const T* references,
               const T* shares, int64_t positives, T exponent, int threads) {
  for_rows(scores, n, stride, classes, threads, [&](int64_t r, Row<T>& row) {
    const int64_t k = r * positives;
    write_gradient<activation>(row.scores, classes, labels + k, references + k, shares + k, positives, exponent);
  });
}

}  // namespace

// C functions for ctypes, one per precision; arguments as kernel.py passes them.
#define EXPORT(T, SUFFIX)                                                                                              \
  NATIVE void psl_sums_##SUFFIX(T* scores, int64_t n, int64_t stride, int64_t classes, const T* labels,                \
                                int64_t positives, const double* exponent, T* top, double* reference, double* total,   \
                                double* slopes, int activation, int threads) {                                         \
    const auto chosen = activation == RELU ? sums<RELU, T> : activation == TANH ? sums<TANH, T> : sums<ATAN, T>;       \
    chosen(scores, n, stride, classes, labels, positives, static_cast<T>(*exponent), top, reference, total, slopes,    \
           threads);                                                                                                   \
  }                                                                                                                    \
  NATIVE void psl_gradients_##SUFFIX(T* scores, int64_t n, int64_t stride, int64_t classes, const T* labels,           \
                                     const T* references, const T* shares, int64_t positives, const double* exponent,  \
                                     int activation, int threads) {                                                    \
    const auto chosen =                                                                                                \
        activation == RELU ? gradients<RELU, T> : activation == TANH ? gradients<TANH, T> : gradients<ATAN, T>;        \
    chosen(scores, n, stride, classes, labels, references, shares, positives, static_cast<T>(*exponent), threads);     \
  }

EXPORT(float, float32)
EXPORT(double, float64)
