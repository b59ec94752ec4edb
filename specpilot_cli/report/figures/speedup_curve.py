"""Speedup over plain decoding against nodes, measured and projected (paper Eq. 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from specpilot_cli.report.figures.base import (
    BLUE,
    INK,
    MUTED,
    NEUTRAL,
    ORANGE,
    SURFACE,
    WIDTH_IN,
    Basis,
    ReportFigure,
    apart,
    new_figure,
    sentence,
    spread,
    style,
    to_svg,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

StepTimeBasis = Literal["recorded", "interpolated", "extrapolated", "floor"]
_FILL: dict[StepTimeBasis, Literal["full", "left", "none"]] = {
    "recorded": "full",
    "interpolated": "left",
    "extrapolated": "none",
    "floor": "none",
}


@dataclass(frozen=True, slots=True)
class SpeedupMark:
    """S(N) at `nodes`: tokens per step `tau` over `c` plain steps, and where `c` comes from."""

    nodes: int
    tau: float
    c: float
    speedup: float
    basis: StepTimeBasis


@dataclass(frozen=True, slots=True)
class SpeedupPanel:
    """One set of step times. `heading` names the device, such as `this machine` or `H200`.

    `projected` is True when tau was measured on one machine and the step times on another.
    `marks` are sorted by nodes; `stock` is the stock chain under the same step times.
    """

    heading: str
    projected: bool
    marks: tuple[SpeedupMark, ...]
    stock: SpeedupMark

    @property
    def best(self) -> SpeedupMark:
        """The mark with the largest speedup; a tie goes to fewer nodes."""
        return max(self.marks, key=lambda mark: (mark.speedup, -mark.nodes))


@dataclass(frozen=True, slots=True)
class SpeedupCurveData:
    """One or two panels, drawn side by side with their own vertical axes."""

    panels: tuple[SpeedupPanel, ...]
    condition: str


def finding(data: SpeedupCurveData) -> str:
    """The figure's title."""
    return sentence("; ".join(_panel_finding(panel) for panel in data.panels))


def _panel_finding(panel: SpeedupPanel) -> str:
    best, stock = panel.best, panel.stock
    words = ["projected"] * panel.projected
    words += [f"{best.basis} step time"] * (best.basis != "recorded")
    tail = f" ({', '.join(words)})" if words else ""
    if best.speedup <= stock.speedup:
        return (
            f"on {panel.heading} no tree beats stock's {stock.speedup:.2f}× plain decoding: "
            f"{best.speedup:.2f}× at {best.nodes} nodes{tail}"
        )
    verb = "would be" if panel.projected else "are"
    return (
        f"on {panel.heading} {best.nodes} nodes {verb} best, {best.speedup:.2f}× plain decoding "
        f"against stock's {stock.speedup:.2f}×{tail}"
    )


def build(data: SpeedupCurveData) -> Figure:
    """The drawing. Call inside `base.style()`."""
    figure, axes = new_figure(
        finding(data), data.condition, height_in=3.0, panels=len(data.panels), left_in=0.7,
        gap_in=1.55, right_in=0.95, bottom_in=0.95, header_gap_in=0.5,
    )  # fmt: skip
    for panel, area in zip(data.panels, axes, strict=True):
        _draw_panel(area, panel)
    axes[0].set_ylabel("speedup over plain decoding: S = τ / c")
    _draw_legend(figure, [mark.basis for panel in data.panels for mark in panel.marks])
    return figure


def _draw_legend(figure: Figure, bases: Sequence[StepTimeBasis]) -> None:
    """How the step times behind the marks were obtained, for the kinds that occur."""
    from matplotlib.lines import Line2D

    found = [basis for basis in _FILL if basis in bases]
    handles = [
        Line2D([], [], linestyle="none", marker="o", color=INK, label=f"{basis} step time",
               **_fill(basis, INK))
        for basis in found
    ]  # fmt: skip
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.06, 0.0), ncols=len(handles),
        fontsize=9, handletextpad=0.2, columnspacing=1.6,
    )  # fmt: skip


