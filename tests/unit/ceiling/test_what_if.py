"""A step on another device or with another target, on numbers a reader can redo."""

from __future__ import annotations

import pytest

from specpilot_cli.ceiling.factors import measure_ceiling
from specpilot_cli.ceiling.peaks import Peaks
from specpilot_cli.ceiling.what_if import what_if
from specpilot_cli.errors import InputError
from specpilot_cli.models.registry import load_model
from specpilot_cli.models.work import StepShape, step_work
from specpilot_cli.report.adapters import what_if_text
from specpilot_cli.schema.gpu_profile import PeakRates


def _rates(bandwidth, compute):
    def peak(value):
        return [{"value": value, "kind": "datasheet", "source": "made up for a test"}]

    return PeakRates.model_validate(
        {"read_bytes_per_s": peak(bandwidth), "flops_per_s": {"bfloat16": peak(compute)}}
    )


def _seconds(found):
    return {item.name: item.projected_s for item in found.classes}


def test_classes_move_with_their_floors_and_the_rest_stays(make_profile, round_rates):
    # 6 ms by bytes, 2 ms by FLOPs, 1 ms uncounted, 1 ms of gaps and 2 ms outside the profile.
    profile = make_profile()
    ceiling = measure_ceiling(profile, Peaks("here", round_rates))
    found = what_if(profile, ceiling, peaks=Peaks("there", _rates(2e12, 4e14)))
    # Twice the bandwidth; four times the rate leaves the recurrent class bound by bytes: 0.25 ms
    # of floor where it was 1 ms.
    assert _seconds(found) == pytest.approx(
        {"target_gemm": 0.003, "recurrent": 0.0005, "rest": 0.001}
    )
    assert found.t_step_s == pytest.approx(0.0045 + 0.003)
    assert found.speedup == pytest.approx(0.012 / 0.0075)
    assert found.kept == ("rest",)
    assert "so is that of rest" in found.assumes
    assert found.target == "t"


def test_the_same_device_changes_nothing(make_profile, round_rates):
    profile = make_profile()
    ceiling = measure_ceiling(profile, Peaks("here", round_rates))
    assert what_if(profile, ceiling, peaks=ceiling.peaks).speedup == pytest.approx(1)


def test_another_target_brings_its_own_bytes_and_classes(make_profile, kernel, round_rates):
    target = load_model("qwen3.5-4b")
    work = step_work(target, None, StepShape(1, 8, 1, 0, 8))
    classes = [kernel("target_gemm", 0.006, 2.7e9, 1e9), kernel("drafter", 0.001, 0.45e9, 1e8)]
    profile = make_profile(classes=classes, draft_block=8)
    ceiling = measure_ceiling(profile, Peaks("here", round_rates))
    found = what_if(profile, ceiling, target=target)
    seconds = _seconds(found)
    # Twice above its floor of 3 ms, as before; the drafter is another model and stays.
    assert seconds["target_gemm"] == pytest.approx(2 * work["target_gemm"].bytes / 0.9e12)
    assert seconds["drafter"] == pytest.approx(0.001)
    assert seconds["recurrent"] == pytest.approx(work["recurrent"].bytes / 0.9e12)
    assert "enter at their floors" in found.assumes
    coded = what_if(
        make_profile(classes=classes, draft_block=8, weights="w12"), ceiling, target=target
    )
    assert _seconds(coded)["target_gemm"] == pytest.approx(seconds["target_gemm"] * 12.02 / 16)


def test_classes_the_other_target_lacks_vanish(make_profile, round_rates):
    profile = make_profile()
    ceiling = measure_ceiling(profile, Peaks("here", round_rates))
    found = what_if(profile, ceiling, target=load_model("llama-3.1-8b"))
    assert _seconds(found)["recurrent"] == 0


def test_a_much_slower_device_is_not_zero_times_as_fast(make_profile, round_rates):
    profile = make_profile()
    ceiling = measure_ceiling(profile, Peaks("here", round_rates))
    found = what_if(profile, ceiling, peaks=Peaks("there", _rates(1e9, 1e11)))
    assert found.speedup == pytest.approx(0.0015, rel=0.1)
    assert "t on there: 0.0015× as many" in what_if_text(found)


def test_something_must_change(make_profile, round_rates):
    profile = make_profile()
    ceiling = measure_ceiling(profile, Peaks("here", round_rates))
    with pytest.raises(InputError, match="another device"):
        what_if(profile, ceiling)
