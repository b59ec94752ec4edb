"""The smallest fault that an audit of this size would have caught.

An acceptance says little without it: ten short answers are accepted whatever is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from specpilot_cli.stats import more_frequent_p_value, t_quantile
from specpilot_cli.token_force.rules import EventRule, RateTest

_POWER = 0.95
_BISECTIONS = 60


def detectable_rate_difference(test: RateTest) -> float:
    """Rate difference that `test` rejects with 95 % power, as a fraction of tokens.

    The spread is the measured one, but never less than independent tokens would have at the
    higher rate: a lossless system shows too few mismatches to tell how a fault would spread.
    """
    quantiles = t_quantile(1.0 - test.alpha, test.estimate.df) + t_quantile(
        _POWER, test.estimate.df
    )

    def caught(difference: float) -> bool:
        rates = (
            (test.stock_rate, test.stock_tokens),
            (test.stock_rate + difference, test.system_tokens),
        )
        independent = math.sqrt(sum(max(0.0, p * (1.0 - p)) / n for p, n in rates))
        return difference >= test.margin + quantiles * max(test.estimate.se, independent)

    return _bisect(caught)


def rejecting_count(
    base_events: int, exposure: float, base_exposure: float, alpha: float, n_requests: int
) -> int | None:
    """Fewest requests with an unexplained event that reject; None if all would not."""
    for count in range(1, n_requests + 1):
        if more_frequent_p_value(count, exposure, base_events, base_exposure) < alpha:
            return count
    return None


def detectable_event_rate(rule: EventRule, request_tokens: Sequence[int]) -> float | None:
    """Unexplained events per token, at independent positions, caught with 95 % power.

    request_tokens: output tokens of each of the system's requests. None when even an event in
    every request would not reject.
    """
    exposure = np.asarray(request_tokens, dtype=np.float64) * rule.system.tested_share
    needed = rejecting_count(
        rule.stock.n_test_requests,
        rule.system.exposure_tokens,
        rule.stock.exposure_tokens,
        rule.alpha,
        len(request_tokens),
    )
    if needed is None or _power(1.0, exposure, needed) < _POWER:
        return None
    count = needed
    return _bisect(lambda rate: _power(rate, exposure, count) >= _POWER)


def _bisect(caught: Callable[[float], bool]) -> float:
    """The least value in [0, 1] that is caught; catching must be monotone."""
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if caught(middle) else (middle, high)
    return high


def _power(rate: float, exposure: npt.NDArray[np.float64], needed: int) -> float:
    """P(at least `needed` requests have an event), exact for independent requests."""
    hit = -np.expm1(-rate * exposure)
    below = np.zeros(needed)  # P(exactly k requests so far), k < needed
    below[0] = 1.0
    for chance in hit:
        below[1:] = below[1:] * (1.0 - chance) + below[:-1] * chance
        below[0] *= 1.0 - chance
    return float(1.0 - below.sum())
