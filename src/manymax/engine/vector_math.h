// Exponential, logarithm, arctangent and a part of tanh without a branch, so that a loop over classes that calls them is vectorised by
// every compiler and at every dispatch level. The functions of the C library are not: some compilers have vector
// versions only under -ffast-math, which assumes that there is no nan and no infinity, and scores are masked by -inf.
//
// Polynomials are Chebyshev fits of the functions named beside them. Errors are below two units in the last place of
// the result, and below three in log1p_of and atan_of.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

// A loop is vectorised only if nothing in it is called: compilers must not decide against inlining.
#define INLINE inline __attribute__((always_inline))

namespace {

// The bits of a number of type T as an unsigned integer, and what the layout of T is.
template <typename T>
struct Layout;

template <>
struct Layout<float> {
  using Bits = uint32_t;
  static constexpr int MANTISSA = 23;
  static constexpr Bits ONE = 0x3f800000u, ROOT_HALF = 0x3f3504f3u, WHOLE = 0x4b000000u;  // 1, sqrt(1/2), 2^23
  static constexpr float ROUND = 12582912.0f;  // 1.5 2^23: adding it rounds a small number to an integer
  static constexpr float SHIFT = 8388608.0f + 127.0f;  // 2^23 + the bias of the exponent
  static constexpr float LOWEST = -87.0f;  // a lower exponential is not a normal number any more, and counts as 0
  static constexpr float LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
  // (e^r - 1 - r) / r^2 on |r| <= log(2) / 2
  static constexpr float EXP[] = {1.39261836e-3f, 8.36317905e-3f, 4.16665546e-2f, 1.66665770e-1f, 0.5f};
  // (2 atanh(s) - 2 s) / s^3 in s^2
  static constexpr float LOG[] = {2.95820236e-1f, 3.99887348e-1f, 6.66666852e-1f};
  // (atan(t) - t) / t^3 in t^2 on |t| <= tan(pi / 8)
  static constexpr float ATAN[] = {-6.45192821e-2f, 1.07437315e-1f, -1.42639556e-1f, 1.99995405e-1f, -3.33333318e-1f};
  // (tanh(x) - x) / x^3 in x^2 on |x| <= 1/2
  static constexpr float TANH[] = {-6.94294175e-3f, 2.14706830e-2f, -5.39334691e-2f, 1.33332258e-1f, -3.33333328e-1f};
};

template <>
struct Layout<double> {
  using Bits = uint64_t;
  static constexpr int MANTISSA = 52;
  static constexpr Bits ONE = 0x3ff0000000000000u, ROOT_HALF = 0x3fe6a09e667f3bcdu, WHOLE = 0x4330000000000000u;
  static constexpr double ROUND = 6755399441055744.0;
  static constexpr double SHIFT = 4503599627370496.0 + 1023.0;
  static constexpr double LOWEST = -708.0;
  static constexpr double LN2_HIGH = 6.93147180369123816490e-01, LN2_LOW = 1.90821492927058770002e-10;
  static constexpr double EXP[] = {
      2.5100385495510319078e-8,  2.7620088445409748161e-7,  2.7557268459997064772e-6,  2.4801521295954375131e-5,
      1.9841269863053616878e-4,  1.3888888917213716901e-3,  8.3333333333300618325e-3,  4.1666666666624127873e-2,
      1.6666666666666667453e-1,  5.0000000000000010221e-1};
  static constexpr double LOG[] = {
      1.3089445145246311412e-1, 1.3268503312794760136e-1, 1.5386249788196104628e-1, 1.8181795454526501038e-1,
      2.2222222393452627488e-1, 2.8571428570795934749e-1, 4.0000000000000889534e-1, 6.6666666666666666462e-1};
  static constexpr double ATAN[] = {
      -1.9176887119062258989e-2, 3.9231658295587191303e-2,  -5.0854497379402598613e-2, 5.8581489128022098816e-2,
      -6.6645114473819480001e-2, 7.6921831908260865637e-2,  -9.0909045781239018905e-2, 1.1111111015256361727e-1,
      -1.4285714284666542922e-1, 1.9999999999995520678e-1, -3.3333333333333330160e-1};
  static constexpr double TANH[] = {
      5.9469565897747691496e-5, -2.2107222975864633879e-4, 5.8496537290226445915e-4, -1.4549593843804661129e-3,
      3.5920334653723928221e-3, -8.8632292700678434021e-3, 2.1869488297234514340e-2, -5.3968253963610086387e-2,
      1.3333333333329824238e-1, -3.3333333333333328949e-1};
};

template <typename To, typename From>
INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  std::memcpy(&to, &from, sizeof(to));  // compilers turn this into nothing
  return to;
}

