"""The published figures of the demo recipe are those of the file behind them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="module")
def script(repo: Path) -> ModuleType:
    """`scripts/measure_demo_recipe.py` as a module."""
    path = repo / "scripts" / "measure_demo_recipe.py"
    spec = importlib.util.spec_from_file_location("measure_demo_recipe", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def measured(repo: Path, script: ModuleType) -> dict[str, Any]:
    """The envelope of the published runs."""
    envelope: dict[str, Any] = json.loads((repo / script.OUTPUT).read_text(encoding="utf-8"))
    return envelope


def test_the_table_is_the_files(repo: Path, script: ModuleType, measured: dict[str, Any]) -> None:
    page = (repo / script.EVIDENCE).read_text(encoding="utf-8")
    assert page == script.with_table(page, script.table(measured))


def test_the_readme_quotes_the_runs(
    repo: Path, script: ModuleType, measured: dict[str, Any]
) -> None:
    readme = (repo / "README.md").read_text(encoding="utf-8")
    runs = [row for row in measured["results"]["runs"] if not row["fault"]]
    assert len(runs) == 3
    assert " · ".join(script._interval(row["gain"]) for row in runs) in readme


def test_lossless_runs_were_accepted_and_the_fault_was_caught(
    script: ModuleType, measured: dict[str, Any]
) -> None:
    runs = measured["results"]["runs"]
    assert [bool(row["fault"]) for row in runs] == [False, False, False, True]
    assert all(script.as_expected(row) for row in runs)


def test_measured_on_the_models_and_the_recipe_that_ship(
    repo: Path, measured: dict[str, Any]
) -> None:
    from specpilot_cli.io.hashing import sha256_file, sha256_folder

    for item in measured["inputs"]:
        path = repo / item["path"]
        digest = sha256_folder(path) if path.is_dir() else sha256_file(path)
        assert digest == item["sha256"], f"{item['path']} has changed: measure again"


@pytest.mark.parametrize(
    ("fault", "verdict", "expected"),
    [(None, "accept", True), (None, "reject", False), ({"bias": 2}, "reject", True),
     ({"bias": 2}, "accept", False)],
)  # fmt: skip
def test_a_missed_fault_is_no_success(
    script: ModuleType, fault: Any, verdict: str, expected: bool
) -> None:
    row = {"fault": fault, "token_force": {"verdict": verdict}}
    assert script.as_expected(row) is expected
    assert script.as_expected({**row, "token_force": None}) is False
