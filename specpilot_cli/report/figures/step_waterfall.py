"""From the measured step down to its floor, piece by piece (paper Fig. 2a, Eq. 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specpilot_cli.report.figures.base import (
    BLUE,
    INK,
    MUTED,
    NEUTRAL,
    ORANGE,
    PALE,
    SURFACE,
    WIDTH_IN,
    ReportFigure,
    beside,
    decimals,
    label_room,
    new_figure,
    style,
    time_unit,
    to_svg,
)
from specpilot_cli.units import format_percent, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CHAR_IN = 0.085  # of the small type, in the wide font that a browser may lack
_LABELLED_SHARE = 0.05
_SLOWER = "slower while profiled"


@dataclass(frozen=True, slots=True)
class ClassTime:
    """Measured seconds and floor seconds of one kernel class, per step."""

    name: str
    measured_s: float
    floor_s: float


@dataclass(frozen=True, slots=True)
class WaterfallData:
    """One step: its time without profiler, its profiled time, and its classes, all in seconds.

    `condition` names device, model, rows and which peaks the floors use. `split` parts the step by
    the engine's passes, in seconds; empty where they are not known.
    """

    t_step_s: float
    t_prof_s: float
    classes: tuple[ClassTime, ...]
    condition: str
    split: tuple[tuple[str, float], ...] = ()

    @property
    def floor_s(self) -> float:
        """Sum of the floors."""
        return sum(c.floor_s for c in self.classes)


@dataclass(frozen=True, slots=True)
class _Bar:
    label: str
    start_s: float
    length_s: float
    colour: str


def finding(data: WaterfallData) -> str:
    """The figure's title."""
    return (
        f"A step takes {format_seconds(data.t_step_s)}; at its floors it would take "
        f"{format_seconds(data.floor_s)} (a factor of {data.t_step_s / data.floor_s:.2f})"
    )


def _bars(data: WaterfallData) -> list[_Bar]:
    bars = [_Bar("measured step", 0.0, data.t_step_s, INK)]
    level = data.t_step_s
    covered = sum(c.measured_s for c in data.classes)
    outside = data.t_step_s - data.t_prof_s
    losses = [("outside the profile" if outside >= 0 else _SLOWER, outside)]
    losses.append(("gaps between kernels", data.t_prof_s - covered))
    by_slack = sorted(data.classes, key=lambda c: c.floor_s - c.measured_s)
    losses += [
        (f"{c.name.replace('_', ' ')} above its floor", c.measured_s - c.floor_s) for c in by_slack
    ]
    for label, loss in losses:
        if abs(loss) < 1e-4 * data.t_step_s:
            continue
        level -= loss
        label = label.replace("above", "below") if loss < 0 else label
        bars.append(_Bar(label, level, loss, NEUTRAL if label == _SLOWER else ORANGE))
    bars.append(_Bar("sum of the floors", 0.0, data.floor_s, BLUE))
    return bars


def build(data: WaterfallData) -> Figure:
    """The drawing. Call inside `base.style()`."""
    bars = _bars(data)
    factor, unit = time_unit(data.t_step_s)
    digits = decimals(factor * data.t_step_s)
    figure, (axes,) = new_figure(
        finding(data), data.condition, height_in=0.34 * len(bars), right_in=0.75,
        left_in=label_room([bar.label for bar in bars]),
    )  # fmt: skip
    for i, bar in enumerate(bars):
        axes.barh(
            i, factor * bar.length_s, left=factor * bar.start_s, height=0.62, color=bar.colour
        )
        whole = i in (0, len(bars) - 1)
        if i == 0:
            _draw_split(axes, data, factor)
        sign = "" if whole else ("−" if bar.length_s > 0 else "+")
        edge = factor * max(bar.start_s, bar.start_s + bar.length_s)
        text = f"{sign}{factor * abs(bar.length_s):.{digits}f}"
        beside(axes, edge, i, text)
        if i + 1 < len(bars):
            level = factor * (bar.length_s if i == 0 else bar.start_s)
            axes.plot([level, level], [i - 0.31, i + 1.31], color=NEUTRAL, linewidth=0.8)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    right = factor * max(bar.start_s + max(bar.length_s, 0.0) for bar in bars)
    axes.set_xlim(0, 1.04 * right)
    axes.grid(axis="x")
    axes.set_xlabel(f"time per step ({unit})")
    return figure


def _draw_split(axes: Axes, data: WaterfallData, factor: float) -> None:
    """The passes inside the step's bar, named inside it, or above it where they are short."""
    inches = axes.get_position().width * WIDTH_IN / (1.04 * factor * data.t_step_s)
    longest = max((seconds for _, seconds in data.split), default=0.0)
    shades = iter((MUTED, NEUTRAL, PALE, *[NEUTRAL, PALE] * len(data.split)))
    start = 0.0
    for name, seconds in data.split:
        length = factor * max(0.0, seconds)
        shade = INK if seconds == longest else next(shades)
        axes.barh(0, length, left=start, height=0.62, color=shade)
        inside = inches * length > _CHAR_IN * (len(name) + 1)
        fits = inches * (factor * data.t_step_s - start) > _CHAR_IN * len(name)
        if inside or (fits and seconds > _LABELLED_SHARE * data.t_step_s):
            place = (start + length / 2, 0.0) if inside else (start, -0.36)
            axes.text(
                *place, name, fontsize=8.5, color=SURFACE if inside else MUTED,
                ha="center" if inside else "left", va="center" if inside else "bottom",
            )  # fmt: skip
        start += length


def _caption(data: WaterfallData) -> str:
    text = (
        "Each orange bar is time that a step at its floors would not spend. A class's floor is "
        "the larger of its arithmetic time and its memory time at the stated share of the peak "
        "rates."
    )
    if data.split:
        text = f"The first bar is parted by the engine's passes, in their order. {text}"
    if data.t_step_s >= data.t_prof_s:
        return text
    slower = format_percent(data.t_prof_s / data.t_step_s - 1)
    return (
        f"{text} The profiled steps ran {slower} slower than the plain ones (timing noise, or the "
        f"profiler's own cost): the grey bar adds that, so that the classes fit below it."
    )


def draw(data: WaterfallData, *, figure_id: str = "step-waterfall") -> ReportFigure:
    """The figure with measured time, floor and slack of every class."""
    factor, unit = time_unit(data.t_step_s)
    with style():
        svg = to_svg(build(data), figure_id)

    def row(name: str, measured_s: float, floor_s: float) -> tuple[str, ...]:
        return (
            name,
            f"{factor * measured_s:.4g}",
            f"{factor * floor_s:.4g}",
            f"{factor * (measured_s - floor_s):.4g}",
            f"{100 * measured_s / data.t_step_s:.1f} %",
        )

    covered = sum(c.measured_s for c in data.classes)
    rows = [row(c.name, c.measured_s, c.floor_s) for c in data.classes]
    rows.append(row("gaps between kernels", data.t_prof_s - covered, 0.0))
    if data.t_step_s >= data.t_prof_s:
        rows.append(row("outside the profile", data.t_step_s - data.t_prof_s, 0.0))
    rows.append(row("whole step", data.t_step_s, data.floor_s))
    return ReportFigure(
        figure_id=figure_id,
        title=finding(data),
        caption=_caption(data),
        svg=svg,
        columns=("part of the step", f"measured ({unit})", f"floor ({unit})", f"above ({unit})",
                 "share of the step"),
        rows=tuple(rows),
    )  # fmt: skip
