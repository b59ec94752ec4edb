"""Teacher-forced log-probabilities in float32 (the exact pass that audits read, paper §3.3).

Scoring never sees a fault: it answers what the weights say about given tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specpilot_cli.engines.reference.spec import TokenScores

if TYPE_CHECKING:
    from specpilot_cli.engines.reference.model import TargetModel

# Rows whose full-vocabulary logits exist at the same time: 128 rows of a 248k vocabulary are
# 127 MB in float32.
LOGIT_ROWS = 128


class ScoreList:
    """Collects the scores of consecutive tokens, best alternatives included."""

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._top_ids: list[list[int]] = []
        self._top_logprobs: list[list[float]] = []

    def __len__(self) -> int:
        return len(self._ids)

    def add_logits(self, logits: Tensor, targets: Sequence[int]) -> None:
        """Score `targets` [r] with `logits` float32 [r, V], row i predicting token i."""
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        ids = torch.as_tensor(targets, dtype=torch.long)
        chosen = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)
        self._ids.extend(targets)
        self._logprobs.extend(chosen.tolist())
        top_k = min(self.top_k, logits.shape[-1])
        if top_k:
            values, indices = logprobs.topk(top_k, dim=-1)
            self._top_ids.extend(indices.tolist())
            self._top_logprobs.extend(values.tolist())
        else:
            self._top_ids.extend([] for _ in targets)
            self._top_logprobs.extend([] for _ in targets)

    def add_hidden(self, model: TargetModel, hidden: Tensor, targets: Sequence[int]) -> None:
        """Score `targets` [r] from final hidden rows [r, H], a few logit rows at a time."""
        for start in range(0, len(targets), LOGIT_ROWS):
            stop = start + LOGIT_ROWS
            self.add_logits(model.logits(hidden[start:stop]), targets[start:stop])

    def result(self, length: int | None = None) -> TokenScores:
        """The collected scores, cut at `length` tokens where given."""
        return TokenScores(
            token_ids=self._ids[:length],
            logprobs=self._logprobs[:length],
            top_ids=self._top_ids[:length],
            top_logprobs=self._top_logprobs[:length],
        )


@torch.inference_mode()
def score_tokens(
    model: TargetModel, input_ids: Sequence[int], *, start: int, top_k: int, chunk: int
) -> TokenScores:
    """Scores of `input_ids[start + 1:]`, each given everything before it.

    One prefill of the whole sequence in chunks of `chunk` rows; logits exist only for rows that
    score a token. Natural log-probabilities, computed in float32.
    """
    state = model.new_state(len(input_ids))
    scores = ScoreList(top_k)
    # the last token predicts nothing that is asked for
    for begin in range(0, len(input_ids) - 1, chunk):
        tokens = list(input_ids[begin : min(begin + chunk, len(input_ids) - 1)])
        hidden, _ = model.prefill(state, torch.tensor(tokens))
        first = max(start - begin, 0)
        if first < len(tokens):
            targets = list(input_ids[begin + first + 1 : begin + len(tokens) + 1])
            scores.add_hidden(model, hidden[first:], targets)
    return scores.result()
