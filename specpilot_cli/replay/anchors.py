"""The recorded steps as policies see them: what was offered, and what truly followed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError
from specpilot_cli.schema.deployment import (
    OTHER_BLOCK_TIMES,
    Deployment,
    block_note,
    of_recording,
    projected_because,
)
from specpilot_cli.schema.lattice import LatticeMetadata, LatticeRecording, LatticeSource
from specpilot_cli.ui import Reporter

BASES = ("extrapolated", "interpolated", "recorded")
"""How a step time was obtained, the weakest first."""

MOST_PATHS = 4096
"""Most paths per level of EAGLE-2: their pairs with candidates are held at once."""

_CHUNK_ANCHORS = 1024  # a chunk of 15 × 16 × 16 float32 edges stays below 16 MiB


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step costs by its nodes: seconds[n] for n drafted nodes, and a plain decoding step.

    bases: how each of `seconds` was obtained, `recorded`, `interpolated` or `extrapolated`; empty
    if nobody says. deployment: whose step was timed, None if nobody says.
    """

    seconds: tuple[float, ...]
    ar_step_s: float
    source: str
    bases: tuple[str, ...] = ()
    deployment: Deployment | None = None

    def check(self, most_nodes: int) -> None:
        """Raise `InputError` unless steps of up to `most_nodes` nodes are priced."""
        if most_nodes >= len(self.seconds):
            raise InputError(
                f"no step time for {most_nodes} nodes",
                where="--step-times",
                hint=f"the times end at {len(self.seconds) - 1} nodes: ask for fewer, or time more",
            )

    def basis(self, nodes: npt.NDArray[np.bool_]) -> str | None:
        """The weakest basis of the times at these node counts, [at most N + 1] bool."""
        used = {self.bases[n] for n in np.flatnonzero(nodes).tolist()} if self.bases else set()
        return next((name for name in BASES if name in used), None)

    def projected_because(self, metadata: LatticeMetadata) -> tuple[str, ...]:
        """Why speedups of this recording are projections; empty where they are not."""
        if self.deployment is None:
            return ()
        return projected_because(of_recording(metadata), self.deployment, what="the step times")

    def warn_of_block(self, metadata: LatticeMetadata, reporter: Reporter) -> None:
        """Warn where drafting was timed at another block than the recording's."""
        if self.deployment is not None:
            note = block_note(
                of_recording(metadata), self.deployment, what="the step times",
                consequence=OTHER_BLOCK_TIMES,
            )  # fmt: skip
            if note is not None:
                reporter.warn(note)


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What to change about the recorded drafter before replaying.

    positions: use only the first so many drafted positions (default all).
    depth: cap on the depth of any tree. In replay it accepts what `positions` would; the two
    differ in what drafting costs.
    temperature: divides the conditional scores before they are normalised; 1 changes nothing.
    recall: probability by position that the true token is a candidate at all, multiplied into every
    conditional score of that position; None leaves it out, as the recorded scores do.
    top_k: paths that EAGLE-2 expands per level, and children of each.
    step_cost: step times, for the cost-aware policy and for speedups; must reach every budget.
    """

    positions: int | None = None
    depth: int | None = None
    temperature: float = 1.0
    recall: tuple[float, ...] | None = None
    top_k: int = 4
    step_cost: StepCost | None = None


#: The recorded drafter, unchanged.
AS_RECORDED = ReplayOptions()


class RecordedOutputs(Protocol):
    """What lining up steps with outputs needs; see `LatticeRecording` for the arrays."""

    @property
    def metadata(self) -> LatticeMetadata: ...
    @property
    def output_ids(self) -> npt.NDArray[np.int32]: ...
    @property
    def output_offsets(self) -> npt.NDArray[np.int64]: ...
    @property
    def step_request(self) -> npt.NDArray[np.int32]: ...
    @property
    def step_position(self) -> npt.NDArray[np.int64]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """The steps of a recording that have something to predict, `A` of them, in file order.

    step [A] int64: index into the recording's step axis. request [A] int64. remaining [A] int32:
    output tokens after the anchor, at least 1. truth [A, P] int32: the tokens that followed, -1
    past the end of the output. first [R] and count [R] int64: each request's range of anchors.

    An output ends where the target ended it, so an end-of-sequence token is the last token and is
    predicted like any other; drafts behind it have no truth and are never accepted.
    """

    metadata: LatticeMetadata
    step: npt.NDArray[np.int64]
    request: npt.NDArray[np.int64]
    remaining: npt.NDArray[np.int32]
    truth: npt.NDArray[np.int32]
    first: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]

    @property
    def n_anchors(self) -> int:
        """Steps that can be replayed, A."""
        return int(self.step.shape[0])

    @property
    def n_positions(self) -> int:
        """Positions in use, P: the depth that no tree exceeds."""
        return int(self.truth.shape[1])

    @property
    def n_requests(self) -> int:
        """Requests, R, those without an anchor included."""
        return int(self.count.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class Anchors(Steps):
    """Steps with their lattices."""

    recording: LatticeRecording

    @property
    def candidate_ids(self) -> npt.NDArray[np.int32]:
        """Candidates of all anchors, [A, P, K] int32."""
        ids = self.recording.candidate_ids[:, : self.n_positions]
        return ids if self.n_anchors == self.recording.n_steps else ids[self.step]

    def chunks(self) -> Iterator[slice]:
        """Ranges of anchors small enough to copy their edges at once."""
        for start in range(0, self.n_anchors, _CHUNK_ANCHORS):
            yield slice(start, min(start + _CHUNK_ANCHORS, self.n_anchors))

    def truth_in_lattice(self) -> npt.NDArray[np.bool_]:
        """Where the true token is among the candidates of its position, [A, P] bool."""
        hits = (self.candidate_ids == self.truth[:, :, None]).any(axis=-1)
        return np.asarray(hits, dtype=np.bool_)

    def rows(self, before: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rows of `edge` for these predecessors: all row 0 where scores have no predecessor."""
        return before if self.recording.edge.shape[2] > 1 else np.zeros_like(before)


