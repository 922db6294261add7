// Bounds of scores from small integers, for members whose gradient needs the scores above some threshold alone.
//
// A vector v is kept as a scale s and integers q_i with |q_i| <= MOST, v close to s q. With V = v / s for a class
// vector and X = x / t for a query, the product of integers is off by no more than
//
//   |X . V - p . q| <= |X - p| |V| + |p| |V - q|,
//
// by Cauchy and Schwarz. Added to the product of integers this gives an upper bound of the score, s t (p . q + error).
// Rounding is in the bound: the norms are those of floats, divided by rounded scales, scores in float32 are off by up
// to d eps |x| |v|, whoever computes them, and MARGIN times that is added. Nothing saturates, whatever the numbers are.

#pragma once

#include "rows.h"

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

// Classes that are worked on at a time. Their integers, + MOST to make them unsigned, are stored together: four numbers
// of each class in order, then the next four.
constexpr int64_t CLASSES = 64;

#ifdef __AVX512VNNI__
// One instruction adds four products of bytes to an int32.
constexpr int32_t MOST = 127;
#else
// The instruction for products of bytes adds two of them as int16, and saturates without a word. 2 x 126 x 63 = 15,876:
// two of its results can be added before they are widened. With 6 bits it could be eight, for 10 % less time.
constexpr int32_t MOST = 63;
static_assert(2 * (2 * (2 * MOST) * MOST) <= 32767, "sums in 16 bits cannot saturate");
#endif

constexpr int64_t LONGEST = 1024;      // numbers of a vector: products of integers up to here are exact as floats
constexpr float LARGEST = 1e12f;       // of numbers: squares and products of larger ones may not be finite
constexpr float SMALLEST_SCALE = 1e-20f;
constexpr float ROUNDING = 0x1p-22f;   // of a quotient, with room to spare; eps / 2 of float is 2^-24
constexpr float MARGIN = 0x1p-22f;     // times d + 32: four times what the float32 products can be off by

// The bytes of a vector; filter.py has the same number.
inline int64_t padded(int64_t d) { return (d + 7) / 8 * 8; }

// The integers of one vector, its scale, and upper bounds of |v / s| and |v / s - q|; false where its numbers are too
// large for this, or not finite.
struct Measured {
  float scale, norm, error;
};

inline bool quantise(const float* v, int64_t d, int8_t* q, Measured& out) {
  float most = 0, nan = 0;
#pragma omp simd reduction(max : most) reduction(+ : nan)
  for (int64_t i = 0; i < d; ++i) {
    const float size = std::fabs(v[i]);
    most = size > most ? size : most;
    nan += v[i] - v[i];  // 0 for every finite number
  }
  if (!(most <= LARGEST) || nan != 0) return false;
  out.scale = std::max(most / MOST, SMALLEST_SCALE);
  const float inverse = 1 / out.scale;
  constexpr float SHIFT = 0x1.8p23f;  // adding and subtracting it rounds to an integer
  float norm = 0, error = 0;
#pragma omp simd reduction(+ : norm, error)
  for (int64_t i = 0; i < d; ++i) {
    const float y = v[i] * inverse;
    float whole = (y + SHIFT) - SHIFT;
    whole = whole > MOST ? MOST : whole < -MOST ? -MOST : whole;
    norm += y * y;
    error += (y - whole) * (y - whole);
    q[i] = static_cast<int8_t>(whole);
  }
  // The sums of d squares are off by d eps at most.
  const float more = 1 + (d + 32) * MARGIN;
  out.norm = std::sqrt(norm) * more;
  out.error = std::sqrt(error) * more + out.norm * ROUNDING;
  return true;
}

// All class vectors, in groups of CLASSES: what engine/filter.py keeps in tensors for a call.
struct Quantised {
  const uint8_t* codes;  // (groups, padded d / 4, CLASSES, 4)
  const float* scales;   // (groups x CLASSES), 0 in the padding
  const float* norms;    // (groups) the largest |v / s|
  const float* errors;   // (groups) the largest |v / s - q|
  const float* bias;     // (classes) or null
  int64_t classes, d;
  float offset;          // the largest |bias|
  int64_t groups() const { return (classes + CLASSES - 1) / CLASSES; }
};

