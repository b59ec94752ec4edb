"""Statistics of paired timing and of paired error rates: pure functions of numbers.

The unit of evidence is the request. Two systems that serve the same request give one log-ratio of
output rates per run; runs of one request are averaged before anything else, so repeating a run
never counts as more requests. Cells (one per benchmark) are weighted equally (paper §5.1,
"Metrics").

What a request-level interval cannot see is noise that all requests of a session share (launch,
clock, placement in memory). That part is measured by serving the same system against itself, and
enters as `nu` (paper §3.2, "stock-versus-stock noise").

Nothing here reads files, prints, or draws random numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtrc, betaincinv, ndtri, stdtrit

Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A closed interval; the unit is the caller's."""

    low: float
    high: float

    def contains(self, value: float) -> bool:
        """Whether `low <= value <= high`."""
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class LogGain:
    """An estimated mean log-ratio, clustered by request.

    log_gain: ln of the gain (geometric mean over cells, equal weights).
    se: its standard error from the spread between requests, in log units.
    df: degrees of freedom of `se` (Satterthwaite).
    n_requests: requests over all cells.
    """

    log_gain: float
    se: float
    df: float
    n_requests: int

    @property
    def gain(self) -> float:
        """The gain as a ratio, exp(log_gain)."""
        return math.exp(self.log_gain)


def t_quantile(probability: float, df: float) -> float:
    """Quantile of Student's t with `df` (> 0, may be fractional) degrees of freedom."""
    if not 0.0 < probability < 1.0 or not df > 0.0:
        raise ValueError(f"t quantile needs 0 < p < 1 and df > 0, got p={probability}, df={df}")
    return float(stdtrit(df, probability))


def geometric_mean(values: ArrayLike) -> float:
    """Geometric mean of positive `values` [n]; ValueError if empty or not all positive."""
    array = np.asarray(values, dtype=np.float64).ravel()
    if array.size == 0 or not np.all(np.isfinite(array)) or not np.all(array > 0):
        raise ValueError("a geometric mean needs at least one value, all positive and finite")
    return float(np.exp(np.mean(np.log(array))))


def mean_over_runs(log_ratios: ArrayLike) -> Float64:
    """Average each request over its runs: [runs, requests] -> [requests] (float64).

    With an even number of runs in swapped order, whatever belongs to the order (or to the device)
    and not to the system enters once with each sign and cancels here exactly.
    """
    array = np.asarray(log_ratios, dtype=np.float64)
    if array.ndim != 2 or array.shape[0] == 0:
        raise ValueError(f"expected log-ratios as [runs, requests], got shape {array.shape}")
    if not np.all(np.isfinite(array)):
        raise ValueError("log-ratios must be finite: a failed request invalidates its run")
    return np.asarray(array.mean(axis=0), dtype=np.float64)


def satterthwaite_df(variances: Sequence[float], dfs: Sequence[float]) -> float:
    """Effective degrees of freedom of a sum of independent variance estimates.

    variances: the summed terms (each already divided by its own n). Terms equal to zero carry no
    information on the sum; if all are zero the dfs add up, as for a common zero variance.
    """
    total = sum(variances)
    if total <= 0.0:
        return float(sum(dfs))
    # Scale first: squares of tiny variances underflow.
    shares = [value / total for value in variances]
    spread = sum(s * s / df for s, df in zip(shares, dfs, strict=True) if s > 0.0)
    return 1.0 / spread


def clustered_log_gain(cells: Mapping[str, ArrayLike]) -> LogGain:
    """Gain over several cells, each cell a list of per-request mean log-ratios [n_b].

    ln G = (1/B) sum_b mean(z_b); se = (1/B) sqrt(sum_b var(z_b)/n_b); df by Satterthwaite. A
    request that was served at several levels must be averaged over them first, so that it stays
    one cluster. ValueError if there is no cell, or a cell has fewer than two requests (no spread
    to estimate).
    """
    if not cells:
        raise ValueError("a gain needs at least one cell")
    means, parts, dfs, n_requests = [], [], [], 0
    for name, values in cells.items():
        z = np.asarray(values, dtype=np.float64).ravel()
        if z.size < 2:
            raise ValueError(f"cell {name!r} has {z.size} request(s); two or more are needed")
        if not np.all(np.isfinite(z)):
            raise ValueError(f"cell {name!r} holds a value that is not finite")
        means.append(float(z.mean()))
        parts.append(float(z.var(ddof=1)) / z.size)
        dfs.append(float(z.size - 1))
        n_requests += int(z.size)
    n_cells = len(means)
    return LogGain(
        log_gain=math.fsum(means) / n_cells,
        se=math.sqrt(math.fsum(parts)) / n_cells,
        df=satterthwaite_df(parts, dfs),
        n_requests=n_requests,
    )


