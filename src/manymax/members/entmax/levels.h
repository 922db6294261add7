// Entmax of a row: its probabilities at a level, the search for the level, and the end of a row. kernel.cpp has what is
// done with the rows of a block, filter.cpp what rules out classes before their scores are known.
//
// With beta = alpha - 1 and d = s - max s a row has p = u^(1/beta), u = max(0, w + beta d), and a level w at which the
// p sum to 1. Below beta = 1/4 the level is kept as v = (w - 1) / beta. Four kinds of power are compiled on their own:
// those of alpha = 2 and 1.5 are u and u * u, while a general one takes a logarithm and an exponential.

#pragma once

#include "rows.h"

namespace {

enum class Kind { sparsemax, half, power, log_power };

constexpr int MOST_STEPS = 60;    // about 6 are taken; no loop may run forever, whatever the scores are
constexpr double SLACK = 1e-5;    // by how much a cut is lowered for the rounding of the level: no class gets lost

struct Sums {
  double total = 0, slope = 0, curve = 0;  // F = sum p, A = sum p / u and B = sum p / u^2 over the support
  int64_t support = 0;                     // classes with p > 0
};

// Probabilities at a level, in the precision U.
template <Kind K, typename U>
struct Power {
  U level, beta, inverse;

  Power(double level, double beta)
      : level(static_cast<U>(level)), beta(static_cast<U>(beta)), inverse(static_cast<U>(1 / beta)) {}

  // u for d = s - max s; negative or 0 outside of the support, -inf at a masked class.
  INLINE U base(U d) const {
    if (K == Kind::sparsemax) return level + d;
    if (K == Kind::half) return level + U(0.5) * d;
    if (K == Kind::power) return level + beta * d;
    return U(1) + beta * (level + d);  // the sum first: w + beta d would round digits of v away
  }

  // p, p / u and p / u^2 from u = base(d). No branch, so that loops are vectorised.
  INLINE void terms(U d, U u, U& p, U& slope, U& curve) const {
    curve = 0;  // not needed for sparsemax; for half it is the size of the support
    if (K == Kind::sparsemax) {
      p = u > 0 ? u : 0;
      slope = u > 0 ? U(1) : U(0);
    } else if (K == Kind::half) {
      slope = u > 0 ? u : 0;
      p = slope * slope;
    } else {
      // Outside of the support the logarithm gets a harmless number and p is set to 0.
      const bool inside = u > std::numeric_limits<U>::min();
      const U kept = inside ? u : U(1);
      const U log_u = K == Kind::power ? log_of(kept) : log1p_of(inside ? beta * (level + d) : U(0));
      p = inside ? exp_of(log_u * inverse) : U(0);
      const U reciprocal = U(1) / kept;
      slope = p * reciprocal;
      curve = slope * reciprocal;
    }
  }
};

// The sum of the numbers in 64 bytes. Halves are added to each other: one number after the other would take as long as
// the sums of several hundred classes.
template <typename Number, typename Register>
INLINE Number sum_of(Register all) {
  typedef Number Half __attribute__((vector_size(32)));
  typedef Number Quarter __attribute__((vector_size(16)));
  Half halves[2];
  std::memcpy(halves, &all, 64);
  const Half half = halves[0] + halves[1];
  Quarter quarters[2];
  std::memcpy(quarters, &half, 32);
  const Quarter quarter = quarters[0] + quarters[1];
  Number sum = 0;
  for (size_t k = 0; k < 16 / sizeof(Number); ++k) sum += quarter[k];
  return sum;
}

// The sums over n scores for alpha = 2, where u = p = max(0, level + s - offset), and with `write` p in place of the
// scores and sum p^2 as the curve. So little is done with each class that the order of the additions decides about the
// time: in four registers at once, because in one each addition would wait for the one before.
template <bool write, typename T>
Sums linear_sums(T* s, int64_t n, T offset, T level) {
  constexpr int64_t LANES = 64 / sizeof(T), WAYS = 4;
  typedef std::conditional_t<sizeof(T) == 4, int32_t, int64_t> Integer;
  typedef T Register __attribute__((vector_size(64), aligned(sizeof(T)), may_alias));
  typedef Integer Integers __attribute__((vector_size(64)));
  Sums out;
  for (int64_t start = 0; start < n; start += WAYS * PIECE) {
    const int64_t end = std::min(n, start + WAYS * PIECE);
    Register total[WAYS] = {}, square[WAYS] = {};
    Integers outside[WAYS] = {};
    const auto add = [&](T* from, int64_t way) {
      Register& place = *reinterpret_cast<Register*>(from);
      // Negative numbers are those with the first bit set: -1 after the shift, else 0.
      const Integers bits = reinterpret_cast<Integers>(level + (place - offset));
      const Integers negative = bits >> (8 * sizeof(T) - 1);
      const Register p = reinterpret_cast<Register>(bits & ~negative);
      total[way] += p;
      outside[way] -= negative;
      if (write) square[way] += p * p;
      if (write) place = p;
    };
    int64_t c = start;
    for (; c + WAYS * LANES <= end; c += WAYS * LANES) {
#pragma GCC unroll 4
      for (int64_t way = 0; way < WAYS; ++way) add(s + c + way * LANES, way);
    }
    for (; c + LANES <= end; c += LANES) add(s + c, 0);
    out.support += c - start;
    for (; c < end; ++c) {
      const T u = level + (s[c] - offset), p = u > 0 ? u : 0;
      out.total += p;
      out.curve += p * p;
      out.support += u >= 0;
      if (write) s[c] = p;
    }
    out.total += sum_of<T>((total[0] + total[1]) + (total[2] + total[3]));
    out.curve += sum_of<T>((square[0] + square[1]) + (square[2] + square[3]));
    out.support -= sum_of<Integer>((outside[0] + outside[1]) + (outside[2] + outside[3]));
  }
  out.slope = static_cast<double>(out.support);
  return out;
}

// What a caller may want to know about the probabilities of each row: null where it does not.
struct Statistics {
  double* entropy;   // (n,) -sum p log p
  int64_t* support;  // (n,) the number of p > 0

