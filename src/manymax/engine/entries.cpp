// What every member with a native kernel needs beside its own rows: to add the gradient of packed rows to the gradients
// of queries and class vectors, to move dense rows together, to list entries, and to find the scores above a cut.

#include "rows.h"

namespace {

// 256 bytes of a vector, worked on in registers. A loop over an array of so many numbers would be compiled to one that
// reads and writes the array in memory.
template <typename T>
struct Numbers {
  static constexpr int64_t COUNT = 256 / sizeof(T);
  typedef T Register __attribute__((vector_size(64), aligned(sizeof(T)), may_alias));
  Register part[4];

  static Numbers read(const T* from) {
    const Register* const parts = reinterpret_cast<const Register*>(from);
    return {{parts[0], parts[1], parts[2], parts[3]}};
  }
  void write(T* to) const {
    Register* const parts = reinterpret_cast<Register*>(to);
    for (int k = 0; k < 4; ++k) parts[k] = part[k];
  }
  INLINE void add(T factor, const Numbers& other) {
    for (int k = 0; k < 4; ++k) part[k] += factor * other.part[k];
  }
};

template <typename T>
const int32_t* classes_of(const T* row, int64_t stride) {
  return reinterpret_cast<const int32_t*>(row + stride / 2);  // where Row::pack() put them
}

// to[0..d) += sum_k values[k] x table[classes[k]]: each vector is read once, and the sums stay in registers.
template <typename T>
void add_vectors(const T* values, const int32_t* classes, int64_t count, const T* table, int64_t d, T* to) {
  int64_t i = 0;
  for (; i + Numbers<T>::COUNT <= d; i += Numbers<T>::COUNT) {
    auto sum = Numbers<T>::read(to + i);
    for (int64_t k = 0; k < count; ++k) sum.add(values[k], Numbers<T>::read(table + classes[k] * d + i));
    sum.write(to + i);
  }
  if (i == d) return;
  for (int64_t k = 0; k < count; ++k) {
    const T* const from = table + classes[k] * d;
#pragma omp simd
    for (int64_t j = i; j < d; ++j) to[j] += values[k] * from[j];
  }
}

// to[0..d) += value x from[0..d).
template <typename T>
INLINE void add_scaled(T value, const T* from, int64_t d, T* to) {
  int64_t i = 0;
  for (; i + Numbers<T>::COUNT <= d; i += Numbers<T>::COUNT) {
    auto sum = Numbers<T>::read(to + i);
    sum.add(value, Numbers<T>::read(from + i));
    sum.write(to + i);
  }
#pragma omp simd
  for (int64_t j = i; j < d; ++j) to[j] += value * from[j];
}

// Classes that are worked on at a time, so that their vectors, or the gradients of these, stay in the second-level
// cache from row to row: 2^16 numbers are 256 KB of float32. Where rows have few entries a range is longer, because
// finding its entries would cost more than adding them. There are at least `least` ranges.
int64_t range_of_classes(int64_t classes, int64_t d, int64_t n, const int64_t* count, int64_t least) {
  int64_t entries = 0;
  for (int64_t r = 0; r < n; ++r) entries += std::max<int64_t>(0, count[r]);
  const int64_t fit = std::max<int64_t>(64, (int64_t(1) << 16) / std::max<int64_t>(1, d));
  const int64_t worth = 16 * classes * n / std::max<int64_t>(1, entries);  // 16 entries of a row on average
  return std::max<int64_t>(16, std::min(std::max(fit, worth), classes / least));
}

// grad_input[r] += sum of value x class vector over the entries of packed row r, in the order of its classes.
template <typename T>
void add_to_input(const T* table, int64_t n, int64_t stride, int64_t classes, const int64_t* count, const T* vectors,
                  int64_t d, T* grad_input, int threads) {
  // A row adds up one sum for each range: their number must not depend on that of the threads, or the result would.
  const int64_t range = range_of_classes(classes, d, n, count, 16);
  // Rows of one thread at a time: the more, the more often a class vector is used while it is in cache.
  const int64_t rows = std::max<int64_t>(1, (n + 3 * threads - 1) / (3 * threads));
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t start = 0; start < n; start += rows) {
    const int64_t size = std::min(rows, n - start);
    std::vector<int64_t> next(size, 0);  // of each row: its first entry that has not been added
    for (int64_t last = range; last < classes + range; last += range)
      for (int64_t k = 0; k < size; ++k) {
        const int64_t r = start + k;
        const T* const row = table + r * stride;
        const int32_t* const at = classes_of(row, stride);
        const int64_t from = next[k];
        int64_t to = from;
        while (to < count[r] && at[to] < last) ++to;
        if (to > from) add_vectors(row + from, at + from, to - from, vectors, d, grad_input + r * d);
        next[k] = to;
      }
  }
}

