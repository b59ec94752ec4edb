"""How the W12 commands show tensors: JSON objects, one table per folder, kept ones by reason."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specpilot_cli.convert_w12.inspect import Totals, WindowSpread, totals
from specpilot_cli.convert_w12.plan import Outcome
from specpilot_cli.report.tables import Column, print_line, print_pairs, print_table
from specpilot_cli.units import format_bytes

_DECIMAL = re.compile(r"\d+\.\d+")


def tensor_objects(
    outcomes: Iterable[Outcome], windows: Mapping[str, WindowSpread] | None = None
) -> list[dict[str, Any]]:
    """Return one JSON object per tensor, with the spread of its windows where that is known."""
    found = windows or {}
    return [
        {
            "name": o.name,
            "dtype": o.dtype,
            "shape": list(o.shape),
            "shard": o.shard,
            "encoding": "w12" if o.converted else "stored",
            "raw_bytes": o.raw_bytes,
            "stored_bytes": o.stored_bytes,
            "bits_per_weight": o.bits_per_weight,
            "padding_ratio": o.padding_ratio if o.converted else None,
            "escapes": o.escapes,
            "escape_ratio": None if o.escapes is None else o.escapes / o.weights,
            "window_low": o.window_low,
            "window_high": o.window_high,
            "reason": o.reason,
            **({"windows": dataclasses.asdict(found[o.name])} if o.name in found else {}),
        }
        for o in outcomes
    ]


def totals_object(sums: Totals) -> dict[str, Any]:
    """Return the sums as a JSON object."""
    return {
        "tensors": sums.tensors,
        "converted_tensors": sums.converted_tensors,
        "raw_bytes": sums.raw_bytes,
        "stored_bytes": sums.stored_bytes,
        "saved_ratio": sums.saved_ratio,
        "converted_raw_bytes": sums.converted_raw_bytes,
        "converted_stored_bytes": sums.converted_stored_bytes,
        "converted_weights": sums.converted_weights,
        "bits_per_weight": sums.bits_per_weight,
        "escapes": sums.escapes,
        "escape_ratio": sums.escape_ratio,
    }


def print_tensors(outcomes: Iterable[Outcome]) -> None:
    """Print one row per tensor: bits per weight, escapes, spread of the windows, or why kept.

    Windows are shown as powers of two: `2^-15 … 2^-9` spans the channels' lowest binades.
    """
    columns = [
        Column("tensor"),
        Column("shape"),
        Column("bits/weight", "right"),
        Column("escapes", "right"),
        Column("windows from", "right"),
        Column("kept because"),
    ]
    rows = [_row(outcome) for outcome in outcomes]
    print_table(columns, rows)
    if any(row[4] for row in rows):
        print_line("windows from: where the channels' 16 binades begin, least … greatest")


def kept_rows(outcomes: Iterable[Outcome]) -> tuple[tuple[str, str, str, str], ...]:
    """Return (reason, tensors, size, one name) for every reason why tensors were kept.

    Reasons that differ in a decimal number only, such as bits per weight, become one range.
    """
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.reason is not None:
            groups.setdefault(_DECIMAL.sub("0", outcome.reason), []).append(outcome)
    return tuple(
        (
            _joined([o.reason or "" for o in kept]),
            str(len(kept)),
            format_bytes(sum(o.raw_bytes for o in kept)),
            kept[0].name,
        )
        for kept in groups.values()
    )


def _joined(reasons: Sequence[str]) -> str:
    """One text for reasons that differ in their decimal numbers only."""
    columns = zip(*(_DECIMAL.findall(reason) for reason in reasons), strict=True)
    ranges = [(min(numbers, key=float), max(numbers, key=float)) for numbers in columns]
    texts = iter([low if low == high else f"{low} to {high}" for low, high in ranges])
    return _DECIMAL.sub(lambda _: next(texts), reasons[0])


def print_kept(outcomes: Iterable[Outcome]) -> None:
    """Print tensors that stayed as they are, grouped by reason."""
    rows = [(count, size, reason, name) for reason, count, size, name in kept_rows(outcomes)]
    if rows:
        right = [Column("kept", "right"), Column("size", "right")]
        print_table([*right, Column("why"), Column("such as")], rows)


def print_totals(outcomes: Iterable[Outcome]) -> None:
    """Print the sums over a folder."""
    sums = totals(outcomes)
    pairs: list[tuple[str, object]] = [
        ("tensors", f"{sums.converted_tensors} of {sums.tensors} as W12"),
        ("size", size_change(sums.raw_bytes, sums.stored_bytes)),
    ]
    if sums.converted_weights:
        pairs += [
            ("converted", size_change(sums.converted_raw_bytes, sums.converted_stored_bytes)),
            ("bits per weight", f"{sums.bits_per_weight:.4f} over the converted tensors"),
            ("escapes", f"{sums.escapes} ({sums.escape_ratio:.2e} of the converted weights)"),
        ]
    print_pairs(pairs)


def size_change(before_bytes: int, after_bytes: int) -> str:
    """Return two sizes and the change as text: `44.7 GB → 33.6 GB (−24.8%)`."""
    change = f" (−{1 - after_bytes / before_bytes:.1%})" if before_bytes else ""
    return f"{format_bytes(before_bytes)} → {format_bytes(after_bytes)}{change}"


def _row(outcome: Outcome) -> tuple[str, ...]:
    shape = "×".join(str(length) for length in outcome.shape) or "scalar"
    bits = outcome.bits_per_weight
    shown = f"{bits:.3f}" if bits is not None else "–"
    if outcome.window_low is None or outcome.window_high is None:
        return outcome.name, shape, shown, "", "", f"{outcome.reason} ({outcome.dtype})"
    low, high = _binade(outcome.window_low), _binade(outcome.window_high)
    windows = low if low == high else f"{low} … {high}"
    return outcome.name, shape, shown, str(outcome.escapes), windows, ""


def _binade(field: int) -> str:
    return f"2^{field - 127}" if field else "0"
