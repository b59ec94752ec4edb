"""What each drafted position loses: offered, chosen, and what the drafter itself expects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specpilot_cli.report.figures.base import (
    BLUE,
    MUTED,
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
class PositionMark:
    """Shares at one position, over steps whose drafts before it were all right."""

    position: int
    steps: int
    accepted: float
    offered: float
    own: float


@dataclass(frozen=True, slots=True)
class PositionData:
    """Positions in order; `finding` is the title, `condition` says what was recorded."""

    marks: tuple[PositionMark, ...]
    finding: str
    condition: str


def build(data: PositionData) -> Figure:
    """The drawing. Call inside `base.style()`."""
    figure, (axes,) = new_figure(
        sentence(data.finding), data.condition, height_in=2.9, right_in=2.1, left_in=0.85
    )
    positions = [mark.position for mark in data.marks]
    lines = (
        ("true token offered", [m.offered for m in data.marks], NEUTRAL, "^"),
        ("draft right", [m.accepted for m in data.marks], BLUE, "o"),
        ("drafter's own\nprobability", [m.own for m in data.marks], ORANGE, "s"),
    )
    for label, values, colour, marker in lines:
        dashes = (0, (4, 2)) if colour == ORANGE else "-"
        axes.plot(positions, values, color=colour, marker=marker, linestyle=dashes, label=label)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9)
    axes.set_ylim(0, 1.04)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
    axes.set_xticks(positions)
    axes.set_xlim(-0.4, max(positions) + 0.4)
    axes.grid(axis="y")
    axes.set_xlabel("drafted position", color=MUTED)
    axes.set_ylabel("share of steps")
    return figure


def draw(data: PositionData, *, figure_id: str = "acceptance-by-position") -> ReportFigure:
    """The figure with the numbers behind it. Raises ValueError without a position."""
    if not data.marks:
        raise ValueError("no position to draw")
    with style():
        svg = to_svg(build(data), figure_id)
    return ReportFigure(
        figure_id=figure_id,
        title=sentence(data.finding),
        caption="Over steps whose drafts before a position were all right. Between the upper line "
        "and 100 % lies what the drafter did not offer; between the lines, what a better choice or "
        "a tree can get. A drafter that expects much more than it gets sees another target than "
        "the one it was trained on.",
        svg=svg,
        columns=("position", "steps", "draft right", "true token offered", "own probability"),
        rows=tuple(
            (
                str(m.position),
                str(m.steps),
                f"{m.accepted:.4f}",
                f"{m.offered:.4f}",
                f"{m.own:.4f}",
            )
            for m in data.marks
        ),
    )
