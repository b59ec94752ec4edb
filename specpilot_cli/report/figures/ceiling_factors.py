"""The three factors of the ceiling on a log axis, where their product is a sum (paper Eq. 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specpilot_cli.report.figures.base import (
    BLUE,
    INK,
    NEUTRAL,
    PALE,
    ReportFigure,
    beside,
    new_figure,
    style,
    to_svg,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TICKS = (0.5, 0.7, 1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 100)
_CAPTION = (
    "Each bar starts where the one above ends, so on this axis their lengths add up to the "
    "ceiling: what the same hardware allows with one draft and one exact pass a step."
)
_BELOW_ONE = (
    "An overhead below 1 leads back: the profiled steps ran slower than the plain ones, so there "
    "is no overhead to win."
)


@dataclass(frozen=True, slots=True)
class FactorsData:
    """Factors as ratios; `tau` is None where no better tree was evaluated.

    `system` is what was profiled, as the title calls it.
    """

    tau: float | None
    kernel: float
    overhead: float
    condition: str
    system: str = "the measured system"


def _named(data: FactorsData) -> list[tuple[str, float]]:
    named = [
        ("kernels: profile / floors", data.kernel),
        ("overhead: step / profile", data.overhead),
    ]
    return named if data.tau is None else [("tokens: best τ / τ", data.tau), *named]


def _product(data: FactorsData) -> float:
    product = 1.0
    for _, value in _named(data):
        product *= value
    return product


def finding(data: FactorsData) -> str:
    """The figure's title."""
    name, value = max(_named(data), key=lambda item: item[1])
    lead = name.split(":")[0]
    verb = "leads" if lead == "overhead" else "lead"
    what = "The ceiling" if data.tau is not None else "The step-cost ceiling"
    return f"{what} is {_product(data):.2f}× {data.system}; {lead} {verb} with {value:.2f}×"


def build(data: FactorsData) -> Figure:
    """The drawing. Call inside `base.style()`."""
    named = _named(data)
    figure, (axes,) = new_figure(
        finding(data), data.condition, height_in=0.42 * (len(named) + 1), left_in=2.15, right_in=0.7
    )
    axes.set_xscale("log")
    level, edges = 1.0, [1.0]
    lead = max(value for _, value in named)
    for i, (_, value) in enumerate(named):
        colour = BLUE if value == lead else PALE
        start, stop = sorted((level, level * value))
        axes.barh(i, stop - start, left=start, height=0.6, color=colour)
        mark = "  ← leads" if value == lead else ""
        beside(axes, stop, i, f"{value:.2f}×{mark}")
        level *= value
        axes.plot([level, level], [i - 0.3, i + 1.3], color=NEUTRAL, linewidth=0.8)
        edges.append(level)
    start, stop = sorted((1.0, level))
    axes.barh(len(named), stop - start, left=start, height=0.6, color=INK)
    beside(axes, stop, len(named), f"{level:.2f}×", bold=True)
    low, high = min(edges), max(edges)
    axes.set_xlim(low / 1.02, high * (high / low) ** 0.2)
    ticks = [t for t in _TICKS if low <= t <= high * 1.05]
    axes.set_xticks(ticks, [f"{t:g}×" for t in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(named) + 1), [name for name, _ in named] + ["ceiling (product)"])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(named) + 0.5, -0.5)
    axes.grid(axis="x")
    axes.set_xlabel(f"speedup over {data.system} (log scale)")
    return figure


def draw(data: FactorsData, *, figure_id: str = "ceiling-factors") -> ReportFigure:
    """The figure with its factors."""
    with style():
        svg = to_svg(build(data), figure_id)
    rows = [(name, f"{value:.4f}") for name, value in _named(data)]
    rows.append(("ceiling (product)", f"{_product(data):.4f}"))
    return ReportFigure(
        figure_id=figure_id,
        title=finding(data),
        caption=_CAPTION if data.overhead >= 1 else f"{_CAPTION} {_BELOW_ONE}",
        svg=svg,
        columns=("factor", "ratio"),
        rows=tuple(rows),
    )
