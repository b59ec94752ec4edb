"""Rates with requests as clusters, and when one of them is certainly above a limit.

Steps of one request stand and fall together, so the request is the unit, as in replay's intervals.
A finding needs the one-sided 99.9 % bound of its effect beyond a limit that healthy pairs stay
away from: chance alone then raises a false alarm in one of a thousand checks at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpilot_cli.stats import RateEstimate

CONFIDENCE = 0.999
LEAST_REQUESTS = 5
LEAST_TRIALS = 50

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """Successes and trials of each request, [R] float64 both; successes may be fractions."""

    successes: Array
    trials: Array

    @property
    def value(self) -> float:
        """The rate over all requests; NaN without trials."""
        total = float(self.trials.sum())
        return float(self.successes.sum()) / total if total > 0 else math.nan

    @property
    def n_trials(self) -> int:
        """Trials over all requests."""
        return int(self.trials.sum())

    @property
    def enough(self) -> bool:
        """Whether there are enough requests and trials to say anything."""
        return int((self.trials > 0).sum()) >= LEAST_REQUESTS and self.n_trials >= LEAST_TRIALS

    def influence(self) -> Array:
        """How far each request pulls the rate, [R], mean zero, in the rate's unit."""
        mean = float(self.trials.mean())
        return np.asarray((self.successes - self.value * self.trials) / mean, dtype=np.float64)


def count(
    values: npt.NDArray[np.generic],
    where: npt.NDArray[np.bool_],
    request: npt.NDArray[np.int64],
    n_requests: int,
) -> Counts:
    """Sum `values` [A] (bool or float) over the anchors `where` [A] of each request [A]."""
    chosen = request[where]
    weights = np.asarray(values)[where].astype(np.float64)
    successes = np.bincount(chosen, weights=weights, minlength=n_requests)
    trials = np.bincount(chosen, minlength=n_requests)
    return Counts(successes.astype(np.float64), trials.astype(np.float64))


def combine(*terms: tuple[float, Counts]) -> RateEstimate:
    """Σ weight · rate on the same requests; what a request does to both rates is paired.

    Raises ValueError for rates over different numbers of requests.
    """
    sizes = {counts.trials.size for _, counts in terms}
    if len(sizes) != 1:
        raise ValueError(f"rates of different requests cannot be combined: {sorted(sizes)}")
    influence = np.sum([weight * counts.influence() for weight, counts in terms], axis=0)
    rate = math.fsum(weight * counts.value for weight, counts in terms)
    active = int(np.any([counts.trials > 0 for _, counts in terms], axis=0).sum())
    if active < 2:
        return RateEstimate(rate, math.inf, 1.0)
    spread = float(np.sqrt((influence**2).sum() / (influence.size * (influence.size - 1))))
    return RateEstimate(rate, spread, float(active - 1))


def certainly_above(estimate: RateEstimate, limit: float) -> bool:
    """Whether even the 99.9 % lower bound of `estimate` exceeds `limit`."""
    if not math.isfinite(estimate.se):
        return False
    return estimate.lower(confidence=CONFIDENCE) > limit
