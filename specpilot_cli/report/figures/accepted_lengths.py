"""How many tokens each step commits: a histogram per policy (paper §6.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specpilot_cli.report.figures.base import (
    BLUE,
    INK,
    NEUTRAL,
    ReportFigure,
    new_figure,
    style,
    to_svg,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class LengthSeries:
    """One policy: `steps[n]` steps committed n tokens, the bonus included; `steps[0]` is 0."""

    label: str
    steps: tuple[int, ...]

    @property
    def total(self) -> int:
        """All steps."""
        return sum(self.steps)

    @property
    def tau(self) -> float:
        """Tokens per step."""
        return sum(n * count for n, count in enumerate(self.steps)) / self.total

    def share(self, tokens: int) -> float:
        """Share of steps that commit exactly `tokens`."""
        return self.steps[tokens] / self.total if tokens < len(self.steps) else 0.0


@dataclass(frozen=True, slots=True)
class LengthData:
    """`tree` against `chain`, and what they were replayed on."""

    tree: LengthSeries
    chain: LengthSeries
    condition: str


def finding(data: LengthData) -> str:
    """The figure's title."""
    tree, chain = (100 * series.share(1) for series in (data.tree, data.chain))
    return (
        f"Steps in which no draft is right: {tree:.0f} % with {data.tree.label}, "
        f"{chain:.0f} % with the {data.chain.label}"
    )


def build(data: LengthData) -> Figure:
    """The drawing. Call inside `base.style()`."""
    figure, (axes,) = new_figure(finding(data), data.condition, height_in=2.7, right_in=0.3)
    last = max(len(data.tree.steps), len(data.chain.steps)) - 1
    ticks = range(1, last + 1)
    looks = ((data.chain, NEUTRAL, -0.21), (data.tree, BLUE, 0.21))
    for series, colour, shift in looks:
        axes.bar(
            [n + shift for n in ticks], [100 * series.share(n) for n in ticks], width=0.4,
            color=colour, label=f"{series.label}: τ {series.tau:.2f}",
        )  # fmt: skip
    top = max(100 * series.share(n) for series, _, _ in looks for n in ticks)
    for series, colour, _ in looks:
        axes.axvline(series.tau, color=colour, linewidth=1.4, linestyle=(0, (4, 2)), zorder=0.5)
    axes.set_ylim(0, 1.08 * top)
    axes.set_xlim(0.4, last + 0.6)
    axes.set_xticks(list(ticks))
    axes.grid(axis="y")
    axes.set_xlabel("tokens committed by a step, the bonus included")
    axes.set_ylabel("steps (%)")
    axes.legend(loc="upper right", labelcolor=INK)
    return figure


def draw(data: LengthData, *, figure_id: str = "accepted-lengths") -> ReportFigure:
    """The figure with the counts behind it."""
    with style():
        svg = to_svg(build(data), figure_id)
    last = max(len(data.tree.steps), len(data.chain.steps)) - 1
    rows = [
        (
            str(n),
            *(
                text
                for series in (data.chain, data.tree)
                for text in (
                    str(series.steps[n] if n < len(series.steps) else 0),
                    f"{100 * series.share(n):.1f} %",
                )
            ),
        )
        for n in range(1, last + 1)
    ]
    columns = ["tokens"]
    for series in (data.chain, data.tree):
        columns += [f"{series.label}: steps", "share"]
    return ReportFigure(
        figure_id=figure_id,
        title=finding(data),
        caption="Every replayed step by the tokens it commits: accepted drafts and the bonus. "
        "Dashed lines mark tokens per step, τ. The last step of an output is cut where the output "
        "ends.",
        svg=svg,
        columns=tuple(columns),
        rows=tuple(rows),
    )
