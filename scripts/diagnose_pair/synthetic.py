"""Recordings of an invented drafter that is right as often as it thinks, and ways to break it.

The true continuation is drawn from the lattice's own probabilities, so a healthy recording is
calibrated by construction. Requests and passages differ in difficulty, as real ones do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from specpilot_cli.schema.lattice import LatticeMetadata, LatticeRecording
from specpilot_kernels.trees import edge_log_probs

VOCABULARY = 4099  # prime: any step walks through all tokens, so candidates are distinct

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Drafter:
    """An invented deployment; the defaults are healthy.

    sharpness: how fast candidates lose probability by rank; 2 is a usual drafter. recall: share of
    true tokens that are candidates, by position it loses `recall_loss`. first_benchmark: factor on
    the sharpness of every third request or so, those of one benchmark. Faults: shift: tokens that
    lattices are off. random_selector: scores after the first position are noise. broken_from:
    position from which the true token is a candidate in one of ten cases. lost: share of true
    tokens that are not offered although the drafter believes so. mixed: share of true tokens that
    fall on any candidate, whatever its score; mixed_from and mixed_from_output: only from this
    context or output position on. loops: share of output that repeats itself.
    """

    n_requests: int = 24
    tokens: int = 120
    prompt_tokens: int = 40
    n_positions: int = 7
    n_candidates: int = 8
    benchmarks: int = 3
    sharpness: float = 2.0
    recall: float = 0.97
    recall_loss: float = 0.005
    first_benchmark: float = 1.0
    shift: int = 0
    random_selector: bool = False
    broken_from: int | None = None
    lost: float = 0.0
    mixed: float = 0.0
    mixed_from: int = 0
    mixed_from_output: int = 0
    loops: float = 0.0


def record(drafter: Drafter, seed: int) -> LatticeRecording:
    """One dense recording."""
    rng = np.random.default_rng(seed)
    outputs = [_output(drafter, rng) for _ in range(drafter.n_requests)]
    prompts = [
        rng.integers(0, VOCABULARY, max(1, int(drafter.prompt_tokens * rng.uniform(0.5, 1.5))))
        for _ in outputs
    ]
    hard = replace(drafter, sharpness=drafter.sharpness * drafter.first_benchmark)
    parts = [
        _lattices(drafter if index % drafter.benchmarks else hard, rng, output, len(prompt))
        for index, (output, prompt) in enumerate(zip(outputs, prompts, strict=True))
    ]
    counts = [len(part["candidate_ids"]) for part in parts]
    return LatticeRecording(
        metadata=LatticeMetadata(
            mode="dense",
            block=drafter.n_positions + 1,
            engine="synthetic 1",
            requests=[
                {"request_id": f"r{index}", "benchmark": f"b{index % drafter.benchmarks}"}
                for index in range(drafter.n_requests)
            ],
            target_sha256="a" * 64,
            drafter_sha256="b" * 64,
        ),
        prompt_ids=np.concatenate(prompts).astype(np.int32),
        prompt_offsets=_offsets([len(prompt) for prompt in prompts]),
        output_ids=np.concatenate(outputs).astype(np.int32),
        output_offsets=_offsets([len(output) for output in outputs]),
        step_request=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
        step_position=np.concatenate([np.arange(n, dtype=np.int64) for n in counts]),
        **{name: np.concatenate([part[name] for part in parts]) for name in parts[0]},
    )


def _output(drafter: Drafter, rng: np.random.Generator) -> Ints:
    length = max(2, int(drafter.tokens * rng.uniform(0.6, 1.4)))
    output = rng.integers(0, VOCABULARY, length)
    looped = int(length * drafter.loops)
    if looped:
        period = int(rng.integers(2, 9))
        output[-looped:] = np.resize(output[:period], looped)
    return np.asarray(output, dtype=np.int64)


def _lattices(
    drafter: Drafter, rng: np.random.Generator, output: Ints, prompt: int
) -> dict[str, npt.NDArray[np.generic]]:
    """Lattices of one request at output positions 0 .. n - 2, in the recording's dtypes."""
    anchors, places, width = len(output) - 1, drafter.n_positions, drafter.n_candidates
    # passages differ in difficulty, and neighbouring tokens are alike
    noise = rng.standard_normal(anchors + 8)
    passage = np.convolve(noise, np.ones(9) / 3.0, mode="valid")
    factor = np.exp(0.25 * rng.standard_normal() + 0.25 * passage[:anchors])
    sharp = drafter.sharpness * factor[:, None, None]
    unary = -sharp * np.log1p(np.arange(width)) + 0.3 * rng.standard_normal(
        (anchors, places, width)
    )
    pairs = 0.7 * rng.standard_normal((anchors, places, width, width))
    scores = unary[:, :, None, :] + pairs
    if drafter.random_selector:
        scores[:, 1:] = 4.0 * pairs[:, 1:]
    scores[:, 0] = scores[:, 0, :1]
    edge = edge_log_probs(scores)
    index = _paths(drafter, rng, unary if drafter.random_selector else None, edge, prompt)
    ids, recall = _candidates(drafter, rng, output, index, prompt)
    norm = np.log(np.exp(unary).sum(axis=-1)) - np.log(recall)
    return {
        "candidate_ids": ids.astype(np.int32),
        "edge": edge,
        "unary": unary.astype(np.float32),
        "unary_logsumexp": norm.astype(np.float32),
        "stock_choice": _walk(edge, ids),
    }


