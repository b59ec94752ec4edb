"""Small lattice recordings for file tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from specpilot_cli.schema.lattice import LatticeMetadata, LatticeRecording, LatticeRequest
from specpilot_kernels.trees import edge_log_probs


def make_small(lengths: Sequence[int], n_positions: int, n_candidates: int) -> LatticeRecording:
    """A dense recording of requests of these output lengths, scores at random."""
    rng = np.random.default_rng(0)
    anchors = [(r, p) for r, length in enumerate(lengths) for p in range(length - 1)]
    shape = (len(anchors), n_positions, n_candidates)
    scores = rng.normal(size=(*shape, n_candidates))
    scores[:, 0] = scores[:, 0, :1]
    unary = rng.normal(size=shape).astype(np.float32)
    order = np.argsort(rng.random((*shape[:2], 50)), -1)[..., :n_candidates]
    return LatticeRecording(
        metadata=LatticeMetadata(
            mode="dense",
            block=n_positions + 1,
            engine="test 1",
            requests=[
                LatticeRequest(request_id=f"r{i}", benchmark="b") for i in range(len(lengths))
            ],
            target_sha256="0" * 64,
            drafter_sha256="1" * 64,
        ),
        prompt_ids=np.arange(2 * len(lengths), dtype=np.int32),
        prompt_offsets=np.arange(0, 2 * len(lengths) + 1, 2, dtype=np.int64),
        output_ids=np.arange(sum(lengths), dtype=np.int32),
        output_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        step_request=np.array([r for r, _ in anchors], dtype=np.int32),
        step_position=np.array([p for _, p in anchors], dtype=np.int64),
        candidate_ids=order.astype(np.int32),
        edge=edge_log_probs(scores),
        unary=unary,
        unary_logsumexp=np.log(np.exp(unary.astype(float)).sum(-1) + 1).astype(np.float32),
        stock_choice=np.zeros(shape[:2], dtype=np.int32),
    )


@pytest.fixture
def small_lattice() -> Callable[..., LatticeRecording]:
    """The factory `make_small`."""
    return make_small
