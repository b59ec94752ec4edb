"""A lattice recording: what a drafter offered at each step, and what the target then decoded.

One file is a safetensors file with the tensors named in `TENSORS` and one JSON document under the
metadata key `specpilot`. Reading, writing and checking: `io/lattice_file.py`.

`S` steps, `R` requests, `L` drafted positions, `K` candidates per position. The anchor of a step is
the last committed token, `output_ids[r][p]` with `p = step_position`; lattice position j predicts
`output_ids[r][p + 1 + j]`. `output_ids[r][0]` comes from prefill, so no step predicts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from specpilot_cli.schema.base import FileModel

METADATA_KEY = "specpilot"

#: Tensor name → dtype and axes. Axes are named sizes that must agree across tensors.
TENSORS: dict[str, tuple[str, tuple[str, ...]]] = {
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

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class LatticeRequest(FileModel):
    """One recorded request; its index in the list is the index the tensors use."""

    request_id: str = Field(min_length=1)
    benchmark: str = Field(min_length=1)


class LatticeMetadata(FileModel):
    """Where a recording comes from and how to read it.

    mode: `dense` has a lattice at every output position, so any policy can be replayed along its
    own trajectory; `anchored` has them only where the recording policy stood.
    block: the drafter's block B; it drafts B - 1 positions (DFlash, DFlash2) or B (DSpark).
    engine: what recorded it, with its version. Outputs are the target's greedy decode.
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
    shard_index: int = Field(default=0, ge=0)
    shard_count: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> LatticeMetadata:
        seen: set[str] = set()
        for request in self.requests:
            if request.request_id in seen:
                raise ValueError(f"request_id `{request.request_id}` appears twice")
            seen.add(request.request_id)
        if self.shard_index >= self.shard_count:
            raise ValueError(f"shard_index {self.shard_index} of {self.shard_count}")
        return self


@dataclass(frozen=True, slots=True, eq=False)
class LatticeRecording:
    """A recording in memory; arrays as in `TENSORS`, in their dtypes.

    edge [S, L, K, K]: log-softmax of the selector's score, (predecessor, candidate), in nats; at
    position 0 all predecessor rows are equal. unary [S, L, K]: the candidates' logits;
    unary_logsumexp [S, L]: logsumexp of the logits over the full vocabulary. stock_choice [S, L]:
    token ids of the chain that stock would draft.
    """

    metadata: LatticeMetadata
    prompt_ids: npt.NDArray[np.int32]
    prompt_offsets: npt.NDArray[np.int64]
    output_ids: npt.NDArray[np.int32]
    output_offsets: npt.NDArray[np.int64]
    step_request: npt.NDArray[np.int32]
    step_position: npt.NDArray[np.int64]
    candidate_ids: npt.NDArray[np.int32]
    edge: npt.NDArray[np.float32]
    unary: npt.NDArray[np.float32]
    unary_logsumexp: npt.NDArray[np.float32]
    stock_choice: npt.NDArray[np.int32]

    @property
    def n_requests(self) -> int:
        """Recorded requests, R."""
        return len(self.metadata.requests)

    @property
    def n_steps(self) -> int:
        """Recorded lattices, S."""
        return int(self.step_request.shape[0])

    @property
    def n_positions(self) -> int:
        """Drafted positions per lattice, L."""
        return int(self.candidate_ids.shape[1])

    @property
    def n_candidates(self) -> int:
        """Candidates per position, K."""
        return int(self.candidate_ids.shape[2])

    def prompt(self, request: int) -> npt.NDArray[np.int32]:
        """Prompt token ids of request number `request`."""
        return self.prompt_ids[self.prompt_offsets[request] : self.prompt_offsets[request + 1]]

    def output(self, request: int) -> npt.NDArray[np.int32]:
        """Output token ids of request number `request`, the prefill's token first."""
        return self.output_ids[self.output_offsets[request] : self.output_offsets[request + 1]]

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """All arrays by tensor name, in file order."""
        return {name: getattr(self, name) for name in TENSORS}
