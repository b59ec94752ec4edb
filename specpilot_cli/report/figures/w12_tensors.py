"""Bits per weight, escapes and windows of a W12 folder, one row per role of its tensors."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specpilot_cli.report.figures.base import (
    BLUE,
    INK,
    MUTED,
    NEUTRAL,
    ORANGE,
    ReportFigure,
    label_room,
    new_figure,
    style,
    to_svg,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# (16 - 12) bits per weight are saved and an escape costs 48.
BREAK_EVEN = 4 / 48
_BIAS = 127
_MAX_ROLES = 32
_LABEL_CHARS = 26
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True, slots=True)
class W12Point:
    """One converted tensor.

    `floor_bits` is 12 per place of its records; `windows` are the lowest exponent fields of its
    channels' windows: least, lower quartile, median, upper quartile, greatest, leaving out
    `zero_channels`, whose window begins at zero; None if that is all of them.
    """

    name: str
    shape: tuple[int, ...]
    bits_per_weight: float
    floor_bits: float
    escapes: int
    weights: int
    windows: tuple[int, int, int, int, int] | None
    zero_channels: int = 0

    @property
    def escape_ratio(self) -> float:
        """Escapes per weight."""
        return self.escapes / self.weights


@dataclass(frozen=True, slots=True)
class W12TensorsData:
    """The converted tensors of a folder (at least one) and what else its reader should know."""

    points: tuple[W12Point, ...]
    condition: str


@dataclass(frozen=True, slots=True)
class Role:
    """Tensors whose names differ in their numbers only, such as one projection of every layer."""

    label: str
    points: tuple[W12Point, ...]

    @property
    def weights(self) -> int:
        """Weights of all its tensors."""
        return sum(point.weights for point in self.points)


def roles(points: Sequence[W12Point]) -> list[Role]:
    """Group tensors by name without numbers; most weights first, labels as short as unique."""
    groups: dict[tuple[str, ...], list[W12Point]] = {}
    for point in points:
        parts = point.name.removesuffix(".weight").split(".")
        groups.setdefault(tuple(p for p in parts if not p.isdigit()), []).append(point)
    found = [Role(_shortest(parts, list(groups)), tuple(group)) for parts, group in groups.items()]
    return sorted(found, key=lambda role: -role.weights)


def _shortest(parts: tuple[str, ...], every: list[tuple[str, ...]]) -> str:
    for length in range(2, len(parts) + 1):
        ending = parts[-length:]
        if sum(other[-length:] == ending for other in every) == 1:
            return ".".join(ending)
    return ".".join(parts)


def finding(data: W12TensorsData) -> str:
    """The figure's title."""
    weights = sum(point.weights for point in data.points)
    bits = sum(point.bits_per_weight * point.weights for point in data.points) / weights
    escapes = sum(point.escapes for point in data.points)
    rare = f"one weight in {weights / escapes:,.0f} is an escape" if escapes else "no escapes"
    count = len(data.points)
    return (
        f"{count} tensor{'' if count == 1 else 's'} in {bits:.3f} bits per weight, "
        f"{100 * (1 - bits / 16):.1f} % below BF16; {rare}"
    )


def build(data: W12TensorsData) -> Figure:
    """The drawing. Call inside `base.style()`."""
    shown = roles(data.points)[:_MAX_ROLES]
    labels = [_row_label(role) for role in shown]
    row_in = 0.35 if any("\n" in label for label in labels) else 0.28
    figure, (bits, escapes, windows) = new_figure(
        finding(data), data.condition, height_in=row_in * max(len(shown), 3), panels=3,
        left_in=0.85 * label_room(labels), right_in=0.2, gap_in=0.26,
        header_gap_in=0.42, bottom_in=0.66,
    )  # fmt: skip
    for i, role in enumerate(shown):
        _bits_row(bits, i, role)
        _escapes_row(escapes, i, role)
        _windows_row(windows, i, role)
    bits.set_yticks(range(len(shown)), labels, fontsize=8.8)
    for axes in (escapes, windows):
        axes.set_yticks(range(len(shown)), [""] * len(shown))
    for axes in (bits, escapes, windows):
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=9)
        axes.set_ylim(len(shown) - 0.4, -0.6)
    escapes.grid(axis="x")
    windows.grid(axis="x")
    _bits_axis(bits, shown)
    _escapes_axis(escapes, shown)
    _windows_axis(windows, shown)
    return figure


