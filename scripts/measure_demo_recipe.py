#!/usr/bin/env python3
"""Run `specpilot apply recipe demo-cpu` several times and keep what came out.

    python scripts/measure_demo_recipe.py            # three runs and one with a deliberate fault
    python scripts/measure_demo_recipe.py --table    # only write the table again

Writes docs/measurements/demo_cpu_recipe.json, prints its table, and puts the table into
recipes/demo-cpu/EVIDENCE.md. Needs an otherwise idle machine: about four minutes a run on two
cores. Run it from the repository's root. Exits with 1 if a run without a fault is not lossless, or
if the fault passes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specpilot_cli.io.atomic import atomic_write_text
from specpilot_cli.report.json_out import build_envelope, render_json

# relative, so that no path of one machine is published
RECIPE = Path("recipes/demo-cpu")
OUTPUT = Path("docs/measurements/demo_cpu_recipe.json")
EVIDENCE = RECIPE / "EVIDENCE.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
FAULT = ("--fault-after", "48")

Row = dict[str, Any]


def run_recipe(folder: Path, options: Sequence[str]) -> Row:
    """One run in a process of its own, and its row."""
    command = [sys.executable, "-m", "specpilot_cli", "apply", "recipe", "demo-cpu"]
    load, started = os.getloadavg()[0], time.monotonic()
    done = subprocess.run(
        [*command, "--out", str(folder), "--quiet", *options],
        stdout=subprocess.DEVNULL,
        check=False,
    )
    wall_s = time.monotonic() - started
    if done.returncode not in (0, 1, 4):
        raise SystemExit(f"the run ended with exit code {done.returncode}")
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return {
        "command": " ".join(["specpilot", *command[3:], *options]),
        "exit_code": done.returncode,
        "wall_s": round(wall_s, 1),
        "load_average_1min_start": round(load, 2),
        **row_of(result),
    }


def row_of(result: dict[str, Any]) -> Row:
    """What is worth keeping of one result.json."""
    results = result["results"]
    bench, audit = results["paired_bench"], results["token_force"]
    over_ar = {item["system"]: item["overall"] for item in bench["over_ar"]}
    systems = {item["name"]: item for item in bench["systems"]}
    return {
        "verdict": result["verdict"],
        "reasons": results["reasons"],
        "warnings": bench["warnings"],
        "fault": results["fault"],
        "nodes": results["chosen"]["nodes"],
        "dev": {
            "stock": results["stock_point"],
            "budgets": results["budgets"],
            "predicted_gain_ratio": results["predicted_gain_ratio"],
        },
        "ceiling": results["ceiling"],
        "gain": bench["gain"],
        "bound_ratio": bench["decision"]["bound_ratio"] if bench["decision"] else None,
        "aa_noise_log": bench["noise"]["nu_log"] if bench["noise"] else None,
        "tau": {name: system["tau"] for name, system in systems.items()},
        "rate_tok_per_s": {name: system["rate_tok_per_s"] for name, system in systems.items()},
        "over_ar": over_ar,
        "benchmarks": [
            {"name": item["name"], "gain_ratio": item["gain"]["gain_ratio"], "tau": item["tau"]}
            for item in bench["benchmarks"]
        ],
        "token_force": None
        if audit is None
        else {key: audit[key] for key in ("verdict", "reasons", "threshold", "system", "stock")},
        "projected_gain_ratio": (results["projection"] or {}).get("gain_ratio"),
        "phases_s": {name: round(s, 1) for name, s in results["phases_s"].items()},
    }


def measure(n_runs: int, n_faulty: int, options: Sequence[str]) -> dict[str, Any]:
    """All runs, one after the other."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="demo-recipe-") as folder:
        for number in range(n_runs + n_faulty):
            fault = FAULT if number >= n_runs else ()
            rows.append(run_recipe(Path(folder) / str(number), [*options, *fault]))
            print(f"run {number + 1}: {rows[-1]['verdict']}", file=sys.stderr)
    return {"measured": datetime.now(UTC).date().isoformat(), "runs": rows}