// out[m, c] = init[m] + sum_i codes[c, i] x[m, i] for some rows of integers and the classes of a group.
#ifdef __AVX512VNNI__
template <int rows>
inline void multiply_integers(const uint8_t* codes, const int8_t* x, int64_t length, const int32_t* init,
                              int32_t* out) {
  __m512i sums[rows][4];
#pragma GCC unroll 8
  for (int m = 0; m < rows; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) sums[m][v] = _mm512_set1_epi32(init[m]);
  for (int64_t k = 0; k < length; k += 4, codes += 4 * CLASSES) {
    __m512i four[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) four[v] = _mm512_loadu_si512(codes + 64 * v);
#pragma GCC unroll 8
    for (int m = 0; m < rows; ++m) {
      int32_t bytes;
      std::memcpy(&bytes, x + m * length + k, 4);
      const __m512i query = _mm512_set1_epi32(bytes);
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) sums[m][v] = _mm512_dpbusd_epi32(sums[m][v], four[v], query);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < rows; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) _mm512_storeu_si512(out + m * CLASSES + 16 * v, sums[m][v]);
}
constexpr int64_t TOGETHER_MOST = 6;
#elif defined(__AVX2__)
#ifdef __AVX512BW__
typedef __m512i Bytes;
inline Bytes read_bytes(const void* from) { return _mm512_loadu_si512(from); }
inline Bytes repeat(int32_t four) { return _mm512_set1_epi32(four); }
inline Bytes add_32(Bytes a, Bytes b) { return _mm512_add_epi32(a, b); }
inline Bytes add_16(Bytes a, Bytes b) { return _mm512_add_epi16(a, b); }
inline Bytes pairs(Bytes a, Bytes b) { return _mm512_maddubs_epi16(a, b); }
inline Bytes widen_pairs(Bytes a) { return _mm512_madd_epi16(a, _mm512_set1_epi16(1)); }
#else
typedef __m256i Bytes;
inline Bytes read_bytes(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
inline Bytes repeat(int32_t four) { return _mm256_set1_epi32(four); }
inline Bytes add_32(Bytes a, Bytes b) { return _mm256_add_epi32(a, b); }
inline Bytes add_16(Bytes a, Bytes b) { return _mm256_add_epi16(a, b); }
inline Bytes pairs(Bytes a, Bytes b) { return _mm256_maddubs_epi16(a, b); }
inline Bytes widen_pairs(Bytes a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
#endif
template <int rows>
inline void multiply_integers(const uint8_t* codes, const int8_t* x, int64_t length, const int32_t* init,
                              int32_t* out) {
  constexpr int64_t wide = sizeof(Bytes) / 4;  // classes of a register
  for (int64_t c = 0; c < CLASSES; c += 2 * wide) {
    Bytes sums[rows][2];
#pragma GCC unroll 8
    for (int m = 0; m < rows; ++m) sums[m][0] = sums[m][1] = repeat(init[m]);
    const uint8_t* from = codes + 4 * c;
    for (int64_t k = 0; k < length; k += 8, from += 8 * CLASSES) {
      Bytes first[2], second[2];
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        first[v] = read_bytes(from + 4 * wide * v);
        second[v] = read_bytes(from + 4 * CLASSES + 4 * wide * v);
      }
#pragma GCC unroll 8
      for (int m = 0; m < rows; ++m) {
        int32_t bytes[2];
        std::memcpy(bytes, x + m * length + k, 8);
        const Bytes one = repeat(bytes[0]), other = repeat(bytes[1]);
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v)
          sums[m][v] = add_32(sums[m][v], widen_pairs(add_16(pairs(first[v], one), pairs(second[v], other))));
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < rows; ++m)
      for (int v = 0; v < 2; ++v) std::memcpy(out + m * CLASSES + c + wide * v, &sums[m][v], sizeof(Bytes));
  }
}
constexpr int64_t TOGETHER_MOST = 4;
#else
template <int rows>
inline void multiply_integers(const uint8_t* codes, const int8_t* x, int64_t length, const int32_t* init,
                              int32_t* out) {
  for (int m = 0; m < rows; ++m)
    for (int64_t c = 0; c < CLASSES; ++c) {
      int32_t sum = init[m];
      for (int64_t k = 0; k < length; ++k)
        sum += codes[(k / 4 * CLASSES + c) * 4 + k % 4] * x[m * length + k];
      out[m * CLASSES + c] = sum;
    }
}
constexpr int64_t TOGETHER_MOST = 4;
#endif

// The same for any number of rows up to TOGETHER_MOST.
inline void multiply_some(int64_t rows, const uint8_t* codes, const int8_t* x, int64_t length, const int32_t* init,
                          int32_t* out) {
  if (rows == 1) return multiply_integers<1>(codes, x, length, init, out);
  if (rows == 2) return multiply_integers<2>(codes, x, length, init, out);
  if (rows == 3) return multiply_integers<3>(codes, x, length, init, out);
  if constexpr (TOGETHER_MOST == 6) {
    if (rows == 5) return multiply_integers<5>(codes, x, length, init, out);
    if (rows == 6) return multiply_integers<6>(codes, x, length, init, out);
  }
  multiply_integers<4>(codes, x, length, init, out);
}

// A bit for each class whose upper bound, sums[c] scales[c] + bias[c] unit, is above the cut. Bounds are written where
// there is one.
inline uint64_t above(const int32_t* sums, const float* scales, const float* bias, float unit, float cut,
                      float* upper) {
#ifdef __AVX512F__
  const __m512 least = _mm512_set1_ps(cut), times = _mm512_set1_ps(unit);
  __m512 bounds[4];
  __mmask16 found[4];
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) {
    const __m512 sum = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums + 16 * v)), scale = _mm512_loadu_ps(scales + 16 * v);
    bounds[v] = bias ? _mm512_fmadd_ps(sum, scale, _mm512_mul_ps(_mm512_loadu_ps(bias + 16 * v), times))
                     : _mm512_mul_ps(sum, scale);
    found[v] = _mm512_cmp_ps_mask(bounds[v], least, _CMP_GT_OQ);
  }
  // Most groups have none: masks are moved to other registers where one has.
  const __mmask16 first = _kor_mask16(found[0], found[1]), second = _kor_mask16(found[2], found[3]);
  if (_kortestz_mask16_u8(first, second)) return 0;
  uint64_t bits = 0;
