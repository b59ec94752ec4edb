"""Two halves of a recording's requests: what is fitted on one is judged on the other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specpilot_cli.replay.anchors import Anchors
from specpilot_cli.schema.lattice import LatticeRecording


def two_folds(anchors: Anchors) -> npt.NDArray[np.int8]:
    """Fold 0 or 1 of every request, [R] int8: alternating within each benchmark.

    Requests without an anchor do not take a turn, and benchmarks share one count, so that two
    requests of two benchmarks land in different folds. Deterministic: no seed to lose.
    """
    names = [request.benchmark for request in anchors.recording.metadata.requests]
    fold = np.zeros(len(names), dtype=np.int8)
    turn = 0
    for name in dict.fromkeys(names):
        for request, own in enumerate(names):
            if own == name and anchors.count[request] > 0:
                fold[request] = turn
                turn = 1 - turn
    return fold


def requests_of(recording: LatticeRecording, chosen: npt.NDArray[np.bool_]) -> LatticeRecording:
    """The part of a recording that belongs to the requests in `chosen`, [R] bool, in its order."""
    requests: list[int] = np.flatnonzero(chosen).tolist()
    steps = chosen[recording.step_request]
    renamed = np.cumsum(chosen, dtype=np.int32) - np.int32(1)
    kept = [recording.metadata.requests[request] for request in requests]
    prompts = [recording.prompt(request) for request in requests]
    outputs = [recording.output(request) for request in requests]
    return LatticeRecording(
        metadata=recording.metadata.model_copy(update={"requests": tuple(kept)}),
        prompt_ids=np.concatenate([*prompts, np.empty(0, np.int32)]),
        prompt_offsets=np.cumsum([0, *map(len, prompts)], dtype=np.int64),
        output_ids=np.concatenate([*outputs, np.empty(0, np.int32)]),
        output_offsets=np.cumsum([0, *map(len, outputs)], dtype=np.int64),
        step_request=renamed[recording.step_request[steps]],
        step_position=recording.step_position[steps],
        candidate_ids=recording.candidate_ids[steps],
        edge=recording.edge[steps],
        unary=recording.unary[steps],
        unary_logsumexp=recording.unary_logsumexp[steps],
        stock_choice=recording.stock_choice[steps],
    )
