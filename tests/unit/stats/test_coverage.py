"""Does the interval hold what it promises? Seeded simulations of paired sessions.

One session: five benchmarks of n requests, two runs. The log-ratio of request i in run r is
    gain + device (changes sign when the order is swapped) + launch (one draw per session)
    + difference (request x system: how differently two systems treat one request) + noise.
Sizes are assumptions; what the tests fix is which estimator survives which of these terms.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from specpilot_cli import stats

CELLS, RUNS = 5, 2
REPLICATIONS = 2000
# Four binomial standard errors of 95 % at this many replications.
SLACK = 4 * math.sqrt(0.95 * 0.05 / REPLICATIONS)

Difference = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def normal(sd: float) -> Difference:
    return lambda rng, shape: rng.normal(0.0, sd, shape)


def heavy_tailed(sd: float) -> Difference:
    return lambda rng, shape: rng.standard_t(3, shape) * sd / math.sqrt(3)


def skewed(sd: float) -> Difference:
    return lambda rng, shape: (rng.exponential(1.0, shape) - 1.0) * sd


def few_diverge(sd: float, share: float = 0.1) -> Difference:
    return lambda rng, shape: rng.normal(0.0, sd, shape) * (rng.random(shape) < share)


@dataclass(frozen=True)
class Scenario:
    n: int
    difference: Difference
    log_gain: float = 0.0
    launch: float = 0.0
    device: float = 0.01
    noise: float = 0.01

    def session(self, rng: np.random.Generator, *, swap: bool = True) -> np.ndarray:
        """Log-ratios [runs, cells, n] of one session."""
        shape = (CELLS, self.n)
        sign = np.array([1.0, -1.0 if swap else 1.0]).reshape(RUNS, 1, 1)
        return (
            self.log_gain
            + rng.normal(0.0, self.device) * sign
            + rng.normal(0.0, self.launch)
            + self.difference(rng, shape)
            + rng.normal(0.0, self.noise, (RUNS, *shape))
        )

    def estimate(self, rng: np.random.Generator, *, swap: bool = True) -> stats.LogGain:
        return clustered(self.session(rng, swap=swap))

    def noise_over(self, rng: np.random.Generator, k: int, n: int | None = None) -> float:
        """nu from k sessions of one system against itself: same tokens, so no difference term."""
        quiet = Scenario(n or self.n, normal(0.0), 0.0, self.launch, self.device, self.noise)
        return stats.aa_noise([quiet.estimate(rng).log_gain for _ in range(k)])


def clustered(session: np.ndarray) -> stats.LogGain:
    return stats.clustered_log_gain(
        {str(b): stats.mean_over_runs(session[:, b]) for b in range(session.shape[1])}
    )


def coverage(
    scenario: Scenario, *, seed: int, k: int = 0, aa_n: int | None = None, swap: bool = True
) -> float:
    rng = np.random.default_rng(seed)
    hits = 0
    for _ in range(REPLICATIONS):
        estimate = scenario.estimate(rng, swap=swap)
        nu = scenario.noise_over(rng, k, aa_n) if k else 0.0
        interval = stats.two_sided_interval(estimate, nu=nu, n_sessions=k)
        hits += interval.contains(math.exp(scenario.log_gain))
    return hits / REPLICATIONS


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(Scenario(20, normal(0.003), 0.02), id="same-tokens"),
        pytest.param(Scenario(50, normal(0.10), 0.02), id="outputs-diverge"),
        pytest.param(Scenario(20, skewed(0.10)), id="skewed"),
        pytest.param(Scenario(20, heavy_tailed(0.10)), id="heavy-tailed"),
        pytest.param(Scenario(20, few_diverge(0.30)), id="one-in-ten-diverges"),
    ],
)
def test_two_sided_interval_covers_at_its_level(scenario: Scenario) -> None:
    assert coverage(scenario, seed=11) == pytest.approx(0.95, abs=SLACK)


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(Scenario(20, normal(0.003), 0.05), id="same-tokens"),
        pytest.param(Scenario(50, normal(0.10), 0.05), id="outputs-diverge"),
    ],
)
def test_lower_bound_is_below_the_true_gain_19_times_in_20(scenario: Scenario) -> None:
    rng = np.random.default_rng(12)
    below = sum(
        stats.lower_bound(scenario.estimate(rng)) <= math.exp(scenario.log_gain)
        for _ in range(REPLICATIONS)
    )
    assert below / REPLICATIONS == pytest.approx(0.95, abs=SLACK)


def test_runs_counted_as_requests_are_overconfident() -> None:
    """The mistake the clustering avoids: with diverging outputs it covers about 84 %."""
    scenario, rng, hits = Scenario(50, normal(0.10)), np.random.default_rng(13), 0
    for _ in range(REPLICATIONS):
        session = scenario.session(rng)
        wrong = stats.clustered_log_gain({str(b): session[:, b].ravel() for b in range(CELLS)})
        hits += stats.two_sided_interval(wrong).contains(1.0)
    assert hits / REPLICATIONS < 0.90


def test_without_the_swap_the_device_effect_stays() -> None:
    scenario = Scenario(50, normal(0.003))
    assert coverage(scenario, seed=14, swap=False) < 0.30
    assert coverage(scenario, seed=14, swap=True) == pytest.approx(0.95, abs=SLACK)


def test_launch_noise_needs_the_aa_sessions_and_more_requests_do_not_help() -> None:
    few, many = (Scenario(n, normal(0.003), launch=0.003) for n in (20, 100))
    assert coverage(many, seed=15) < coverage(few, seed=15) < 0.65
    assert coverage(few, seed=16, k=3) == pytest.approx(0.95, abs=SLACK)
    assert coverage(many, seed=16, k=3) == pytest.approx(0.95, abs=SLACK)


def test_three_short_aa_sessions_hold_where_one_long_one_does_not() -> None:
    """At equal cost; one session often misses the launch noise altogether."""
    scenario = Scenario(12, normal(0.003), launch=0.003)
    assert coverage(scenario, seed=18, k=1) < 0.92
    assert coverage(scenario, seed=18, k=3, aa_n=4) == pytest.approx(0.95, abs=SLACK)


def server_noise_log_ratios(rng: np.random.Generator, n: int) -> np.ndarray:
    """Batched serving: the servers' speeds wander (AR(1), 0.9 per request, sd 2 %) in both runs."""
    shape = (RUNS, CELLS * n)
    shocks = rng.normal(0.0, 0.02 * math.sqrt(1 - 0.9**2), shape)
    wander = np.empty(shape)
    wander[:, 0] = rng.normal(0.0, 0.02, RUNS)
    for i in range(1, shape[1]):
        wander[:, i] = 0.9 * wander[:, i - 1] + shocks[:, i]
    order = wander.reshape(RUNS, n, CELLS).transpose(0, 2, 1)  # benchmarks served in turn
    return order + rng.normal(0.0, 0.01, (RUNS, CELLS, n))


