"""Measure the W12 codec on this GPU and write the result as JSON.

    python scripts/bench_w12_gpu_codec.py --output docs/measurements/w12_gpu_codec_h200.json

Shapes are the linears of Qwen3.8-27B as its checkpoint stores them; contents N(0, 0.02) as BF16.
The model's time is each shape's time as often as the shape occurs. Each time is the median over
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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from specpilot_kernels import build, launch
from specpilot_kernels.timing import in_turns
from specpilot_kernels.w12 import device, modules

_HIDDEN, _MLP, _VOCAB = 5120, 17408, 248320
# name: (rows, cols, how many of them the model has). The two 48-row projections of each GDN layer
# are not here: W12 would make them larger, so they stay BF16.
SHAPES: dict[str, tuple[int, int, int]] = {
    "mlp gate, up": (_MLP, _HIDDEN, 2 * 64),
    "mlp down": (_HIDDEN, _MLP, 64),
    "gdn qkv": (10240, _HIDDEN, 48),
    "gdn z": (6144, _HIDDEN, 48),
    "gdn out, attn o": (_HIDDEN, 6144, 48 + 16),
    "attn q and gate": (12288, _HIDDEN, 16),
    "attn k, v": (1024, _HIDDEN, 2 * 16),
    "lm head": (_VOCAB, _HIDDEN, 1),
}
_COLD_BYTES = 400 << 20
# threads per block, blocks per multiprocessor, tiles fetched ahead, histograms per warp.
_VARIANTS = (
    (1024, 1, 0, 1), (1024, 1, 0, 2), (1024, 1, 0, 4), (1024, 1, 1, 1),
    (512, 2, 0, 1), (512, 2, 0, 2), (512, 2, 1, 1), (512, 1, 1, 1),
)  # fmt: skip


def copy_bandwidth(repeats: int) -> float:
    """Bytes read plus written per second by an elementwise kernel over 1 GiB.

    Not by `copy_`: in a graph that becomes a copy-engine transfer, which is slower than kernels.
    """
    source = torch.randint(0, 1 << 30, (1 << 28,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    works = [lambda: torch.bitwise_not(source, out=target)] * 2
    return 2 * source.nbytes / in_turns({"copy": works}, repeats)["copy"]


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
    for name, time_s in in_turns(timed, repeats).items():
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
    architecture = build.architecture_for(modules.ENCODER, launch.capability())
    for threads, blocks, ahead, copies in _VARIANTS:
        module = modules.encoder(threads=threads, blocks=blocks, prefetch=ahead, copies=copies)
        launcher = launch.prepare(
            module, "w12_encode", block=(threads, 1, 1), device=0,
            options=launch.Options(shared_bytes=modules.encode_shared_bytes(threads, copies)),
        )  # fmt: skip
        usage = build.build(module, architecture).usage["w12_encode"]
        for name in ("mlp gate, up", "mlp down", "gdn out, attn o"):
            rows, cols, _ = SHAPES[name]
            contents = {"normal": lambda r=rows, c=cols: weights(r, c)}
            (rate,) = encode_rates(contents, launcher, repeats).values()
            rows_out.append(
                {
                    "threads": threads, "blocks": blocks, "prefetch": ahead, "copies": copies,
                    "shape": name, "registers": usage.registers, "bf16_bytes_per_s": rate,
                }
            )  # fmt: skip
    return rows_out


def encode_rates(
    contents: dict[str, Callable[[], torch.Tensor]], launcher: launch.Launcher, repeats: int
) -> dict[str, float]:
    """Bytes of BF16 per second that a launcher of the encoder reaches on each kind of contents."""
    rates = {}
    original = device._encoder
    device._encoder = lambda index, aligned: launcher
    try:
        for name, make in contents.items():
            first = make()
            sources = [first] + [make() for _ in range(max(1, _COLD_BYTES // first.nbytes))]
            room = first.numel() // 256
            buffers = [device.allocate(first.shape, 0, capacity=room) for _ in sources]
            works = [
                lambda s=s, b=b: device.encode_into(s, b)
                for s, b in zip(sources, buffers, strict=True)
            ]
            rates[name] = first.nbytes / in_turns({name: works}, repeats)[name]
            flag = torch.zeros(1, dtype=torch.int32, device="cuda")
            for source, buffer in zip(sources, buffers, strict=True):
                device.compare(source, buffer.parts, flag)
            assert not flag.item(), f"the encoder is not exact on {name}"
    finally:
        device._encoder = original
    return rates


def bench_contents(repeats: int) -> dict[str, float]:
    """Encoder rates by how many exponents occur, without escapes: what counting them costs."""
    rows, cols, _ = SHAPES["gdn qkv"]

    def spread(exponents: int) -> torch.Tensor:
        bits = torch.randint(0, 1 << 15, (rows, cols), dtype=torch.int32, device="cuda")
        fields = 112 + bits // 128 % exponents
        return (fields * 128 + bits % 128).to(torch.int16)

    contents: dict[str, Callable[[], torch.Tensor]] = {
        f"{n} exponents": lambda n=n: spread(n) for n in (1, 2, 4, 8, 16)
    }
    contents["normal"] = lambda: weights(rows, cols)
    return encode_rates(contents, device._encoder(0, True), repeats)


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
    sums["tensors"] = sum(n for _, _, n in SHAPES.values())
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
    print("linears of Qwen3.8-27B, as stored:")
    for name, (rows, cols, count) in SHAPES.items():
        print(
            f"{name:<20}{rows:>7} x{cols:>6} x{count:>4} = {2 * rows * cols * count / 1e9:6.2f} GB"
        )
    print(f"{'all':<20}{sums['tensors']:>21.0f} = {sums['bf16_bytes'] / 1e9:6.2f} GB: {times}; "
          f"encode + compare {sums['encode_and_compare_s']:.4f} s")  # fmt: skip
    overhead = document["launch_overhead_s"]
    print(f"host time per launch {overhead['launcher'] * 1e6:.2f} us, "
          f"per decode call {overhead['decode'] * 1e6:.2f} us")  # fmt: skip
    for row in document.get("encoder_variants", []):
        print(f"encoder {row['threads']}x{row['blocks']} prefetch {row['prefetch']} "
              f"copies {row['copies']} ({row['registers']} registers) "
              f"{row['shape']}: {row['bf16_bytes_per_s'] / 1e9:.0f} GB/s")  # fmt: skip
    for name, rate in document.get("encoder_contents", {}).items():
        print(f"encoder, {name}: {rate / 1e9:.0f} GB/s")


def main() -> int:
    """Run everything; well under a minute on an H200."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--tune", action="store_true", help="also time encoder variants")
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
        "model_shapes": {name: list(shape) for name, shape in SHAPES.items()},
        "shapes": {
            **shapes,
            "gdn qkv, 1 % zeros": bench_shape(
                *SHAPES["gdn qkv"][:2], options.repeats, copy, zeros=0.01
            ),
        },
        "launch_overhead_s": launch_overhead_s(),
    }
    if options.tune:
        document["encoder_variants"] = bench_variants(options.repeats)
        document["encoder_contents"] = bench_contents(options.repeats)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    show(document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