  template <typename T>
  void add(int64_t r, const T* p, int64_t n) const {
    if (entropy) {
      double sum = 0;
      for (int64_t start = 0; start < n; start += PIECE) {
        const int64_t end = std::min(n, start + PIECE);
        T part = 0;
#pragma omp simd reduction(+ : part)
        for (int64_t c = start; c < end; ++c) {
          const bool inside = p[c] > std::numeric_limits<T>::min();  // the logarithm takes normal numbers
          part += inside ? p[c] * log_of(inside ? p[c] : T(1)) : T(0);
        }
        sum += part;
      }
      entropy[r] = -sum;
    }
    if (support) {
      int64_t count = 0;
#pragma omp simd reduction(+ : count)
      for (int64_t c = 0; c < n; ++c) count += p[c] > 0;
      support[r] = count;
    }
  }
};

// What the search and the end of a row share: alpha, and what follows from it.
template <Kind K>
struct Entmax {
  double alpha, beta;

  explicit Entmax(double alpha) : alpha(alpha), beta(alpha - 1) {}

  double highest() const { return K == Kind::log_power ? 0 : 1; }  // the level of p_top = 1, above every solution
  double lowest(int64_t classes) const {                          // the level of p_top = 1 / classes
    const double power = -beta * std::log(static_cast<double>(classes));
    return K == Kind::log_power ? std::expm1(power) / beta : std::exp(power);
  }
  // Relative for w, which can be small; absolute for v, which reaches 0.
  double unit(double level) const { return K == Kind::log_power ? std::abs(level) + 1 : level; }
  // Classes with d > cut have p > 0 at a level, and with the slack at one that is slightly higher.
  double cut(double level) const {
    const double higher = level + SLACK * unit(level);
    return K == Kind::log_power ? -1 / beta - higher : -higher / beta;
  }
  // The level whose classes are above a d, without the slack.
  double level_of_cut(double d) const { return K == Kind::log_power ? -1 / beta - d : -beta * d; }
  // How far one step towards F^beta = mass^beta lowers the level: Newton's, or with `third` Halley's, which also uses
  // the second derivative and leaves an error of the order of the third power of the step. F^beta is convex in the
  // level, so that a step of Newton's ends above the solution from either side.
  double step(const Sums& f, double mass, bool third) const {
    if (K == Kind::sparsemax) return (f.total - mass) / f.slope;
    const double gap = -std::expm1(-beta * std::log(f.total / mass));  // 1 - (F / mass)^-beta
    const double newton = gap * f.total / f.slope / (K == Kind::log_power ? beta : 1);
    if (!third) return newton;
    const double curve = K == Kind::half ? static_cast<double>(f.support) : f.curve;
    return newton / (1 - 0.5 * (1 / beta - 1) * (f.total * curve / (f.slope * f.slope) - 1) * gap);
  }
  // Whether the second derivative exists: a class enters the support as u^(1/beta).
  bool smooth() const { return K == Kind::half || K == Kind::log_power || (K == Kind::power && beta <= 0.5); }

