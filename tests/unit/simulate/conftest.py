"""Recordings scripted token by token, random ones, and step times that are easy to add up."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))  # as for a script that runs there

from diagnose_pair.synthetic import Drafter, record

from specpilot_cli.schema.batch_times import BatchStepTimes
from specpilot_cli.schema.lattice import LatticeRecording


def curve(name: str, driver: str, *points: tuple[float, float]) -> dict[str, Any]:
    return {
        "name": name,
        "driver": driver,
        "points": [{"amount": x, "seconds": y} for x, y in points],
    }


def step_times(*decode: dict[str, Any], prefill: float = 0.001) -> BatchStepTimes:
    """Step times of these components; a prompt row costs `prefill` seconds."""
    return BatchStepTimes.model_validate(
        {
            "schema_version": 1,
            "name": "invented",
            "engine": {"name": "invented", "version": "1"},
            "device": {"name": "invented", "kind": "gpu"},
            "target": {"name": "target"},
            "drafter": {"name": "drafter"},
            "dtype": "bfloat16",
            "decode": list(decode),
            "prefill": curve("prefill", "prompt_rows", (1, prefill), (1000, 1000 * prefill)),
            "source": "invented for tests",
        }
    )


@pytest.fixture
def make_times() -> Callable[..., BatchStepTimes]:
    """`make_times((name, driver, (amount, seconds), …), …)`: step times of these components."""
    return lambda *decode: step_times(*(curve(*item) for item in decode))


@pytest.fixture
def times() -> BatchStepTimes:
    """10 ms per step, 0.1 ms per row, 0.05 ms per drafted row."""
    return step_times(
        curve("base", "step", (1, 0.010)),
        curve("rows", "rows", (1, 0.0001), (1000, 0.1)),
        curve("drafter", "draft_rows", (1, 0.00005), (1000, 0.05)),
    )


@pytest.fixture(scope="session")
def recorded() -> Callable[..., LatticeRecording]:
    """`recorded(seed=1, **changes)`: a synthetic recording with these settings, kept."""
    kept: dict[tuple[Any, ...], LatticeRecording] = {}

    def make(seed: int = 1, **changes: Any) -> LatticeRecording:
        key = (seed, *sorted(changes.items()))
        if key not in kept:
            settings = {"n_positions": 15, "n_requests": 12, "tokens": 60, **changes}
            kept[key] = record(Drafter(**settings), seed)
        return kept[key]

    return make
