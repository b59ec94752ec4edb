"""Teacher-forced scores against a direct computation on the whole sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specpilot_cli.engines.reference import score
from specpilot_cli.errors import InputError

LOGPROB_TOLERANCE_NATS = 2e-5
IDS = [int(t) for t in np.random.default_rng(5).integers(1, 319, size=90)]


@pytest.fixture(scope="module")
def engine(pair: Any) -> Any:
    """A plain engine."""
    return pair.engine("ar", with_drafter=False)


def _direct(engine: Any) -> torch.Tensor:
    with torch.inference_mode():
        hidden, _ = engine.model.forward_sequences(torch.tensor([IDS]))
        return torch.log_softmax(engine.model.logits(hidden[0]), dim=-1)


@pytest.mark.parametrize("start", [0, 1, 40, 88])
@pytest.mark.parametrize("chunk", [7, 64, 512])
def test_scores_equal_the_whole_sequence_in_one_pass(
    engine: Any, monkeypatch: pytest.MonkeyPatch, start: int, chunk: int
) -> None:
    monkeypatch.setattr(score, "LOGIT_ROWS", 16)
    scores = score.score_tokens(engine.model, IDS, start=start, top_k=3, chunk=chunk)
    expected = _direct(engine)[start:-1]
    forced = torch.tensor(IDS[start + 1 :])
    assert scores.token_ids == forced.tolist()
    chosen = expected.gather(1, forced.unsqueeze(1)).squeeze(1)
    assert np.allclose(scores.logprobs, chosen, atol=LOGPROB_TOLERANCE_NATS)
    values, ids = expected.topk(3, dim=-1)
    assert scores.top_ids == ids.tolist()
    assert np.allclose(scores.top_logprobs, values, atol=LOGPROB_TOLERANCE_NATS)


def test_greedy_output_is_its_own_argmax(engine: Any, requests_of: Any) -> None:
    [request] = requests_of(1)
    [result] = engine.generate([request])
    ids = [*request.input_ids, *result.output_ids]
    scores = engine.score(ids, len(request.input_ids) - 1)
    assert [top[0] for top in scores.top_ids] == list(result.output_ids)
    assert all(
        own == best[0] for own, best in zip(scores.logprobs, scores.top_logprobs, strict=True)
    )


@pytest.mark.parametrize("start", [-1, 90])
def test_start_outside_the_sequence(engine: Any, start: int) -> None:
    with pytest.raises(InputError, match="cannot score"):
        engine.score(IDS, start)
