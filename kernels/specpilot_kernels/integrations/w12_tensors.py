"""The tensors of a W12 folder as lazy safetensors slices that decode when they are read.

A loader that takes a dictionary of slices sees the source checkpoint: its names, dtypes and
shapes, tied and fused and stacked as they were. Only reading a tensor costs memory: its BF16
bytes, which the loader keeps, and for the moment of decoding nothing else, since the encoded
parts stay in the mapped file. Tensors may be read from several threads.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from specpilot_kernels.w12 import codec, layout
from specpilot_kernels.w12.encoded import MalformedW12
from specpilot_kernels.w12.manifest import TensorEntry, W12FolderError, read_entries
from specpilot_kernels.w12.stored import from_stored


class LazyTensor:
    """One tensor of the source checkpoint; indexing it gives exactly the source's bits.

    Has the three methods of a safetensors slice that loaders call.
    """

    def __init__(self, entry: TensorEntry, file: Any, path: Path) -> None:
        self._entry = entry
        self._file = file
        self._path = path

    def get_dtype(self) -> str:
        """The source's dtype as safetensors names it."""
        return self._entry.dtype

    def get_shape(self) -> list[int]:
        """The source's shape."""
        return list(self._entry.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the tensor, or the part that `index` selects, on the CPU.

        W12FolderError names the tensor if its bytes are not the source's.
        """
        tensor = self._decoded() if self._entry.encoding == "w12" else self._stored()
        return tensor if index is Ellipsis else tensor[index]

    def _stored(self) -> torch.Tensor:
        tensor = self._file.get_slice(self._entry.name)[...]
        self._check([tensor.contiguous().reshape(-1).view(torch.uint8).numpy()])
        return tensor

    def _decoded(self) -> torch.Tensor:
        parts = {
            part: self._file.get_tensor(self._entry.name + suffix).numpy()
            for part, suffix in layout.PART_SUFFIXES.items()
        }
        try:
            bits = codec.decode(from_stored(self._entry.shape, parts))
        except MalformedW12 as error:
            raise self._damaged(str(error)) from error
        self._check([part.reshape(-1).view(np.uint8) for part in parts.values()])
        return torch.from_numpy(bits).view(torch.bfloat16)

    def _check(self, stored: Sequence[Any]) -> None:
        checksum = 0
        for raw in stored:
            checksum = zlib.crc32(raw, checksum)
        if f"{checksum:08x}" != self._entry.stored_crc32:
            raise self._damaged("its bytes are not what was converted")

    def _damaged(self, what: str) -> W12FolderError:
        return W12FolderError(
            f"tensor `{self._entry.name}` in `{self._path}` is damaged: {what}; copy the folder "
            "again, or convert the checkpoint again"
        )


def holds_records(files: Sequence[str | Path]) -> bool:
    """Whether one of the checkpoint's files is a shard of a W12 folder that holds records.

    Only headers are read. A file that is no safetensors file holds none. One name that ends like
    a part proves nothing, so a second part of the same tensor must be there.
    """
    return any(_has_parts(Path(file)) for file in files if str(file).endswith(".safetensors"))


def _has_parts(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            names = set(file.keys())
    except (OSError, SafetensorError):
        return False
    seen: set[str] = set()
    for suffix in layout.PART_SUFFIXES.values():
        tensors = {name.removesuffix(suffix) for name in names if name.endswith(suffix)}
        if seen & tensors:
            return True
        seen |= tensors
    return False


def open_tensors(shards: Sequence[str | Path]) -> dict[str, LazyTensor]:
    """Return name → lazy tensor of the W12 folder whose safetensors files are `shards`.

    W12FolderError: see `read_entries`; a shard that the manifest does not list or that is not
    among `shards`; a shard that cannot be read; a tensor or part of one that is missing, left
    over, or of another dtype or shape than the manifest says.
    """
    paths = {Path(shard).name: Path(shard) for shard in shards}
    entries = read_entries(next(iter(paths.values())).parent)
    listed = {entry.shard for entry in entries}
    for name in sorted(listed ^ set(paths)):
        what = "is missing" if name in listed else "is not part of the conversion"
        raise W12FolderError(f"shard `{name}` {what}")
    files = {name: _open(path) for name, path in paths.items()}
    names = {name: set(file.keys()) for name, file in files.items()}
    for entry in entries:
        _check_entry(entry, files[entry.shard], names[entry.shard], paths[entry.shard])
        names[entry.shard] -= {name for name, _, _ in entry.stored_specs()}
    for shard, left_over in names.items():
        if left_over:
            raise W12FolderError(f"`{min(left_over)}` in `{paths[shard]}` is not in the manifest")
    return {
        entry.name: LazyTensor(entry, files[entry.shard], paths[entry.shard]) for entry in entries
    }


def _open(path: Path) -> Any:
    if path.exists() and not path.is_file():
        raise W12FolderError(f"cannot read `{path}`: it is not a regular file")
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise W12FolderError(f"cannot read `{path}`: {error}") from error


def _check_entry(entry: TensorEntry, file: Any, present: set[str], path: Path) -> None:
    if entry.encoding != "stored" and (entry.encoding, entry.dtype) != ("w12", "BF16"):
        raise W12FolderError(f"`{entry.name}`: unknown encoding {entry.encoding!r} {entry.dtype}")
    readable = len(entry.shape) in (2, 3) and 0 < entry.shape[-1] <= layout.MAX_INPUTS
    if entry.encoding == "w12" and not readable:
        raise W12FolderError(f"`{entry.name}`: no W12 tensor has the shape {list(entry.shape)}")
    for name, dtype, shape in entry.stored_specs():
        if name not in present:
            raise W12FolderError(f"`{name}` is missing in `{path}`")
        found = file.get_slice(name)
        if (found.get_dtype(), tuple(found.get_shape())) != (dtype, shape):
            raise W12FolderError(
                f"`{name}` in `{path}` is {found.get_dtype()} {list(found.get_shape())}, "
                f"the manifest says {dtype} {list(shape)}"
            )