def _fill(basis: StepTimeBasis, colour: str) -> dict[str, Any]:
    return {
        "fillstyle": _FILL[basis], "markerfacecolor": colour, "markerfacecoloralt": SURFACE,
    }  # fmt: skip


def _draw_panel(axes: Axes, panel: SpeedupPanel) -> None:
    colour = ORANGE if panel.projected else BLUE
    marker = "s" if panel.projected else "o"
    nodes = [mark.nodes for mark in panel.marks]
    values = [mark.speedup for mark in panel.marks]
    axes.set_xscale("log", base=2)
    for left, right in zip(panel.marks, panel.marks[1:], strict=False):
        known = "extrapolated" not in (left.basis, right.basis)
        axes.plot(
            [left.nodes, right.nodes], [left.speedup, right.speedup], color=colour,
            linestyle="-" if known else (0, (3, 2)),
        )  # fmt: skip
    for mark in panel.marks:
        axes.plot(
            [mark.nodes], [mark.speedup], marker=marker, color=colour, **_fill(mark.basis, colour)
        )
    best = panel.best
    axes.annotate(
        f"{best.speedup:.2f}×", (best.nodes, best.speedup), xytext=(0, 9),
        textcoords="offset points", ha="center", fontweight="bold",
    )  # fmt: skip
    axes.axhline(panel.stock.speedup, color=NEUTRAL, linewidth=1.6)
    axes.axhline(1.0, color=INK, linewidth=1.1, linestyle=(0, (5, 3)))
    top = 1.22 * max(*values, panel.stock.speedup, 1.0)
    axes.set_ylim(0, top)
    heights = spread([panel.stock.speedup, 1.0], 0.07 * top, low=0.0, high=top)
    ends = (f"stock {panel.stock.speedup:.2f}×", "plain 1×")
    for height, text in zip(heights, ends, strict=True):
        axes.annotate(
            text, (1.03, height), xycoords=("axes fraction", "data"), va="center", fontsize=9,
            color=MUTED,
        )  # fmt: skip
    axes.set_xlim(nodes[0] / 1.15, nodes[-1] * 1.15)
    octaves = math.log2(1.15**2 * nodes[-1] / nodes[0])
    gap = 0.3 * octaves / (axes.get_position().width * WIDTH_IN)
    wanted = [math.log2(n) for n in (best.nodes, nodes[0], nodes[-1])]
    shown = apart([math.log2(n) for n in nodes], gap, first=wanted)
    axes.set_xticks(nodes, [str(n) if math.log2(n) in shown else "" for n in nodes])
    axes.minorticks_off()
    axes.grid(axis="y")
    axes.set_xlabel("verified nodes N (log scale)")
    kind = "projected" if panel.projected else "measured"
    axes.set_title(f"{panel.heading}: {kind}", loc="left", fontsize=10, color=colour)


def draw(data: SpeedupCurveData, *, figure_id: str = "speedup-curve") -> ReportFigure:
    """The figure with tau, c and S of every point."""
    with style():
        svg = to_svg(build(data), figure_id)
    rows = []
    for panel in data.panels:
        kind = "projected" if panel.projected else "measured"
        for name, mark in [("tree", m) for m in panel.marks] + [("stock chain", panel.stock)]:
            rows.append(
                (
                    f"{panel.heading} ({kind})",
                    name,
                    str(mark.nodes),
                    str(mark.nodes + 1),
                    f"{mark.tau:.3f}",
                    f"{mark.c:.3f}",
                    f"{mark.speedup:.3f}",
                    mark.basis,
                )
            )
    kinds = {panel.projected for panel in data.panels}
    basis: Basis = "projected" if kinds == {True} else "measured"
    return ReportFigure(
        figure_id=figure_id,
        title=finding(data),
        caption="S = τ / c: tokens per step over the step's cost in plain decoding steps. c is "
        "also the τ at which speculation breaks even. Full marks use step times recorded at these "
        "rows, half-full ones lie between recorded rows, hollow ones and dashed lines beyond them. "
        "Projected means τ measured here, step times there.",
        svg=svg,
        columns=("step times", "policy", "nodes", "rows", "τ", "c", "S", "step time"),
        rows=tuple(rows),
        basis="measured and projected" if len(kinds) == 2 else basis,
    )
