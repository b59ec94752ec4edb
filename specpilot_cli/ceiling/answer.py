"""The whole answer of the cost model for one profile: tokens, factors, advice, speedups.

Tokens per step come from replay (a better tree) and from the profile (the system as it runs);
replay itself lives elsewhere and hands its numbers over (`replayed.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from specpilot_cli.ceiling.advice import Advice, BestTree, advise, device_note, period_note
from specpilot_cli.ceiling.factors import Ceiling, check_tau, measure_ceiling
from specpilot_cli.ceiling.floors import PAPER_RULE, FloorRule
from specpilot_cli.ceiling.levers import Lever, find_levers
from specpilot_cli.ceiling.peaks import Peaks
from specpilot_cli.ceiling.plain import OverPlain, over_plain
from specpilot_cli.ceiling.replayed import ReplayedTaus, mixed_notes, other_block, projected
from specpilot_cli.ceiling.speedup import (
    SpeedupPoint,
    best_budget,
    speedup_at,
    speedup_curve,
)
from specpilot_cli.ceiling.step_times import recorded_here, with_step_time
from specpilot_cli.ceiling.what_if import WhatIf
from specpilot_cli.errors import InputError
from specpilot_cli.schema.step_profile import StepProfile, StepTimeCurve


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens per step now and with the best tree, and where each number comes from.

    `best_nodes` is the node budget of `tau_best`; None for a number given by hand.
    """

    tau: float | None
    tau_source: str
    tau_best: float | None
    tau_best_source: str
    best_nodes: int | None = None


@dataclass(frozen=True, slots=True)
class CeilingAnswer:
    """Everything `specpilot ceiling` says.

    `measured` repeats the ceiling with measured peaks where the device has both kinds.
    `speedups` is empty without lattices and step times (`curve`); `now` is the profiled system's
    own policy under the same step times, if it was replayed. `step_time_source` says who timed the
    step; `over_plain` sets it beside plain decoding, where somebody timed that; `levers` are
    projections of what single mechanisms would change, `what_if` is one of the step on another
    device or with another target. `projected_because` says why the speedups are projections; empty
    where tokens and step times are of one deployment.
    """

    profile: StepProfile
    tokens: TokenCounts
    ceiling: Ceiling
    measured: Ceiling | None
    advice: Advice
    speedups: tuple[SpeedupPoint, ...]
    now: SpeedupPoint | None
    curve: StepTimeCurve | None
    step_time_source: str = "timed with the profile"
    levers: tuple[Lever, ...] = ()
    what_if: WhatIf | None = None
    over_plain: OverPlain | None = None
    projected_because: tuple[str, ...] = ()


def answer_ceiling(
    profile: StepProfile,
    peaks: Peaks,
    *,
    replayed: ReplayedTaus | None = None,
    tau: float | None = None,
    tau_best: float | None = None,
    curve: StepTimeCurve | None = None,
    rule: FloorRule = PAPER_RULE,
    oracle: bool = False,
    plain: StepProfile | None = None,
) -> CeilingAnswer:
    """Ceiling of `profile` on `peaks` with all that is known about tokens per step.

    With `oracle` the best τ is the oracle's, as in the paper's Appendix B, not the best tree's.
    `plain` is a profile of plain decoding of the same deployment.
    Raises `InputError` for options that exclude each other or miss what they need.
    """
    profile, timed = _timed(profile, curve)
    if curve is not None and replayed is None and not (timed or recorded_here(profile, curve)):
        raise InputError(
            "step times need tokens per step at several node budgets",
            where="--step-times",
            hint="add --lattices FILE",
        )
    speedups, now = _speedups(profile, replayed, curve)
    tokens = _token_counts(profile, replayed, speedups, tau=tau, tau_best=tau_best)
    if oracle:
        tokens = _with_oracle(tokens, replayed)
    with_peaks = partial(
        measure_ceiling, profile, tau=tokens.tau, tau_best=tokens.tau_best, rule=rule
    )
    ceiling, other = with_peaks(peaks), peaks.as_measured()
    return CeilingAnswer(
        profile=profile,
        tokens=tokens,
        ceiling=ceiling,
        measured=None if other is None else with_peaks(other),
        advice=_advice(profile, ceiling, tokens, replayed, curve, speedups, now),
        speedups=speedups,
        now=now,
        curve=curve if replayed is not None else None,
        step_time_source=timed or "timed with the profile",
        levers=find_levers(
            profile, ceiling, tau=tokens.tau, curve=curve, speedups=speedups, now=now,
            trees=() if replayed is None else replayed.trees,
        ),
        over_plain=over_plain(profile, tokens.tau, plain=plain, curve=curve),
        projected_because=projected(profile, replayed, curve),
    )  # fmt: skip


