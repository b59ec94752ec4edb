"""Read and write safetensors files one tensor at a time, as bytes.

The header is parsed here, strictly, so that a damaged file is named and described instead of
being half read. BF16 is handled as uint16 bit patterns: nothing in this module ever converts a
float, because a float cast would rewrite NaN payloads.

File form: 8-byte little-endian header length, JSON header, then the tensors back to back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError
from specpilot_cli.io.atomic import atomic_output
from specpilot_cli.io.json_file import refuse_special_file
from specpilot_cli.io.page_memory import Bytes
from specpilot_cli.io.source_file import SourceFile

MAX_HEADER_BYTES = 100_000_000
_WIDEST_OFFSET = 10**15
# beyond any array library; a zero beside them would hide the rest from the byte count
_MAX_DIMENSIONS, _MAX_SIZE = 32, 2**48

#: safetensors dtype → numpy dtype that holds the same bits.
NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E5M2": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "U32": np.dtype("<u4"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U64": np.dtype("<u8"),
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
}

_INFERRED = {
    dtype: name
    for name, dtype in NUMPY_DTYPES.items()
    if name not in {"BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0"}
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: `start` is an absolute file offset, `nbytes` its length in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TensorData:
    """A tensor to write: a safetensors dtype, its shape and contiguous little-endian data."""

    dtype: str
    shape: tuple[int, ...]
    data: npt.NDArray[Any] | bytes

    def memory(self) -> memoryview:
        """Return the data as a flat byte view; raises ValueError when the length is wrong."""
        view = memoryview(self.data) if isinstance(self.data, bytes) else byte_view(self.data)
        if view.nbytes != tensor_nbytes(self.dtype, self.shape):
            raise ValueError(
                f"{self.dtype} {list(self.shape)} needs {tensor_nbytes(self.dtype, self.shape)} "
                f"bytes, got {view.nbytes}"
            )
        return view


def byte_view(array: npt.NDArray[Any]) -> memoryview:
    """Return the bytes of `array` in C order without copying when it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def tensor_nbytes(dtype: str, shape: Iterable[int]) -> int:
    """Return the byte length of a tensor; `dtype` is a key of NUMPY_DTYPES."""
    return prod(shape) * NUMPY_DTYPES[dtype].itemsize


def array_data(array: npt.NDArray[Any]) -> TensorData:
    """Wrap a numpy array, taking the safetensors dtype from the array (uint16 means U16)."""
    little = array.astype(array.dtype.newbyteorder("<"), copy=False)
    name = _INFERRED.get(little.dtype)
    if name is None:
        raise ValueError(f"numpy dtype {array.dtype} has no safetensors dtype")
    return TensorData(name, array.shape, little)


def bf16_data(bits: npt.NDArray[np.uint16]) -> TensorData:
    """Wrap BF16 bit patterns (uint16 [..]) as a BF16 tensor."""
    return TensorData("BF16", bits.shape, bits)


