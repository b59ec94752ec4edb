"""Teacher forcing: what the target itself says about every token a system emitted.

The scorer is the stock engine with exact weights, no speculation and a float32 LM head; it
prefills prompt and output and reports each output token's log-probability beside the best
one's (paper §3.3). Requests are scored one at a time: log-probabilities over a whole
vocabulary need memory, and a batch would change the scorer's own rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specpilot_cli.engines.base import ForcedScores
from specpilot_cli.schema.outputs import OutputRecord
from specpilot_cli.ui import Reporter, SilentReporter


class Scorer(Protocol):
    """Anything that scores forced tokens; `HttpEngine` is one."""

    def score(self, input_ids: Sequence[int], start: int) -> ForcedScores:
        """Score the tokens `input_ids[start:]`, each given everything before it."""
        ...


@dataclass(frozen=True, slots=True)
class ScoredOutput:
    """One answer with the scorer's view of each of its T tokens."""

    record: OutputRecord
    scores: ForcedScores

    @property
    def n_tokens(self) -> int:
        """T, the number of output tokens."""
        return len(self.scores)

    @property
    def mismatch(self) -> npt.NDArray[np.bool_]:
        """Which tokens are less likely than the best one, bool [T].

        Defined by log-probability and not by id: an exact tie is no mismatch.
        """
        return self.scores.token_logprobs < self.scores.argmax_logprobs

    @property
    def margins(self) -> npt.NDArray[np.float64]:
        """Log-probability gap to the best token, float64 [T], nats."""
        return self.scores.margins


def score_outputs(
    records: Sequence[OutputRecord],
    scorer: Scorer,
    *,
    label: str,
    reporter: Reporter = SilentReporter(),
) -> list[ScoredOutput]:
    """Score every answer, one request at a time, in order."""
    scored = []
    for done, record in enumerate(records):
        reporter.progress(f"scoring {label}", done, len(records))
        tokens = (*record.prompt_ids, *record.output_ids)
        scored.append(ScoredOutput(record, scorer.score(tokens, len(record.prompt_ids))))
    reporter.progress(f"scoring {label}", len(records), len(records))
    return scored
