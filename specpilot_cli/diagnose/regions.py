"""Where in a request drafts fail: at long context, late in the output, in one kind of text."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from specpilot_cli.diagnose.evidence import Evidence
from specpilot_cli.diagnose.outcome import Outcome, clear, not_checked
from specpilot_cli.diagnose.rates import Counts, certainly_above, combine
from specpilot_cli.units import format_percent

_KEPT = 0.75  # of the earlier score; text alone moves it by less within one request
_THRESHOLDS = tuple(2**k for k in range(5, 21)) + tuple(3 * 2**k for k in range(5, 19))
_LEAST_ANCHORS = 100
_KIND_KEPT = 0.6

Bool = npt.NDArray[np.bool_]


def long_context(evidence: Evidence, windows: Iterable[int] = ()) -> Outcome:
    """Does acceptance fall beyond some context length? `windows`: lengths worth trying."""
    title = "Acceptance holds as the context grows"
    steps = (
        "what ends there? the drafter's sliding window or its KV cache, rotary scaling (YaRN "
        "factors of target and drafter), a page table that is not extended",
        "the long requests may simply be harder: record one long prompt, and the same text cut "
        "short, and compare",
    )
    return _fall(evidence, "long-context", title, evidence.context, "context", steps, windows)


def late_output(evidence: Evidence) -> Outcome:
    """Does acceptance fall as the output grows, whatever the prompt's length?"""
    title = "Acceptance holds as the output grows"
    steps = (
        "state that drifts: recurrent state not restored after rejected drafts, a KV cache not "
        "compacted, quantised state; `specpilot token-force` shows whether outputs change too",
        "compare with plain decoding of the same prompts at the same output positions",
    )
    return _fall(
        evidence, "late-output", title, evidence.output_position, "output position", steps, ()
    )


def _fall(
    evidence: Evidence,
    code: str,
    title: str,
    along: npt.NDArray[np.int64],
    word: str,
    steps: tuple[str, ...],
    windows: Iterable[int],
) -> Outcome:
    limits = sorted({*_THRESHOLDS, *windows})
    found: tuple[float, int, Counts, Counts] | None = None
    tried = 0
    for limit in limits:
        early, late = _sides(evidence, along < limit)
        if early is None or late is None:
            continue
        tried += 1
        fall = combine((_KEPT, early), (-1.0, late))
        if certainly_above(fall, 0.0) and (found is None or fall.rate > found[0]):
            found = (fall.rate, limit, early, late)
    if not tried:
        reach = int(along[evidence.scored].max(initial=0))
        return not_checked(code, title, f"{word}s reach only {reach}, or too few requests go on")
    if found is None:
        return clear(code, title, f"no {word} after which a quarter of it is lost")
    _, limit, early, late = found
    return Outcome(
        code, "found", f"Acceptance falls beyond {word} {limit}",
        f"of the first drafts, {format_percent(early.value)} are accepted before it and "
        f"{format_percent(late.value)} after it, in the same requests where that can be told",
        numbers={
            "limit_tokens": float(limit),
            "early_ratio": early.value,
            "late_ratio": late.value,
        },
        next_steps=steps,
    )  # fmt: skip


def _sides(evidence: Evidence, early: Bool) -> tuple[Counts | None, Counts | None]:
    """Scores before and after, from requests on both sides if there are enough, else from all."""
    before = evidence.rate(evidence.score, evidence.scored & early)
    after = evidence.rate(evidence.score, evidence.scored & ~early)
    both = (before.trials >= 8) & (after.trials >= 8)
    crossing = both[evidence.anchors.request]
    if int(both.sum()) >= 5:
        before = evidence.rate(evidence.score, evidence.scored & early & crossing)
        after = evidence.rate(evidence.score, evidence.scored & ~early & crossing)
    enough = all(side.enough and side.n_trials >= _LEAST_ANCHORS for side in (before, after))
    return (before, after) if enough else (None, None)


def short_outputs(evidence: Evidence) -> Outcome:
    """Are steps cut short because outputs end?"""
    code, title = "short-outputs", "Outputs are long against the block"
    lengths = np.diff(evidence.recording.output_offsets)
    reach = evidence.n_positions
    cut = float((evidence.anchors.remaining <= reach).mean())
    numbers = {"median_output_tokens": float(np.median(lengths)), "cut_steps_ratio": cut}
    detail = (
        f"the median output has {int(np.median(lengths))} tokens, and {format_percent(cut)} of "
        f"anchors have fewer than {reach + 1} after them"
    )
    if cut < 0.5:
        return clear(code, title, detail, **numbers)
    return Outcome(
        code, "found", "Outputs are so short that they cut the accept length", detail,
        kind="caution", numbers=numbers,
        next_steps=("record longer outputs: raise max_new_tokens, or choose prompts that need it",),
    )  # fmt: skip


def kinds_of_text(evidence: Evidence) -> Outcome:
    """Is one benchmark far worse than the others?"""
    code, title = "kinds-of-text", "No benchmark is far below the others"
    names = [item.benchmark for item in evidence.recording.metadata.requests]
    kinds = sorted(set(names))
    if len(kinds) < 2:
        return not_checked(code, title, "all requests are of one benchmark")
    of_request = np.array(names)[evidence.anchors.request]
    worst: list[tuple[float, str, float]] = []
    for kind in kinds:
        own = evidence.rate(evidence.score, evidence.scored & (of_request == kind))
        rest = evidence.rate(evidence.score, evidence.scored & (of_request != kind))
        if not (own.enough and rest.enough):
            continue
        if certainly_above(combine((_KIND_KEPT, rest), (-1.0, own)), 0.0):
            worst.append((own.value, kind, rest.value))
    if not worst:
        return clear(code, title, f"{len(kinds)} benchmarks, none certainly below the others")
    listed = "; ".join(
        f"`{kind}` {format_percent(own)} of first drafts, the others {format_percent(rest)}"
        for own, kind, rest in sorted(worst)
    )
    return Outcome(
        code, "found", "Some kinds of text are far below the others", listed, kind="note",
        numbers={f"{kind}_ratio": own for own, kind, _ in worst},
        next_steps=(
            "quote τ per benchmark, not over all; a block or node budget of its own may pay for "
            "such requests (`specpilot replay` lists τ by benchmark)",
        ),
    )  # fmt: skip
