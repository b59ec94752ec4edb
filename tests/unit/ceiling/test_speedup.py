"""Eq. 3: step times, their basis, and the best node budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpilot_cli.ceiling.speedup import (
    TauPoint,
    best_budget,
    speedup_at,
    speedup_curve,
    step_time,
)
from specpilot_cli.errors import InputError


@pytest.mark.parametrize(
    ("rows", "seconds", "basis"),
    [
        (1, 0.020, "extrapolated"),
        (7, 0.020, "extrapolated"),
        (8, 0.020, "recorded"),
        (12, 0.022, "interpolated"),
        (16, 0.024, "recorded"),
        (20, 0.026, "interpolated"),
        (24, 0.028, "recorded"),
        (40, 0.036, "extrapolated"),
    ],
)
def test_step_time_says_how_it_was_obtained(make_curve, rows, seconds, basis):
    curve = make_curve([(8, 0.020), (16, 0.024), (24, 0.028)])
    time = step_time(curve, rows)
    assert (time.seconds, time.basis) == (pytest.approx(seconds), basis)


def test_extrapolation_never_falls(make_curve):
    # Timing noise can make the last point the cheaper one; more rows are not assumed cheaper.
    curve = make_curve([(8, 0.020), (16, 0.019)])
    assert step_time(curve, 64).seconds == pytest.approx(0.019)


def test_a_single_point_is_held_flat(make_curve):
    curve = make_curve([(8, 0.020)])
    assert step_time(curve, 33) == step_time(curve, 33)
    assert step_time(curve, 33).seconds == 0.020
    assert step_time(curve, 33).basis == "extrapolated"


def test_speedup_is_tau_over_c_and_rows_are_nodes_plus_one(make_curve):
    point = speedup_at(make_curve([(8, 0.020)]), 7, tau=5.0)
    assert (point.rows, point.basis) == (8, "recorded")
    assert point.c == pytest.approx(2.0)
    assert point.speedup == pytest.approx(2.5)


def test_best_budget_weighs_tokens_against_time(make_curve):
    # Rows cost: 8 -> 2.0, 16 -> 2.4, 32 -> 4.0 AR steps.
    curve = make_curve([(8, 0.020), (16, 0.024), (32, 0.040)])
    tau = [TauPoint(31, 6.0), TauPoint(7, 4.0), TauPoint(15, 5.4)]
    points = speedup_curve(tau, curve)
    assert [point.n_nodes for point in points] == [7, 15, 31]
    assert [round(point.speedup, 3) for point in points] == [2.0, 2.25, 1.5]
    assert best_budget(points).n_nodes == 15


def test_a_tie_goes_to_fewer_nodes(make_curve):
    points = speedup_curve(
        [TauPoint(7, 4.0), TauPoint(15, 4.0)], make_curve([(8, 0.02), (16, 0.02)])
    )
    assert best_budget(points).n_nodes == 7


def test_best_budget_can_refuse_extrapolated_points(make_curve):
    curve = make_curve([(8, 0.020), (16, 0.020)])
    points = speedup_curve([TauPoint(7, 4.0), TauPoint(63, 9.0)], curve)
    assert best_budget(points).n_nodes == 63
    kept = best_budget(points, bases=frozenset({"recorded", "interpolated"}))
    assert kept.n_nodes == 7
    with pytest.raises(InputError, match="interpolated"):
        best_budget(points, bases=frozenset({"interpolated"}))


@pytest.mark.parametrize("nodes", [[], [7, 7]], ids=["none", "twice"])
def test_unusable_budgets_are_refused(make_curve, nodes):
    with pytest.raises(InputError, match="each node budget once"):
        speedup_curve([TauPoint(n, 2.0) for n in nodes], make_curve([(8, 0.020)]))


def test_fewer_tokens_than_one_are_refused(make_curve):
    with pytest.raises(InputError, match="at least one token"):
        speedup_at(make_curve([(8, 0.020)]), 7, tau=0.9)


def test_no_rows_are_refused(make_curve):
    with pytest.raises(InputError, match="at least one row"):
        step_time(make_curve([(8, 0.020)]), 0)


@given(
    st.lists(
        st.tuples(st.integers(2, 200), st.floats(1e-4, 1.0)),
        min_size=1,
        max_size=6,
        unique_by=lambda point: point[0],
    ),
    st.integers(1, 400),
)
def test_step_time_stays_within_its_neighbours(points, rows):
    from specpilot_cli.schema.step_profile import StepTimeCurve

    points = sorted(points)
    curve = StepTimeCurve.model_validate(
        {
            "schema_version": 1, "name": "p", "engine": {"name": "t", "version": "1"},
            "device": {"name": "t", "kind": "cpu", "threads": 1}, "target": {"name": "t"},
            "drafter": {"name": "d"}, "dtype": "bfloat16", "ar_step_s": 0.01,
            "includes_drafting": True, "source": "made up for a test",
            "points": [{"rows": r, "step_s": s} for r, s in points],
        }
    )  # fmt: skip
    time = step_time(curve, rows)
    if points[0][0] <= rows <= points[-1][0]:
        low = max((p for p in points if p[0] <= rows), key=lambda p: p[0])
        high = min((p for p in points if p[0] >= rows), key=lambda p: p[0])
        bounds = sorted((low[1], high[1]))
        assert bounds[0] * (1 - 1e-12) <= time.seconds <= bounds[1] * (1 + 1e-12)
        assert time.basis != "extrapolated"
    else:
        assert time.basis == "extrapolated"
        assert time.seconds >= min(points[0][1], points[-1][1])
