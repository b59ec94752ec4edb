"""Tokens per step that replay hands over, and what they share with the profile and the times."""

from __future__ import annotations

from dataclasses import dataclass

from specpilot_cli.ceiling.speedup import TauPoint
from specpilot_cli.schema.deployment import (
    OTHER_BLOCK_TIMES,
    Deployment,
    block_note,
    of_curve,
    of_profile,
    projected_because,
)
from specpilot_cli.schema.step_profile import StepProfile, StepTimeCurve

_STEP, _TIMES = "the profiled step", "the step times"


@dataclass(frozen=True, slots=True)
class ReplayedTaus:
    """Tokens per step from replay of one recording.

    `trees` are those of `policy`, best-first or, for plain DFlash, marginal ones, by node budget;
    `current` is the profiled system's own policy at its own budget, if it was replayed; `source`
    says how the anchors were chosen, `recorded` by which engine, at which block and with what kind
    of drafter. `oracle` keeps accepting while the target's token is among the candidates.
    """

    trees: tuple[TauPoint, ...]
    current: TauPoint | None
    source: str
    recorded: Deployment
    policy: str = "best-first"
    oracle: float | None = None


def other_block(profile: StepProfile, replayed: ReplayedTaus) -> bool:
    """Whether the profiled step drafts another block than the one recorded."""
    return _step_note(profile, replayed) is not None


def _step_note(profile: StepProfile, replayed: ReplayedTaus) -> str | None:
    consequence = (
        "τ now is replayed on the recorded block, which that step does not draft"
        if profile.tau is None
        else "the best tree drafts another block than the step that was taken apart"
    )
    own = of_profile(profile)
    return block_note(replayed.recorded, own, what=_STEP, consequence=consequence)


def projected(
    profile: StepProfile, replayed: ReplayedTaus | None, curve: StepTimeCurve | None
) -> tuple[str, ...]:
    """Why speedups of replayed tokens under step times are projections; empty if they are not."""
    if replayed is None or curve is None:
        return ()
    found = projected_because(replayed.recorded, of_curve(curve), what=_TIMES)
    here, there = profile.device.name, curve.device.name
    return found if here == there else (*found, f"{_TIMES} are of {there}, the profile of {here}")


def mixed_notes(
    profile: StepProfile, replayed: ReplayedTaus | None, curve: StepTimeCurve | None
) -> list[str]:
    """What the lattices do not share with the profile and with the step times, in sentences."""
    if replayed is None:
        return []
    recorded = replayed.recorded
    why = projected_because(recorded, of_profile(profile), what=_STEP)
    found = [f"the tokens factor is projected: {'; '.join(why)}"] if why else []
    notes = [_step_note(profile, replayed)]
    if curve is not None:
        times = of_curve(curve)
        notes.append(block_note(recorded, times, what=_TIMES, consequence=OTHER_BLOCK_TIMES))
    return found + [note for note in notes if note is not None]
