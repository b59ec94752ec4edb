"""Measure the W12 codec on this CPU and write the result as JSON.

    python scripts/bench_w12_codec.py --output docs/measurements/w12_codec_cpu.json

Rates are bytes of BF16 per second. `cpu` divides by the processor time of all threads, `wall` by
elapsed time; on a shared machine the first is the fairer one. Each is the median of `--repeats`
runs after a warm-up that compiles. `to_stored` and `from_stored` turn the encoded form in memory
into the one in a folder and back. Whole conversions: scripts/bench_w12_convert.py.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from specpilot_cli.io.json_file import write_json
from specpilot_cli.report.json_out import describe_environment
from specpilot_cli.settings import available_cores
from specpilot_kernels.w12 import codec
from specpilot_kernels.w12.stored import from_stored, stored_parts

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
    parts = stored_parts(encoded)
    if not codec.matches(bits, from_stored(bits.shape, parts)):
        raise SystemExit("error: the codec did not give the same bits back")
    row: dict[str, Any] = {
        "shape": list(bits.shape),
        "bits_per_weight": sum(part.nbytes for part in parts.values()) * 8 / bits.size,
        "escapes": encoded.escapes,
        "escape_ratio": encoded.escapes / bits.size,
        "to_stored": rate(lambda: stored_parts(encoded), bits.nbytes, repeats),
        "from_stored": rate(lambda: from_stored(bits.shape, parts), bits.nbytes, repeats),
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


def main() -> int:
    """Run everything; about fifteen seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    processors = available_cores()
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
    }
    write_json(options.output, document, force=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
