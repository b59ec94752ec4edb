"""Greedy decoding of the reference engine is transformers' own, token by token, in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from specpilot_cli.engines.reference.engine import ReferenceEngine
from specpilot_cli.engines.reference.spec import EngineResult, SpecConfig

PROMPTS = 20
NEW_TOKENS = 128
EOS = 0


@pytest.fixture(scope="module")
def theirs(demo: Any) -> Any:
    """The target as transformers loads it from the folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(demo.target), dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def ours(engine: ReferenceEngine, demo: Any, requests_for: Any) -> list[EngineResult]:
    """Greedy outputs of the first development prompts of every kind, end token ignored."""
    requests = [
        replace(request, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        for request in requests_for(demo.prompts("dev", PROMPTS))
    ]
    return engine.generate(requests, spec=SpecConfig())


def _generate(model: Any, prompt: Sequence[int], **changes: Any) -> list[int]:
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **changes}
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return out[0, len(prompt) :].tolist()


def _first_difference(engine: ReferenceEngine, result: EngineResult, other: list[int]) -> str:
    """Where two outputs part, and by how little the target prefers one: for the message."""
    at = next(i for i, (a, b) in enumerate(zip(result.output_ids, other, strict=True)) if a != b)
    prefix = [*result.prompt_ids, *result.output_ids[:at]]
    mine, their = result.output_ids[at], other[at]
    logprob = [engine.score([*prefix, t], len(prefix) - 1).logprobs[0] for t in (mine, their)]
    return f"{result.request_id} at {at}: {mine} not {their}, {logprob[0] - logprob[1]:.2e} nats"


def test_all_tokens_equal(
    engine: ReferenceEngine, ours: list[EngineResult], theirs: Any, monkeypatch: Any
) -> None:
    # without an end token nothing stops, and nothing is masked as `min_new_tokens` would mask it
    monkeypatch.setattr(theirs.generation_config, "eos_token_id", None)
    assert len(ours) == PROMPTS
    assert len({result.request_id.split("-")[1] for result in ours}) == 8
    differences = []
    for result in ours:
        expected = _generate(theirs, result.prompt_ids)
        assert len(expected) == len(result.output_ids) == NEW_TOKENS
        if tuple(expected) != result.output_ids:
            differences.append(_first_difference(engine, result, expected))
    assert differences == []


def test_both_stop_at_the_end_token(
    engine: ReferenceEngine, ours: list[EngineResult], theirs: Any, requests_for: Any, demo: Any
) -> None:
    """The folder's own generation settings end an output where the engine does."""
    ending = [result for result in ours if EOS in result.output_ids]
    assert len(ending) >= 2
    asked = {request.request_id: request for request in requests_for(demo.prompts("dev", PROMPTS))}
    requests = [replace(asked[r.request_id], max_new_tokens=NEW_TOKENS) for r in ending]
    stopped = engine.generate(requests, spec=SpecConfig())
    for full, result in zip(ending, stopped, strict=True):
        assert result.output_ids == full.output_ids[: full.output_ids.index(EOS) + 1]
        assert result.finish_reason == {"type": "stop", "matched": EOS}
    assert _generate(theirs, stopped[0].prompt_ids) == list(stopped[0].output_ids)


def test_same_logits_for_a_given_text(
    engine: ReferenceEngine, ours: list[EngineResult], theirs: Any
) -> None:
    """Not only the argmax: every log-probability, to float32 rounding."""
    for result in ours[:8]:
        ids = [*result.prompt_ids, *result.output_ids]
        with torch.inference_mode():
            logprobs = theirs(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        scored = torch.tensor(engine.score(ids).logprobs)
        assert (scored - expected).abs().max() < 1e-3


def test_the_tokenizer_loads_too(engine: ReferenceEngine, demo: Any) -> None:
    """The class that the folder names cuts text as the engine does.

    `AutoTokenizer` does not ask the folder: it takes Qwen's own splitting for this model type.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(demo.target))
    for prompt in demo.prompts("unseen", 64):
        assert tuple(tokenizer(prompt.text)["input_ids"]) == engine.encode(prompt.text)
    assert tokenizer.eos_token_id == EOS
