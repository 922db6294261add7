// The integers of all class vectors, once for each call of a head. See quantised.h.

#include "quantised.h"

namespace {

// Fill `codes` (groups, padded d / 4, 64, 4), `scales` (groups x 64), `norms` and `errors` (groups); `found` is the
// largest |bias|, or -1 where a number is too large for this, or not finite. A bias of -inf masks its class.
void quantise_classes(const float* vectors, int64_t classes, int64_t d, const float* bias, uint8_t* codes,
                      float* scales, float* norms, float* errors, double* found, int threads) {
  const int64_t length = padded(d), groups = (classes + CLASSES - 1) / CLASSES;
  float offset = 0;
  bool usable = d <= LONGEST;
  if (bias) {
    for (int64_t c = 0; c < classes; ++c) {
      if (bias[c] == -std::numeric_limits<float>::infinity()) continue;
      usable &= std::fabs(bias[c]) <= LARGEST;  // false for nan
      offset = std::max(offset, std::fabs(bias[c]));
    }
  }
#pragma omp parallel for num_threads(threads) schedule(static) reduction(&& : usable)
  for (int64_t g = 0; g < groups; ++g) {
    if (!usable) continue;
    uint8_t* const group = codes + g * CLASSES * length;
    std::vector<int8_t> q(length, 0);
    norms[g] = errors[g] = 0;
    for (int64_t k = 0; k < CLASSES; ++k) {
      const int64_t c = g * CLASSES + k;
      Measured found_here{0, 0, 0};
      if (c >= classes) std::fill(q.begin(), q.end(), int8_t(0));
      else usable = quantise(vectors + c * d, d, q.data(), found_here) && usable;
      scales[c] = found_here.scale;
      norms[g] = std::max(norms[g], found_here.norm);
      errors[g] = std::max(errors[g], found_here.error);
      for (int64_t i = 0; i < length; i += 4) {
        uint8_t four[4];
        for (int64_t j = 0; j < 4; ++j) four[j] = static_cast<uint8_t>(q[i + j] + MOST);
        std::memcpy(group + i * CLASSES + 4 * k, four, 4);
      }
    }
  }
  *found = usable ? offset : -1;
}

// Scores of listed classes (n, count), as they are computed for those that are left.
void listed_scores(const float* input, int64_t n, int64_t d, const float* vectors, const float* bias,
                   const int64_t* ids, int64_t count, float* out, int threads) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<int32_t> at(count);
#pragma omp for schedule(static)
    for (int64_t r = 0; r < n; ++r) {
      std::copy_n(ids + r * count, count, at.begin());
      exact_scores(input + r * d, d, vectors, bias, at.data(), count, out + r * count);
    }
  }
}

}  // namespace

// C functions for ctypes. Only scores in float32 are worth it: half of the time of others is not in the product.
NATIVE void quantise_classes_float32(const float* vectors, int64_t classes, int64_t d, const float* bias,
                                     uint8_t* codes, float* scales, float* norms, float* errors, double* found,
                                     int threads) {
  quantise_classes(vectors, classes, d, bias, codes, scales, norms, errors, found, threads);
}
NATIVE void listed_scores_float32(const float* input, int64_t n, int64_t d, const float* vectors, const float* bias,
                                  const int64_t* ids, int64_t count, float* out, int threads) {
  listed_scores(input, n, d, vectors, bias, ids, count, out, threads);
}
