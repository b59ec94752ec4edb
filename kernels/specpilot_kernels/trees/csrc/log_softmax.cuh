// Log-softmax of one row, step by step what `_log_softmax.py` does, so that both give the same
// float32. The intrinsics keep the compiler from fusing a product with a sum.
#pragma once

constexpr double kNegligible = -40.0;  // exp of it does not change a sum of at least 1

__device__ __forceinline__ double plus(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ double times(double a, double b) { return __dmul_rn(a, b); }

// a * x + b, rounded twice.
__device__ __forceinline__ double step(double a, double x, double b) { return plus(times(a, x), b); }

// exp(x) for x <= 0, zero below -40; NaN stays NaN.
__device__ __forceinline__ double exponential(double x) {
  constexpr double kLog2E = 1.4426950408889634;
  constexpr double kLn2High = 0.6931471803691238, kLn2Low = 1.9082149292705877e-10;
  constexpr double kToInteger = 6755399441055744.0;  // 1.5 * 2^52: what is added to it is rounded
  const double biased = plus(times(x, kLog2E), kToInteger);
  const double doublings = plus(biased, -kToInteger);
  const double rest =
      plus(plus(x, -times(doublings, kLn2High)), -times(doublings, kLn2Low));
  const double y = times(rest, 0.0625);
  double power = step(y, 1.0 / 720.0, 1.0 / 120.0);
  power = step(power, y, 1.0 / 24.0);
  power = step(power, y, 1.0 / 6.0);
  power = step(power, y, 0.5);
  power = step(power, y, 1.0);
  power = step(power, y, 1.0);
  power = times(power, power);
  power = times(power, power);
  power = times(power, power);
  power = times(power, power);
  power = times(power, __hiloint2double((1023 + __double2loint(biased)) << 20, 0));
  return x < kNegligible ? 0.0 : power;
}

// log(x) for x >= 1; NaN stays NaN.
__device__ __forceinline__ double logarithm(double x) {
  constexpr double kLn2 = 0.6931471805599453, kSqrt2 = 1.4142135623730951;
  double doublings = 0.0;
  while (x > kSqrt2) {
    x = times(x, 0.5);
    doublings = plus(doublings, 1.0);
  }
  const double s = __ddiv_rn(plus(x, -1.0), plus(x, 1.0));
  const double z = times(s, s);
  double series = step(z, 1.0 / 19.0, 1.0 / 17.0);
  series = step(series, z, 1.0 / 15.0);
  series = step(series, z, 1.0 / 13.0);
  series = step(series, z, 1.0 / 11.0);
  series = step(series, z, 1.0 / 9.0);
  series = step(series, z, 1.0 / 7.0);
  series = step(series, z, 1.0 / 5.0);
  series = step(series, z, 1.0 / 3.0);
  series = step(series, z, 1.0);
  return plus(times(doublings, kLn2), times(plus(s, s), series));
}

// Raw scores of `kCount` candidates to log-probabilities; those that do not exist hold -inf.
template <int kCount>
__device__ __forceinline__ void log_softmax(float (&value)[kCount], double sharpness,
                                            double log_recall) {
  float highest = value[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i)
    if (value[i] > highest) highest = value[i];
  const double top = times(highest, sharpness);
  double total = 0.0;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    total = plus(total, exponential(plus(times(value[i], sharpness), -top)));
  const double norm = logarithm(total);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const double shifted = plus(times(value[i], sharpness), -top);
    value[i] = __double2float_rn(plus(plus(shifted, -norm), log_recall));
  }
}
