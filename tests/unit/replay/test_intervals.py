"""Intervals of tokens per step: by hand, and by how often they cover a known value."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specpilot_cli.replay.intervals import (
    Estimate,
    gain_estimate,
    mean_of_estimates,
    tau_estimate,
)


def test_hand_worked_interval() -> None:
    # Steps 10 and 30 for 60 tokens each: tau 3, influences 1 ∓ (0.5, 1.5) = ±0.5 on log tau.
    estimate = tau_estimate(np.array([60, 60]), np.array([10, 30]))
    half = 12.706204736 * (math.sqrt(0.5) / math.sqrt(2))  # t(0.975, 1), sd of ±0.5 is √0.5
    assert estimate.value == 3.0
    assert estimate.low == pytest.approx(3 * math.exp(-half))
    assert estimate.high == pytest.approx(3 * math.exp(half))


def test_requests_without_steps_are_not_evidence() -> None:
    with_empty = tau_estimate(np.array([60, 0, 50]), np.array([20, 0, 18]))
    without = tau_estimate(np.array([60, 50]), np.array([20, 18]))
    assert with_empty == without
    assert without.n_requests == 2


def test_one_request_has_a_value_and_no_interval() -> None:
    assert tau_estimate(np.array([30]), np.array([10])) == Estimate(3.0, None, None, 1)


def test_no_steps_at_all_is_an_error() -> None:
    with pytest.raises(ValueError, match="no steps"):
        tau_estimate(np.array([0]), np.array([0]))


def test_gain_is_paired_by_request() -> None:
    """Requests differ much, but one policy always needs 20 % fewer steps: no doubt about it."""
    base_steps = np.array([10, 50, 90, 20])
    tokens = np.array([100, 100, 100, 100])
    gain = gain_estimate(tokens, base_steps * 4 // 5, tokens, base_steps)
    assert gain.value == pytest.approx(1.25)
    assert gain.low == pytest.approx(1.25)
    assert gain.high == pytest.approx(1.25)


def test_benchmark_mean_weighs_benchmarks_equally() -> None:
    few = tau_estimate(np.array([40, 44, 41]), np.array([10, 10, 10]))
    many = tau_estimate(np.full(300, 20), np.tile([10, 11, 9], 100))
    mean = mean_of_estimates([few, many])
    assert mean.value == pytest.approx((few.value + many.value) / 2)
    assert mean.n_requests == 303
    assert mean.low is not None
    assert mean.low < mean.value
    one = tau_estimate(np.array([30]), np.array([10]))
    assert mean_of_estimates([few, one]).low is None


def test_equal_requests_give_a_mean_without_width() -> None:
    same = tau_estimate(np.full(4, 20), np.full(4, 10))
    mean = mean_of_estimates([same, same])
    assert (mean.low, mean.value, mean.high) == (2.0, 2.0, 2.0)


def test_coverage_of_tau_and_of_the_gain() -> None:
    """Requests differ in hardness; 95 % intervals hold the truth about 95 % of the time."""
    rng = np.random.default_rng(0)
    n_requests, n_trials, tokens = 25, 600, 200.0
    true_base = 1 / np.mean(np.exp(rng.normal(-1.0, 0.3, 1_000_000)))
    hits = np.zeros(2)
    for _ in range(n_trials):
        hard = np.exp(rng.normal(-1.0, 0.3, n_requests))  # steps per token of each request
        base = rng.poisson(tokens * hard).clip(1)
        tree = rng.poisson(tokens * hard / 1.3).clip(1)
        total = np.full(n_requests, int(tokens))
        tau = tau_estimate(total, base)
        gain = gain_estimate(total, tree, total, base)
        for slot, (found, true) in enumerate(((tau, true_base), (gain, 1.3))):
            assert found.low is not None
            assert found.high is not None
            hits[slot] += found.low <= true <= found.high
    assert np.all(hits / n_trials > 0.92)
    assert np.all(hits / n_trials < 0.98)
