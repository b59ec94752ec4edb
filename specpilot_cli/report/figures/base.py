"""What all figures share: size, type, colours that follow the page's theme, and SVG output.

The SVG is deterministic (fixed salt, no date) and holds text as text. Colours are written as CSS
variables with the light value as fallback, so one drawing serves a light page, a dark page, paper
and a file opened on its own. matplotlib is imported on first use only.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from specpilot_cli.errors import MachineError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Basis = Literal["measured", "projected", "measured and projected"]

# Light values of the theme. Blue and vermilion stay apart for every common colour blindness; no
# figure tells two things apart by colour alone. Each value must occur once: it is also the key
# that the SVG's colours are found by.
INK = "#1b1f24"
MUTED = "#57606b"
GRID = "#dde1e6"
SURFACE = "#fdfdfd"
BLUE = "#0072b2"
ORANGE = "#d55e00"
NEUTRAL = "#868d97"
PALE = "#c3c9d1"
_VARIABLES = {
    INK: "--sp-ink",
    MUTED: "--sp-muted",
    GRID: "--sp-grid",
    SURFACE: "--sp-surface",
    BLUE: "--sp-blue",
    ORANGE: "--sp-orange",
    NEUTRAL: "--sp-neutral",
    PALE: "--sp-pale",
}

WIDTH_IN = 7.0
_TITLE_CHARS, _SUBTITLE_CHARS = 70, 94
_TITLE_LINE_IN, _SUBTITLE_LINE_IN = 0.225, 0.19
_FONT_STACK = "system-ui, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
# Any: matplotlib's stubs list the keys of one version only.
_STYLE: Any = {
    "svg.hashsalt": "specpilot",
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": NEUTRAL,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": NEUTRAL,
    "ytick.color": NEUTRAL,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "lines.linewidth": 2.0,
    "lines.markersize": 6,
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True)
class ReportFigure:
    """One drawn figure with the numbers behind it.

    `title` is the finding that the drawing also carries, `caption` explains how to read it, and
    `columns` and `rows` are the table of its numbers as text.
    """

    figure_id: str
    title: str
    caption: str
    svg: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    basis: Basis = "measured"


def style() -> Any:
    """Context in which figures are built and saved. Raises `MachineError` without matplotlib."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError as error:
        raise MachineError(
            "figures need matplotlib", hint="install it with `pip install '.[report]'` in the clone"
        ) from error
    return mpl.rc_context(_STYLE)


def new_figure(
    title: str,
    condition: str,
    *,
    height_in: float,
    panels: int = 1,
    left_in: float = 0.75,
    right_in: float = 0.25,
    bottom_in: float = 0.62,
    gap_in: float = 0.9,
    header_gap_in: float = 0.24,
) -> tuple[Figure, list[Axes]]:
    """A figure of `WIDTH_IN` with title and condition set and `panels` axes side by side.

    `height_in` is the height of the axes in inches; the header adds what its lines need, so a
    long title never eats into the drawing. Call inside `style()`.
    """
    from matplotlib.figure import Figure

    title_text = textwrap.fill(title, _TITLE_CHARS)
    condition_text = textwrap.fill(condition, _SUBTITLE_CHARS)
    title_in = _TITLE_LINE_IN * (title_text.count("\n") + 1)
    condition_in = _SUBTITLE_LINE_IN * (condition_text.count("\n") + 1)
    total_in = 0.08 + title_in + condition_in + header_gap_in + height_in + bottom_in
    figure = Figure(figsize=(WIDTH_IN, total_in))
    figure.text(
        0.002, 1 - 0.08 / total_in, title_text, va="top", fontsize=12, fontweight="bold",
        linespacing=1.25,
    )  # fmt: skip
    figure.text(
        0.002, 1 - (0.12 + title_in) / total_in, condition_text, va="top", fontsize=9.5,
        color=MUTED, linespacing=1.25,
    )  # fmt: skip
    width = (WIDTH_IN - left_in - right_in - gap_in * (panels - 1)) / panels
    axes = [
        figure.add_axes(
            (
                (left_in + i * (width + gap_in)) / WIDTH_IN,
                bottom_in / total_in,
                width / WIDTH_IN,
                height_in / total_in,
            )
        )
        for i in range(panels)
    ]
    return figure, axes


