"""Gain per benchmark with its interval against the promotion bound (paper §3.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specpilot_cli.report.figures.base import (
    BLUE,
    INK,
    NEUTRAL,
    ORANGE,
    ReportFigure,
    apart,
    label_room,
    new_figure,
    row_label,
    sentence,
    style,
    to_svg,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# How far an interval of one benchmark may widen the axis, as a share of what the gains span.
_ROOM = 1.2


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
    `interval_method` says how the intervals were made, `remark` what else decides about the gain.
    """

    rows: tuple[GainRow, ...]
    overall: GainRow
    bound: float | None
    system: str
    baseline: str
    interval_method: str
    condition: str
    lower_bound: float | None = None
    remark: str = ""


def finding(data: ForestData) -> str:
    """The figure's title."""
    mean = data.overall
    text = f"{sentence(data.system)} is {mean.gain:.3f}× as fast as {data.baseline}"
    if mean.low is not None and mean.high is not None:
        text += f" [{mean.low:.3f}, {mean.high:.3f}]"
        if data.bound is not None:
            lower = mean.low if data.lower_bound is None else data.lower_bound
            side = "above" if lower > data.bound else "not above"
            text += f"; lower bound {lower:.3f} is {side} the promotion bound of {data.bound:.3f}"
    return f"{text}; {data.remark}" if data.remark else text


def build(data: ForestData) -> Figure:
    """The drawing. Call inside `base.style()`."""
    rows = [*data.rows, data.overall]
    labels = [row_label(f"{row.label} ({row.n_requests})") for row in rows]
    figure, (axes,) = new_figure(
        finding(data), data.condition, height_in=0.34 * (len(rows) + 0.6),
        left_in=label_room(labels) + 0.1, right_in=1.8, bottom_in=0.68, header_gap_in=0.4,
    )  # fmt: skip
    low, high = _view(data)
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    for i, row in enumerate(rows):
        _draw_row(axes, i, row, last=i == len(data.rows))
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
    axes.set_yticks(range(len(rows)), labels)
    axes.tick_params(axis="y", length=0, pad=9)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    ticks = _ticks(low, high)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"output rate, {data.system} / {data.baseline} (log scale, higher is better)")
    return figure


def _view(data: ForestData) -> tuple[float, float]:
    """Limits of the axis: every gain and the whole mean, but not an interval that dwarfs them."""
    overall = data.overall
    core = [1.0, overall.gain, *(row.gain for row in data.rows)]
    core += [v for v in (overall.low, overall.high, data.bound, data.lower_bound) if v is not None]
    ends = [v for row in data.rows for v in (row.low, row.high) if v is not None]
    low, high = math.log(min(core)), math.log(max(core))
    room = max(_ROOM * (high - low), 0.005)
    least = min([low, *(math.log(v) for v in ends if v > 0)])
    most = max([high, *(math.log(v) for v in ends if v > 0)])
    margin = max(0.05 * (high - low), 0.005)
    return (
        math.exp(max(low - room, least) - margin),
        math.exp(min(high + room, most) + margin),
    )


def _ticks(low: float, high: float) -> list[float]:
    """Round ratios that have room for their labels; 1 is always among them."""
    from matplotlib.ticker import MaxNLocator

    found = MaxNLocator(nbins=10, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    ticks = [math.log(float(tick)) for tick in found if low <= tick <= high]
    kept = apart(ticks, 0.11 * math.log(high / low), first=[0.0])
    return [round(math.exp(tick), 6) for tick in kept]


def _draw_row(axes: Axes, i: int, row: GainRow, *, last: bool) -> None:
    colour, marker, size = (INK, "D", 9) if last else (BLUE, "s", 7)
    interval = ""
    if row.low is not None and row.high is not None:
        left, right = axes.get_xlim()
        ends = (max(row.low, left), min(row.high, right))
        axes.plot(ends, [i, i], color=colour, solid_capstyle="butt")
        for end, beyond, arrow in ((left, row.low < left, "<"), (right, row.high > right, ">")):
            if beyond:
                axes.plot([end], [i], marker=arrow, markersize=7, color=colour, clip_on=False)
        interval = f" [{row.low:.3f}, {row.high:.3f}]"
    axes.plot([row.gain], [i], marker=marker, markersize=size, color=colour)
    axes.annotate(
        f"{row.gain:.3f}{interval}", (1.03, i), xycoords=("axes fraction", "data"),
        va="center", fontsize=9.5, fontweight="bold" if last else "normal",
    )  # fmt: skip


def _caption(data: ForestData) -> str:
    text = (
        "Geometric mean of per-request output-rate ratios; number of requests in parentheses. "
        f"Intervals: {data.interval_method}."
    )
    low, high = _view(data)
    ends = [v for row in data.rows for v in (row.low, row.high) if v is not None]
    if ends and (min(ends) < low or max(ends) > high):
        text += " An arrow marks an interval that goes on beyond the axis."
    text += " The last row weighs all benchmarks equally."
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
