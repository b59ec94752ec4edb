"""Outputs that repeat themselves: easy to draft, worthless to read, and good for any τ."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specpilot_cli.diagnose.evidence import Evidence
from specpilot_cli.diagnose.outcome import Outcome, clear
from specpilot_cli.units import format_percent

_LONGEST_PERIOD = 64
_LEAST_TOKENS = 24
_LEAST_REPEATS = 3
_ALLOWED_SHARE = 0.10

Bool = npt.NDArray[np.bool_]


def looping(output: npt.NDArray[np.int32]) -> Bool:
    """Tokens that continue a loop, [n] bool: at least the third repeat of a period up to 64.

    A period counts once its copies are 24 tokens long together, so that indentation, a table's
    rule or a doubled phrase do not.
    """
    found = np.zeros(len(output), dtype=np.bool_)
    for period in range(1, min(_LONGEST_PERIOD, len(output) - 1) + 1):
        same = output[period:] == output[:-period]
        least = max(_LEAST_TOKENS, (_LEAST_REPEATS - 1) * period)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
        for start, end in zip(edges[::2], edges[1::2], strict=True):
            if end - start >= least:
                # same[i] is about token i + period; the first repeats are not yet a loop
                found[start + period + (_LEAST_REPEATS - 2) * period : end + period] = True
    return found


def repetition(evidence: Evidence) -> Outcome:
    """Do loops in the outputs lift the accept length?"""
    code, title = "repetition", "Outputs do not loop"
    recording, anchors = evidence.recording, evidence.anchors
    per_request = [looping(recording.output(r)) for r in range(recording.n_requests)]
    loops = np.concatenate(per_request)
    share = float(loops.mean())
    at = recording.output_offsets[anchors.request] + evidence.output_position + 1
    inside = loops[np.minimum(at, loops.size - 1)]
    in_loops = evidence.rate(evidence.score, evidence.scored & inside)
    outside = evidence.rate(evidence.score, evidence.scored & ~inside)
    numbers = {"looping_tokens_ratio": share}
    detail = f"{format_percent(share)} of the output tokens continue a loop"
    if share < _ALLOWED_SHARE:
        return clear(code, title, detail, **numbers)
    worst = sorted(range(len(per_request)), key=lambda r: -float(per_request[r].mean()))[:3]
    names = ", ".join(f"`{recording.metadata.requests[r].request_id}`" for r in worst)
    numbers["in_loops_ratio"] = in_loops.value
    if outside.n_trials:
        numbers["outside_loops_ratio"] = outside.value
        detail += (
            f"; of the first drafts, {format_percent(in_loops.value)} are accepted inside loops "
            f"and {format_percent(outside.value)} outside"
        )
    return Outcome(
        code, "found", "Outputs loop, which inflates the accept length", f"{detail}; most: {names}",
        kind="caution", numbers=numbers,
        next_steps=(
            "read the outputs: a model that loops is broken before any drafter is (chat template, "
            "quantisation, greedy decoding of a model made for sampling)",
            "do not compare accept lengths until the loops are gone, or leave these requests out",
        ),
    )  # fmt: skip
