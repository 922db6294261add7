// What every member with a native kernel needs of its blocks: entries that rows were replaced by, and scores above a cut.

#include "rows.h"

namespace {

// The entries of all rows, one row after the other.
template <typename T>
void entries(const T* scores, int64_t n, int64_t stride, const int64_t* count, int64_t* row, int64_t* at, T* values) {
  for (int64_t r = 0; r < n; ++r) {
    const T* from = scores + r * stride;
    const int32_t* places = reinterpret_cast<const int32_t*>(from + stride / 2);
    for (int64_t k = 0; k < count[r]; ++k) {
      *row++ = r;
      *at++ = places[k];
      *values++ = from[k];
    }
  }
}

// How many scores of each row are above reference + cut.
template <typename T>
void count_above(T* scores, int64_t n, int64_t stride, int64_t classes, const T* reference, const T* cut,
                 int64_t* count, int threads) {
  for_rows(scores, n, stride, classes, threads,
           [&](int64_t r, Row<T>& row) { count[r] = row.above(reference[r], cut[r]); });
}

// Those scores and their classes, for the rows r with a place[r] of at least 0 among the rows of `found` and `ids`, which
// are `width` long.
template <typename T>
void gather_above(T* scores, int64_t n, int64_t stride, int64_t classes, const T* reference, const T* cut,
                  int64_t width, const int64_t* place, T* found, int64_t* ids, int threads) {
  for_rows(scores, n, stride, classes, threads, [&](int64_t r, Row<T>& row) {
    if (place[r] < 0) return;
    row.gather(reference[r], cut[r]);
    const auto size = std::min(width, static_cast<int64_t>(row.at.size()));
    for (int64_t k = 0; k < size; ++k) {
      found[place[r] * width + k] = row.scores[row.at[k]];
      ids[place[r] * width + k] = row.at[k];
    }
  });
}

}  // namespace

#define EXPORT(T, SUFFIX)                                                                                              \
  extern "C" void entries_##SUFFIX(const T* scores, int64_t n, int64_t stride, const int64_t* count, int64_t* row,    \
                                   int64_t* at, T* values) {                                                          \
    entries<T>(scores, n, stride, count, row, at, values);                                                            \
  }                                                                                                                    \
  extern "C" void count_above_##SUFFIX(T* scores, int64_t n, int64_t stride, int64_t classes, const T* reference,     \
                                       const T* cut, int64_t* count, int threads) {                                   \
    count_above<T>(scores, n, stride, classes, reference, cut, count, threads);                                       \
  }                                                                                                                    \
  extern "C" void gather_above_##SUFFIX(T* scores, int64_t n, int64_t stride, int64_t classes, const T* reference,    \
                                        const T* cut, int64_t width, const int64_t* place, T* found, int64_t* ids,    \
                                        int threads) {                                                                \
    gather_above<T>(scores, n, stride, classes, reference, cut, width, place, found, ids, threads);                   \
  }

EXPORT(float, float32)
EXPORT(double, float64)
