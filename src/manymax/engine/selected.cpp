// Scores of a few selected classes for each query, and their gradients: what a sampled head does with class vectors.
//
// Class vectors are read where they are stored, one random row of a table after the other. The table may have
// gigabytes, so that many rows come from main memory, which takes longer than all arithmetic on them: rows are asked
// for some entries before they are needed (prefetched). Rows in half precision are widened while they are read, so
// that nobody makes a copy of the table in another precision.
//
// An entry is a pair of a query and a class, with a score. Entries come as a table (count, k): row m has k classes and
// belongs to query rows[m]. The rows of one query follow each other; together they are a run.
//
// Results have the same bits whatever the number of threads: every sum is made by one thread, in a fixed order.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "export.h"

namespace {

// Entries that are asked for ahead of the one that is being computed: enough to hide a trip to main memory (some 100
// nanoseconds), and not more than a core can have under way.
constexpr int64_t AHEAD = 16;
constexpr int64_t LINE = 64;  // bytes that come from memory at once
constexpr int64_t GROUP = 4;  // dot products at a time: independent sums, whose last steps overlap

// Class vectors in half precision, as torch stores them.
struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);  // the way to look at the bits of a number that compilers understand
  return value;
}

inline float widen(float value) { return value; }
inline double widen(double value) { return value; }
// The upper half of a float32.
inline float widen(Bfloat16 value) { return from_bits(static_cast<uint32_t>(value.bits) << 16); }
// Exponent and fraction moved into place give a number that is 2^112 too small, subnormal ones included. The largest
// exponent stands for infinity and nan, here as there. No branches, so that the loop around it is vectorised; there is
// an instruction for it, but not one that all processors have.
inline float widen(Float16 value) {
  const uint32_t bits = value.bits, magnitude = (bits & 0x7fffu) << 13;
  const uint32_t special = (bits & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  uint32_t scaled;
  const float number = from_bits(magnitude) * 0x1p112f;
  std::memcpy(&scaled, &number, sizeof scaled);
  return from_bits(scaled | special | (bits & 0x8000u) << 16);
}

template <typename V>
inline void prefetch(const V* row, int64_t width) {
  const char* bytes = reinterpret_cast<const char*>(row);
  for (int64_t at = 0; at < width * static_cast<int64_t>(sizeof(V)); at += LINE) __builtin_prefetch(bytes + at);
}

// Calls run(first, last) for every run of rows of one query. A run goes to the thread that has its first row, so that
// no two threads write to the same query.
template <typename F>
void for_runs(const int64_t* rows, int64_t begin, int64_t end, int64_t count, F run) {
  for (int64_t m = begin; m < end; ++m) {
    if (m > 0 && rows[m] == rows[m - 1]) continue;  // begun by the thread before
    int64_t last = m + 1;
    while (last < count && rows[last] == rows[m]) ++last;
    run(m, last);
  }
}

// Rows of entries that a thread takes at a time. Small, so that a thread that a neighbour keeps from running leaves its
// share to the others; large enough that taking it costs nothing beside the entries in it.
inline int64_t portion(int64_t k) { return std::max<int64_t>(1, 1024 / std::max<int64_t>(1, k)); }

// x . w of N classes at once. T is the precision of the sums, V that in which class vectors are stored.
template <int N, typename T, typename V>
inline void dots(const T* x, const V* table, int64_t stride, const int64_t* ids, int64_t d, T* out) {
  static_assert(N == 1 || N == GROUP);
  const V *w0 = table + ids[0] * stride, *w1 = table + ids[N > 1 ? 1 : 0] * stride;
  const V *w2 = table + ids[N > 1 ? 2 : 0] * stride, *w3 = table + ids[N > 1 ? 3 : 0] * stride;
  T s0 = 0, s1 = 0, s2 = 0, s3 = 0;
  if constexpr (N == 1) {
#pragma omp simd reduction(+ : s0)
    for (int64_t i = 0; i < d; ++i) s0 += x[i] * static_cast<T>(widen(w0[i]));
    out[0] = s0;
  } else {
#pragma omp simd reduction(+ : s0, s1, s2, s3)
    for (int64_t i = 0; i < d; ++i) {
      s0 += x[i] * static_cast<T>(widen(w0[i]));
      s1 += x[i] * static_cast<T>(widen(w1[i]));
      s2 += x[i] * static_cast<T>(widen(w2[i]));
      s3 += x[i] * static_cast<T>(widen(w3[i]));
    }
    out[0] = s0, out[1] = s1, out[2] = s2, out[3] = s3;
  }
}

// out[m, j] = x[rows[m]] . table[ids[m, j]].
template <typename T, typename V>
void scores(const T* x, const V* table, int64_t stride, int64_t d, const int64_t* rows, const int64_t* ids,
            int64_t count, int64_t k, T* out, int threads) {
  const int64_t entries = count * k, step = portion(k);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t begin = 0; begin < count; begin += step) {
    const int64_t end = std::min(count, begin + step);
    for (int64_t e = begin * k; e < std::min(entries, begin * k + AHEAD); ++e) prefetch(table + ids[e] * stride, d);
    for (int64_t m = begin; m < end; ++m) {
      const T* query = x + rows[m] * d;
      int64_t j = 0;
      for (; j + GROUP <= k; j += GROUP) {
        const int64_t e = m * k + j;
        // Beyond the end of this portion as well: rows that come next, if to another thread, then to a near one.
        for (int64_t a = e + AHEAD; a < std::min(entries, e + AHEAD + GROUP); ++a) prefetch(table + ids[a] * stride, d);
        dots<GROUP>(query, table, stride, ids + e, d, out + e);
      }
      for (; j < k; ++j) {
        const int64_t e = m * k + j;
        if (e + AHEAD < entries) prefetch(table + ids[e + AHEAD] * stride, d);
        dots<1>(query, table, stride, ids + e, d, out + e);
      }
    }
  }
}

