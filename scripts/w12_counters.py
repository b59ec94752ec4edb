"""Hardware counters of the W12 product, of its floor and of cuBLAS, read by Nsight Compute.

    python scripts/w12_counters.py --output docs/measurements/w12_counters_h200.json

Each kernel runs once, alone, from a cold L2, at the clock that `ncu` sets, so times differ from
`bench_w12.py`'s; shares of the peak rates are what to compare. The floor is the kernel moving the
same bytes and multiplying nothing. Needs `ncu` on the path and the right to read counters.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from specpilot_kernels.w12 import gemm, gemm_sm90, selfcheck, shapes
from specpilot_kernels.w12.weight import W12Weight

CASES = (("head", 64), ("gate_up", 8), ("gate_up", 64), ("down", 64), ("gdn_out", 8),
         ("gdn_out", 64))  # fmt: skip
KERNELS = ("w12", "floor", "view", "view_floor", "cublas")
COUNTERS = {
    "gpu__time_duration.sum": "time_ns",
    "sm__cycles_elapsed.max": "cycles",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_pct",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed": "l2_pct",
    "l1tex__throughput.avg.pct_of_peak_sustained_elapsed": "l1_pct",
    "sm__inst_issued.avg.pct_of_peak_sustained_active": "issue_pct",
    "sm__inst_executed_pipe_tensor.sum": "tensor_instructions",
    "lts__t_bytes.sum": "l2_bytes",
    "dram__bytes_read.sum": "dram_read_bytes",
}


def work() -> None:
    """Launch every kernel of every case once, between the profiler's start and stop."""
    gemm.warm()
    gemm.warm(view_only=True)
    for name, rows in CASES:
        bits = selfcheck.normal_weights(shapes.MODELS[shapes.QWEN_27B][name])
        weight = W12Weight.from_bits(bits)
        x = torch.empty((rows, bits.shape[1]), dtype=bits.dtype, device="cuda").normal_()
        out = torch.empty((rows, bits.shape[0]), dtype=bits.dtype, device="cuda")
        launches = [
            lambda w=weight, x=x, out=out, v=v, s=s: gemm_sm90.gemm(
                x, w, None, out, dependent=False, view_only=v, stream_only=s
            )
            for v, s in ((False, False), (False, True), (True, False), (True, True))
        ]
        launches.append(lambda x=x, bits=bits: linear(x, bits))
        for launch in launches:
            launch()  # compiled, loaded, chosen
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        for launch in launches:
            launch()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def table(text: str) -> list[dict[str, Any]]:
    """One row per case and kernel, from what `ncu --csv` printed."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    launches: dict[int, dict[str, Any]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        launch = launches.setdefault(int(row["ID"]), {"name": row["Kernel Name"]})
        if row["Metric Name"] in COUNTERS:
            value = float(row["Metric Value"].replace(",", ""))
            launch[COUNTERS[row["Metric Name"]]] = value
    ours = [launch for launch in launches.values() if launch["name"] == "w12_gemm"]
    if len(ours) != len(CASES) * (len(KERNELS) - 1):
        sys.exit(f"{len(ours)} launches of w12_gemm were profiled:\n{text}")
    found: list[dict[str, Any]] = []
    for launch in launches.values():
        name = launch.pop("name")
        if name == "w12_gemm" or found[-1]["kernel"] != "cublas":
            case, kernel = divmod(len(found), len(KERNELS))
            projection, rows = CASES[case]
            found.append({"projection": projection, "rows": rows, "kernel": KERNELS[kernel],
                          **launch})  # fmt: skip
        else:  # cuBLAS adds up its parts in a kernel of its own
            add(found[-1], launch)
    return found


def add(total: dict[str, Any], more: dict[str, float]) -> None:
    """Counters of two launches as one: sums, and shares weighted by time."""
    first, second = total["time_ns"], more["time_ns"]
    for name, value in more.items():
        if name.endswith("_pct"):
            total[name] = (total[name] * first + value * second) / (first + second)
        else:
            total[name] += value


def profile() -> str:
    """Run ourselves under ncu; returns what it printed."""
    command = [
        "ncu", "--csv", "--print-units", "base", "--profile-from-start", "off",
        "--metrics", ",".join(COUNTERS), sys.executable, __file__, "--work",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"ncu ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def main() -> int:
    """Profile ourselves; under a minute on an H200."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, default=Path("docs/measurements/w12_counters_h200.json")
    )
    parser.add_argument("--csv", type=Path, help="what ncu printed before, instead of a run")
    parser.add_argument("--gpu", help="with --csv: the GPU it was printed for")
    parser.add_argument("--work", action="store_true", help="what runs under ncu")
    options = parser.parse_args()
    if options.work:
        work()
        return 0
    kernels = table(options.csv.read_text("utf-8") if options.csv else profile())
    document = {
        "what": "counters of single launches, cold L2, at the clock that Nsight Compute sets",
        "command": "python scripts/w12_counters.py",
        "date_utc": datetime.now(UTC).strftime("%Y-%m-%d"),
        "gpu": options.gpu or torch.cuda.get_device_name(),
        "kernels": kernels,
    }
    options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for row in kernels:
        print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