#pragma GCC unroll 4
  for (int v = 0; v < 4; ++v) {
    _mm512_storeu_ps(upper + 16 * v, bounds[v]);
    bits |= static_cast<uint64_t>(found[v]) << (16 * v);
  }
  return bits;
#elif defined(__AVX2__)
  const __m256 least = _mm256_set1_ps(cut), times = _mm256_set1_ps(unit);
  __m256 any = _mm256_setzero_ps();
#pragma GCC unroll 8
  for (int v = 0; v < 8; ++v) {
    const __m256i whole = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums + 8 * v));
    const __m256 sum = _mm256_cvtepi32_ps(whole), scale = _mm256_loadu_ps(scales + 8 * v);
    const __m256 bound = bias ? _mm256_fmadd_ps(sum, scale, _mm256_mul_ps(_mm256_loadu_ps(bias + 8 * v), times))
                              : _mm256_mul_ps(sum, scale);
    _mm256_storeu_ps(upper + 8 * v, bound);
    any = _mm256_or_ps(any, _mm256_cmp_ps(bound, least, _CMP_GT_OQ));
  }
  if (_mm256_testz_si256(_mm256_castps_si256(any), _mm256_castps_si256(any))) return 0;
  uint64_t bits = 0;
#pragma GCC unroll 8
  for (int v = 0; v < 8; ++v) {
    const int mask = _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(upper + 8 * v), least, _CMP_GT_OQ));
    bits |= static_cast<uint64_t>(static_cast<uint32_t>(mask)) << (8 * v);
  }
  return bits;