def test_an_equal_pair_is_hardly_ever_promoted() -> None:
    """A/A promote rate with wandering servers: the noise term is what keeps it down."""
    rng, replications, n = np.random.default_rng(17), 400, 20
    with_noise = without = 0
    for _ in range(replications):
        session = server_noise_log_ratios(rng, n) + rng.normal(0.0, 0.03, (1, CELLS, n))
        bound = stats.lower_bound(clustered(session))
        nu = stats.aa_noise([clustered(server_noise_log_ratios(rng, n)).log_gain for _ in range(3)])
        with_noise += bound > 1 + 0.01 + 2 * nu
        without += bound > 1 + 0.01
    assert with_noise / replications <= 0.01
    assert with_noise <= without
    assert without / replications < 0.10


def test_the_simulated_benchmarks_of_the_documents_cover(
    repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small part of scripts/simulate_paired_bench.py: every scenario, fewer replications."""
    monkeypatch.syspath_prepend(str(repo / "scripts"))
    script = importlib.import_module("simulate_paired_bench")
    slack = 3 * math.sqrt(0.95 * 0.05 / 500)
    for number, scenario in enumerate(script.SCENARIOS):
        cell = script.simulate(scenario, 20, 3, replications=500, seed=number)
        assert cell.coverage >= 0.95 - slack, scenario.name
    document = json.loads(
        (repo / "docs/measurements/paired_bench_coverage.json").read_text(encoding="utf-8")
    )["results"]
    names = {row["scenario"] for row in document["rows"]}
    assert names == {scenario.name for scenario in script.SCENARIOS}
    assert min(row["coverage"] for row in document["rows"]) >= script.GOAL
