// Functions of single numbers that attention needs, on vectors: powers of two and the hyperbolic tangent.
#pragma once

namespace headwise::HEADWISE_ISA {

constexpr double kLog2EExact = 1.44269504088896341, kLn2Exact = 0.693147180559945309;
constexpr float kLog2E = float(kLog2EExact), kLn2 = float(kLn2Exact);
constexpr float kHidden = -__builtin_inff();  // score of a key that a row may not attend to
constexpr float kNoScore = -3.402823466e38f;  // shift of a row that has not seen any key: the least float

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// 2^x for x up to 120, as 2^n p(x - n) with n the nearest integer. p is a minimax polynomial on [-1/2, 1/2], exact at
// 0. Its relative error is 2e-9 for degree 6, which with the rounding of floats makes 0.7 units in the last place, and
// 3e-6 for degree 4. Below -125 the result is 0, also for minus infinity: processors take a hundred times as long for
// results too small for normal floats. NaN stays NaN.
template <int kDegree>
inline Floats exp2(Floats x) {
  static_assert(kDegree == 4 || kDegree == 6);
  const Floats n = round_to_integer(x), f = x - n;
  Floats p;
  if constexpr (kDegree == 6) {
    p = multiply_add(all(1.5353362e-4f), f, all(1.3398875e-3f));
    p = multiply_add(p, f, all(9.61843692e-3f));
    p = multiply_add(p, f, all(5.55033237e-2f));
    p = multiply_add(p, f, all(2.40226477e-1f));
    p = multiply_add(p, f, all(6.93147182e-1f));
  } else {
    p = multiply_add(all(9.58285294e-3f), f, all(5.59064262e-2f));
    p = multiply_add(p, f, all(2.40240991e-1f));
    p = multiply_add(p, f, all(6.93124175e-1f));
  }
  return scale_by_power(at_least(x, all(-125.0f)), multiply_add(p, f, all(1.0f)), n);
}

struct Tanh {
  Floats value, slope;
};

// tanh(x), and its derivative 1 - tanh^2(x): near 0 by the odd polynomial of Cephes (Moshier 1989, tanhf), elsewhere as
// 1 - y with y = 2 / (e^2|x| + 1), with the sign of x, and the derivative as y (2 - y). The first form avoids the
// cancellation of the second near 0, and the last one the cancellation of 1 - tanh^2 for large scores.
inline Tanh tanh(Floats x) {
  const Floats size = absolute(x), square = x * x;
  Floats p = multiply_add(all(-5.70498872745e-3f), square, all(2.06390887954e-2f));
  p = multiply_add(p, square, all(-5.37397155531e-2f));
  p = multiply_add(p, square, all(1.33314422036e-1f));
  p = multiply_add(p, square, all(-3.33332819422e-1f));
  const Floats near_zero = multiply_add(p * square, x, x);
  const Mask is_huge = greater(size, all(20.0f));  // where the exponential could overflow, the result is 1
  const Floats power = exp2<6>(select(is_huge, all(20.0f), size) * all(2.0f * kLog2E));
  const Floats rest = all(2.0f) / (power + all(1.0f)), far = all(1.0f) - rest;
  const Mask is_far = greater(size, all(0.625f));
  return {select(is_far, select(greater(x, zero()), far, zero() - far), near_zero),
          select(is_far, rest * (all(2.0f) - rest), all(1.0f) - near_zero * near_zero)};
}

}  // namespace headwise::HEADWISE_ISA
