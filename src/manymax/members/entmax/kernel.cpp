// Entmax of rows of scores, for alpha = 1.5 and for alpha = 2, which is sparsemax. See engine/rows.h for what a row is
// replaced by, and ops/levels.py for the search.
//
// With beta = alpha - 1 a row has p = u^(1/beta), u = max(0, w + beta (s - max s)), and a level w at which the p sum
// to 1. Both values of alpha are compiled on their own: their powers are u and u * u, which are vectorised, while with
// a general pow a step takes three times as long as one of softmax.

#include "export.h"
#include "rows.h"

namespace {

constexpr int ENTMAX_15 = 1, SPARSEMAX = 2;  // the variants, as level_search.py numbers them
constexpr int64_t GROUP = 16;                // one class in so many is looked at to find a level to start from
constexpr int MOST_STEPS = 60;               // about 6 are taken; no loop may run forever, whatever the scores are

struct Sums {
  double total = 0, slope = 0;  // F = sum p and A = sum p^(1 - beta), of which A / beta is the slope of F in w
  int64_t support = 0;          // classes with p > 0
};

// The sums at level w over scores s - offset. The difference is taken in T, where that of two nearby numbers is exact;
// U is the precision of the sums within a piece of 256 classes. Pieces are added up in double: a float that has summed
// a million terms would lose the small ones.
template <int VARIANT, typename U, typename T>
Sums sums(const T* s, int64_t n, T offset, double w) {
  Sums out;
  const U level = static_cast<U>(w), beta = static_cast<U>(VARIANT == SPARSEMAX ? 1.0 : 0.5);
  for (int64_t start = 0; start < n; start += PIECE) {
    const int64_t end = std::min(n, start + PIECE);
    U first = 0, second = 0;
    int32_t inside = 0;
    // No branches, so that the loop is vectorised. A masked class has u0 = -inf and adds nothing.
#pragma omp simd reduction(+ : first, second, inside)
    for (int64_t c = start; c < end; ++c) {
      const U u0 = level + beta * static_cast<U>(s[c] - offset);
      const U u = u0 > 0 ? u0 : 0;
      first += u;
      second += u * u;
      inside += u0 > 0;
    }
    // sparsemax: p = u, p^0 = 1; entmax-1.5: p = u^2, p^(1/2) = u
    out.total += VARIANT == SPARSEMAX ? first : second;
    out.slope += VARIANT == SPARSEMAX ? inside : first;
    out.support += inside;
  }
  return out;
}

// How far one Newton step on F^beta = mass^beta lowers the level. F^beta is convex in w, so that a step from either
// side ends above the root.
template <int VARIANT>
double step(const Sums& f, double mass = 1) {
  return (f.total - (VARIANT == SPARSEMAX ? mass : std::sqrt(mass * f.total))) / f.slope;
}

// A level to start from, found on every 16th class: these should sum to about their share of the classes, `mass`. A
// sample may miss the support or be far off, so the result is kept within what p_top can be, from 1/C to 1.
template <int VARIANT, typename T>
double start(Row<T>& row, T top) {
  row.found.clear();
  for (int64_t c = 0; c < row.classes; c += GROUP) row.found.push_back(row.scores[c] - top);
  const auto n = static_cast<int64_t>(row.found.size());
  const double mass = static_cast<double>(n) / row.classes;
  const double low = std::pow(1.0 / row.classes, VARIANT == SPARSEMAX ? 1 : 0.5);
  double w = 1;
  for (int k = 0; k < MOST_STEPS; ++k) {
    const Sums f = sums<VARIANT, T>(row.found.data(), n, T(0), w);
    if (!(f.slope > 0)) return low;
    const double decrease = step<VARIANT>(f, mass);
    w -= decrease;
    // a start need not be exact
    if (std::abs(decrease) <= 1e-3 * w) break;
  }
  return std::min(1.0, std::max(low, w));
}

// The maximum of a row of which this rank has a part, and a level above that of its classes alone. Other ranks have
// more classes, which lower the level: this is a bound, and the search over the ranks goes on from it.
template <int VARIANT, typename T>
void level_row(int64_t r, Row<T>& row, T* top, double* level) {
  top[r] = maximum(row.scores, row.classes);
  level[r] = 1;
  if (!std::isfinite(top[r])) return;
  // w = 1 is the highest level. If few classes are above it, a better bound would not make the work smaller.
  int64_t support = row.above(top[r], static_cast<T>(VARIANT == SPARSEMAX ? -1 : -2));
  if (support * SPARSE <= row.classes) return;
  double w = start<VARIANT>(row, top[r]);
  for (int k = 0; k < 4; ++k) {  // a few steps give a good bound
    const Sums f = sums<VARIANT, T>(row.scores, row.classes, top[r], w);
    w -= step<VARIANT>(f);
    if (f.support * SPARSE <= row.classes) break;
  }
  level[r] = std::min(1.0, w);
}

// One row: its maximum, Omega*(s) - max s, and the gradient in place of its scores.
template <int VARIANT, typename T>
void entmax_row(const Batch<T>& b, int64_t r, Row<T>& row) {
  std::vector<double>& values = row.values;
  const double beta = VARIANT == SPARSEMAX ? 1.0 : 0.5, alpha = 1 + beta;
  T* const s = row.scores;
  const int64_t n = row.classes;
  const T top = b.maximum[r] = maximum(s, n);
  b.value[r] = 0;
  b.count[r] = 0;
  // nan, +inf or no live class: the caller looks at the maximum and raises
  if (!std::isfinite(top)) return;
  // The highest level, w = 1, bounds the support: u > 0 means s - top > -w / beta.
  double w = 1;
  int64_t support = row.above(top, static_cast<T>(-1 / beta));
  if (support * SPARSE > n) w = start<VARIANT>(row, top);
  // Over the whole row, as long as much of it may be in the support. The tolerance is for the step that was just taken:
  // one of entmax-1.5 leaves an error of the order of its square, one of sparsemax more if a class drops out.
  const double eps = std::numeric_limits<T>::epsilon();
  const double tolerance = VARIANT == SPARSEMAX ? 8 * eps : std::pow(eps, 0.45);
  for (int k = 0; k < MOST_STEPS && support * SPARSE > n; ++k) {
    const Sums f = sums<VARIANT, T>(s, n, top, w);
    const double decrease = step<VARIANT>(f);
    w -= decrease;
    support = f.support;
    if (std::abs(decrease) <= tolerance * w) break;
  }
  const bool few = support * SPARSE <= n;
  double moment = 0;  // sum u p
  if (few) {
    // The few classes that are left, in double: p - t keeps its digits where the prediction is nearly perfect. A step
    // ends above the root but for rounding, and a slightly higher cut level only gathers some classes with p = 0.
    row.gather(top, static_cast<T>(-w * (1 + 1e-5) / beta));
    const int64_t size = static_cast<int64_t>(row.found.size());
    for (int k = 0; k < MOST_STEPS; ++k) {
      const double decrease = step<VARIANT>(sums<VARIANT, double>(row.found.data(), size, T(0), w));
      w -= decrease;
      if (std::abs(decrease) <= 4e-16 * w) break;
    }
    values.assign(size, 0);
    for (int64_t k = 0; k < size; ++k) {
      const double u = std::max(0.0, w + beta * row.found[k]);
      values[k] = VARIANT == SPARSEMAX ? u : u * u;
      moment += u * values[k];
    }
  } else {
    // Probabilities in place of the scores, already times the factor of the row: the row is in cache, and one pass over
    // it does for the loss and the gradient.
    const T level = static_cast<T>(w), beta_t = static_cast<T>(beta);
    const T scale = b.coefficient ? b.coefficient[r] * b.total[r] : T(1);
    for (int64_t start = 0; start < n; start += PIECE) {
      const int64_t end = std::min(n, start + PIECE);
      T part = 0;
#pragma omp simd reduction(+ : part)
      for (int64_t c = start; c < end; ++c) {
        const T u0 = level + beta_t * (s[c] - top), u = u0 > 0 ? u0 : 0, p = VARIANT == SPARSEMAX ? u : u * u;
        part += u * p;
        s[c] = scale * p;
      }
      moment += part;
    }
  }
  b.value[r] = (moment - 1) / alpha - (w - 1) / beta;
  if (!b.coefficient) return;
  const double factor = b.coefficient[r], total = b.total[r];
  const int64_t* ids = b.ids + r * b.positives;
  const T* weights = b.weights + r * b.positives;
  if (few) {
    for (double& p : values) p *= total;
    // Classes were gathered in ascending order. Positives outside of the support are appended behind `end`, so that the
    // part that is searched stays sorted; their p is 0.
    const auto end = static_cast<int64_t>(row.at.size());
    for (int64_t j = 0; j < b.positives; ++j) {
      if (weights[j] == 0) continue;  // padding of a row with fewer positives
      const auto first = row.at.begin(), last = first + end;
      const auto place = std::lower_bound(first, last, static_cast<int32_t>(ids[j]));
      if (place != last && *place == ids[j]) {
        values[place - first] -= weights[j];
      } else {
        row.at.push_back(static_cast<int32_t>(ids[j]));
        values.push_back(-weights[j]);
      }
    }
    for (double& g : values) g *= factor;
    if (row.keep(values, b.count + r)) return;
    // Positives outside of the support have made the entries too many to be worth keeping: the row becomes dense.
    std::fill(s, s + n, T(0));
    for (size_t k = 0; k < values.size(); ++k) s[row.at[k]] += static_cast<T>(values[k]);
  } else {
    for (int64_t j = 0; j < b.positives; ++j) s[ids[j]] -= static_cast<T>(factor * weights[j]);
  }
  b.count[r] = -1;  // a dense row
}

// One loop over the rows for each variant: with the choice inside of it the compiler made rows of one of them take 1.4
// times as long.
template <typename T, typename Two, typename One>
void by_variant(int variant, T* scores, int64_t n, int64_t stride, int64_t classes, int threads, Two two, One one) {
  variant == SPARSEMAX ? for_rows(scores, n, stride, classes, threads, two)
                       : for_rows(scores, n, stride, classes, threads, one);
}

template <typename T>
void all_rows(const Batch<T>& b, int variant, int threads) {
  by_variant(
      variant, b.scores, b.n, b.stride, b.classes, threads,
      [&](int64_t r, Row<T>& row) { entmax_row<SPARSEMAX>(b, r, row); },
      [&](int64_t r, Row<T>& row) { entmax_row<ENTMAX_15>(b, r, row); });
}

template <typename T>
void all_levels(T* scores, int64_t n, int64_t stride, int64_t classes, T* top, double* level, int variant,
                int threads) {
  by_variant(
      variant, scores, n, stride, classes, threads,
      [&](int64_t r, Row<T>& row) { level_row<SPARSEMAX>(r, row, top, level); },
      [&](int64_t r, Row<T>& row) { level_row<ENTMAX_15>(r, row, top, level); });
}

// For the search over ranks, which has differences d = s - max s: their maximum may be on another rank.
template <typename T>
void all_sums(T* d, int64_t n, int64_t stride, int64_t classes, const double* level, double* total, double* slope,
              int variant, int threads) {
  const auto keep = [&](int64_t r, const Sums& f) {
    total[r] = f.total;
    slope[r] = f.slope;
  };
  by_variant(
      variant, d, n, stride, classes, threads,
      [&](int64_t r, Row<T>& row) { keep(r, sums<SPARSEMAX, T>(row.scores, classes, T(0), level[r])); },
      [&](int64_t r, Row<T>& row) { keep(r, sums<ENTMAX_15, T>(row.scores, classes, T(0), level[r])); });
}

}  // namespace

