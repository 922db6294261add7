// Rankmax of rows of scores: for each positive p the sum over the classes above its cut s_p - 1. See engine/rows.h for
// what a row is replaced by.
//
// Three ways, chosen row by row:
//   few       few classes are above the lowest cut: these are gathered and the gradient is kept as entries
//   passes    many classes, few positives: a vectorised pass over the row for each positive
//   buckets   many of both: one pass, in which each score is placed among the sorted cuts

#include "rows.h"

namespace {

constexpr int64_t PASSES = 32;  // positives of a row; for more, a search for the place of each score costs less

// How many of the sorted cuts are strictly below each score s - lowest of a piece. The difference is taken in double:
// in float it would lose the digits of high scores where the lowest positive is far below them. The cuts are filled up
// with +inf to one less than a power of two, so that all scores take the same number of steps: no branch depends on a
// score, which no processor could predict, and the loop over the scores is vectorised.
template <typename T>
void search(const std::vector<double>& cuts, const T* s, double lowest, int64_t n, int32_t* place) {
  std::fill(place, place + n, 0);
  const double* const first = cuts.data();
  for (auto step = static_cast<int32_t>(cuts.size() + 1) / 2; step > 0; step /= 2) {
#pragma omp simd
    for (int64_t c = 0; c < n; ++c)
      place[c] += first[place[c] + step - 1] < static_cast<double>(s[c]) - lowest ? step : 0;
  }
}

// The sums of one row for each of its positives, whose scores are the labels, sorted, lowest first: above the cut
// s_p - 1 of positive p are sizes[p] classes, at distances from it whose sum is sums[p].
struct Cuts {
  std::vector<double> cuts, sizes, sums, shares;

  // Fill the sorted cuts up to one less than a power of two, relative to the lowest label.
  template <typename T>
  void sort_in(const T* labels, int64_t n) {
    int64_t filled = 1;
    while (filled <= n) filled *= 2;
    cuts.assign(filled - 1, std::numeric_limits<double>::infinity());
    for (int64_t p = 0; p < n; ++p) cuts[p] = static_cast<double>(labels[p]) - labels[0] - 1;
  }

  void clear(int64_t n) {
    sizes.assign(n + 1, 0);
    sums.assign(n + 1, 0);
  }

  // From buckets (what has so many cuts below it, as the sum of its distances from the lowest label) to what is above
  // each cut: the buckets from p + 1 on. sum (d - cut) is the difference of two large numbers, hence the doubles.
  void from_buckets(int64_t n) {
    for (int64_t p = n - 1; p > 0; --p) {
      sizes[p] += sizes[p + 1];
      sums[p] += sums[p + 1];
    }
    for (int64_t p = 0; p < n; ++p) {
      sizes[p] = sizes[p + 1];
      sums[p] = sums[p + 1] - sizes[p] * cuts[p];
    }
  }
};

// The classes above the lowest cut, into `at`, and their scores, into `found`.
template <typename T>
void gather_scores(Row<T>& row, T lowest) {
  row.gather(lowest, T(-1));
  for (size_t k = 0; k < row.found.size(); ++k) row.found[k] = row.scores[row.at[k]];
}

// The sums over a whole row, one vectorised pass for each positive. Pieces outside, positives inside: a piece is read
// from memory once and stays in the nearest cache. Within a piece sums are in T, which is fast; over the pieces in
// double, because many terms would be lost in T. (gcc vectorises the loop of the function, but not that of a copy that
// it has made for one positive: six times as slow.)
template <typename T>
__attribute__((noinline, noclone)) void sums_by_passes(const T* s, int64_t classes, const T* labels, int64_t n,
                                                       Cuts& c) {
  c.clear(n);
  for (int64_t start = 0; start < classes; start += PIECE) {
    const int64_t end = std::min(classes, start + PIECE);
    for (int64_t p = 0; p < n; ++p) {
      const T label = labels[p];
      T sum = 0;
      int32_t size = 0;
#pragma omp simd reduction(+ : sum, size)
      for (int64_t i = start; i < end; ++i) {
        // the difference first: label - 1 would be rounded to the label where scores are large
        const T u = s[i] - label + 1;
        sum += u > 0 ? u : 0;
        size += u > 0;
      }
      c.sizes[p] += size;
      c.sums[p] += sum;
    }
  }
}

// The sums over a whole row, one pass for all positives: each score goes into the bucket of the cuts below it.
template <typename T>
void sums_by_buckets(const T* s, int64_t classes, const T* labels, int64_t n, Cuts& c) {
  c.clear(n);
  c.sort_in(labels, n);
  int32_t place[PIECE];
  for (int64_t start = 0; start < classes; start += PIECE) {
    const int64_t size = std::min(classes - start, PIECE);
    search(c.cuts, s + start, labels[0], size, place);
    for (int64_t i = 0; i < size; ++i) {
      c.sizes[place[i]] += 1;
      c.sums[place[i]] += place[i] > 0 ? static_cast<double>(s[start + i]) - labels[0] : 0.0;  // not the -inf of masks
    }
  }
  c.from_buckets(n);
}

// The sums over gathered classes, with the bucket of each in row.places. `found` holds their scores.
template <typename T>
void sums_of_found(Row<T>& row, const T* labels, int64_t n, Cuts& c) {
  c.clear(n);
  c.sort_in(labels, n);
  row.places.resize(row.found.size());
  search(c.cuts, row.found.data(), labels[0], static_cast<int64_t>(row.found.size()), row.places.data());
  for (size_t k = 0; k < row.found.size(); ++k) {
    c.sizes[row.places[k]] += 1;
    c.sums[row.places[k]] += static_cast<double>(row.found[k]) - labels[0];
  }
  c.from_buckets(n);
}

// The gradient of a whole row but for the positives' own part, from what each positive gives to the classes above its
// cut (shares[p]).
template <typename T>
void write_by_passes(T* s, int64_t classes, const T* labels, int64_t n, const Cuts& c) {
  if (n == 1) {
    const T label = labels[0], share = static_cast<T>(c.shares[0]);
#pragma omp simd
    for (int64_t i = 0; i < classes; ++i) s[i] = s[i] - label + 1 > 0 ? share : 0;
    return;
  }
  for (int64_t start = 0; start < classes; start += PIECE) {
    const int64_t size = std::min(classes - start, PIECE);
    T gradient[PIECE] = {};  // beside the scores, which every positive reads, until the piece is done
    for (int64_t p = 0; p < n; ++p) {
      const T label = labels[p], share = static_cast<T>(c.shares[p]);
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) gradient[i] += s[start + i] - label + 1 > 0 ? share : 0;
    }
    std::copy(gradient, gradient + size, s + start);
  }
}

