"""A scorer that knows the truth: no server, no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specpilot_cli.engines.base import ForcedScores


@dataclass(frozen=True, slots=True)
class LogitScorer:
    """A scorer in memory, from a function that gives the next token's logits of a prefix.

    logits: prefix of token ids -> float [V]. One call per token.
    """

    logits: Callable[[Sequence[int]], np.ndarray]

    def score(self, input_ids: Sequence[int], start: int) -> ForcedScores:
        """Score the tokens `input_ids[start:]`, each given everything before it."""
        if not 1 <= start < len(input_ids):
            raise ValueError(f"cannot score from token {start} of {len(input_ids)}")
        rows = np.stack([self.logits(input_ids[:i]) for i in range(start, len(input_ids))])
        peak = rows.max(axis=1, keepdims=True)
        log_probs = rows - peak - np.log(np.exp(rows - peak).sum(axis=1, keepdims=True))
        index = np.arange(len(rows))
        best = log_probs.argmax(axis=1)
        forced = np.asarray(input_ids[start:], dtype=np.int64)
        return ForcedScores(log_probs[index, forced], best.astype(np.int64), log_probs[index, best])
