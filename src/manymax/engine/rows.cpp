// Rows of scores to rows of the gradient, for the sparse members: what heads/kernels.py does in a dozen passes over a
// block of scores is done here row by row, while the row is in cache. Formulas and names are those of ops/simplex.py.
//
// A row whose gradient has few entries (one class in 32 at most) is replaced by them: `count` values, then,
// from the middle of the row on, their classes as int32. Any other row is replaced by its gradient, and count is -1.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

constexpr int64_t SPARSE = 48;  // a gradient with one class in so many, or fewer, is kept as entries
constexpr int64_t GROUP = 16;   // classes of which one is looked at for a start
constexpr int64_t PIECE = 256;  // classes that are summed in the precision of the scores before they go into a double
constexpr int64_t PASSES = 32;  // positives of a row; for more, a search for the place of each score costs less

template <typename T>
struct Batch {
  T* scores;             // (n, stride)
  int64_t n, stride, classes;
  const int64_t* ids;    // (n, positives)
  const T* weights;      // (n, positives); 0 where there is no positive
  int64_t positives;
  const T* total;        // (n,) sum of the weights
  const T* coefficient;  // (n,) factor of the gradient, or null: none is wanted
  T* maximum;            // (n,) out: nan where a score is
  double* value;         // (n,) out: Omega*(s) - max s, or the loss of rankmax
  int64_t* count;        // (n,) out
};

template <typename T>
struct Row {
  T* scores;
  int64_t classes, half;  // classes, and where the classes of the entries begin
  std::vector<T> found;
  std::vector<int32_t> at, places;  // of what was found: its class, and where it falls

  // The scores above reference + cut; the difference comes first, because the sum would be rounded to the reference.
  int64_t above(T reference, T cut) const {
    const T* s = scores;
    int64_t total = 0;
    for (int64_t start = 0, n = classes; start < n; start += PIECE) {
      const int64_t end = std::min(n, start + PIECE);
      int32_t some = 0;
#pragma omp simd reduction(+ : some)
      for (int64_t c = start; c < end; ++c) some += s[c] - reference > cut;
      total += some;
    }
    return total;
  }

  void gather(T reference, T cut) {
    const T* s = scores;
    found.clear();
    at.clear();
    for (int64_t start = 0, n = classes; start < n; start += 64) {
      const int64_t end = std::min(n, start + 64);
      int32_t some = 0;
#pragma omp simd reduction(+ : some)
      for (int64_t c = start; c < end; ++c) some += s[c] - reference > cut;
      if (some == 0) continue;
      for (int64_t c = start; c < end; ++c)
        if (s[c] - reference > cut) {
          found.push_back(s[c] - reference);
          at.push_back(static_cast<int32_t>(c));
        }
    }
  }

  // Keep values[k] at classes at[k]; false if they are too many.
  bool keep(const std::vector<double>& values, int64_t* count) {
    const int64_t n = static_cast<int64_t>(values.size());
    if ((n - std::count(values.begin(), values.end(), 0.0)) * SPARSE > classes) return false;
    int32_t* places = reinterpret_cast<int32_t*>(scores + half);
    int64_t kept = 0;
    for (int64_t k = 0; k < n; ++k) {
      if (values[k] == 0) continue;
      scores[kept] = static_cast<T>(values[k]);
      places[kept++] = at[k];
    }
    *count = kept;
    return true;
  }
};

template <typename T>
T maximum(const T* s, int64_t n) {
  T top = -std::numeric_limits<T>::infinity();
  int nan = 0;
#pragma omp simd reduction(max : top) reduction(| : nan)
  for (int64_t c = 0; c < n; ++c) {
    top = s[c] > top ? s[c] : top;
    nan |= s[c] != s[c];
  }
  return nan ? std::numeric_limits<T>::quiet_NaN() : top;
}

struct Sums {
  double total = 0, slope = 0;  // F = sum p and A = sum p^(1 - beta)
  int64_t support = 0;
};