#else
  uint64_t bits = 0;
  for (int64_t c = 0; c < CLASSES; ++c) {
    upper[c] = sums[c] * scales[c] + (bias ? bias[c] * unit : 0);
    bits |= static_cast<uint64_t>(upper[c] > cut) << c;
  }
  return bits;
#endif
}

// The classes of a row that have not been ruled out, in the memory of its scores: upper and lower bounds of their
// scores in units of the query's scale, and the classes themselves, ascending. A third of the row is for each of them.
struct Survivors {
  float *upper, *lower;
  int32_t* at;
  int64_t size = 0, next = 0, room = 0;  // `next`: the size at which the cut is raised
  float unit = 0, inverse = 0;           // the scale of the query, and 1 / scale
  float cut = -std::numeric_limits<float>::infinity();  // in this unit
  bool wide = false, many = false;       // more is left than a row may have; more than is worth it for most rows

  void begin(float* row, int64_t stride, float scale) {
    room = stride / 3;
    upper = row, lower = row + room, at = reinterpret_cast<int32_t*>(row + 2 * room);
    size = 0, next = CLASSES, unit = scale, inverse = 1 / scale, wide = false;
    cut = -std::numeric_limits<float>::infinity();
  }

  // Add the classes of a group that have a bit, whose upper bounds are off by no more than off x scale in both ways.
  // May write as many numbers as the group has classes.
  void add(uint64_t found, const float* bounds, float off, const float* scales, int64_t first) {
#ifdef __AVX512F__
    const __m512i steps = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 twice = _mm512_set1_ps(2 * off);
    float *const high_to = upper, *const low_to = lower;
    int32_t* const at_to = at;
    int64_t last = size;
    for (int64_t c = 0; c < CLASSES; c += 16) {
      const auto chosen = static_cast<__mmask16>(found >> c);
      if (!chosen) continue;
      const __m512 high = _mm512_loadu_ps(bounds + c);
      const __m512 low = _mm512_fnmadd_ps(twice, _mm512_loadu_ps(scales + c), high);
      const __m512i classes = _mm512_add_epi32(steps, _mm512_set1_epi32(static_cast<int32_t>(first + c)));
      _mm512_storeu_ps(high_to + last, _mm512_maskz_compress_ps(chosen, high));
      _mm512_storeu_ps(low_to + last, _mm512_maskz_compress_ps(chosen, low));
      _mm512_storeu_si512(at_to + last, _mm512_maskz_compress_epi32(chosen, classes));
      last += __builtin_popcount(chosen);
    }
    size = last;
#else
    for (; found; found &= found - 1) {
      const int64_t c = __builtin_ctzll(found);
      upper[size] = bounds[c], lower[size] = bounds[c] - 2 * off * scales[c];
      at[size++] = static_cast<int32_t>(first + c);
    }
#endif
  }

  // Raise the cut to a number in the unit of scores, and leave out what is not above it.
  void raise(float to) {
    const float raised = to / unit;
    if (!(raised > cut)) return;
    cut = raised;
    int64_t kept = 0, k = 0;
#ifdef __AVX512F__
    const __m512 least = _mm512_set1_ps(cut);
    for (; k + 16 <= size; k += 16) {
      const __m512 high = _mm512_loadu_ps(upper + k), low = _mm512_loadu_ps(lower + k);
      const __m512i classes = _mm512_loadu_si512(at + k);
      const __mmask16 chosen = _mm512_cmp_ps_mask(high, least, _CMP_GT_OQ);
      _mm512_storeu_ps(upper + kept, _mm512_maskz_compress_ps(chosen, high));
      _mm512_storeu_ps(lower + kept, _mm512_maskz_compress_ps(chosen, low));
      _mm512_storeu_si512(at + kept, _mm512_maskz_compress_epi32(chosen, classes));
      kept += __builtin_popcount(chosen);
    }
#endif
    for (; k < size; ++k) {
      upper[kept] = upper[k], lower[kept] = lower[k], at[kept] = at[k];
      kept += upper[k] > cut;
    }
    size = kept;
  }
};

