"""The step over plain decoding, Eq. 3, where no curve of step times says it (paper §3.1).

    S = tau / c,   c = T_step / T_AR

c is also the break-even tau: with fewer tokens per step speculation loses. T_AR comes from a
profile of plain decoding, from a step-time curve, or from floors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specpilot_cli.ceiling.model_floors import ModelFloors, model_floors
from specpilot_cli.ceiling.speedup import (
    SpeedupPoint,
    TauPoint,
    best_budget,
    speedup_points_document,
)
from specpilot_cli.ceiling.step_times import recorded_here
from specpilot_cli.errors import InputError, MeasurementInvalid
from specpilot_cli.models.work import StepShape
from specpilot_cli.schema.step_profile import StepProfile, StepTimeCurve


@dataclass(frozen=True, slots=True)
class OverPlain:
    """One speculative step beside one of plain decoding, in seconds; `tau` None = not known."""

    step_s: float
    ar_step_s: float
    tau: float | None
    source: str

    @property
    def c(self) -> float:
        """What a step costs in steps of plain decoding: the break-even tau."""
        return self.step_s / self.ar_step_s

    @property
    def speedup(self) -> float | None:
        """Tokens per second over those of plain decoding."""
        return None if self.tau is None else self.tau / self.c

    @property
    def text(self) -> str:
        """Both, in a sentence."""
        start = (
            f"a step takes {self.c:.3f} of plain decoding's ({1e3 * self.step_s:.3f} against "
            f"{1e3 * self.ar_step_s:.3f} ms, {self.source}), so speculation pays from "
            f"{self.c:.2f} tokens per step on"
        )
        if self.tau is None or self.speedup is None:
            return f"{start}; τ is not known: give --tau or --lattices"
        return f"{start}; {self.tau:.3f} make it {self.speedup:.3f}×"


def over_plain(
    profile: StepProfile,
    tau: float | None,
    *,
    plain: StepProfile | None = None,
    curve: StepTimeCurve | None = None,
) -> OverPlain | None:
    """The profiled step over plain decoding, by `plain`, else by `curve` if it was recorded on
    this deployment; None without either.

    Raises `InputError` if `plain` is no profile of plain decoding of the same deployment with a
    step time of its own.
    """
    if profile.mode == "ar":
        if plain is not None:
            raise InputError("the profile is one of plain decoding already", where="--ar")
        return None
    if plain is not None:
        _check_same(profile, plain)
        return OverPlain(profile.step_s, plain.step_s, tau, "profiled")
    if curve is None or not recorded_here(profile, curve):
        return None
    return OverPlain(profile.step_s, curve.ar_step_s, tau, f"step times {curve.name}")


def _check_same(profile: StepProfile, plain: StepProfile) -> None:
    if plain.mode != "ar":
        raise InputError(
            f"a profile of plain decoding is asked for, this is a {plain.mode} step",
            where="--ar",
            hint="make one with `specpilot profile --target DIR --mode ar -o FILE`",
        )
    here, there = profile.device, plain.device
    for what, own, other in (
        ("engine", profile.engine.name, plain.engine.name),
        ("device", here.gpu_profile or here.name, there.gpu_profile or there.name),
        ("target", profile.target.name, plain.target.name),
        ("data type", profile.dtype, plain.dtype),
        ("number of requests", profile.requests, plain.requests),
        ("form of weights", profile.weights, plain.weights),
    ):
        if own != other:
            raise InputError(
                f"the profile of plain decoding is of another {what}: {other}, not {own}",
                where="--ar",
                hint="profile both steps of one deployment",
            )
    if plain.t_step_s is None:
        raise InputError(
            "the profile of plain decoding has no step time: a trace's is the profiler's",
            where="--ar",
            hint="give --step-times of this deployment instead",
        )


@dataclass(frozen=True, slots=True)
class FloorSpeedups:
    """A model's step at its floors over plain decoding at its floors.

    `floors` is the step compared: the best of `points`, which are the trees of a replay, or the one
    that was asked for. `step` is None if it is plain decoding itself.
    """

    floors: ModelFloors
    step: OverPlain | None
    points: tuple[SpeedupPoint, ...] = ()


def floor_speedups(
    floors: ModelFloors, tau: float | None, trees: Sequence[TauPoint] = ()
) -> FloorSpeedups:
    """`floors`, or the best of `trees` drafted alike, over plain decoding at its floors.

    Nothing here ran: both sides are the least times that the device allows. Raises
    `MeasurementInvalid` for a `tau` below 1.
    """
    if tau is not None and not tau >= 1:
        raise MeasurementInvalid(f"a step commits at least one token, got tau {tau:g}")
    shape = floors.shape
    plain = _floors(floors, StepShape(shape.requests, 1, 1, shape.context, 0), drafting=False)
    steps = {
        tree: _floors(
            floors, replace(shape, rows=tree.n_nodes + 1, committed=tree.tau), drafting=True
        )
        for tree in sorted(trees, key=lambda point: point.n_nodes)
    }
    points = tuple(_point(tree, step, plain) for tree, step in steps.items())
    if points:
        best = best_budget(points)
        floors, tau = steps[TauPoint(best.n_nodes, best.tau)], best.tau
    elif shape.rows == 1 and not shape.block:
        return FloorSpeedups(floors, None)
    own = OverPlain(floors.floor_s, plain.floor_s, tau, "both at their floors")
    return FloorSpeedups(floors, own, points)


def _point(tree: TauPoint, step: ModelFloors, plain: ModelFloors) -> SpeedupPoint:
    c, rows = step.floor_s / plain.floor_s, tree.n_nodes + 1
    return SpeedupPoint(tree.n_nodes, rows, tree.tau, step.floor_s, c, tree.tau / c, "floor")


def _floors(floors: ModelFloors, shape: StepShape, *, drafting: bool) -> ModelFloors:
    drafter = floors.drafter if drafting else None
    return model_floors(floors.target, drafter, shape, floors.peaks, rule=floors.rule)


def floor_speedups_document(found: FloorSpeedups) -> dict[str, Any]:
    """`found` as plain values for JSON; the keys hold None where nothing is compared."""
    speedup = None
    if found.points:
        best = best_budget(found.points).n_nodes
        speedup = {"best_nodes": best, "points": speedup_points_document(found.points)}
    over = None if found.step is None else over_plain_document(found.step)
    return {"over_plain": over, "speedup": speedup}


def over_plain_document(found: OverPlain) -> dict[str, Any]:
    """`found` as plain values for JSON."""
    return {
        "step_s": found.step_s,
        "ar_step_s": found.ar_step_s,
        "ar_step_source": found.source,
        "break_even_tokens_per_step": found.c,
        "tau_tokens_per_step": found.tau,
        "speedup_ratio": found.speedup,
    }
