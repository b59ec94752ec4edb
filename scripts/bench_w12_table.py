"""The table that `bench_w12.py` prints: ratios, means over projections, bars met or missed."""

from __future__ import annotations

import math
import statistics
from typing import Any

LARGE_BYTES = 100e6
# Rows of a bar, least ratio of any projection, least geometric mean.
BARS = (
    ((1, 2, 4, 8), 1.25, 1.42),
    ((16,), 1.22, 1.40),
    ((32,), 1.20, 1.37),
    ((48, 64), 1.05, 1.25),
)
RATIOS = (
    "ratio", "plain_ratio", "floor_ratio", "warm_ratio", "view_ratio", "view_floor_ratio",
    "portable_ratio",
)  # fmt: skip
_HEAD = "projection   cublas   plain ratio   chain ratio   read   floor ratio    view ratio  warm"


def means(rows_out: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Least value and geometric mean of the ratios over all projections, by rows."""
    found = []
    for rows in sorted({row["rows"] for row in rows_out}):
        some = [row for row in rows_out if row["rows"] == rows]
        entry: dict[str, float] = {"rows": rows}
        for key in RATIOS:
            values = [row[key] for row in some]
            entry[f"{key}_least"] = min(values)
            entry[f"{key}_mean"] = statistics.geometric_mean(values)
        entry["large_read_ratio_least"] = min(
            (row["read_ratio"] for row in some if 1.5 * math.prod(row["shape"]) > LARGE_BYTES),
            default=math.nan,
        )
        found.append(entry)
    return found


def show_row(row: dict[str, Any]) -> None:
    """Print one line: microseconds and ratios."""
    t = {name: seconds * 1e6 for name, seconds in row["times_s"].items()}
    others = "".join(
        f" {name.split('_')[1]}:{row['times_s']['cublas'] / seconds:.3f}"
        for name, seconds in row["times_s"].items()
        if name.endswith("_workers")
    )
    print(
        f"{row['projection']:<9}{row['rows']:>3} {t['cublas']:7.1f}"
        f" {t['plain']:7.1f} {row['plain_ratio']:5.3f} {t['chain']:7.1f} {row['ratio']:5.3f}"
        f" {row['read_ratio']:6.1%} {t['floor']:7.1f} {row['floor_ratio']:5.3f}"
        f" {t['view']:7.1f} {row['view_ratio']:5.3f} {row['warm_ratio']:5.3f}{others}",
        flush=True,
    )


def show(document: dict[str, Any]) -> None:
    """Print the table again, and what it amounts to."""
    print(f"\n{document['gpu']}, read {document['read_bytes_per_s'] / 1e12:.3f} TB/s "
          f"(torch.sum {document['sum_bytes_per_s'] / 1e12:.3f})")  # fmt: skip
    print(_HEAD)
    for row in document["products"]:
        show_row(row)
    by_rows = {entry["rows"]: entry for entry in document["means"]}
    for rows, entry in by_rows.items():
        print(f"{rows:>3} rows: least {entry['ratio_least']:.3f}, mean {entry['ratio_mean']:.3f}; "
              f"plain {entry['plain_ratio_mean']:.3f}, floor {entry['floor_ratio_mean']:.3f}, "
              f"warm {entry['warm_ratio_mean']:.3f}, view {entry['view_ratio_mean']:.3f}, "
              f"read of large ones {entry['large_read_ratio_least']:.1%}")  # fmt: skip
    for several, least, mean in BARS:
        for rows in (rows for rows in several if rows in by_rows):
            entry = by_rows[rows]
            met = entry["ratio_least"] >= least and entry["ratio_mean"] >= mean
            verdict = "met" if met else "MISSED"
            print(f"bar at {rows:>2} rows (each {least}, mean {mean}): {verdict}")
    for row in document.get("sustained", []):
        print(f"sustained, 64 rows, {row['projection']}: {row['ratio']:.3f} ({row['clocks']})")
    for row in document.get("escapes", []):
        print(f"escapes {row['escape_ratio']:.3%}, {row['rows']} rows: {row['ratio']:.3f}")
    for name, times in document.get("stack", {}).items():
        print(f"64 layers, 1 row, {name}: cuBLAS {times['cublas'] * 1e3:.3f} ms, W12 "
              f"{times['w12'] * 1e3:.3f} ms, ratio {times['ratio']:.3f}")  # fmt: skip
    print(f"host time of an eager call {document['host_s'] * 1e6:.1f} us; clocks "
          f"{document['clocks']}; {document['wall_s']:.0f} s in all")  # fmt: skip
