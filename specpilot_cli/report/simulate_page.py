"""Batch simulations as text, and as a page with the speedup against requests in flight."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from specpilot_cli.report.figures import batch_speedup
from specpilot_cli.report.figures.batch_speedup import BatchLine, BatchSpeedupData
from specpilot_cli.report.html import (
    InputHash,
    KeyFigure,
    MethodNote,
    ReportData,
    ReportTable,
    Verdict,
    environment_rows,
    render_report,
)
from specpilot_cli.schema.batch_times import BatchStepTimes
from specpilot_cli.schema.result import Envelope
from specpilot_cli.simulate.batch import BatchResult
from specpilot_cli.units import format_seconds

BATCH_COLUMNS = (
    "policy", "in flight", "tokens/s", "speedup", "τ", "rows per step", "drafted rows",
    "first token", "joined prompts",
)  # fmt: skip
_FILLED = 0.75  # of the places; below, a run is mostly the tail of its batch
_METHOD = MethodNote(
    "Simulation",
    "Every step is played out: requests in flight, the trees or chains that the recorded lattices "
    "give them, what the recorded outputs accept, and the step's time as the sum of measured "
    "components at the rows, requests and drafted rows it holds. Requests come in file order and "
    "replace each other as they end. A smaller block uses the first positions of the recorded "
    "lattice, which a drafter that looks at its whole block would draft slightly differently.",
)


def base_policy(found: Sequence[BatchResult]) -> str:
    """What speedups refer to: plain decoding, or the first policy."""
    names = [item.policy for item in found]
    return "ar" if "ar" in names else names[0]


def speedup(found: Sequence[BatchResult], item: BatchResult) -> float:
    """Tokens per second over the base policy's at the same concurrency."""
    base = next(
        other
        for other in found
        if other.policy == base_policy(found) and other.concurrency == item.concurrency
    )
    return item.tokens_per_s / base.tokens_per_s


def batch_rows(found: Sequence[BatchResult]) -> list[tuple[str, ...]]:
    """One row of text per run; see `BATCH_COLUMNS`."""
    return [
        (
            item.policy,
            str(item.concurrency),
            f"{item.tokens_per_s:.1f}",
            f"{speedup(found, item):.3f}×",
            f"{item.tau:.3f}",
            f"{item.mean_rows:.1f}",
            f"{item.mean_draft_rows:.1f}",
            format_seconds(item.first_token_s),
            str(item.joined_prompts),
        )
        for item in found
    ]


def batch_finding(found: Sequence[BatchResult]) -> str:
    """Which policy leads at each concurrency."""
    parts = []
    for count in sorted({item.concurrency for item in found}):
        best = max(
            (item for item in found if item.concurrency == count),
            key=lambda item: item.tokens_per_s,
        )
        parts.append(f"{best.policy} at {count} ({speedup(found, best):.2f}×)")
    return f"fastest: {'; '.join(parts)}"


def render_batch_page(
    found: Sequence[BatchResult],
    times: BatchStepTimes,
    envelope: Envelope,
    *,
    projected: Sequence[str] = (),
) -> str:
    """The page of `specpilot simulate batch`; `projected` says what ran apart, as in the text."""
    best = max(found, key=lambda item: item.tokens_per_s)
    return render_report(
        ReportData(
            title=f"Batch simulation on {times.device.name}",
            verdict=Verdict("simulated", "none", f"{batch_finding(found)}."),
            command=shlex.join(["specpilot", *sys.argv[1:]]),
            specpilot_version=envelope.specpilot_version,
            machine=times.device.name,
            created=datetime.now(UTC),
            key_figures=(
                KeyFigure("most tokens/s", f"{best.tokens_per_s:.1f}", best.policy),
                KeyFigure("in flight there", str(best.concurrency)),
                KeyFigure("runs", str(len(found))),
            ),
            caveats=batch_notes(found, times, projected),
            inputs=tuple(InputHash(item.path, item.sha256) for item in envelope.inputs),
            numbers=(ReportTable("Runs", BATCH_COLUMNS, tuple(batch_rows(found)), times.source),),
            figures=(batch_speedup.draw(_figure(found, times)),),
            method=(_METHOD,),
            environment=environment_rows(envelope.environment),
            data=envelope.model_dump(mode="python"),
        )
    )


def batch_notes(
    found: Sequence[BatchResult], times: BatchStepTimes, projected: Sequence[str] = ()
) -> tuple[str, ...]:
    """What to keep in mind: what the times leave open or do not reach, places that stayed empty.

    projected: why recording and times are not of one deployment.
    """
    notes = [*times.notes, *(f"projected: {reason}" for reason in projected)]
    outside = sorted({name for item in found for name in item.extrapolated})
    if outside:
        notes.append(f"step times beyond their measured range: {', '.join(outside)}")
    for count in sorted({item.concurrency for item in found}):
        most = max(item.mean_requests for item in found if item.concurrency == count)
        if most < _FILLED * count:
            notes.append(
                f"at {count} in flight at most {most:.1f} were decoding on average: raise --repeat"
            )
    return tuple(notes)


def _figure(found: Sequence[BatchResult], times: BatchStepTimes) -> BatchSpeedupData:
    counts = tuple(sorted({item.concurrency for item in found}))
    lines = []
    for policy in dict.fromkeys(item.policy for item in found):
        own = {item.concurrency: item for item in found if item.policy == policy}
        lines.append(BatchLine(policy, tuple(speedup(found, own[count]) for count in counts)))
    base = base_policy(found)
    about = f"{times.target.name}, {times.device.name}; step times: {times.source}"
    return BatchSpeedupData(
        counts, tuple(lines[:8]), "plain decoding" if base == "ar" else base, about
    )
