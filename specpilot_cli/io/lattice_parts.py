"""One lattice file, opened and read request by request."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from specpilot_cli.errors import InputError
from specpilot_cli.io.lattice_checks import check_content, check_index, check_shapes
from specpilot_cli.io.lattice_digest import request_digests
from specpilot_cli.io.lattice_pack import unpack_tensors
from specpilot_cli.io.safetensors_stream import NUMPY_DTYPES, SafetensorsFile
from specpilot_cli.io.validation import first_in_words
from specpilot_cli.schema.lattice import (
    METADATA_KEY,
    PACKED_TENSORS,
    TENSORS,
    Axes,
    LatticeMetadata,
    LatticeRecording,
)
from specpilot_cli.schema.tree_recording import TREES_KEY

RECORD = "record it again with `specpilot record`"
_INDEX = tuple(list(TENSORS)[:6])
_STORED_DTYPES = {
    "int32": ("I32",), "int64": ("I64",), "float32": ("F32",), "float16": ("F16",),
    "uint8": ("U8",), "uint16": ("U16", "I32"),  # token ids of a large vocabulary need 32 bits
}  # fmt: skip


class LatticeFile:
    """A lattice file whose header and index were checked; tokens and scores are read later.

    Held in memory are 12 bytes per step and 16 per request. The file is open only while it is read,
    so a folder may have more shards than a process may have open files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with SafetensorsFile(path) as file:
            self._header = hashlib.sha256(file.header_bytes).digest()
            stored = _metadata(path, file.metadata)
            self._digests = [request.sha256 for request in stored.requests]
            plain = [r.model_copy(update={"sha256": None}) for r in stored.requests]
            self.metadata = stored.model_copy(update={"requests": plain})
            self._tensors = _expected(stored)
            self._check_names(file)
            sizes = check_shapes(
                {name: file.info(name).shape for name in self._tensors},
                self.metadata, str(path), self._tensors,
            )  # fmt: skip
            self.n_steps, self.n_positions, self.n_candidates = (sizes[axis] for axis in "SLK")
            self.n_output_tokens = sizes["output tokens"]
            self._read_index(file, sizes)

    def parts(self, part_steps: int) -> Iterator[LatticeRecording]:
        """Recordings of consecutive whole requests, of at most `part_steps` steps where one fits.

        Raises InputError naming the file and the request, tensor or step at fault.
        """
        with SafetensorsFile(self.path) as file:
            if hashlib.sha256(file.header_bytes).digest() != self._header:
                raise InputError(
                    "the file was replaced while it was read",
                    where=str(self.path),
                    hint="run again when nothing writes to it",
                )
            yield from self._parts(file, part_steps)

    def _parts(self, file: SafetensorsFile, part_steps: int) -> Iterator[LatticeRecording]:
        ends = np.searchsorted(self._step_request, np.arange(len(self._digests)), side="right")
        first, begin = 0, 0
        for request in range(len(self._digests)):
            if request > first and ends[request] - begin > part_steps:
                yield self._part(file, first, request, begin, int(ends[request - 1]))
                first, begin = request, int(ends[request - 1])
        yield self._part(file, first, len(self._digests), begin, self.n_steps)

    def _part(
        self, file: SafetensorsFile, first: int, last: int, begin: int, end: int
    ) -> LatticeRecording:
        stored: dict[str, npt.NDArray[Any]] = {
            "step_request": self._step_request[begin:end] - np.int32(first),
            "step_position": self._step_position[begin:end],
        }
        for ids, offsets in (("prompt_ids", "prompt_offsets"), ("output_ids", "output_offsets")):
            bounds = self._offsets[offsets][first : last + 1]
            stored[ids] = self._rows(file, ids, int(bounds[0]), int(bounds[-1]))
            stored[offsets] = bounds - bounds[0]
        for name in self._tensors:
            if name not in _INDEX and name not in ("edge_rows", "edge_offsets"):
                stored[name] = self._rows(file, name, begin, end)
        if self.metadata.packed is not None:
            rows = self._offsets["edge_offsets"][begin : end + 1]
            stored["edge_rows"] = self._rows(file, "edge_rows", int(rows[0]), int(rows[-1]))
            stored["edge_offsets"] = rows - rows[0]
        self._check_digests(stored, first, last)
        return self._decoded(stored, first, last, begin)

    def _decoded(
        self, stored: dict[str, npt.NDArray[Any]], first: int, last: int, begin: int
    ) -> LatticeRecording:
        where, metadata = str(self.path), self.metadata
        if metadata.packed is not None:
            arrays = {name: stored[name] for name in _INDEX}
            arrays |= unpack_tensors(stored, where, begin)
        else:
            arrays = stored
            if metadata.drafter_kind == "dflash":
                with np.errstate(invalid="ignore"):  # what is not finite is refused below
                    own = stored["unary"] - stored["unary_logsumexp"][..., None]
                arrays["edge"] = own[:, :, None, :]
        requests = metadata.requests[first:last]
        part = LatticeRecording(
            metadata=metadata.model_copy(update={"requests": requests}), **arrays
        )
        check_content(part, where, first_step=begin)
        return part

    def _rows(self, file: SafetensorsFile, name: str, begin: int, end: int) -> npt.NDArray[Any]:
        """Rows `begin` to `end` of the first axis of a tensor, in the dtype of the table."""
        info = file.info(name)
        dtype = NUMPY_DTYPES[info.dtype]
        array = np.empty((end - begin, *info.shape[1:]), dtype=dtype)
        offset = begin * dtype.itemsize * int(np.prod(info.shape[1:], dtype=np.int64))
        file.read_into(info, offset, array.reshape(-1).view(np.uint8).data)
        return array.astype(dtype.newbyteorder("="), copy=False)

    def _check_names(self, file: SafetensorsFile) -> None:
        where, names = str(self.path), file.names
        missing = [name for name in self._tensors if name not in names]
        unknown = [name for name in names if name not in self._tensors]
        if missing or unknown:
            what = f"no tensor `{missing[0]}`" if missing else f"unknown tensor `{unknown[0]}`"
            raise InputError(f"bad lattice file: {what}", where=where, hint=RECORD)
        for name, (dtype, _) in self._tensors.items():
            stored = file.info(name).dtype
            if stored not in _STORED_DTYPES[dtype]:
                raise InputError(
                    f"bad lattice file: tensor `{name}`: dtype is {stored}, "
                    f"not {' or '.join(_STORED_DTYPES[dtype])}",
                    where=where,
                    hint=RECORD,
                )

    def _read_index(self, file: SafetensorsFile, sizes: dict[str, int]) -> None:
        self._step_request = self._rows(file, "step_request", 0, self.n_steps)
        self._step_position = self._rows(file, "step_position", 0, self.n_steps)
        names = ["prompt_offsets", "output_offsets"]
        names += ["edge_offsets"] if self.metadata.packed is not None else []
        self._offsets = {name: file.read_array(name) for name in names}
        check_index(
            self.metadata,
            prompt_offsets=self._offsets["prompt_offsets"],
            output_offsets=self._offsets["output_offsets"],
            n_prompt_tokens=sizes["prompt tokens"],
            n_output_tokens=sizes["output tokens"],
            step_request=self._step_request,
            step_position=self._step_position,
            where=str(self.path),
        )
        if self.metadata.packed is None:
            return
        rows = self._offsets["edge_offsets"]
        mask_bytes = -(-self.n_candidates // 8)
        if sizes["mask bytes"] != mask_bytes or sizes["S + 1"] != self.n_steps + 1:
            self._fail_packed("edge_kept", f"must have {mask_bytes} bytes per position")
        if rows[0] != 0 or rows[-1] != sizes["kept rows"] or np.any(np.diff(rows) < 0):
            self._fail_packed("edge_offsets", f"must rise from 0 to {sizes['kept rows']}")

    def _fail_packed(self, tensor: str, message: str) -> None:
        raise InputError(
            f"bad lattice file: tensor `{tensor}`: {message}",
            where=str(self.path),
            hint="pack the recording again with `specpilot lattice pack`",
        )

    def _check_digests(self, stored: dict[str, npt.NDArray[Any]], first: int, last: int) -> None:
        expected = self._digests[first:last]
        if not any(expected):
            return
        for index, (found, wanted) in enumerate(
            zip(request_digests(stored), expected, strict=True)
        ):
            if wanted is not None and found != wanted:
                name = self.metadata.requests[first + index].request_id
                raise InputError(
                    f"bad lattice file: request `{name}`: its contents have sha256 {found[:12]}…, "
                    f"not {wanted[:12]}… as when it was recorded",
                    where=str(self.path),
                    hint="the file was damaged or edited; copy it or record it again",
                )


def _expected(metadata: LatticeMetadata) -> dict[str, tuple[str, Axes]]:
    """Tensors that a file with this metadata must hold."""
    if metadata.packed is not None:
        return {name: TENSORS[name] for name in _INDEX} | PACKED_TENSORS
    if metadata.drafter_kind == "dflash":
        return {name: form for name, form in TENSORS.items() if name != "edge"}
    return TENSORS


def _metadata(path: Path, stored: dict[str, str]) -> LatticeMetadata:
    if TREES_KEY in stored:
        raise InputError(
            "this recording holds the trees of an EAGLE drafter, no lattices",
            where=str(path),
            hint="`specpilot replay` and `specpilot lattice inspect` read it",
        )
    if METADATA_KEY not in stored:
        raise InputError(
            f"not a lattice file: no `{METADATA_KEY}` entry in its metadata",
            where=str(path),
            hint="make a recording with `specpilot record`",
        )
    try:
        metadata = LatticeMetadata.model_validate_json(stored[METADATA_KEY])
    except ValidationError as error:
        key, problem = first_in_words(error, METADATA_KEY)
        raise InputError(
            f"bad lattice file: metadata key `{key}`: {problem}",
            where=str(path),
            hint="the file may come from another version of specpilot, or another tool",
        ) from error
    if metadata.drafter_kind == "eagle":
        raise InputError(
            "bad lattice file: metadata key `drafter_kind`: an eagle drafter has trees, no lattice",
            where=str(path),
            hint="convert them with `specpilot lattice convert --drafter-kind eagle`",
        )
    return metadata