def lower_bound(estimate: LogGain, *, confidence: float = 0.95) -> float:
    """One-sided lower bound of the gain (a ratio) from the spread between requests alone."""
    return math.exp(estimate.log_gain - t_quantile(confidence, estimate.df) * estimate.se)


def two_sided_interval(
    estimate: LogGain, *, nu: float = 0.0, n_sessions: int = 0, confidence: float = 0.95
) -> Interval:
    """Two-sided interval of the gain (ratios), launch noise included.

    nu: A/A noise in log units, measured over `n_sessions` sessions. Its mean square has a known
    mean of zero, so it carries `n_sessions` degrees of freedom; both parts are combined by
    Satterthwaite.
    """
    if nu < 0.0 or (nu > 0.0 and n_sessions < 1):
        raise ValueError("nu must be >= 0 and come with the number of sessions it was measured on")
    parts, dfs = [estimate.se**2], [estimate.df]
    if n_sessions > 0:
        parts.append(nu**2)
        dfs.append(float(n_sessions))
    half = t_quantile(0.5 + confidence / 2, satterthwaite_df(parts, dfs)) * math.sqrt(sum(parts))
    return Interval(math.exp(estimate.log_gain - half), math.exp(estimate.log_gain + half))


def aa_noise(log_gains: Sequence[float]) -> float:
    """nu: root mean square of ln G over sessions that served one system against itself (log units).

    The true gain is one, so the mean is not estimated and not subtracted.
    """
    if not log_gains or not all(math.isfinite(value) for value in log_gains):
        raise ValueError("A/A noise needs at least one finite session gain")
    return math.sqrt(math.fsum(value * value for value in log_gains) / len(log_gains))


def minimum_detectable_gain(
    requests_per_cell: Sequence[int], sigma: float, *, bound: float,
    power: float = 0.8, confidence: float = 0.95,
) -> float:  # fmt: skip
    """Smallest true gain (ratio) whose lower bound exceeds `bound` with probability `power`.

    requests_per_cell: n_b of each cell (each >= 2); sigma: standard deviation of the per-request
    mean log-ratio, assumed equal in all cells; bound: the ratio the lower bound has to exceed.
    """
    if not requests_per_cell or min(requests_per_cell) < 2 or sigma < 0.0 or bound <= 0.0:
        raise ValueError("need cells of two or more requests, sigma >= 0 and a positive bound")
    parts = [sigma**2 / n for n in requests_per_cell]
    se = math.sqrt(sum(parts)) / len(parts)
    df = satterthwaite_df(parts, [float(n - 1) for n in requests_per_cell])
    return bound * math.exp((t_quantile(confidence, df) + float(ndtri(power))) * se)


def pooled_sigma(cells: Mapping[str, ArrayLike]) -> float:
    """Standard deviation of per-request mean log-ratios [n_b], pooled within cells."""
    squares, dfs = 0.0, 0
    for values in cells.values():
        z = np.asarray(values, dtype=np.float64).ravel()
        if z.size >= 2:
            squares += float(z.var(ddof=1)) * (z.size - 1)
            dfs += int(z.size) - 1
    if dfs == 0:
        raise ValueError("no cell has two requests, so the spread cannot be estimated")
    return math.sqrt(squares / dfs)


@dataclass(frozen=True, slots=True)
class RateEstimate:
    """A rate (or difference of rates), its standard error and degrees of freedom."""

    rate: float
    se: float
    df: float

    def lower(self, *, confidence: float = 0.95) -> float:
        """One-sided lower bound, in the unit of `rate`."""
        return self.rate - t_quantile(confidence, self.df) * self.se

    def interval(self, *, confidence: float = 0.95) -> Interval:
        """Two-sided interval, in the unit of `rate` (may leave [0, 1])."""
        half = t_quantile(0.5 + confidence / 2, self.df) * self.se
        return Interval(self.rate - half, self.rate + half)


def clustered_ratio(counts: ArrayLike, totals: ArrayLike) -> RateEstimate:
    """Rate sum(counts)/sum(totals) with requests as clusters (ratio estimator).

    counts, totals: [requests], e.g. mismatches and tokens of each request.
    """
    k, n = _counts_and_totals(counts, totals)
    rate = float(k.sum() / n.sum())
    residual = (k - rate * n) / n.mean()
    se = float(residual.std(ddof=1)) / math.sqrt(k.size)
    return RateEstimate(rate=rate, se=se, df=float(k.size - 1))


