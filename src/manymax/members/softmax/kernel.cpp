// Softmax of rows of scores. See engine/rows.h for what a row is replaced by.
//
// torch goes over a row three times: for its maximum, for the sum of exponentials, and to divide by that sum. Here the
// exponentials e^(s - max s) stay undivided in the row, and 1 / Z joins the factor of the row, which the matmuls of the
// gradient put on queries and results: these have d numbers per row where the table has C.

#include "rows.h"

namespace {

// The maximum, Omega*(s) - max s = log Z, and the gradient coefficient (total p - t) as
// scale (e^(s - max s) - t Z / total).
template <typename T>
void softmax_row(const Batch<T>& b, int64_t r, Row<T>& row) {
  const T top = b.maximum[r] = row.scan(b.tops, r);
  b.value[r] = 0;
  b.scale[r] = 0;
  b.count[r] = -1;
  if (!std::isfinite(top)) return;  // nan, +inf or no live class: the caller looks at the maximum and raises
  row.keep();
  const double sum = exponentials(row.scores, row.classes, top);
  b.value[r] = std::log(sum);
  const double total = b.total[r];
  if (!b.coefficient) return;
  b.scale[r] = static_cast<T>(b.coefficient[r] * total / sum);
  b.subtract_target(r, total != 0 ? sum / total : 0);  // a row without a positive has a factor of 0
}

// For rows of which this rank has a part: their maximum here, and e^(s - maximum) in place of the scores with its sum.
// A row whose classes are all masked here becomes 0.
// With `moment`, sum_c e^d d of d = s - maximum too, from which an entropy follows.
template <typename T>
void part_of_row(int64_t r, Row<T>& row, const T* tops, T* top, double* sum, double* moment) {
  top[r] = row.scan(tops, r);
  if (moment) moment[r] = 0;
  if (!std::isfinite(top[r])) {
    std::fill(row.scores, row.scores + row.classes, T(0));
    sum[r] = 0;
    return;
  }
  sum[r] = moment ? exponentials<true>(row.scores, row.classes, top[r], moment + r)
                  : exponentials(row.scores, row.classes, top[r]);
}

}  // namespace

// C functions for ctypes, one per precision; arguments as engine/native.py passes them.
#define EXPORT(T, SUFFIX)                                                                                              \
  NATIVE void softmax_rows_##SUFFIX(BATCH_ARGUMENTS(T), int threads) {                                                 \
    const Batch<T> b = BATCH(T);                                                                                       \
    for_rows(b, threads, [&](int64_t r, Row<T>& row) { softmax_row(b, r, row); });                                     \
  }                                                                                                                    \
  NATIVE void softmax_parts_##SUFFIX(T* scores, int64_t n, int64_t stride, int64_t classes, const T* tops, T* top,     \
                                     double* sum, double* moment, int threads) {                                       \
    for_rows(scores, n, stride, classes, threads, [&](int64_t r, Row<T>& row) {                                        \
      part_of_row(r, row, tops, top, sum, moment);                                                                     \
    });                                                                                                                \
  }

EXPORT(float, float32)
EXPORT(double, float64)
