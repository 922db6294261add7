// Rows of scores to rows of the gradient, for members with a native kernel. In plain torch their kernels take several
// passes over a block of scores, each of them from main memory; here a row goes through all steps while it is in the
// cache. Members include this file in their kernel.cpp. Formulas and names are those of ops/simplex.py.
//
// The result takes the place of the scores, so that no second table is needed. There are two forms:
//
//   packed  a gradient with few entries, one class in SPARSE at most: `count` values from the beginning of the row on,
//           and from the middle of the row on their classes, as int32, ascending
//   dense   any other gradient: a number for every class, and count is -1
//
// Every index is int64_t: a block can have more than 2^31 scores. Classes of entries are int32_t, for which
// native.py refuses longer rows.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "export.h"
#include "scoring.h"
#include "vector_math.h"

// An unnamed namespace: each source file has a copy of its own, and none of these names is visible outside.
namespace {

// A gradient with one class in SPARSE, or fewer, is kept as entries; native.py has the same number. Adding an entry to
// two gradients was measured to cost as much as 4 to 8 classes in two products, d = 64, depending on how many of the
// class vectors are in cache. (Half a row holds them for any SPARSE from 2 on.)
constexpr int64_t SPARSE = 6;

// Classes that are summed in the precision of the scores before the sum is added to a double. Within a piece the
// compiler can use whole vector registers of float; a float sum over all classes of a long row would lose digits.
constexpr int64_t PIECE = 1024;

constexpr int64_t GROUP = 64;  // neighbouring classes of which the first pass over a row keeps the maximum

// The arguments of a kernel: pointers into tensors that native.py keeps alive during the call.
template <typename T>
struct Batch {
  T* scores;               // (n, stride), stride >= classes: rows are padded
  int64_t n, stride, classes;
  const int64_t* ids;      // (n, positives), or null: the weights cover all classes in order
  const T* weights;        // (n, positives), or (n, classes) without ids; 0 where there is no positive
  int64_t positives;       // the largest number of positives of a row
  const T* share;          // (n,) what label smoothing gives to each class, or null: no smoothing
  const T* class_weight;   // (classes,) class weights for smoothing, or null
  const T* total;          // (n,) sum of all target weights of a row
  const T* coefficient;    // (n,) factor of the gradient, or null: no gradient is wanted
  T* maximum;              // (n,) out: the largest score; nan where a score is nan
  double* value;           // (n,) out: Omega*(s) - max s, or the loss; that is up to the member
  T* scale;                // (n,) out: a factor of a dense row that is not multiplied into it
  int64_t* count;          // (n,) out: the number of entries of a packed gradient, -1 of a dense one
  const T* tops;           // (n, groups) the maximum of each group of GROUP classes, or null; see Row::scan
  double cap;              // the soft cap of the scores, which the gradient is to be taken through; 0 for none

  // Whether every class has a target weight, so that no gradient has few entries.
  bool dense_target() const { return ids == nullptr || share != nullptr; }

