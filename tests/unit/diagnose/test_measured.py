"""What the committed measurement must still say when somebody measures again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def measured(repo: Path) -> dict[str, Any]:
    path = repo / "docs" / "measurements" / "diagnose.json"
    return json.loads(path.read_text(encoding="utf-8"))["results"]


def test_false_alarms_stay_below_two_in_a_hundred(measured: dict[str, Any]):
    for part in ("healthy_synthetic", "healthy_demo_pair_subsets"):
        found = measured[part]
        assert found["recordings"] >= 50
        assert found["with_alarm"] <= 0.02 * found["recordings"]


def test_faults_are_found_from_24_requests_on(measured: dict[str, Any]):
    for name, row in measured["faults_synthetic"].items():
        for requests in ("24_requests", "48_requests"):
            assert row[requests]["found"] >= 0.75 * row[requests]["of"], name


def test_the_page_quotes_the_measurement(measured: dict[str, Any], repo: Path):
    page = (repo / "docs" / "diagnose.md").read_text(encoding="utf-8")
    assert f"{measured['healthy_synthetic']['recordings']} healthy synthetic" in page
    assert f"{measured['healthy_demo_pair_subsets']['recordings']} random halves" in page
    assert f"(healthy {measured['healthy_demo_pair_tau']:.2f})" in page
    for name, row in measured["faults_demo_pair"].items():
        codes = ", ".join(f"`{code}`" for code in row["alone"]) or "nothing"
        assert f"| {name} | {row['tau']:.2f} | {codes} |" in page