  // The sums at a level over n scores s - offset. The difference is taken in T, where that of two nearby numbers is
  // exact; U is the precision of the sums within a piece of the classes. Pieces are added up in double: a float that
  // has summed a million terms would lose the small ones.
  template <typename U, typename T>
  Sums sums(const T* s, int64_t n, T offset, double level) const {
    if constexpr (K == Kind::sparsemax && std::is_same_v<T, U>) {
      return linear_sums<false>(const_cast<T*>(s), n, offset, static_cast<T>(level));  // which only reads
    }
    Sums out;
    const Power<K, U> power(level, beta);
    for (int64_t start = 0; start < n; start += PIECE) {
      const int64_t end = std::min(n, start + PIECE);
      U total = 0, slope = 0, curve = 0;
      int32_t inside = 0;
#pragma omp simd reduction(+ : total, slope, curve, inside)
      for (int64_t c = start; c < end; ++c) {
        const U d = static_cast<U>(s[c] - offset), u = power.base(d);
        U p, a, b;
        power.terms(d, u, p, a, b);
        total += p;
        slope += a;
        curve += b;
        inside += u > 0;
      }
      out.total += total;
      out.slope += slope;
      out.curve += curve;
      out.support += inside;
    }
    return out;
  }

  // Steps from a level until one is below tolerance x unit(level). With few classes left they end early, at `enough` of
  // them, because these are then gathered and searched on their own. The p are to sum to `mass`.
  template <typename U, typename T>
  double descend(const T* s, int64_t n, T offset, double level, double tolerance, int64_t enough = 0,
                 int64_t* support = nullptr, double mass = 1, int most = MOST_STEPS) const {
    for (int k = 0; k < most; ++k) {
      const Sums f = sums<U>(s, n, offset, level);
      if (support) *support = f.support;
      if (!(f.slope > 0 && f.total > 0)) return level;  // a sample without a class of the support
      // Far from the solution Newton's step is the safe one; where classes are gathered after it, it must end above.
      const bool near = std::abs(f.total - mass) < 0.5 * mass;
      const double decrease = step(f, mass, near && smooth() && f.support > enough);
      level -= decrease;
      if (f.support <= enough || (std::abs(decrease) <= tolerance * unit(level) && (near || !smooth()))) break;
    }
    return level;
  }

  // A level to start from, found on one class in 16 and then improved on one in 4, which saves one or two passes over
  // all classes. A sample may miss the support or be far off, so that the result is kept within what a level can be.
  template <typename T>
  double sampled_start(Row<T>& row, T top, double level) const {
    const auto on_sample = [&](int64_t every, int most) {
      row.take_sample(every);
      const auto size = static_cast<int64_t>(row.sample.size());
      // A sample of the classes should sum to its share of them.
      const double mass = static_cast<double>(size) / row.classes;
      level = descend<T>(row.sample.data(), size, top, level, 0.1, 0, nullptr, mass, most);
      level = std::min(highest(), std::max(lowest(row.classes), level));
    };
    on_sample(16, MOST_STEPS);
    if (K != Kind::half) on_sample(4, 1);  // at alpha = 1.5 Halley's steps need no better start
    return level;
  }

