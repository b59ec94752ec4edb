"""What is said of repeated timings: medians, quartiles, and ratios of pairs with an interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from specpilot_cli.stats import Interval, t_quantile


@dataclass(frozen=True, slots=True)
class Spread:
    """Repeated timings of one thing, in the unit of `values`."""

    values: tuple[float, ...]
    median: float
    low_quartile: float
    high_quartile: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """ValueError for no values, or for one that is not positive and finite."""
        if not values or not all(math.isfinite(v) and v > 0 for v in values):
            raise ValueError(f"timings must be positive: {list(values)}")
        if len(values) == 1:
            low = high = values[0]
        else:
            low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(tuple(values), statistics.median(values), low, high)


@dataclass(frozen=True, slots=True)
class PairedRatio:
    """How many times `base` takes of what `other` takes, from timings taken in pairs.

    ratio: geometric mean over pairs of base / other; above 1, `other` is faster.
    interval: two-sided 95 %, Student's t of the pairs' log ratios. pairs: their number.
    """

    ratio: float
    interval: Interval
    pairs: int

    @classmethod
    def of(cls, base: Sequence[float], other: Sequence[float]) -> PairedRatio:
        """Timings in the order in which they were taken; ValueError for fewer than two pairs."""
        if len(base) != len(other) or len(base) < 2:
            raise ValueError(f"two or more pairs are needed, got {len(base)} and {len(other)}")
        logs = [math.log(b / o) for b, o in zip(base, other, strict=True)]
        mean = statistics.fmean(logs)
        half = t_quantile(0.975, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
        interval = Interval(math.exp(mean - half), math.exp(mean + half))
        return cls(math.exp(mean), interval, len(logs))


def orders(names: Sequence[str], rounds: int) -> list[tuple[str, ...]]:
    """The order of every round: forth, back, forth, ... so that a drift meets all alike."""
    forth = tuple(names)
    return [forth if number % 2 == 0 else forth[::-1] for number in range(rounds)]
