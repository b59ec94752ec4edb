"""Pages, plans and limits say what the measurements on the H200 say."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specpilot_kernels.w12 import plans


@pytest.fixture(scope="module")
def docs(repo: Path) -> ModuleType:
    """`scripts/bench_w12_docs.py` as a module."""
    sys.path.insert(0, str(repo / "scripts"))
    try:
        return import_module("bench_w12_docs")
    finally:
        sys.path.remove(str(repo / "scripts"))


@pytest.fixture(scope="module")
def measured(repo: Path, docs: ModuleType) -> dict[str, Any]:
    """The published result."""
    document: dict[str, Any] = json.loads((repo / docs.RESULT).read_text(encoding="utf-8"))
    return document


def test_the_page_has_the_files_tables(
    repo: Path, docs: ModuleType, measured: dict[str, Any]
) -> None:
    page = (repo / docs.PAGE).read_text(encoding="utf-8")
    counted = json.loads((repo / docs.COUNTED).read_text(encoding="utf-8"))
    assert page == docs.with_tables(page, docs.tables(measured, counted))


def test_the_page_has_the_codecs_numbers(repo: Path, docs: ModuleType) -> None:
    path = repo / "docs/measurements/w12_gpu_codec_h200.json"
    model = json.loads(path.read_text(encoding="utf-8"))["model"]
    page = " ".join((repo / docs.PAGE).read_text(encoding="utf-8").split())
    assert (
        f"all {model['tensors']} linears, {model['bf16_bytes'] / 1e9:.1f} GB of BF16, take "
        f"{model['encode_s'] * 1e3:.1f} ms to encode, {model['decode_s'] * 1e3:.1f} ms to decode "
        f"and {model['compare_s'] * 1e3:.1f} ms to compare."
    ) in page


def test_a_goal_that_was_not_reached_is_called_missed(
    docs: ModuleType, measured: dict[str, Any]
) -> None:
    by_goal = {line.split(" | ")[0].strip("| "): line for line in docs.goals(measured)}
    assert by_goal["64 layers in one graph, one row"].endswith("| met |")
    slower = {**measured, "stack": {key: {"ratio": 1.34} for key in ("alone", "between")}}
    assert any("one row" in line and "missed" in line for line in docs.goals(slower))


def test_shipped_plans_are_those_of_the_result(
    repo: Path, docs: ModuleType, measured: dict[str, Any]
) -> None:
    tune = pytest.importorskip("specpilot_kernels.w12.tune", reason="torch is not installed")
    expected = {}
    for row in measured["products"]:
        ratios = {r["rows"]: r["ratio"] for r in measured["products"] if r["shape"] == row["shape"]}
        expected[plans.shape_name(*row["shape"])] = plans.Plan(kernel_rows=tune.kernel_rows(ratios))
    assert plans.read(plans._SHIPPED) == {measured["gpu"]: expected}
    assert {plan.kernel_rows for plan in expected.values()} == {64}  # never below cuBLAS


def test_the_limit_of_escapes_is_where_w12_still_wins(
    docs: ModuleType, measured: dict[str, Any]
) -> None:
    weight = pytest.importorskip("specpilot_kernels.w12.weight", reason="torch is not installed")
    most = docs.most_escapes(measured)
    assert sorted(most) == [1, 32, 64]
    assert 0.9 * min(most.values()) < weight.MAX_ESCAPE_RATIO < min(most.values())
    ordinary = min(row["escape_ratio"] for row in measured["escapes"])
    assert ordinary < weight.MAX_ESCAPE_RATIO
