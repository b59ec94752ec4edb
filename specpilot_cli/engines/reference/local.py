"""The reference engine as a scorer in this process, where no server is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specpilot_cli.engines.base import ForcedScores

if TYPE_CHECKING:
    from specpilot_cli.engines.reference.engine import ReferenceEngine


class LocalScorer:
    """Scores forced tokens with an engine's exact weights and a float32 LM head."""

    def __init__(self, engine: ReferenceEngine) -> None:
        self._engine = engine

    def score(self, input_ids: Sequence[int], start: int) -> ForcedScores:
        """Score the tokens `input_ids[start:]`, each given everything before it; start >= 1."""
        found = self._engine.score(input_ids, start - 1, top_k=1)
        return ForcedScores(
            token_logprobs=np.array(found.logprobs, dtype=np.float64),
            argmax_ids=np.array([ids[0] for ids in found.top_ids], dtype=np.int64),
            argmax_logprobs=np.array([row[0] for row in found.top_logprobs], dtype=np.float64),
        )
