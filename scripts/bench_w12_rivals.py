"""Measure W12 beside ZipNN and DFloat11: bits, encoding and decoding speed, on the same tensors.

    pip install --no-deps --target RIVALS/zipnn zipnn==0.5.4 zstandard
    pip install --no-deps --target RIVALS/dfloat11 dfloat11==0.5.0 dahuffman==0.4.2
    python scripts/bench_w12_rivals.py --rivals RIVALS --packages DIR \
        --output docs/measurements/w12_rivals.json

Each codec runs in a process of its own, on one thread, and every round trip is compared as 16-bit
patterns. Rates are bytes of BF16 per second, the median of the repeats after one that does not
count: by the clock, and by the processor time that was used, the fairer one on a shared machine.
ZipNN may change the tensor it is given, so it gets a fresh copy each time, made off the clock.
DFloat11 encodes in a Python loop, so it gets the first rows of each tensor only; it decodes on a
GPU only, so its Huffman code is undone here in Python, for the comparison and without a rate.
A rival that is not installed is skipped, and the result says so.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from w12_inputs import CHECKPOINTS, Bits, fetch, normal_bits

from specpilot_cli.io.json_file import write_json
from specpilot_cli.report.json_out import describe_environment

# What a rival needs to be importable, for the word that it is skipped.
RIVALS = {"w12": "specpilot_kernels", "zipnn": "zipnn", "dfloat11": "dfloat11"}
SAMPLE_WEIGHTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Result:
    """One codec on one tensor; rates in bytes of BF16 per second, None where not measurable."""

    weights: int
    bits_per_weight: float
    identical: bool
    changes_its_input: bool
    encode: dict[str, int]
    decode: dict[str, int] | None


def timed(
    prepare: Callable[[], Any], work: Callable[[Any], Any], nbytes: int, repeats: int
) -> tuple[dict[str, int], Any]:
    """Median rates of `work(prepare())`, `prepare` not counted, and the last result."""
    cpu_s, wall_s, result = [], [], None
    for _ in range(repeats + 1):
        value = prepare()
        wall, cpu = time.perf_counter(), time.process_time()
        result = work(value)
        cpu_s.append(time.process_time() - cpu)
        wall_s.append(time.perf_counter() - wall)
    rates = {
        "cpu_bytes_per_s": round(nbytes / statistics.median(cpu_s[1:])),
        "wall_bytes_per_s": round(nbytes / statistics.median(wall_s[1:])),
    }
    return rates, result


def run_w12(bits: Bits, repeats: int) -> Result:
    """The compiled codec of this repository, to the parts that a folder stores and back."""
    from specpilot_kernels.w12 import codec
    from specpilot_kernels.w12.stored import from_stored, stored_parts

    before = bits.copy()
    encode, parts = timed(
        lambda: bits, lambda given: stored_parts(codec.encode(given)), bits.nbytes, repeats
    )
    decode, back = timed(
        lambda: parts, lambda given: codec.decode(from_stored(bits.shape, given)), bits.nbytes,
        repeats,
    )  # fmt: skip
    return Result(
        weights=bits.size,
        bits_per_weight=8 * sum(array.nbytes for array in parts.values()) / bits.size,
        identical=np.array_equal(back, before),
        changes_its_input=not np.array_equal(bits, before),
        encode=encode,
        decode=decode,
    )


def run_zipnn(bits: Bits, repeats: int) -> Result:
    """ZipNN's torch interface; its own defaults but for the threads."""
    import torch
    from zipnn import ZipNN

    coder = ZipNN(input_format="torch", bytearray_dtype="bfloat16", threads=1)
    given: list[Bits] = []

    def fresh() -> Any:
        given[:] = [bits.copy()]
        return torch.from_numpy(given[0].view(np.int16)).view(torch.bfloat16)

    encode, packed = timed(fresh, coder.compress, bits.nbytes, repeats)
    decode, tensor = timed(lambda: packed, coder.decompress, bits.nbytes, repeats)
    back = tensor.contiguous().view(torch.int16).numpy().view(np.uint16).reshape(bits.shape)
    return Result(
        weights=bits.size,
        bits_per_weight=len(packed) * 8 / bits.size,
        identical=np.array_equal(back, bits),
        changes_its_input=not np.array_equal(given[0], bits),
        encode=encode,
        decode=decode,
    )