def prepare(recording: LatticeRecording, options: ReplayOptions) -> Anchors:
    """Line up every recorded step with the output tokens that followed it.

    Raises InputError if an option does not fit the recording or nothing is left to replay.
    """
    anchors = line_up(recording, options)
    if anchors.n_anchors == 0:
        raise nothing_to_replay()
    return anchors


def line_up(recording: LatticeRecording, options: ReplayOptions) -> Anchors:
    """`prepare` for a part of a recording, which may have nothing to replay."""
    steps = line_up_steps(recording, positions_in_use(recording, options))
    return Anchors(
        steps.metadata, steps.step, steps.request, steps.remaining, steps.truth, steps.first,
        steps.count, recording,
    )  # fmt: skip


def line_up_steps(recording: RecordedOutputs, n_positions: int) -> Steps:
    """The steps of a part and what followed them, whatever was drafted there."""
    lengths = np.diff(recording.output_offsets)
    request = recording.step_request.astype(np.int64)
    remaining = lengths[request] - 1 - recording.step_position
    step = np.flatnonzero(remaining > 0)
    request, left = request[step], remaining[step].astype(np.int32)
    ahead = np.arange(n_positions)
    known = ahead < left[:, None]  # [A, P]
    start = recording.output_offsets[request] + recording.step_position[step] + 1
    index = np.where(known, start[:, None] + ahead, 0)
    truth = np.full(known.shape, -1, dtype=np.int32)
    truth[known] = recording.output_ids[index[known]]
    count = np.bincount(request, minlength=lengths.size).astype(np.int64)
    first = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(count)])[:-1]
    return Steps(recording.metadata, step, request, left, truth, first, count)


def nothing_to_replay() -> InputError:
    """The error of a recording in which no step has an output token after it."""
    return InputError(
        "nothing to replay: no recorded step has an output token after it",
        hint="record requests of at least two output tokens",
    )


def positions_in_use(recording: LatticeSource, options: ReplayOptions) -> int:
    """Positions that the options leave; InputError where an option does not fit the recording."""
    for name, value in (("--positions", options.positions), ("--depth", options.depth)):
        if value is not None and not 1 <= value <= recording.n_positions:
            raise InputError(
                f"{name} {value} is outside 1 to {recording.n_positions}, "
                "the positions of this recording",
                where=name,
                hint="leave the option out to use all positions",
            )
    if not (options.temperature > 0 and np.isfinite(options.temperature)):
        raise InputError(
            f"--temperature {options.temperature} is not a positive number",
            where="--temperature",
            hint="1 leaves the scores as they are",
        )
    if recording.metadata.drafter_kind == "dflash" and options.temperature != 1.0:
        raise InputError(
            "--temperature needs scores given the predecessor; a dflash drafter has none",
            where="--temperature",
            hint="leave the option out",
        )
    if not 1 <= options.top_k <= MOST_PATHS:
        raise InputError(
            f"--top-k {options.top_k} is outside 1 to {MOST_PATHS}",
            where="--top-k",
            hint="paths per level of EAGLE-2; the default is 4",
        )
    wanted = [recording.n_positions, options.positions, options.depth]
    return min(value for value in wanted if value is not None)