// C functions for ctypes, one per precision. Their arguments are those that engine/native.py passes, in its order;
// `rows` has one that only members with labels read.
#define EXPORT(T, SUFFIX)                                                                                              \
  NATIVE void entmax_rows_##SUFFIX(T* scores, int64_t n, int64_t stride, int64_t classes, const int64_t* ids,          \
                                const T* weights, int64_t positives, const T* total, const T* coefficient, T* top,     \
                                double* value, int64_t* count, const T*, int variant, int threads) {                   \
    all_rows<T>({scores, n, stride, classes, ids, weights, positives, total, coefficient, top, value, count},          \
                variant, threads);                                                                                     \
  }                                                                                                                    \
  NATIVE void entmax_levels_##SUFFIX(T* scores, int64_t n, int64_t stride, int64_t classes, T* top, double* level,     \
                                  int variant, int threads) {                                                          \
    all_levels<T>(scores, n, stride, classes, top, level, variant, threads);                                           \
  }                                                                                                                    \
  NATIVE void entmax_sums_##SUFFIX(T* d, int64_t n, int64_t stride, int64_t classes, const double* level, double* total,\
                                double* slope, int variant, int threads) {                                             \
    all_sums<T>(d, n, stride, classes, level, total, slope, variant, threads);                                         \
  }

EXPORT(float, float32)
EXPORT(double, float64)
