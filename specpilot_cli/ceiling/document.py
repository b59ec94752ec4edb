"""The ceiling as plain values, for JSON. Keys end in their unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specpilot_cli.ceiling.answer import CeilingAnswer
from specpilot_cli.ceiling.factors import Ceiling
from specpilot_cli.ceiling.floors import ClassFloor
from specpilot_cli.ceiling.levers import Lever
from specpilot_cli.ceiling.plain import over_plain_document
from specpilot_cli.ceiling.speedup import (
    SpeedupPoint,
    best_budget,
    speedup_points_document,
)
from specpilot_cli.ceiling.what_if import what_if_document
from specpilot_cli.schema.gpu_profile import SourcedNumber
from specpilot_cli.schema.step_profile import StepProfile, StepTimeCurve


def ceiling_document(answer: CeilingAnswer) -> dict[str, Any]:
    """Results of `specpilot ceiling`."""
    profile, tokens, measured = answer.profile, answer.tokens, answer.measured
    speedup = None
    if answer.curve is not None:
        speedup = speedup_document(answer.speedups, answer.curve) | {
            "basis": "projected" if answer.projected_because else "one deployment",
            "projected_because": list(answer.projected_because),
        }
    return {
        "engine": profile.engine,
        "target": profile.target,
        "drafter": profile.drafter,
        "dtype": profile.dtype,
        "mode": profile.mode,
        "nodes": profile.nodes,
        "rows": profile.rows,
        "tau_tokens_per_step": tokens.tau,
        "tau_source": tokens.tau_source,
        "tau_best_tokens_per_step": tokens.tau_best,
        "tau_best_source": tokens.tau_best_source,
        "tau_best_nodes": tokens.best_nodes,
        **_factors(answer.ceiling),
        "t_step_s": answer.ceiling.t_step_s,
        "t_step_source": answer.step_time_source,
        "t_prof_s": answer.ceiling.t_prof_s,
        "unattributed_s": answer.ceiling.unattributed_s,
        "split": [{"name": name, "seconds": value} for name, value in step_split(answer)],
        "classes": [_class(item) for item in answer.ceiling.classes],
        "peaks": _peaks(answer.ceiling, profile),
        "with_measured_peaks": None
        if measured is None
        else {**_factors(measured), "peaks": _peaks(measured, profile)},
        "over_plain": None if answer.over_plain is None else over_plain_document(answer.over_plain),
        "speedup": speedup,
        "levers": [_lever(item) for item in answer.levers],
        "what_if": None if answer.what_if is None else what_if_document(answer.what_if),
        "headline": answer.advice.headline,
        "next_step": answer.advice.next_step,
        "notes": list(answer.advice.notes),
    }


def step_split(answer: CeilingAnswer) -> list[tuple[str, float]]:
    """The whole step by the engine's passes, in seconds, and what lies outside the profile.

    Empty without spans. The passes and the kernels outside of them make up the profiled step,
    where passes do not overlap.
    """
    if not answer.profile.spans:
        return []
    named = [(span.name, span.seconds) for span in answer.profile.spans]
    return [*named, ("outside the profile", answer.ceiling.overhead_s)]


def _lever(item: Lever) -> dict[str, Any]:
    return {
        "name": item.name,
        "basis": "projected",
        "gain_low_ratio": item.low,
        "gain_high_ratio": item.high,
        "arithmetic": item.arithmetic,
        "assumes": item.assumes,
    }


def speedup_document(points: Sequence[SpeedupPoint], curve: StepTimeCurve) -> dict[str, Any]:
    """Eq. 3 at every budget under one step-time curve."""
    return {
        "step_times": curve.name,
        "source": curve.source,
        "ar_step_s": curve.ar_step_s,
        "best_nodes": best_budget(points).n_nodes,
        "points": speedup_points_document(points),
    }


def _factors(ceiling: Ceiling) -> dict[str, Any]:
    factors = ceiling.factors
    return {
        "tau_factor_ratio": factors.tau,
        "kernel_factor_ratio": factors.kernel,
        "overhead_factor_ratio": factors.overhead,
        "step_cost_ratio": factors.step_cost,
        "ceiling_ratio": factors.product,
        "leading_factor": factors.leading,
        "t_floor_s": ceiling.t_floor_s,
    }


def _class(item: ClassFloor) -> dict[str, Any]:
    return {
        "name": item.name,
        "calls_per_step": item.calls,
        "measured_s": item.measured_s,
        "floor_s": item.floor_s,
        "slack_s": item.slack_s,
        "byte_time_s": item.byte_s,
        "flop_time_s": item.flop_s,
        "bound": item.bound,
    }


def _peaks(ceiling: Ceiling, profile: StepProfile) -> dict[str, Any]:
    dtypes = {kernel.dtype or profile.dtype for kernel in profile.classes if kernel.flops}
    return {
        "device": ceiling.peaks.title,
        "byte_fraction_ratio": ceiling.rule.byte_fraction,
        "flop_fraction_ratio": ceiling.rule.flop_fraction,
        "read_bytes_per_s": _number(ceiling.peaks.bandwidth()),
        "flops_per_s": {dtype: _number(ceiling.peaks.compute(dtype)) for dtype in sorted(dtypes)},
    }


def _number(number: SourcedNumber) -> dict[str, Any]:
    return {"value": number.value, "kind": number.kind, "source": number.source}