// out += f0 r0 + ... of N rows at once, which reads and writes `out` once for all of them. Not inlined: inside of the
// loop over entries gcc exchanges the two loops, and ends up with one number at a time.
template <int N, typename T, typename V>
__attribute__((noinline)) void add_rows(T* __restrict out, const T* factors, const V* const* rows, int64_t d) {
  static_assert(N == 1 || N == GROUP);
  const T f0 = factors[0], f1 = factors[N > 1 ? 1 : 0], f2 = factors[N > 1 ? 2 : 0], f3 = factors[N > 1 ? 3 : 0];
  const V *r0 = rows[0], *r1 = rows[N > 1 ? 1 : 0], *r2 = rows[N > 1 ? 2 : 0], *r3 = rows[N > 1 ? 3 : 0];
  if constexpr (N == 1) {
#pragma omp simd
    for (int64_t i = 0; i < d; ++i) out[i] += f0 * static_cast<T>(widen(r0[i]));
  } else {
#pragma omp simd
    for (int64_t i = 0; i < d; ++i)
      out[i] += (f0 * static_cast<T>(widen(r0[i])) + f1 * static_cast<T>(widen(r1[i]))) +
                (f2 * static_cast<T>(widen(r2[i])) + f3 * static_cast<T>(widen(r3[i])));
  }
}

// out = the sum of value(e) * row(e) over the entries e of [first, last), always in the same order: the same bits
// whatever the number of threads. `ahead(e)` asks for the row of a later entry.
template <typename T, typename Value, typename Row, typename Ahead>
inline void sum_rows(int64_t first, int64_t last, int64_t d, T* out, Value value, Row row, Ahead ahead) {
  std::fill(out, out + d, T(0));
  int64_t e = first;
  for (; e + GROUP <= last; e += GROUP) {
    for (int64_t a = e; a < e + GROUP; ++a) ahead(a);
    const T factors[] = {value(e), value(e + 1), value(e + 2), value(e + 3)};
    const decltype(row(e)) rows[] = {row(e), row(e + 1), row(e + 2), row(e + 3)};
    add_rows<GROUP>(out, factors, rows, d);
  }
  for (; e < last; ++e) {
    ahead(e);
    const T factor = value(e);
    const auto* from = row(e);
    add_rows<1>(out, &factor, &from, d);
  }
}

// One score and its gradient, as they are sorted by class.
template <typename T>
struct Entry {
  int32_t id;
  int32_t query;
  T value;
};

// All entries by class; those of one class stay in their order, so that sums over them have the same bits in every run.
// By counting, one digit of the class after the other, the lowest first: a few nanoseconds per entry, on one thread,
// while others are at the gradient of the queries.
template <typename T>
void sort_entries(const int64_t* rows, const int64_t* ids, const T* grad, int64_t count, int64_t k, int64_t classes,
                  Entry<T>* sorted, Entry<T>* spare) {
  int bits = 1;
  while (bits < 31 && (int64_t{1} << bits) < classes) ++bits;
  const int passes = (bits + 10) / 11;  // at most 2^11 counters a digit, which stay in the nearest cache
  const int digit = (bits + passes - 1) / passes;
  const int64_t size = int64_t{1} << digit, mask = size - 1;
  std::vector<int32_t> counters(passes * size, 0);
  for (int64_t e = 0; e < count * k; ++e)
    for (int p = 0; p < passes; ++p) ++counters[p * size + ((ids[e] >> (p * digit)) & mask)];
  for (int p = 0; p < passes; ++p) {
    int32_t before = 0;
    for (int64_t i = 0; i < size; ++i) {
      const int32_t own = counters[p * size + i];
      counters[p * size + i] = before;  // from how many entries there are to where they begin
      before += own;
    }
  }
  // The last pass must end in `sorted`.
  Entry<T>*to = passes % 2 ? sorted : spare, *other = passes % 2 ? spare : sorted;
  for (int64_t m = 0; m < count; ++m)
    for (int64_t e = m * k; e < (m + 1) * k; ++e)
      to[counters[ids[e] & mask]++] = {static_cast<int32_t>(ids[e]), static_cast<int32_t>(rows[m]), grad[e]};
  for (int p = 1; p < passes; ++p) {
    const Entry<T>* from = to;
    std::swap(to, other);
    int32_t* next = counters.data() + p * size;
    for (int64_t e = 0; e < count * k; ++e) to[next[(from[e].id >> (p * digit)) & mask]++] = from[e];
  }
}

