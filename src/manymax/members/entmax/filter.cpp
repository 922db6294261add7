// Which classes of a row can be in the support of entmax, before their scores are known; see engine/quantised.h.
//
// Leaving classes out, or lowering scores, can only lower the threshold: that of lower bounds of some scores is below
// the one of the row, and a class whose upper bound is not above it has p = 0.

#include "levels.h"
#include "quantised.h"

namespace {

constexpr float ROUNDED = 0x1p-19f;  // of the numbers that a cut is made of: 16 times what rounding can change

// A cut below the threshold of a row, from lower bounds of the scores of some of its classes and from the cut before.
template <Kind K>
float cut_from(const Entmax<K>& entmax, const float* lower, int64_t n, float before, float offset) {
  float top = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : top)
  for (int64_t k = 0; k < n; ++k) top = lower[k] > top ? lower[k] : top;
  if (!std::isfinite(top)) return before;
  double level = std::min(entmax.highest(), entmax.level_of_cut(before - top));
  for (int step = 0; step < 12; ++step) {
    // Newton's steps stay above the solution.
    const Sums f = entmax.template sums<float>(lower, n, top, level);
    if (!(f.slope > 0 && f.total > 0)) break;
    const double decrease = entmax.step(f, 1, false);
    level -= decrease;
    if (std::abs(decrease) <= 1e-3 * entmax.unit(level)) break;
  }
  const auto below = static_cast<float>(entmax.cut(std::min(entmax.highest(), level)));
  return top + below - ROUNDED * (std::fabs(top) + std::fabs(below) + offset);
}

// Rows with the scores that are left of them, packed, or -1 in `count` where they are too many.
void all_candidates(const Quantised& all, const float* vectors, const float* input, int64_t n, float* table,
                    int64_t stride, int64_t few, int64_t most, int64_t* count, double alpha, int threads) {
  // Rows of a thread at a time: the integers of all classes are read once for all of them.
  const int64_t share = (n + 2 * threads - 1) / (2 * threads);
  const int64_t rows = std::min<int64_t>(48, (share + TOGETHER_MOST - 1) / TOGETHER_MOST * TOGETHER_MOST);
  by_kind(alpha, [&](const auto& entmax) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t r = 0; r < n; r += rows)
      rule_out(all, input + r * all.d, std::min(rows, n - r), table + r * stride, stride, few, most, count + r,
               [&](const float* lower, int64_t size, float before, float offset) {
                 return cut_from(entmax, lower, size, before, offset);
               });
  });
  score_left(all, vectors, input, n, table, stride, count, threads);
}

}  // namespace

NATIVE void entmax_candidates_float32(const uint8_t* codes, const float* scales, const float* norms,
                                      const float* errors, const float* vectors, const float* bias,
                                      const double* offset, int64_t classes, int64_t d, const float* input, int64_t n,
                                      float* table, int64_t stride, int64_t few, int64_t most, int64_t* count,
                                      const double* alpha, int threads) {
  const Quantised all{codes, scales, norms, errors, bias, classes, d, static_cast<float>(*offset)};
  all_candidates(all, vectors, input, n, table, stride, few, most, count, *alpha, threads);
}
