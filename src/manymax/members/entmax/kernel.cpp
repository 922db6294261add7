// Entmax of rows of scores, for alpha = 1.5 and for alpha = 2, which is sparsemax. See engine/rows.h.

#include "rows.h"

namespace {

constexpr int64_t GROUP = 16;  // classes of which one is looked at for a start

struct Sums {
  double total = 0, slope = 0;  // F = sum p and A = sum p^(1 - beta)
  int64_t support = 0;
};

// At level w, of the scores s - reference; U is the precision within a piece. ORDER is 2 for sparsemax, 1 for
// entmax-1.5: p = u^(1/beta) with u = max(0, w + beta d).
template <int ORDER, typename U, typename T>
Sums sums(const T* s, int64_t n, T reference, double w) {
  Sums out;
  const U level = static_cast<U>(w), beta = static_cast<U>(ORDER == 2 ? 1.0 : 0.5);
  for (int64_t start = 0; start < n; start += PIECE) {
    const int64_t end = std::min(n, start + PIECE);
    U first = 0, second = 0;
    int32_t inside = 0;
#pragma omp simd reduction(+ : first, second, inside)
    for (int64_t c = start; c < end; ++c) {
      const U u0 = level + beta * static_cast<U>(s[c] - reference);
      const U u = u0 > 0 ? u0 : 0;
      first += u;
      second += u * u;
      inside += u0 > 0;
    }
    out.total += ORDER == 2 ? first : second;
    out.slope += ORDER == 2 ? inside : first;
    out.support += inside;
  }
  return out;
}

// One Newton step on F^beta = mass^beta; it ends above the root.
template <int ORDER>
double step(const Sums& f, double mass = 1) {
  return (f.total - (ORDER == 2 ? mass : std::sqrt(mass * f.total))) / f.slope;
}

// A level to begin at, from every 16th class; within what p_top can be, from 1/C to 1.
template <int ORDER, typename T>
double start(Row<T>& row, T top) {
  row.found.clear();
  for (int64_t c = 0; c < row.classes; c += GROUP) row.found.push_back(row.scores[c] - top);
  const auto n = static_cast<int64_t>(row.found.size());
  const double mass = static_cast<double>(n) / row.classes, low = std::pow(1.0 / row.classes, ORDER == 2 ? 1 : 0.5);
  double w = 1;
  for (int k = 0; k < 60; ++k) {
    const Sums f = sums<ORDER, T>(row.found.data(), n, T(0), w);
    if (!(f.slope > 0)) return low;
    const double by = step<ORDER>(f, mass);
    w -= by;
    if (std::abs(by) <= 1e-3 * w) break;
  }
  return std::min(1.0, std::max(low, w));
}

// The level of a row of which ranks have parts: maximum and a level above that of this rank's classes alone.
template <int ORDER, typename T>
void level_row(int64_t r, Row<T>& row, T* top, double* level) {
  top[r] = maximum(row.scores, row.classes);
  level[r] = 1;
  if (!std::isfinite(top[r])) return;
  int64_t support = row.above(top[r], static_cast<T>(ORDER == 2 ? -1 : -2));
  if (support * SPARSE <= row.classes) return;
  double w = start<ORDER>(row, top[r]);
  for (int k = 0; k < 4; ++k) {  // a few steps give a bound; it is completed over the ranks
    const Sums f = sums<ORDER, T>(row.scores, row.classes, top[r], w);
    w -= step<ORDER>(f);
    if (f.support * SPARSE <= row.classes) break;
  }
  level[r] = std::min(1.0, w);
}

template <int ORDER, typename T>
void entmax_row(const Batch<T>& b, int64_t r, Row<T>& row) {
  std::vector<double>& values = row.values;
  const double beta = ORDER == 2 ? 1.0 : 0.5, alpha = 1 + beta;
  T* const s = row.scores;
  const int64_t n = row.classes;
  const T top = b.maximum[r] = maximum(s, n);
  b.value[r] = 0;
  b.count[r] = 0;
  if (!std::isfinite(top)) return;
  double w = 1;
  int64_t support = row.above(top, static_cast<T>(-1 / beta));
  if (support * SPARSE > n) w = start<ORDER>(row, top);
  // over the whole row, as long as much of it may be in the support; a step of entmax-1.5 leaves an error of the order
  // of its square, one of sparsemax more if a class drops out
  const double eps = std::numeric_limits<T>::epsilon(), tolerance = ORDER == 2 ? 8 * eps : std::pow(eps, 0.45);
  for (int k = 0; k < 60 && support * SPARSE > n; ++k) {
    const Sums f = sums<ORDER, T>(s, n, top, w);
    const double by = step<ORDER>(f);
    w -= by;
    support = f.support;
    if (std::abs(by) <= tolerance * w) break;
  }
  const bool few = support * SPARSE <= n;
  double mean = 0;
  if (few) {  // over what is left of it, in double
    // w is above the root but for rounding: a little more does no harm
    row.gather(top, static_cast<T>(-w * (1 + 1e-5) / beta));
    const int64_t size = static_cast<int64_t>(row.found.size());
    for (int k = 0; k < 60; ++k) {
      const double by = step<ORDER>(sums<ORDER, double>(row.found.data(), size, T(0), w));
      w -= by;
      if (std::abs(by) <= 4e-16 * w) break;
    }
    values.assign(size, 0);
    for (int64_t k = 0; k < size; ++k) {
      const double u = std::max(0.0, w + beta * row.found[k]);
      values[k] = ORDER == 2 ? u : u * u;
      mean += u * values[k];
    }
  } else {
    const T level = static_cast<T>(w), half = static_cast<T>(beta);
    const T scale = b.coefficient ? b.coefficient[r] * b.total[r] : T(1);
    for (int64_t start = 0; start < n; start += PIECE) {
      const int64_t end = std::min(n, start + PIECE);
      T part = 0;
#pragma omp simd reduction(+ : part)
      for (int64_t c = start; c < end; ++c) {
        const T u0 = level + half * (s[c] - top), u = u0 > 0 ? u0 : 0, p = ORDER == 2 ? u : u * u;
        part += u * p;
        s[c] = scale * p;
      }
      mean += part;
    }
  }
  b.value[r] = (mean - 1) / alpha - (w - 1) / beta;
  if (!b.coefficient) return;
  const double factor = b.coefficient[r], total = b.total[r];
  const int64_t* ids = b.ids + r * b.positives;
  const T* weights = b.weights + r * b.positives;
  if (few) {
    for (double& p : values) p *= total;
    const auto end = static_cast<int64_t>(row.at.size());
    for (int64_t j = 0; j < b.positives; ++j) {
      if (weights[j] == 0) continue;
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
    std::fill(s, s + n, T(0));
    for (size_t k = 0; k < values.size(); ++k) s[row.at[k]] += static_cast<T>(values[k]);
  } else {
    for (int64_t j = 0; j < b.positives; ++j) s[ids[j]] -= static_cast<T>(factor * weights[j]);
  }
  b.count[r] = -1;
}

// One loop for each order: with the choice inside of it the compiler made rows of one of them take 1.4 times as long.
template <typename T, typename Two, typename One>
void by_order(int order, T* scores, int64_t n, int64_t stride, int64_t classes, int threads, Two two, One one) {
  order == 2 ? for_rows(scores, n, stride, classes, threads, two) : for_rows(scores, n, stride, classes, threads, one);
}

template <typename T>
void all_rows(const Batch<T>& b, int order, int threads) {
  by_order(
      order, b.scores, b.n, b.stride, b.classes, threads, [&](int64_t r, Row<T>& row) { entmax_row<2>(b, r, row); },
      [&](int64_t r, Row<T>& row) { entmax_row<1>(b, r, row); });
}

template <typename T>
void all_levels(T* scores, int64_t n, int64_t stride, int64_t classes, T* top, double* level, int order, int threads) {
  by_order(
      order, scores, n, stride, classes, threads, [&](int64_t r, Row<T>& row) { level_row<2>(r, row, top, level); },
      [&](int64_t r, Row<T>& row) { level_row<1>(r, row, top, level); });
}

template <typename T>
void all_sums(T* d, int64_t n, int64_t stride, int64_t classes, const double* level, double* total, double* slope,
              int order, int threads) {
  const auto keep = [&](int64_t r, const Sums& f) {
    total[r] = f.total;
    slope[r] = f.slope;
  };
  by_order(
      order, d, n, stride, classes, threads,
      [&](int64_t r, Row<T>& row) { keep(r, sums<2, T>(row.scores, classes, T(0), level[r])); },
      [&](int64_t r, Row<T>& row) { keep(r, sums<1, T>(row.scores, classes, T(0), level[r])); });
}

}  // namespace

#define EXPORT(T, SUFFIX)                                                                                              \
  extern "C" void rows_##SUFFIX(T* scores, int64_t n, int64_t stride, int64_t classes, const int64_t* ids,            \
                                const T* weights, int64_t positives, const T* total, const T* coefficient, T* top,    \
                                double* value, int64_t* count, const T*, int order, int threads) {                    \
    all_rows<T>({scores, n, stride, classes, ids, weights, positives, total, coefficient, top, value, count}, order,  \
                threads);                                                                                             \
  }                                                                                                                    \
  extern "C" void levels_##SUFFIX(T* scores, int64_t n, int64_t stride, int64_t classes, T* top, double* level,       \
                                  int order, int threads) {                                                           \
    all_levels<T>(scores, n, stride, classes, top, level, order, threads);                                            \
  }                                                                                                                    \
  extern "C" void sums_##SUFFIX(T* d, int64_t n, int64_t stride, int64_t classes, const double* level, double* total, \
                                double* slope, int order, int threads) {                                              \
    all_sums<T>(d, n, stride, classes, level, total, slope, order, threads);                                          \
  }

EXPORT(float, float32)
EXPORT(double, float64)
