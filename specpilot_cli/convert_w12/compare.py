"""Compare decoded tensors with those of a checkpoint, as bit patterns and piece by piece."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from specpilot_cli.io.hf_folder import HfFolder, open_hf_folder
from specpilot_cli.io.safetensors_stream import NUMPY_DTYPES, SafetensorsFile, TensorInfo
from specpilot_cli.schema.w12_manifest import W12Tensor


@dataclass(frozen=True, slots=True)
class Problem:
    """A tensor, a file or a source shard that is not what was converted.

    kind: "tensor", "file" or "source". shard: the safetensors file that holds a tensor here.
    """

    kind: str
    name: str
    what: str
    shard: str | None = None


class Comparison:
    """One tensor against its counterpart: `add` the pieces, then ask for the `result`."""

    def __init__(self, file: SafetensorsFile | None, info: TensorInfo | None, other: str) -> None:
        self._file, self._info = file, info
        self._other = other
        self._different, self._first = 0, -1

    def add(self, start: int, raw: npt.NDArray[np.uint8]) -> None:
        """Compare bytes of the tensor, from its byte `start` on."""
        if self._file is None or self._info is None:
            return
        expected = np.empty(raw.size, np.uint8)
        self._file.read_into(self._info, start, expected.data)
        # Unsigned integers of the same width: as floats, zeros of both signs would be equal.
        width = np.dtype(f"u{NUMPY_DTYPES[self._info.dtype].itemsize}")
        differs = raw.view(width) != expected.view(width)
        count = int(np.count_nonzero(differs))
        if count and not self._different:
            self._first = start // width.itemsize + int(np.argmax(differs))
        self._different += count

    def result(self) -> str | None:
        """Return how the tensor differs, or None if it does not."""
        if self._file is None or self._info is None:
            return self._other
        if not self._different:
            return None
        place = ", ".join(str(int(i)) for i in np.unravel_index(self._first, self._info.shape))
        return (
            f"{self._different} of {prod(self._info.shape)} elements differ from the source, "
            f"the first at [{place}]"
        )


class Reference:
    """The checkpoint to compare with, a context manager; counts the tensors it compared."""

    def __init__(self, path: Path) -> None:
        self.folder: HfFolder = open_hf_folder(path)
        self.compared = 0
        self._where = {info.name: (shard, info) for shard, info in self.folder.tensors}
        self._file: SafetensorsFile | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    def missing(self, names: set[str]) -> list[Problem]:
        """Return the tensors of the checkpoint that are not among `names`."""
        absent = [name for name in self._where if name not in names]
        return [Problem("tensor", name, "in the source, not in the W12 folder") for name in absent]

    def compare(self, tensor: W12Tensor) -> Comparison:
        """Begin the comparison of one tensor."""
        if tensor.name not in self._where:
            return Comparison(None, None, "not in the source")
        shard, info = self._where[tensor.name]
        if (info.dtype, list(info.shape)) != (tensor.dtype, tensor.shape):
            return Comparison(None, None, f"the source has {info.dtype} {list(info.shape)}")
        self.compared += 1
        return Comparison(self._open(shard), info, "")

    def _open(self, shard: str) -> SafetensorsFile:
        path = self.folder.path / shard
        if self._file is None or self._file.path != path:
            if self._file is not None:
                self._file.close()
            self._file = SafetensorsFile(path)
            self._file.read_once()
        return self._file