// grad_vectors[c] += value x query, and grad_bias[c] += value, over the entries of all packed rows.
//
// A thread takes a range of classes at a time, of which it alone writes the gradient: no two threads meet, and each
// class sums its rows in their order, whatever the number of threads.
template <typename T>
void add_to_vectors(const T* table, int64_t n, int64_t stride, int64_t classes, const int64_t* count, const T* input,
                    int64_t d, T* grad_vectors, T* grad_bias, int threads) {
  // At least eight ranges for each thread, so that popular classes in one of them keep no thread waiting.
  const int64_t range = range_of_classes(classes, d, n, count, 8 * threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t first = 0; first < classes; first += range) {
    const int64_t last = std::min(classes, first + range);
    for (int64_t r = 0; r < n; ++r) {
      if (count[r] <= 0) continue;
      const T *const row = table + r * stride, *const x = input + r * d;
      const int32_t *const at = classes_of(row, stride), *const end = at + count[r];
      for (const int32_t* c = std::lower_bound(at, end, static_cast<int32_t>(first)); c != end && *c < last; ++c) {
        const T value = row[c - at];
        if (grad_bias) grad_bias[*c] += value;
        if (!grad_vectors) continue;
        add_scaled(value, x, d, grad_vectors + static_cast<int64_t>(*c) * d);
      }
    }
  }
}

// Move the dense rows (count -1) of a table to its beginning, in their order. On one thread: a row moves onto one that
// may have to move itself.
template <typename T>
void move_dense_rows(T* table, int64_t n, int64_t stride, const int64_t* count) {
  int64_t to = 0;
  for (int64_t r = 0; r < n; ++r) {
    if (count[r] >= 0) continue;
    if (to != r) std::memcpy(table + to * stride, table + r * stride, stride * sizeof(T));
    ++to;
  }
}

// Collect the entries of all rows into three lists, one row after the other. Rows without entries, or with a dense
// gradient (count -1), add none. On one thread: it is a copy of what is few by definition, and the place of an entry in
// the lists follows from the counts of all rows before.
template <typename T>
void list_entries(const T* table, int64_t n, int64_t stride, const int64_t* count, int64_t* row, int64_t* at,
                  T* values) {
  for (int64_t r = 0; r < n; ++r) {
    const T* const from = table + r * stride;
    const int32_t* const places = classes_of(from, stride);
    for (int64_t k = 0; k < count[r]; ++k) {
      *row++ = r;
      *at++ = places[k];
      *values++ = from[k];
    }
  }
}

// The scores of each row that are above origin + cut, and how many; rows with more than one class in SPARSE get the
// count -1. They become packed rows: the scores themselves at the beginning, their classes from the middle on.
template <typename T>
void pack_above(T* scores, int64_t n, int64_t stride, int64_t classes, const T* tops, const T* origin, const T* cut,
                int64_t* count, int threads) {
  for_rows(scores, n, stride, classes, threads, [&](int64_t r, Row<T>& row) {
    row.scan(tops, r);
    row.gather(origin[r], cut[r]);
    const auto size = static_cast<int64_t>(row.at.size());
    if (size * SPARSE > classes) {
      count[r] = -1;
      return;
    }
    // The score itself and not its distance from the origin: callers subtract a maximum of their own.
    row.values.resize(size);
    for (int64_t k = 0; k < size; ++k) row.found[k] = row.scores[row.at[k]];
    std::copy(row.found.begin(), row.found.end(), row.scores);
    std::copy(row.at.begin(), row.at.end(), reinterpret_cast<int32_t*>(row.scores + row.half));
    count[r] = size;
  });
}

}  // namespace

// C names, one for each precision, which ctypes finds by name: nothing of torch is linked, so that a library works with
// every version of it.
#define EXPORT(T, SUFFIX)                                                                                              \
  NATIVE void add_to_input_##SUFFIX(const T* table, int64_t n, int64_t stride, int64_t classes,                        \
                                    const int64_t* count, const T* vectors, int64_t d, T* grad_input, int threads) {   \
    add_to_input(table, n, stride, classes, count, vectors, d, grad_input, threads);                                   \
  }                                                                                                                    \
  NATIVE void add_to_vectors_##SUFFIX(const T* table, int64_t n, int64_t stride, int64_t classes,                      \
                                              const int64_t* count, const T* input, int64_t d, T* grad_vectors,        \
                                              T* grad_bias, int threads) {                                             \
    add_to_vectors(table, n, stride, classes, count, input, d, grad_vectors, grad_bias, threads);                      \
  }                                                                                                                    \
  NATIVE void move_dense_rows_##SUFFIX(T* table, int64_t n, int64_t stride, const int64_t* count) {                    \
    move_dense_rows(table, n, stride, count);                                                                          \
  }                                                                                                                    \
  NATIVE void list_entries_##SUFFIX(const T* table, int64_t n, int64_t stride, const int64_t* count,                   \
                                            int64_t* row, int64_t* at, T* values) {                                    \
    list_entries(table, n, stride, count, row, at, values);                                                            \
  }                                                                                                                    \
  NATIVE void pack_above_##SUFFIX(T* scores, int64_t n, int64_t stride, int64_t classes, const T* tops,                \
                                          const T* origin, const T* cut, int64_t* count, int threads) {                \
    pack_above(scores, n, stride, classes, tops, origin, cut, count, threads);                                         \
  }

EXPORT(float, float32)
EXPORT(double, float64)