def table(envelope: dict[str, Any]) -> str:
    """The runs side by side, as Markdown."""
    rows: list[Row] = envelope["results"]["runs"]
    number = iter(range(1, len(rows) + 1))
    heads = ["fault" if row["fault"] else f"run {next(number)}" for row in rows]
    lines = [
        ["", *heads],
        ["---"] * (len(rows) + 1),
        ["verdict", *(f"`{row['verdict']}`" for row in rows)],
        ["node budget chosen", *(str(row["nodes"]) for row in rows)],
        ["gain predicted from dev prompts",
         *(_times(row["dev"]["predicted_gain_ratio"]) for row in rows)],
        ["gain over stock, 95 % interval", *(_interval(row["gain"]) for row in rows)],
        ["lower bound", *(_times(row["gain"]["lower_bound_ratio"]) for row in rows)],
        ["must exceed", *(_times(row["bound_ratio"]) for row in rows)],
        ["stock over plain decoding", *(_interval(row["over_ar"]["baseline"]) for row in rows)],
        ["tuned over plain decoding", *(_interval(row["over_ar"]["candidate"]) for row in rows)],
        ["τ, stock → tuned",
         *(f"{row['tau']['baseline']:.2f} → {row['tau']['candidate']:.2f}" for row in rows)],
        ["mismatches, stock → tuned", *(_mismatches(row["token_force"]) for row in rows)],
        ["token forcing", *(f"`{row['token_force']['verdict']}`" for row in rows)],
        ["A/A noise", *(f"{row['aa_noise_log']:.2%}" for row in rows)],
        ["projected gain at H200 step times",
         *(_times(row["projected_gain_ratio"]) for row in rows)],
        ["wall time", *(f"{row['wall_s']:.0f} s" for row in rows)],
    ]  # fmt: skip
    found = envelope["environment"]
    about = (
        f"Measured {envelope['results']['measured']} with specpilot "
        f"{envelope['specpilot_version']} on {found['cpu']}, {found['cpu_count']} cores, "
        f"{found['system']}, Python {found['python']}, torch {found['torch']}. Load before the "
        f"runs: {', '.join(str(row['load_average_1min_start']) for row in rows)}."
    )
    return "\n".join([about, "", *(f"| {' | '.join(line)} |" for line in lines)])


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}×"


def _interval(gain: dict[str, float]) -> str:
    return f"{gain['gain_ratio']:.3f}× [{gain['low_ratio']:.3f}, {gain['high_ratio']:.3f}]"


def _mismatches(audit: dict[str, Any]) -> str:
    stock, tuned = (audit[name]["mismatch_rate_pct"] for name in ("stock", "system"))
    return f"{stock:.2f} % → {tuned:.2f} %"


def with_table(page: str, text: str) -> str:
    """`page` with the part between the markers replaced."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise SystemExit(f"{EVIDENCE} does not hold the markers {BEGIN} and {END} once")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def as_expected(row: Row) -> bool:
    """A fault is rejected, and nothing else is."""
    audit = row["token_force"]
    wanted = "reject" if row["fault"] else "accept"
    return audit is not None and audit["verdict"] == wanted


def main() -> int:
    """Measure and write, or write the table of what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--fault-runs", type=int, default=1)
    parser.add_argument("--limit", help="passed on; the published figures have none")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--table", action="store_true", help="only write the table again")
    args = parser.parse_args()
    if args.table:
        envelope = json.loads(args.output.read_text(encoding="utf-8"))
    else:
        options = ["--limit", args.limit] if args.limit else []
        results = measure(args.runs, args.fault_runs, options)
        inputs = [RECIPE / name for name in ("recipe.yaml", "target", "drafter")]
        made = build_envelope("scripts/measure_demo_recipe.py", results, inputs=inputs)
        atomic_write_text(args.output, render_json(made), force=True)
        envelope = made.model_dump(mode="json")
    text = table(envelope)
    print(text)
    if args.output == OUTPUT:
        page = EVIDENCE.read_text(encoding="utf-8")
        atomic_write_text(EVIDENCE, with_table(page, text), force=True)
    return 0 if all(as_expected(row) for row in envelope["results"]["runs"]) else 1


if __name__ == "__main__":
    sys.exit(main())