  // A level above the solution from the maxima of the groups alone. Leaving classes out can only raise the level.
  template <typename T>
  double group_bound(const Row<T>& row, T top) const {
    // Newton's steps alone, which stay above the solution.
    double level = highest();
    for (int k = 0; k < 12; ++k) {
      const Sums f = sums<T>(row.tops.data(), static_cast<int64_t>(row.tops.size()), top, level);
      if (!(f.slope > 0)) break;
      const double decrease = step(f, 1, false);
      level -= decrease;
      if (std::abs(decrease) <= 1e-3 * unit(level)) break;
    }
    return std::min(highest(), level);
  }

  // How small the last step over whole rows of T has to be. Up to alpha = 1.5 it leaves an error of the order of its
  // third power; above, a class that drops out of the support leaves more.
  template <typename T>
  double tolerance() const {
    const double eps = std::numeric_limits<T>::epsilon();
    return smooth() ? std::pow(eps, 0.38) : 8 * eps;
  }

  // The level of a row. If its support is small the classes that can be in it are left in `found` and `at`.
  template <typename T>
  double search(Row<T>& row, T top, bool& few) const {
    const int64_t most = row.classes / SPARSE;
    double level = highest();
    const auto cut_at = [&](double l) { return static_cast<T>(cut(l)); };
    // Trained models have few classes near the top, or few groups of classes above a bound from the groups' maxima.
    if (row.open_groups(top, cut_at(level)) * GROUP > most) level = group_bound(row, top);
    few = row.open_groups(top, cut_at(level)) * GROUP <= 2 * most;
    if (few) {
      row.gather(top, cut_at(level));
      few = static_cast<int64_t>(row.found.size()) <= most;
    }
    if (!few) {
      int64_t support = row.classes;
      const double start = sampled_start(row, top, level);
      // One step ends above the solution; `write_linear` takes the others.
      const int steps = K == Kind::sparsemax ? 1 : MOST_STEPS;
      level = descend<T>(row.scores, row.classes, top, start, tolerance<T>(), most, &support, 1, steps);
      few = support <= most;
      if (few) row.gather(top, cut_at(level));
      // The support of a level that was too low had too few classes.
      if (K == Kind::sparsemax && few) few = static_cast<int64_t>(row.found.size()) <= most;
    }
    if (!few) return level;
    // In double: p - t keeps its digits where the prediction is nearly perfect.
    return descend<double>(row.found.data(), static_cast<int64_t>(row.found.size()), T(0), level, 4e-16);
  }

  // d Omega(p) / d alpha of one class at fixed p: p ((u log u - (u - 1)) / beta^2 - (u - 1) / (alpha beta)) / alpha. In
  // double: the terms cancel down to (log u)^2 / 2 where u is near 1.
  INLINE double slope_term(double d, double level) const {
    const double y = K == Kind::log_power ? beta * (level + d) : Power<K, double>(level, beta).base(d) - 1;
    const bool inside = y > -1 + 1e-15;
    const double kept = inside ? y : 0, log_u = log1p_of(kept);
    const double value = (log_u * (1 + kept) - kept) / (beta * beta) - kept / (alpha * beta);
    return inside ? exp_of(log_u / beta) * value / alpha : 0;
  }