// At level w, of the scores s - reference; U is the precision within a piece. ORDER is 2 for sparsemax, 1 for
// entmax-1.5: p = u^(1/beta) with u = max(0, w + beta d).
template <int ORDER, typename U, typename T>
Sums sums(const T* s, int64_t n, T reference, double w) {
  Sums out;
  const U level = static_cast<U>(w), beta = static_cast<U>(ORDER == 2 ? 1.0 : 0.5);
  for (int64_t start = 0; start < n; start += PIECE) {
    const int64_t end = std::min(n, start + PIECE);
    U first = 0, second = 0;
    int32_t inside = 0;
#pragma omp simd reduction(+ : first, second, inside)
    for (int64_t c = start; c < end; ++c) {
      const U u0 = level + beta * static_cast<U>(s[c] - reference);
      const U u = u0 > 0 ? u0 : 0;
      first += u;
      second += u * u;
      inside += u0 > 0;
    }
    out.total += ORDER == 2 ? first : second;
    out.slope += ORDER == 2 ? inside : first;
    out.support += inside;
  }
  return out;
}

// One Newton step on F^beta = mass^beta; it ends above the root.
template <int ORDER>
double step(const Sums& f, double mass = 1) {
  return (f.total - (ORDER == 2 ? mass : std::sqrt(mass * f.total))) / f.slope;
}

// A level to begin at, from every 16th class; within what p_top can be, from 1/C to 1.
template <int ORDER, typename T>
double start(Row<T>& row, T top) {
  row.found.clear();
  for (int64_t c = 0; c < row.classes; c += GROUP) row.found.push_back(row.scores[c] - top);
  const auto n = static_cast<int64_t>(row.found.size());
  const double mass = static_cast<double>(n) / row.classes, low = std::pow(1.0 / row.classes, ORDER == 2 ? 1 : 0.5);
  double w = 1;
  for (int k = 0; k < 60; ++k) {
    const Sums f = sums<ORDER, T>(row.found.data(), n, T(0), w);
    if (!(f.slope > 0)) return low;
    const double by = step<ORDER>(f, mass);
    w -= by;
    if (std::abs(by) <= 1e-3 * w) break;
  }
  return std::min(1.0, std::max(low, w));
}

template <int ORDER, typename T>
void entmax_row(const Batch<T>& b, int64_t r, Row<T>& row, std::vector<double>& values) {
  const double beta = ORDER == 2 ? 1.0 : 0.5, alpha = 1 + beta;
  T* const s = row.scores;
  const int64_t n = row.classes;
  const T top = b.maximum[r] = maximum(s, n);
  b.value[r] = 0;
  b.count[r] = 0;
  if (!std::isfinite(top)) return;
  double w = 1;
  int64_t support = row.above(top, static_cast<T>(-1 / beta));
  if (support * SPARSE > n) w = start<ORDER>(row, top);
  // over the whole row, as long as much of it may be in the support; a step of entmax-1.5 leaves an error of the order
  // of its square, one of sparsemax more if a class drops out
  const double eps = std::numeric_limits<T>::epsilon(), tolerance = ORDER == 2 ? 8 * eps : std::pow(eps, 0.45);
  for (int k = 0; k < 60 && support * SPARSE > n; ++k) {
    const Sums f = sums<ORDER, T>(s, n, top, w);
    const double by = step<ORDER>(f);
    w -= by;
    support = f.support;
    if (std::abs(by) <= tolerance * w) break;
  }
  const bool few = support * SPARSE <= n;
  double mean = 0;
  if (few) {  // over what is left of it, in double
    // w is above the root but for rounding: a little more does no harm
    row.gather(top, static_cast<T>(-w * (1 + 1e-5) / beta));
    const int64_t size = static_cast<int64_t>(row.found.size());
    for (int k = 0; k < 60; ++k) {
      const double by = step<ORDER>(sums<ORDER, double>(row.found.data(), size, T(0), w));
      w -= by;
      if (std::abs(by) <= 4e-16 * w) break;
    }
    values.assign(size, 0);
    for (int64_t k = 0; k < size; ++k) {
      const double u = std::max(0.0, w + beta * row.found[k]);
      values[k] = ORDER == 2 ? u : u * u;
      mean += u * values[k];
    }
  } else {
    const T level = static_cast<T>(w), half = static_cast<T>(beta);
    const T scale = b.coefficient ? b.coefficient[r] * b.total[r] : T(1);
    for (int64_t start = 0; start < n; start += PIECE) {
      const int64_t end = std::min(n, start + PIECE);
      T part = 0;
#pragma omp simd reduction(+ : part)
      for (int64_t c = start; c < end; ++c) {
        const T u0 = level + half * (s[c] - top), u = u0 > 0 ? u0 : 0, p = ORDER == 2 ? u : u * u;
        part += u * p;
        s[c] = scale * p;
      }
      mean += part;
    }
  }
  b.value[r] = (mean - 1) / alpha - (w - 1) / beta;
  if (!b.coefficient) return;
  const double factor = b.coefficient[r], total = b.total[r];
  const int64_t* ids = b.ids + r * b.positives;
  const T* weights = b.weights + r * b.positives;
  if (few) {
    for (double& p : values) p *= total;
    const auto end = static_cast<int64_t>(row.at.size());
    for (int64_t j = 0; j < b.positives; ++j) {
      if (weights[j] == 0) continue;
      const auto first = row.at.begin(), last = first + end;
      const auto place = std::lower_bound(first, last, static_cast<int32_t>(ids[j]));
      if (place != last && *place == ids[j]) {
        values[place - first] -= weights[j];
      } else {
        row.at.push_back(static_cast<int32_t>(ids[j]));
        values.push_back(-weights[j]);
      }
    }
    for (double& g : values) g *= factor;
    if (row.keep(values, b.count + r)) return;
    std::fill(s, s + n, T(0));
    for (size_t k = 0; k < values.size(); ++k) s[row.at[k]] += static_cast<T>(values[k]);
  } else {
    for (int64_t j = 0; j < b.positives; ++j) s[ids[j]] -= static_cast<T>(factor * weights[j]);
  }
  b.count[r] = -1;
}

