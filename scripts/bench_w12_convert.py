"""Measure whole conversions against copying the same bytes, on the same disk in the same run.

    python scripts/bench_w12_convert.py --output docs/measurements/w12_convert.json

Two synthetic checkpoints of N(0, 0.02) weights are made below `--folder`: one of 4 GB in shards,
and one around a single 248,320 x 5,120 matrix. Each round copies the first with `cp` and an fsync
per file, then converts, verifies and restores it, each as a process of its own. Before every step
the files it reads are dropped from the page cache (POSIX_FADV_DONTNEED), and nothing is reflinked.
Peak memory is the child's ru_maxrss. Needs 13 GB of disk and some minutes.

What bounds the steps is measured beside them: sha256, encode-and-compare and decode rates of one
core, and the disk's sequential rates.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specpilot_cli.io.append_file import AppendFile
from specpilot_cli.io.json_file import write_json
from specpilot_cli.io.safetensors_stream import TensorData, bf16_data, write_safetensors
from specpilot_cli.report.json_out import describe_environment
from specpilot_cli.settings import available_cores
from specpilot_kernels.w12 import layout
from specpilot_kernels.w12.codec import CpuCodec

_POOL = 1 << 25
_HUGE = (248_320, 5120)
_TINY = (256, 256)


@dataclass(frozen=True, slots=True)
class Step:
    """One child process: seconds of wall and processor time, and its peak memory.

    others_cpu_s: processor seconds that everything else on the machine used meanwhile.
    """

    wall_s: float
    cpu_s: float
    others_cpu_s: float
    peak_rss_bytes: int


class Weights:
    """N(0, 0.02) BF16 patterns that repeat after 32 M, at another place in every tensor."""

    def __init__(self) -> None:
        values = np.random.default_rng(0).standard_normal(_POOL, dtype=np.float32)
        values *= np.float32(0.02)
        self._pool = (values.view(np.uint32) >> 16).astype(np.uint16)
        self._shift = 0

    def tensor(self, *shape: int) -> TensorData:
        """Return the next tensor."""
        self._shift = (self._shift + 1_000_003) % _POOL
        rolled = np.roll(self._pool, -self._shift)
        return bf16_data(np.resize(rolled, shape))


def layer(weights: Weights, number: int) -> dict[str, TensorData]:
    """One decoder layer of the Qwen or Llama kind, 340 MB."""
    prefix = f"model.layers.{number}."
    shapes = {
        "self_attn.q_proj": (4096, 4096),
        "self_attn.k_proj": (1024, 4096),
        "self_attn.v_proj": (1024, 4096),
        "self_attn.o_proj": (4096, 4096),
        "mlp.gate_proj": (10240, 4096),
        "mlp.up_proj": (10240, 4096),
        "mlp.down_proj": (4096, 10240),
        "input_layernorm": (4096,),
        "post_attention_layernorm": (4096,),
    }
    return {f"{prefix}{name}.weight": weights.tensor(*shape) for name, shape in shapes.items()}


def make_checkpoint(folder: Path, kind: str, layers: int) -> None:
    """Write a sharded checkpoint: `layers`, a `huge` matrix, or a `tiny` one."""
    weights = Weights()
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "synthetic"}', encoding="utf-8")
    shards: Iterator[dict[str, TensorData]]
    if kind == "layers":
        groups = (range(first, min(first + 3, layers)) for first in range(0, layers, 3))
        shards = ({k: t for n in group for k, t in layer(weights, n).items()} for group in groups)
    else:
        shards = iter([{"lm_head.weight": weights.tensor(*(_HUGE if kind == "huge" else _TINY))}])
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05}.safetensors"
        write_safetensors(folder / name, tensors, {"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")


def make(folder: Path, kind: str, layers: int = 0) -> int:
    """Make a checkpoint in a child process; returns the bytes of its shards.

    Linux counts what a parent held when it started a child to the child's peak memory, so this
    process must stay small.
    """
    run(sys.executable, __file__, "--make", kind, "--layers", str(layers), "--output", folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def forget(*folders: Path) -> None:
    """Flush the files of these folders and drop them from the page cache."""
    for file in (file for folder in folders for file in folder.rglob("*") if file.is_file()):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def run(*command: str | Path) -> Step:
    """Run a child process; CalledProcessError if it fails."""
    begin, busy_s = time.perf_counter(), machine_busy_s()
    child = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    wall_s = time.perf_counter() - begin
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    cpu_s = usage.ru_utime + usage.ru_stime
    others_s = max(0.0, machine_busy_s() - busy_s - cpu_s)
    return Step(wall_s, cpu_s, others_s, usage.ru_maxrss * 1024)


def machine_busy_s() -> float:
    """Processor seconds of all programs since the machine started."""
    user, nice, system = Path("/proc/stat").read_text(encoding="ascii").split()[1:4]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def copy(source: Path, target: Path) -> Step:
    """Copy with `cp`, then fsync every file."""
    step = run("cp", "-r", "--reflink=never", source, target)
    begin = time.perf_counter()
    for file in target.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return replace(step, wall_s=step.wall_s + time.perf_counter() - begin)


def specpilot(*words: str | Path) -> Step:
    """Run a specpilot command."""
    return run(sys.executable, "-m", "specpilot_cli", *words, "--quiet")


def one_round(source: Path, work: Path, *, with_copy: bool) -> dict[str, Step]:
    """Copy, convert, verify and restore; nothing stays in `work`."""
    steps: dict[str, Step] = {}
    packed, back = work / "w12", work / "back"
    if with_copy:
        forget(source)
        steps["copy"] = copy(source, work / "copy")
        shutil.rmtree(work / "copy")
    forget(source)
    steps["convert"] = specpilot("convert-w12", source, "-o", packed)
    forget(packed)
    steps["verify"] = specpilot("w12", "verify", packed)
    forget(packed)
    steps["restore"] = specpilot("w12", "restore", packed, "-o", back)
    for file in source.glob("*.safetensors"):
        with file.open("rb") as one, (back / file.name).open("rb") as other:
            same = hashlib.file_digest(one, "sha256").digest()
            assert hashlib.file_digest(other, "sha256").digest() == same, file.name
    shutil.rmtree(packed)
    shutil.rmtree(back)
    return steps


def cpu_rate(work: Any, nbytes: int) -> int:
    """Bytes per processor-second of `work`, median of 7 after a warm-up."""
    work()
    seconds = []
    for _ in range(7):
        begin = time.process_time()
        work()
        seconds.append(time.process_time() - begin)
    return round(nbytes / statistics.median(seconds))


def bounds(work: Path) -> dict[str, int]:
    """Return what one core and the disk can do, in bytes per second."""
    bits = np.asarray(Weights().tensor(1024, 4096).data, dtype=np.uint16)
    codec = CpuCodec()
    row_blocks, col_blocks = layout.grid(*bits.shape)
    records = np.empty((row_blocks, col_blocks, layout.RECORD_BYTES), np.uint8)
    encoded = codec.encode_stripe(bits, records, max_escapes=bits.size)
    assert encoded is not None
    decoded: npt.NDArray[np.uint16] = np.empty_like(bits)

    def encode_and_compare() -> None:
        again = codec.encode_stripe(bits, records, max_escapes=bits.size)
        assert again is not None
        assert codec.matches_stripe(bits, again)

    raw = bits.reshape(-1).view(np.uint8).data
    rates = {
        "sha256_cpu_bytes_per_s": cpu_rate(lambda: hashlib.sha256(raw).digest(), bits.nbytes),
        "encode_and_compare_cpu_bytes_per_s": cpu_rate(encode_and_compare, bits.nbytes),
        "decode_cpu_bytes_per_s": cpu_rate(
            lambda: codec.decode_stripe(encoded, decoded), bits.nbytes
        ),
    }
    return rates | disk_rates(work / "disk", raw)


def disk_rates(path: Path, raw: memoryview) -> dict[str, int]:
    """Write 2 GiB as the converter does and read them back cold."""
    pieces = (2 << 30) // raw.nbytes
    begin = time.perf_counter()
    file = AppendFile(path, 0)
    for _ in range(pieces):
        file.append(raw)
    file.finish(b"")
    written = time.perf_counter()
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    buffer = bytearray(raw.nbytes)
    for piece in range(pieces):
        os.preadv(descriptor, [buffer], piece * raw.nbytes)
    read = time.perf_counter()
    os.close(descriptor)
    path.unlink()
    nbytes = pieces * raw.nbytes
    return {
        "disk_write_bytes_per_s": round(nbytes / (written - begin)),
        "disk_read_bytes_per_s": round(nbytes / (read - written)),
    }


def summary(rounds: list[dict[str, Step]], nbytes: int) -> dict[str, Any]:
    """Return every step's values, and medians; ratios are of the same round."""
    steps: dict[str, Any] = {}
    for name in rounds[0]:
        measured = [one[name] for one in rounds]
        steps[name] = {
            "wall_s": [round(step.wall_s, 2) for step in measured],
            "cpu_s": [round(step.cpu_s, 2) for step in measured],
            "others_cpu_s": [round(step.others_cpu_s, 2) for step in measured],
            "peak_rss_bytes": max(step.peak_rss_bytes for step in measured),
            "bytes_per_s": round(nbytes / statistics.median(s.wall_s for s in measured)),
        }
        if "copy" in rounds[0] and name != "copy":
            ratios = [one[name].wall_s / one["copy"].wall_s for one in rounds]
            steps[name]["copy_time_ratio"] = [round(ratio, 2) for ratio in ratios]
            steps[name]["copy_time_ratio_median"] = round(statistics.median(ratios), 2)
    return steps