  // Subtract factor x target weight from the classes of a dense row.
  void subtract_target(int64_t r, double factor) const {
    T* const s = scores + r * stride;
    const T* const w = weights + r * positives;
    if (ids) {
      const int64_t* const id = ids + r * positives;
      for (int64_t j = 0; j < positives; ++j) s[id[j]] -= static_cast<T>(factor * w[j]);  // padding subtracts 0
    } else {
      const T f = static_cast<T>(factor);
#pragma omp simd
      for (int64_t c = 0; c < classes; ++c) s[c] -= f * w[c];
    }
    if (!share) return;
    const T f = static_cast<T>(factor * share[r]);
#pragma omp simd
    for (int64_t c = 0; c < classes; ++c) s[c] -= f * class_weight[c];
  }
};

// The exponentials e^d of a row, d = s - top, in place; returns their sum. With `moment`, also sum e^d d, from which an
// entropy follows: a masked class adds 0 to it.
template <bool with_moment = false, typename T>
double exponentials(T* s, int64_t n, T top, double* moment = nullptr) {
  double sum = 0;
  for (int64_t start = 0; start < n; start += PIECE) {
    const int64_t end = std::min(n, start + PIECE);
    T part = 0, other = 0;
#pragma omp simd reduction(+ : part, other)
    for (int64_t c = start; c < end; ++c) {
      const T d = s[c] - top, e = exp_of(d);
      part += e;
      if (with_moment) other += e > 0 ? e * d : T(0);
      s[c] = e;
    }
    sum += part;
    if (with_moment) *moment += other;
  }
  return sum;
}

// Memory of a vector that is not set to 0 first: setting it would cost as much as what is done with it.
template <typename T>
struct Untouched : std::allocator<T> {
  template <typename U>
  struct rebind {
    using other = Untouched<U>;
  };
  template <typename U>
  void construct(U* place) noexcept {
    ::new (static_cast<void*>(place)) U;
  }
  template <typename U, typename V>
  void construct(U* place, V&& value) {
    ::new (static_cast<void*>(place)) U(std::forward<V>(value));
  }
};

template <typename T>
using Buffer = std::vector<T, Untouched<T>>;

// The scores of a group that are above origin + cut, minus the origin, and their classes; returns how many. May write
// as many numbers as the group has classes, whatever the result is.
template <typename T>
inline int64_t gather_group(const T* s, int64_t size, T origin, T cut, int32_t first, T* found, int32_t* at) {
  // One byte per class, eight of which are looked at as one number: most are 0, and no branch depends on a class.
  uint8_t flags[GROUP] = {};
#pragma omp simd
  for (int64_t c = 0; c < size; ++c) flags[c] = s[c] - origin > cut;
  int64_t count = 0;
  for (int64_t eight = 0; eight < GROUP; eight += 8) {
    uint64_t word;
    std::memcpy(&word, flags + eight, 8);
    for (; word; word &= word - 1) {  // clears the lowest byte that is set
      const int64_t c = eight + __builtin_ctzll(word) / 8;
      found[count] = s[c] - origin;
      at[count++] = first + static_cast<int32_t>(c);
    }
  }
  return count;
}

#ifdef __AVX512F__
// The same with the one instruction that moves the chosen numbers of a register together, which no compiler finds by
// itself: three times as fast where a group has many.
template <>
inline int64_t gather_group(const float* s, int64_t size, float origin, float cut, int32_t first, float* found,
                            int32_t* at) {
  const __m512 from = _mm512_set1_ps(origin), above = _mm512_set1_ps(cut);
  const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  int64_t count = 0;
  for (int64_t c = 0; c < size; c += 16) {
    const __mmask16 valid = size - c >= 16 ? 0xffff : static_cast<__mmask16>((1u << (size - c)) - 1);
    const __m512 d = _mm512_sub_ps(_mm512_maskz_loadu_ps(valid, s + c), from);
    const __mmask16 chosen = _mm512_mask_cmp_ps_mask(valid, d, above, _CMP_GT_OQ);
    const __m512i classes = _mm512_add_epi32(steps, _mm512_set1_epi32(first + static_cast<int32_t>(c)));
    _mm512_storeu_ps(found + count, _mm512_maskz_compress_ps(chosen, d));
    _mm512_storeu_si512(at + count, _mm512_maskz_compress_epi32(chosen, classes));
    count += __builtin_popcount(chosen);
  }
  return count;
}
#endif

// One row, and vectors that keep their memory from row to row: allocation for each row would cost more than the row.
template <typename T>
struct Row {
  T* scores;
  int64_t classes, half;            // number of classes; offset in the row at which the classes of the entries begin
  Buffer<T> tops, sample;      // the maximum of each group of classes; see take_sample
  Buffer<T> found;             // scores above a cut, relative to the origin
  Buffer<int32_t> at, places;  // the class of each of them; the number of cuts below each (rankmax)
  Buffer<double> values;       // the gradient at these classes; double, because probability and target cancel
  T inverse_cap = 0;           // 1 / c of a soft cap that the gradient is to be taken through; 0 for none
  bool kept = false;           // whether `capped` holds the scores of this row
  Buffer<T> capped;            // a copy of the scores of a row under a soft cap; see keep