// The scores s - lowest of a piece among sorted cuts, which are filled up with +inf to one less than a power of two: how
// many of them are below each score. Without branches, which no processor would foresee.
template <typename T>
void search(const std::vector<double>& cuts, const T* s, T lowest, int64_t n, int32_t* place) {
  std::fill(place, place + n, 0);
  const double* const first = cuts.data();
  for (auto step = static_cast<int32_t>(cuts.size() + 1) / 2; step > 0; step /= 2) {
#pragma omp simd
    for (int64_t c = 0; c < n; ++c)
      place[c] += first[place[c] + step - 1] < static_cast<double>(s[c] - lowest) ? step : 0;
  }
}

// The labels are sorted, lowest first; +inf stands for no positive. Above the cut s_p - 1 of positive p are sizes[p]
// classes, at distances from it whose sum is sums[p].
template <typename T>
void rankmax_row(const Batch<T>& b, const T* labels, int64_t r, Row<T>& row, std::vector<double>& values) {
  T* const s = row.scores;
  const int64_t classes = row.classes;
  b.maximum[r] = maximum(s, classes);
  b.value[r] = 0;
  b.count[r] = 0;
  int64_t n = 0;
  while (n < b.positives && labels[n] < std::numeric_limits<T>::infinity()) ++n;
  if (!std::isfinite(b.maximum[r]) || n == 0) return;
  const T lowest = labels[0];
  const bool few = (row.above(lowest, T(-1)) + n) * SPARSE <= classes, passes = !few && n <= PASSES;
  std::vector<double> sizes(n + 1, 0), sums(n + 1, 0), shares(n + 1, 0), cuts;
  int32_t place[PIECE];
  if (passes) {
    for (int64_t start = 0; start < classes; start += PIECE) {
      const int64_t end = std::min(classes, start + PIECE);
      for (int64_t p = 0; p < n; ++p) {
        const T label = labels[p];
        T sum = 0;
        int32_t size = 0;
#pragma omp simd reduction(+ : sum, size)
        for (int64_t c = start; c < end; ++c) {
          const T u = s[c] - label + 1;
          sum += u > 0 ? u : 0;
          size += u > 0;
        }
        sizes[p] += size;
        sums[p] += sum;
      }
    }
  } else {
    int64_t filled = 1;
    while (filled <= n) filled *= 2;
    cuts.assign(filled - 1, std::numeric_limits<double>::infinity());
    for (int64_t p = 0; p < n; ++p) cuts[p] = static_cast<double>(labels[p] - lowest) - 1;
    const auto count = [&](double d, int32_t above) {  // by the number of cuts below
      sizes[above] += 1;
      sums[above] += d;
    };
    if (few) {
      row.gather(lowest, T(-1));
      row.places.resize(row.found.size());
      search(cuts, row.found.data(), T(0), static_cast<int64_t>(row.found.size()), row.places.data());
      for (size_t k = 0; k < row.found.size(); ++k) count(row.found[k], row.places[k]);
    } else {
      for (int64_t start = 0; start < classes; start += PIECE) {
        const int64_t size = std::min(classes - start, PIECE);
        search(cuts, s + start, lowest, size, place);
        for (int64_t c = 0; c < size; ++c)
          if (place[c] > 0) count(s[start + c] - lowest, place[c]);
      }
    }
    for (int64_t p = n - 1; p > 0; --p) {
      sizes[p] += sizes[p + 1];
      sums[p] += sums[p + 1];
    }
    for (int64_t p = 0; p < n; ++p) {
      sizes[p] = sizes[p + 1];
      sums[p] = sums[p + 1] - sizes[p] * cuts[p];
    }
  }
  const int64_t* ids = b.ids + r * b.positives;
  const T* weights = b.weights + r * b.positives;
  std::vector<double> own(n);
  for (int64_t p = 0; p < n; ++p) {
    const double sum = std::max(1.0, sums[p]);
    b.value[r] += weights[p] * std::log(sum);
    if (!b.coefficient) continue;
    shares[p + 1] = static_cast<double>(b.coefficient[r]) * weights[p] / sum;
    own[p] = -shares[p + 1] * sizes[p];
  }
  if (!b.coefficient) return;
  if (passes) {
    for (int64_t start = 0; start < classes; start += PIECE) {
      const int64_t size = std::min(classes - start, PIECE);
      T gradient[PIECE] = {};
      for (int64_t p = 0; p < n; ++p) {
        const T label = labels[p], share = static_cast<T>(shares[p + 1]);
#pragma omp simd
        for (int64_t c = 0; c < size; ++c) gradient[c] += s[start + c] - label + 1 > 0 ? share : 0;
      }
      std::copy(gradient, gradient + size, s + start);
    }
  } else {
    for (int64_t p = 1; p <= n; ++p) shares[p] += shares[p - 1];  // now by the number of cuts below
    if (few) {
      values.clear();
      for (const int32_t above : row.places) values.push_back(shares[above]);
      for (int64_t p = 0; p < n; ++p) {
        values.push_back(own[p]);
        row.at.push_back(static_cast<int32_t>(ids[p]));
      }
      row.keep(values, b.count + r);
      return;
    }
    for (int64_t start = 0; start < classes; start += PIECE) {
      const int64_t size = std::min(classes - start, PIECE);
      search(cuts, s + start, lowest, size, place);
      for (int64_t c = 0; c < size; ++c) s[start + c] = static_cast<T>(shares[place[c]]);
    }
  }
  for (int64_t p = 0; p < n; ++p) s[ids[p]] += static_cast<T>(own[p]);
  b.count[r] = -1;
}