def dfloat11_encoder() -> Any:
    """The module that encodes, by its path: importing the package needs CuPy and a GPU."""
    package = importlib.util.find_spec("dfloat11")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).with_name("dfloat11_utils.py")
    spec = importlib.util.spec_from_file_location("dfloat11_utils", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_dfloat11(bits: Bits, repeats: int) -> Result:
    """DFloat11's encoder on the first rows."""
    import torch

    package = dfloat11_encoder()
    rows = bits[: max(1, SAMPLE_WEIGHTS // bits.shape[1])]
    sample = rows.reshape(-1).copy()
    tensor = torch.from_numpy(sample.view(np.int16)).view(torch.bfloat16)
    huffman, _, table = package.get_32bit_codec(package.get_codec(tensor)[1])

    def encode_all(weights: Any) -> Any:
        # 8 bytes a thread and 512 threads a block: what the package's `compress_model` uses.
        return package.encode_weights([weights], huffman, 8, 512)

    encode, parts = timed(lambda: tensor, encode_all, sample.nbytes, min(repeats, 2))
    exponents, rest, positions, gaps, _ = (part.numpy() for part in parts)
    exponent = np.array(huffman.decode(exponents.tobytes()), dtype=np.uint16)
    rest = rest.astype(np.uint16)
    back = (rest & 0x80) << 8 | exponent << 7 | rest & 0x7F
    sizes = [a.nbytes for a in (exponents, parts[1].numpy(), positions, gaps)]
    return Result(
        weights=sample.size,
        bits_per_weight=(sum(sizes) + package.get_luts(table).numel()) * 8 / sample.size,
        identical=np.array_equal(back, rows.reshape(-1)),
        changes_its_input=not np.array_equal(sample, rows.reshape(-1)),
        encode=encode,
        decode=None,
    )


RUNNERS = {"w12": run_w12, "zipnn": run_zipnn, "dfloat11": run_dfloat11}


def worker(name: str, folder: Path, repeats: int) -> None:
    """Run one codec on every tensor of `folder`; rivals print, so the answer goes to a file."""
    found: dict[str, Any] = {}
    with contextlib.redirect_stdout(sys.stderr):
        if importlib.util.find_spec(RIVALS[name]) is None:
            raise SystemExit(f"the package `{RIVALS[name]}` is not installed")
        for file in sorted(folder.glob("*.npy")):
            result = RUNNERS[name](np.load(file), repeats)
            found[file.stem] = {key: getattr(result, key) for key in Result.__slots__}
    (folder / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")


def tensors(packages: Path | None) -> Iterator[tuple[str, str, Bits]]:
    """The normal matrix, and the largest 2-D weight of each checkpoint that can be read."""
    yield "normal", "N(0, 0.02)", normal_bits(4096, 4096)
    for checkpoint in CHECKPOINTS if packages is not None else ():
        try:
            wheels = [fetch(requirement, packages) for requirement in checkpoint.requirements]
            name, dtype, bits = max(checkpoint.read(wheels), key=lambda found: found[2].size)
        except ModuleNotFoundError as error:
            print(f"SKIPPED {checkpoint.name}: needs `{error.name}`", file=sys.stderr)
            continue
        rounded = "" if dtype == "BF16" else f", {dtype} rounded to BF16"
        yield checkpoint.name, f"{checkpoint.name} {name}{rounded}", bits


def run_apart(name: str, folder: Path, rivals: Path | None, repeats: int) -> dict[str, Any] | str:
    """One codec in a process of its own; a text says why there is no result."""
    paths = [str(rivals / name)] if rivals is not None and (rivals / name).is_dir() else []
    environment = dict(
        os.environ,
        PYTHONPATH=os.pathsep.join([*paths, *(p for p in sys.path if p)]),
        OMP_NUM_THREADS="1",
    )
    command = [sys.executable, __file__, "--worker", name, "--folder", str(folder)]
    done = subprocess.run(
        [*command, "--repeats", str(repeats)],
        env=environment, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    return found


def measure(rivals: Path | None, packages: Path | None, repeats: int) -> dict[str, Any]:
    """Every codec on every tensor: {"tensors": [...], "skipped": {codec: why}}."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rows = []
        for name, about, bits in tensors(packages):
            np.save(folder / f"{name}.npy", bits)
            rows.append({"name": name, "about": about, "shape": list(bits.shape)})
        skipped: dict[str, str] = {}
        for codec in RUNNERS:
            found = run_apart(codec, folder, rivals, repeats)
            if isinstance(found, str):
                skipped[codec] = found
                print(f"SKIPPED {codec}: {found}", file=sys.stderr)
                continue
            for row in rows:
                row[codec] = found[str(row["name"])]
    return {"tensors": rows, "skipped": skipped}


def show(document: dict[str, Any]) -> None:
    """One line per tensor and codec."""
    for row in document["tensors"]:
        for codec in RUNNERS:
            if codec in row:
                found = row[codec]
                rates = [found["encode"], found["decode"] or {}]
                text = [f"{r['cpu_bytes_per_s'] / 1e6:9.1f}" if r else "        –" for r in rates]
                same = "identical" if found["identical"] else "DIFFERENT"
                print(
                    f"{row['name']:22} {codec:9} {found['bits_per_weight']:8.4f} bits "
                    f"{' '.join(text)} MB/s per CPU second, {same}"
                )


def main() -> int:
    """Run everything; about half a minute. 1 if bits were lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rivals", type=Path, help="folder with one sub-folder per rival")
    parser.add_argument("--packages", type=Path, help="folder for the checkpoints' wheels")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--worker", choices=RUNNERS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.folder, options.repeats)
        return 0
    load = os.getloadavg()[0]
    document = {
        "what": "W12, ZipNN and DFloat11 on the same tensors, one thread each",
        "command": "python scripts/bench_w12_rivals.py --rivals DIR --packages DIR --output FILE",
        "date_utc": datetime.now(UTC).strftime("%Y-%m-%d"),
        "environment": {**describe_environment(), "load_average_before": load},
        "repeats": options.repeats,
        "dfloat11": "the encoder alone (`dfloat11_utils.py`), on the first rows: the package needs "
        "CuPy and a GPU to import and to decode",
        **measure(options.rivals, options.packages, options.repeats),
    }
    if options.output is not None:
        write_json(options.output, document, force=True)
    show(document)
    results = [row[codec] for row in document["tensors"] for codec in RUNNERS if codec in row]
    return 0 if all(result["identical"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
