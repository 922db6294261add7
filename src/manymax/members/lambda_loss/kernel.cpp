// LambdaRank and LambdaLoss of rows of scores. See engine/rows.h for what a row is replaced by.
//
// A row is sorted once. In the order of its ranks the weights of all pairs of a positive lie side by side in small
// tables, so that a positive takes one pass over the row without a gather; its gradient is summed up in that order, too,
// and goes back to the classes at the end.

#include "rows.h"

namespace {

// Bits of a cell that a pass of the sort looks at, and the number of cells: the last one is for masked classes.
constexpr int DIGIT = 9, DIGITS = 1 << DIGIT, CELLS = DIGITS * DIGITS;

// The classes of a row by rank, best first, and what is kept beside each: memory that stays from row to row.
template <typename T>
struct Ranked {
  Buffer<int32_t> at, scratch, cells;  // by rank: the class; by class: its cell
  Buffer<T> scores, counts, gradient;  // by rank; counts is 0 at a positive, which is compared with none, and else 1
  std::vector<int32_t> listed;         // by class: the number of a positive in its list, from 1 on, and else 0
  std::vector<std::pair<int64_t, int64_t>> places;  // rank from 0 on and number of each positive
  int64_t live;                                     // ranks below this are of classes that are not masked

  // Rank the classes of a row: of equal scores the positives last, and else lower numbers first.
  void rank(const Batch<T>& b, int64_t r, const Row<T>& row) {
    for (auto* each : {&at, &scratch, &cells}) each->resize(row.classes);
    for (auto* each : {&scores, &counts, &gradient}) each->resize(row.classes);
    listed.resize(row.classes);
    sort_cells(row.scores, row.classes, b.maximum[r]);
    gather(row.scores, row.classes);
    sort_within(row.scores, row.classes);
    live = std::partition_point(scores.begin(), scores.end(), is_live) - scores.begin();
    std::fill(counts.begin(), counts.end(), T(1));
    std::fill(gradient.begin(), gradient.end(), T(0));
    find_positives(b.ids + r * b.positives, b.weights + r * b.positives, b.positives);
  }

  // The functions below keep the addresses of vectors in variables of their own: to a compiler that must not assume
  // strict aliasing any write could change those in the vectors, so that it would read them again each time.

  static bool is_live(T score) { return score > -std::numeric_limits<T>::infinity(); }

  // The classes by cell into `at`. The range of the scores is cut into cells of one width, which a score never leaves in
  // the wrong direction, whatever is rounded: only classes of one cell may be in the wrong order after this. Two passes
  // of a radix sort, which is stable.
  void sort_cells(const T* s, int64_t n, T top) {
    int32_t *const cell = cells.data(), *const sorted = scratch.data(), *const result = at.data();
    T low = top;
#pragma omp simd reduction(min : low)
    for (int64_t c = 0; c < n; ++c) low = s[c] < low && is_live(s[c]) ? s[c] : low;
    const T range = top - low;
    const T scale = range > 0 && std::isfinite(range) ? (CELLS - 2) / range : T(0);
#pragma omp simd
    for (int64_t c = 0; c < n; ++c) {
      const T place = (top - s[c]) * scale;
      cell[c] = is_live(s[c]) ? static_cast<int32_t>(place < CELLS - 2 ? place : T(CELLS - 2)) : CELLS - 1;
    }
    int32_t low_digits[DIGITS] = {}, high_digits[DIGITS] = {}, lows = 0, highs = 0;
    for (int64_t c = 0; c < n; ++c) {
      ++low_digits[cell[c] % DIGITS];
      ++high_digits[cell[c] / DIGITS];
    }
    for (int d = 0; d < DIGITS; ++d) {  // from how many there are of a digit to where the first of them goes
      lows += std::exchange(low_digits[d], lows);
      highs += std::exchange(high_digits[d], highs);
    }
    for (int64_t c = 0; c < n; ++c) sorted[low_digits[cell[c] % DIGITS]++] = static_cast<int32_t>(c);
    for (int64_t i = 0; i < n; ++i) result[high_digits[cell[sorted[i]] / DIGITS]++] = sorted[i];
  }

  void gather(const T* s, int64_t n) {
    T* const ranked = scores.data();
    const int32_t* const from = at.data();
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) ranked[i] = s[from[i]];
  }

  // Insertion sort of `scores` and `at`, which have few in the wrong place, unless all scores but a few are in one cell.
  void sort_within(const T* s, int64_t n) {
    T* const ranked = scores.data();
    int32_t* const from = at.data();
    for (int64_t i = 1, moves = 0; i < n; ++i) {
      if (!(ranked[i] > ranked[i - 1])) continue;
      const T score = ranked[i];
      const int32_t c = from[i];
      int64_t k = i;
      for (; k > 0 && score > ranked[k - 1]; --k) {
        ranked[k] = ranked[k - 1];
        from[k] = from[k - 1];
      }
      ranked[k] = score;
      from[k] = c;
      moves += i - k;
      if (moves <= 8 * n) continue;
      std::sort(from, from + n, [s](int32_t a, int32_t b) { return s[a] > s[b] || (s[a] == s[b] && a < b); });
      return gather(s, n);
    }
  }