// x . w of classes at[0 .. count), and their bias, by four at a time.
inline void exact_scores(const float* x, int64_t d, const float* vectors, const float* bias, const int32_t* at,
                         int64_t count, float* out) {
  typedef float Sixteen __attribute__((vector_size(64), aligned(4), may_alias));
  typedef float Eight __attribute__((vector_size(32)));
  typedef float Four __attribute__((vector_size(16)));
  for (int64_t k = 0; k < count; ++k) {
    const float* const w = vectors + static_cast<int64_t>(at[k]) * d;
    if (k + 8 < count) {
      const float* const later = vectors + static_cast<int64_t>(at[k + 8]) * d;
      for (int64_t i = 0; i < d; i += 16) __builtin_prefetch(later + i);
    }
    Sixteen sums = {};
    int64_t i = 0;
    for (; i + 16 <= d; i += 16)
      sums += *reinterpret_cast<const Sixteen*>(x + i) * *reinterpret_cast<const Sixteen*>(w + i);
    Eight halves[2];
    std::memcpy(halves, &sums, 64);
    const Eight half = halves[0] + halves[1];
    Four quarters[2];
    std::memcpy(quarters, &half, 32);
    const Four quarter = quarters[0] + quarters[1];
    float sum = (quarter[0] + quarter[1]) + (quarter[2] + quarter[3]);
    for (; i < d; ++i) sum += x[i] * w[i];
    out[k] = bias ? sum + bias[at[k]] : sum;
  }
}

// The queries of one thread, as integers, and what is left of their classes.
struct Queries {
  int64_t rows, length;
  Buffer<int8_t> codes;
  Buffer<float> norms, errors;  // of each query: what the bound of an error is made of
  Buffer<int32_t> shift;        // what makes up for the MOST that is in the codes of classes
  Buffer<int32_t> off, init;    // for a group of classes: the bound, and what its sums begin with
  Buffer<Survivors> left;

  Queries(const float* input, int64_t rows, int64_t d, float* table, int64_t stride)
      : rows(rows), length(padded(d)), codes(rows * length), norms(rows), errors(rows), shift(rows), off(rows),
        init(rows), left(rows) {
    for (int64_t r = 0; r < rows; ++r) {
      int8_t* const q = codes.data() + r * length;
      std::fill(q, q + length, int8_t(0));
      Measured found{1, 0, 0};
      const bool usable = quantise(input + r * d, d, q, found);
      // |X - p| + what rounding can change in all of this, for |V|; |p| for |V - q|.
      errors[r] = (found.error + found.norm * ((length + 32) * MARGIN)) * 1.0001f;
      norms[r] = (found.norm + found.error) * 1.0001f;
      int32_t sum = 0;
      for (int64_t i = 0; i < d; ++i) sum += q[i];
      shift[r] = -MOST * sum;
      left[r].begin(table + r * stride, stride, found.scale);
      left[r].wide = !usable;
    }
  }

  // The bounds of what the products of integers with the classes of a group are off by.
  void begin_group(float norm, float error) {
#pragma omp simd
    for (int64_t r = 0; r < rows; ++r) {
      off[r] = static_cast<int32_t>(errors[r] * norm + norms[r] * error) + 2;
      init[r] = shift[r] + off[r];
    }
  }
};

