"""The node budget and the projection, on numbers that can be checked by hand."""

from __future__ import annotations

import pytest

from specpilot_cli.apply.reference.measure import choose_budget, project, stock_point
from specpilot_cli.ceiling.speedup import SpeedupPoint, TauPoint, speedup_curve
from specpilot_cli.schema.step_profile import StepTimeCurve


def _curve(ar_ms: float, **step_ms: float) -> StepTimeCurve:
    """Step times in milliseconds by rows: `_curve(10, r5=20)`."""
    return StepTimeCurve.model_validate(
        {
            "schema_version": 1,
            "name": "by-hand",
            "engine": {"name": "specpilot-reference", "version": "1"},
            "device": {"name": "test processor", "kind": "cpu", "threads": 1},
            "target": {"name": "t"},
            "drafter": {"name": "d"},
            "dtype": "float32",
            "ar_step_s": ar_ms / 1e3,
            "includes_drafting": True,
            "points": [{"rows": int(rows[1:]), "step_s": ms / 1e3} for rows, ms in step_ms.items()],
            "source": "by hand",
        }
    )


# c = 1.5, 2, 4 and τ / c = 2, 2.25, 1.25: more nodes accept more, and cost more
HERE = _curve(10, r5=15, r9=20, r33=40)
TAUS = [TauPoint(4, 3.0), TauPoint(8, 4.5), TauPoint(32, 5.0)]


@pytest.fixture
def points() -> tuple[SpeedupPoint, ...]:
    """Three budgets at the step times of `HERE`."""
    return speedup_curve(TAUS, HERE)


def test_auto_takes_the_largest_ratio_of_tokens_to_cost(points: tuple[SpeedupPoint, ...]) -> None:
    assert [point.speedup for point in points] == pytest.approx([2.0, 2.25, 1.25])
    chosen = choose_budget(points, "auto")
    assert (chosen.n_nodes, chosen.rows, chosen.tau) == (8, 9, 4.5)


def test_a_fixed_budget_is_kept_though_another_is_faster(points: tuple[SpeedupPoint, ...]) -> None:
    assert choose_budget(points, 32).n_nodes == 32


def test_stock_is_charged_its_own_step(points: tuple[SpeedupPoint, ...]) -> None:
    stock = stock_point(7, 3.0, 0.012, HERE)
    assert (stock.n_nodes, stock.rows, stock.basis) == (7, 8, "recorded")
    assert stock.c == pytest.approx(1.2)
    assert stock.speedup == pytest.approx(2.5)
    # so the best tree here, 2.25 over plain, would lose to it
    assert choose_budget(points, "auto").speedup < stock.speedup


def test_projection_keeps_tokens_and_takes_the_other_machines_times(
    points: tuple[SpeedupPoint, ...],
) -> None:
    flat = _curve(10, r5=12, r8=12, r9=12, r33=12)  # rows cost nothing there
    found = project(flat, points, 7, 3.0)
    assert [point.tau for point in found.points] == [3.0, 4.5, 5.0]
    assert found.best.n_nodes == 32
    assert found.best.speedup == pytest.approx(5.0 / 1.2)
    assert found.stock.speedup == pytest.approx(3.0 / 1.2)
    assert found.best.speedup / found.stock.speedup == pytest.approx(5 / 3)
