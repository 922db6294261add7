// Adam on the rows of a table that a gradient touches. In torch it takes about fifteen passes over copies of these
// rows; here each row of the parameter and of its two moments is read and written once.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "export.h"

namespace {

constexpr int64_t LINE = 64;  // bytes that come from memory at once
constexpr int64_t AHEAD = 8;  // rows that are asked for before they are needed: three tables, all over memory

template <typename T>
inline void prefetch(const T* row, int64_t d) {
  const char* bytes = reinterpret_cast<const char*>(row);
  for (int64_t at = 0; at < d * static_cast<int64_t>(sizeof(T)); at += LINE) __builtin_prefetch(bytes + at, 1);
}

// With m and v the moments of a row: m += (1 - beta1) (g - m), v += (1 - beta2) (g^2 - v), and the row gets
// - step_size m / (sqrt(v) + eps). These are the formulas of torch.optim.SparseAdam, in the same order.
template <typename T>
inline void update(T* __restrict row, T* __restrict m, T* __restrict v, const T* __restrict grad, int64_t d, T rate1,
                   T rate2, T eps, T step_size) {
#pragma omp simd
  for (int64_t i = 0; i < d; ++i) {
    const T first = m[i] + (grad[i] - m[i]) * rate1;
    const T second = v[i] + (grad[i] * grad[i] - v[i]) * rate2;
    m[i] = first;
    v[i] = second;
    row[i] -= step_size * (first / (std::sqrt(second) + eps));
  }
}

// ids are distinct, so that no two threads have the same row. `numbers`: 1 - beta1, 1 - beta2, eps, step size.
template <typename T>
void row_adam(T* param, T* exp_avg, T* exp_avg_sq, int64_t d, const int64_t* ids, const T* grad, int64_t count,
              const double* numbers, int threads) {
  constexpr int64_t step = 64;  // rows that a thread takes at a time
  const T rate1 = static_cast<T>(numbers[0]), rate2 = static_cast<T>(numbers[1]);
  const T eps = static_cast<T>(numbers[2]), step_size = static_cast<T>(numbers[3]);
  const auto ask = [&](int64_t i) {
    for (const T* table : {param, exp_avg, exp_avg_sq}) prefetch(table + ids[i] * d, d);
  };
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t begin = 0; begin < count; begin += step) {
    const int64_t end = std::min(count, begin + step);
    for (int64_t i = begin; i < std::min(end, begin + AHEAD); ++i) ask(i);
    for (int64_t i = begin; i < end; ++i) {
      if (i + AHEAD < end) ask(i + AHEAD);
      const int64_t at = ids[i] * d;
      update(param + at, exp_avg + at, exp_avg_sq + at, grad + i * d, d, rate1, rate2, eps, step_size);
    }
  }
}

}  // namespace

#define EXPORT(T, SUFFIX)                                                                                              \
  NATIVE void row_adam_##SUFFIX(T* param, T* exp_avg, T* exp_avg_sq, int64_t d, const int64_t* ids, const T* grad,     \
                                int64_t count, const double* numbers, int threads) {                                   \
    row_adam(param, exp_avg, exp_avg_sq, d, ids, grad, count, numbers, threads);                                       \
  }

EXPORT(float, float32)
EXPORT(double, float64)