class SafetensorsFile:
    """An open safetensors file whose header was checked; a context manager.

    Reads use pread, so one object may serve several threads. Errors are InputError and name
    the file (and the tensor where one is at fault).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_special_file(path)
        try:
            self._file = SourceFile(path)
        except OSError as error:
            raise InputError(
                f"cannot open safetensors file: {error.strerror or error}",
                where=str(path),
                hint="is the path right, and may this user read it?",
            ) from error
        try:
            self._size = self._file.size_bytes
            self.header_bytes = self._read_header()
            self.metadata, self._infos = parse_header(path, self.header_bytes, self._size)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; reading afterwards raises ValueError."""
        self._file.close()

    @property
    def names(self) -> tuple[str, ...]:
        """Tensor names in the order of their data."""
        return tuple(self._infos)

    @property
    def size_bytes(self) -> int:
        """Length of the whole file in bytes, header included."""
        return self._size

    def is_unchanged(self) -> bool:
        """Return whether nobody has written to the file since it was opened."""
        return self._file.is_unchanged()

    def info(self, name: str) -> TensorInfo:
        """Return where `name` lies; an unknown name is an InputError."""
        try:
            return self._infos[name]
        except KeyError:
            raise InputError(
                f"no tensor named `{name}`",
                where=str(self.path),
                hint=f"it holds {len(self._infos)} others: is it the right file, and whole?",
            ) from None

    def read_array(self, name: str) -> npt.NDArray[Any]:
        """Return tensor `name` [shape] in its NUMPY_DTYPES dtype (BF16 and U16: uint16)."""
        info = self.info(name)
        flat = np.empty(info.nbytes, dtype=np.uint8)
        self._read_at(info.start, flat.data)
        return flat.view(NUMPY_DTYPES[info.dtype]).reshape(info.shape)

    def read_into(self, info: TensorInfo, offset: int, target: memoryview) -> None:
        """Fill `target` with bytes of a tensor of this file, from its byte `offset` on."""
        self._read_at(self._place(info, offset, target.nbytes), target)

    def read_pages(self, info: TensorInfo, offset: int, nbytes: int, room: Bytes) -> Bytes:
        """Return bytes of a tensor, uint8 [nbytes], in `room`: see `SourceFile.read_pages`."""
        start = self._place(info, offset, nbytes)
        with self._end_is_said():
            return self._file.read_pages(start, nbytes, room)

    def read_once(self) -> None:
        """Say that the file will be read from front to back, see `SourceFile.read_once`."""
        self._file.read_once()

    def _read_header(self) -> bytes:
        if self._size < 8:
            raise _bad(self.path, f"truncated: {self._size} bytes, the header length needs 8")
        prefix = bytearray(8)
        self._read_at(0, memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        if length > MAX_HEADER_BYTES:
            raise _bad(
                self.path, f"header too large: {length} bytes, the limit is {MAX_HEADER_BYTES}"
            )
        if length > self._size - 8:
            raise _bad(
                self.path,
                f"truncated: the header needs {length} bytes, the file has {self._size - 8}",
            )
        header = bytearray(length)
        self._read_at(8, memoryview(header))
        return bytes(header)

    def _place(self, info: TensorInfo, offset: int, nbytes: int) -> int:
        if offset < 0 or offset + nbytes > info.nbytes:
            raise ValueError(f"`{info.name}` has no bytes {offset} to {offset + nbytes}")
        return info.start + offset

    def _read_at(self, start: int, view: memoryview) -> None:
        with self._end_is_said():
            self._file.read_into(start, view)

    @contextmanager
    def _end_is_said(self) -> Iterator[None]:
        try:
            yield
        except EOFError as error:
            raise _bad(self.path, f"truncated while reading: {error}") from error


def _bad(path: Path, message: str) -> InputError:
    return InputError(
        f"bad safetensors file: {message}",
        hint="copy or download the file again and compare its sha256 with the publisher's",
        where=str(path),
    )


def parse_header(
    path: Path, header: bytes, file_size: int
) -> tuple[dict[str, str], dict[str, TensorInfo]]:
    """Return metadata and tensors, in the order of their data, of a file of `file_size` bytes.

    header: the JSON text without its length. InputError names `path`.
    """
    entries = _load_json(path, header)
    metadata = _check_metadata(path, entries.pop("__metadata__", {}))
    data_start = 8 + len(header)
    infos = [_check_entry(path, name, entry, data_start) for name, entry in entries.items()]
    infos.sort(key=lambda info: (info.start, info.nbytes))
    position = data_start
    for info in infos:
        if info.start != position:
            what = "overlaps the one before it" if info.start < position else "leaves a gap"
            raise _bad(
                path,
                f"tensor `{info.name}` {what}: it begins at data byte "
                f"{info.start - data_start}, not {position - data_start}",
            )
        position += info.nbytes
    if position > file_size:
        raise _bad(path, f"truncated: the tensors need {position} bytes, the file has {file_size}")
    if position < file_size:
        raise _bad(path, f"{file_size - position} bytes after the last tensor")
    return metadata, {info.name: info for info in infos}


def _load_json(path: Path, header: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise _bad(path, f"duplicate name in the header: `{key}`")
            found[key] = value
        return found

    try:
        text = header.decode("utf-8")
        entries = json.loads(text, object_pairs_hook=unique)
        if "\\ud" in text.lower():  # half a surrogate pair: a name that no file can hold
            json.dumps(entries, ensure_ascii=False).encode("utf-8")
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise _bad(path, f"the header is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise _bad(path, "the header is not a JSON object")
    return entries


def _check_metadata(path: Path, metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _bad(path, "`__metadata__` must map strings to strings")
    return metadata


def _check_entry(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _bad(path, f"tensor `{name}` must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in NUMPY_DTYPES:
        raise _bad(path, f"tensor `{name}` has an unknown dtype: {dtype!r}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise _bad(path, f"tensor `{name}`: shape and data_offsets must be non-negative integers")
    if len(shape) > _MAX_DIMENSIONS or any(size > _MAX_SIZE for size in shape):
        raise _bad(path, f"tensor `{name}` has an impossible shape of {len(shape)} dimensions")
    begin, end = offsets
    expected = tensor_nbytes(dtype, shape)
    if end - begin != expected:
        raise _bad(
            path,
            f"tensor `{name}`: {dtype} {shape} needs {expected} bytes, "
            f"data_offsets give {end - begin}",
        )
    return TensorInfo(name, dtype, tuple(shape), data_start + begin, expected)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def encode_header(
    specs: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """Return length prefix + JSON header for tensors (name, dtype, shape) laid out in order.

    The header is padded with spaces to a multiple of 8 bytes, so tensor data is aligned.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, dtype, shape in specs:
        if name in entries:
            raise ValueError(f"duplicate tensor name: `{name}`")
        end = position + tensor_nbytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    return _frame(entries)


def header_bound(
    specs: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> int:
    """Return bytes enough for the header of these tensors in any order and at any offsets."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, dtype, shape in specs:
        offsets = [_WIDEST_OFFSET, _WIDEST_OFFSET]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
    return len(_frame(entries))


def _frame(entries: dict[str, Any]) -> bytes:
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_safetensors(
    path: Path,
    tensors: Mapping[str, npt.NDArray[Any] | TensorData],
    metadata: Mapping[str, str] | None = None,
    *,
    force: bool = False,
) -> None:
    """Write one safetensors file atomically: header first, then each tensor in turn.

    Plain numpy arrays keep their own dtype; use `bf16_data` for BF16 bit patterns. An existing
    file is refused unless `force`.
    """
    data = {
        name: value if isinstance(value, TensorData) else array_data(value)
        for name, value in tensors.items()
    }
    header = encode_header(
        ((name, tensor.dtype, tensor.shape) for name, tensor in data.items()), metadata or {}
    )
    with atomic_output(path, force=force) as temporary, temporary.open("wb") as handle:
        handle.write(header)
        for tensor in data.values():
            handle.write(tensor.memory())
        handle.flush()
        os.fsync(handle.fileno())
