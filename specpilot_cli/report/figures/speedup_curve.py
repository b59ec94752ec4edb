"""Speedup over plain decoding against nodes, measured and projected (paper Eq. 3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specpilot_cli.report.figures.base import (
    BLUE,
    INK,
    MUTED,
    NEUTRAL,
    ORANGE,
    SURFACE,
    Basis,
    ReportFigure,
    new_figure,
    sentence,
    spread,
    style,
    to_svg,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

StepTimeBasis = Literal["recorded", "interpolated", "extrapolated"]


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
    parts = []
    for panel in data.panels:
        best = panel.best
        verb = "would be" if panel.projected else "are"
        words = ["projected"] * panel.projected + ["extrapolated"] * (best.basis == "extrapolated")
        tail = f", {' and '.join(words)}" if words else ""
        parts.append(
            f"on {panel.heading} {best.nodes} nodes {verb} best ({best.speedup:.2f}× AR{tail})"
        )
    return sentence("; ".join(parts))


def build(data: SpeedupCurveData) -> Figure:
    """The drawing. Call inside `base.style()`."""
    figure, axes = new_figure(
        finding(data), data.condition, height_in=3.0, panels=len(data.panels), left_in=0.7,
        gap_in=1.5, right_in=0.95, header_gap_in=0.5,
    )  # fmt: skip
    for panel, area in zip(data.panels, axes, strict=True):
        _draw_panel(area, panel)
    axes[0].set_ylabel("speedup over AR: S = τ / c")
    return figure


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
        face = SURFACE if mark.basis == "extrapolated" else colour
        axes.plot([mark.nodes], [mark.speedup], marker=marker, color=colour, markerfacecolor=face)
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
    for height, text in zip(heights, (f"stock {panel.stock.speedup:.2f}×", "AR 1×"), strict=True):
        axes.annotate(
            text, (1.03, height), xycoords=("axes fraction", "data"), va="center", fontsize=9,
            color=MUTED,
        )  # fmt: skip
    axes.set_xlim(nodes[0] / 1.15, nodes[-1] * 1.15)
    axes.set_xticks(nodes, [str(n) for n in nodes])
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
        "also the τ at which speculation breaks even. Hollow marks and dashed lines use step times "
        "extrapolated beyond the recorded rows. Projected means τ measured here, step times there.",
        svg=svg,
        columns=("step times", "policy", "nodes", "rows", "τ", "c", "S", "step time"),
        rows=tuple(rows),
        basis="measured and projected" if len(kinds) == 2 else basis,
    )
