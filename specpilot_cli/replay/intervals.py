"""Intervals of τ = tokens / steps with requests as clusters.

Steps of one request are not independent (a hard passage costs many), so the request is the unit:
the spread of each request's influence on log τ gives the standard error. Working in logs keeps the
interval positive, and a gain between policies is a difference of influences, paired by request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpilot_cli.stats import satterthwaite_df, t_quantile

CONFIDENCE = 0.95

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value with its two-sided 95 % interval; the interval is None below two requests."""

    value: float
    low: float | None
    high: float | None
    n_requests: int


def tau_estimate(tokens: Int64, steps: Int64) -> Estimate:
    """τ over requests, tokens [R] and steps [R]; requests without steps do not count.

    Raises ValueError if no request has a step.
    """
    value = _ratio(tokens, steps)
    influence = _log_influence(tokens, steps)
    return _around(value, influence)


def gain_estimate(tokens: Int64, steps: Int64, base_tokens: Int64, base_steps: Int64) -> Estimate:
    """τ over another policy's τ on the same requests, paired by request; all arguments [R]."""
    value = _ratio(tokens, steps) / _ratio(base_tokens, base_steps)
    influence = _log_influence(tokens, steps) - _log_influence(base_tokens, base_steps)
    return _around(value, influence)


def mean_of_estimates(estimates: Sequence[Estimate]) -> Estimate:
    """The equal-weight mean of independent estimates, one per benchmark."""
    if not estimates:
        raise ValueError("a mean needs at least one estimate")
    n_cells = len(estimates)
    value = math.fsum(item.value for item in estimates) / n_cells
    n_requests = sum(item.n_requests for item in estimates)
    parts, dfs = [], []
    for item in estimates:
        if item.low is None or item.high is None:
            return Estimate(value, None, None, n_requests)
        df = float(item.n_requests - 1)
        half = math.log(item.high / item.low) / 2
        standard_error = item.value * half / t_quantile(0.5 + CONFIDENCE / 2, df)
        parts.append((standard_error / n_cells) ** 2)
        dfs.append(df)
    quantile = t_quantile(0.5 + CONFIDENCE / 2, satterthwaite_df(parts, dfs))
    relative = quantile * math.sqrt(math.fsum(parts)) / value
    return Estimate(value, value * math.exp(-relative), value * math.exp(relative), n_requests)


def _ratio(tokens: Int64, steps: Int64) -> float:
    if steps.sum() <= 0:
        raise ValueError("no steps, so no tokens per step")
    return float(tokens.sum() / steps.sum())


def _log_influence(tokens: Int64, steps: Int64) -> npt.NDArray[np.float64]:
    """How far each counted request pulls log τ, [requests with steps] float64, mean zero."""
    counted = steps > 0
    y, x = tokens[counted].astype(np.float64), steps[counted].astype(np.float64)
    return np.asarray(y / y.mean() - x / x.mean(), dtype=np.float64)


def _around(value: float, influence: npt.NDArray[np.float64]) -> Estimate:
    n_requests = int(influence.size)
    if n_requests < 2:
        return Estimate(value, None, None, n_requests)
    standard_error = float(influence.std(ddof=1)) / math.sqrt(n_requests)
    relative = t_quantile(0.5 + CONFIDENCE / 2, n_requests - 1) * standard_error
    return Estimate(value, value * math.exp(-relative), value * math.exp(relative), n_requests)
