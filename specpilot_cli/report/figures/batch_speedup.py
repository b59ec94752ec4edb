"""Speedup over plain decoding against requests in flight, one line per policy (paper Fig. 2b)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specpilot_cli.report.figures.base import (
    BLUE,
    INK,
    NEUTRAL,
    ORANGE,
    Basis,
    ReportFigure,
    new_figure,
    sentence,
    style,
    to_svg,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLES = (
    (BLUE, "o", "-"), (ORANGE, "s", "-"), (INK, "^", "-"), (NEUTRAL, "D", "-"),
    (BLUE, "o", (0, (4, 2))), (ORANGE, "s", (0, (4, 2))), (INK, "^", (0, (4, 2))),
    (NEUTRAL, "D", (0, (4, 2))),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BatchLine:
    """Speedups of one policy at the concurrencies of the data, in order."""

    policy: str
    speedups: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BatchSpeedupData:
    """concurrencies ascend; `base` names what speedups refer to. At most eight lines."""

    concurrencies: tuple[int, ...]
    lines: tuple[BatchLine, ...]
    base: str
    condition: str
    basis: Basis = "projected"


def finding(data: BatchSpeedupData) -> str:
    """The figure's title."""
    parts = []
    for place in sorted({0, len(data.concurrencies) - 1}):
        best = max(data.lines, key=lambda line: line.speedups[place])
        count = data.concurrencies[place]
        word = "request" if count == 1 else "requests"
        parts.append(f"at {count} {word} {best.policy} leads with {best.speedups[place]:.2f}×")
    return sentence("; ".join(parts))


def build(data: BatchSpeedupData) -> Figure:
    """The drawing. Call inside `base.style()`."""
    figure, (axes,) = new_figure(
        finding(data), data.condition, height_in=3.1, left_in=0.8, right_in=2.9
    )
    for line, (colour, marker, dashes) in zip(data.lines, _STYLES, strict=False):
        axes.plot(
            data.concurrencies, line.speedups, color=colour, marker=marker, linestyle=dashes,
            label=line.policy,
        )  # fmt: skip
    axes.axhline(1.0, color=INK, linewidth=1.1, linestyle=(0, (5, 3)))
    axes.set_xscale("log", base=2)
    axes.set_xticks(data.concurrencies, [str(count) for count in data.concurrencies])
    axes.minorticks_off()
    axes.set_ylim(0, 1.12 * max(1.0, *(max(line.speedups) for line in data.lines)))
    axes.grid(axis="y")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9)
    axes.set_xlabel("requests in flight (log scale)")
    axes.set_ylabel(f"tokens per second over {data.base}")
    return figure


def draw(data: BatchSpeedupData, *, figure_id: str = "batch-speedup") -> ReportFigure:
    """The figure with every speedup. Raises ValueError for no lines, or more than can be told."""
    if not 1 <= len(data.lines) <= len(_STYLES):
        raise ValueError(f"1 to {len(_STYLES)} lines can be drawn, not {len(data.lines)}")
    with style():
        svg = to_svg(build(data), figure_id)
    return ReportFigure(
        figure_id=figure_id,
        title=finding(data),
        caption=f"Tokens per second of all requests together, over {data.base} at the same number "
        "of requests. Simulated step by step from recorded lattices and measured step times.",
        svg=svg,
        columns=("policy", *(f"{count} in flight" for count in data.concurrencies)),
        rows=tuple(
            (line.policy, *(f"{value:.3f}" for value in line.speedups)) for line in data.lines
        ),
        basis=data.basis,
    )
