"""Which differences between two descriptions of a server mean that it was started anew."""

from __future__ import annotations

from typing import Any

import pytest

from specpilot_cli.engines.launches import relaunched

BEFORE = {"version": "1", "random_seed": 7, "startup_time": {"load": 1.5}, "last_gen_throughput": 5}


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, []),
        ({"last_gen_throughput": 9.0, "requests": 3}, []),
        ({"random_seed": None}, []),
        ({"pid": 12}, []),
        ({"random_seed": 8}, ["random_seed"]),
        ({"startup_time": {"load": 1.6}, "version": "2"}, ["startup_time", "version"]),
    ],
)
def test_only_what_a_start_changes_counts(change: dict[str, Any], found: list[str]) -> None:
    assert relaunched(BEFORE, {**BEFORE, **change}) == found