def _paths(
    drafter: Drafter,
    rng: np.random.Generator,
    unary: Array | None,
    edge: npt.NDArray[np.float32],
    prompt: int,
) -> Ints:
    """Index of the true candidate, [A, L]: drawn from the scores, or from `unary` if given."""
    anchors, places, width = edge.shape[:3]
    index = np.zeros((anchors, places), dtype=np.int64)
    before = np.zeros(anchors, dtype=np.int64)
    position = np.arange(anchors)
    late = (position + prompt >= drafter.mixed_from) & (position >= drafter.mixed_from_output)
    for place in range(places):
        row = edge[position, place, before].astype(np.float64)
        if unary is not None and place > 0:
            row = unary[:, place]
        gumbel = -np.log(-np.log(rng.uniform(size=row.shape)))
        before = (row + gumbel).argmax(axis=-1)
        astray = late & (rng.random(anchors) < drafter.mixed)
        before = np.where(astray, rng.integers(0, width, anchors), before)
        index[:, place] = before
    return index


def _candidates(
    drafter: Drafter, rng: np.random.Generator, output: Ints, index: Ints, prompt: int
) -> tuple[Ints, Array]:
    """Candidate tokens [A, L, K] with the true one at `index`, or nowhere; claimed recall [L]."""
    anchors, places = index.shape
    recall = drafter.recall - drafter.recall_loss * np.arange(places)
    ahead = np.arange(anchors)[:, None] + 1 + np.arange(places) + drafter.shift
    inside = (ahead >= 0) & (ahead < len(output))
    strangers = rng.integers(0, VOCABULARY, ahead.shape)
    truth = np.where(inside, output[np.clip(ahead, 0, len(output) - 1)], strangers)
    real = recall - drafter.lost
    if drafter.broken_from is not None:
        real = np.where(np.arange(places) >= drafter.broken_from, 0.1, real)
    offered = rng.random(ahead.shape) < real
    step = rng.integers(1, VOCABULARY, ahead.shape)
    order = np.arange(drafter.n_candidates)
    # the true token is where order == index, and never where the walk starts one step beyond it
    walk = np.where(offered[..., None], order - index[..., None], order + 1)
    return (truth[..., None] + step[..., None] * walk) % VOCABULARY, recall


def _walk(edge: npt.NDArray[np.float32], ids: Ints) -> npt.NDArray[np.int32]:
    anchors, places = ids.shape[:2]
    position, before = np.arange(anchors), np.zeros(anchors, dtype=np.int64)
    tokens = np.empty((anchors, places), dtype=np.int32)
    for place in range(places):
        before = edge[position, place, before].argmax(axis=-1)
        tokens[:, place] = ids[position, place, before]
    return tokens


def _offsets(lengths: list[int]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
