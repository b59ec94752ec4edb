"""Write a safetensors file whose tensor sizes become known only while it is written.

The header comes first in the file but depends on every tensor, so its place is reserved, sized
for the longest header possible, and it is written last, padded with spaces.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from specpilot_cli.io.safetensors_stream import (
    MAX_HEADER_BYTES,
    TensorData,
    encode_header,
    header_bound,
)

TensorSpec = tuple[str, str, tuple[int, ...]]


class ShardWriter:
    """A context manager; the file is complete only when the block ends without an exception.

    It writes `path` in place: call it inside a folder that is not trusted yet. `longest` are
    (name, dtype, shape) of the tensors at their longest, in any order; what is added must not
    need a longer header.
    """

    def __init__(
        self, path: Path, longest: Iterable[TensorSpec], metadata: Mapping[str, str]
    ) -> None:
        self._path = path
        self._metadata = dict(metadata)
        self._reserved = header_bound(longest, self._metadata)
        if self._reserved > MAX_HEADER_BYTES:
            raise ValueError(f"header of {self._reserved} bytes, the limit is {MAX_HEADER_BYTES}")
        self._specs: list[TensorSpec] = []
        self.header = b""

    def __enter__(self) -> Self:
        self._handle = self._path.open("xb")
        self._handle.seek(self._reserved)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._handle:
            if kind is None:
                self._finish()

    def add(self, name: str, tensor: TensorData) -> None:
        """Append one tensor."""
        self._handle.write(tensor.memory())
        self._specs.append((name, tensor.dtype, tensor.shape))

    def _finish(self) -> None:
        short = encode_header(self._specs, self._metadata)
        if len(short) > self._reserved:
            raise ValueError(f"`{self._path.name}`: the header outgrew its reserved place")
        text = short[8:].ljust(self._reserved - 8)
        self.header = len(text).to_bytes(8, "little") + text
        end = self._handle.tell()
        self._handle.seek(0)
        self._handle.write(self.header)
        # Where no tensor follows, the file must still reach its full length.
        self._handle.truncate(max(end, self._reserved))
        self._handle.flush()
        os.fsync(self._handle.fileno())
