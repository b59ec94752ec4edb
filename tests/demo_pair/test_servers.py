"""Requests in flight together on real servers get the tokens they get one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specpilot_cli.engines.base import GenerateRequest, Generation
from specpilot_cli.engines.http_client import HttpEngine

PROMPTS = IN_FLIGHT = 4
TIE_NATS = 1e-3


@pytest.fixture(scope="module")
def requests(demo: Any, requests_for: Any) -> list[GenerateRequest]:
    """The first unseen prompts of four kinds, as token ids: no tokenizer takes part."""
    asked: list[GenerateRequest] = requests_for(demo.prompts("unseen", PROMPTS))
    return asked


@pytest.mark.parametrize("name", ["ar", "chain", "tree"])
def test_four_in_flight_give_the_tokens_of_one_by_one(
    server: Callable[[str], str], requests: list[GenerateRequest], name: str
) -> None:
    with HttpEngine(server(name), 120) as client, HttpEngine(server("ar"), 120) as scorer:
        single = client.generate_many(requests, concurrency=1)
        together = client.generate_many(requests, concurrency=IN_FLIGHT)
        parted = [
            (request, one, four)
            for request, one, four in zip(requests, single, together, strict=True)
            if one.output_ids != four.output_ids
        ]
        assert len(parted) <= 1
        for request, one, four in parted:
            assert _gap(scorer, request, one, four) < TIE_NATS
    # they did share steps: a request starts before the one submitted ahead of it has ended
    assert _most_at_once(single) == 1
    assert _most_at_once(together) == IN_FLIGHT
    steps = sum(answer.verify_steps or 0 for answer in single)
    if name != "ar":
        assert sum(answer.completion_tokens - 1 for answer in single) > 2.5 * steps > 0


def _gap(scorer: HttpEngine, request: GenerateRequest, one: Generation, four: Generation) -> float:
    """Nats between the first two tokens that differ, on their common text."""
    pairs = enumerate(zip(one.output_ids, four.output_ids, strict=False))
    at, tokens = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    prefix = [*request.input_ids, *one.output_ids[:at]]
    scores = [scorer.score([*prefix, token], len(prefix)) for token in tokens]
    return float(abs(scores[0].token_logprobs[0] - scores[1].token_logprobs[0]))


def _most_at_once(answers: list[Generation]) -> int:
    """Most answers that were being produced at one moment."""
    return max(
        sum(other.first_byte_s <= answer.first_byte_s < other.last_byte_s for other in answers)
        for answer in answers
    )
