"""One output shard while it is written: records at once, the small parts after all records.

Records and other tensors go to the file as they come. Windows, escape pointers and escapes are
spooled and written last, wide elements first: their sizes are known only at the end of a tensor,
and they would leave what follows them unaligned. So would tensors of odd length, which wait too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from specpilot_cli.convert_w12.pipeline import HashChain
from specpilot_cli.io.safetensors_stream import (
    NUMPY_DTYPES,
    TensorInfo,
    byte_view,
    tensor_nbytes,
)
from specpilot_cli.io.shard_writer import ShardWriter, TensorSpec
from specpilot_cli.io.spool import Spool
from specpilot_kernels.w12 import layout
from specpilot_kernels.w12.stored import Parts, encoded_specs

ALIGNMENT = 8
# The order in the file of what is written late: elements of 4, 2 and 1 bytes.
_LATE = ("escape_ptr", "escape_at", "odd4", "escape_bits", "odd2", "window", "odd1")


@dataclass(slots=True)
class _Late:
    """Tensors of one kind that wait, one after the other in `spool`."""

    spool: Spool
    specs: list[TensorSpec] = field(default_factory=list)
    begun: int = 0


class OutputShard:
    """A context manager around the writer of one shard; `writer` tells what became of it."""

    def __init__(
        self,
        path: Path,
        longest: Iterable[TensorSpec],
        metadata: Mapping[str, str],
        *,
        resume: bool,
    ) -> None:
        self.name = path.name
        self.writer = ShardWriter(path, longest, metadata, resume=resume)
        self._late = {kind: _Late(Spool(path.parent)) for kind in _LATE}
        self._escapes = 0
        self._waits: _Late | None = None

    def __enter__(self) -> Self:
        self.writer.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._write_late()
        except BaseException as failure:
            self.writer.__exit__(type(failure), failure, failure.__traceback__)
            raise
        else:
            self.writer.__exit__(kind, error, traceback)
        finally:
            for late in self._late.values():
                late.spool.close()

    def add_stripe(self, parts: Parts) -> None:
        """Append one stripe of the tensor under way."""
        self.writer.write(byte_view(parts["records"]))
        # The first pointer is 0; a stripe's own first one repeats the last of the one before.
        first = 0 if self._is_empty("escape_ptr") else 1
        counted_on = parts["escape_ptr"][first:] + np.int32(self._escapes)
        self._late["escape_ptr"].spool.append(byte_view(counted_on))
        for part in ("escape_at", "escape_bits", "window"):
            self._late[part].spool.append(byte_view(parts[part]))
        self._escapes += parts["escape_bits"].size

    def end_encoded(self, info: TensorInfo, chain: HashChain) -> None:
        """End a tensor given by stripes; `chain` has hashed its records, here it gets the rest."""
        specs = encoded_specs(info.name, info.shape, self._escapes)
        for part, spec in zip(layout.PART_SUFFIXES, specs, strict=True):
            if part == "records":
                self.writer.end_tensor(*spec)
                continue
            late = self._late[part]
            for chunk in late.spool.chunks(late.begun):
                chain.update(chunk)
            self._end_late(late, spec)
        self._escapes = 0

    def forget_stripes(self) -> None:
        """Drop the stripes of the tensor under way."""
        self.writer.rewind()
        for late in self._late.values():
            late.spool.cut(late.begun)
        self._escapes = 0

    def begin_stored(self, info: TensorInfo) -> None:
        """Begin a tensor that is carried over; `add_bytes` and `end_stored` follow."""
        width = NUMPY_DTYPES[info.dtype].itemsize
        self._waits = self._late[f"odd{width}"] if info.nbytes % ALIGNMENT else None

    def add_bytes(self, data: memoryview) -> None:
        """Append bytes of the tensor under way."""
        if self._waits is None:
            self.writer.write(data)
        else:
            self._waits.spool.append(data)

    def end_stored(self, info: TensorInfo) -> None:
        """End a tensor that is carried over."""
        spec = (info.name, info.dtype, info.shape)
        if self._waits is None:
            self.writer.end_tensor(*spec)
        else:
            self._end_late(self._waits, spec)

    def _is_empty(self, part: str) -> bool:
        return self._late[part].spool.size_bytes == self._late[part].begun

    @staticmethod
    def _end_late(late: _Late, spec: TensorSpec) -> None:
        late.specs.append(spec)
        late.begun = late.spool.size_bytes

    def _write_late(self) -> None:
        for late in self._late.values():
            start = 0
            for spec in late.specs:
                end = start + tensor_nbytes(*spec[1:])
                for chunk in late.spool.chunks(start, end):
                    self.writer.write(memoryview(chunk))
                self.writer.end_tensor(*spec)
                start = end
