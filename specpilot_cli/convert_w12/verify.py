"""Check a W12 folder: every byte against its manifest, and on request every bit against the source.

Two kinds of fault differ: a *problem* is content that is not what was converted (verdict
mismatch); a folder whose structure cannot be trusted at all is an InputError.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError
from specpilot_cli.io.hashing import sha256_file
from specpilot_cli.io.hf_folder import HfFolder, open_hf_folder
from specpilot_cli.io.safetensors_stream import SafetensorsFile, byte_view
from specpilot_cli.io.w12_folder import W12Folder, parts_digest
from specpilot_cli.schema.w12_manifest import MANIFEST_NAME, W12Tensor
from specpilot_cli.ui import Reporter, SilentReporter
from specpilot_kernels.w12 import codec
from specpilot_kernels.w12.encoded import MalformedW12


@dataclass(frozen=True, slots=True)
class Problem:
    """One tensor or file that is not what was converted."""

    kind: str
    name: str
    what: str


@dataclass(frozen=True, slots=True)
class Verification:
    """What was checked and what was wrong.

    compared: tensors compared bit for bit with the source checkpoint; 0 without one.
    unknown_files: files the manifest does not list; they are not part of the model.
    """

    tensors: int
    converted: int
    files: int
    compared: int
    problems: tuple[Problem, ...]
    unknown_files: tuple[str, ...]

    @property
    def verdict(self) -> str:
        """`identical` or `mismatch`."""
        return "mismatch" if self.problems else "identical"


def verify_folder(
    path: Path,
    against: Path | None = None,
    *,
    threads: int = 1,
    reporter: Reporter = SilentReporter(),
) -> Verification:
    """Check the W12 folder at `path`, and with `against` compare it with that checkpoint.

    InputError: an unfinished or malformed folder, a safetensors file the manifest does not
    know, or a source that cannot be read.
    """
    source = _Source(against) if against is not None else None
    problems: list[Problem] = []
    with W12Folder(path) as opened:
        unknown = _unknown_files(opened)
        tensors = opened.manifest.tensors
        if source is not None:
            problems += source.name_problems({tensor.name for tensor in tensors})
        for number, tensor in enumerate(tensors, start=1):
            found = _check_tensor(opened, tensor, source, threads)
            if found is not None:
                problems.append(Problem("tensor", tensor.name, found))
            reporter.progress("tensors", number, len(tensors))
        for file in opened.manifest.files:
            what = _check_file(path / file.path, file.sha256)
            if what is not None:
                problems.append(Problem("file", file.path, what))
    return Verification(
        tensors=len(tensors),
        converted=sum(tensor.encoding == "w12" for tensor in tensors),
        files=len(opened.manifest.files),
        compared=source.compared if source is not None else 0,
        problems=tuple(problems),
        unknown_files=unknown,
    )


def _check_tensor(
    opened: W12Folder, tensor: W12Tensor, source: _Source | None, threads: int
) -> str | None:
    """Return what is wrong with `tensor`, or None."""
    if tensor.encoding == "w12":
        encoded = opened.encoded(tensor)
        intact = parts_digest(encoded) == tensor.parts_sha256
        try:
            bits: npt.NDArray[Any] = codec.decode(encoded, threads=threads)
        except MalformedW12 as error:
            return f"the stored parts were altered: {error}"
        if not intact:
            return "the stored parts were altered"
    else:
        bits = opened.stored(tensor)
    if hashlib.sha256(byte_view(bits)).hexdigest() != tensor.sha256:
        return "its bytes are not the source's" + _source_difference(tensor, bits, source)
    return source.difference(tensor, bits) if source is not None else None


def _source_difference(tensor: W12Tensor, bits: npt.NDArray[Any], source: _Source | None) -> str:
    found = source.difference(tensor, bits) if source is not None else None
    return "" if found is None else f": {found}"


def _check_file(path: Path, sha256: str) -> str | None:
    if not path.is_file():
        return "missing"
    return None if sha256_file(path) == sha256 else "altered"


def _unknown_files(opened: W12Folder) -> tuple[str, ...]:
    manifest = opened.manifest
    shards = {shard.name for shard in manifest.shards}
    known = {*shards, *(file.path for file in manifest.files), MANIFEST_NAME}
    found = (
        file.relative_to(opened.path).as_posix()
        for file in opened.path.rglob("*")
        if not file.is_dir()
    )
    unknown = tuple(sorted(name for name in found if name not in known))
    stray = next((name for name in unknown if name.endswith(".safetensors")), None)
    if stray is not None:
        raise InputError(
            f"`{stray}` is not part of the conversion, but an engine may load it",
            where=str(opened.path),
            hint="move it out of the folder",
        )
    return unknown


class _Source:
    """The checkpoint to compare with; counts the tensors it compared."""

    def __init__(self, path: Path) -> None:
        self.folder: HfFolder = open_hf_folder(path)
        self.compared = 0
        self._where = {info.name: shard for shard, info in self.folder.tensors}

    def name_problems(self, names: set[str]) -> list[Problem]:
        missing = [name for name in self._where if name not in names]
        return [Problem("tensor", name, "in the source, not in the W12 folder") for name in missing]

    def difference(self, tensor: W12Tensor, bits: npt.NDArray[Any]) -> str | None:
        """Return how `bits` differ from the source's bytes, or None if they do not."""
        shard = self._where.get(tensor.name)
        if shard is None:
            return "not in the source"
        with SafetensorsFile(self.folder.path / shard) as file:
            info = file.info(tensor.name)
            if (info.dtype, list(info.shape)) != (tensor.dtype, tensor.shape):
                return f"the source has {info.dtype} {list(info.shape)}"
            expected = file.read_array(tensor.name)
        self.compared += 1
        return _describe_difference(bits, expected)


def _describe_difference(actual: npt.NDArray[Any], expected: npt.NDArray[Any]) -> str | None:
    # Unsigned integers of the same width: float comparison would pass a flipped zero sign.
    width = np.dtype(f"u{expected.dtype.itemsize}")
    differs = actual.reshape(-1).view(width) != expected.reshape(-1).view(width)
    count = int(np.count_nonzero(differs))
    if count == 0:
        return None
    first = np.unravel_index(int(np.argmax(differs)), expected.shape)
    place = ", ".join(str(int(index)) for index in first)
    return f"{count} of {expected.size} elements differ from the source, the first at [{place}]"
