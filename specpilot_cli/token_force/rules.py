"""The two rules that reject a system (paper §3.3), as functions of counts.

Rate rule: the system's mismatch rate exceeds stock's by more than 0.5 points at 95 %
confidence. The paper names no test. Here requests are the clusters, since tokens of one
request share their text and are far from independent, and the two systems are paired by
prompt. Position strata are our addition: a fault that starts late is diluted in the pooled
rate, so early and late positions are tested too and the three tests share the error.

Event rule: unexplained large-margin events are more frequent than stock's, by a conditional
binomial test. What is counted is requests with at least one such event, because events
cluster within requests; the test would reject lossless systems too often otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from specpilot_cli.stats import (
    Interval,
    RateEstimate,
    clustered_ratio,
    clustered_ratio_difference,
    frequency_ratio_interval,
    more_frequent_p_value,
)
from specpilot_cli.token_force.config import TokenForceSettings
from specpilot_cli.token_force.scorer import ScoredOutput

Stratum = Literal["pooled", "early", "late"]
Float64 = npt.NDArray[np.float64]

# The paper's outputs during development end here, and its injected fault starts here.
PAPER_SPLIT_POSITION = 2048


@dataclass(frozen=True, slots=True)
class RateSummary:
    """Mismatches of one system; the 95 % interval is two-sided and clustered by request."""

    n_requests: int
    n_tokens: int
    n_mismatches: int
    rate: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class RateTest:
    """One test of the rate rule: is the difference of rates above the margin?

    Rates, estimate and margin are fractions of tokens; alpha is one-sided.
    """

    stratum: Stratum
    n_requests: int
    system_rate: float
    stock_rate: float
    estimate: RateEstimate
    alpha: float
    margin: float
    system_tokens: int
    stock_tokens: int

    @property
    def lower_bound(self) -> float:
        """One-sided lower bound of the difference at confidence 1 - alpha."""
        return self.estimate.lower(confidence=1.0 - self.alpha)

    @property
    def rejects(self) -> bool:
        """Whether the difference exceeds the margin beyond doubt."""
        return self.lower_bound > self.margin


@dataclass(frozen=True, slots=True)
class RateRule:
    """All tests of the rate rule. `paper` is the pooled test alone at the full alpha."""

    tests: tuple[RateTest, ...]
    paper: RateTest
    split_position: int | None

    @property
    def rejects(self) -> bool:
        """Whether any test rejects."""
        return any(test.rejects for test in self.tests)


@dataclass(frozen=True, slots=True)
class Counts:
    """Mismatches and tokens of each request, float64 [R] each."""

    mismatches: Float64
    tokens: Float64


def count(outputs: Sequence[ScoredOutput], start: int = 0, stop: int | None = None) -> Counts:
    """Count every request's mismatches at output positions start <= t < stop."""
    parts = [output.mismatch[start:stop] for output in outputs]
    return Counts(
        np.array([part.sum() for part in parts], dtype=np.float64),
        np.array([part.size for part in parts], dtype=np.float64),
    )


def rate_summary(outputs: Sequence[ScoredOutput]) -> RateSummary:
    """Mismatch rate of one system with its interval; needs two requests."""
    counts = count(outputs)
    estimate = clustered_ratio(counts.mismatches, counts.tokens)
    interval = estimate.interval()
    return RateSummary(
        n_requests=len(outputs),
        n_tokens=int(counts.tokens.sum()),
        n_mismatches=int(counts.mismatches.sum()),
        rate=estimate.rate,
        low=max(0.0, interval.low),
        high=min(1.0, interval.high),
    )


def rate_test(
    stratum: Stratum, system: Counts, stock: Counts, *, alpha: float, margin: float
) -> RateTest:
    """Test one set of paired counts: is the system's rate above stock's by more than `margin`?"""
    return RateTest(
        stratum=stratum,
        n_requests=system.tokens.size,
        system_rate=float(system.mismatches.sum() / system.tokens.sum()),
        stock_rate=float(stock.mismatches.sum() / stock.tokens.sum()),
        estimate=clustered_ratio_difference(
            system.mismatches, system.tokens, stock.mismatches, stock.tokens
        ),
        alpha=alpha,
        margin=margin,
        system_tokens=int(system.tokens.sum()),
        stock_tokens=int(stock.tokens.sum()),
    )


