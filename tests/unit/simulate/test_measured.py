"""What the committed measurements must still say when somebody measures again."""

from __future__ import annotations

import json
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from specpilot_cli.io.lattice_file import read_lattice
from specpilot_cli.replay.split import requests_of
from specpilot_cli.schema.lattice import LatticeRecording
from specpilot_cli.simulate.batch import simulate_batches
from specpilot_cli.simulate.inputs import batch_time_names, load_batch_times
from specpilot_cli.simulate.policy import parse_policy

Rates = dict[tuple[str, int], float]


def _results(repo: Path, name: str) -> dict[str, Any]:
    path = repo / "docs" / "measurements" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["results"]


@pytest.fixture(scope="module")
def measured(repo: Path) -> dict[str, Any]:
    """What `scripts/measure_batch_simulation.py` found."""
    return _results(repo, "batch_simulation")


@pytest.fixture(scope="module")
def predicted(repo: Path, measured: dict[str, Any]) -> Rates:
    """Tokens per second by policy and concurrency: from the committed times and recordings."""
    times = load_batch_times("demo-cpu")
    recordings: dict[int, LatticeRecording] = {}
    rates: Rates = {}
    for name in _judged(measured)[0]["policies"]:
        policy = parse_policy(name)
        block = policy.block or 16
        if block not in recordings:
            path = repo / f"recipes/demo-cpu/recordings/block-{block}.safetensors"
            recording = read_lattice(path)
            kept = np.arange(recording.n_requests) != measured["left_out_request"]
            recordings[block] = requests_of(recording, kept)
        counts = [table["concurrency"] for table in _judged(measured)]
        repeat = measured["workload_repeat"]
        for item in simulate_batches(recordings[block], times, [policy], counts, repeat=repeat):
            rates[name, item.concurrency] = item.tokens_per_s
    return rates


def _judged(measured: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        table | {"concurrency": int(key.rpartition("_")[2])}
        for key, table in measured["judged"].items()
    ]


def test_every_gap_that_exceeds_the_scatter_was_predicted(
    measured: dict[str, Any], predicted: Rates
) -> None:
    for table in _judged(measured):
        at, told_apart = table["concurrency"], 0
        for pair in permutations(table["policies"], 2):
            if _faster(table, *pair):
                told_apart += 1
                assert predicted[pair[0], at] > predicted[pair[1], at], (pair, at)
        assert told_apart == table["pairs_told_apart"] == table["told_apart_as_predicted"]
        assert told_apart >= 10  # of 15: fewer would say that the machine was too busy


def _faster(table: dict[str, Any], fast: str, slow: str) -> bool:
    """Whether one beats the other in every round, and by more than the rounds scatter."""
    runs = [table["policies"][name]["measured_all"] for name in (fast, slow)]
    ratios = np.log(runs[0]) - np.log(runs[1])
    return bool((ratios > 0).all() and stats.ttest_1samp(ratios, 0).pvalue < 0.05)


def test_three_policies_are_told_apart_and_come_in_the_predicted_order(
    measured: dict[str, Any], predicted: Rates
) -> None:
    orders = []
    for table in _judged(measured):
        at = table["concurrency"]
        order = sorted(table["three_policies"], key=lambda name: -predicted[name, at])
        assert len(order) == 3
        for fast, slow in pairwise(order):
            assert _faster(table, fast, slow), (fast, slow, at)
        orders.append(order)
    assert len(orders) == 2
    assert orders[0] != orders[1]  # more requests turn the order round


def test_the_stored_predictions_are_those_of_the_committed_times(
    measured: dict[str, Any], predicted: Rates
) -> None:
    for table in _judged(measured):
        for name, row in table["policies"].items():
            rate = predicted[name, table["concurrency"]]
            assert row["predicted_tokens_per_s"] == pytest.approx(rate, rel=1e-9)
            ratio = rate / float(np.median(row["measured_all"]))
            assert row["predicted_over_measured_ratio"] == pytest.approx(ratio, rel=1e-9)
            assert 0.75 < ratio < 1.33
            assert row["predicted_tau"] == pytest.approx(row["measured_tau"], rel=1e-9)


def test_the_judged_settings_are_not_on_the_measured_grid(measured: dict[str, Any]) -> None:
    judged = {table["concurrency"] for table in _judged(measured)}
    assert judged.isdisjoint(step["requests"] for step in measured["steps"])


def test_the_bundled_times_are_those_that_were_fitted(measured: dict[str, Any]) -> None:
    assert batch_time_names() == ["demo-cpu"]
    times = load_batch_times("demo-cpu")
    assert [point.seconds for point in times.prefill.points] == [
        pytest.approx(item["seconds"]) for item in measured["prefill"]
    ]


def test_the_low_precision_view_pays_in_tokens(repo: Path) -> None:
    results = _results(repo, "two_level_demo")
    assert results["exact_weights_agree_ratio"] == 1.0
    for found in results["two_level"].values():
        assert 0.95 < found["agreement"] < 1
        assert 1.5 < found["ratio"]["low"] < found["ratio"]["value"] < 2


def test_calibration_predicts_unseen_requests_and_fails_on_few(repo: Path) -> None:
    results = _results(repo, "calibration_demo")
    for item in results["unseen"]:
        assert (item["fitted"], item["judged"]) == (96, 96)
        errors = item["prediction_error_ratio"]
        assert errors["calibrated"] < 0.5 * errors["as_recorded"]
        assert item["warning"] is None
        for row in item["rows"]:
            assert row["calibrated_over_recorded_ratio"]["value"] == pytest.approx(1, abs=0.01)
    for item in results["committed_recordings"]:
        assert (item["fitted"], item["judged"]) == (4, 4)
        errors = item["prediction_error_ratio"]
        assert errors["calibrated"] > errors["as_recorded"]
        assert "do not use this fit" in item["warning"]