// Running sums of the shares: a class with k cuts below it is above those of the first k positives.
std::vector<double> running(const Cuts& c, int64_t n) {
  std::vector<double> out(n + 1, 0);
  for (int64_t p = 0; p < n; ++p) out[p + 1] = out[p] + c.shares[p];
  return out;
}

template <typename T>
void write_by_buckets(T* s, int64_t classes, const T* labels, int64_t n, Cuts& c) {
  c.sort_in(labels, n);
  const std::vector<double> shares = running(c, n);
  int32_t place[PIECE];
  for (int64_t start = 0; start < classes; start += PIECE) {
    const int64_t size = std::min(classes - start, PIECE);
    search(c.cuts, s + start, labels[0], size, place);
    for (int64_t i = 0; i < size; ++i) s[start + i] = static_cast<T>(shares[place[i]]);
  }
}

// The number of positives of a row: its labels end with +inf.
template <typename T>
int64_t positives_of(const T* labels, int64_t most) {
  int64_t n = 0;
  while (n < most && labels[n] < std::numeric_limits<T>::infinity()) ++n;
  return n;
}

// Replace a row by its gradient, from the shares of the positives and the number of classes above each cut.
template <typename T>
void finish(const Batch<T>& b, const T* labels, int64_t r, Row<T>& row, int64_t n, bool few, Cuts& c) {
  const int64_t* const ids = b.ids + r * b.positives;
  const T* const weights = b.weights + r * b.positives;
  b.scale[r] = 1;
  if (!few) row.keep();  // packing reads the scores in their place
  if (few) {
    const std::vector<double> shares = running(c, n);
    row.values.resize(row.found.size());
    for (size_t k = 0; k < row.found.size(); ++k) row.values[k] = shares[row.places[k]];
  } else if (n <= PASSES) {
    write_by_passes(row.scores, row.classes, labels, n, c);
  } else {
    write_by_buckets(row.scores, row.classes, labels, n, c);
  }
  // What a positive gets for itself. On several ranks the weight is 0 where another rank holds it.
  for (int64_t p = 0; p < n; ++p) {
    const double own = -c.shares[p] * c.sizes[p];
    if (weights[p] == 0) continue;
    if (few) {  // it is above its own cut, and so among the classes that were gathered
      row.values[std::lower_bound(row.at.begin(), row.at.end(), static_cast<int32_t>(ids[p])) - row.at.begin()] += own;
    } else {
      row.scores[ids[p]] += static_cast<T>(own);
    }
  }
  if (few) row.pack(b.count + r);
  else b.count[r] = -1;
}

