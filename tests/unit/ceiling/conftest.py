"""Hand-made profiles whose floors a reader can recompute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specpilot_cli.schema.gpu_profile import PeakRates
from specpilot_cli.schema.step_profile import StepProfile, StepTimeCurve


def _peak(value: float, kind: str = "datasheet") -> dict[str, Any]:
    return {"value": value, "kind": kind, "source": "made up for a test"}


# 1 TB/s and 100 TFLOP/s: 90 % and 60 % of them are 0.9e12 and 60e12.
ROUND_RATES = PeakRates.model_validate(
    {"read_bytes_per_s": [_peak(1e12)], "flops_per_s": {"bfloat16": [_peak(1e14)]}}
)


def _kernel(
    name: str, seconds: float, n_bytes: float | None, flops: float | None
) -> dict[str, Any]:
    return {"name": name, "seconds": seconds, "bytes": n_bytes, "flops": flops, "calls": 1}


def _profile_dict(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = {
        "schema_version": 1,
        "engine": {"name": "test", "version": "1"},
        "device": {
            "name": "test device",
            "kind": "cpu",
            "threads": 1,
            "peaks": ROUND_RATES.model_dump(mode="json"),
        },
        "target": {"name": "t"},
        "drafter": {"name": "d"},
        "dtype": "bfloat16",
        "mode": "chain",
        "nodes": 7,
        "rows": 8,
        "steps": 10,
        "t_step_s": 0.012,
        "t_prof_s": 0.010,
        "tau": 4.0,
        "classes": [
            _kernel("target_gemm", 0.006, 2.7e9, 1e9),  # 3 ms by bytes
            _kernel("recurrent", 0.002, 0.45e9, 6e10),  # 1 ms by FLOPs, 0.5 ms by bytes
            _kernel("rest", 0.001, None, None),  # keeps its 1 ms
        ],
        "source": "made up for a test",
    }
    if changes.get("mode") == "ar":
        data["tau"] = 1.0
    return data | changes


def _curve(points: list[tuple[int, float]], ar_step_s: float = 0.010) -> StepTimeCurve:
    return StepTimeCurve.model_validate(
        {
            "schema_version": 1,
            "name": "test-curve",
            "engine": {"name": "test", "version": "1"},
            "device": {"name": "test device", "kind": "cpu", "threads": 1},
            "target": {"name": "t"},
            "drafter": {"name": "d"},
            "dtype": "bfloat16",
            "ar_step_s": ar_step_s,
            "includes_drafting": True,
            "points": [{"rows": rows, "step_s": step} for rows, step in points],
            "source": "made up for a test",
        }
    )


@pytest.fixture
def round_rates() -> PeakRates:
    return ROUND_RATES


@pytest.fixture
def kernel() -> Callable[..., dict[str, Any]]:
    return _kernel


@pytest.fixture
def profile_dict() -> Callable[..., dict[str, Any]]:
    return _profile_dict


@pytest.fixture
def make_profile() -> Callable[..., StepProfile]:
    return lambda **changes: StepProfile.model_validate(_profile_dict(**changes))


@pytest.fixture
def make_curve() -> Callable[..., StepTimeCurve]:
    return _curve