def rate_rule(
    system: Sequence[ScoredOutput],
    stock: Sequence[ScoredOutput],
    settings: TokenForceSettings,
) -> RateRule:
    """Test the paired answers; `system[i]` and `stock[i]` belong to the same request.

    With strata, and where enough requests reach past the split, three tests run at alpha/3;
    otherwise one runs at alpha. How many run follows from lengths alone, never from mismatches.
    """
    margin = settings.rate_margin
    pooled = (count(system), count(stock))
    paper = rate_test("pooled", *pooled, alpha=settings.alpha, margin=margin)
    split = choose_split(system, stock, settings) if settings.strata else None
    if split is None:
        return RateRule((paper,), paper, None)
    early = (count(system, 0, split), count(stock, 0, split))
    reaching = [
        (one, two)
        for one, two in zip(system, stock, strict=True)
        if min(one.n_tokens, two.n_tokens) > split
    ]
    late = (
        count([one for one, _ in reaching], split),
        count([two for _, two in reaching], split),
    )
    share = settings.alpha / 3.0
    tests = (
        rate_test("pooled", *pooled, alpha=share, margin=margin),
        rate_test("early", *early, alpha=share, margin=margin),
        rate_test("late", *late, alpha=share, margin=margin),
    )
    return RateRule(tests, paper, split)


def choose_split(
    system: Sequence[ScoredOutput],
    stock: Sequence[ScoredOutput],
    settings: TokenForceSettings,
) -> int | None:
    """First late position, or None when too few requests reach past any split.

    The setting if given; else 2048 if enough requests reach past it; else half the median
    length, so that shorter outputs are stratified too.
    """
    lengths = np.array(
        [min(one.n_tokens, two.n_tokens) for one, two in zip(system, stock, strict=True)]
    )
    if settings.split_position is not None:
        candidates = [settings.split_position]
    else:
        candidates = [PAPER_SPLIT_POSITION, int(np.median(lengths)) // 2]
    for split in candidates:
        if split >= 1 and int((lengths > split).sum()) >= settings.min_stratum_requests:
            return split
    return None


@dataclass(frozen=True, slots=True)
class EventTally:
    """Large-margin events of one system.

    n_large: all of them. n_audited: looked at; n_unexplained: of those, without explanation.
    n_tested: audited events that enter the test. n_test_requests: requests with at least one
    unexplained event among the tested. tested_share: share of large-margin events tested, the
    same for both systems.
    """

    n_tokens: int
    n_large: int
    n_audited: int
    n_unexplained: int
    n_tested: int
    n_test_requests: int
    tested_share: float

    @property
    def exposure_tokens(self) -> float:
        """Tokens that the tested events speak for."""
        return self.n_tokens * self.tested_share


@dataclass(frozen=True, slots=True)
class EventRule:
    """The event rule's counts and its one-sided p-value."""

    system: EventTally
    stock: EventTally
    p_value: float
    alpha: float

    @property
    def rejects(self) -> bool:
        """Whether the system's unexplained events are more frequent than stock's."""
        return self.p_value < self.alpha

    @property
    def ratio(self) -> Interval:
        """How many times stock's frequency the system's is: the two-sided interval that goes with
        the test (90 % for an alpha of 5 %); infinite above where stock has no event."""
        return frequency_ratio_interval(
            self.system.n_test_requests,
            self.system.exposure_tokens,
            self.stock.n_test_requests,
            self.stock.exposure_tokens,
            confidence=1.0 - 2.0 * self.alpha,
        )


def event_rule(system: EventTally, stock: EventTally, alpha: float) -> EventRule:
    """Conditional binomial test on requests with an unexplained event, weighted by exposure."""
    p_value = more_frequent_p_value(
        system.n_test_requests,
        system.exposure_tokens,
        stock.n_test_requests,
        stock.exposure_tokens,
    )
    return EventRule(system, stock, p_value, alpha)


def share_to_test(system_large: int, stock_large: int, limit: int) -> float:
    """Which share of large-margin events enters the test: the same share of both systems.

    Capping a request's events at one and auditing only a share of them do not commute, so two
    systems whose events were thinned differently could not be compared.
    """
    return min(1.0, limit / max(system_large, stock_large, 1))