// The value of a polynomial with these coefficients, the highest power first.
template <typename T, std::size_t N>
INLINE T polynomial(const T (&coefficients)[N], T x) {
  T value = coefficients[0];
#pragma GCC unroll 16
  for (std::size_t k = 1; k < N; ++k) value = value * x + coefficients[k];
  return value;
}

// x = n log(2) + r for LOWEST <= x <= 0: e^r - 1, and 2^n in `scale`.
template <typename T>
INLINE T reduced_expm1(T x, T& scale) {
  using L = Layout<T>;
  // The sum with ROUND has n in its last bits.
  const T shifted = x * T(1.44269504088896340736) + L::ROUND;
  const T n = shifted - L::ROUND;
  const T r = (x - n * L::LN2_HIGH) - n * L::LN2_LOW;
  // n becomes the exponent. What ROUND has in its other bits is shifted out.
  scale = bits_as<T>((bits_as<typename L::Bits>(shifted) << L::MANTISSA) + L::ONE);
  return polynomial(L::EXP, r) * (r * r) + r;
}

// e^x for x <= 0; exactly 0 for x <= -87 (float) or x <= -708 (double), -inf included.
template <typename T>
INLINE T exp_of(T x) {
  T scale;
  const T value = reduced_expm1(x > Layout<T>::LOWEST ? x : Layout<T>::LOWEST, scale) + T(1);
  return x > Layout<T>::LOWEST ? value * scale : T(0);
}

// e^x - 1 for x <= 0, with all digits where it is near 0: 2^n (e^r - 1) + (2^n - 1), of which the second part is then 0.
template <typename T>
INLINE T expm1_of(T x) {
  T scale;
  const T value = reduced_expm1(x > Layout<T>::LOWEST ? x : Layout<T>::LOWEST, scale);
  return scale * value + (scale - T(1));
}

// log(x) for a normal number x > 0.
template <typename T>
INLINE T log_of(T x) {
  using L = Layout<T>;
  // x = 2^n m with m from sqrt(1/2) to sqrt(2), where log(m) is small: adding n log(2) then cancels nothing.
  const auto bits = bits_as<typename L::Bits>(x);
  const auto exponent = (bits - L::ROOT_HALF + L::ONE) >> L::MANTISSA;  // n + bias
  const T m = bits_as<T>(bits - (exponent << L::MANTISSA) + L::ONE);
  // An integer to a float through its bits: processors below AVX-512 cannot convert 64-bit integers.
  const T n = bits_as<T>(exponent | L::WHOLE) - L::SHIFT;
  const T s = (m - T(1)) / (m + T(1));  // log(m) = 2 atanh(s)
  const T z = s * s;
  return n * L::LN2_HIGH + (n * L::LN2_LOW + (polynomial(L::LOG, z) * z * s + 2 * s));
}

// log(1 + y) for y > -1, where 1 + y must be a normal number.
template <typename T>
INLINE T log1p_of(T y) {
  const T u = T(1) + y;
  // What rounding took from u, relative to it, is added again: it is all there is where y is tiny.
  return log_of(u) + (y - (u - T(1))) / u;
}

// atan(x), of infinities too. Far from 0 it is that of a small t: pi/2 + atan(-1 / |x|) or,
// in between, pi/4 + atan((|x| - 1) / (|x| + 1)).
template <typename T>
INLINE T atan_of(T x) {
  const T a = std::fabs(x);
  const bool far = a > T(2.41421356237309504880), middle = a > T(0.41421356237309504880);  // tan(3 pi / 8), tan(pi / 8)
  const T above = far ? T(-1) : middle ? a - T(1) : a;
  const T below = far ? a : middle ? a + T(1) : T(1);
  const T base = far ? T(1.57079632679489661923) : middle ? T(0.78539816339744830962) : T(0);
  const T t = above / below, z = t * t;
  return std::copysign(base + (polynomial(Layout<T>::ATAN, z) * z * t + t), x);
}

// tanh(x) for |x| <= 1/2, without a division.
template <typename T>
INLINE T small_tanh_of(T x) {
  const T z = x * x;
  return polynomial(Layout<T>::TANH, z) * z * x + x;
}

}  // namespace
