"""Where a time stays flat against rows: the budgets worth choosing (paper §4.4).

A GEMM's time rises in stairs: rows of one tile cost the same, the next tile costs another wave. It
also falls where a library switches to a kernel that suits more rows. Nothing here assumes a tile
size or a direction; the stairs are read off the measured times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from specpilot_cli.errors import InputError

LEAST_CHANGE = 0.015  # a smaller step is no reason to stop adding rows, even if it is certain
_CERTAIN = 4.0  # standard errors that a change must exceed
_MAD_TO_SD = 1.4826
_MEDIAN_OVER_MEAN = 1.2533  # a median's standard error over a mean's, for normal noise


@dataclass(frozen=True, slots=True)
class RowSamples:
    """Repeated measurements of one number of rows, in seconds."""

    rows: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Plateau:
    """Row counts that cost the same: the last one carries most rows for the time.

    next_rows: the first measured count beyond it, so the true end lies below that count; None at
    the end of the measurements, where the plateau may go on. dominated_by: the last row count of a
    later plateau that costs no more, so that nobody should stop at this one; None if there is none.
    """

    first_rows: int
    last_rows: int
    next_rows: int | None
    seconds: float
    dominated_by: int | None = None


def find_plateaus(samples: Sequence[RowSamples]) -> tuple[Plateau, ...]:
    """The stairs of a time against rows.

    A new plateau opens where the median departs from the running plateau's, up or down, by more
    than 1.5 % and by more than four standard errors, taken from the median absolute deviation, so
    that single outliers neither open nor hide one. A plateau is dominated if a later one is not
    above it by as much. Raises InputError for fewer than one sample, rows that do not ascend, or
    fewer than three repeats.
    """
    _check(samples)
    groups = [[samples[0]]]
    for sample in samples[1:]:
        change, least = _change(_pooled(groups[-1]), sample.seconds)
        if abs(change) > least:
            groups.append([])
        groups[-1].append(sample)
    ends = [*(group[0].rows for group in groups[1:]), None]
    return tuple(
        _plateau(group, end, groups[at + 1 :])
        for at, (group, end) in enumerate(zip(groups, ends, strict=True))
    )


def worth_trying(plateaus: Sequence[Plateau]) -> tuple[int, ...]:
    """Row counts at which to stop: the ends of the plateaus that no later one dominates."""
    return tuple(item.last_rows for item in plateaus if item.dominated_by is None)


def _check(samples: Sequence[RowSamples]) -> None:
    rows = [sample.rows for sample in samples]
    if not rows or rows != sorted(set(rows)) or rows[0] < 1:
        raise InputError("plateaus need measurements at ascending numbers of rows, each once")
    few = next((s for s in samples if len(s.seconds) < 3), None)
    if few is not None:
        raise InputError(
            f"{few.rows} rows were measured {len(few.seconds)} times",
            hint="repeat every measurement at least three times; fifteen is better",
        )
    if any(not (second > 0 and math.isfinite(second)) for s in samples for second in s.seconds):
        raise InputError("a measured time is not a positive number")


def _change(level: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """How far the median of `seconds` lies above that of `level`, and what it must exceed."""
    middle = statistics.median(level)
    noise = math.hypot(_standard_error(seconds), _standard_error(level))
    return statistics.median(seconds) - middle, max(LEAST_CHANGE * middle, _CERTAIN * noise)


def _plateau(
    group: Sequence[RowSamples], next_rows: int | None, later: Sequence[Sequence[RowSamples]]
) -> Plateau:
    own, dominated_by = _pooled(group), None
    for other in later:
        rise, least = _change(own, _pooled(other))
        if rise <= least:
            dominated_by = other[-1].rows
    level = statistics.median(own)
    return Plateau(group[0].rows, group[-1].rows, next_rows, level, dominated_by)


def _pooled(group: Sequence[RowSamples]) -> tuple[float, ...]:
    return tuple(second for sample in group for second in sample.seconds)


def _standard_error(seconds: Sequence[float]) -> float:
    middle = statistics.median(seconds)
    deviation = statistics.median(abs(second - middle) for second in seconds)
    return _MEDIAN_OVER_MEAN * _MAD_TO_SD * deviation / math.sqrt(len(seconds))