def _row_label(role: Role) -> str:
    """The role's label on one or two lines, broken after a dot; its end is what tells it apart."""
    text = role.label if len(role.points) == 1 else f"{role.label} ×{len(role.points)}"
    if len(text) <= _LABEL_CHARS:
        return text
    cut = text.rfind(".", 0, _LABEL_CHARS) + 1
    lines = (text[:cut], text[cut:]) if cut else (text,)
    return "\n".join(
        line if len(line) <= _LABEL_CHARS else f"…{line[1 - _LABEL_CHARS :]}" for line in lines
    )


def _range_row(axes: Axes, i: int, values: Sequence[float], colour: str) -> float:
    """Draw least to greatest as a line and the median as a dot; return the median."""
    middle = statistics.median_low(values)
    axes.plot([min(values), max(values)], [i, i], color=colour, linewidth=1.6)
    axes.plot([middle], [i], color=colour, marker="o", markersize=5.5)
    return middle


def _bits_row(axes: Axes, i: int, role: Role) -> None:
    values = [point.bits_per_weight for point in role.points]
    middle = _range_row(axes, i, values, BLUE)
    text = f"{middle:.3f}"
    left = max(values) > 14.4
    axes.annotate(
        text, (min(values) if left else max(values), i), xytext=(-6 if left else 6, 0),
        textcoords="offset points", va="center", ha="right" if left else "left", fontsize=8.5,
    )  # fmt: skip


def _bits_axis(axes: Axes, shown: Sequence[Role]) -> None:
    axes.axvline(12, color=INK, linewidth=1.2, linestyle=(0, (5, 3)), zorder=0.5)
    axes.axvline(16, color=NEUTRAL, linewidth=1.6, zorder=0.5)
    axes.set_xlim(11.5, 16.3)
    axes.set_xticks([12, 14, 16])
    axes.set_xlabel("bits per weight", fontsize=9.5)
    _above(axes, 12, "12-bit floor", "left")
    _above(axes, 16, "BF16", "right")


def _escapes_row(axes: Axes, i: int, role: Role) -> None:
    values = [point.escape_ratio for point in role.points if point.escapes]
    if not values:
        axes.annotate(
            "none", (0.01, i), xycoords=("axes fraction", "data"), va="center", fontsize=8.5,
            color=MUTED,
        )  # fmt: skip
        return
    _range_row(axes, i, values, ORANGE)
    if len(values) < len(role.points):
        # Beside the bar, on the side that has room.
        left = max(values) > BREAK_EVEN / 4
        axes.annotate(
            f"{len(role.points) - len(values)} of {len(role.points)} none",
            (min(values) if left else max(values), i), xytext=(-6 if left else 6, 0),
            textcoords="offset points", va="center", ha="right" if left else "left", fontsize=8.5,
            color=MUTED,
        )  # fmt: skip


def _escapes_axis(axes: Axes, shown: Sequence[Role]) -> None:
    ratios = [p.escape_ratio for role in shown for p in role.points if p.escapes]
    axes.set_xscale("log")
    # Room left of the least for the word `none`.
    axes.set_xlim(min([*ratios, 1e-4]) / 6, 0.3)
    exponents = [-6, -4, -2] if min([*ratios, 1.0]) < 2e-6 else [-4, -2]
    axes.set_xticks([10.0**n for n in exponents], [_power(10, n) for n in exponents])
    axes.minorticks_off()
    axes.axvline(BREAK_EVEN, color=INK, linewidth=1.2, linestyle=(0, (5, 3)), zorder=0.5)
    axes.set_xlabel("escape rate (log)", fontsize=9.5)
    _above(axes, BREAK_EVEN, "no gain", "right")


