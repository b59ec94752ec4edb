"""Measure the W12 codec on this GPU and write the result as JSON.

    python scripts/bench_w12_gpu_codec.py --output docs/measurements/w12_gpu_codec_h200.json

Shapes are the linears of Qwen3.8-27B; contents N(0, 0.02) as BF16. Each time is the median over
replays of a CUDA graph that works through several copies, together larger than L2 by far, so
every launch finds its inputs in device memory. Rates are bytes of BF16 per second, as a converter
counts; `of_copy` divides the bytes that must move (2 of BF16, 1.5 of W12 per weight) per second
by what a copy in the same run moves (read plus written). Every result is checked: the records of
the timed encoding decode to the source, by 16-bit patterns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from specpilot_kernels import build, launch
from specpilot_kernels.w12 import device, modules

_HIDDEN, _MLP, _VOCAB = 5120, 17408, 248320
# name: (rows, cols, how many of them the model has); projections that an engine fuses are fused.
SHAPES: dict[str, tuple[int, int, int]] = {
    "mlp gate, up": (2 * _MLP, _HIDDEN, 64),
    "mlp down": (_HIDDEN, _MLP, 64),
    "gdn in": (16384, _HIDDEN, 48),
    "gdn out, attn o": (_HIDDEN, 6144, 64),
    "attn qkv": (14336, _HIDDEN, 16),
    "lm head": (_VOCAB, _HIDDEN, 1),
}
_COLD_BYTES = 400 << 20
# threads per block, blocks per multiprocessor, whether the next tile is fetched ahead.
_VARIANTS = ((1024, 1, 0), (1024, 1, 1), (512, 2, 0), (512, 2, 1), (512, 1, 1))


def seconds(works: list[Callable[[], object]], repeats: int) -> float:
    """Median time of one of `works`, captured one after the other in a graph."""
    for work in works:
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for work in works:
            work()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(works))
    return statistics.median(times)


def copy_bandwidth(repeats: int) -> float:
    """Bytes read plus written per second by a device-to-device copy of 1 GiB."""
    source = torch.randint(0, 1 << 30, (1 << 28,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds([lambda: target.copy_(source)] * 2, repeats)


def weights(rows: int, cols: int, *, zeros: float = 0.0) -> torch.Tensor:
    """N(0, 0.02) as bfloat16, a share of them exact zeros."""
    values = torch.empty((rows, cols), dtype=torch.bfloat16, device="cuda").normal_(0.0, 0.02)
    if zeros:
        values[torch.rand((rows, cols), device="cuda") < zeros] = 0
    return values


def bench_shape(rows: int, cols: int, repeats: int, copy: float, *, zeros: float) -> dict[str, Any]:
    """Times and rates of encode, decode and compare on one shape."""
    raw = 2 * rows * cols
    copies = max(2, -(-_COLD_BYTES // raw))
    sources = [weights(rows, cols, zeros=zeros) for _ in range(copies)]
    room = max(4096, int(rows * cols * (zeros + 1e-3) * 1.1))
    buffers = [device.allocate((rows, cols), 0, capacity=room) for _ in sources]
    encoded = [device.encode(source) for source in sources]
    outputs = [torch.empty_like(source) for source in sources]
    flag = torch.zeros(1, dtype=torch.int32, device="cuda")
    several = range(copies)
    for buffer, output in zip(buffers, outputs, strict=True):
        buffer.parts.records.fill_(0xA5)
        output.view(torch.int16).fill_(0x5A5A)
    timed = {
        "encode": [lambda i=i: device.encode_into(sources[i], buffers[i]) for i in several],
        "decode": [lambda i=i: device.decode(encoded[i], outputs[i]) for i in several],
        "compare": [lambda i=i: device.compare(sources[i], encoded[i], flag) for i in several],
    }
    row: dict[str, Any] = {"rows": rows, "cols": cols, "copies": copies}
    for name, works in timed.items():
        time_s = seconds(works, repeats)
        row[name] = {
            "time_s": time_s,
            "bf16_bytes_per_s": raw / time_s,
            "of_copy": raw * 1.75 / time_s / copy,
        }
    for source, buffer, output in zip(sources, buffers, outputs, strict=True):
        device.compare(source, buffer.parts, flag)
        flag |= (source.view(torch.int16) != output.view(torch.int16)).any()
    assert not flag.item(), "the codec is not exact here; its times mean nothing"
    row["escape_ratio"] = buffers[0].total.item() / (rows * cols)
    return row


def bench_variants(repeats: int) -> list[dict[str, Any]]:
    """Encoder times with other block sizes, on the shapes with short and with long channels."""
    rows_out = []
    for threads, blocks, prefetch in _VARIANTS:
        macros = {**dict(modules.ENCODER.macros), "W12_ENCODE_THREADS": threads}
        macros |= {"W12_ENCODE_BLOCKS": blocks, "W12_ENCODE_PREFETCH": prefetch}
        module = replace(modules.ENCODER, macros=tuple(macros.items()))
        shared = modules.ENCODE_SHARED_BYTES * threads // modules.ENCODE_THREADS
        launcher = launch.prepare(
            module, "w12_encode", block=(threads, 1, 1), device=0,
            options=launch.Options(shared_bytes=shared),
        )  # fmt: skip
        original = device._encoder
        device._encoder = lambda index, aligned, chosen=launcher: chosen
        try:
            for name in ("mlp gate, up", "mlp down", "gdn out, attn o"):
                rows, cols, _ = SHAPES[name]
                found = bench_shape(rows, cols, repeats, 1.0, zeros=0.0)["encode"]
                usage = build.build(module, build.architecture_for(module, launch.capability()))
                rows_out.append(
                    {
                        "threads": threads, "blocks": blocks, "prefetch": prefetch, "shape": name,
                        "registers": usage.usage["w12_encode"].registers,
                        "bf16_bytes_per_s": found["bf16_bytes_per_s"],
                    }
                )  # fmt: skip
        finally:
            device._encoder = original
    return rows_out


def launch_overhead_s(calls: int = 5000) -> dict[str, float]:
    """Host time per call of a bare launcher, and of the whole `decode`, on a tiny matrix."""
    parts = device.encode(weights(16, 64))
    out = device.decode(parts)
    launcher = device._decoder(0, "decode", True)
    arguments, grid = device._decode_arguments(parts)
    works: dict[str, Callable[[], object]] = {
        "launcher": lambda: launcher(grid, *arguments, out.data_ptr()),
        "decode": lambda: device.decode(parts, out),
    }
    result = {}
    for name, work in works.items():
        times = []
        for _ in range(calls // 100):  # short bursts, so that the launch queue never fills
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(100):
                work()
            times.append((time.perf_counter() - begin) / 100)
        result[name] = statistics.median(times)
    return result


def model_sums(shapes: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Kernel time of every linear of the model, each shape's time as often as it occurs."""
    sums = {
        f"{work}_s": sum(shapes[name][work]["time_s"] * n for name, (_, _, n) in SHAPES.items())
        for work in ("encode", "decode", "compare")
    }
    sums["bf16_bytes"] = sum(2 * rows * cols * n for rows, cols, n in SHAPES.values())
    sums["encode_and_compare_s"] = sums["encode_s"] + sums["compare_s"]
    return sums


