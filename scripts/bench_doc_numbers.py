#!/usr/bin/env python3
"""The measured numbers of docs/paired-bench.md, from docs/measurements.

python scripts/bench_doc_numbers.py            write them between their marks
python scripts/bench_doc_numbers.py --check    exit 1 if the page says otherwise
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from doc_marks import between_marks

REPOSITORY = Path(__file__).resolve().parent.parent
PAGE = REPOSITORY / "docs" / "paired-bench.md"
SHOWN = ((20, 3), (50, 3), (100, 3), (50, 8))


def read(name: str) -> dict[str, Any]:
    """Results of one measurement."""
    path = REPOSITORY / "docs" / "measurements" / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["results"]
    return found


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def coverage() -> str:
    """Coverage and width by scenario."""
    found = read("paired_bench_coverage")
    cells = {(row["scenario"], row["n"], row["k"]): row for row in found["rows"]}
    names = list(dict.fromkeys(row["scenario"] for row in found["rows"]))
    rows = [
        [
            name,
            *(
                f"{100 * cells[name, n, k]['coverage']:.1f} / "
                f"{cells[name, n, k]['mean_width_pct']:.2f}"
                for n, k in SHOWN
            ),
        ]
        for name in names
    ]
    head = ["coverage / width, %", *(f"n = {n}, K = {k}" for n, k in SHOWN)]
    least, goal = 100 * found["least_coverage"], 100 * found["goal"]
    word = "met" if least >= goal else "**missed**"
    return (
        f"{table(head, rows)}\n\nThe least over all sizes is {least:.1f} %; the goal of "
        f"{goal:.0f} % is {word}."
    )


def client() -> str:
    """What the client adds."""
    found = read("bench_client_cpu")
    rows = [
        [
            row["client"], row["stream"], str(row["tokens_per_chunk"]),
            f"{row['overhead_mean_pct']:.2f} %", f"{row['overhead_max_pct']:.2f} %",
        ]
        for row in found["rows"]
    ]  # fmt: skip
    head = ["client", "stream", "tokens per chunk", "added, mean", "added, worst request"]
    setup = found["setup"]
    word = "met" if found["worst_mean_pct"] <= setup["goal_pct"] else "**missed**"
    return (
        f"{table(head, rows)}\n\nThe goal of {setup['goal_pct']:g} % in the mean is {word}. Load "
        f"average of the two cores meanwhile: {setup['load_average_1min']:.0f}, niceness "
        f"{setup['niceness']}."
    )


def known() -> str:
    """What was decided about servers whose difference is known."""
    found = read("paired_bench_cpu")
    settings = found["settings"]
    rows = []
    for name in ("paced", "unpaced"):
        row = found[name]
        loads = [one["load_average_1min"] for one in (*row["same"], *row["slow"])]
        rows.append(
            [
                f"{name}, {settings['pace_ms']:g} ms a step" if name == "paced" else name,
                f"{row['aa_promoted']} of {row['aa_comparisons']}",
                f"{row['slow_found']} of {row['slow_comparisons']}",
                f"{row['nu_pct']:.2f} %",
                f"{row['mean_interval_width_pct']:.2f} %",
                f"{min(loads):.0f} – {max(loads):.0f}",
            ]
        )
    slow = f"{settings['slow_pct']:g} % slower found"
    head = ["servers", "A/A promoted", slow, "ν", "interval width", "load average"]
    return (
        f"{table(head, rows)}\n\nBoth on two cores that others used too, at niceness "
        f"{settings['niceness']}; found means that the whole interval lies below 1."
    )


def main() -> int:
    """Write or check."""
    page = PAGE.read_text(encoding="utf-8")
    new = page
    for name, text in (("coverage", coverage()), ("client", client()), ("known", known())):
        new = between_marks(new, name, text, word="bench")
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(new, encoding="utf-8")
        return 0
    if new != page:
        print(f"{PAGE.name} does not say what was measured: run scripts/bench_doc_numbers.py",
              file=sys.stderr)  # fmt: skip
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
