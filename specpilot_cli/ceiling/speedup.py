"""Speedup over plain decoding for every node budget (paper §3.1, Eq. 3).

    S(N) = tau(N) / c(N),   c(N) = T_step(N) / T_AR

tau(N) comes from replay or from a live run, T_step from a recorded step-time curve. Between two
recorded row counts the step time is interpolated; outside them it is extrapolated; without a curve
it is a floor (`plain.py`). Every point says which of these it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from specpilot_cli.errors import InputError
from specpilot_cli.schema.step_profile import StepTimeCurve

Basis = Literal["recorded", "interpolated", "extrapolated", "floor"]
ALL_BASES: frozenset[Basis] = frozenset(("recorded", "interpolated", "extrapolated", "floor"))


@dataclass(frozen=True, slots=True)
class TauPoint:
    """Tokens committed per step (bonus included) at a budget of `n_nodes` drafted nodes."""

    n_nodes: int
    tau: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step at `rows` verified rows, and how they were obtained."""

    rows: int
    seconds: float
    basis: Basis


@dataclass(frozen=True, slots=True)
class SpeedupPoint:
    """Eq. 3 at one node budget. `c` is the break-even tau: below it speculation loses."""

    n_nodes: int
    rows: int
    tau: float
    step_s: float
    c: float
    speedup: float
    basis: Basis


def step_time(curve: StepTimeCurve, rows: int) -> StepTime:
    """Step time at `rows` rows, in seconds.

    Below the first recorded point the first one is held: a cheaper step was never seen. Above the
    last, the last slope continues (never falling); a curve of one point is held flat.
    Raises `InputError` for fewer than one row.
    """
    if rows < 1:
        raise InputError(f"a step verifies at least one row, got {rows}")
    points = curve.points
    for point in points:
        if point.rows == rows:
            return StepTime(rows, point.step_s, "recorded")
    if rows < points[0].rows:
        return StepTime(rows, points[0].step_s, "extrapolated")
    if rows > points[-1].rows:
        slope = 0.0
        if len(points) > 1:
            rise = points[-1].step_s - points[-2].step_s
            slope = max(0.0, rise / (points[-1].rows - points[-2].rows))
        beyond = rows - points[-1].rows
        return StepTime(rows, points[-1].step_s + slope * beyond, "extrapolated")
    upper = next(i for i, point in enumerate(points) if point.rows > rows)
    low, high = points[upper - 1], points[upper]
    share = (rows - low.rows) / (high.rows - low.rows)
    return StepTime(rows, low.step_s + share * (high.step_s - low.step_s), "interpolated")


def speedup_at(curve: StepTimeCurve, n_nodes: int, *, tau: float) -> SpeedupPoint:
    """Eq. 3 for one budget of `n_nodes` nodes, that is n_nodes + 1 rows."""
    if tau < 1:
        raise InputError(f"a step commits at least one token, got tau {tau:g}")
    time = step_time(curve, n_nodes + 1)
    c = time.seconds / curve.ar_step_s
    return SpeedupPoint(n_nodes, time.rows, tau, time.seconds, c, tau / c, time.basis)


def speedup_curve(tau: Sequence[TauPoint], curve: StepTimeCurve) -> tuple[SpeedupPoint, ...]:
    """Eq. 3 at every budget of `tau`, sorted by nodes.

    Raises `InputError` for no points or for two with the same budget.
    """
    nodes = [point.n_nodes for point in tau]
    if not nodes or len(set(nodes)) != len(nodes):
        raise InputError("a speedup curve needs at least one point, each node budget once")
    ordered = sorted(tau, key=lambda point: point.n_nodes)
    return tuple(speedup_at(curve, point.n_nodes, tau=point.tau) for point in ordered)


def best_budget(
    points: Sequence[SpeedupPoint], *, bases: frozenset[Basis] = ALL_BASES
) -> SpeedupPoint:
    """The point with the largest S(N) among `bases`; a tie goes to fewer nodes.

    Raises `InputError` when no point has one of these bases.
    """
    allowed = [point for point in points if point.basis in bases]
    if not allowed:
        raise InputError(
            f"no node budget has a step time that is {' or '.join(sorted(bases))}",
            hint="record step times at more row counts",
        )
    return max(allowed, key=lambda point: (point.speedup, -point.n_nodes))


def speedup_points_document(points: Sequence[SpeedupPoint]) -> list[dict[str, Any]]:
    """`points` as plain values for JSON."""
    return [
        {
            "nodes": point.n_nodes,
            "rows": point.rows,
            "tau_tokens_per_step": point.tau,
            "step_s": point.step_s,
            "step_basis": point.basis,
            "c_ratio": point.c,
            "break_even_tokens_per_step": point.c,
            "speedup_ratio": point.speedup,
        }
        for point in points
    ]