def to_svg(figure: Figure, figure_id: str) -> str:
    """`figure` as an inline `<svg>` element: themed colours, ids prefixed with `figure_id`.

    Ids are prefixed because a page holds several figures. Call inside `style()`.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'\s+xmlns:xlink="[^"]*"', "", text)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = text.replace("xlink:href=", "href=")
    text = re.sub(r'\bid="', f'id="{figure_id}-', text)
    text = re.sub(r'href="#', f'href="#{figure_id}-', text)
    text = re.sub(r"url\(#", f"url(#{figure_id}-", text)
    text = text.replace("'DejaVu Sans'", _FONT_STACK)
    for value, variable in _VARIABLES.items():
        text = text.replace(value, f"var({variable}, {value})")
    # Size comes from the page; the viewBox keeps the proportions.
    return re.sub(r'<svg([^>]*?) width="[^"]*"', r"<svg\1", _drop_height(text), count=1)


def _drop_height(svg: str) -> str:
    return re.sub(r'<svg([^>]*?) height="[^"]*"', r"<svg\1", svg, count=1)


def spread(positions: Sequence[float], gap: float, *, low: float, high: float) -> list[float]:
    """`positions` moved apart to at least `gap`, in order, inside [low, high] where possible."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    placed = [positions[i] for i in order]
    for i in range(1, len(placed)):
        placed[i] = max(placed[i], placed[i - 1] + gap)
    if placed and placed[-1] > high:
        placed[-1] = high
        for i in range(len(placed) - 2, -1, -1):
            placed[i] = min(placed[i], placed[i + 1] - gap)
    if placed and placed[0] < low:
        shift = low - placed[0]
        placed = [p + shift for p in placed]
    result = [0.0] * len(positions)
    for i, value in zip(order, placed, strict=True):
        result[i] = value
    return result


def label_room(labels: Sequence[str]) -> float:
    """Inches that row labels need left of the axes, in the wide font that a browser may lack."""
    longest = max(len(line) for label in labels for line in label.split("\n"))
    return max(0.9, 0.2 + 0.087 * longest)


def row_label(text: str) -> str:
    """`text` on as many lines as keep the drawing wide enough; a long word is cut."""
    return "\n".join(textwrap.wrap(text, 26, max_lines=2, placeholder=" …")) or "–"


def apart(positions: Sequence[float], gap: float, *, first: Sequence[float] = ()) -> list[float]:
    """Those of `positions` that can be labelled `gap` apart; `first` ones have precedence."""
    kept: list[float] = []
    for position in (*first, *positions):
        if all(abs(position - other) >= gap for other in kept):
            kept.append(position)
    return sorted(kept)


def beside(axes: Axes, x: float, y: float, text: str, *, bold: bool = False) -> None:
    """Write `text` just right of the data point (x, y)."""
    axes.annotate(
        text, (x, y), xytext=(4, 0), textcoords="offset points", va="center", ha="left",
        fontsize=9.5, fontweight="bold" if bold else "normal",
    )  # fmt: skip


def sentence(text: str) -> str:
    """`text` with its first letter in upper case; the rest keeps its case."""
    return text[:1].upper() + text[1:]


def decimals(largest: float) -> int:
    """Digits after the point that show `largest` with four significant digits, at most four."""
    return min(4, max(0, 3 - math.floor(math.log10(largest)))) if largest > 0 else 2


def time_unit(seconds: float) -> tuple[float, str]:
    """Factor and unit in which `seconds` reads well: (1e3, "ms") or (1e6, "µs") or (1, "s")."""
    if seconds >= 1:
        return 1.0, "s"
    return (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
