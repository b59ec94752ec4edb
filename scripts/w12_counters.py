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
    found: dict[int, dict[str, float]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        name = COUNTERS.get(row["Metric Name"])
        if name is not None:
            found.setdefault(int(row["ID"]), {})[name] = float(row["Metric Value"].replace(",", ""))
    if len(found) != len(CASES) * len(KERNELS):
        sys.exit(f"{len(found)} kernels profiled, expected {len(CASES) * len(KERNELS)}:\n{text}")
    places = [(name, rows, kernel) for name, rows in CASES for kernel in KERNELS]
    return [
        {"projection": name, "rows": rows, "kernel": kernel, **found[i]}
        for i, (name, rows, kernel) in zip(sorted(found), places, strict=True)
    ]


def main() -> int:
    """Profile ourselves; under a minute on an H200."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output", type=Path, default=Path("docs/measurements/w12_counters_h200.json")
    )
    parser.add_argument("--work", action="store_true", help="what runs under ncu")
    options = parser.parse_args()
    if options.work:
        work()
        return 0
    command = [
        "ncu", "--csv", "--print-units", "base", "--profile-from-start", "off",
        "--metrics", ",".join(COUNTERS),
        sys.executable, __file__, "--work",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"ncu ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    kernels = table(done.stdout)
    document = {
        "what": "counters of single launches, cold L2, at the clock that Nsight Compute sets",
        "command": "python scripts/w12_counters.py",
        "date_utc": datetime.now(UTC).strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "kernels": kernels,
    }
    options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    for row in kernels:
        print(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
