"""Components of a step's time, fitted to measured steps of different shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError
from specpilot_cli.schema.batch_times import CostCurve, CostPoint, Driver

Float = npt.NDArray[np.float64]

_KNOT_RATIO = 1.5  # between knots of the curve over rows; closer ones would follow noise
_NEGLIGIBLE = 1e-6  # a share of every step below this is the solver's rounding
_LEAST_S = 1e-12  # that a file of step times takes for a time


@dataclass(frozen=True, slots=True)
class StepSample:
    """A measured decode step: what it held, summed over its requests, and its seconds.

    rows counts roots; draft_rows is 0 without a drafter; context_tokens are committed tokens.
    """

    requests: int
    rows: int
    draft_rows: int
    context_tokens: float
    step_s: float


def fit_components(samples: Sequence[StepSample]) -> tuple[tuple[CostCurve, ...], float]:
    """Curves whose sum is closest to the samples, and their mean absolute error as a ratio.

    Nonnegative least squares on relative errors: a piecewise linear curve over rows that never
    falls, and straight ones over requests, contexts and drafted rows (with a step at the first).
    Amounts that grow together in all samples cannot be told apart, and one of them gets the cost:
    if drafting, or contexts, would leave nothing to a step as such or to its requests, then these
    get it, since a step without drafts costs time too. Raises `InputError` without samples.
    """
    if not samples:
        raise InputError("no measured step to fit")
    rows, requests, drafts, context, measured = (
        np.array([getattr(item, name) for item in samples], dtype=np.float64)
        for name in ("rows", "requests", "draft_rows", "context_tokens", "step_s")
    )
    knots = _knots(rows)
    hats = [np.clip(rows - low, 0, high - low) for low, high in pairwise(knots)]
    columns = [np.ones_like(rows), *hats, context, requests, np.sign(drafts), drafts]
    matrix = np.stack(columns, axis=1)
    weights = _weights(matrix / measured[:, None])
    error = float(np.abs(matrix @ weights / measured - 1).mean())
    slopes = weights[1 : len(knots)]
    levels = weights[0] + np.concatenate([[0.0], np.cumsum(slopes * np.diff(knots))])
    per_token, per_request, first_draft, per_draft = weights[len(knots) :]
    curves = [_curve("verified rows", "rows", knots, levels)]
    straight: tuple[tuple[str, Driver, Float, float, float], ...] = (
        ("requests", "requests", requests, 0.0, per_request),
        ("contexts", "context_tokens", context, 0.0, per_token),
        ("drafting", "draft_rows", drafts, first_draft, per_draft),
    )
    for name, driver, amounts, base, slope in straight:
        ends = np.array([1.0, max(2.0, float(amounts.max()))])
        if base or slope:
            curves.append(_curve(name, driver, ends, base + slope * ends))
    return tuple(curves), error


def _weights(matrix: Float) -> Float:
    """Nonnegative weights [n] of columns [s, n] whose sum is closest to 1, negligible ones zero.

    The last four columns are contexts, requests, and two of drafting.
    """
    from scipy.optimize import nnls

    n_columns = matrix.shape[1]
    weights = np.zeros(n_columns)
    for kept in (np.arange(n_columns), np.delete(np.arange(n_columns), (-2, -1)),
                 np.delete(np.arange(n_columns), (-4, -2, -1))):  # fmt: skip
        weights[:] = 0
        weights[kept], _ = nnls(matrix[:, kept], np.ones(len(matrix)))
        shares = (matrix * weights).max(axis=0)
        weights[(shares < _NEGLIGIBLE) | (weights < _LEAST_S)] = 0
        if weights[0] or weights[-3]:
            break
    return weights


def _knots(rows: Float) -> Float:
    """Measured row counts, apart by `_KNOT_RATIO` at least, the largest one included."""
    found: list[float] = []
    for count in sorted(set(rows.tolist())):
        if not found or count >= _KNOT_RATIO * found[-1]:
            found.append(count)
    largest = float(rows.max())
    if found[-1] != largest:
        found[-1:] = [largest] if len(found) > 1 else [found[0], largest]
    return np.array(found)


def _curve(name: str, driver: Driver, amounts: Float, seconds: Float) -> CostCurve:
    points = tuple(
        CostPoint(amount=float(x), seconds=float(y)) for x, y in zip(amounts, seconds, strict=True)
    )
    return CostCurve(name=name, driver=driver, points=points)
