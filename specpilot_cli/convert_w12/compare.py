"""Compare decoded tensors with those of a checkpoint, as bit patterns and piece by piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from specpilot_cli.convert_w12.pipeline import Slot
from specpilot_cli.io.hashing import sha256_file
from specpilot_cli.io.hf_folder import CONFIG_NAME, INDEX_NAME, HfFolder, open_hf_folder
from specpilot_cli.io.safetensors_stream import NUMPY_DTYPES, SafetensorsFile, TensorInfo
from specpilot_cli.schema.w12_manifest import W12Manifest, W12Tensor


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
    """One tensor against its counterpart: `add` the pieces, then ask for the `result`.

    thread: a single one, which reads the counterpart and compares, in the order of the calls.
    """

    def __init__(
        self,
        thread: ThreadPoolExecutor,
        file: SafetensorsFile | None,
        info: TensorInfo | None,
        other: str,
    ) -> None:
        self._thread = thread
        self._file, self._info = file, info
        self._other = other
        self._different, self._first = 0, -1
        self._failed: Exception | None = None

    def add(self, start: int, raw: npt.NDArray[np.uint8], slot: Slot) -> None:
        """Compare bytes of the tensor soon, from its byte `start` on; they lie in `slot`."""
        if self._file is None or self._info is None:
            return
        slot.hold()
        self._thread.submit(self._work, self._file, self._info, start, raw, slot)

    def result(self) -> Future[str | None]:
        """Return how the tensor differs, None if it does not, once all of it is compared.

        InputError: the counterpart cannot be read.
        """
        return self._thread.submit(self._result)

    def _work(
        self,
        file: SafetensorsFile,
        info: TensorInfo,
        start: int,
        raw: npt.NDArray[np.uint8],
        slot: Slot,
    ) -> None:
        try:
            if self._failed is None:
                self._compare(file, info, start, raw)
        except Exception as error:  # noqa: BLE001 - raised by the result
            self._failed = error
        finally:
            slot.drop()

    def _compare(
        self, file: SafetensorsFile, info: TensorInfo, start: int, raw: npt.NDArray[np.uint8]
    ) -> None:
        expected = np.empty(raw.size, np.uint8)
        file.read_into(info, start, expected.data)
        # Unsigned integers of the same width: as floats, zeros of both signs would be equal.
        width = np.dtype(f"u{NUMPY_DTYPES[info.dtype].itemsize}")
        differs = raw.view(width) != expected.view(width)
        count = int(np.count_nonzero(differs))
        if count and not self._different:
            self._first = start // width.itemsize + int(np.argmax(differs))
        self._different += count

    def _result(self) -> str | None:
        if self._failed is not None:
            raise self._failed
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
        self._thread = ThreadPoolExecutor(1, "against")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.shutdown()
        if self._file is not None:
            self._file.close()

    def missing(self, names: set[str]) -> list[Problem]:
        """Return the tensors of the checkpoint that are not among `names`."""
        absent = [name for name in self._where if name not in names]
        return [Problem("tensor", name, "in the source, not in the W12 folder") for name in absent]

    def around_tensors(self, manifest: W12Manifest) -> Iterator[Problem]:
        """Yield what differs from the checkpoint in its texts, other files and file headers."""
        texts = {CONFIG_NAME: self.folder.config_text}
        if self.folder.index_text is not None:
            texts[INDEX_NAME] = self.folder.index_text
        carried = {file.path: file.sha256 for file in manifest.files if file.carried}
        carried_there = {name: sha256_file(self.folder.path / name) for name in self.folder.carried}
        headers = {source.name: source.header.encode() for source in manifest.sources}
        for kind, converted, there in (
            ("file", manifest.source_texts, texts),
            ("file", carried, carried_there),
            ("source", headers, self._headers()),
        ):
            yield from _differences(kind, converted, there)

    def _headers(self) -> dict[str, bytes]:
        found = {}
        for name in self.folder.shards:
            with SafetensorsFile(self.folder.path / name) as file:
                found[name] = file.header_bytes
        return found

    def compare(self, tensor: W12Tensor) -> Comparison:
        """Begin the comparison of one tensor."""
        if tensor.name not in self._where:
            return Comparison(self._thread, None, None, "not in the source")
        shard, info = self._where[tensor.name]
        if (info.dtype, list(info.shape)) != (tensor.dtype, tensor.shape):
            other = f"the source has {info.dtype} {list(info.shape)}"
            return Comparison(self._thread, None, None, other)
        self.compared += 1
        return Comparison(self._thread, self._open(shard), info, "")

    def _open(self, shard: str) -> SafetensorsFile:
        path = self.folder.path / shard
        if self._file is None or self._file.path != path:
            if self._file is not None:
                # What is still to be compared reads from it.
                self._thread.submit(lambda: None).result()
                self._file.close()
            self._file = SafetensorsFile(path)
            self._file.read_once()
        return self._file


def _differences(
    kind: str, converted: Mapping[str, str | bytes], there: Mapping[str, str | bytes]
) -> Iterator[Problem]:
    """Yield a problem for each name whose content is not the same in both."""
    what = "header differs" if kind == "source" else "differs"
    for name in sorted({*converted, *there}):
        if name not in there:
            yield Problem(kind, name, "not in the source")
        elif name not in converted:
            yield Problem(kind, name, "in the source, not in the W12 folder")
        elif converted[name] != there[name]:
            yield Problem(kind, name, f"{what} from the source's")
