// Rankmax of rows of scores: for each positive p the sum over the classes above its cut s_p - 1. See engine/rows.h for
// what a row is replaced by.
//
// Three ways, chosen row by row:
//   few       few classes are above the lowest cut: these are gathered and the gradient is kept as entries
//   passes    many classes, few positives: a vectorised pass over the row for each positive
//   buckets   many of both: one pass, in which each score is placed among the sorted cuts

#include "export.h"
#include "rows.h"

namespace {

constexpr int64_t PASSES = 32;  // positives of a row; for more, a search for the place of each score costs less

// How many of the sorted cuts are strictly below each score s - lowest of a piece. The cuts are filled up with +inf to
// one less than a power of two, so that all scores take the same number of steps: no branch depends on a score, which
// no processor could predict, and the loop over the scores is vectorised.
template <typename T>
void search(const std::vector<double>& cuts, const T* s, T lowest, int64_t n, int32_t* place) {
  std::fill(place, place + n, 0);
  const double* const first = cuts.data();
  for (auto step = static_cast<int32_t>(cuts.size() + 1) / 2; step > 0; step /= 2) {
#pragma omp simd
    for (int64_t c = 0; c < n; ++c)
      place[c] += first[place[c] + step - 1] < static_cast<double>(s[c] - lowest) ? step : 0;
  }
}

// One row: its maximum, its loss, and the gradient in place of its scores. The labels are the scores of the positives,
// sorted, lowest first; +inf stands for no positive. Above the cut of positive p are sizes[p] classes, at distances
// from it whose sum is sums[p].
template <typename T>
void rankmax_row(const Batch<T>& b, const T* labels, int64_t r, Row<T>& row) {
  std::vector<double>& values = row.values;
  T* const s = row.scores;
  const int64_t classes = row.classes;
  b.maximum[r] = maximum(s, classes);
  b.value[r] = 0;
  b.count[r] = 0;
  int64_t n = 0;
  while (n < b.positives && labels[n] < std::numeric_limits<T>::infinity()) ++n;
  // nan, +inf or no live class: the caller looks at the maximum and raises; no positive: loss and gradient are 0
  if (!std::isfinite(b.maximum[r]) || n == 0) return;
  // The lowest positive has the lowest cut: what is not above it is above none. Each positive adds an entry of its own.
  const T lowest = labels[0];
  const bool few = (row.above(lowest, T(-1)) + n) * SPARSE <= classes, passes = !few && n <= PASSES;
  std::vector<double> sizes(n + 1, 0), sums(n + 1, 0), shares(n + 1, 0), cuts;
  int32_t place[PIECE];
  if (passes) {
    // Pieces outside, positives inside: a piece is read from memory once and stays in the nearest cache. Within a piece
    // sums are in T, which is fast; over the pieces in double, because many terms would be lost in T.
    for (int64_t start = 0; start < classes; start += PIECE) {
      const int64_t end = std::min(classes, start + PIECE);
      for (int64_t p = 0; p < n; ++p) {
        const T label = labels[p];
        T sum = 0;
        int32_t size = 0;
#pragma omp simd reduction(+ : sum, size)
        for (int64_t c = start; c < end; ++c) {
          // the difference first: label - 1 would be rounded to the label where scores are large
          const T u = s[c] - label + 1;
          sum += u > 0 ? u : 0;
          size += u > 0;
        }
        sizes[p] += size;
        sums[p] += sum;
      }
    }
  } else {
    int64_t filled = 1;
    while (filled <= n) filled *= 2;
    cuts.assign(filled - 1, std::numeric_limits<double>::infinity());
    for (int64_t p = 0; p < n; ++p) cuts[p] = static_cast<double>(labels[p] - lowest) - 1;
    // d = s - lowest of a class goes into the bucket of the number of cuts below it; bucket 0 is above no cut
    const auto count = [&](double d, int32_t above) {
      sizes[above] += 1;
      sums[above] += d;
    };
    if (few) {
      row.gather(lowest, T(-1));
      row.places.resize(row.found.size());
      search(cuts, row.found.data(), T(0), static_cast<int64_t>(row.found.size()), row.places.data());
      for (size_t k = 0; k < row.found.size(); ++k) count(row.found[k], row.places[k]);
    } else {
      for (int64_t start = 0; start < classes; start += PIECE) {
        const int64_t size = std::min(classes - start, PIECE);
        search(cuts, s + start, lowest, size, place);
        for (int64_t c = 0; c < size; ++c)
          if (place[c] > 0) count(s[start + c] - lowest, place[c]);
      }
    }
    // What is above cut p are the buckets from p + 1 on. sum (d - cut) is the difference of two large numbers, which is
    // why all of this is in double.
    for (int64_t p = n - 1; p > 0; --p) {
      sizes[p] += sizes[p + 1];
      sums[p] += sums[p + 1];
    }
    for (int64_t p = 0; p < n; ++p) {
      sizes[p] = sizes[p + 1];
      sums[p] = sums[p + 1] - sizes[p] * cuts[p];
    }
  }
  const int64_t* ids = b.ids + r * b.positives;
  const T* weights = b.weights + r * b.positives;
  // shares[p + 1] is what positive p gives to each class above its cut, own[p] what it gets for itself.
  std::vector<double> own(n);
  for (int64_t p = 0; p < n; ++p) {
    const double sum = std::max(1.0, sums[p]);  // the positive itself adds 1; rounding may have taken some of it
    b.value[r] += weights[p] * std::log(sum);
    if (!b.coefficient) continue;
    shares[p + 1] = static_cast<double>(b.coefficient[r]) * weights[p] / sum;
    own[p] = -shares[p + 1] * sizes[p];
  }
  if (!b.coefficient) return;
  if (passes) {
    for (int64_t start = 0; start < classes; start += PIECE) {
      const int64_t size = std::min(classes - start, PIECE);
      // beside the scores, which every positive reads, until the piece is done
      T gradient[PIECE] = {};
      for (int64_t p = 0; p < n; ++p) {
        const T label = labels[p], share = static_cast<T>(shares[p + 1]);
#pragma omp simd
        for (int64_t c = 0; c < size; ++c) gradient[c] += s[start + c] - label + 1 > 0 ? share : 0;
      }
      std::copy(gradient, gradient + size, s + start);
    }
  } else {
    // Running sums: a class with k cuts below it is above those of the first k positives and gets all of their shares.
    for (int64_t p = 1; p <= n; ++p) shares[p] += shares[p - 1];
    if (few) {
      values.clear();
      for (const int32_t above : row.places) values.push_back(shares[above]);
      // a positive has a second entry for its own part; whoever sums the entries adds the two
      for (int64_t p = 0; p < n; ++p) {
        values.push_back(own[p]);
        row.at.push_back(static_cast<int32_t>(ids[p]));
      }
      row.keep(values, b.count + r);
      return;
    }
    for (int64_t start = 0; start < classes; start += PIECE) {
      const int64_t size = std::min(classes - start, PIECE);
      // placed again: keeping the places of all classes would take as much memory as the row
      search(cuts, s + start, lowest, size, place);
      for (int64_t c = 0; c < size; ++c) s[start + c] = static_cast<T>(shares[place[c]]);
    }
  }
  for (int64_t p = 0; p < n; ++p) s[ids[p]] += static_cast<T>(own[p]);
  b.count[r] = -1;  // a dense row
}

}  // namespace

// C functions for ctypes, one per precision; arguments as engine/native.py passes them. There is a single variant.
#define EXPORT(T, SUFFIX)                                                                                              \
  NATIVE void rankmax_rows_##SUFFIX(T* scores, int64_t n, int64_t stride, int64_t classes, const int64_t* ids,         \
                                const T* weights, int64_t positives, const T* total, const T* coefficient, T* top,     \
                                double* value, int64_t* count, const T* labels, int, int threads) {                    \
    const Batch<T> b{scores, n, stride, classes, ids, weights, positives, total, coefficient, top, value, count};      \
    for_rows(scores, n, stride, classes, threads,                                                                      \
             [&](int64_t r, Row<T>& row) { rankmax_row(b, labels + r * positives, r, row); });                         \
  }

EXPORT(float, float32)
EXPORT(double, float64)
