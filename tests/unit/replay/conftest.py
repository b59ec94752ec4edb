"""Recordings for replay tests: calibrated random ones, and ones scripted token by token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest

from specpilot_cli.schema.lattice import LatticeMetadata, LatticeRecording
from specpilot_kernels.trees import chain, edge_log_probs

Make = Callable[..., LatticeRecording]
# lattice_of(request, position) -> (candidate ids [L, K], scores [L, K, K])
LatticeOf = Callable[[int, int], tuple[npt.NDArray[Any], npt.NDArray[Any]]]

VOCABULARY = 400


def assemble(
    outputs: Sequence[Sequence[int]],
    lattice_of: LatticeOf,
    *,
    mode: Literal["dense", "anchored"] = "dense",
    anchors: Sequence[tuple[int, int]] | None = None,
    benchmarks: Sequence[str] | None = None,
) -> LatticeRecording:
    """A recording of `outputs` with the lattices that `lattice_of` gives; dense unless anchored."""
    if anchors is None:
        anchors = [(r, p) for r, output in enumerate(outputs) for p in range(len(output) - 1)]
    drawn = [lattice_of(request, position) for request, position in anchors]
    ids = np.array([candidate_ids for candidate_ids, _ in drawn], dtype=np.int32)
    scores = np.array([score for _, score in drawn], dtype=np.float64)
    scores[:, 0] = scores[:, 0, :1]
    edge = edge_log_probs(scores)
    unary = scores.mean(axis=2).astype(np.float32)
    names = benchmarks or [f"bench{r % 2}" for r in range(len(outputs))]
    lengths = [len(output) for output in outputs]
    return LatticeRecording(
        metadata=LatticeMetadata(
            mode=mode,
            block=ids.shape[1] + 1,
            engine="synthetic 1",
            requests=[{"request_id": f"r{r}", "benchmark": name} for r, name in enumerate(names)],
            target_sha256="a" * 64,
            drafter_sha256="b" * 64,
        ),
        prompt_ids=np.arange(2 * len(outputs), dtype=np.int32),
        prompt_offsets=np.arange(0, 2 * len(outputs) + 1, 2, dtype=np.int64),
        output_ids=np.array([token for output in outputs for token in output], dtype=np.int32),
        output_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        step_request=np.array([request for request, _ in anchors], dtype=np.int32),
        step_position=np.array([position for _, position in anchors], dtype=np.int64),
        candidate_ids=ids,
        edge=edge,
        unary=unary,
        unary_logsumexp=np.log(np.exp(unary.astype(np.float64)).sum(-1) + 0.5).astype(np.float32),
        stock_choice=np.array(
            [chain(i, e).token for i, e in zip(ids, edge, strict=True)], dtype=np.int32
        ),
    )


def make_random(
    seed: int,
    *,
    lengths: Sequence[int] = (30, 1, 25, 2, 40, 28),
    n_positions: int = 7,
    n_candidates: int = 8,
    recall: float = 0.95,
    sharpness: float = 2.5,
) -> LatticeRecording:
    """Lattices from which the truth is drawn: the drafter's probabilities are right by design.

    At each anchor a path is drawn from the edges and labelled with the tokens that really follow;
    with probability 1 - recall per position the label is left out, so the truth is off the lattice.
    """
    rng = np.random.default_rng(seed)
    outputs = [rng.integers(0, VOCABULARY, size=length).tolist() for length in lengths]

    def lattice_of(request: int, position: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        shape = (n_positions, n_candidates, n_candidates)
        scores = rng.normal(size=shape) - sharpness * np.log1p(np.arange(n_candidates))
        scores[0] = scores[0, :1]
        edge = edge_log_probs(scores).astype(np.float64)
        ahead = outputs[request][position + 1 : position + 1 + n_positions]
        ids, before = np.empty(shape[:2], dtype=np.int32), 0
        for slot in range(n_positions):
            others = rng.permutation(VOCABULARY)
            true = ahead[slot] if slot < len(ahead) else None
            ids[slot] = others[others != true][:n_candidates]
            before = int(rng.choice(n_candidates, p=_normalised(edge[slot, before])))
            if true is not None and rng.random() < recall:
                ids[slot, before] = true
        return ids, scores

    return assemble(outputs, lattice_of)


def _normalised(log_probs: npt.NDArray[Any]) -> npt.NDArray[Any]:
    probs = np.exp(log_probs)
    return probs / probs.sum()


def make_scripted(
    outputs: Sequence[Sequence[int]], right: Sequence[Sequence[int]], *, n_positions: int = 4
) -> LatticeRecording:
    """`right[r][p]`: how many drafts of the stock chain are right at anchor p of request r.

    The first wrong draft has the true token as second candidate; everything after it is absent.
    Two candidates per position, the first always scored higher.
    """

    def lattice_of(request: int, position: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        n_right = right[request][position]
        ids = np.array([[1000 + s, 2000 + s] for s in range(n_positions)])
        for slot in range(n_positions):
            index = position + 1 + slot
            if index < len(outputs[request]) and slot <= n_right:
                ids[slot, 0 if slot < n_right else 1] = outputs[request][index]
        return ids, np.broadcast_to([1.0, 0.0], (n_positions, 2, 2)).copy()

    return assemble(outputs, lattice_of)


@pytest.fixture
def random_recording() -> Make:
    """The factory `make_random`."""
    return make_random


@pytest.fixture
def scripted_recording() -> Make:
    """The factory `make_scripted`."""
    return make_scripted


@pytest.fixture
def assemble_recording() -> Make:
    """The factory `assemble`."""
    return assemble
