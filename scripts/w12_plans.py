"""Measure, for every shape of the supported models, which way of multiplying is fastest.

    python scripts/w12_plans.py measure --output docs/measurements/w12_plans_h200.json   # on a GPU
    python scripts/w12_plans.py ship docs/measurements/w12_plans_h200.json

`measure` times, from a cold L2 and in turns, the W12 kernel against cuBLAS with BF16 weights up to
64 rows, and above them repeated passes of the kernel against decoding and cuBLAS. `ship` writes
what follows into the package's `plans.json`, which the layers look up.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from specpilot_kernels.w12 import gemm, plans, shapes, tune
from specpilot_kernels.w12.plans import Plan, shape_name

SHIPPED = Path("kernels/specpilot_kernels/w12/plans.json")


def measure(output: Path) -> None:
    """Time every shape; the result is written anew after each."""
    gemm.warm()
    torch.manual_seed(0)
    document: dict[str, Any] = {
        "what": "W12 against cuBLAS by rows, and two ways of multiplying more rows, in seconds",
        "command": "python scripts/w12_plans.py measure",
        "date_utc": datetime.now(UTC).strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "shapes": {},
    }
    for shape in shapes.distinct():
        ratios, times = tune.measurements(shape)
        document["shapes"][shape_name(*shape)] = {
            "ratios": ratios,
            "passes_s": {rows: passes for rows, (passes, _) in times.items()},
            "decoding_s": {rows: decoding for rows, (_, decoding) in times.items()},
        }
        print(shape, tune.choose(ratios, times), {r: round(v, 3) for r, v in ratios.items()})
        output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def plans_of(document: dict[str, Any]) -> dict[str, Plan]:
    """The plans that a measurement asks for, by name of the shape."""
    found = {}
    for name, measured in document["shapes"].items():
        ratios = {int(rows): ratio for rows, ratio in measured["ratios"].items()}
        times = {
            int(rows): (passes, measured["decoding_s"][rows])
            for rows, passes in measured["passes_s"].items()
        }
        found[name] = tune.choose(ratios, times)
    return found


def main() -> int:
    """Measure or ship; a minute on an H200."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("measure").add_argument("--output", type=Path, required=True)
    commands.add_parser("ship").add_argument("result", type=Path)
    options = parser.parse_args()
    if options.command == "measure":
        measure(options.output)
        return 0
    document = json.loads(options.result.read_text("utf-8"))
    SHIPPED.unlink(missing_ok=True)
    plans.store(document["gpu"], plans_of(document), SHIPPED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
