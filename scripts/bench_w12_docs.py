"""What docs/w12.md quotes of the measurements of `bench_w12.py`; `w12_doc_numbers.py` writes it."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from bench_w12_table import BARS, LARGE_BYTES
from doc_marks import between_marks

PAGE = Path("docs/w12.md")
RESULT = Path("docs/measurements/w12_gemm_h200.json")
COUNTED = Path("docs/measurements/w12_counters_h200.json")

ROWS = (1, 8, 16, 32, 48, 64)
# Goals beside `BARS`.
SUSTAINED, VIEW, READ, STACK, GROWTH = 1.18, 1.35, 0.95, 1.35, 1.06
_MET = {True: "met", False: "**missed**"}

Document = dict[str, Any]


def tables(document: Document, counted: Document) -> str:
    """Every table about a result: products, goals, escapes, counters."""
    head = (
        f"{document['gpu']}, torch {document['torch']}, {document['date_utc']}, "
        f"`{document['command']}`; read bandwidth {document['read_bytes_per_s'] / 1e12:.2f} TB/s. "
        "Each cell: W12, floor, share of the read bandwidth."
    )
    parts = (products(document), goals(document), escapes(document), counters(counted))
    return "\n\n".join([head, *("\n".join(part) for part in parts)])


def products(document: Document) -> list[str]:
    """Ratios to cuBLAS by weight and rows."""
    by_place = {(row["projection"], row["rows"]): row for row in document["products"]}
    lines = _head("weight", [f"{rows} rows" for rows in ROWS])
    for name in dict.fromkeys(name for name, _ in by_place):
        cells = [by_place[name, rows] for rows in ROWS]
        out, inputs = cells[0]["shape"]
        texts = [
            f"{cell['ratio']:.2f}, {cell['floor_ratio']:.2f}, {cell['read_ratio']:.0%}"
            for cell in cells
        ]
        lines.append(_line(f"{name}, {out} × {inputs}", texts))
    means = {entry["rows"]: entry for entry in document["means"]}
    for label, template in (
        ("geometric mean", "{ratio_mean:.2f}, {floor_ratio_mean:.2f}"),
        ("the same, no dependent launch", "{plain_ratio_mean:.2f}"),
        ("the same, L2 warm", "{warm_ratio_mean:.2f}"),
        ("the portable kernel", "{portable_ratio_mean:.2f}"),
    ):
        lines.append(_line(label, [template.format(**means[rows]) for rows in ROWS]))
    return lines


def goals(document: Document) -> list[str]:
    """One line per goal, met or missed."""
    means = {entry["rows"]: entry for entry in document["means"]}
    large = [
        row
        for row in document["products"]
        if 1.5 * math.prod(row["shape"]) > LARGE_BYTES and row["rows"] <= 8
    ]
    lines = _head("goal", ["asked", "measured", "floor", ""])

    def add(goal: str, asked: float, measured: float, floor: float | None = None) -> None:
        beside = "" if floor is None else f"{floor:.3f}"
        met = _MET[measured >= asked]
        lines.append(_line(goal, [f"≥ {asked:.2f}", f"{measured:.3f}", beside, met]))

    for several, least, mean in BARS:
        some = [means[rows] for rows in several]
        span = "–".join(str(rows) for rows in dict.fromkeys((several[0], several[-1])))
        for what, asked, key in (("every weight", least, "least"), ("mean", mean, "mean")):
            worst = min(some, key=lambda entry, key=key: entry[f"ratio_{key}"])
            add(f"{span} rows, {what}", asked, worst[f"ratio_{key}"], worst[f"floor_ratio_{key}"])
    ratios = [row["ratio"] for row in document["sustained"]]
    add("64 rows, sustained load, mean", SUSTAINED, statistics.geometric_mean(ratios))
    add("share of read bandwidth, > 100 MB, 1–8 rows", READ, min(r["read_ratio"] for r in large))
    worst = min(large, key=lambda row: row["view_ratio"])
    add("view pass over full pass, > 100 MB, 1–8 rows", VIEW, worst["view_ratio"],
        worst["view_floor_ratio"])  # fmt: skip
    add("64 layers in one graph, one row", STACK, document["stack"]["alone"]["ratio"])
    add("the same, other kernels between them", STACK, document["stack"]["between"]["ratio"])
    growth, floor = (_growth(document, column) for column in ("chain", "floor"))
    cells = [f"≤ {GROWTH:.2f}", f"{growth:.3f}", f"{floor:.3f}", _MET[growth <= GROWTH]]
    return [*lines, _line("time at 32 rows over 1 row, mean", cells)]


def escapes(document: Document) -> list[str]:
    """Ratios of one weight, 16384 × 5120, by its scattered escapes."""
    ratios = {(row["escape_ratio"], row["rows"]): row["ratio"] for row in document["escapes"]}
    several = sorted({rows for _, rows in ratios})
    lines = _head("escapes per weight", [f"{rows} rows" for rows in several])
    for share in sorted({share for share, _ in ratios}):
        lines.append(_line(f"{share:.4%}", [f"{ratios[share, rows]:.2f}" for rows in several]))
    return lines


def counters(document: Document) -> list[str]:
    """Shares of the peak rates, one line per case; see `w12_counters.py`."""
    kernels = ("w12", "floor", "view", "view_floor", "cublas")
    cells = {(r["projection"], r["rows"], r["kernel"]): r for r in document["kernels"]}
    lines = _head("DRAM, L2, instruction issue", [kernel.replace("_", " ") for kernel in kernels])
    for name, rows in dict.fromkeys((name, rows) for name, rows, _ in cells):
        several = [cells[name, rows, kernel] for kernel in kernels]
        texts = [
            f"{r['dram_pct']:.0f}%, {r['l2_pct']:.0f}%, {r['issue_pct']:.0f}%" for r in several
        ]
        lines.append(_line(f"{name}, {rows} rows", texts))
    return lines


def most_escapes(document: Document, ratio: float = 1.05) -> dict[int, float]:
    """Escapes per weight with which W12 still beats cuBLAS by `ratio`, by rows.

    Time grows along a line once the escapes decide it: the line through the two points of the
    sweep with the fewest escapes at which cuBLAS is faster.
    """
    found = {}
    for rows in sorted({row["rows"] for row in document["escapes"]}):
        points = sorted(
            (row["escape_ratio"], 1 / row["ratio"])
            for row in document["escapes"]
            if row["rows"] == rows and row["ratio"] < 1
        )
        (first, time), (second, later) = points[:2]
        found[rows] = first + (1 / ratio - time) * (second - first) / (later - time)
    return found


def with_tables(page: str, text: str) -> str:
    """`page` with the tables `text` at their place."""
    return between_marks(page, "gemm", text)


def _growth(document: Document, column: str) -> float:
    """Geometric mean over weights of a column's time at 32 rows over that at one."""
    times = {
        (row["projection"], row["rows"]): row["times_s"][column] for row in document["products"]
    }
    names = {name for name, _ in times}
    return statistics.geometric_mean(times[name, 32] / times[name, 1] for name in names)


def _head(first: str, others: list[str]) -> list[str]:
    return [_line(first, others), "|---" * (1 + len(others)) + "|"]


def _line(first: str, others: list[str]) -> str:
    return f"| {' | '.join([first, *others])} |"