// One row that has all of its classes here: its maximum, its loss, and the gradient in place of its scores.
template <typename T>
void rankmax_row(const Batch<T>& b, const T* labels, int64_t r, Row<T>& row, Cuts& c) {
  b.maximum[r] = row.scan(b.tops, r);
  b.value[r] = b.scale[r] = 0;
  b.count[r] = 0;
  const int64_t n = positives_of(labels, b.positives);
  // nan, +inf or no live class: the caller looks at the maximum and raises; no positive: loss and gradient are 0
  if (!std::isfinite(b.maximum[r]) || n == 0) return;
  // The lowest positive has the lowest cut: what is not above it is above none.
  const int64_t most = row.classes / SPARSE;
  bool few = row.open_groups(labels[0], T(-1)) * GROUP <= 2 * most;
  const bool counted = !few;
  if (counted) {  // there may be one such class in each of many groups: a pass tells, before every positive has one
    sums_by_passes(row.scores, row.classes, labels, 1, c);
    few = c.sizes[0] <= most;
  }
  if (few) {
    gather_scores(row, labels[0]);
    few = static_cast<int64_t>(row.found.size()) <= most;
  }
  if (few) {
    sums_of_found(row, labels, n, c);
  } else if (n > 1 || !counted) {
    n <= PASSES ? sums_by_passes(row.scores, row.classes, labels, n, c)
                : sums_by_buckets(row.scores, row.classes, labels, n, c);
  }
  const T* const weights = b.weights + r * b.positives;
  c.shares.assign(n, 0);
  for (int64_t p = 0; p < n; ++p) {
    const double sum = std::max(1.0, c.sums[p]);  // the positive itself adds 1; rounding may have taken some of it
    b.value[r] += weights[p] * std::log(sum);
    if (b.coefficient) c.shares[p] = static_cast<double>(b.coefficient[r]) * weights[p] / sum;
  }
  if (b.coefficient) finish(b, labels, r, row, n, few, c);
}

// Several ranks: the classes that a packed row holds, and their scores.
template <typename T>
void load_packed(Row<T>& row, int64_t count) {
  const int32_t* const at = reinterpret_cast<const int32_t*>(row.scores + row.half);
  row.at.assign(at, at + count);
  row.found.assign(row.scores, row.scores + count);
}

// This rank's part of the sums of each positive: out (n, positives, 2) gets the sum of distances and the number.
template <typename T>
void rank_sums(T* scores, int64_t rows, int64_t stride, int64_t classes, const int64_t* count, const T* labels,
               int64_t positives, double* out, int threads) {
  for_rows(scores, rows, stride, classes, threads, [&](int64_t r, Row<T>& row) {
    const T* const own = labels + r * positives;
    const int64_t n = positives_of(own, positives);
    Cuts c;
    c.clear(n);
    if (n > 0 && count[r] >= 0) {
      load_packed(row, count[r]);
      sums_of_found(row, own, n, c);
    } else if (n > 0) {
      n <= PASSES ? sums_by_passes(row.scores, classes, own, n, c) : sums_by_buckets(row.scores, classes, own, n, c);
    }
    for (int64_t p = 0; p < n; ++p) {
      out[(r * positives + p) * 2] = c.sums[p];
      out[(r * positives + p) * 2 + 1] = c.sizes[p];
    }
  });
}

// The gradient from the sums of all ranks: shares (n, positives), and sizes (n, positives) as doubles.
template <typename T>
void rank_gradients(const Batch<T>& b, const T* labels, const double* shares, const double* sizes, int threads) {
  for_rows(b.scores, b.n, b.stride, b.classes, threads, [&](int64_t r, Row<T>& row) {
    const T* const own = labels + r * b.positives;
    const int64_t n = positives_of(own, b.positives);
    const bool few = b.count[r] >= 0;
    Cuts c;
    b.scale[r] = 0;
    if (n == 0) {
      b.count[r] = 0;
      return;
    }
    if (few) {
      load_packed(row, b.count[r]);
      sums_of_found(row, own, n, c);  // for the places of the classes; the sums are replaced below
    }
    c.shares.assign(shares + r * b.positives, shares + r * b.positives + n);
    c.sizes.assign(sizes + r * b.positives, sizes + r * b.positives + n);
    finish(b, own, r, row, n, few, c);
  });
}

}  // namespace

// C functions for ctypes, one per precision; arguments as engine/native.py and kernel.py pass them.
#define EXPORT(T, SUFFIX)                                                                                              \
  NATIVE void rankmax_rows_##SUFFIX(BATCH_ARGUMENTS(T), const T* labels, int threads) {                                \
    const Batch<T> b = BATCH(T);                                                                                       \
    for_rows(b, threads, [&](int64_t r, Row<T>& row) {                                                                 \
      static thread_local Cuts cuts;  /* keeps its memory from row to row */                                           \
      rankmax_row(b, labels + r * positives, r, row, cuts);                                                            \
    });                                                                                                                \
  }                                                                                                                    \
  NATIVE void rankmax_sums_##SUFFIX(T* scores, int64_t n, int64_t stride, int64_t classes,                             \
                                            const int64_t* count, const T* labels, int64_t positives, double* out,     \
                                            int threads) {                                                             \
    rank_sums(scores, n, stride, classes, count, labels, positives, out, threads);                                     \
  }                                                                                                                    \
  NATIVE void rankmax_gradients_##SUFFIX(BATCH_ARGUMENTS(T), const T* labels, const double* shares,                    \
                                                 const double* sizes, int threads) {                                   \
    rank_gradients(BATCH(T), labels, shares, sizes, threads);                                                          \
  }

EXPORT(float, float32)
EXPORT(double, float64)
