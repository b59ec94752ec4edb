"""Byte floors against numbers worked out by hand."""

from __future__ import annotations

import pytest

from specpilot_cli.ceiling.floors import FULL_PEAK, class_floors, floor_s
from specpilot_cli.ceiling.peaks import Peaks
from specpilot_cli.errors import InputError


def test_floor_takes_the_larger_of_byte_time_and_flop_time():
    # 0.9 TB at 90 % of 1 TB/s is 1 s; 60 TFLOP at 60 % of 100 TFLOP/s is 1 s.
    assert floor_s(6e13, 0.9e12, flops_per_s=1e14, bytes_per_s=1e12) == pytest.approx(1.0)
    assert floor_s(12e13, 0.9e12, flops_per_s=1e14, bytes_per_s=1e12) == pytest.approx(2.0)
    assert floor_s(6e13, 2.7e12, flops_per_s=1e14, bytes_per_s=1e12) == pytest.approx(3.0)


def test_full_peak_rule_drops_both_fractions():
    kwargs = {"flops_per_s": 1e14, "bytes_per_s": 1e12, "rule": FULL_PEAK}
    assert floor_s(1e14, 0.5e12, **kwargs) == pytest.approx(1.0)
    assert floor_s(1e13, 0.5e12, **kwargs) == pytest.approx(0.5)


def test_each_class_names_what_bounds_it(make_profile, round_rates):
    gemm, recurrent, rest = class_floors(make_profile(), Peaks("test", round_rates))
    assert (gemm.bound, gemm.floor_s) == ("bytes", pytest.approx(0.003))
    assert gemm.slack_s == pytest.approx(0.003)
    assert (recurrent.bound, recurrent.floor_s) == ("flops", pytest.approx(0.001))
    assert recurrent.byte_s == pytest.approx(0.0005)
    assert (rest.bound, rest.floor_s, rest.slack_s) == ("measured", 0.001, 0.0)


def test_bytes_alone_still_give_a_floor(make_profile, round_rates, kernel):
    profile = make_profile(classes=[kernel("drafter", 0.004, 1.8e9, None)])
    (drafter,) = class_floors(profile, Peaks("test", round_rates))
    assert (drafter.bound, drafter.floor_s) == ("bytes", pytest.approx(0.002))


def test_a_class_faster_than_its_floor_is_flagged(make_profile, round_rates, kernel):
    profile = make_profile(classes=[kernel("target_gemm", 0.002, 2.7e9, 0)])
    (gemm,) = class_floors(profile, Peaks("test", round_rates))
    assert gemm.beats_floor
    assert gemm.slack_s == pytest.approx(-0.001)


def test_missing_arithmetic_rate_is_an_error_that_lists_the_known_ones(make_profile, round_rates):
    with pytest.raises(InputError, match="no float32 arithmetic rate") as caught:
        class_floors(make_profile(dtype="float32"), Peaks("test", round_rates))
    assert "bfloat16" in (caught.value.hint or "")


def test_class_data_type_overrides_the_profile(make_profile, round_rates, kernel):
    draft = kernel("drafter", 0.004, 9e8, 1e9) | {"dtype": "float32"}
    with pytest.raises(InputError, match="float32"):
        class_floors(make_profile(classes=[draft]), Peaks("test", round_rates))
