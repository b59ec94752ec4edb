"""Measure the W12 codec on this CPU and write the result as JSON.

    python scripts/bench_w12_codec.py --output docs/measurements/w12_codec_cpu.json

Rates are bytes of BF16 per second. `cpu` divides by the processor time of all threads, `wall` by
elapsed time; on a shared machine the first is the fairer one. Each is the median of `--repeats`
runs after a warm-up that compiles. The end-to-end row converts a synthetic checkpoint that lies
in the page cache: read, encode, decode, compare, hash, write, flush.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from specpilot_cli.convert_w12.convert import convert_folder
from specpilot_cli.convert_w12.plan import Selection
from specpilot_cli.convert_w12.verify import verify_folder
from specpilot_cli.io.hf_folder import open_hf_folder
from specpilot_cli.io.json_file import write_json
from specpilot_cli.io.safetensors_stream import bf16_data, write_safetensors
from specpilot_cli.report.json_out import describe_environment
from specpilot_kernels.w12 import codec

Bits = npt.NDArray[np.uint16]


def weights(rows: int, cols: int, *, zeros: float = 0.0) -> Bits:
    """N(0, 0.02) as BF16 patterns, a share of them exact zeros."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((rows, cols), dtype=np.float32) * np.float32(0.02)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    if zeros:
        bits[rng.random(bits.shape) < zeros] = 0
    return bits


def rate(work: Callable[[], object], nbytes: int, repeats: int) -> dict[str, float]:
    """Median bytes per second of `work`, by processor time and by the clock."""
    work()
    cpu_s, wall_s = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        cpu_s.append(time.process_time() - cpu)
        wall_s.append(time.perf_counter() - wall)
    return {
        "cpu_bytes_per_s": round(nbytes / statistics.median(cpu_s)),
        "wall_bytes_per_s": round(nbytes / statistics.median(wall_s)),
    }


def bench_content(bits: Bits, repeats: int, threads: tuple[int, ...]) -> dict[str, Any]:
    """Rates of every codec function on one matrix."""
    encoded = codec.encode(bits)
    assert codec.matches(bits, encoded)
    row: dict[str, Any] = {
        "shape": list(bits.shape),
        "bits_per_weight": encoded.bits_per_weight,
        "escape_ratio": encoded.escapes / bits.size,
    }
    for count in threads:
        works: dict[str, Callable[[], object]] = {
            "survey": lambda n=count: codec.survey(bits, threads=n),
            "encode": lambda n=count: codec.encode(bits, threads=n),
            "decode": lambda n=count: codec.decode(encoded, threads=n),
            "compare": lambda n=count: codec.matches(bits, encoded, threads=n),
        }
        row[f"threads_{count}"] = {
            name: rate(work, bits.nbytes, repeats) for name, work in works.items()
        }
    return row


def bench_folder(threads: int) -> dict[str, Any]:
    """Convert and verify a checkpoint of 16 matrices."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "model", Path(folder) / "w12"
        source.mkdir()
        (source / "config.json").write_text("{}", encoding="utf-8")
        matrix = bf16_data(weights(2048, 5120))
        tensors = {f"layers.{i}.up_proj.weight": matrix for i in range(16)}
        write_safetensors(source / "model.safetensors", tensors)
        opened = open_hf_folder(source)
        begin = time.perf_counter()
        convert_folder(opened, target, Selection(), threads=threads)
        converted = time.perf_counter()
        verdict = verify_folder(target, threads=threads).verdict
        verified = time.perf_counter()
        return {
            "tensor_bytes": opened.tensor_bytes,
            "threads": threads,
            "convert_s": converted - begin,
            "convert_bytes_per_s": round(opened.tensor_bytes / (converted - begin)),
            "verify_s": verified - converted,
            "verify_bytes_per_s": round(opened.tensor_bytes / (verified - converted)),
            "verdict": verdict,
        }


def main() -> int:
    """Run everything; about fifteen seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    processors = len(os.sched_getaffinity(0))
    counts = (1, processors) if processors > 1 else (1,)
    contents = {
        "normal": weights(4096, 5120),
        "one_percent_zeros": weights(4096, 5120, zeros=0.01),
        "uniform_patterns": np.random.default_rng(1).integers(
            0, 65536, (1024, 5120), dtype=np.uint16
        ),
    }
    load_before = os.getloadavg()[0]
    rows = {name: bench_content(bits, options.repeats, counts) for name, bits in contents.items()}
    normal = contents["normal"]
    document = {
        "what": "W12 codec, bytes of BF16 per second",
        "command": "python scripts/bench_w12_codec.py --output FILE",
        "date_utc": datetime.now(UTC).strftime("%Y-%m-%d"),
        "environment": {
            **describe_environment(),
            "machine": platform.machine(),
            "numba": numba.__version__,
            "load_average_before": load_before,
            "load_average_after": os.getloadavg()[0],
        },
        "repeats": options.repeats,
        "codec": rows,
        "sha256": rate(lambda: hashlib.sha256(normal.data).digest(), normal.nbytes, 5),
        "folder": bench_folder(processors),
    }
    write_json(options.output, document, force=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