  // The ranks of the positives, each behind the negatives of equal score.
  void find_positives(const int64_t* ids, const T* weights, int64_t most) {
    for (int64_t p = 0; p < most; ++p)
      if (weights[p] != 0) listed[ids[p]] = static_cast<int32_t>(p + 1);  // the others are padding
    places.clear();
    const T* const ranked = scores.data();
    const int32_t* const number = listed.data();
    int32_t* const from = at.data();
    for (int64_t i = live - 1; i >= 0; --i) {
      if (!number[from[i]]) continue;
      int64_t k = i;
      for (; k + 1 < live && ranked[k + 1] == ranked[i] && !number[from[k + 1]]; ++k) std::swap(from[k], from[k + 1]);
      places.emplace_back(k, number[from[k]] - 1);
    }
    for (const auto& [rank, p] : places) {
      listed[at[rank]] = 0;
      counts[rank] = 0;
    }
  }
};

// The weights of pairs by rank; see loss.py. near[d] belongs to a distance of d, which may be negative. With `gains`
// they are those of LambdaRank.
template <typename T>
struct Tables {
  const T *near, *beyond, *gains;
};

// sum_i delta_i log(1 + e^d_i) and sum_i delta_i logistic(d_i) over the negatives of ranks from .. to - 1, d = sigma
// (s_i - s_y), which is not negative if they are `above` the positive of rank y and else not positive. With a share,
// its multiples of the terms of the second sum are added to the gradient.
template <bool above, typename T, typename Weight>
void add_pairs(Ranked<T>& ranked, int64_t from, int64_t to, T own, T sigma, T share, Weight weight, double& value,
               double& slope) {
  const T *const s = ranked.scores.data(), *const counts = ranked.counts.data();
  T* const gradient = ranked.gradient.data();
  for (int64_t start = from; start < to; start += PIECE) {
    const int64_t end = std::min(to, start + PIECE);
    T part = 0, slopes = 0;
#pragma omp simd reduction(+ : part, slopes)
    for (int64_t i = start; i < end; ++i) {
      const T d = sigma * (s[i] - own), e = exp_of(above ? -d : d);
      const T u = 1 + e, inverse = 1 / u, delta = counts[i] * weight(i);
      // log(1 + e) with what rounding took from u, as in log1p_of, by the division that the slope needs anyway
      part += delta * ((above ? d : T(0)) + (log_of(u) + (e - (u - 1)) * inverse));
      const T term = delta * (above ? inverse : e * inverse);
      slopes += term;
      gradient[i] += share * term;
    }
    value += part;
    slope += slopes;
  }
}

// One row: its maximum, its loss, and the gradient in place of its scores.
template <typename T>
void lambda_row(const Batch<T>& b, const Tables<T>& t, double sigma, int64_t r, Row<T>& row, Ranked<T>& ranked) {
  b.maximum[r] = row.scan(b.tops, r);
  b.value[r] = b.scale[r] = 0;
  b.count[r] = -1;
  if (!std::isfinite(b.maximum[r])) return;  // nan, +inf or no live class: the caller looks at the maximum and raises
  ranked.rank(b, r, row);
  const T factor = static_cast<T>(sigma);
  for (const auto& [y, p] : ranked.places) {
    const double weight = b.weights[r * b.positives + p] / std::log(2.0);  // IDCG is in the weights
    const T own = ranked.scores[y], share = static_cast<T>(weight * sigma);
    double value = 0, slope = 0;
    if (t.gains) {
      const T *const gains = t.gains, mine = gains[y];
      add_pairs<true>(ranked, 0, y, own, factor, share, [=](int64_t i) { return gains[i] - mine; }, value, slope);
      add_pairs<false>(ranked, y + 1, ranked.live, own, factor, share, [=](int64_t i) { return mine - gains[i]; }, value,
                       slope);
    } else {
      const T *const near = t.near - y, *const beyond = t.beyond, mine = beyond[y];
      add_pairs<true>(ranked, 0, y, own, factor, share, [=](int64_t i) { return near[i] * mine; }, value, slope);
      add_pairs<false>(ranked, y + 1, ranked.live, own, factor, share, [=](int64_t i) { return near[i] * beyond[i]; }, value,
                       slope);
    }
    ranked.gradient[y] = static_cast<T>(-weight * sigma * slope);  // no other positive adds to it
    b.value[r] += weight * value;
  }
  if (!b.coefficient) return;
  b.scale[r] = b.coefficient[r];
  row.keep();
  T* const s = row.scores;
  const T* const gradient = ranked.gradient.data();
  const int32_t* const at = ranked.at.data();
  for (int64_t i = 0; i < row.classes; ++i) s[at[i]] = gradient[i];
}

}  // namespace

// C functions for ctypes, one per precision; arguments as engine/native.py and kernel.py pass them. `near` has 2 classes
// - 1 numbers, for distances from 1 - classes on.
#define EXPORT(T, SUFFIX)                                                                                              \
  NATIVE void lambda_rows_##SUFFIX(BATCH_ARGUMENTS(T), const T* near, const T* beyond, const T* gains,                 \
                                   const double* sigma, int threads) {                                                 \
    const Batch<T> b = BATCH(T);                                                                                       \
    const Tables<T> tables{near + classes - 1, beyond, gains};                                                         \
    for_rows(b, threads, [&](int64_t r, Row<T>& row) {                                                                 \
      static thread_local Ranked<T> ranked; /* keeps its memory from row to row */                                     \
      lambda_row(b, tables, *sigma, r, row, ranked);                                                                   \
    });                                                                                                                \
  }

EXPORT(float, float32)
EXPORT(double, float64)
