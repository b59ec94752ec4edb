"""Pages, plans and limits say what the measurements on the H200 say."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specpilot_kernels.w12 import plans, shapes


@pytest.fixture(scope="module")
def scripts(repo: Path) -> Callable[[str], ModuleType]:
    """Imports a module of `scripts/`."""

    def load(name: str) -> ModuleType:
        sys.path.insert(0, str(repo / "scripts"))
        try:
            return import_module(name)
        finally:
            sys.path.remove(str(repo / "scripts"))

    return load


@pytest.fixture(scope="module")
def docs(scripts: Callable[[str], ModuleType]) -> ModuleType:
    """`scripts/bench_w12_docs.py` as a module."""
    return scripts("bench_w12_docs")


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


def test_shipped_plans_are_those_of_the_result(repo: Path, scripts: Callable[..., Any]) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    result = repo / "docs/measurements/w12_plans_h200.json"
    document = json.loads(result.read_text(encoding="utf-8"))
    expected = scripts("w12_plans").plans_of(document)
    assert plans.read(plans._SHIPPED) == {document["gpu"]: expected}
    names = {plans.shape_name(*shape) for shape in shapes.distinct()}
    assert expected.keys() == names


def test_the_limit_of_escapes_is_where_w12_still_wins(
    docs: ModuleType, measured: dict[str, Any]
) -> None:
    weight = pytest.importorskip("specpilot_kernels.w12.weight", reason="torch is not installed")
    most = docs.most_escapes(measured)
    assert sorted(most) == [1, 32, 64]
    assert 0.9 * min(most.values()) < weight.MAX_ESCAPE_RATIO < min(most.values())
    ordinary = min(row["escape_ratio"] for row in measured["escapes"])
    assert ordinary < weight.MAX_ESCAPE_RATIO
