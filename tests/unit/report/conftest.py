"""Data for every figure, and a whole report that holds them all."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from specpilot_cli.report.figures import (
    acceptance_by_position,
    accepted_lengths,
    batch_speedup,
    ceiling_factors,
    forest,
    mismatch_bars,
    roofline,
    speedup_curve,
    step_waterfall,
    tau_curve,
    w12_tensors,
)
from specpilot_cli.report.html import (
    InputHash,
    KeyFigure,
    MethodNote,
    ReportData,
    ReportTable,
    Verdict,
)

CONDITION = "demo pair <8 layers>, 2 threads, float32 & block 16"


def _speedup_panel(heading: str, projected: bool) -> speedup_curve.SpeedupPanel:
    basis = "extrapolated" if projected else "recorded"
    marks = tuple(
        speedup_curve.SpeedupMark(n, tau, c, tau / c, basis)
        for n, tau, c in ((8, 3.2, 2.0), (16, 3.6, 2.0), (32, 3.9, 3.0))
    )
    stock = speedup_curve.SpeedupMark(7, 2.8, 2.0, 1.4, "recorded")
    return speedup_curve.SpeedupPanel(heading, projected, marks, stock)


def _w12_tensors() -> w12_tensors.W12TensorsData:
    point = w12_tensors.W12Point
    points = (
        point(
            "model.layers.0.mlp.up_proj.weight",
            (256, 512),
            12.08,
            12.0,
            8,
            131072,
            (90, 105, 107, 108, 112),
        ),
        point(
            "model.layers.1.mlp.up_proj.weight",
            (256, 512),
            12.12,
            12.0,
            130,
            131072,
            (100, 106, 107, 109, 112),
            3,
        ),
        point(
            "model.layers.0.self_attn.q_proj.weight", (128, 128), 12.5, 12.0, 0, 16384, None, 128
        ),
    )
    return w12_tensors.W12TensorsData(points, CONDITION)


def _by_regime() -> dict[str, tuple[Any, Any]]:
    position, kernel = acceptance_by_position.PositionMark, roofline.RooflineMark
    positions = (
        position(0, 900, 0.81, 0.95, 0.80),
        position(1, 700, 0.40, 0.94, 0.83),
        position(2, 280, 0.42, 0.93, 0.81),
    )
    speedups = {
        "chain:block=8": (2.1, 1.4, 1.1),
        "tree:nodes=32,block=16": (2.6, 1.3, 0.8),
        "shared:rows=192,block=16": (2.6, 1.5, 1.2),
    }
    kernels = (
        kernel("target_gemm", 4e11, 2.4e10, 0.016),
        kernel("attention", 9e11, 1e9, 0.004),
        kernel("head", 2e10, 1.3e9, 0.001),
    )
    return {
        "acceptance_by_position": (
            acceptance_by_position,
            acceptance_by_position.PositionData(positions, "position 1 loses most", CONDITION),
        ),
        "batch_speedup": (
            batch_speedup,
            batch_speedup.BatchSpeedupData(
                (1, 8, 24), tuple(batch_speedup.BatchLine(*item) for item in speedups.items()),
                "plain decoding", CONDITION,
            ),
        ),
        "roofline": (
            roofline, roofline.RooflineData(kernels, 9.9e14, 3.35e12, 0.6, 0.9, CONDITION),
        ),
    }  # fmt: skip


def _lengths() -> accepted_lengths.LengthData:
    return accepted_lengths.LengthData(
        accepted_lengths.LengthSeries("a best-first tree of 32 nodes", (0, 24, 23, 10, 8, 35)),
        accepted_lengths.LengthSeries("stock chain", (0, 40, 20, 5, 10, 25)),
        CONDITION,
    )


def figure_cases() -> dict[str, tuple[Any, Any]]:
    """Module and data of each figure, by name."""
    tree = tau_curve.TauSeries(
        "best_first", "best-first", (8, 16, 32), (3.2, 3.6, 3.9), (3.1, 3.5, 3.8), (3.3, 3.7, 4.0)
    )
    flat = tau_curve.TauSeries("marginal", "marginal", (8, 16, 32), (2.9, 3.3, 3.5))
    classes = (
        step_waterfall.ClassTime("target_gemm", 0.006, 0.003),
        step_waterfall.ClassTime("recurrent", 0.002, 0.001),
        step_waterfall.ClassTime("head", 0.0008, 0.001),
    )
    gains = (
        forest.GainRow("prose", 1.20, 1.15, 1.25, 30),
        forest.GainRow("code", 1.30, None, None, 1),
    )
    bars = (
        mismatch_bars.MismatchBar("stock", 0.0072, 0.0065, 0.0080, 90_000, 2),
        mismatch_bars.MismatchBar("tuned", 0.0073, 0.0066, 0.0081, 90_000, 1, "accept"),
        mismatch_bars.MismatchBar("faulty", 0.0200, 0.0185, 0.0215, 90_000, 192, "reject"),
    )
    return {
        **_by_regime(),
        "accepted_lengths": (accepted_lengths, _lengths()),
        "w12_tensors": (w12_tensors, _w12_tensors()),
        "tau_curve": (
            tau_curve, tau_curve.TauCurveData((tree, flat), 2.8, 7, 5.1, CONDITION, 16),
        ),
        "step_waterfall": (
            step_waterfall, step_waterfall.WaterfallData(0.012, 0.010, classes, CONDITION),
        ),
        "ceiling_factors": (
            ceiling_factors, ceiling_factors.FactorsData(1.83, 1.39, 1.01, CONDITION),
        ),
        "forest": (
            forest,
            forest.ForestData(
                gains, forest.GainRow("all", 1.25, 1.21, 1.29, 31), 1.012, "tuned", "stock",
                "clustered t", CONDITION, 1.22,
            ),
        ),
        "mismatch_bars": (mismatch_bars, mismatch_bars.MismatchData(bars, 0.0122, CONDITION)),
        "speedup_curve": (
            speedup_curve,
            speedup_curve.SpeedupCurveData(
                (_speedup_panel("this machine", False), _speedup_panel("H200", True)), CONDITION
            ),
        ),
    }  # fmt: skip


@pytest.fixture
def cases() -> dict[str, tuple[Any, Any]]:
    return figure_cases()


@pytest.fixture(scope="session")
def drawn() -> dict[str, Any]:
    """Every figure drawn once; they are frozen, and drawing takes a while."""
    return {name: module.draw(data) for name, (module, data) in figure_cases().items()}


@pytest.fixture
def make_report(drawn: dict[str, Any]) -> Callable[..., ReportData]:
    def make(**changes: Any) -> ReportData:
        fields: dict[str, Any] = {
            "title": "Recipe <demo-cpu>",
            "verdict": Verdict("accept", "yes", "tuned is `1.25x` & lossless"),
            "command": "specpilot apply recipe demo-cpu",
            "specpilot_version": "0.1.0",
            "machine": "test machine",
            "created": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
            "key_figures": (KeyFigure("at H200", "2.4×", "16 nodes", basis="projected"),),
            "caveats": ("one A/A comparison",),
            "inputs": (InputHash("target", "ab" * 32),),
            "numbers": (ReportTable("Gains", ("name", "ratio"), (("a", "1.2"), ("b", "–"))),),
            "figures": tuple(drawn.values()),
            "method": (MethodNote("How", "First part.\n\nSecond <part>."),),
            "environment": (("python", "3.11"),),
            "data": {"text": "</script><!--", "nan": float("nan"), "tau": 3.25},
        }
        return ReportData(**(fields | changes))

    return make
