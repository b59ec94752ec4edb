"""What is measured of a model pair's outputs: tokens per step, repetition, token size, departures.

Tokens per step (τ) count what a verify step commits, the bonus token included and the token of the
prefill left out: (output tokens - 1) / steps, summed over requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specpilot_cli.engines.reference.engine import ReferenceEngine
from specpilot_kernels.trees import chain, edge_log_probs

NGRAM = 8


@dataclass(frozen=True, slots=True)
class Departure:
    """The first output index at which two outputs of one prompt differ, and how near the tie was.

    `margin_nats` is the gap between the two tokens' teacher-forced log-probabilities after the
    common prefix; `best` says which of the two is the more likely one ("left" or "right").
    `below_argmax_nats` is how far the less likely one lies below the best token of all: equal to
    the margin unless a third token is better than both.
    """

    request_id: str
    position: int
    left_token: int
    right_token: int
    best: str
    margin_nats: float
    below_argmax_nats: float


def tokens_per_step(output_tokens: Sequence[int], steps: Sequence[int]) -> float:
    """τ of requests with these output lengths (prefill's token included) and verify steps."""
    return sum(n - 1 for n in output_tokens) / max(1, sum(steps))


def repeated_pct(ids: Sequence[int], n: int = NGRAM) -> float:
    """Percentage of an output's n-grams that occurred earlier in it; 0 if it has none."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 100 * (1 - len(set(grams)) / len(grams)) if grams else 0.0


def bytes_per_token(engine: ReferenceEngine, ids: Sequence[int]) -> float:
    """UTF-8 bytes per token of an output, end-of-text tokens left out."""
    kept = [i for i in ids if i not in engine.eos_ids]
    return len(engine.tokenizer.decode(kept).encode()) / max(1, len(kept))


def mean_by_kind(values: Sequence[float], kinds: Sequence[str]) -> dict[str, float]:
    """Mean of every kind's values, kinds in alphabetical order."""
    return {
        kind: sum(v for v, k in zip(values, kinds, strict=True) if k == kind) / kinds.count(kind)
        for kind in sorted(set(kinds))
    }


def equal_weight_mean(by_kind: Mapping[str, float]) -> float:
    """Mean of the kinds' means."""
    return sum(by_kind.values()) / len(by_kind)


def departure(
    engine: ReferenceEngine,
    request_id: str,
    prompt: Sequence[int],
    left: Sequence[int],
    right: Sequence[int],
) -> Departure | None:
    """Where two greedy outputs of one prompt part, scored by `engine`; None if they are equal.

    Raises `ValueError` if one output is a proper prefix of the other: greedy outputs with the same
    limit and the same end token cannot be.
    """
    if tuple(left) == tuple(right):
        return None
    at = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), None)
    if at is None:
        raise ValueError(f"{request_id}: one output continues the other")
    context = [*prompt, *left[:at]]
    scores = [engine.score([*context, ids[at]], len(context) - 1, top_k=1) for ids in (left, right)]
    values = [score.logprobs[0] for score in scores]
    return Departure(
        request_id=request_id,
        position=at,
        left_token=left[at],
        right_token=right[at],
        best="left" if values[0] >= values[1] else "right",
        margin_nats=abs(values[0] - values[1]),
        below_argmax_nats=scores[0].top_logprobs[0][0] - min(values),
    )


@torch.inference_mode()
def chain_steps_along(
    engine: ReferenceEngine, prompt: Sequence[int], output: Sequence[int], *, block: int
) -> list[int]:
    """Accepted drafts of every step that the stock chain would need to produce `output`.

    The drafter reads the engine's own hidden states of prompt and output; a draft is accepted if
    it is the token that `output` has there. Whether the engine's target would choose that token
    is not asked, so outputs of another engine can be compared draft by draft.
    """
    drafter = engine.drafter
    if drafter is None:
        raise ValueError("the engine was loaded without a drafter")
    n_anchors = len(output) - 1
    if n_anchors < 1:
        return []
    tokens = torch.tensor([*prompt, *output[:-1]])
    _, features = engine.model.forward_sequences(tokens.unsqueeze(0))
    positions = torch.arange(len(prompt), len(tokens))
    lattices = drafter.dense_lattices(features[0], tokens[positions], positions, block=block)
    ids = lattices.candidate_ids.numpy().astype(np.int32)
    edge = edge_log_probs(lattices.scores.numpy())
    accepted, at = [], 0
    while at < n_anchors:
        drafts, truth = chain(ids[at], edge[at]).token.tolist(), output[at + 1 :]
        pairs = enumerate(zip(drafts, truth, strict=False))
        count = next((i for i, (a, b) in pairs if a != b), min(len(drafts), len(truth)))
        accepted.append(count)
        at += count + 1
    return accepted