def measure(work: Path, rounds: int, layers: int) -> dict[str, Any]:
    """Make both checkpoints, one after the other, and run every step."""
    sharded, huge, tiny = work / "sharded", work / "huge", work / "tiny"
    make(tiny, "tiny")
    one_round(tiny, work, with_copy=False)  # From here on compiled code comes from a cache.
    nbytes = make(sharded, "layers", layers)
    loads = [os.getloadavg()[0]]
    found = [one_round(sharded, work, with_copy=True) for _ in range(rounds)]
    loads.append(os.getloadavg()[0])
    shutil.rmtree(sharded)
    huge_bytes = make(huge, "huge")
    large = one_round(huge, work, with_copy=False)
    shutil.rmtree(huge)
    return {
        "load_average_before_and_after": [round(load, 2) for load in loads],
        "sharded": {
            "checkpoint": f"{layers} layers in shards of 3, no embedding",
            "source_bytes": nbytes,
            "rounds": rounds,
            "steps": summary(found, nbytes),
        },
        "huge_tensor": {
            "checkpoint": f"one tensor of {_HUGE[0]} x {_HUGE[1]}",
            "source_bytes": huge_bytes,
            "steps": summary([large], huge_bytes),
        },
        "bounds": bounds(work),
    }


def main() -> int:
    """Run everything and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--make", choices=("layers", "huge", "tiny"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make_checkpoint(options.output, options.make, options.layers)
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        measured = measure(Path(work), options.rounds, options.layers)
    document = {
        "what": "convert-w12, w12 verify and w12 restore against cp and fsync of the same bytes",
        "command": "python scripts/bench_w12_convert.py --output FILE",
        "date_utc": datetime.now(UTC).strftime("%Y-%m-%d"),
        "environment": {**describe_environment(), "processors": available_cores()},
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cache": "files read are dropped with POSIX_FADV_DONTNEED before each step",
        **measured,
    }
    write_json(options.output, document, force=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
