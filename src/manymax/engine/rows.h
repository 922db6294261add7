// Rows of scores to rows of the gradient, for members with a sparse map. In plain torch their kernels take a dozen
// passes over a block of scores, each of them from main memory; here a row goes through all steps while it is in the
// cache. Members include this file in their kernel.cpp. Formulas and names are those of ops/simplex.py.
//
// The result takes the place of the scores, so that no second table is needed. There are two forms:
//
//   sparse  a gradient with few entries, one class in SPARSE at most: `count` values from the beginning of the row on,
//           and from the middle of the row on their classes, as int32
//   dense   any other gradient: a number for every class, and count is -1
//
// Every index is int64_t: a block can have more than 2^31 scores. Classes of entries are int32_t, for which
// native.serves() refuses longer rows.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

// An unnamed namespace: each member's library has a copy of its own, and none of these names is visible outside, where
// two libraries in one process could mix them up.
namespace {

// A gradient with one class in SPARSE, or fewer, is kept as entries; native.py has the same number. One in 48 is 2 %:
// entries were measured to save time below about 1 % of the classes, and to lose it above 2 to 3 %, where sorting and
// summing them costs more than the two matmuls that they replace. (Half a row holds them for any SPARSE from 2 on.)
constexpr int64_t SPARSE = 48;

// Classes that are summed in the precision of the scores before the sum is added to a double. Within a piece the
// compiler can use whole vector registers of float; a float sum over all classes of a long row would lose digits.
constexpr int64_t PIECE = 256;

// The arguments of a kernel: pointers into tensors that native.py keeps alive during the call.
template <typename T>
struct Batch {
  T* scores;             // (n, stride), stride >= classes: rows are padded
  int64_t n, stride, classes;
  const int64_t* ids;    // (n, positives)
  const T* weights;      // (n, positives); 0 where there is no positive
  int64_t positives;     // the largest number of positives of a row
  const T* total;        // (n,) sum of the weights
  const T* coefficient;  // (n,) factor of the gradient, or null: no gradient is wanted
  T* maximum;            // (n,) out: the largest score; nan where a score is nan
  double* value;         // (n,) out: Omega*(s) - max s, or the loss; that is up to the member
  int64_t* count;        // (n,) out: the number of entries of a sparse gradient, -1 of a dense one
};

// One row, and vectors that keep their memory from row to row: allocation for each row would cost more than the row.
template <typename T>
struct Row {
  T* scores;
  int64_t classes, half;            // number of classes; offset in the row at which the classes of the entries begin
  std::vector<T> found;             // scores above a cut, relative to the origin
  std::vector<int32_t> at, places;  // the class of each of them; the number of cuts below each (rankmax)
  std::vector<double> values;       // the gradient at these classes; double, because probability and target cancel

  // How many scores are above origin + cut; the origin is a score of the row, such as its maximum. The difference comes
  // first: where scores are large, the sum would be rounded to the origin, and the cut with it.
  int64_t above(T origin, T cut) const {
    const T* s = scores;
    int64_t total = 0;
    for (int64_t start = 0, n = classes; start < n; start += PIECE) {
      const int64_t end = std::min(n, start + PIECE);
      int32_t some = 0;  // as wide as a float, so that comparison and count share a vector width
#pragma omp simd reduction(+ : some)
      for (int64_t c = start; c < end; ++c) some += s[c] - origin > cut;
      total += some;
    }
    return total;
  }

  // The scores above origin + cut, minus the origin, into `found`, and their classes, ascending, into `at`.
  void gather(T origin, T cut) {
    const T* s = scores;
    found.clear();
    at.clear();
    // 64 classes at a time are counted first, without a branch per class: almost all of them hold nothing to gather,
    // and only those that do are gone over one by one.
    for (int64_t start = 0, n = classes; start < n; start += 64) {
      const int64_t end = std::min(n, start + 64);
      int32_t some = 0;
#pragma omp simd reduction(+ : some)
      for (int64_t c = start; c < end; ++c) some += s[c] - origin > cut;
      if (some == 0) continue;
      for (int64_t c = start; c < end; ++c)
        if (s[c] - origin > cut) {
          found.push_back(s[c] - origin);
          at.push_back(static_cast<int32_t>(c));
        }
    }
  }

  // Replace the row by the entries values[k] at classes at[k]; false, and the row as it was, if they are too many.
  bool keep(const std::vector<double>& values, int64_t* count) {
    const int64_t n = static_cast<int64_t>(values.size());
    // Exact zeros are no entries: classes that a bound let through, but that are outside of the support.
    if ((n - std::count(values.begin(), values.end(), 0.0)) * SPARSE > classes) return false;
    // The scores are not needed any more. This is why the library is compiled with -fno-strict-aliasing.
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

// The largest of n scores, or nan if one of them is. A comparison with nan is false, so that a plain maximum would pass
// over it; it is looked for in the same pass, and without a branch, which would keep the loop from being vectorised.
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

// Call work(r, row) for every row of a block, on `threads` threads, each with a Row of its own. A row is worked on by
// one thread alone, so that results do not depend on the number of threads.
template <typename T, typename Work>
void for_rows(T* scores, int64_t n, int64_t stride, int64_t classes, int threads, Work work) {
#pragma omp parallel num_threads(threads)
  {
    Row<T> row;
    row.classes = classes;
    row.half = stride / 2;
    // Dynamic, because rows differ: one with a large support takes several passes, one with a small support almost
    // none.
#pragma omp for schedule(dynamic, 4)
    for (int64_t r = 0; r < n; ++r) {
      row.scores = scores + r * stride;
      work(r, row);
    }
  }
}

}  // namespace