def _speedups(
    profile: StepProfile, replayed: ReplayedTaus | None, curve: StepTimeCurve | None
) -> tuple[tuple[SpeedupPoint, ...], SpeedupPoint | None]:
    """Eq. 3 at every replayed budget, and of the profiled system's own policy."""
    if curve is None or replayed is None:
        return (), None
    own, now = replayed.current, None
    if own is not None and profile.tau is not None and other_block(profile, replayed):
        # its chain cut out of longer lattices would be neither its tokens nor its step
        if recorded_here(profile, curve):
            c = profile.step_s / curve.ar_step_s
            now = SpeedupPoint(
                profile.nodes, profile.rows, profile.tau, profile.step_s, c, profile.tau / c,
                "recorded",
            )  # fmt: skip
    elif own is not None:
        now = speedup_at(curve, own.n_nodes, tau=own.tau)
    return speedup_curve(replayed.trees, curve), now


def _best_tree(
    tokens: TokenCounts,
    replayed: ReplayedTaus | None,
    speedups: tuple[SpeedupPoint, ...],
    now: SpeedupPoint | None,
) -> BestTree:
    """The tree that advice names, and what it gains over the policy as it runs."""
    policy = "best-first" if replayed is None else replayed.policy
    if now is None or tokens.best_nodes is None or not speedups:
        return BestTree(policy, tokens.best_nodes)
    return BestTree(policy, tokens.best_nodes, best_budget(speedups).speedup / now.speedup)


def _slower_note(speedups: tuple[SpeedupPoint, ...]) -> list[str]:
    """That plain decoding beats every tree; empty where it does not."""
    best = max((point.speedup for point in speedups), default=1.0)
    if best >= 1:
        return []
    return [f"at these step times plain decoding beats every tree: the best reaches {best:.2f}×"]


def _advice(
    profile: StepProfile,
    ceiling: Ceiling,
    tokens: TokenCounts,
    replayed: ReplayedTaus | None,
    curve: StepTimeCurve | None,
    speedups: tuple[SpeedupPoint, ...],
    now: SpeedupPoint | None,
) -> Advice:
    found = advise(ceiling, tree=_best_tree(tokens, replayed, speedups, now))
    mixed = (*mixed_notes(profile, replayed, curve), *_slower_note(speedups))
    about = (device_note(profile, ceiling), period_note(profile))
    notes = (*found.notes, *mixed, *(note for note in about if note is not None))
    return replace(found, notes=notes)


def _timed(profile: StepProfile, curve: StepTimeCurve | None) -> tuple[StepProfile, str]:
    """`profile` with its step time, and where that is from if not from the profile itself.

    Raises `InputError` where neither states it: a trace's own time is never taken.
    """
    if profile.t_step_s is not None:
        return profile, ""
    if curve is None:
        return profile, f"{profile.step_s:g}"  # raises, naming what is missing
    return with_step_time(profile, curve), f"{curve.name}: {curve.source}"


def _token_counts(
    profile: StepProfile,
    replayed: ReplayedTaus | None,
    speedups: tuple[SpeedupPoint, ...],
    *,
    tau: float | None,
    tau_best: float | None,
) -> TokenCounts:
    if replayed is not None and tau_best is not None:
        raise InputError(
            "a best tau is given twice: --lattices and --tau-best", hint="give one of them"
        )
    block = profile.draft_block or profile.rows
    check_tau(tau, "--tau", most=min(profile.rows, block + 1))
    check_tau(tau_best, "--tau-best", most=None if profile.draft_block is None else block + 1)
    now, source = _tau_now(profile, replayed, tau)
    if replayed is None:
        given = "not given" if tau_best is None else "given with --tau-best"
        return TokenCounts(now, source, tau_best, given)
    if speedups:
        best = best_budget(speedups)
        why = f"{replayed.policy} tree with the largest tau / c, {replayed.source}"
        return TokenCounts(now, source, best.tau, why, best.n_nodes)
    top = max(replayed.trees, key=lambda point: (point.tau, -point.n_nodes))
    why = f"{replayed.policy} tree with most tokens per step, {replayed.source}"
    return TokenCounts(now, source, top.tau, why, top.n_nodes)


def _with_oracle(tokens: TokenCounts, replayed: ReplayedTaus | None) -> TokenCounts:
    if replayed is not None and replayed.oracle is not None:
        best, source = replayed.oracle, f"oracle over the candidates, {replayed.source}"
    elif tokens.tau_best is not None:
        best, source = tokens.tau_best, "the oracle's, given with --tau-best"
    else:
        raise InputError(
            "the oracle's tau needs recorded candidates, or its value",
            where="--tau oracle",
            hint="add --lattices FILE, or --tau-best X with the oracle's tau",
        )
    return TokenCounts(tokens.tau, tokens.tau_source, best, source)


def _tau_now(
    profile: StepProfile, replayed: ReplayedTaus | None, tau: float | None
) -> tuple[float | None, str]:
    if tau is not None:
        return tau, "given with --tau"
    if profile.tau is not None:
        return profile.tau, "measured with the profile"
    if profile.mode == "ar":
        return 1.0, "plain decoding commits one token per step"
    if replayed is not None and replayed.current is not None:
        point = replayed.current
        return point.tau, f"the profiled policy at {point.n_nodes} nodes, {replayed.source}"
    return None, "not known"