def _windows_row(axes: Axes, i: int, role: Role) -> None:
    five = [point.windows for point in role.points if point.windows is not None]
    if not five:
        axes.annotate(
            "zeros only", (0.01, i), xycoords=("axes fraction", "data"), va="center", fontsize=8.5,
            color=MUTED,
        )  # fmt: skip
        return
    least, low, middle, high, greatest = _merged(five)
    axes.plot([least, greatest], [i, i], color=NEUTRAL, linewidth=1.4)
    axes.plot([low, high], [i, i], color=BLUE, linewidth=5, solid_capstyle="butt")
    axes.plot([middle], [i], color=INK, marker="|", markersize=9, markeredgewidth=1.6)


def _merged(five: Sequence[tuple[int, int, int, int, int]]) -> tuple[float, ...]:
    """Least of the leasts, medians of the quartiles, greatest of the greatest, as exponents."""
    columns = list(zip(*five, strict=True))
    middle = [statistics.median(column) for column in columns[1:4]]
    return tuple(value - _BIAS for value in (min(columns[0]), *middle, max(columns[4])))


def _windows_axis(axes: Axes, shown: Sequence[Role]) -> None:
    five = [p.windows for role in shown for p in role.points if p.windows is not None]
    low = min((windows[0] for windows in five), default=_BIAS) - _BIAS
    high = max((windows[4] for windows in five), default=_BIAS) - _BIAS
    pad = max(1.0, 0.08 * (high - low))
    axes.set_xlim(low - pad, high + pad)
    step = next(s for s in (1, 2, 4, 8, 16, 32, 64) if (high - low) / s <= 4)
    ticks = list(range(-(-low // step) * step, high + 1, step))
    axes.set_xticks(ticks, [_power(2, tick) for tick in ticks])
    axes.set_xlabel("windows begin at", fontsize=9.5)


def _power(number: int, exponent: int) -> str:
    # Raised digits, not mathtext: that would leave text without a colour of its own in the SVG.
    return f"{number}{str(exponent).translate(_RAISED)}"


def _above(axes: Axes, x: float, text: str, side: str) -> None:
    axes.annotate(
        text, (x, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 4),
        textcoords="offset points", ha=side, va="bottom", fontsize=8.5, color=MUTED,
    )  # fmt: skip


def draw(data: W12TensorsData, *, figure_id: str = "w12-tensors") -> ReportFigure:
    """The figure with the table of every tensor."""
    with style():
        svg = to_svg(build(data), figure_id)
    hidden = len(roles(data.points)) - _MAX_ROLES
    more = f" The {hidden} smallest roles are in the table only." if hidden > 0 else ""
    return ReportFigure(
        figure_id=figure_id,
        title=finding(data),
        caption="One row per role: tensors whose names differ in their layer numbers, the role "
        "with most weights first. Left: stored bits, from the least to the greatest tensor, with "
        "the median; all that is above 12 is padding, windows, pointers and escapes. Middle: "
        "weights outside their channel's window, `1 of 8 none` if one of eight such tensors has "
        "none; at one in 12 W12 would be as large as BF16. "
        "Right: where the channels' windows of 16 binades begin; the bar holds the middle half "
        f"of the channels, the line all but those of zeros alone.{more}",
        svg=svg,
        columns=("tensor", "shape", "bits per weight", "records alone", "escapes",
                 "escape rate", "windows begin at", "channels of zeros"),
        rows=tuple(_table_row(point) for point in data.points),
    )  # fmt: skip


def _table_row(point: W12Point) -> tuple[str, ...]:
    five = point.windows
    powers = "–" if five is None else f"2^{five[0] - _BIAS} … 2^{five[4] - _BIAS}"
    return (
        point.name,
        "×".join(str(length) for length in point.shape),
        f"{point.bits_per_weight:.4f}",
        f"{point.floor_bits:.4f}",
        str(point.escapes),
        f"{point.escape_ratio:.1e}",
        re.sub(r"^(\S+) … \1$", r"\1", powers),
        str(point.zero_channels),
    )
