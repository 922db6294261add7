// Rows of scores to rows of the gradient, for members with a sparse map: what their kernels do in plain torch in a dozen
// passes over a block of scores is done row by row, while the row is in cache. Members include this file in their
// kernel.cpp; formulas and names are those of ops/simplex.py.
//
// A row whose gradient has few entries (one class in 48 at most) is replaced by them: `count` values, then, from the
// middle of the row on, their classes as int32. Any other row is replaced by its gradient, and count is -1.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

constexpr int64_t SPARSE = 48;  // a gradient with one class in so many, or fewer, is kept as entries
constexpr int64_t PIECE = 256;  // classes that are summed in the precision of the scores before they go into a double

template <typename T>
struct Batch {
  T* scores;             // (n, stride)
  int64_t n, stride, classes;
  const int64_t* ids;    // (n, positives)
  const T* weights;      // (n, positives); 0 where there is no positive
  int64_t positives;
  const T* total;        // (n,) sum of the weights
  const T* coefficient;  // (n,) factor of the gradient, or null: none is wanted
  T* maximum;            // (n,) out: nan where a score is
  double* value;         // (n,) out: Omega*(s) - max s, or the loss
  int64_t* count;        // (n,) out
};

template <typename T>
struct Row {
  T* scores;
  int64_t classes, half;  // classes, and where the classes of the entries begin
  std::vector<T> found;
  std::vector<int32_t> at, places;  // of what was found: its class, and where it falls
  std::vector<double> values;       // of the entries

  // The scores above reference + cut; the difference comes first, because the sum would be rounded to the reference.
  int64_t above(T reference, T cut) const {
    const T* s = scores;
    int64_t total = 0;
    for (int64_t start = 0, n = classes; start < n; start += PIECE) {
      const int64_t end = std::min(n, start + PIECE);
      int32_t some = 0;
#pragma omp simd reduction(+ : some)
      for (int64_t c = start; c < end; ++c) some += s[c] - reference > cut;
      total += some;
    }
    return total;
  }

  void gather(T reference, T cut) {
    const T* s = scores;
    found.clear();
    at.clear();
    for (int64_t start = 0, n = classes; start < n; start += 64) {
      const int64_t end = std::min(n, start + 64);
      int32_t some = 0;
#pragma omp simd reduction(+ : some)
      for (int64_t c = start; c < end; ++c) some += s[c] - reference > cut;
      if (some == 0) continue;
      for (int64_t c = start; c < end; ++c)
        if (s[c] - reference > cut) {
          found.push_back(s[c] - reference);
          at.push_back(static_cast<int32_t>(c));
        }
    }
  }

  // Keep values[k] at classes at[k]; false if they are too many.
  bool keep(const std::vector<double>& values, int64_t* count) {
    const int64_t n = static_cast<int64_t>(values.size());
    if ((n - std::count(values.begin(), values.end(), 0.0)) * SPARSE > classes) return false;
    int32_t* places = reinterpret_cast<int32_t*>(scores + half);
    int64_t kept = 0;
    for (int64_t k = 0; k < n; ++k) {
      if (values[k] == 0) continue;
      scores[kept] = static_cast<T>(values[k]);
      places[kept++] = at[k];
    }
    *count = kept;
    return true;
  }
};

template <typename T>
T maximum(const T* s, int64_t n) {
  T top = -std::numeric_limits<T>::infinity();
  int nan = 0;
#pragma omp simd reduction(max : top) reduction(| : nan)
  for (int64_t c = 0; c < n; ++c) {
    top = s[c] > top ? s[c] : top;
    nan |= s[c] != s[c];
  }
  return nan ? std::numeric_limits<T>::quiet_NaN() : top;
}

// Call work(r, row) for every row of a block, on `threads` threads, each with a Row of its own.
template <typename T, typename Work>
void for_rows(T* scores, int64_t n, int64_t stride, int64_t classes, int threads, Work work) {
#pragma omp parallel num_threads(threads)
  {
    Row<T> row;
    row.classes = classes;
    row.half = stride / 2;
#pragma omp for schedule(dynamic, 4)
    for (int64_t r = 0; r < n; ++r) {
      row.scores = scores + r * stride;
      work(r, row);
    }
  }
}

}  // namespace
