"""What a step profile and a step-time curve refuse."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from specpilot_cli.io.json_file import read_json_model
from specpilot_cli.paths import bundled
from specpilot_cli.schema.gpu_profile import PeakRates
from specpilot_cli.schema.step_profile import StepProfile, StepTimeCurve


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 7}, "rows must be nodes"),
        ({"mode": "ar"}, "verifies no nodes"),
        ({"t_prof_s": 0.008}, "more than the profiled step"),
        ({"t_step_s": 0.0}, "greater than 0"),
        ({"t_step_s": float("nan")}, "finite number"),
        ({"tau": 0.5}, "greater than or equal to 1"),
        ({"colour": "red"}, "Extra inputs"),
        ({"device": {"name": "x", "kind": "cpu"}}, "states its threads"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_profile_refuses(profile_dict, changes, message):
    with pytest.raises(ValidationError, match=message):
        StepProfile.model_validate(profile_dict(**changes))


def test_profile_refuses_a_class_named_twice(profile_dict, kernel):
    twice = [kernel("rest", 0.001, 0, 0), kernel("rest", 0.001, 0, 0)]
    with pytest.raises(ValidationError, match="may appear once"):
        StepProfile.model_validate(profile_dict(classes=twice))


def test_profile_survives_a_round_trip_through_json(make_profile):
    profile = make_profile()
    assert StepProfile.model_validate_json(profile.model_dump_json()) == profile


@pytest.mark.parametrize(
    "points", [[(16, 0.02), (8, 0.02)], [(8, 0.02), (8, 0.02)], []], ids=["order", "twice", "none"]
)
def test_curve_refuses_unordered_points(make_curve, points):
    with pytest.raises(ValidationError):
        make_curve(points)


def test_rates_refuse_two_numbers_of_one_kind():
    number = {"value": 1.0, "kind": "measured", "source": "made up"}
    with pytest.raises(ValidationError, match="at most one number of each kind"):
        PeakRates.model_validate({"read_bytes_per_s": [number, number], "flops_per_s": {}})


def test_recorded_h200_curve_says_what_it_is():
    path = bundled("profiles") / "step_times" / "h200-qwen3.8-27b-dflash2-bf16.json"
    curve = read_json_model(path, StepTimeCurve)
    assert curve.name == path.stem
    assert curve.includes_drafting
    assert "dummy weights" in curve.target.name
    assert [(p.rows, p.step_s) for p in curve.points] == [(8, 0.0200), (16, 0.0215)]
    assert curve.ar_step_s == 0.0148
