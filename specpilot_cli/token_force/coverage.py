"""What an audit covered: how far its outputs reach, and how many requests shared the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specpilot_cli.schema.outputs import OutputRecord

_MARKS = (512, 1024, 2048, 3072)


@dataclass(frozen=True, slots=True)
class Coverage:
    """One system's answers.

    longest: tokens of the longest. reaching: requests with more tokens than each of some marks.
    in_flight: requests being answered at one time, averaged over the time in which any was; None
    where the answers carry no times.
    """

    longest: int
    reaching: tuple[tuple[int, int], ...]
    in_flight: float | None


def coverage(records: Sequence[OutputRecord]) -> Coverage:
    """Read the coverage off the answers; `records` must not be empty."""
    lengths = [len(record.output_ids) for record in records]
    return Coverage(
        longest=max(lengths),
        reaching=tuple((mark, sum(n > mark for n in lengths)) for mark in _MARKS),
        in_flight=_in_flight(records),
    )


def _in_flight(records: Sequence[OutputRecord]) -> float | None:
    spans = [
        (record.submit_s, record.submit_s + record.elapsed_s)
        for record in records
        if record.submit_s is not None and record.elapsed_s is not None
    ]
    if len(spans) < len(records):
        return None
    edges = np.array(sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans]))
    running = np.cumsum(edges[:-1, 1])
    width = np.diff(edges[:, 0])
    busy = float(width[running > 0].sum())
    return float((running * width).sum()) / busy if busy > 0.0 else None


def concurrency_warning(system: Coverage, stock: Coverage) -> str | None:
    """A warning where the two systems were answering very different numbers at one time."""
    if system.in_flight is None or stock.in_flight is None:
        return None
    low, high = sorted((system.in_flight, stock.in_flight))
    if high < 2.0 * low:
        return None
    return (
        f"the system answered {system.in_flight:.1f} requests at one time and stock "
        f"{stock.in_flight:.1f}: faults and rounding both depend on the batch"
    )
