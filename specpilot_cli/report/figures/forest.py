"""Gain per benchmark with its interval against the promotion bound (paper §3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specpilot_cli.report.figures.base import (
    BLUE,
    INK,
    NEUTRAL,
    ORANGE,
    ReportFigure,
    new_figure,
    sentence,
    style,
    to_svg,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class GainRow:
    """Geometric-mean gain of one benchmark as a ratio, its 95 % interval, and its requests.

    `low` and `high` are None where too few requests allow no interval.
    """

    label: str
    gain: float
    low: float | None
    high: float | None
    n_requests: int


@dataclass(frozen=True, slots=True)
class ForestData:
    """Benchmarks and their equal-weight mean `overall`; both are ratios `system` / `baseline`.

    `bound` is the promotion bound as a ratio, for example 1.012; None draws only the line at 1.
    `lower_bound` is the one-sided bound that the promotion rule compares with it; None takes the
    lower end of the interval.
    `interval_method` says how the intervals were made.
    """

    rows: tuple[GainRow, ...]
    overall: GainRow
    bound: float | None
    system: str
    baseline: str
    interval_method: str
    condition: str
    lower_bound: float | None = None


def finding(data: ForestData) -> str:
    """The figure's title."""
    mean = data.overall
    text = f"{sentence(data.system)} is {mean.gain:.3f}× as fast as {data.baseline}"
    if mean.low is None or mean.high is None:
        return text
    text += f" [{mean.low:.3f}, {mean.high:.3f}]"
    if data.bound is None:
        return text
    lower = mean.low if data.lower_bound is None else data.lower_bound
    side = "above" if lower > data.bound else "not above"
    return f"{text}; lower bound {lower:.3f} is {side} the promotion bound of {data.bound:.3f}"


def build(data: ForestData) -> Figure:
    """The drawing. Call inside `base.style()`."""
    rows = [*data.rows, data.overall]
    figure, (axes,) = new_figure(
        finding(data), data.condition, height_in=0.36 * (len(rows) + 0.6), left_in=1.75,
        right_in=1.75, bottom_in=0.68, header_gap_in=0.4,
    )  # fmt: skip
    for i, row in enumerate(rows):
        last = i == len(data.rows)
        colour, marker, size = (INK, "D", 9) if last else (BLUE, "s", 7)
        if row.low is not None and row.high is not None:
            axes.plot([row.low, row.high], [i, i], color=colour, solid_capstyle="butt")
        axes.plot([row.gain], [i], marker=marker, markersize=size, color=colour)
        interval = (
            "" if row.low is None or row.high is None else f" [{row.low:.3f}, {row.high:.3f}]"
        )
        axes.annotate(
            f"{row.gain:.3f}{interval}", (1.03, i), xycoords=("axes fraction", "data"),
            va="center", fontsize=9.5, fontweight="bold" if last else "normal",
        )  # fmt: skip
    if data.lower_bound is not None:
        axes.plot(
            [data.lower_bound], [len(data.rows)], marker="|", markersize=16, color=INK, mew=1.6
        )
    axes.axvline(1.0, color=NEUTRAL, linewidth=1.4)
    if data.bound is not None:
        axes.axvline(data.bound, color=ORANGE, linewidth=1.4, linestyle=(0, (5, 3)))
        axes.annotate(
            f"bound {data.bound:.3f}", (data.bound, 1.0), xycoords=("data", "axes fraction"),
            xytext=(3, 2), textcoords="offset points", color=ORANGE, fontsize=9, va="bottom",
        )  # fmt: skip
    axes.axhline(len(data.rows) - 0.5, color=NEUTRAL, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [f"{row.label} ({row.n_requests})" for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    values = [v for row in rows for v in (row.gain, row.low, row.high) if v is not None]
    values += [] if data.lower_bound is None else [data.lower_bound]
    low, high = min([*values, 1.0]), max([*values, 1.0, data.bound or 1.0])
    margin = max(0.06 * (high - low), 0.005)
    axes.set_xlim(low - margin, high + margin)
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"output rate, {data.system} / {data.baseline} (higher is better)")
    return figure


def _caption(data: ForestData) -> str:
    text = (
        "Geometric mean of per-request output-rate ratios; number of requests in parentheses. "
        f"Intervals: {data.interval_method}. The last row weighs all benchmarks equally."
    )
    if data.lower_bound is None or data.bound is None:
        return text
    return (
        f"{text} The upright stroke on it is the one-sided lower bound ({data.lower_bound:.3f}), "
        "which the promotion rule compares with the dashed line."
    )


def draw(data: ForestData, *, figure_id: str = "forest") -> ReportFigure:
    """The figure with every gain and interval."""
    with style():
        svg = to_svg(build(data), figure_id)

    def bound(value: float | None) -> str:
        return "–" if value is None else f"{value:.4f}"

    rows = tuple(
        (row.label, f"{row.gain:.4f}", bound(row.low), bound(row.high), str(row.n_requests))
        for row in (*data.rows, data.overall)
    )
    return ReportFigure(
        figure_id=figure_id,
        title=finding(data),
        caption=_caption(data),
        svg=svg,
        columns=("benchmark", "gain (ratio)", "95 % low", "95 % high", "requests"),
        rows=rows,
    )
