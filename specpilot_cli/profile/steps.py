"""Steps of a trace: which spans form one, and from when to when it lasts.

A step is a cycle of the engine: from its first drafting span (or, without drafter, its target
span) to the same point of the next step. What follows the target pass, such as accepting tokens and
committing states, thereby belongs to the step that caused it. A step's end is only known where the
next one begins, so the last step before a prompt, or before the trace ends, is left out.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from specpilot_cli.errors import InputError
from specpilot_cli.profile.names import NameTable
from specpilot_cli.profile.trace import GpuTrace, SpanMark
from specpilot_cli.schema.kernel_classes import SpanRole


@dataclass(frozen=True, slots=True)
class Span:
    """One pass of the engine, in microseconds, the marks of its streams joined."""

    role: SpanRole
    kind: str
    start_us: float
    end_us: float
    facts: tuple[tuple[str, int], ...]

    def fact(self, name: str) -> int | None:
        """A number of the span's label, such as `bs`."""
        return dict(self.facts).get(name)


@dataclass(frozen=True, slots=True)
class Window:
    """One step: [start_us, end_us), the target span and all spans inside."""

    start_us: float
    end_us: float
    target: Span
    spans: tuple[Span, ...]

    @property
    def drafts(self) -> bool:
        """True if the step drafted."""
        return any(span.role == "drafter" for span in self.spans)


def join_marks(marks: list[SpanMark], table: NameTable) -> list[Span]:
    """Spans in order; marks of one kind that overlap in time are one pass on several streams."""
    spans: list[Span] = []
    latest: dict[str, int] = {}
    for mark in marks:
        at = latest.get(mark.kind)
        if at is not None and mark.start_us < spans[at].end_us:
            held = spans[at]
            end = max(held.end_us, mark.end_us)
            spans[at] = Span(held.role, held.kind, held.start_us, end, held.facts)
            continue
        latest[mark.kind] = len(spans)
        facts = tuple(sorted(mark.facts.items()))
        spans.append(Span(table.role(mark.kind), mark.kind, mark.start_us, mark.end_us, facts))
    return spans


def find_steps(trace: GpuTrace, table: NameTable) -> tuple[list[Window], list[Span]]:
    """Whole steps of `trace`, and its prefill spans.

    Raises `InputError` if the trace holds fewer than two steps in a row.
    """
    spans = join_marks(trace.spans, table)
    prefills = [span for span in spans if span.role == "prefill"]
    begun = _beginnings(spans)
    windows = []
    for (start, target), (end, _) in pairwise(begun):
        inside = tuple(s for s in spans if start <= s.start_us < end)
        if end > start and not any(span.role == "prefill" for span in inside):
            windows.append(Window(start, end, target, inside))
    if not windows:
        kinds = ", ".join(f"{n} {kind}" for kind, n in Counter(s.kind for s in spans).items())
        raise InputError(
            f"no whole step in the trace: it needs two in a row, and holds {kinds or 'no spans'}",
            where=str(trace.path),
            hint="profile more steps while a request decodes, for example with --steps 20",
        )
    return windows, prefills


def _beginnings(spans: list[Span]) -> list[tuple[float, Span]]:
    """(start, target span) of every step, also of interrupted ones."""
    found = []
    draft: float | None = None
    for span in spans:
        if span.role == "prefill":
            draft = None
        elif span.role == "drafter" and draft is None:
            draft = span.start_us
        elif span.role == "target":
            found.append((span.start_us if draft is None else draft, span))
            draft = None
    return found
