// Entmax of rows of scores, for every alpha in (1, 2]. See engine/rows.h for what a row is replaced by, and
// ops/levels.py for the search and for the two forms of the level.

#include "levels.h"

namespace {

// The scores of a packed row, relative to an origin, into `found`, and their classes into `at`.
template <typename T>
void take_packed(Row<T>& row, int64_t count, T origin) {
  const int32_t* const at = reinterpret_cast<const int32_t*>(row.scores + row.half);
  row.at.assign(at, at + count);
  row.found.resize(count);
  for (int64_t k = 0; k < count; ++k) row.found[k] = row.scores[k] - origin;
}

template <typename T>
T largest(const T* s, int64_t n) {
  T top = -std::numeric_limits<T>::infinity();
#pragma omp simd reduction(max : top)
  for (int64_t k = 0; k < n; ++k) top = s[k] > top ? s[k] : top;
  return top;
}

// Rows that have all of their classes here: maximum, level, sum u p (in `value`) and gradient. With `filtered` a row
// whose count is not negative holds the scores of the classes that can be in its support alone, packed.
template <typename T>
void all_rows(const Batch<T>& b, double alpha, double* level, double* slope, const Statistics& stats, bool filtered,
              int threads) {
  by_kind(alpha, [&](const auto& entmax) {
    for_rows(b, threads, [&](int64_t r, Row<T>& row) {
      const int64_t left = filtered ? b.count[r] : -1;
      const T top = b.maximum[r] = left < 0 ? row.scan(b.tops, r) : largest(row.scores, left);
      b.value[r] = level[r] = 0;
      b.count[r] = 0;
      if (slope) slope[r] = 0;
      if (!std::isfinite(top)) return;  // nan, +inf or no live class: the caller looks at the maximum and raises
      bool few = left >= 0;
      if (few) {
        take_packed(row, left, top);
        level[r] = entmax.template descend<double>(row.found.data(), left, T(0), entmax.highest(), 4e-16);
      } else {
        level[r] = entmax.search(row, top, few);
      }
      b.value[r] = entmax.finish(b, r, row, level[r], few, slope, stats);
    });
  });
}

// For rows of which this rank has a part: the maximum, and a level above that of its classes alone. Other ranks have
// more classes, which lower the level: this is a bound, from which the search over the ranks goes on.
template <typename T>
void all_bounds(T* scores, int64_t n, int64_t stride, int64_t classes, const T* tops, T* top, double* level,
                double alpha, int threads) {
  by_kind(alpha, [&](const auto& entmax) {
    for_rows(scores, n, stride, classes, threads, [&](int64_t r, Row<T>& row) {
      top[r] = row.scan(tops, r);
      level[r] = entmax.highest();
      if (!std::isfinite(top[r])) return;
      level[r] = entmax.group_bound(row, top[r]);
      const int64_t most = classes / SPARSE;
      if (row.open_groups(top[r], static_cast<T>(entmax.cut(level[r]))) * GROUP <= 2 * most) return;
      // A Newton step over all classes ends above the solution from wherever it starts.
      double better = entmax.sampled_start(row, top[r], level[r]);
      const Sums f = entmax.template sums<T>(row.scores, classes, top[r], better);
      if (f.slope > 0) better -= entmax.step(f, 1, false);
      if (f.slope > 0) level[r] = std::min(level[r], better);
    });
  });
}

// F and A of each row over the classes of this rank: of the scores at the beginning of a packed row, in double, or of
// about one class in `every` of a whole row, scaled up to all of them.
template <typename T>
void all_sums(T* scores, int64_t n, int64_t stride, int64_t classes, const int64_t* count, const T* top,
              const double* level, double* total, double* slope, double alpha, int64_t every, int threads) {
  by_kind(alpha, [&](const auto& entmax) {
    for_rows(scores, n, stride, classes, threads, [&](int64_t r, Row<T>& row) {
      const bool few = count[r] >= 0;
      if (!few) row.take_sample(every);
      const Sums f = few ? entmax.template sums<double>(row.scores, count[r], top[r], level[r])
                         : entmax.template sums<T>(row.sample.data(), row.sample.size(), top[r], level[r]);
      const double stands_for = few ? 1 : static_cast<double>(classes) / row.sample.size();
      total[r] = stands_for * f.total;
      slope[r] = stands_for * f.slope;
    });
  });
}

// The gradient at a level that the ranks have found together, and this rank's part of sum u p. Packed rows hold scores.
template <typename T>
void all_gradients(const Batch<T>& b, double alpha, const double* level, double* slope, const Statistics& stats,
                   int threads) {
  by_kind(alpha, [&](const auto& entmax) {
    for_rows(b.scores, b.n, b.stride, b.classes, threads, [&](int64_t r, Row<T>& row) {
      const bool few = b.count[r] >= 0;
      if (few) take_packed(row, b.count[r], b.maximum[r]);
      double same = level[r];  // no further step: this rank's part of a row sums to less than 1
      b.value[r] = entmax.finish(b, r, row, same, few, slope, stats);
    });
  });
}

}  // namespace

// C functions for ctypes, one per precision. Their arguments are those that level_search.py and native.py pass.
#define EXPORT(T, SUFFIX)                                                                                              \
  NATIVE void entmax_rows_##SUFFIX(BATCH_ARGUMENTS(T), const double* alpha, double* level, double* slope,              \
                                   double* entropy, int64_t* support, int64_t filtered, int threads) {                 \
    all_rows<T>(BATCH(T), *alpha, level, slope, {entropy, support}, filtered != 0, threads);                           \
  }                                                                                                                    \
  NATIVE void entmax_gradients_##SUFFIX(BATCH_ARGUMENTS(T), const double* alpha, const double* level, double* slope,   \
                                        double* entropy, int64_t* support, int threads) {                              \
    all_gradients<T>(BATCH(T), *alpha, level, slope, {entropy, support}, threads);                                     \
  }                                                                                                                    \
  NATIVE void entmax_bounds_##SUFFIX(T* scores, int64_t n, int64_t stride, int64_t classes, const T* tops, T* top,     \
                                     double* level, const double* alpha, int threads) {                                \
    all_bounds<T>(scores, n, stride, classes, tops, top, level, *alpha, threads);                                      \
  }                                                                                                                    \
  NATIVE void entmax_sums_##SUFFIX(T* scores, int64_t n, int64_t stride, int64_t classes, const int64_t* count,        \
                                   const T* top, const double* level, double* total, double* slope,                    \
                                   const double* alpha, int64_t every, int threads) {                                  \
    all_sums<T>(scores, n, stride, classes, count, top, level, total, slope, *alpha, every, threads);                  \
  }

EXPORT(float, float32)
EXPORT(double, float64)
