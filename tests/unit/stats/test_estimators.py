"""Arithmetic of the estimators against values worked out independently."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from specpilot_cli import stats


def test_geometric_mean_of_reciprocal_ratios_is_one() -> None:
    assert stats.geometric_mean([1.25, 0.8]) == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize("values", [[], [1.0, 0.0], [1.0, -2.0], [1.0, math.nan]])
def test_geometric_mean_refuses_values_without_a_logarithm(values: list[float]) -> None:
    with pytest.raises(ValueError, match="geometric mean"):
        stats.geometric_mean(values)


def test_one_cell_equals_the_one_sample_t_test() -> None:
    z = np.random.default_rng(1).normal(0.03, 0.1, 23)
    estimate = stats.clustered_log_gain({"only": z})
    reference = scipy_stats.ttest_1samp(z, 0.0, alternative="greater").confidence_interval(0.95)
    assert estimate.df == pytest.approx(22)
    assert math.log(stats.lower_bound(estimate)) == pytest.approx(reference.low, rel=1e-12)


def test_two_cells_have_the_welch_degrees_of_freedom() -> None:
    rng = np.random.default_rng(2)
    a, b = rng.normal(0.0, 0.1, 9), rng.normal(0.0, 0.02, 31)
    estimate = stats.clustered_log_gain({"a": a, "b": b})
    welch = scipy_stats.ttest_ind(a, -b, equal_var=False)  # a + b has the variance of a - (-b)
    assert estimate.df == pytest.approx(welch.df, rel=1e-12)
    assert estimate.log_gain / estimate.se == pytest.approx(welch.statistic, rel=1e-12)


def test_cells_weigh_the_same_however_many_requests_they_hold() -> None:
    estimate = stats.clustered_log_gain({"small": [0.2, 0.2], "large": [0.0] * 100})
    assert estimate.log_gain == pytest.approx(0.1)
    assert estimate.n_requests == 102


def test_equal_log_ratios_give_an_interval_of_no_width() -> None:
    estimate = stats.clustered_log_gain({"a": [0.0625] * 3, "b": [0.0625] * 2})
    assert estimate.df == 3
    assert stats.lower_bound(estimate) == pytest.approx(math.exp(0.0625))
    assert stats.two_sided_interval(estimate) == stats.Interval(estimate.gain, estimate.gain)


def test_a_cell_of_one_request_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'math' has 1 request"):
        stats.clustered_log_gain({"code": [0.1, 0.2], "math": [0.1]})


def test_repeating_every_run_adds_no_certainty() -> None:
    once = np.random.default_rng(3).normal(0.0, 0.1, (2, 20))
    twice = np.concatenate([once, once])
    a = stats.clustered_log_gain({"c": stats.mean_over_runs(once)})
    b = stats.clustered_log_gain({"c": stats.mean_over_runs(twice)})
    assert b.log_gain == pytest.approx(a.log_gain, abs=1e-15)
    assert (b.se, b.df) == pytest.approx((a.se, a.df), rel=1e-12)


def test_mean_over_runs_refuses_a_failed_request() -> None:
    with pytest.raises(ValueError, match="failed request"):
        stats.mean_over_runs([[0.0, math.nan], [0.0, 0.0]])


@given(st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=12))
def test_aa_noise_lies_between_mean_and_largest_deviation(log_gains: list[float]) -> None:
    nu = stats.aa_noise(log_gains)
    largest = max(abs(value) for value in log_gains)
    mean = sum(abs(value) for value in log_gains) / len(log_gains)
    assert mean - 1e-12 <= nu <= largest + 1e-12


def test_aa_noise_of_a_constant_offset_is_that_offset() -> None:
    # The mean is known to be zero, so a shared offset is noise and is not subtracted away.
    assert stats.aa_noise([0.01, 0.01, 0.01]) == pytest.approx(0.01)


def test_noise_widens_the_interval_with_its_own_degrees_of_freedom() -> None:
    estimate = stats.LogGain(log_gain=0.0, se=1e-9, df=99.0, n_requests=100)
    interval = stats.two_sided_interval(estimate, nu=0.002, n_sessions=3)
    assert math.log(interval.high) == pytest.approx(scipy_stats.t.ppf(0.975, 3) * 0.002, rel=1e-6)


def test_noise_without_a_session_count_is_refused() -> None:
    estimate = stats.LogGain(log_gain=0.0, se=0.01, df=9.0, n_requests=10)
    with pytest.raises(ValueError, match="number of sessions"):
        stats.two_sided_interval(estimate, nu=0.01)


@pytest.mark.parametrize(
    ("n", "percent"), [(20, 3.8), (50, 2.8), (100, 2.3)], ids=["n20", "n50", "n100"]
)
def test_minimum_detectable_gain_of_five_diverging_benchmarks(n: int, percent: float) -> None:
    """Recomputed by hand from (1 + base + 2 nu) * exp((t + 0.84) sigma / sqrt(5 n))."""
    gain = stats.minimum_detectable_gain([n] * 5, 0.10, bound=1.01 + 2 * 0.001)
    assert (gain - 1) * 100 == pytest.approx(percent, abs=0.12)


def test_minimum_detectable_gain_is_found_at_its_stated_power() -> None:
    bound, sigma, n, cells = 1.01, 0.03, 25, 3
    gain = stats.minimum_detectable_gain([n] * cells, sigma, bound=bound)
    rng = np.random.default_rng(4)
    z = rng.normal(math.log(gain), sigma, (1500, cells, n))
    hits = sum(
        stats.lower_bound(stats.clustered_log_gain({str(b): row[b] for b in range(cells)})) > bound
        for row in z
    )
    assert hits / 1500 == pytest.approx(0.8, abs=0.035)


def test_pooled_sigma_ignores_differences_between_cells() -> None:
    assert stats.pooled_sigma({"a": [0.0, 2.0], "b": [10.0, 12.0]}) == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize(("k", "n", "p"), [(0, 7, 0.1), (3, 7, 0.1), (7, 7, 0.5), (193, 201, 0.5)])
def test_binomial_upper_tail_agrees_with_scipy(k: int, n: int, p: float) -> None:
    reference = scipy_stats.binomtest(k, n, p, alternative="greater").pvalue
    assert stats.binomial_upper_tail(k, n, p) == pytest.approx(reference, rel=1e-9)


@pytest.mark.parametrize(
    ("base_tokens", "fewest"), [(1000.0, 5), (2000.0, 3)], ids=["equal-exposure", "twice-the-stock"]
)
def test_fewest_events_that_count_as_more_frequent(base_tokens: float, fewest: int) -> None:
    p_values = [stats.more_frequent_p_value(k, 1000.0, 0, base_tokens) for k in range(8)]
    assert next(k for k, p in enumerate(p_values) if p < 0.05) == fewest


def test_ratio_difference_cancels_what_both_systems_share() -> None:
    rng = np.random.default_rng(5)
    totals = rng.integers(500, 2000, 60)
    shared = rng.binomial(totals, 0.01 * rng.gamma(2.0, 0.5, 60).clip(0, 5))
    paired = stats.clustered_ratio_difference(shared, totals, shared, totals)
    alone = stats.clustered_ratio(shared, totals)
    assert paired.rate == 0.0
    assert paired.se == pytest.approx(0.0, abs=1e-15)
    assert alone.se > 1e-4


def test_clustered_ratio_of_one_rate_in_every_request_has_no_error() -> None:
    estimate = stats.clustered_ratio([1, 2, 4], [100, 200, 400])
    assert estimate.rate == pytest.approx(0.01)
    assert estimate.se == pytest.approx(0.0, abs=1e-15)
    assert estimate.lower() == pytest.approx(0.01)
