"""Measure the W12 product against cuBLAS on this GPU; print a table and write JSON.

    python scripts/bench_w12.py --output docs/measurements/w12_gemm_h200.json

Every time is that of one product in a CUDA graph that works through several copies of the
weights, more than 600 MB together, so that L2 is cold; the median over replays in which all
columns take turns. Columns:

    cublas      torch.nn.functional.linear with BF16 weights
    plain       W12, one kernel after the other
    chain       W12 with programmatic dependent launch, as in a layer; the ratio is cuBLAS's time
                divided by this
    floor       the W12 kernel moving the same bytes and multiplying nothing, as a chain; it still
                adds escapes and sends sums between CTAs
    view        the 8-bit view pass, as a chain; its ratio is to `chain`
    view_floor  the view pass multiplying nothing
    portable    the kernel for other GPUs, which needs nothing newer than sm_80, as a chain
    warm        W12 chain and cuBLAS on a single copy, which L2 holds in part; ratio of the two

`read` is the share of the measured read bandwidth that `chain` reaches with the bytes it must
move. Results of chain and portable are checked before they are timed; a wrong one ends the run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shlex
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_w12_table import means, show, show_row
from torch.nn.functional import linear

from specpilot_kernels import build
from specpilot_kernels.timing import Work, in_turns
from specpilot_kernels.w12 import (
    gemm,
    gemm_mma,
    gemm_sm90,
    layout,
    modules,
    selfcheck,
    shapes,
)
from specpilot_kernels.w12.weight import W12Weight

ROWS = (1, 2, 4, 8, 16, 32, 48, 64)
LAYERS, ATTENTION_EVERY = 64, 4
ZEROS = (0.0, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 4e-3, 1e-2)


@dataclass(frozen=True, slots=True)
class Weights:
    """Copies of one weight, in both forms."""

    name: str
    w12: list[W12Weight]
    bf16: list[torch.Tensor]

    @property
    def shape(self) -> shapes.Shape:
        return self.w12[0].shape

    def moved_bytes(self, rows: int) -> int:
        """What a product must read and write: records, escapes, x and y."""
        out, inputs = self.shape
        weight = self.w12[0]
        return weight.records.nbytes + 8 * weight.escape_count + 2 * rows * (inputs + out)


def make_weights(name: str, shape: shapes.Shape, *, zeros: float = 0.0) -> Weights:
    """Weights whose product keeps the size of its input; a share `zeros` of them exact zeros."""
    bf16 = selfcheck.normal_weights(shape, std=shape[1] ** -0.5)
    if zeros:
        bf16[torch.rand(shape, device="cuda") < zeros] = 0
    w12 = W12Weight.from_bits(bf16, max_escape_ratio=1.0)
    copies = selfcheck.cold_copies(w12.records.nbytes)
    return Weights(
        name,
        [w12, *(selfcheck.copy_of(w12) for _ in range(copies - 1))],
        [bf16, *(bf16.clone() for _ in range(copies - 1))],
    )


def check(weights: Weights) -> None:
    """Stop unless both kernels are right at 1 and 64 rows, in some thousand channels."""
    out_features, in_features = weights.shape
    channels = slice(None, None, max(1, out_features // 2048))
    x = torch.empty((64, in_features), dtype=torch.bfloat16, device="cuda").normal_()
    some = weights.bf16[-1][channels].contiguous()
    for kernel, rows in itertools.product((gemm_sm90, gemm_mma), (1, 64)):
        out = torch.full((rows, out_features), torch.nan, dtype=x.dtype, device="cuda")
        kernel.gemm(x[:rows], weights.w12[-1], None, out)
        wrong = selfcheck.wrong_elements(out[:, channels], x[:rows], some)
        if wrong or not out.isfinite().all():
            sys.exit(f"{weights.name}: {wrong} wrong results at {rows} rows; times mean nothing")


def read_bandwidth(replays: int) -> float:
    """Bytes per second that summing 4 GiB of device memory reads."""
    buffer = torch.ones(1 << 30, dtype=torch.float32, device="cuda")
    return buffer.nbytes / in_turns({"read": [buffer.sum] * 2}, replays)["read"]


def bench(
    weights: Weights, rows: int, replays: int, workers: list[int], warm_up: int = 2
) -> dict[str, float]:
    """Seconds of every column at one number of rows."""
    out_features, in_features = weights.shape
    x = torch.empty((rows, in_features), dtype=torch.bfloat16, device="cuda").normal_()
    out = torch.empty((rows, out_features), dtype=torch.bfloat16, device="cuda")

    def w12(dependent: bool, **choices: Any) -> list[Work]:
        return [
            partial(gemm_sm90.gemm, x, one, None, out, dependent=dependent, **choices)
            for one in weights.w12
        ]

    count = len(weights.w12)
    works: dict[str, list[Work]] = {
        "cublas": [partial(linear, x, one) for one in weights.bf16],
        "plain": w12(False),
        "chain": w12(True),
        "floor": w12(True, stream_only=True),
        "view": w12(True, view_only=True),
        "view_floor": w12(True, view_only=True, stream_only=True),
        "portable": [partial(gemm_mma.gemm, x, one, None, out) for one in weights.w12],
        "cublas_warm": [partial(linear, x, weights.bf16[0])] * count,
        "warm": w12(True)[:1] * count,
    }
    works |= {f"chain_{number}_workers": w12(True, workers=number) for number in workers}
    return in_turns(works, replays, warm_up=warm_up)


def row_of(weights: Weights, rows: int, times: dict[str, float], read: float) -> dict[str, Any]:
    """One row of the table: times in seconds and what follows from them."""
    moved = weights.moved_bytes(rows)
    return {
        "projection": weights.name,
        "shape": list(weights.shape),
        "rows": rows,
        "times_s": times,
        "ratio": times["cublas"] / times["chain"],
        "plain_ratio": times["cublas"] / times["plain"],
        "floor_ratio": times["cublas"] / times["floor"],
        "view_ratio": times["chain"] / times["view"],
        "view_floor_ratio": times["chain"] / times["view_floor"],
        "portable_ratio": times["cublas"] / times["portable"],
        "warm_ratio": times["cublas_warm"] / times["warm"],
        "read_ratio": moved / times["chain"] / read,
        "cublas_read_ratio": 2 * math.prod(weights.shape) / times["cublas"] / read,
    }


def stack(table: dict[str, Weights], replays: int) -> dict[str, dict[str, float]]:
    """Seconds of the linears of 64 layers in one graph, one row, each fed by the one before.

    `alone`: nothing else. `between`: two small kernels of torch after each, as in a layer; no
    kernel of either kind can start before the one ahead of it has ended, unless both take part.
    """
    x = torch.empty((1, 5120), dtype=torch.bfloat16, device="cuda").normal_()

    def layers(kind: str, *, small: str) -> torch.Tensor:
        value = x
        for number in range(LAYERS):
            attention = number % ATTENTION_EVERY == ATTENTION_EVERY - 1
            mixer = ("attn_qkv", "attn_o") if attention else ("gdn_in", "gdn_out")
            for name in (*mixer, "gate_up", "down"):
                several = getattr(table[name], kind)
                one = several[number % len(several)]
                value = value[:, : one.shape[1]]
                if small == "between":
                    value = torch.nn.functional.silu(value)
                    value = torch.nn.functional.rms_norm(value, value.shape[-1:])
                value = linear(value, one) if kind == "bf16" else gemm.gemm(value, one)
        return value

    found = {}
    for name in ("alone", "between"):
        works: dict[str, list[Work]] = {
            "cublas": [partial(layers, "bf16", small=name)],
            "w12": [partial(layers, "w12", small=name)],
        }
        times = in_turns(works, replays)
        found[name] = {**times, "ratio": times["cublas"] / times["w12"]}
    return found


def escapes(replays: int) -> list[dict[str, float]]:
    """How escapes, here scattered zeros, slow the product down; what the limit rests on."""
    found = []
    for share in ZEROS:
        weights = make_weights("gdn_in", (16384, 5120), zeros=share)
        for rows in (1, 32, 64):
            times = bench(weights, rows, replays, [])
            ratio = weights.w12[0].escape_count / math.prod(weights.shape)
            found.append({"rows": rows, "escape_ratio": ratio, "chain_s": times["chain"],
                          "ratio": times["cublas"] / times["chain"]})  # fmt: skip
    return found


def host_s(calls: int = 2000) -> float:
    """Host time of an eager call in a steady state."""
    weight = W12Weight.from_bits(selfcheck.normal_weights((128, 512)))
    x = torch.zeros((1, 512), dtype=torch.bfloat16, device="cuda")
    times = []
    for _ in range(calls // 50):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(50):
            gemm.gemm(x, weight)
        times.append((time.perf_counter() - begin) / 50)
    return statistics.median(times)


def clocks() -> str:
    """SM and memory clock, power and temperature now, as nvidia-smi prints them."""
    query = "clocks.sm,clocks.mem,power.draw,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.splitlines()[torch.cuda.current_device()]


def sustained(weights: Weights, seconds: float) -> dict[str, Any]:
    """Ratio at 64 rows after so many seconds of nothing else, when the clock has fallen."""
    x = torch.empty((64, weights.shape[1]), dtype=torch.bfloat16, device="cuda").normal_()
    works: dict[str, list[Work]] = {
        "cublas": [partial(linear, x, one) for one in weights.bf16],
        "chain": [partial(gemm.gemm, x, one) for one in weights.w12],
    }
    turn_s = 3 * weights.bf16[0].nbytes / 4e12 * len(weights.w12)
    replays = max(9, int(seconds / 2 / turn_s))
    times = in_turns(works, replays, warm_up=replays)
    return {"projection": weights.name, "rows": 64, "times_s": times, "clocks": clocks(),
            "ratio": times["cublas"] / times["chain"]}  # fmt: skip


def distinct_weights(names: list[str]) -> dict[str, Weights]:
    """Weights of the named projections; those of one shape share them."""
    by_shape: dict[shapes.Shape, Weights] = {}
    table = {}
    for name in names:
        shape = shapes.MODELS[shapes.QWEN_27B][name]
        if shape not in by_shape:
            by_shape[shape] = make_weights(name, shape)
            check(by_shape[shape])
        table[name] = by_shape[shape]
    return table


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the document holds but its head."""
    names = options.only or list(shapes.MODELS[shapes.QWEN_27B])
    rows_list = options.rows or (ROWS if not options.quick else (1, 8, 16, 32, 64))
    sum_rate = read_bandwidth(options.replays)
    table = distinct_weights(names)
    raw = []
    for weights in {id(weights): weights for weights in table.values()}.values():
        for rows in rows_list:
            times = bench(weights, rows, options.replays, options.workers)
            raw.append((weights, rows, times))
            show_row(row_of(weights, rows, times, sum_rate))
    floor_rate = max(weights.moved_bytes(rows) / t["floor"] for weights, rows, t in raw)
    read = max(sum_rate, floor_rate)
    products = [row_of(weights, rows, times, read) for weights, rows, times in raw]
    found: dict[str, Any] = {
        "sum_bytes_per_s": sum_rate,
        "floor_bytes_per_s": floor_rate,
        "read_bytes_per_s": read,
        "means": means(products),
        "products": products,
        "clocks": clocks(),
        "host_s": host_s(),
    }
    if set(names) >= {"gate_up", "down", "gdn_in", "gdn_out", "attn_qkv", "attn_o"}:
        found["stack"] = stack(table, options.replays)
    if not options.quick:
        found["escapes"] = escapes(options.replays)  # before the clock has fallen
        unique = {id(weights): weights for weights in table.values()}.values()
        found["sustained"] = [sustained(weights, options.sustained_s) for weights in unique]
    return found


