"""Lattice recordings on disk: one safetensors file, or a folder of shards.

A file is written whole or not at all, and is checked both ways: nothing is written that the reader
would refuse. The form is defined in `schema/lattice.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from specpilot_cli.errors import InputError
from specpilot_cli.io.lattice_checks import check_recording
from specpilot_cli.io.safetensors_stream import SafetensorsFile, write_safetensors
from specpilot_cli.schema.lattice import (
    METADATA_KEY,
    TENSORS,
    LatticeMetadata,
    LatticeRecording,
)

_RECORD = "record it again with `specpilot record`"


def write_lattice(path: Path, recording: LatticeRecording, *, force: bool = False) -> None:
    """Write `recording` atomically to the file `path`; refuses to overwrite without `force`.

    Raises InputError if the recording is not well formed or the file cannot be written.
    """
    check_recording(recording, str(path))
    write_safetensors(
        path,
        recording.tensors(),
        {METADATA_KEY: recording.metadata.model_dump_json()},
        force=force,
    )


def read_lattice(path: Path) -> LatticeRecording:
    """Read a recording from a file, or from a folder that holds all its shards.

    Raises InputError, naming the file, the tensor and the step, if anything is missing, damaged or
    inconsistent.
    """
    if not path.exists():
        raise InputError(
            "no such lattice file",
            where=str(path),
            hint="make a recording with `specpilot record`",
        )
    if not path.is_dir():
        return _read_file(path)
    parts = [_read_file(part) for part in lattice_files(path)]
    return _join(path, parts)


def lattice_files(path: Path) -> list[Path]:
    """The files that make up the recording at `path`: itself, or a folder's shards by name."""
    if not path.is_dir():
        return [path]
    found = sorted(part for part in path.glob("*.safetensors") if not part.name.startswith("."))
    if not found:
        raise InputError(
            "no lattice in this folder: it holds no .safetensors file",
            where=str(path),
            hint="make a recording with `specpilot record`",
        )
    return found


def _read_file(path: Path) -> LatticeRecording:
    with SafetensorsFile(path) as file:
        metadata = _metadata(path, file.metadata)
        missing = [name for name in TENSORS if name not in file.names]
        unknown = [name for name in file.names if name not in TENSORS]
        if missing or unknown:
            what = f"no tensor `{missing[0]}`" if missing else f"unknown tensor `{unknown[0]}`"
            raise InputError(f"bad lattice file: {what}", where=str(path), hint=_RECORD)
        for name, (dtype, _) in TENSORS.items():
            stored = file.info(name).dtype
            if stored != _stored_dtype(dtype):
                raise InputError(
                    f"bad lattice file: tensor `{name}`: dtype is {stored}, "
                    f"not {_stored_dtype(dtype)}",
                    where=str(path),
                    hint=_RECORD,
                )
        arrays: dict[str, npt.NDArray[Any]] = {
            name: file.read_array(name).astype(TENSORS[name][0], copy=False) for name in TENSORS
        }
    recording = LatticeRecording(metadata=metadata, **arrays)
    check_recording(recording, str(path))
    return recording


def _stored_dtype(dtype: str) -> str:
    return {"int32": "I32", "int64": "I64", "float32": "F32"}[dtype]


def _metadata(path: Path, stored: dict[str, str]) -> LatticeMetadata:
    if METADATA_KEY not in stored:
        raise InputError(
            f"not a lattice file: no `{METADATA_KEY}` entry in its metadata",
            where=str(path),
            hint="make a recording with `specpilot record`",
        )
    try:
        return LatticeMetadata.model_validate_json(stored[METADATA_KEY])
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"]) or METADATA_KEY
        raise InputError(
            f"bad lattice file: metadata key `{key}`: {first['msg']}",
            where=str(path),
            hint="the file may come from another version of specpilot, or another tool",
        ) from error


_SHARED = ("mode", "block", "engine", "decoding", "target_sha256", "drafter_sha256", "shard_count")


def _join(path: Path, parts: Sequence[LatticeRecording]) -> LatticeRecording:
    first = parts[0].metadata
    for part in parts[1:]:
        for key in _SHARED:
            if getattr(part.metadata, key) != getattr(first, key):
                raise InputError(
                    f"the shards are not one recording: `{key}` differs "
                    f"({getattr(first, key)} and {getattr(part.metadata, key)})",
                    where=str(path),
                    hint=_RECORD,
                )
    present = sorted(part.metadata.shard_index for part in parts)
    if present != list(range(first.shard_count)):
        raise InputError(
            f"the recording is incomplete: it has {first.shard_count} shards, found {present}",
            where=str(path),
            hint=_RECORD,
        )
    ordered = sorted(parts, key=lambda part: part.metadata.shard_index)
    return _concatenate(path, ordered)


def _concatenate(path: Path, parts: Sequence[LatticeRecording]) -> LatticeRecording:
    requests = [request for part in parts for request in part.metadata.requests]
    try:
        metadata = LatticeMetadata.model_validate(
            {
                **parts[0].metadata.model_dump(),
                "requests": [request.model_dump() for request in requests],
                "shard_index": 0,
                "shard_count": 1,
            }
        )
    except ValidationError as error:
        raise InputError(
            f"the shards are not one recording: {error.errors()[0]['msg']}",
            where=str(path),
            hint=_RECORD,
        ) from error
    shapes = {part.candidate_ids.shape[1:] for part in parts}
    if len(shapes) > 1:
        raise InputError(
            f"the shards are not one recording: lattices of {sorted(shapes)}",
            where=str(path),
            hint=_RECORD,
        )
    arrays = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in TENSORS
        if not name.endswith("_offsets") and name != "step_request"
    }
    for name in ("prompt_offsets", "output_offsets"):
        lengths = np.concatenate([np.diff(getattr(part, name)) for part in parts])
        arrays[name] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    bases = np.cumsum([0] + [part.n_requests for part in parts[:-1]])
    arrays["step_request"] = np.concatenate(
        [part.step_request + np.int32(base) for part, base in zip(parts, bases, strict=True)]
    )
    return LatticeRecording(metadata=metadata, **arrays)