  // Sums over a row at its level, and the gradient coefficient (total p - t) in place of the scores. Returns sum u p.
  template <typename T>
  double finish(const Batch<T>& b, int64_t r, Row<T>& row, double& level, bool few, double* slope,
                const Statistics& stats) const {
    const double factor = b.coefficient ? b.coefficient[r] : 0, total = b.total[r];
    double moment = 0, slopes = 0;
    b.count[r] = 0;
    b.scale[r] = static_cast<T>(factor * total);
    if (few) {
      const Power<K, double> power(level, beta);
      const auto size = static_cast<int64_t>(row.found.size());
      row.values.resize(size);
      const T* const found = row.found.data();
      double* const values = row.values.data();
#pragma omp simd reduction(+ : moment)
      for (int64_t k = 0; k < size; ++k) {
        const double d = found[k], u = power.base(d);
        double p, a, c;
        power.terms(d, u, p, a, c);
        values[k] = p;
        moment += u * p;  // every d is finite here, and p = 0 outside of the support
      }
      if (slope) {
#pragma omp simd reduction(+ : slopes)
        for (int64_t k = 0; k < size; ++k) slopes += slope_term(found[k], level);
      }
    } else {
      row.keep();
      moment = write_probabilities(b.maximum[r], row, level, slope ? &slopes : nullptr);
    }
    if (slope) slope[r] = slopes;
    if (few) {
      stats.add(r, row.values.data(), static_cast<int64_t>(row.values.size()));
    } else {
      stats.add(r, row.scores, row.classes);
    }
    if (!b.coefficient) return moment;
    if (few && !b.dense_target()) {
      for (double& p : row.values) p *= total;
      row.subtract_positives(b, r, 1);
      for (double& g : row.values) g *= factor;
      if (static_cast<int64_t>(row.values.size()) * SPARSE <= row.classes) {
        row.pack(b.count + r);
        return moment;
      }
      // Positives outside of the support have made the entries too many to be worth keeping.
      row.unpack();
      b.scale[r] = 1;
    } else {
      if (few) row.unpack();
      // coefficient total (p - t / total): the factor of the row is not multiplied into it
      b.subtract_target(r, total != 0 ? 1 / total : 0);
    }
    b.count[r] = -1;
    return moment;
  }

  // The same for alpha = 2, with the last steps of the search, from a level above the solution: lowering the level by
  // some amount lowers every p > 0 by it, so that the scores are not needed any more.
  template <typename T>
  double write_linear(T top, Row<T>& row, double& level, double* slopes) const {
    T* const s = row.scores;
    Sums f = linear_sums<true>(s, row.classes, top, static_cast<T>(level));
    for (int k = 0; k < MOST_STEPS; ++k) {
      const int64_t support = f.support;
      const double decrease = step(f, 1, false);
      if (!(decrease > tolerance<T>() * level)) break;
      level -= decrease;
      f = linear_sums<true>(s, row.classes, T(0), static_cast<T>(-decrease));
      if (f.support == support) break;  // no class has left: the step was exact
    }
    if (slopes) {
      double slope = 0;
#pragma omp simd reduction(+ : slope)
      for (int64_t c = 0; c < row.classes; ++c) slope += slope_term(static_cast<double>(s[c]) - level, level);
      *slopes += slope;
    }
    return f.curve;
  }

  // Probabilities in place of the scores of a whole row; returns sum u p. The level may become more exact.
  template <typename T>
  double write_probabilities(T top, Row<T>& row, double& level, double* slopes) const {
    if constexpr (K == Kind::sparsemax) return write_linear(top, row, level, slopes);
    T* const s = row.scores;
    const Power<K, T> power(level, beta);
    double moment = 0;
    for (int64_t start = 0; start < row.classes; start += PIECE) {
      const int64_t end = std::min(row.classes, start + PIECE);
      double slope = 0;
      if (slopes) {
#pragma omp simd reduction(+ : slope)
        for (int64_t c = start; c < end; ++c) slope += slope_term(static_cast<double>(s[c] - top), level);
        *slopes += slope;
      }
      T part = 0;
#pragma omp simd reduction(+ : part)
      for (int64_t c = start; c < end; ++c) {
        const T d = s[c] - top, u = power.base(d);
        T p, a, b;
        power.terms(d, u, p, a, b);
        part += (u > 0 ? u : 0) * p;  // u is -inf at a masked class
        s[c] = p;
      }
      moment += part;
    }
    return moment;
  }
};

// Call work(Entmax<kind>) with the kind of an alpha. One loop over the rows for each kind: with the choice inside of
// the loop the compiler made rows of one of them take 1.4 times as long.
template <typename Work>
void by_kind(double alpha, Work work) {
  if (alpha == 2) return work(Entmax<Kind::sparsemax>(alpha));
  if (alpha == 1.5) return work(Entmax<Kind::half>(alpha));
  if (alpha - 1 >= 0.25) return work(Entmax<Kind::power>(alpha));
  return work(Entmax<Kind::log_power>(alpha));
}

}  // namespace
