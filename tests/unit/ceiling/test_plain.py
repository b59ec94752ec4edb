"""Eq. 3 without a curve of step times: from two profiles, or from floors on both sides."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specpilot_cli.ceiling.floors import PAPER_RULE
from specpilot_cli.ceiling.model_floors import ModelFloors, model_floors
from specpilot_cli.ceiling.peaks import Peaks, load_gpu
from specpilot_cli.ceiling.plain import floor_speedups, over_plain
from specpilot_cli.ceiling.speedup import TauPoint
from specpilot_cli.errors import InputError, MeasurementInvalid
from specpilot_cli.models.registry import load_model
from specpilot_cli.models.work import StepShape
from specpilot_cli.schema.step_profile import StepProfile, StepTimeCurve

Make = Callable[..., StepProfile]
_PLAIN = {"mode": "ar", "nodes": 0, "rows": 1, "draft_block": None, "drafter": None}


def test_two_profiles_give_break_even_and_speedup(make_profile: Make) -> None:
    step, plain = make_profile(t_step_s=0.015), make_profile(**_PLAIN, t_step_s=0.010)
    found = over_plain(step, 4.5, plain=plain)
    assert found is not None
    assert (found.c, found.speedup) == (pytest.approx(1.5), pytest.approx(3.0))
    assert "4.500 make it 3.000×" in found.text
    unknown = over_plain(step, None, plain=plain)
    assert unknown is not None
    assert unknown.speedup is None
    assert "from 1.50 tokens per step on; τ is not known" in unknown.text


def test_a_profile_comes_before_a_curve_and_a_curve_before_nothing(
    make_profile: Make, make_curve: Callable[..., StepTimeCurve]
) -> None:
    step, plain = make_profile(t_step_s=0.015), make_profile(**_PLAIN, t_step_s=0.012)
    curve = make_curve([(4, 0.02)], ar_step_s=0.010)
    both, by_curve = over_plain(step, 3.0, plain=plain, curve=curve), over_plain(
        step, 3.0, curve=curve
    )  # fmt: skip
    assert both is not None
    assert by_curve is not None
    assert (both.ar_step_s, by_curve.ar_step_s) == (0.012, 0.010)
    assert over_plain(step, 3.0) is None
    assert over_plain(plain, 1.0, curve=curve) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": "chain", "nodes": 3, "rows": 4}, "this is a chain step"),
        ({"engine": {"name": "other", "version": "1"}}, "another engine: other"),
        ({"target": {"name": "other"}}, "another target: other"),
        ({"dtype": "float32"}, "another data type: float32"),
        ({"requests": 8}, "another number of requests: 8"),
        ({"weights": "w12"}, "another form of weights: w12"),
        ({"t_step_s": None}, "no step time"),
    ],
)
def test_other_deployments_are_no_baseline(
    change: dict[str, object], words: str, make_profile: Make
) -> None:
    plain = make_profile(**(_PLAIN | {"t_step_s": 0.01} | change))
    with pytest.raises(InputError, match=words):
        over_plain(make_profile(t_step_s=0.015), 3.0, plain=plain)


def test_plain_decoding_has_no_baseline(make_profile: Make) -> None:
    plain = make_profile(**_PLAIN, t_step_s=0.010)
    with pytest.raises(InputError, match="plain decoding already"):
        over_plain(plain, 1.0, plain=plain)


def _floors(shape: StepShape) -> ModelFloors:
    gpu = load_gpu("h200")
    target, drafter = load_model("qwen3.8-27b"), load_model("qwen3.8-27b-dflash2")
    peaks = Peaks(gpu.title, gpu.peaks)
    return model_floors(target, drafter if shape.block else None, shape, peaks, rule=PAPER_RULE)


def test_floors_of_both_sides_give_a_bound() -> None:
    plain, step = _floors(StepShape(8, 1, 1, 100, 0)), _floors(StepShape(8, 8, 1, 100, 8))
    found = floor_speedups(step, 4.25)
    assert found.step is not None
    assert found.step.c == pytest.approx(step.floor_s / plain.floor_s)
    assert found.step.speedup == pytest.approx(4.25 * plain.floor_s / step.floor_s)
    assert found.floors is step
    assert floor_speedups(plain, None).step is None
    with pytest.raises(MeasurementInvalid, match="at least one token"):
        floor_speedups(step, 0.5)


def test_the_best_tree_of_a_replay_is_the_step_compared() -> None:
    """At 24 requests 129 rows each are bound by arithmetic, so the largest τ does not win."""
    trees = [TauPoint(128, 5.2), TauPoint(8, 4.0), TauPoint(16, 4.6)]
    found = floor_speedups(_floors(StepShape(24, 1, 1, 100, 16)), None, trees)
    assert [point.n_nodes for point in found.points] == [8, 16, 128]
    assert {point.basis for point in found.points} == {"floor"}
    best = max(found.points, key=lambda point: point.speedup)
    assert best.n_nodes != 128
    assert found.floors.shape.rows == best.n_nodes + 1
    assert found.step is not None
    assert found.step.speedup == pytest.approx(best.speedup)
    for point in found.points:
        alone = _floors(StepShape(24, point.n_nodes + 1, point.tau, 100, 16))
        assert point.step_s == pytest.approx(alone.floor_s)