  // A kernel calls this before it writes to the scores, unless it only packs the row. The slopes of a soft cap are a
  // function of the scores: a copy of them is kept for one row, which stays in cache, where a copy of the block would be
  // a second table. Packed rows need none.
  void keep() {
    if (inverse_cap == 0 || kept) return;
    capped.resize(classes);
    std::copy_n(scores, classes, capped.begin());
    kept = true;
  }

  // The largest score, or nan if one is nan; fills `tops`. A comparison with nan is false, so that a plain maximum
  // would pass over it: it is looked for in the same pass, without a branch that would keep the loop from being
  // vectorised. `given` are the tops of all rows, where products.cpp has found them already, with +inf where a score is
  // nan; or null.
  T scan(const T* given, int64_t r) {
    const T* const s = scores;
    const int64_t groups = (classes + GROUP - 1) / GROUP, whole = classes / GROUP;
    tops.resize(groups);
    T top = -std::numeric_limits<T>::infinity();
    if (given) {
      std::copy_n(given + r * groups, groups, tops.begin());
      for (int64_t g = 0; g < groups; ++g) top = tops[g] > top ? tops[g] : top;
      if (top < std::numeric_limits<T>::infinity()) return top;
      top = -top;  // below, the scores tell which of the two it is
    }
    int32_t nan = 0;
    for (int64_t g = 0; g < groups; ++g) {
      const T* const from = s + g * GROUP;
      T most = -std::numeric_limits<T>::infinity();
      if (g < whole) {  // a loop of a fixed length needs no code for what is left over
#pragma omp simd reduction(max : most) reduction(| : nan)
        for (int64_t c = 0; c < GROUP; ++c) {
          most = from[c] > most ? from[c] : most;
          nan |= from[c] != from[c];
        }
      } else {
        for (int64_t c = 0; c < classes - g * GROUP; ++c) {
          most = from[c] > most ? from[c] : most;
          nan |= from[c] != from[c];
        }
      }
      tops[g] = most;
      top = most > top ? most : top;
    }
    return nan ? std::numeric_limits<T>::quiet_NaN() : top;
  }

  // The scores of one class in `every` into `sample`, in runs of neighbours that fill a cache line of float: single
  // classes would bring as many lines from memory as all classes do.
  void take_sample(int64_t every) {
    constexpr int64_t RUN = 16;
    const int64_t whole = classes / (RUN * every), rest = std::min(RUN, classes % (RUN * every));
    sample.resize(whole * RUN + rest);
    for (int64_t k = 0; k < whole; ++k)
      std::memcpy(sample.data() + k * RUN, scores + k * RUN * every, RUN * sizeof(T));
    std::copy_n(scores + whole * RUN * every, rest, sample.data() + whole * RUN);
  }

  // How many groups have a score above origin + cut. The origin is a score of the row, such as its maximum; the
  // difference comes first: where scores are large, the sum would be rounded to the origin, and the cut with it.
  int64_t open_groups(T origin, T cut) const {
    int64_t open = 0;
    for (const T top : tops) open += top - origin > cut;
    return open;
  }

  // The scores above origin + cut, minus the origin, into `found`, and their classes, ascending, into `at`. Needs the
  // `tops` of scan(): only groups that have such a score are looked at.
  void gather(T origin, T cut) {
    // Room for all classes, once: the loop below writes without asking for room.
    found.resize(classes + GROUP);
    at.resize(classes + GROUP);
    int64_t size = 0;
    for (int64_t g = 0; g < static_cast<int64_t>(tops.size()); ++g) {
      if (!(tops[g] - origin > cut)) continue;
      size += gather_group(scores + g * GROUP, std::min(GROUP, classes - g * GROUP), origin, cut,
                           static_cast<int32_t>(g * GROUP), found.data() + size, at.data() + size);
    }
    found.resize(size);
    at.resize(size);
  }