// Leave in the rows of `table` what is needed of some queries: from the middle of each row on the classes that are
// left, ascending, and in `count` how many; or -1 where they are more than `most`, and in all rows as soon as one in four has
// more than `few`. `bound(lower, size,
// before, offset)` is a lower bound of the row's threshold from `size` lower bounds of scores, and from the one before.
template <typename Bound>
void rule_out(const Quantised& all, const float* input, int64_t rows, float* table, int64_t stride, int64_t few,
              int64_t most, int64_t* count, Bound bound) {
  const int64_t d = all.d;
  Queries queries(input, rows, d, table, stride);
  Buffer<float> scaled(stride / 3);
  int64_t open = rows, with_many = 0;
  const auto raise = [&](Survivors& row) {
    const float *const lower = row.lower, unit = row.unit;
    float* const to = scaled.data();
#pragma omp simd
    for (int64_t k = 0; k < row.size; ++k) to[k] = lower[k] * unit;
    row.raise(bound(scaled.data(), row.size, row.cut * row.unit, all.offset));
    row.next = std::min(row.size + std::max(CLASSES, row.size / 2), row.room - CLASSES);
    row.wide = row.size > most || row.size >= row.next || row.size == 0;
    open -= row.wide;
    with_many += !row.many && row.size > few;
    row.many |= row.size > few;
  };
  int32_t sums[TOGETHER_MOST * CLASSES];
  float upper[CLASSES];
  for (int64_t g = 0; g < all.groups() && open > 0 && 4 * with_many <= rows; ++g) {
    const uint8_t* const codes = all.codes + g * CLASSES * queries.length;
    const int64_t first = g * CLASSES, size = std::min(CLASSES, all.classes - first);
    // The last group may have fewer classes: its bias is read from where the table does not end.
    const uint64_t valid = size == CLASSES ? ~uint64_t(0) : (uint64_t(1) << size) - 1;
    float last_bias[CLASSES] = {};
    if (all.bias && size < CLASSES) std::copy_n(all.bias + first, size, last_bias);
    const float* const bias = !all.bias ? nullptr : size < CLASSES ? last_bias : all.bias + first;
    queries.begin_group(all.norms[g], all.errors[g]);
    const uint8_t* next = codes + CLASSES * queries.length;
    for (int64_t r = 0; r < rows; r += TOGETHER_MOST) {
      const int64_t some = std::min(TOGETHER_MOST, rows - r);
      bool needed = false;
      for (int64_t m = 0; m < some; ++m) needed |= !queries.left[r + m].wide;
      // The next group comes from memory a few lines at a time.
      const int64_t share = CLASSES * queries.length * some / rows + 1;
      for (int64_t k = 0; k < share; k += 64) __builtin_prefetch(next + k);
      next += share;
      if (!needed) continue;
      multiply_some(some, codes, queries.codes.data() + r * queries.length, queries.length, queries.init.data() + r,
                    sums);
      for (int64_t m = 0; m < some; ++m) {
        Survivors& row = queries.left[r + m];
        const uint64_t found =
            valid & above(sums + m * CLASSES, all.scales + first, bias, row.inverse, row.cut, upper);
        if (!found || row.wide) continue;
        row.add(found, upper, static_cast<float>(queries.off[r + m]), all.scales + first, first);
        if (row.size >= row.next) raise(row);
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    Survivors& row = queries.left[r];
    if (4 * with_many > rows) row.wide = true;
    if (!row.wide) raise(row);
    count[r] = row.wide ? -1 : row.size;
    if (!row.wide) std::memmove(table + r * stride + stride / 2, row.at, row.size * sizeof(int32_t));
  }
}

// The scores of the classes that are left, packed as rows.h says. A thread has some classes at a time for all rows, so
// that their vectors are read from memory once.
inline void score_left(const Quantised& all, const float* vectors, const float* input, int64_t n, float* table,
                       int64_t stride, const int64_t* count, int threads) {
  const int64_t d = all.d, most = std::max<int64_t>(64, all.classes / 8);
  const int64_t range = std::clamp<int64_t>((int64_t(1) << 16) / d, 64, most);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t first = 0; first < all.classes; first += range)
    for (int64_t r = 0; r < n; ++r) {
      if (count[r] <= 0) continue;
      float* const row = table + r * stride;
      const int32_t* const at = reinterpret_cast<const int32_t*>(row + stride / 2);
      const int32_t* const from = std::lower_bound(at, at + count[r], static_cast<int32_t>(first));
      const int32_t* to = from;
      while (to < at + count[r] && *to < first + range) ++to;
      exact_scores(input + r * d, d, vectors, all.bias, from, to - from, row + (from - at));
    }
}

}  // namespace
