"""Lattice recordings on disk: one safetensors file, or a folder of shards.

A file is written whole or not at all, and is checked both ways: nothing is written that the reader
would refuse. Files are read in parts of whole requests, so a recording may be larger than memory.
The form is defined in `schema/lattice.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from specpilot_cli.errors import InputError
from specpilot_cli.io.lattice_checks import check_recording
from specpilot_cli.io.lattice_digest import request_digests
from specpilot_cli.io.lattice_pack import pack_tensors
from specpilot_cli.io.lattice_parts import RECORD, LatticeFile
from specpilot_cli.io.safetensors_stream import write_safetensors
from specpilot_cli.io.validation import first_in_words
from specpilot_cli.schema.lattice import (
    METADATA_KEY,
    TENSORS,
    LatticeMetadata,
    LatticeRecording,
    Packing,
    offsets_of,
)

#: Steps held at once: a part of 15 × 16 × 16 float32 edges stays near 32 MiB.
PART_STEPS = 2048


def write_lattice(path: Path, recording: LatticeRecording, *, force: bool = False) -> None:
    """Write `recording` atomically to the file `path`; refuses to overwrite without `force`.

    Raises InputError if the recording is not well formed or the file cannot be written.
    """
    if recording.metadata.packed is not None:
        raise InputError(
            "a packed recording cannot be written unpacked: the dropped scores are gone",
            where=str(path),
            hint="keep the packed file, or record again",
        )
    check_recording(recording, str(path))
    _write(path, recording.tensors(), recording.metadata, force=force)


def write_packed_lattice(
    path: Path,
    recording: LatticeRecording,
    kept: npt.NDArray[np.bool_],
    packing: Packing,
    *,
    force: bool = False,
) -> None:
    """Write the packed form: only the rows of scores in `kept`, [S, L, K] by predecessor."""
    check_recording(recording, str(path))
    index = list(TENSORS)[:6]
    tensors = {name: getattr(recording, name) for name in index}
    metadata = recording.metadata.model_copy(update={"packed": packing})
    _write(path, tensors | pack_tensors(recording, kept), metadata, force=force)


def read_lattice(path: Path) -> LatticeRecording:
    """Read a recording from a file, or from a folder that holds all its shards, into memory.

    Raises InputError, naming the file, the tensor and the step, if anything is missing, damaged or
    inconsistent.
    """
    files = LatticeFiles(path)
    return _concatenate(files.metadata, list(files.parts()))


class LatticeFiles:
    """A recording on disk, read in parts of about `part_steps` steps; a `LatticeSource`.

    Opening reads every header and checks that shards belong together; each pass of `parts` checks
    the contents that it reads. A request is never divided, so the longest one bounds memory.
    """

    def __init__(self, path: Path, *, part_steps: int = PART_STEPS) -> None:
        if not path.exists():
            raise InputError(
                "no such lattice file",
                where=str(path),
                hint="make a recording with `specpilot record`",
            )
        self.path, self._part_steps = path, part_steps
        self._files = [LatticeFile(part) for part in lattice_files(path)]
        if path.is_dir():
            _check_shards(path, self._files)
            self._files.sort(key=lambda file: file.metadata.shard_index)
            self.metadata = _joined_metadata(path, [file.metadata for file in self._files])
        else:
            self.metadata = self._files[0].metadata

    @property
    def n_steps(self) -> int:
        """Recorded lattices, S."""
        return sum(file.n_steps for file in self._files)

    @property
    def n_positions(self) -> int:
        """Drafted positions per lattice, L."""
        return self._files[0].n_positions

    @property
    def n_candidates(self) -> int:
        """Candidates per position, K."""
        return self._files[0].n_candidates

    @property
    def n_output_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(file.n_output_tokens for file in self._files)

    def parts(self) -> Iterator[LatticeRecording]:
        """Recordings of consecutive requests, checked as they are read."""
        for file in self._files:
            for part in file.parts(self._part_steps):
                update = {"shard_index": 0, "shard_count": 1}
                yield LatticeRecording(
                    metadata=part.metadata.model_copy(update=update),
                    **{name: getattr(part, name) for name in TENSORS},
                )


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


def _write(
    path: Path, tensors: dict[str, npt.NDArray[Any]], metadata: LatticeMetadata, *, force: bool
) -> None:
    requests = [
        request.model_copy(update={"sha256": digest})
        for request, digest in zip(metadata.requests, request_digests(tensors), strict=True)
    ]
    document = metadata.model_copy(update={"requests": requests}).model_dump_json()
    write_safetensors(path, tensors, {METADATA_KEY: document}, force=force)


_SHARED = (
    "mode", "block", "engine", "decoding", "target_sha256", "drafter_sha256", "drafter_kind",
    "packed", "shard_count",
)  # fmt: skip


def _check_shards(path: Path, files: Sequence[LatticeFile]) -> None:
    first = files[0].metadata
    for file in files[1:]:
        for key in _SHARED:
            if getattr(file.metadata, key) != getattr(first, key):
                raise InputError(
                    f"the shards are not one recording: `{key}` differs "
                    f"({getattr(first, key)} and {getattr(file.metadata, key)})",
                    where=str(path),
                    hint=RECORD,
                )
    present = sorted(file.metadata.shard_index for file in files)
    if present != list(range(first.shard_count)):
        raise InputError(
            f"the recording is incomplete: it has {first.shard_count} shards, found {present}",
            where=str(path),
            hint=RECORD,
        )
    shapes = {(file.n_positions, file.n_candidates) for file in files}
    if len(shapes) > 1:
        raise InputError(
            f"the shards are not one recording: lattices of {sorted(shapes)}",
            where=str(path),
            hint=RECORD,
        )


def _joined_metadata(path: Path, parts: Sequence[LatticeMetadata]) -> LatticeMetadata:
    requests = [request.model_dump() for part in parts for request in part.requests]
    fields = {**parts[0].model_dump(), "requests": requests, "shard_index": 0, "shard_count": 1}
    try:
        return LatticeMetadata.model_validate(fields)
    except ValidationError as error:
        raise InputError(
            f"the shards are not one recording: {first_in_words(error, METADATA_KEY)[1]}",
            where=str(path),
            hint=RECORD,
        ) from error


def _concatenate(metadata: LatticeMetadata, parts: Sequence[LatticeRecording]) -> LatticeRecording:
    if len(parts) == 1:
        return LatticeRecording(
            metadata=metadata, **{name: getattr(parts[0], name) for name in TENSORS}
        )
    arrays = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in TENSORS
        if not name.endswith("_offsets") and name != "step_request"
    }
    for name in ("prompt_offsets", "output_offsets"):
        lengths = np.concatenate([np.diff(getattr(part, name)) for part in parts])
        arrays[name] = offsets_of(lengths.tolist())
    bases = np.cumsum([0] + [part.n_requests for part in parts[:-1]])
    arrays["step_request"] = np.concatenate(
        [part.step_request + np.int32(base) for part, base in zip(parts, bases, strict=True)]
    )
    return LatticeRecording(metadata=metadata, **arrays)
