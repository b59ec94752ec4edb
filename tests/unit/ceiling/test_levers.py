"""Projections of single mechanisms, on steps whose numbers a reader can redo."""

from __future__ import annotations

import pytest

from specpilot_cli.ceiling.factors import measure_ceiling
from specpilot_cli.ceiling.levers import find_levers, w12_saving_s
from specpilot_cli.ceiling.peaks import Peaks
from specpilot_cli.ceiling.speedup import TauPoint, speedup_at, speedup_curve

RATIO = 12.02 / 16


def _levers(profile, rates, *, tau=None, curve=None, trees=()):
    ceiling = measure_ceiling(profile, Peaks("t", rates))
    found = find_levers(profile, ceiling, tau=tau, curve=curve, trees=trees)
    return {lever.name: lever for lever in found}, ceiling


def _chain(make_profile, kernel, **changes):
    classes = [kernel("target_gemm", 0.008, 2.7e9, 1e9), kernel("head", 0.001, 0.45e9, 1e8)]
    return make_profile(**({"classes": classes, "draft_block": 8} | changes))


def test_w12_saves_a_quarter_of_the_time_that_weights_take(make_profile, kernel, round_rates):
    levers, ceiling = _levers(_chain(make_profile, kernel), round_rates)
    saved = 0.009 * (1 - RATIO)
    assert w12_saving_s(ceiling) == pytest.approx(saved)
    assert levers["W12"].high == pytest.approx(0.012 / (0.012 - saved))
    assert levers["W12"].low == pytest.approx(0.012 / (0.012 - 0.009 * (1 - 1 / 1.17)))


def test_w12_saves_nothing_below_the_time_of_the_arithmetic(make_profile, kernel, round_rates):
    # 4.5e11 FLOP at 60 TFLOP/s are 7.5 of the 8 ms.
    classes = [kernel("target_gemm", 0.008, 2.7e9, 4.5e11)]
    _, ceiling = _levers(make_profile(classes=classes), round_rates)
    assert w12_saving_s(ceiling) == pytest.approx(0.0005)
    busy = [kernel("target_gemm", 0.008, 2.7e9, 6e11)]
    levers, _ = _levers(make_profile(classes=busy), round_rates)
    assert levers["W12"].high is None
    assert "bound by bytes" in levers["W12"].arithmetic


def test_a_tree_takes_its_tokens_from_the_own_replay_first(
    make_profile, kernel, round_rates, make_curve
):
    profile = _chain(make_profile, kernel)
    curve = make_curve([(8, 0.012), (33, 0.015)])
    trees = [TauPoint(16, 5.0), TauPoint(32, 6.0)]
    levers, _ = _levers(profile, round_rates, tau=4.0, curve=curve, trees=trees)
    tree = levers["tree of 32 nodes"]
    assert tree.high == pytest.approx(1.5)
    assert tree.low == pytest.approx(1.5 * 12 / 15)
    assert "in replay" in tree.arithmetic
    assert "recorded" in tree.arithmetic


def test_a_tree_of_unknown_tokens_has_no_number(make_profile, kernel, round_rates):
    profile = _chain(make_profile, kernel, draft_block=16, rows=16, nodes=15)
    levers, _ = _levers(profile, round_rates)
    assert not levers["tree of 32 nodes"].known
    assert "--lattices" in levers["tree of 32 nodes"].arithmetic


def test_two_levels_stand_on_w12_and_need_spans(make_profile, kernel, round_rates):
    levers, _ = _levers(_chain(make_profile, kernel), round_rates)
    assert not levers["TLV on top of W12"].known
    spans = [{"name": "VERIFY", "seconds": 0.009}, {"name": "DRAFT", "seconds": 0.001}]
    levers, ceiling = _levers(_chain(make_profile, kernel, spans=spans), round_rates)
    saved = w12_saving_s(ceiling)
    cycle = 0.012 - saved + 0.001 + (0.009 - saved) * 11.5 / 14.9 + 1.6e-3 * 2 / 3
    expected = 11.67 / 6.16 * (0.012 - saved) / cycle
    assert levers["TLV on top of W12"].high == pytest.approx(expected)
    coded, _ = _levers(_chain(make_profile, kernel, spans=spans, weights="w12"), round_rates)
    assert "TLV" in coded
    assert not coded["W12"].known


def test_the_largest_gain_stands_first_and_the_unknown_last(make_profile, kernel, round_rates):
    profile = _chain(make_profile, kernel)
    ceiling = measure_ceiling(profile, Peaks("t", round_rates))
    levers = find_levers(profile, ceiling, tau=None, curve=None, trees=())
    gains = [lever.high or 0 for lever in levers]
    assert gains == sorted(gains, reverse=True)
    assert not levers[-1].known


def test_the_node_budget_gains_what_tau_over_c_gains(make_profile, kernel, round_rates, make_curve):
    profile = _chain(make_profile, kernel)
    curve = make_curve([(8, 0.012), (17, 0.015), (33, 0.030)])
    trees = [TauPoint(16, 6.0), TauPoint(32, 6.5)]
    ceiling = measure_ceiling(profile, Peaks("t", round_rates))
    now = speedup_at(curve, 7, tau=4.0)
    found = find_levers(
        profile, ceiling, tau=4.0, curve=curve, trees=trees,
        speedups=speedup_curve(trees, curve), now=now,
    )  # fmt: skip
    budget = next(lever for lever in found if lever.name == "node budget")
    assert budget.low == budget.high == pytest.approx(6 / 15 * 12 / 4)
    assert "7 → 16 nodes" in budget.arithmetic
    levers, _ = _levers(profile, round_rates)
    assert not levers["node budget"].known
    assert "--step-times" in levers["node budget"].arithmetic


def test_recurrent_layers_gain_down_to_their_floor(make_profile, kernel, round_rates):
    # 0.45e9 bytes at 0.9 TB/s are 0.5 of the 2 ms.
    classes = [kernel("target_gemm", 0.006, 2.7e9, 1e9), kernel("recurrent", 0.002, 0.45e9, 1e9)]
    levers, _ = _levers(make_profile(classes=classes), round_rates)
    found = levers["WY verify of recurrent layers"]
    assert found.low is None
    assert found.high == pytest.approx(12 / 10.5)
    plain = make_profile(classes=classes, mode="ar", nodes=0, rows=1)
    levers, _ = _levers(plain, round_rates)
    assert not levers["WY verify of recurrent layers"].known
    levers, _ = _levers(_chain(make_profile, kernel), round_rates)
    assert "no recurrent layers" in levers["WY verify of recurrent layers"].arithmetic


def test_a_certified_head_may_gain_or_lose(make_profile, kernel, round_rates):
    levers, _ = _levers(_chain(make_profile, kernel), round_rates)
    head = levers["certified head"]
    assert head.high == pytest.approx(12 / (11 + 482 / 878))
    assert head.low == pytest.approx(12 / (11 + 2598 / 1750))
    coded, _ = _levers(_chain(make_profile, kernel, weights="w12"), round_rates)
    assert not coded["certified head"].known


def test_a_certified_head_never_beats_its_arithmetic(make_profile, kernel, round_rates):
    # 4.8e10 FLOP at 60 TFLOP/s are 0.8 of the 1 ms; its bytes take 0.9 ms.
    classes = [kernel("target_gemm", 0.008, 2.7e9, 1e9), kernel("head", 0.001, 0.81e9, 4.8e10)]
    levers, _ = _levers(make_profile(classes=classes), round_rates)
    assert levers["certified head"].high == pytest.approx(12 / 11.8)
