"""What the committed measurements must still say when somebody measures again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.simulate.inputs import batch_time_names, load_batch_times
from specpilot_cli.simulate.policy import parse_policy


def _results(repo: Path, name: str) -> dict[str, Any]:
    path = repo / "docs" / "measurements" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["results"]


def test_the_order_of_three_policies_was_predicted(repo: Path):
    judged = _results(repo, "batch_simulation")["judged"]
    assert judged
    for table in judged.values():
        assert table["three_policies_ordered_alike"] is True
        rates = table["policies"]
        order = sorted(rates, key=lambda name: -rates[name]["measured_tokens_per_s"])
        assert order == table["measured_order"]
        for name, row in rates.items():
            parse_policy(name)
            assert row["predicted_tau"] == pytest.approx(row["measured_tau"], rel=0.02)
            assert 0.75 < row["predicted_over_measured_ratio"] < 1.33


def test_the_judged_settings_are_not_on_the_measured_grid(repo: Path):
    results = _results(repo, "batch_simulation")
    rows = {(step["requests"], step["rows"]) for step in results["steps"]}
    judged = {item["concurrency"] for item in results["predictions"]}
    assert judged.isdisjoint({requests for requests, _ in rows})


def test_the_bundled_times_are_those_that_were_fitted(repo: Path):
    assert batch_time_names() == ["demo-cpu"]
    times = load_batch_times("demo-cpu")
    fitted = _results(repo, "batch_simulation")["prefill"]
    assert [point.seconds for point in times.prefill.points] == [
        pytest.approx(item["seconds"]) for item in fitted
    ]


def test_the_low_precision_view_pays_in_tokens(repo: Path):
    results = _results(repo, "two_level_demo")
    assert results["exact_weights_agree_ratio"] == 1.0
    for found in results["two_level"].values():
        assert 0.95 < found["agreement"] < 1
        assert 1.5 < found["ratio"]["low"] < found["ratio"]["value"] < 2
