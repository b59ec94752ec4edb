"""A lattice recording: what a drafter offered at each step, and what the target then decoded.

One file is a safetensors file with the tensors named in `TENSORS` and one JSON document under the
metadata key `specpilot`. Reading, writing and checking: `io/lattice_file.py`.

`S` steps, `R` requests, `L` drafted positions, `K` candidates per position. The anchor of a step is
the last committed token, `output_ids[r][p]` with `p = step_position`; lattice position j predicts
`output_ids[r][p + 1 + j]`. `output_ids[r][0]` comes from prefill, so no step predicts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from specpilot_cli.schema.base import FileModel, Label

METADATA_KEY = "specpilot"

Axes = tuple[str, ...]

#: Tensor name → dtype and axes. Axes are named sizes that must agree across tensors.
TENSORS: dict[str, tuple[str, Axes]] = {
    "prompt_ids": ("int32", ("prompt tokens",)),
    "prompt_offsets": ("int64", ("R + 1",)),
    "output_ids": ("int32", ("output tokens",)),
    "output_offsets": ("int64", ("R + 1",)),
    "step_request": ("int32", ("S",)),
    "step_position": ("int64", ("S",)),
    "candidate_ids": ("int32", ("S", "L", "K")),
    "edge": ("float32", ("S", "L", "K", "K")),
    "unary": ("float32", ("S", "L", "K")),
    "unary_logsumexp": ("float32", ("S", "L")),
    "stock_choice": ("int32", ("S", "L")),
}

#: What a packed file holds instead of those four and `edge`; `io/lattice_pack.py` explains it.
PACKED_TENSORS: dict[str, tuple[str, Axes]] = {
    "candidate_ids": ("uint16", ("S", "L", "K")),
    "edge_kept": ("uint8", ("S", "L", "mask bytes")),
    "edge_offsets": ("int64", ("S + 1",)),
    "edge_rows": ("float16", ("kept rows", "K")),
    "unary": ("float16", ("S", "L", "K")),
    "stock_choice": ("uint16", ("S", "L")),
}

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


#: What drafted: DFlash2 and DSpark score a candidate given the one before it, DFlash does not, and
#: EAGLE given its whole path, so that it has trees instead (`schema/tree_recording.py`).
DrafterKind = Literal["dflash2", "dspark", "dflash", "eagle"]


class LatticeRequest(FileModel):
    """One recorded request; its index in the list is the index the tensors use.

    sha256: of everything stored of it, see `io/lattice_digest.py`; in files only.
    """

    request_id: Label
    benchmark: Label
    sha256: Sha256 | None = None


class Packing(FileModel):
    """What a packed recording still answers exactly (`replay/pack.py`).

    exact_nodes: node budget up to which every policy reads only scores that were kept; top_k: the
    same for the paths per level of EAGLE-2.
    """

    exact_nodes: int = Field(ge=1)
    top_k: int = Field(ge=1)


class LatticeMetadata(FileModel):
    """Where a recording comes from and how to read it.

    mode: `dense` has a lattice at every output position, so any policy can be replayed along its
    own trajectory; `anchored` has them only where the recording policy stood.
    block: the drafter's block B; it drafts B - 1 positions (DFlash, DFlash2) or B (DSpark).
    engine: what recorded it, with its version. Outputs are the target's greedy decode.
    drafter_kind: what the scores are conditioned on; a `dflash` file has no tensor `edge`.
    packed: set in a file of `PACKED_TENSORS`, and in what was read from one.
    shard_index, shard_count: this file's place among files that together are one recording.
    """

    schema_version: Literal[1] = 1
    mode: Literal["dense", "anchored"]
    block: int = Field(ge=1)
    engine: str = Field(min_length=1)
    decoding: Literal["greedy"] = "greedy"
    requests: list[LatticeRequest]
    target_sha256: Sha256
    drafter_sha256: Sha256
    drafter_kind: DrafterKind = "dflash2"
    packed: Packing | None = None
    shard_index: int = Field(default=0, ge=0)
    shard_count: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> LatticeMetadata:
        seen: set[str] = set()
        for request in self.requests:
            if request.request_id in seen:
                raise ValueError(f"request_id `{request.request_id}` appears twice")
            seen.add(request.request_id)
        if self.packed is not None and self.drafter_kind in ("dflash", "eagle"):
            raise ValueError(f"an {self.drafter_kind} recording has no edges to pack")
        if self.shard_index >= self.shard_count:
            raise ValueError(f"shard_index {self.shard_index} of {self.shard_count}")
        return self


def join_ids(
    parts: Iterable[Sequence[int] | npt.NDArray[np.int32]],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Token ids of all requests end to end, int32, and where each begins, int64 [R + 1]."""
    arrays = [np.asarray(part, dtype=np.int32) for part in parts]
    return np.concatenate([*arrays, np.empty(0, np.int32)]), offsets_of(map(len, arrays))