def clustered_ratio_difference(
    counts: ArrayLike, totals: ArrayLike, base_counts: ArrayLike, base_totals: ArrayLike
) -> RateEstimate:
    """Difference of two rates on the same requests, paired by request.

    All arguments: [requests], in one order. Errors that a request causes in both systems cancel
    in the paired residuals; tokens inside a request stay one cluster.
    """
    k1, n1 = _counts_and_totals(counts, totals)
    k0, n0 = _counts_and_totals(base_counts, base_totals)
    if k1.size != k0.size:
        raise ValueError(f"paired rates need the same requests: {k1.size} and {k0.size}")
    p1, p0 = float(k1.sum() / n1.sum()), float(k0.sum() / n0.sum())
    residual = (k1 - p1 * n1) / n1.mean() - (k0 - p0 * n0) / n0.mean()
    se = float(residual.std(ddof=1)) / math.sqrt(k1.size)
    return RateEstimate(rate=p1 - p0, se=se, df=float(k1.size - 1))


def _counts_and_totals(counts: ArrayLike, totals: ArrayLike) -> tuple[Float64, Float64]:
    k = np.asarray(counts, dtype=np.float64).ravel()
    n = np.asarray(totals, dtype=np.float64).ravel()
    if k.size != n.size or k.size < 2:
        raise ValueError(f"need counts and totals of two or more requests: {k.size}, {n.size}")
    if np.any(k < 0) or np.any(n <= 0) or np.any(k > n):
        raise ValueError("need 0 <= count <= total and total > 0 for every request")
    return k, n


def binomial_upper_tail(successes: int, trials: int, probability: float) -> float:
    """P(X >= successes) for X ~ Bin(trials, probability): the one-sided exact p-value."""
    if not 0 <= successes <= trials or not 0.0 <= probability <= 1.0:
        raise ValueError(f"need 0 <= k <= n and 0 <= p <= 1: {successes}, {trials}, {probability}")
    if successes == 0:
        return 1.0
    return float(bdtrc(successes - 1, trials, probability))


def more_frequent_p_value(
    events: int, exposure: float, base_events: int, base_exposure: float
) -> float:
    """One-sided p-value that `events` are more frequent per exposure than `base_events`.

    Under equal rates the events split binomially in proportion to the exposures (conditional test).
    """
    if exposure <= 0.0 or base_exposure <= 0.0:
        raise ValueError("exposures must be positive")
    share = exposure / (exposure + base_exposure)
    return binomial_upper_tail(events, events + base_events, share)


def binomial_interval(successes: int, trials: int, *, confidence: float = 0.95) -> Interval:
    """Exact two-sided interval of a probability (Clopper and Pearson), [0, 1] without trials."""
    if not 0 <= successes <= trials:
        raise ValueError(f"need 0 <= successes <= trials: {successes}, {trials}")
    tail, failures = (1.0 - confidence) / 2, trials - successes
    low = 0.0 if successes == 0 else float(betaincinv(successes, failures + 1, tail))
    high = 1.0 if failures == 0 else float(betaincinv(successes + 1, failures, 1.0 - tail))
    return Interval(low, high)


def frequency_ratio_interval(
    events: int, exposure: float, base_events: int, base_exposure: float,
    *, confidence: float = 0.95,
) -> Interval:  # fmt: skip
    """Two-sided interval of the ratio of two event frequencies, conditional on their sum.

    The high end is infinite where `base_events` is 0, and the interval [0, inf] without events.
    """
    share = binomial_interval(events, events + base_events, confidence=confidence)
    scale = base_exposure / exposure

    def ratio(part: float) -> float:
        return math.inf if part >= 1.0 else scale * part / (1.0 - part)

    return Interval(ratio(share.low), ratio(share.high))


def wilson_interval(successes: int, trials: int, *, confidence: float = 0.95) -> Interval:
    """Two-sided score interval of a probability (Wilson); needs a trial."""
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"need 0 <= successes <= trials and a trial: {successes}, {trials}")
    z = float(ndtri(0.5 + confidence / 2))
    rate, shrink = successes / trials, 1.0 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / shrink
    half = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials**2)) / shrink
    return Interval(max(0.0, centre - half), min(1.0, centre + half))


def paired_proportion_difference(
    both: int, first_only: int, second_only: int, neither: int, *, confidence: float = 0.95
) -> Interval:
    """Interval of p(first) - p(second) on the same cases (Newcombe 1998, method 10).

    Wilson intervals of both proportions, combined with their correlation; keeps its width where
    no case differs, unlike a t interval of the differences.
    """
    n = both + first_only + second_only + neither
    first, second = both + first_only, both + second_only
    p1, p2 = first / n, second / n
    one, two = (wilson_interval(k, n, confidence=confidence) for k in (first, second))
    agree = both * neither - first_only * second_only
    if agree > 0:
        agree = max(agree - n // 2, 0)
    spread = first * (n - first) * second * (n - second)
    phi = 0.0 if spread == 0 else agree / math.sqrt(spread)

    def half(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2.0 * phi * a * b + b * b))

    return Interval(
        p1 - p2 - half(p1 - one.low, two.high - p2), p1 - p2 + half(one.high - p1, p2 - two.low)
    )
