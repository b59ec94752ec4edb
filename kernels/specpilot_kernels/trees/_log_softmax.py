"""Log-softmax by a fixed sequence of float64 additions, multiplications and divisions.

The libraries' exp and log differ in their last bits between machines, and a GPU has others again.
Those bits can decide a tie between two paths and so another tree. Here every operation is one that
IEEE 754 rounds in one way, and none may be fused or moved, so `csrc/log_softmax.cuh`, which does
the same step by step, gives the same float32 on every GPU. Error before rounding to float32: below
2^-46 of the sum.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from specpilot_kernels.trees._jit import native
from specpilot_kernels.trees.types import Float32, Float64

_LOG2_E: Final = 1.4426950408889634
_LN2: Final = 0.6931471805599453
_LN2_HIGH: Final = 0.6931471803691238  # its last 20 bits are zero: times a small integer is exact
_LN2_LOW: Final = 1.9082149292705877e-10
_SQRT2: Final = 1.4142135623730951
_NEGLIGIBLE: Final = -40.0  # exp of it does not change a sum of at least 1
_HALVES: Final = 0.5 ** np.arange(64)


@native
def exponential(x: float) -> float:
    """exp(x) for x <= 0, zero below -40; NaN stays NaN."""
    if not x >= _NEGLIGIBLE:
        return x if np.isnan(x) else 0.0
    doublings = np.rint(x * _LOG2_E)
    rest = (x - doublings * _LN2_HIGH) - doublings * _LN2_LOW
    y = rest * 0.0625  # so small that seven terms are enough; four squarings undo it
    power = y * (1.0 / 720.0) + 1.0 / 120.0
    power = power * y + 1.0 / 24.0
    power = power * y + 1.0 / 6.0
    power = power * y + 0.5
    power = power * y + 1.0
    power = power * y + 1.0
    power = power * power
    power = power * power
    power = power * power
    power = power * power
    return power * _HALVES[int(-doublings)]


@native
def logarithm(x: float) -> float:
    """log(x) for x >= 1; NaN stays NaN."""
    doublings = 0.0
    while x > _SQRT2:
        x *= 0.5
        doublings += 1.0
    s = (x - 1.0) / (x + 1.0)  # log(x) = 2 atanh(s)
    z = s * s
    series = z * (1.0 / 19.0) + 1.0 / 17.0
    series = series * z + 1.0 / 15.0
    series = series * z + 1.0 / 13.0
    series = series * z + 1.0 / 11.0
    series = series * z + 1.0 / 9.0
    series = series * z + 1.0 / 7.0
    series = series * z + 1.0 / 5.0
    series = series * z + 1.0 / 3.0
    series = series * z + 1.0
    return doublings * _LN2 + (s + s) * series


@native
def log_softmax_rows(
    scores: Float64,  # [n, K]
    calibration: Float64,  # [positions, 2]: 1 / temperature, log of the recall
    rows_per_position: int,
    out: Float32,  # [n, K]
) -> None:
    """Fill `out`; row i belongs to position i / rows_per_position, counted round and round.

    A row with NaN, with a score of +inf or without a finite one becomes all NaN.
    """
    n_rows, n_candidates = scores.shape
    for row in range(n_rows):
        position = (row // rows_per_position) % calibration.shape[0]
        sharpness, log_recall = calibration[position, 0], calibration[position, 1]
        top = scores[row, 0]
        for index in range(1, n_candidates):
            if scores[row, index] > top:
                top = scores[row, index]
        top *= sharpness
        total = 0.0
        for index in range(n_candidates):
            total += exponential(scores[row, index] * sharpness - top)
        norm = logarithm(total)
        for index in range(n_candidates):
            shifted = scores[row, index] * sharpness - top
            out[row, index] = np.float32((shifted - norm) + log_recall)
