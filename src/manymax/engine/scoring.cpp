// What happens to the products of queries and class vectors before they are scores, and to the gradient of the scores
// before it is one of the products: factors of the classes, the bias, a soft cap, classes that are left out. scoring.py
// and block_loop.py have the same in torch, where it takes a pass over the block for each of them.

#include "rows.h"
#include "scoring.h"

namespace {

// The largest of some scores, or +inf if one is nan.
template <typename T>
INLINE T top_of(const T* s, int64_t n) {
  T most = -std::numeric_limits<T>::infinity();
  int32_t nan = 0;
#pragma omp simd reduction(max : most) reduction(| : nan)
  for (int64_t c = 0; c < n; ++c) {
    most = s[c] > most ? s[c] : most;
    nan |= s[c] != s[c];
  }
  return nan ? std::numeric_limits<T>::infinity() : most;
}

// Scores in place of products: cap tanh((scale_c z_c + bias_c) / cap), with the maxima of their groups, +inf where one
// is nan. What is null is left out; a cap of 0 is none. A masked class, whose bias is -inf, stays masked.
template <typename T>
void finish_scores(T* scores, int64_t n, int64_t stride, int64_t classes, const T* scale, const T* bias, double cap,
                   T* tops, int threads) {
  const int64_t groups = (classes + GROUP - 1) / GROUP;
  const T height = static_cast<T>(cap), inverse = static_cast<T>(cap > 0 ? 1 / cap : 0);
  for_rows(scores, n, stride, classes, threads, [&](int64_t r, Row<T>& row) {
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = g * GROUP, size = std::min(GROUP, classes - first);
      T* const s = row.scores + first;
      if (scale) {
#pragma omp simd
        for (int64_t c = 0; c < size; ++c) s[c] *= scale[first + c];
      }
      if (bias) {
#pragma omp simd
        for (int64_t c = 0; c < size; ++c) s[c] += bias[first + c];
      }
      if (cap > 0) cap_scores(s, size, height, inverse);
      tops[r * groups + g] = top_of(s, size);
    }
  });
}

// The gradient of the products in place of that of the scores: g_c scale_c slope_c. Rows are dense, or packed where
// `count` is not -1; `count` may be null. Row r of the gradient is row places[r] of the capped scores, or row r. Dense
// rows are left as they are if only packed ones are asked for.
template <typename T>
void chain_gradient(T* table, int64_t n, int64_t stride, int64_t classes, const int64_t* count, const int64_t* places,
                    const T* scale, const T* capped, double cap, bool packed_alone, int threads) {
  const T inverse = static_cast<T>(cap > 0 ? 1 / cap : 0);
  for_rows(table, n, stride, classes, threads, [&](int64_t r, Row<T>& row) {
    T* const g = row.scores;
    const T* const from = capped ? capped + (places ? places[r] : r) * stride : nullptr;
    if (count && count[r] >= 0) {
      const int32_t* const at = reinterpret_cast<const int32_t*>(g + row.half);
      for (int64_t k = 0; k < count[r]; ++k) {
        if (scale) g[k] *= scale[at[k]];
        if (from) g[k] *= slope_of(from[at[k]], inverse);
      }
      return;
    }
    if (packed_alone) return;
    if (from) times_slope(g, from, classes, inverse);
    if (scale) {
#pragma omp simd
      for (int64_t c = 0; c < classes; ++c) g[c] *= scale[c];
    }
  });
}

// Mask the classes ids[r, e] of each row r, -inf, and find the maxima of the groups that they are in anew. A negative id
// is none, and `tops` may be null.
template <typename T>
void leave_out(T* scores, int64_t n, int64_t stride, int64_t classes, const int64_t* ids, int64_t count, T* tops,
               int threads) {
  const int64_t groups = (classes + GROUP - 1) / GROUP;
  constexpr T lowest = -std::numeric_limits<T>::infinity();
#pragma omp parallel num_threads(threads)
  {
    std::vector<uint8_t> changed(groups);
#pragma omp for schedule(static)
    for (int64_t r = 0; r < n; ++r) {
      T* const s = scores + r * stride;
      std::fill(changed.begin(), changed.end(), 0);
      for (int64_t e = 0; e < count; ++e) {
        const int64_t c = ids[r * count + e];
        if (c < 0) continue;
        s[c] = lowest;
        changed[c / GROUP] = 1;
      }
      if (!tops) continue;
      for (int64_t g = 0; g < groups; ++g) {
        if (!changed[g]) continue;
        tops[r * groups + g] = top_of(s + g * GROUP, std::min(GROUP, classes - g * GROUP));
      }
    }
  }
}

}  // namespace

// C functions for ctypes, one per precision; arguments as engine/native.py passes them.
#define EXPORT(T, SUFFIX)                                                                                              \
  NATIVE void finish_scores_##SUFFIX(T* scores, int64_t n, int64_t stride, int64_t classes, const T* scale,            \
                                     const T* bias, const double* cap, T* tops, int threads) {                         \
    finish_scores(scores, n, stride, classes, scale, bias, *cap, tops, threads);                                       \
  }                                                                                                                    \
  NATIVE void leave_out_##SUFFIX(T* scores, int64_t n, int64_t stride, int64_t classes, const int64_t* ids,             \
                                 int64_t count, T* tops, int threads) {                                                \
    leave_out(scores, n, stride, classes, ids, count, tops, threads);                                                  \
  }                                                                                                                    \
  NATIVE void chain_gradient_##SUFFIX(T* table, int64_t n, int64_t stride, int64_t classes, const int64_t* count,      \
                                      const int64_t* places, const T* scale, const T* capped, const double* cap,       \
                                      int64_t packed_alone, int threads) {                                             \
    chain_gradient(table, n, stride, classes, count, places, scale, capped, *cap, packed_alone != 0, threads);         \
  }

EXPORT(float, float32)
EXPORT(double, float64)