  // Replace the row by the entries values[k] at classes at[k], ascending.
  void pack(int64_t* count) {
    if (inverse_cap > 0) {
      const T* const from = kept ? capped.data() : scores;
      for (size_t k = 0; k < values.size(); ++k) values[k] *= slope_of(from[at[k]], inverse_cap);
    }
    // The scores are not needed any more. This is why the library is compiled with -fno-strict-aliasing.
    int32_t* places = reinterpret_cast<int32_t*>(scores + half);
    int64_t kept = 0;
    for (size_t k = 0; k < values.size(); ++k) {
      // Exact zeros are no entries: classes that a bound let through, but that are outside of the support.
      if (values[k] == 0) continue;
      scores[kept] = static_cast<T>(values[k]);
      places[kept++] = at[k];
    }
    *count = kept;
  }

  // Replace the row by a dense one with values[k] at classes at[k] and 0 elsewhere.
  void unpack() {
    keep();
    std::fill(scores, scores + classes, T(0));
    for (size_t k = 0; k < values.size(); ++k) scores[at[k]] += static_cast<T>(values[k]);
  }

  // Subtract factor x weight of the listed positives from the entries. A positive that is not among them gets an entry.
  void subtract_positives(const Batch<T>& b, int64_t r, double factor) {
    const int64_t* const ids = b.ids + r * b.positives;
    const T* const weights = b.weights + r * b.positives;
    for (int64_t j = 0; j < b.positives; ++j) {
      if (weights[j] == 0) continue;  // padding of a row with fewer positives
      const auto id = static_cast<int32_t>(ids[j]);
      const auto place = std::lower_bound(at.begin(), at.end(), id);
      const auto k = place - at.begin();
      if (place == at.end() || *place != id) {  // classes stay ascending: positives outside are few
        at.insert(place, id);
        values.insert(values.begin() + k, 0.0);
      }
      values[k] -= factor * weights[j];
    }
  }
};

// Neighbouring rows that one thread works on, and bytes of a row that are fetched into the cache ahead of time.
constexpr int64_t TOGETHER = 4, FETCHED = 1 << 16;

template <typename T>
void fetch(const T* from, int64_t count) {
  constexpr int64_t LINE = 64 / sizeof(T);
  for (int64_t c = 0; c < count; c += LINE) __builtin_prefetch(from + c, 1, 2);
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
    // Dynamic, because rows differ, one with a large support takes several passes, and because a thread whose core is
    // taken by another process must not keep the others waiting for its rows.
#pragma omp for schedule(dynamic, 1)
    for (int64_t first = 0; first < n; first += TOGETHER) {
      const int64_t end = std::min(n, first + TOGETHER);
      for (int64_t r = first; r < end; ++r) {
        row.scores = scores + r * stride;
        // The next row is on its way into the cache of this core while this one is worked on.
        if (r + 1 < end) fetch(row.scores + stride, std::min(classes, FETCHED / static_cast<int64_t>(sizeof(T))));
        work(r, row);
      }
    }
  }
}

// The same for the rows of a batch, which `work` replaces by their gradients. Under a soft cap a gradient is multiplied
// by the slopes of the cap: here where the row is dense, by `pack` where it has few entries. See Row::keep.
template <typename T, typename Work>
void for_rows(const Batch<T>& b, int threads, Work work) {
  const T inverse = b.cap > 0 && b.coefficient ? static_cast<T>(1 / b.cap) : T(0);
  for_rows(b.scores, b.n, b.stride, b.classes, threads, [&](int64_t r, Row<T>& row) {
    row.inverse_cap = inverse;
    row.kept = false;
    work(r, row);
    if (row.kept && b.count[r] < 0) times_slope(row.scores, row.capped.data(), row.classes, inverse);
  });
}

}  // namespace

// The arguments of a kernel in the order in which native.py passes them, and the Batch that they make.
#define BATCH_ARGUMENTS(T)                                                                                             \
  T *scores, int64_t n, int64_t stride, int64_t classes, const int64_t *ids, const T *weights, int64_t positives,      \
      const T *share, const T *class_weight, const T *total, const T *coefficient, T *maximum, double *value,          \
      T *scale, int64_t *count, const T *tops, const double *cap
#define BATCH(T)                                                                                                       \
  Batch<T> {                                                                                                           \
    scores, n, stride, classes, ids, weights, positives, share, class_weight, total, coefficient, maximum, value,      \
        scale, count, tops, *cap                                                                                       \
  }
