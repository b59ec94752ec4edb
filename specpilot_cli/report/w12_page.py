"""The HTML page of `specpilot w12 inspect`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from specpilot_cli.convert_w12.inspect import Totals, WindowSpread, totals
from specpilot_cli.convert_w12.plan import Outcome
from specpilot_cli.report.figures import w12_tensors
from specpilot_cli.report.figures.w12_tensors import Role, W12Point, W12TensorsData
from specpilot_cli.report.html import (
    InputHash,
    KeyFigure,
    MethodNote,
    ReportData,
    ReportTable,
    Verdict,
    environment_rows,
    render_report,
)
from specpilot_cli.report.w12 import kept_rows, size_change
from specpilot_cli.schema.result import Envelope
from specpilot_cli.units import format_bytes
from specpilot_kernels.w12 import layout

_METHOD = MethodNote(
    "W12",
    "Each channel has a window of 16 neighbouring binades, the one that holds most of its "
    "weights. A weight in it takes 12 bits: sign, place in the window and mantissa. Any other is "
    "an escape: its place and its 16 bits. Both come back exactly.\n"
    "\n"
    "The sizes are read from the manifest and the windows from the shards; the weights were not "
    "read. `specpilot w12 verify` does that and checks every bit.",
)


def render_w12_page(
    folder: Path,
    outcomes: Sequence[Outcome],
    windows: Mapping[str, WindowSpread],
    envelope: Envelope,
) -> str:
    """The page for a W12 folder; `envelope` gives inputs, environment and the embedded data."""
    sums = totals(outcomes)
    name = folder.resolve().name
    points = tuple(_point(o, windows[o.name]) for o in outcomes if o.converted)
    condition = f"{name}, layout {layout.LAYOUT}"
    figures = (w12_tensors.draw(W12TensorsData(points, condition)),) if points else ()
    return render_report(
        ReportData(
            title=f"W12 folder {name}",
            verdict=Verdict(_headline(sums), "none", _sentence(sums)),
            command=shlex.join(["specpilot", *sys.argv[1:]]),
            specpilot_version=envelope.specpilot_version,
            machine=str(envelope.environment.get("cpu") or "unknown"),
            created=datetime.now(UTC),
            key_figures=_key_figures(sums, windows),
            inputs=tuple(InputHash(item.path, item.sha256) for item in envelope.inputs),
            numbers=tuple(_tables(outcomes, points)),
            figures=figures,
            method=(_METHOD,),
            environment=environment_rows(envelope.environment),
            data=envelope.model_dump(mode="python"),
        )
    )


def _headline(sums: Totals) -> str:
    if sums.bits_per_weight is None:
        return "nothing converted"
    return f"{sums.bits_per_weight:.3f} bits per weight"


def _sentence(sums: Totals) -> str:
    return (
        f"{sums.converted_tensors} of {sums.tensors} tensors are stored as W12; all "
        f"tensors together: {size_change(sums.raw_bytes, sums.stored_bytes)}."
    )


def _point(outcome: Outcome, spread: WindowSpread) -> W12Point:
    five = (
        spread.least, spread.lower_quartile, spread.median, spread.upper_quartile, spread.greatest,
    )  # fmt: skip
    known = tuple(value for value in five if value is not None)
    return W12Point(
        name=outcome.name,
        shape=outcome.shape,
        bits_per_weight=outcome.bits_per_weight or 0.0,
        floor_bits=12 * (outcome.padding_ratio or 0.0),
        escapes=outcome.escapes or 0,
        weights=outcome.weights,
        windows=known if len(known) == 5 else None,
        zero_channels=spread.zero_channels,
    )


def _key_figures(sums: Totals, windows: Mapping[str, WindowSpread]) -> tuple[KeyFigure, ...]:
    if sums.bits_per_weight is None:
        return ()
    kept_bytes = sums.raw_bytes - sums.converted_raw_bytes
    zeros = sum(spread.zero_channels for spread in windows.values())
    channels = sum(spread.channels for spread in windows.values())
    return (
        KeyFigure("bits per weight", f"{sums.bits_per_weight:.3f}", "of the converted tensors"),
        KeyFigure(
            "converted tensors",
            format_bytes(sums.converted_stored_bytes),
            f"{format_bytes(sums.converted_raw_bytes)} as BF16",
        ),
        KeyFigure("kept as they are", format_bytes(kept_bytes), "listed below with the reason"),
        KeyFigure("escapes", _rarity(sums), f"{sums.escapes:,} of {sums.converted_weights:,}"),
        KeyFigure("channels", f"{channels:,}", f"{zeros:,} of zeros alone" if zeros else ""),
    )


def _rarity(sums: Totals) -> str:
    return f"1 in {sums.converted_weights / sums.escapes:,.0f}" if sums.escapes else "none"


def _tables(outcomes: Sequence[Outcome], points: Sequence[W12Point]) -> list[ReportTable]:
    tables = []
    if points:
        columns = ("role", "tensors", "as BF16", "as W12", "bits per weight", "escape rate")
        tables.append(
            ReportTable(
                "Converted, by role",
                columns,
                tuple(_role_row(role) for role in w12_tensors.roles(points)),
                "Bits and escapes over all weights of the role. Every tensor is in the table "
                "under the figure.",
            )
        )
    kept = kept_rows(outcomes)
    if kept:
        tables.append(ReportTable("Kept as they are", ("why", "tensors", "size", "such as"), kept))
    return tables


def _role_row(role: Role) -> tuple[str, ...]:
    stored = sum(point.bits_per_weight * point.weights for point in role.points) / 8
    escapes = sum(point.escapes for point in role.points)
    return (
        f"`{role.label}`",
        str(len(role.points)),
        format_bytes(2 * role.weights),
        format_bytes(stored),
        f"{8 * stored / role.weights:.4f}",
        f"{escapes / role.weights:.1e}",
    )
