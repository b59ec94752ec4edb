"""The Triton kernels in Triton's interpreter, on every adversarial case."""

from __future__ import annotations

from typing import Any

import pytest
from tree_attention_cases import CASES
from triton_programs import lines_of


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    return lines_of("interpreted.py")


def test_every_case_ran(lines: list[dict[str, Any]]) -> None:
    assert {line["case"] for line in lines} == {*CASES, "compact"}


def test_attention_is_each_rows_path_as_a_sequence(lines: list[dict[str, Any]]) -> None:
    errors = {(line["case"], line["dtype"]): line["error"] for line in lines if "error" in line}
    assert len({dtype for _, dtype in errors}) == 2
    assert {key: error for key, error in errors.items() if not error <= 1} == {}


def test_compaction_moves_what_indexing_moves(lines: list[dict[str, Any]]) -> None:
    moved = [line for line in lines if line["case"] == "compact"]
    assert len(moved) > 5
    assert all(line["same"] for line in moved), moved