def usage() -> dict[str, int]:
    """Registers per thread of every variant that was measured."""
    architecture = "sm_90a"
    return {
        module.name: build.build(module, architecture).usage["w12_gemm"].registers
        for module in modules.gemm_sm90_modules()
    }


def parse() -> argparse.Namespace:
    names = list(shapes.MODELS[shapes.QWEN_27B])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("docs/measurements/w12_gemm_h200.json"))
    parser.add_argument("--quick", action="store_true", help="fewer rows, no sustained load")
    parser.add_argument("--replays", type=int, default=15)
    parser.add_argument("--sustained-s", type=float, default=1.5)
    parser.add_argument("--rows", type=int, nargs="+", choices=range(1, 65), metavar="ROWS")
    parser.add_argument("--only", nargs="+", choices=names, help="some projections")
    parser.add_argument("--workers", type=int, nargs="*", default=[], help="also so many CTAs")
    return parser.parse_args()


def main() -> int:
    """Run everything; under two minutes on an H200."""
    options = parse()
    begin = time.perf_counter()
    torch.manual_seed(0)
    gemm.warm()
    gemm.warm(view_only=True)
    gemm.warm(use=gemm_mma)
    found = measure(options)
    document: dict[str, Any] = {
        "what": "W12 product against cuBLAS with BF16 weights, seconds, medians of graph replays",
        "command": shlex.join(["python", "scripts/bench_w12.py", *sys.argv[1:]]),
        "date_utc": datetime.now(UTC).strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "layout": layout.LAYOUT,
        "replays": options.replays,
        "registers": usage(),
        **found,
        "wall_s": time.perf_counter() - begin,
    }
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    show(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
