"""Two halves of a recording's requests: what is fitted on one is judged on the other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specpilot_cli.replay.anchors import Anchors


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
