"""Two recordings of the same prompts: what one accepts less, and what differs between them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specpilot_cli.diagnose.evidence import Evidence
from specpilot_cli.diagnose.outcome import Outcome, clear, not_checked
from specpilot_cli.diagnose.rates import Counts, certainly_above, combine
from specpilot_cli.units import format_percent

_KEPT = 0.9
_COMPARED = {
    "target_sha256": "the target's bytes",
    "drafter_sha256": "the drafter's bytes",
    "engine": "the engine",
    "block": "the block",
    "mode": "the kind of recording",
}


def compare(evidence: Evidence, other: Evidence | None) -> Outcome:
    """Does this recording accept less than `other` on the requests they share?"""
    code, title = "against", "As good as the other recording"
    if other is None:
        return not_checked(code, title, "give a recording known to be good with --against")
    mine, theirs = _common(evidence), _common(other)
    shared = [name for name in mine if name in theirs]
    if len(shared) < 5:
        return not_checked(code, title, f"the recordings share {len(shared)} requests, 5 needed")
    now = _select(evidence.rate(evidence.score, evidence.scored), [mine[n] for n in shared])
    then = _select(other.rate(other.score, other.scored), [theirs[n] for n in shared])
    if not (now.enough and then.enough):
        return not_checked(code, title, "too few steps in the requests they share")
    same = _same_outputs(evidence, other, [(mine[n], theirs[n]) for n in shared])
    numbers = {
        "accepted_ratio": now.value,
        "other_accepted_ratio": then.value,
        "same_outputs_ratio": same,
    }
    detail = (
        f"of the first drafts of {len(shared)} shared requests, {format_percent(now.value)} are "
        f"accepted here and {format_percent(then.value)} there; {format_percent(same, digits=0)} "
        "of the outputs are the same"
    )
    differs = _differences(evidence, other)
    if not certainly_above(combine((_KEPT, then), (-1.0, now)), 0.0):
        return clear(code, title, detail, **numbers)
    return Outcome(
        code, "found", "Less is accepted than in the other recording",
        f"{detail}; different: {', '.join(differs) or 'nothing that the files record'}",
        numbers=numbers, next_steps=_steps(evidence, other),
    )  # fmt: skip


def _common(evidence: Evidence) -> dict[str, int]:
    requests = evidence.recording.metadata.requests
    return {item.request_id: index for index, item in enumerate(requests)}


def _select(counts: Counts, indices: list[int]) -> Counts:
    chosen: npt.NDArray[np.int64] = np.array(indices, dtype=np.int64)
    return Counts(counts.successes[chosen], counts.trials[chosen])


def _same_outputs(evidence: Evidence, other: Evidence, pairs: list[tuple[int, int]]) -> float:
    same = [
        np.array_equal(evidence.recording.output(mine), other.recording.output(theirs))
        for mine, theirs in pairs
    ]
    return float(np.mean(same))


def _differences(evidence: Evidence, other: Evidence) -> list[str]:
    mine, theirs = evidence.recording.metadata, other.recording.metadata
    return [
        f"{words} ({getattr(mine, key)} here, {getattr(theirs, key)} there)"
        if key in ("engine", "block", "mode")
        else words
        for key, words in _COMPARED.items()
        if getattr(mine, key) != getattr(theirs, key)
    ]


def _steps(evidence: Evidence, other: Evidence) -> tuple[str, ...]:
    mine, theirs = evidence.recording.metadata, other.recording.metadata
    steps = []
    if mine.drafter_sha256 != theirs.drafter_sha256:
        steps.append("the drafters are not the same bytes: use the other one, or ask its author")
    if mine.target_sha256 != theirs.target_sha256:
        steps.append(
            "the targets are not the same bytes: quantisation, fine-tuning or another revision "
            "changes what the drafter sees"
        )
    if mine.engine != theirs.engine:
        steps.append(
            "the engines differ: compare the lattices of one step in both, position by position"
        )
    return tuple(steps) or (
        "models and engine are the same: compare launch options, block and captured layers",
    )
