"""Mismatch rate of each system against the rate limit (paper Fig. 4)."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specpilot_cli.report.figures.base import (
    BLUE,
    INK,
    NEUTRAL,
    ORANGE,
    SURFACE,
    ReportFigure,
    new_figure,
    sentence,
    style,
    to_svg,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class MismatchBar:
    """One system under token forcing.

    `rate`, `low` and `high` are shares of forced tokens (0.0072 is 0.72 %) with 95 % bounds.
    `events` counts unexplained large-margin mismatches. `verdict` is the word above the bar, such
    as `accept` or `reject`; the reference system has none. `rejected_by` names the rules.
    """

    label: str
    rate: float
    low: float
    high: float
    tokens: int
    events: int
    verdict: str | None = None
    rejected_by: str = ""


@dataclass(frozen=True, slots=True)
class MismatchData:
    """Systems in drawing order and the rate that the rate rule allows (stock + 0.5 points)."""

    bars: tuple[MismatchBar, ...]
    limit_rate: float
    condition: str


def finding(data: MismatchData) -> str:
    """The figure's title."""
    judged = [bar for bar in data.bars if bar.verdict is not None]
    if len(judged) == 1:
        bar = judged[0]
        by = f" by the {bar.rejected_by}" if bar.rejected_by else ""
        return (
            f"{sentence(bar.label)}: {bar.verdict}{by}, with mismatches on "
            f"{100 * bar.rate:.2f} % of tokens (limit {100 * data.limit_rate:.2f} %) and "
            f"{bar.events} unexplained event{'' if bar.events == 1 else 's'}"
        )
    words = sorted({bar.verdict or "" for bar in judged})
    counts = [f"{sum(bar.verdict == word for bar in judged)} {word}" for word in words]
    return f"Token forcing of {len(judged)} systems: {', '.join(counts)}"


def build(data: MismatchData) -> Figure:
    """The drawing. Call inside `base.style()`."""
    figure, (axes,) = new_figure(
        finding(data), data.condition, height_in=2.9, right_in=1.25, bottom_in=0.5
    )
    limit = 100 * data.limit_rate
    # A tenth of a percent where every rate is zero: an axis needs a height.
    top = max([limit, *(100 * bar.high for bar in data.bars)]) or 0.1
    for i, bar in enumerate(data.bars):
        rate, low, high = 100 * bar.rate, 100 * bar.low, 100 * bar.high
        colour = NEUTRAL if bar.verdict is None else BLUE if bar.verdict == "accept" else ORANGE
        axes.bar(i, rate, width=0.56, color=colour)
        axes.errorbar(
            i, rate, yerr=[[max(rate - low, 0)], [max(high - rate, 0)]], color=INK, capsize=5,
            linewidth=1.4,
        )  # fmt: skip
        word = "reference" if bar.verdict is None else bar.verdict
        events = f"{bar.events} event{'' if bar.events == 1 else 's'}"
        axes.text(
            i, high + 0.03 * top, f"{word}\n{rate:.2f} %, {events}", ha="center", va="bottom",
            fontsize=9.5, linespacing=1.3,
            bbox={"facecolor": SURFACE, "edgecolor": "none", "pad": 1.5},
        )  # fmt: skip
    axes.axhline(limit, color=INK, linewidth=1.3, linestyle=(0, (5, 3)), zorder=0.5)
    axes.annotate(
        f"limit {limit:.2f} %", (1.015, limit), xycoords=("axes fraction", "data"), va="center",
        fontsize=9.5,
    )  # fmt: skip
    axes.set_xticks(range(len(data.bars)), [textwrap.fill(bar.label, 18) for bar in data.bars])
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.6, len(data.bars) - 0.4)
    axes.set_ylim(0, 1.28 * top)
    axes.grid(axis="y")
    axes.set_ylabel("mismatched tokens (%)")
    return figure


def draw(data: MismatchData, *, figure_id: str = "mismatch") -> ReportFigure:
    """The figure with rates, intervals, counts and verdicts."""
    with style():
        svg = to_svg(build(data), figure_id)
    rows = tuple(
        (
            bar.label,
            f"{100 * bar.rate:.3f} %",
            f"{100 * bar.low:.3f} – {100 * bar.high:.3f} %",
            str(bar.tokens),
            str(bar.events),
            bar.verdict or "reference",
        )
        for bar in data.bars
    )
    return ReportFigure(
        figure_id=figure_id,
        title=finding(data),
        caption="Share of tokens that differ from the teacher-forced scorer's argmax, with 95 % "
        "intervals. Above each bar: the verdict and the unexplained large-margin events. The "
        "dashed line is stock's rate plus what the rate rule tolerates; the rule rejects once the "
        "difference exceeds that beyond doubt, not where a bar merely passes the line.",
        svg=svg,
        columns=("system", "mismatch rate", "95 % interval", "forced tokens", "events", "verdict"),
        rows=rows,
    )
