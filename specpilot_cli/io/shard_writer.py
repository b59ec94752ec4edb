"""Write a safetensors file whose tensor sizes become known only while it is written.

The header comes first in the file but depends on every tensor, so its place is reserved, sized
for the longest header possible, and it is written last, padded with spaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from specpilot_cli.errors import InputError
from specpilot_cli.io.append_file import AppendFile
from specpilot_cli.io.safetensors_stream import (
    MAX_HEADER_BYTES,
    encode_header,
    header_bound,
    tensor_nbytes,
)

TensorSpec = tuple[str, str, tuple[int, ...]]


def reserved_bytes(name: str, longest: Iterable[TensorSpec], metadata: Mapping[str, str]) -> int:
    """Return the room that the header of the shard `name` gets, see `ShardWriter`.

    InputError: more than safetensors allows.
    """
    reserved = header_bound(longest, metadata)
    # The limit is on the JSON text, which the 8 bytes of its length come before.
    if reserved - 8 > MAX_HEADER_BYTES:
        raise InputError(
            f"`{name}` would need a header of {reserved - 8} bytes, the limit is "
            f"{MAX_HEADER_BYTES}",
            where=name,
            hint="spread the tensors over more files: a small enough --shard-size",
        )
    return reserved


class ShardWriter:
    """A context manager; the file is complete only when the block ends without an exception.

    It writes `path` in place: call it inside a folder that is not trusted yet. `longest` are
    (name, dtype, shape) of the tensors at their longest, in any order; what is added must not
    need a longer header. InputError: that header is longer than safetensors allows. With
    `resume`, an existing file is compared first and kept as far as it is what would be written.

    After the block: `header` is the header as written, `kept` whether the file was there
    already, byte for byte, and `size_bytes` its length.
    """

    def __init__(
        self,
        path: Path,
        longest: Iterable[TensorSpec],
        metadata: Mapping[str, str],
        *,
        resume: bool = False,
    ) -> None:
        self._path = path
        self._resume = resume
        self._metadata = dict(metadata)
        self._reserved = reserved_bytes(path.name, longest, self._metadata)
        self._specs: list[TensorSpec] = []
        self.header = b""
        self.kept = False
        self.size_bytes = 0

    def __enter__(self) -> Self:
        self._file = AppendFile(self._path, self._reserved, resume=self._resume)
        self._closed_at = self._reserved
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()

    def write(self, data: memoryview) -> None:
        """Append bytes of a tensor that `end_tensor` will name."""
        self._file.append(data)

    def end_tensor(self, name: str, dtype: str, shape: tuple[int, ...]) -> None:
        """Name the tensor whose bytes were written since the last one ended."""
        written = self._file.position - self._closed_at
        if written != tensor_nbytes(dtype, shape):
            raise ValueError(f"`{name}`: {dtype} {list(shape)} cannot be {written} bytes")
        self._closed_at = self._file.position
        self._specs.append((name, dtype, shape))

    def rewind(self) -> None:
        """Forget what was written since the last tensor ended."""
        self._file.rewind(self._closed_at)

    def _finish(self) -> None:
        if self._file.position != self._closed_at:
            raise ValueError(f"`{self._path.name}`: bytes that belong to no tensor")
        short = encode_header(self._specs, self._metadata)
        if len(short) > self._reserved:
            raise ValueError(f"`{self._path.name}`: the header outgrew its reserved place")
        text = short[8:].ljust(self._reserved - 8)
        self.header = len(text).to_bytes(8, "little") + text
        self.size_bytes = self._file.position
        self.kept = self._file.finish(self.header)
