"""Reads what the recorder of an SGLang server wrote, for the requests that are wanted."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from specpilot_cli.errors import InputError, MeasurementInvalid
from specpilot_cli.io.json_file import read_json_model
from specpilot_cli.io.lattice_digest import shard_digest
from specpilot_cli.io.safetensors_stream import SafetensorsFile
from specpilot_cli.schema.raw_lattice import (
    INDEX_NAME,
    RAW_TENSORS,
    SHARD_KEY,
    RecorderIndex,
    ShardInfo,
    shard_name,
)

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(slots=True)
class RequestRows:
    """Everything recorded for one request, in the order of the server's steps."""

    parts: list[Arrays] = field(default_factory=list)

    def joined(self) -> Arrays:
        """The raw tensors without `request`, each [S, ...]."""
        names = [name for name in RAW_TENSORS if name != "request"]
        return {name: np.concatenate([part[name] for part in self.parts]) for name in names}


def read_index(folder: Path) -> RecorderIndex:
    """The index of one server process. Raises InputError if it is missing or damaged."""
    return read_json_model(folder / INDEX_NAME, RecorderIndex)


def collect(
    folder: Path, index: RecorderIndex, wanted: Collection[str], *, first_shard: int = 0
) -> dict[str, RequestRows]:
    """Rows of the `wanted` server request ids in the shards from `first_shard` on.

    Raises MeasurementInvalid for a shard that is missing, damaged, or not what the index says.
    """
    found: dict[str, RequestRows] = {}
    for number in range(first_shard, index.shards):
        for name, part in _shard(folder / shard_name(number), index, number, wanted):
            found.setdefault(name, RequestRows()).parts.append(part)
    return found


def _shard(
    path: Path, index: RecorderIndex, number: int, wanted: Collection[str]
) -> Iterator[tuple[str, Arrays]]:
    try:
        info, arrays = _read(path)
    except InputError as error:
        raise _bad(path, error.message) from error
    if (info.session, info.shard) != (index.session, number):
        raise _bad(path, f"it is shard {info.shard} of session {info.session}")
    _check(path, index, arrays, len(info.requests))
    if shard_digest(arrays, info.requests) != info.sha256:
        raise _bad(path, "its content is not what the recorder wrote")
    request = arrays.pop("request")
    for place, name in enumerate(info.requests):
        if name in wanted:
            rows = np.flatnonzero(request == place)
            yield name, {key: array[rows] for key, array in arrays.items()}


def _read(path: Path) -> tuple[ShardInfo, Arrays]:
    with SafetensorsFile(path) as file:
        try:
            info = ShardInfo.model_validate_json(file.metadata.get(SHARD_KEY, ""))
        except ValidationError as error:
            raise InputError("its metadata is not a recorder's") from error
        if set(file.names) != set(RAW_TENSORS):
            raise InputError(f"it holds the tensors {sorted(file.names)}")
        return info, {name: file.read_array(name) for name in RAW_TENSORS}


def _check(path: Path, index: RecorderIndex, arrays: Arrays, n_requests: int) -> None:
    request = arrays["request"]
    sizes = {"S": request.shape[0], "L": index.positions, "K": index.candidates}
    for name, (dtype, axes) in RAW_TENSORS.items():
        shape = tuple(sizes[axis] for axis in axes)
        if arrays[name].dtype != np.dtype(dtype) or arrays[name].shape != shape:
            raise _bad(
                path, f"`{name}` is {arrays[name].dtype} {list(arrays[name].shape)}, "
                f"not {dtype} {list(shape)}"
            )  # fmt: skip
    if request.size and not 0 <= request.min() <= request.max() < n_requests:
        raise _bad(path, "`request` is outside the list of requests")


def _bad(path: Path, message: str) -> MeasurementInvalid:
    return MeasurementInvalid(
        f"bad recorder shard: {message}",
        where=str(path),
        hint="record again with a fresh server",
    )


def same_recording(indexes: Collection[RecorderIndex]) -> RecorderIndex:
    """The one description that the processes of a server share; InputError if they differ."""
    first, *others = indexes
    for other in others:
        for key in ("mode", "algorithm", "engine", "block", "positions", "candidates"):
            if getattr(other, key) != getattr(first, key):
                raise InputError(
                    f"the server's processes record different things: `{key}` is "
                    f"{getattr(first, key)} and {getattr(other, key)}",
                    hint="start the server again with one plugin configuration",
                )
    return first
