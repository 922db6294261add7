// What every member with a native kernel needs beside its own rows: to collect the entries that rows were replaced by,
// and to find the scores above a cut.

#include "export.h"
#include "rows.h"

namespace {

// Collect the entries of all rows into three lists, one row after the other. Rows without entries, or with a dense
// gradient (count -1), add none. On one thread: it is a copy of what is few by definition, and the place of an entry in
// the lists follows from the counts of all rows before.
template <typename T>
void entries(const T* scores, int64_t n, int64_t stride, const int64_t* count, int64_t* row, int64_t* at, T* values) {
  for (int64_t r = 0; r < n; ++r) {
    const T* from = scores + r * stride;
    // From the middle of the row on, where Row::keep() put them.
    const int32_t* places = reinterpret_cast<const int32_t*>(from + stride / 2);
    for (int64_t k = 0; k < count[r]; ++k) {
      *row++ = r;
      *at++ = places[k];
      *values++ = from[k];
    }
  }
}

// How many scores of each row are above origin + cut, so that the caller can choose rows and make room for them.
template <typename T>
void count_above(T* scores, int64_t n, int64_t stride, int64_t classes, const T* origin, const T* cut,
                 int64_t* count, int threads) {
  for_rows(scores, n, stride, classes, threads,
           [&](int64_t r, Row<T>& row) { count[r] = row.above(origin[r], cut[r]); });
}

// Those scores and their classes. Row r goes into row place[r] of `found` and `ids`, which have `width` columns; rows
// with a negative place are left out. Columns beyond a row's number of scores stay as they are, at -inf.
template <typename T>
void gather_above(T* scores, int64_t n, int64_t stride, int64_t classes, const T* origin, const T* cut,
                  int64_t width, const int64_t* place, T* found, int64_t* ids, int threads) {
  for_rows(scores, n, stride, classes, threads, [&](int64_t r, Row<T>& row) {
    if (place[r] < 0) return;
    row.gather(origin[r], cut[r]);
    // The width is the largest count of these rows; the minimum guards the memory if scores changed in between.
    const auto size = std::min(width, static_cast<int64_t>(row.at.size()));
    for (int64_t k = 0; k < size; ++k) {
      // The score itself and not its distance from the origin: callers subtract a maximum of their own.
      found[place[r] * width + k] = row.scores[row.at[k]];
      ids[place[r] * width + k] = row.at[k];
    }
  });
}

}  // namespace

// C names, one for each precision, which ctypes finds by name: nothing of torch is linked, so that a compiled file
// works with every version of it.
#define EXPORT(T, SUFFIX)                                                                                              \
  NATIVE void entries_##SUFFIX(const T* scores, int64_t n, int64_t stride, const int64_t* count, int64_t* row,         \
                                   int64_t* at, T* values) {                                                           \
    entries<T>(scores, n, stride, count, row, at, values);                                                             \
  }                                                                                                                    \
  NATIVE void count_above_##SUFFIX(T* scores, int64_t n, int64_t stride, int64_t classes, const T* origin,             \
                                       const T* cut, int64_t* count, int threads) {                                    \
    count_above<T>(scores, n, stride, classes, origin, cut, count, threads);                                           \
  }                                                                                                                    \
  NATIVE void gather_above_##SUFFIX(T* scores, int64_t n, int64_t stride, int64_t classes, const T* origin,            \
                                        const T* cut, int64_t width, const int64_t* place, T* found, int64_t* ids,     \
                                        int threads) {                                                                 \
    gather_above<T>(scores, n, stride, classes, origin, cut, width, place, found, ids, threads);                       \
  }

EXPORT(float, float32)
EXPORT(double, float64)
