"""Kernel classes under the roofline: arithmetic per byte against arithmetic per second."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specpilot_cli.report.figures.base import (
    BLUE,
    INK,
    MUTED,
    NEUTRAL,
    ORANGE,
    ReportFigure,
    new_figure,
    sentence,
    spread,
    style,
    to_svg,
)
from specpilot_cli.units import format_bandwidth, format_bytes, format_flops, format_percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROOM = 4.0  # beyond the outermost mark or the ridge, as a factor


@dataclass(frozen=True, slots=True)
class RooflineMark:
    """One kernel class of a step: what it computes, moves and takes. All above zero."""

    name: str
    flops: float
    bytes: float
    seconds: float

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes

    @property
    def rate(self) -> float:
        """FLOP/s reached."""
        return self.flops / self.seconds


@dataclass(frozen=True, slots=True)
class RooflineData:
    """Peaks of one device in FLOP/s and bytes/s, the shares of them that floors use, and marks."""

    marks: tuple[RooflineMark, ...]
    peak_flops: float
    peak_bytes: float
    flop_share: float
    byte_share: float
    condition: str

    def roof(self, intensity: float) -> float:
        """The most FLOP/s at this intensity, at full peaks."""
        return min(self.peak_flops, intensity * self.peak_bytes)

    def reached(self, mark: RooflineMark) -> float:
        """Share of the roof above it that a class reaches."""
        return mark.rate / self.roof(mark.intensity)

    @property
    def ridge(self) -> float:
        """FLOP per byte from which on arithmetic limits."""
        return self.peak_flops / self.peak_bytes


def finding(data: RooflineData) -> str:
    """The figure's title."""
    longest = max(data.marks, key=lambda mark: mark.seconds)
    limit = "memory" if longest.intensity < data.ridge else "arithmetic"
    share = format_percent(data.reached(longest), digits=0)
    return sentence(f"{limit} binds the longest class, {longest.name}: {share} of its roof")


def build(data: RooflineData) -> Figure:
    """The drawing. Call inside `base.style()`."""
    figure, (axes,) = new_figure(
        finding(data), data.condition, height_in=3.4, left_in=1.3, right_in=2.0
    )
    intensities = [*(mark.intensity for mark in data.marks), data.ridge]
    low, high = min(intensities) / _ROOM, max(intensities) * _ROOM
    axes.set_xscale("log")
    axes.set_yscale("log")
    _roof(axes, low, high, data.peak_bytes, data.peak_flops, solid=True)
    floors = (data.byte_share * data.peak_bytes, data.flop_share * data.peak_flops)
    _roof(axes, low, high, *floors, solid=False)
    longest = max(mark.seconds for mark in data.marks)
    for mark in data.marks:
        size = 5 + 9 * (mark.seconds / longest) ** 0.5
        colour = BLUE if mark.intensity < data.ridge else ORANGE
        axes.plot([mark.intensity], [mark.rate], marker="o", markersize=size, color=colour)
    _names(axes, data)
    axes.set_xlim(low, high)
    bottom = min(mark.rate for mark in data.marks) / _ROOM
    axes.set_ylim(bottom, 2 * data.peak_flops)
    # plain labels: the drawing's powers of ten would be pieces without a colour of their own
    axes.set_xticks(decades := _decades(low, high), [f"{decade:g}" for decade in decades])
    axes.set_yticks(
        decades := _decades(bottom, 2 * data.peak_flops), [format_flops(d) for d in decades]
    )
    axes.minorticks_off()
    axes.grid(axis="both")
    axes.set_xlabel("arithmetic per byte of memory traffic (FLOP / B, log scale)", color=MUTED)
    axes.set_ylabel("arithmetic reached (log scale)")
    return figure


def _decades(low: float, high: float) -> list[float]:
    """Powers of ten between, at most five or so."""
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    step = max(1, (last - first) // 4)
    return [10.0**power for power in range(first, last + 1, step)]


def _roof(
    axes: Axes, low: float, high: float, n_bytes: float, flops: float, *, solid: bool
) -> None:
    ridge = flops / n_bytes
    axes.plot(
        [low, ridge, max(high, ridge)], [low * n_bytes, flops, flops],
        color=INK if solid else NEUTRAL, linewidth=1.6 if solid else 1.1,
        linestyle="-" if solid else (0, (4, 2)),
    )  # fmt: skip


def _names(axes: Axes, data: RooflineData) -> None:
    """Names at the right edge, in the order of the marks' heights, each with its share."""
    order = sorted(data.marks, key=lambda mark: mark.rate)
    low = min(mark.rate for mark in data.marks) / _ROOM
    whole = 2 * data.peak_flops / low
    places = [math.log(mark.rate / low) / math.log(whole) for mark in order]
    for mark, place in zip(order, spread(places, 0.075, low=0.02, high=0.95), strict=True):
        axes.annotate(
            f"{mark.name} {format_percent(data.reached(mark), digits=0)}",
            (mark.intensity, mark.rate), xytext=(1.03, place), textcoords="axes fraction",
            va="center", fontsize=9,
            arrowprops={"arrowstyle": "-", "color": NEUTRAL, "linewidth": 0.7},
        )  # fmt: skip


def draw(data: RooflineData, *, figure_id: str = "roofline") -> ReportFigure:
    """The figure with every number behind it. Raises ValueError without a mark."""
    if not data.marks:
        raise ValueError("no kernel class counts both bytes and arithmetic")
    with style():
        svg = to_svg(build(data), figure_id)
    return ReportFigure(
        figure_id=figure_id,
        title=finding(data),
        caption=f"The solid line is the device's peak, {format_bandwidth(data.peak_bytes)} and "
        f"{format_flops(data.peak_flops)}; the dashed one what floors use, "
        f"{format_percent(data.byte_share, digits=0)} and "
        f"{format_percent(data.flop_share, digits=0)} of it. A mark's size grows with its time, "
        "and its share is of the solid line above it.",
        svg=svg,
        columns=("kernel class", "FLOP per byte", "arithmetic", "traffic", "reached", "of roof"),
        rows=tuple(
            (
                mark.name,
                f"{mark.intensity:.3g}",
                f"{mark.flops / 1e9:.3f} GFLOP",
                format_bytes(mark.bytes),
                format_flops(mark.rate),
                format_percent(data.reached(mark)),
            )
            for mark in data.marks
        ),
    )