def show(document: dict[str, Any]) -> None:
    """Print the table."""
    print(f"{document['gpu']}: copy {document['copy_bytes_per_s'] / 1e12:.2f} TB/s read + written")
    head = "".join(f"{work:>18}" for work in ("encode", "decode", "compare"))
    print(f"{'GB/s of BF16 (share of copy)':<34}{head}")
    for name, row in document["shapes"].items():
        cells = "".join(
            f"{row[work]['bf16_bytes_per_s'] / 1e9:>9.0f} ({row[work]['of_copy']:6.1%})"
            for work in ("encode", "decode", "compare")
        )
        print(f"{name:<20}{row['rows']:>7} x{row['cols']:>5}{cells}")
    sums = document["model"]
    times = ", ".join(f"{w} {sums[f'{w}_s'] * 1e3:.1f} ms" for w in ("encode", "decode", "compare"))
    print(f"all linears, {sums['bf16_bytes'] / 1e9:.2f} GB: {times}")
    overhead = document["launch_overhead_s"]
    print(f"host time per launch {overhead['launcher'] * 1e6:.2f} us, "
          f"per decode call {overhead['decode'] * 1e6:.2f} us")  # fmt: skip
    for row in document.get("encoder_variants", []):
        print(f"encoder {row['threads']}x{row['blocks']} prefetch {row['prefetch']} "
              f"({row['registers']} registers) "
              f"{row['shape']}: {row['bf16_bytes_per_s'] / 1e9:.0f} GB/s")  # fmt: skip


def main() -> int:
    """Run everything; well under a minute on an H200."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--tune", action="store_true", help="also time other encoder block sizes")
    options = parser.parse_args()
    torch.manual_seed(0)
    device.warm()
    copy = copy_bandwidth(options.repeats)
    shapes = {
        name: bench_shape(rows, cols, options.repeats, copy, zeros=0.0)
        for name, (rows, cols, _) in SHAPES.items()
    }
    document: dict[str, Any] = {
        "what": "W12 codec on a GPU; bytes of BF16 per second, cold L2, medians of graph replays",
        "command": "python scripts/bench_w12_gpu_codec.py --output FILE",
        "date_utc": datetime.now(UTC).strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "repeats": options.repeats,
        "copy_bytes_per_s": copy,
        "model": model_sums(shapes),
        "shapes": {
            **shapes,
            "gdn in, 1 % zeros": bench_shape(
                *SHAPES["gdn in"][:2], options.repeats, copy, zeros=0.01
            ),
        },
        "launch_overhead_s": launch_overhead_s(),
    }
    if options.tune:
        document["encoder_variants"] = bench_variants(options.repeats)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    show(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