def offsets_of(lengths: Iterable[int]) -> npt.NDArray[np.int64]:
    """Where each of several parts of these lengths begins, and the end: int64 [n + 1]."""
    return np.cumsum([0, *lengths], dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class RecordedSteps:
    """What every recording holds: prompts, outputs, and where its steps stood."""

    metadata: LatticeMetadata
    prompt_ids: npt.NDArray[np.int32]
    prompt_offsets: npt.NDArray[np.int64]
    output_ids: npt.NDArray[np.int32]
    output_offsets: npt.NDArray[np.int64]
    step_request: npt.NDArray[np.int32]
    step_position: npt.NDArray[np.int64]

    @property
    def n_requests(self) -> int:
        """Recorded requests, R."""
        return len(self.metadata.requests)

    @property
    def n_steps(self) -> int:
        """Recorded steps, S."""
        return int(self.step_request.shape[0])

    @property
    def n_output_tokens(self) -> int:
        """Output tokens of all requests."""
        return int(self.output_ids.size)

    def prompt(self, request: int) -> npt.NDArray[np.int32]:
        """Prompt token ids of request number `request`."""
        return self.prompt_ids[self.prompt_offsets[request] : self.prompt_offsets[request + 1]]

    def output(self, request: int) -> npt.NDArray[np.int32]:
        """Output token ids of request number `request`, the prefill's token first."""
        return self.output_ids[self.output_offsets[request] : self.output_offsets[request + 1]]


@dataclass(frozen=True, slots=True, eq=False)
class LatticeRecording(RecordedSteps):
    """A recording of lattices in memory; arrays as in `TENSORS`, in their dtypes.

    edge [S, L, K, K]: log-softmax of the selector's score, (predecessor, candidate), in nats; at
    position 0 all predecessor rows are equal. A `dflash` recording has [S, L, 1, K]: unary minus
    unary_logsumexp, the same for every predecessor. unary [S, L, K]: the candidates' logits;
    unary_logsumexp [S, L]: logsumexp of the logits over the full vocabulary. stock_choice [S, L]:
    token ids of the chain that stock would draft.
    """

    candidate_ids: npt.NDArray[np.int32]
    edge: npt.NDArray[np.float32]
    unary: npt.NDArray[np.float32]
    unary_logsumexp: npt.NDArray[np.float32]
    stock_choice: npt.NDArray[np.int32]

    @property
    def n_positions(self) -> int:
        """Drafted positions per lattice, L."""
        return int(self.candidate_ids.shape[1])

    @property
    def n_candidates(self) -> int:
        """Candidates per position, K."""
        return int(self.candidate_ids.shape[2])

    @property
    def conditional(self) -> bool:
        """Whether a candidate's score depends on the one before it."""
        return self.metadata.drafter_kind != "dflash"

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """All arrays by tensor name, in file order, as an unpacked file holds them."""
        names = TENSORS if self.conditional else [name for name in TENSORS if name != "edge"]
        return {name: getattr(self, name) for name in names}

    def parts(self) -> Iterator[LatticeRecording]:
        """The recording itself: the form in which `LatticeSource` gives one of any size."""
        yield self


class LatticeSource(Protocol):
    """A recording that is read in parts, so that it need not fit into memory.

    `metadata` lists all requests. Each pass of `parts` gives recordings of consecutive requests
    that together are the whole, each with the metadata of its own requests.
    """

    @property
    def metadata(self) -> LatticeMetadata:
        """Of the whole recording."""

    @property
    def n_positions(self) -> int:
        """Drafted positions per lattice, L."""

    @property
    def n_candidates(self) -> int:
        """Candidates per position, K."""

    def parts(self) -> Iterator[LatticeRecording]:
        """Recordings of consecutive requests; iterate again for another pass."""