// member: 2 is sparsemax, 1 entmax-1.5, 0 rankmax.
template <typename T>
void rows(const Batch<T>& b, const T* labels, int member, int threads) {
#pragma omp parallel num_threads(threads)
  {
    Row<T> row;
    std::vector<double> values;
    row.classes = b.classes;
    row.half = b.stride / 2;
#pragma omp for schedule(dynamic, 4)
    for (int64_t r = 0; r < b.n; ++r) {
      row.scores = b.scores + r * b.stride;
      if (member == 2) entmax_row<2>(b, r, row, values);
      if (member == 1) entmax_row<1>(b, r, row, values);
      if (member == 0) rankmax_row(b, labels + r * b.positives, r, row, values);
    }
  }
}

// The entries of all rows, one row after the other.
template <typename T>
void entries(const T* scores, int64_t n, int64_t stride, const int64_t* count, int64_t* row, int64_t* at, T* values) {
  for (int64_t r = 0; r < n; ++r) {
    const T* from = scores + r * stride;
    const int32_t* places = reinterpret_cast<const int32_t*>(from + stride / 2);
    for (int64_t k = 0; k < count[r]; ++k) {
      *row++ = r;
      *at++ = places[k];
      *values++ = from[k];
    }
  }
}

}  // namespace

#define EXPORT(T, SUFFIX)                                                                                              \
  extern "C" void rows_##SUFFIX(T* scores, int64_t n, int64_t stride, int64_t classes, const int64_t* ids,            \
                                const T* weights, int64_t positives, const T* total, const T* coefficient, T* top,    \
                                double* value, int64_t* count, const T* labels, int member, int threads) {            \
    rows<T>({scores, n, stride, classes, ids, weights, positives, total, coefficient, top, value, count}, labels,     \
            member, threads);                                                                                         \
  }                                                                                                                    \
  extern "C" void entries_##SUFFIX(const T* scores, int64_t n, int64_t stride, const int64_t* count, int64_t* row,    \
                                   int64_t* at, T* values) {                                                          \
    entries<T>(scores, n, stride, count, row, at, values);                                                            \
  }

EXPORT(float, float32)
EXPORT(double, float64)
