"""Two halves of a recording's requests: what is fitted on one is judged on the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpilot_cli.schema.lattice import (
    LatticeMetadata,
    LatticeRecording,
    LatticeSource,
    join_ids,
)


def two_folds(metadata: LatticeMetadata, active: npt.NDArray[np.bool_]) -> npt.NDArray[np.int8]:
    """Fold 0 or 1 of every request, [R] int8: alternating within each benchmark.

    Requests that are not `active`, [R], do not take a turn, and benchmarks share one count, so
    that two requests of two benchmarks land in different folds. Deterministic: no seed to lose.
    """
    names = [request.benchmark for request in metadata.requests]
    members: dict[str, list[int]] = {name: [] for name in names}
    for request, name in enumerate(names):
        members[name].append(request)
    fold = np.zeros(len(names), dtype=np.int8)
    turn = 0
    for own in members.values():
        for request in own:
            if active[request]:
                fold[request] = turn
                turn = 1 - turn
    return fold


def requests_with_steps(source: LatticeSource) -> npt.NDArray[np.bool_]:
    """Requests in which some step has an output token after it, [R] bool: one pass."""
    found: list[npt.NDArray[np.bool_]] = []
    for part in source.parts():
        lengths = np.diff(part.output_offsets)
        request = part.step_request
        useful = part.step_position < lengths[request] - 1
        found.append(np.bincount(request[useful], minlength=part.n_requests) > 0)
    return np.concatenate(found)


@dataclass(frozen=True, slots=True, eq=False)
class RequestSubset:
    """The requests in `chosen`, [R] bool, of a recording: itself a `LatticeSource`."""

    source: LatticeSource
    chosen: npt.NDArray[np.bool_]

    @property
    def metadata(self) -> LatticeMetadata:
        """Of the chosen requests."""
        return _metadata_of(self.source.metadata, self.chosen)

    @property
    def n_positions(self) -> int:
        """Drafted positions per lattice, L."""
        return self.source.n_positions

    @property
    def n_candidates(self) -> int:
        """Candidates per position, K."""
        return self.source.n_candidates

    def parts(self) -> Iterator[LatticeRecording]:
        """The chosen requests of every part that has one."""
        first = 0
        for part in self.source.parts():
            own = self.chosen[first : first + part.n_requests]
            first += part.n_requests
            if own.any():
                yield requests_of(part, own)


def requests_of(recording: LatticeRecording, chosen: npt.NDArray[np.bool_]) -> LatticeRecording:
    """The part of a recording that belongs to the requests in `chosen`, [R] bool, in its order."""
    requests: list[int] = np.flatnonzero(chosen).tolist()
    steps = chosen[recording.step_request]
    renamed = np.cumsum(chosen, dtype=np.int32) - np.int32(1)
    prompt_ids, prompt_offsets = join_ids(recording.prompt(request) for request in requests)
    output_ids, output_offsets = join_ids(recording.output(request) for request in requests)
    return LatticeRecording(
        metadata=_metadata_of(recording.metadata, chosen),
        prompt_ids=prompt_ids,
        prompt_offsets=prompt_offsets,
        output_ids=output_ids,
        output_offsets=output_offsets,
        step_request=renamed[recording.step_request[steps]],
        step_position=recording.step_position[steps],
        candidate_ids=recording.candidate_ids[steps],
        edge=recording.edge[steps],
        unary=recording.unary[steps],
        unary_logsumexp=recording.unary_logsumexp[steps],
        stock_choice=recording.stock_choice[steps],
    )


def _metadata_of(metadata: LatticeMetadata, chosen: npt.NDArray[np.bool_]) -> LatticeMetadata:
    kept = [item for item, own in zip(metadata.requests, chosen, strict=True) if own]
    return metadata.model_copy(update={"requests": kept})