// Where the entries of each distinct class begin, and which class it is; the number of them. `starts` has one more.
template <typename T>
int64_t distinct(const Entry<T>* sorted, int64_t entries, int64_t* touched, int64_t* starts) {
  int64_t found = 0;
  for (int64_t e = 0; e < entries; ++e)
    if (e == 0 || sorted[e].id != sorted[e - 1].id) {
      touched[found] = sorted[e].id;
      starts[found++] = e;
    }
  starts[found] = entries;
  return found;
}

// The first half of the backward: grad_x[rows[m]] += grad[m, j] table[ids[m, j]], and the entries sorted by class.
// Either may be left out, with a null pointer. grad_x must hold zeros for queries without an entry.
template <typename T, typename V>
void gradients(const V* table, int64_t classes, int64_t stride, int64_t d, const int64_t* rows, const int64_t* ids,
               const T* grad, int64_t count, int64_t k, T* grad_x, Entry<T>* sorted, Entry<T>* spare, int64_t* touched,
               int64_t* starts, int64_t* distinct_classes, int threads) {
  const int64_t entries = count * k, step = portion(k);
  const int64_t portions = grad_x == nullptr ? 0 : (count + step - 1) / step;
  // One parallel region for both: whoever comes first sorts, and then helps with what is left.
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t task = sorted == nullptr ? 0 : -1; task < portions; ++task) {
    if (task < 0) {
      sort_entries(rows, ids, grad, count, k, classes, sorted, spare);
      *distinct_classes = distinct(sorted, entries, touched, starts);
      continue;
    }
    for_runs(rows, task * step, std::min(count, (task + 1) * step), count, [&](int64_t first, int64_t last) {
      sum_rows(
          first * k, last * k, d, grad_x + rows[first] * d, [&](int64_t e) { return grad[e]; },
          [&](int64_t e) { return table + ids[e] * stride; },
          [&](int64_t e) {
            if (e + AHEAD < entries) prefetch(table + ids[e + AHEAD] * stride, d);
          });
    });
  }
}

// The second half: out[c] = the sum of value * x[query] over the entries of the c-th distinct class. Each is summed by
// one thread and written once, however often it was drawn.
template <typename T>
void sum_classes(const T* x, int64_t d, const Entry<T>* sorted, const int64_t* starts, int64_t classes, T* out,
                 int threads) {
#pragma omp parallel for schedule(dynamic, 64) num_threads(threads)
  for (int64_t c = 0; c < classes; ++c)
    sum_rows(
        starts[c], starts[c + 1], d, out + c * d, [&](int64_t e) { return sorted[e].value; },
        [&](int64_t e) { return x + sorted[e].query * d; }, [](int64_t) {});
}

// Calls `run` with the table as a pointer to the type that `kind` names; native_selected.py has the same numbers.
template <typename F>
void with_table(const void* table, int kind, F run) {
  if (kind == 0) run(static_cast<const float*>(table));
  if (kind == 1) run(static_cast<const double*>(table));
  if (kind == 2) run(static_cast<const Bfloat16*>(table));
  if (kind == 3) run(static_cast<const Float16*>(table));
}

}  // namespace

#define EXPORT(T, SUFFIX)                                                                                              \
  NATIVE void selected_scores_##SUFFIX(const T* x, const void* table, int64_t stride, int64_t d, const int64_t* rows,  \
                                       const int64_t* ids, int64_t count, int64_t k, T* out, int kind, int threads) {  \
    with_table(table, kind,                                                                                            \
               [&](auto* typed) { scores<T>(x, typed, stride, d, rows, ids, count, k, out, threads); });               \
  }                                                                                                                    \
  NATIVE void selected_gradients_##SUFFIX(                                                                             \
      const void* table, int64_t classes, int64_t stride, int64_t d, const int64_t* rows, const int64_t* ids,          \
      const T* grad, int64_t count, int64_t k, T* grad_x, void* sorted, void* spare, int64_t* touched,                 \
      int64_t* starts, int64_t* distinct_classes, int kind, int threads) {                                             \
    with_table(table, kind, [&](auto* typed) {                                                                         \
      gradients<T>(typed, classes, stride, d, rows, ids, grad, count, k, grad_x, static_cast<Entry<T>*>(sorted),       \
                   static_cast<Entry<T>*>(spare), touched, starts, distinct_classes, threads);                         \
    });                                                                                                                \
  }                                                                                                                    \
  NATIVE void selected_class_sums_##SUFFIX(const T* x, int64_t d, const void* sorted, const int64_t* starts,           \
                                           int64_t classes, T* out, int threads) {                                     \
    sum_classes<T>(x, d, static_cast<const Entry<T>*>(sorted), starts, classes, out, threads);                         \
  }

EXPORT(float, float32)
EXPORT(double, float64)
