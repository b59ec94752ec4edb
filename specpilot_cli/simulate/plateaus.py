"""Where a time stays flat against rows: the budgets worth choosing (paper §4.4).

A GEMM's time rises in stairs: rows of one tile cost the same, the next tile costs another wave.
Nothing here assumes a tile size, because libraries switch kernels; the stairs are read off the
measured times.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from specpilot_cli.errors import InputError

LEAST_RISE = 0.015  # a smaller step is no reason to stop adding rows, even if it is certain
_CERTAIN = 4.0  # standard errors that a rise must exceed
_MAD_TO_SD = 1.4826
_MEDIAN_OVER_MEAN = 1.2533  # a median's standard error over a mean's, for normal noise


@dataclass(frozen=True, slots=True)
class RowSamples:
    """Repeated measurements of one number of rows, in seconds."""

    rows: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Plateau:
    """Consecutive measured rows of equal cost. `last_rows` is the budget that gets most of it.

    The true end may lie between `last_rows` and `next_rows`, the next measured count; None at the
    end of the measurements, where the plateau may go on.
    """

    first_rows: int
    last_rows: int
    next_rows: int | None
    seconds: float


def find_plateaus(samples: Sequence[RowSamples]) -> tuple[Plateau, ...]:
    """The stairs of a time against rows.

    A new plateau opens where the median exceeds the running plateau's by more than 1.5 % and by
    more than four standard errors, taken from the median absolute deviation, so that single
    outliers neither open nor hide one. Raises InputError for fewer than one sample, rows that do
    not ascend, or fewer than three repeats.
    """
    _check(samples)
    found: list[Plateau] = []
    group = [samples[0]]
    for sample in samples[1:]:
        if _rises(group, sample):
            found.append(_plateau(group, sample.rows))
            group = []
        group.append(sample)
    found.append(_plateau(group, None))
    return tuple(found)


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


def _rises(group: Sequence[RowSamples], sample: RowSamples) -> bool:
    level = _level(group)
    rise = statistics.median(sample.seconds) - level
    noise = math.hypot(_standard_error(sample.seconds), _standard_error(_pooled(group)))
    return rise > max(LEAST_RISE * level, _CERTAIN * noise)


def _plateau(group: Sequence[RowSamples], next_rows: int | None) -> Plateau:
    return Plateau(group[0].rows, group[-1].rows, next_rows, _level(group))


def _level(group: Sequence[RowSamples]) -> float:
    return statistics.median(_pooled(group))


def _pooled(group: Sequence[RowSamples]) -> tuple[float, ...]:
    return tuple(second for sample in group for second in sample.seconds)


def _standard_error(seconds: Sequence[float]) -> float:
    middle = statistics.median(seconds)
    deviation = statistics.median(abs(second - middle) for second in seconds)
    return _MEDIAN_OVER_MEAN * _MAD_TO_SD * deviation / math.sqrt(len(seconds))
