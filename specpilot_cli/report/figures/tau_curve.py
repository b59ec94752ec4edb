"""Tokens per step against verified nodes (paper Fig. 10)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from specpilot_cli.report.figures.base import (
    BLUE,
    INK,
    MUTED,
    NEUTRAL,
    ORANGE,
    ReportFigure,
    new_figure,
    spread,
    style,
    to_svg,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TreeKind = Literal["best_first", "marginal", "eagle_2", "sequoia", "cost_aware", "opt_tree"]
_LOOK: dict[TreeKind, tuple[str, str, str]] = {
    "best_first": (BLUE, "o", "-"),
    "marginal": (ORANGE, "s", "-"),
    "eagle_2": (INK, "D", ":"),
    "sequoia": (MUTED, "^", "-."),
    "cost_aware": (BLUE, "v", "--"),
    "opt_tree": (ORANGE, "x", "--"),
}
_MOST_BANDS = 2  # bands of more series cover each other; the table has all intervals
_MANY_POINTS = 12  # beyond, points run together and their labels too


@dataclass(frozen=True, slots=True)
class TauSeries:
    """One way to pick nodes: tokens per step `tau[i]` at `nodes[i]` nodes, nodes rising.

    `low` and `high` are 95 % bounds of the same length, or empty.
    """

    kind: TreeKind
    label: str
    nodes: tuple[int, ...]
    tau: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class TauCurveData:
    """`series` with the flat references: the stock chain and the oracle (None if not computed).

    The title compares `chosen_nodes` on the first series with the stock chain; None takes the
    largest budget. `condition` names models, block and requests.
    """

    series: tuple[TauSeries, ...]
    stock_tau: float
    stock_nodes: int
    oracle_tau: float | None
    condition: str
    chosen_nodes: int | None = None


def _chosen(data: TauCurveData) -> tuple[int, float]:
    lead = data.series[0]
    nodes = lead.nodes[-1] if data.chosen_nodes is None else data.chosen_nodes
    return nodes, lead.tau[lead.nodes.index(nodes)]


def finding(data: TauCurveData) -> str:
    """The figure's title."""
    nodes, tau = _chosen(data)
    return (
        f"A {data.series[0].label} tree of {nodes} nodes accepts {tau / data.stock_tau:.2f}× "
        f"the tokens of the stock chain ({tau:.2f} against {data.stock_tau:.2f} per step)"
    )


def build(data: TauCurveData) -> Figure:
    """The drawing. Call inside `base.style()`."""
    figure, (axes,) = new_figure(
        finding(data), data.condition, height_in=3.1, left_in=0.62, right_in=1.75
    )
    budgets = sorted({n for series in data.series for n in series.nodes})
    axes.set_xscale("log", base=2)
    for series in data.series:
        colour, marker, line = _LOOK[series.kind]
        shown = marker if len(series.nodes) <= _MANY_POINTS else None
        axes.plot(series.nodes, series.tau, color=colour, marker=shown, linestyle=line)
        if series.low and len(data.series) <= _MOST_BANDS:
            axes.fill_between(
                series.nodes, series.low, series.high, color=colour, alpha=0.15, linewidth=0
            )
    axes.axhline(data.stock_tau, color=NEUTRAL, linewidth=1.6)
    if data.oracle_tau is not None:
        axes.axhline(data.oracle_tau, color=INK, linewidth=1.3, linestyle=(0, (5, 3)))
    nodes, tau = _chosen(data)
    axes.plot([nodes], [tau], marker="o", markersize=12, fillstyle="none", color=INK, mew=1.4)
    banded = len(data.series) <= _MOST_BANDS
    tops = [max((s.high if banded else ()) or s.tau) for s in data.series]
    tops += [data.stock_tau, data.oracle_tau or 0]
    axes.set_ylim(0, 1.08 * max(tops))
    axes.set_xlim(budgets[0] / 1.12, budgets[-1] * 1.12)
    ticks = budgets if len(budgets) <= _MANY_POINTS else _powers_of_two(budgets[0], budgets[-1])
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.minorticks_off()
    axes.grid(axis="y")
    axes.set_xlabel("verified nodes N (log scale)")
    axes.set_ylabel("tokens per step τ")
    _label_ends(axes, data)
    return figure


def _powers_of_two(low: int, high: int) -> list[int]:
    return [2**power for power in range(high.bit_length()) if low <= 2**power <= high]


def _label_ends(axes: Axes, data: TauCurveData) -> None:
    ends = [(s.tau[-1], f"{s.label} {s.tau[-1]:.2f}", _LOOK[s.kind][0]) for s in data.series]
    ends.append((data.stock_tau, f"stock chain {data.stock_tau:.2f}", MUTED))
    if data.oracle_tau is not None:
        ends.append((data.oracle_tau, f"oracle {data.oracle_tau:.2f}", INK))
    top = axes.get_ylim()[1]
    heights = spread([end[0] for end in ends], 0.075 * top, low=0.03 * top, high=0.98 * top)
    for height, (_, text, colour) in zip(heights, ends, strict=True):
        axes.annotate(
            text, (1.015, height), xycoords=("axes fraction", "data"), va="center", color=colour,
            fontsize=9.5,
        )  # fmt: skip


def draw(data: TauCurveData, *, figure_id: str = "tau-curve") -> ReportFigure:
    """The figure with the table of its points."""
    with style():
        svg = to_svg(build(data), figure_id)
    rows = [
        (s.label, str(n), str(n + 1), f"{t:.3f}", _interval(s, i))
        for s in data.series
        for i, (n, t) in enumerate(zip(s.nodes, s.tau, strict=True))
    ]
    stock = (str(data.stock_nodes), str(data.stock_nodes + 1), f"{data.stock_tau:.3f}", "–")
    rows.append(("stock chain", *stock))
    if data.oracle_tau is not None:
        rows.append(("oracle", "–", "–", f"{data.oracle_tau:.3f}", "–"))
    return ReportFigure(
        figure_id=figure_id,
        title=finding(data),
        caption="Exact replay of recorded lattices along each policy's own trajectory: tokens "
        "divided by steps. The ring marks the budget in the title. The oracle follows the target "
        "as long as its token is among the drafter's candidates; no tree can do better.",
        svg=svg,
        columns=("selection", "nodes", "rows", "tokens per step", "95 % interval"),
        rows=tuple(rows),
    )


def _interval(series: TauSeries, i: int) -> str:
    return f"{series.low[i]:.3f} – {series.high[i]:.3f}" if series.low else "–"
