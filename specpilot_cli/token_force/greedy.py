"""Does a server decode greedily when it is asked to?

Every request names temperature 0 and neutral penalties, but a server may hold to defaults of its
own. One that samples answers the same request, alone, in two ways that part far from a tie: then
there is nothing to audit, and the run has no verdict. A server that samples only under load is
greedy here, and the audit, which runs under load, is what finds it.
"""

from __future__ import annotations

from collections.abc import Sequence

from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.errors import MeasurementInvalid
from specpilot_cli.token_force.collect import Generator, Question, request_of
from specpilot_cli.token_force.scorer import Scorer
from specpilot_cli.token_force.threshold import CAP_NATS, first_departure

QUESTIONS = 8
_TOKENS = 24


def check_greedy(
    engine: Generator, questions: Sequence[Question], scorer: Scorer, *, label: str
) -> None:
    """Ask a few questions twice, one at a time; MeasurementInvalid if rounding cannot be why
    two answers differ: the gap at their first difference exceeds 2δ for the largest δ there is.
    """
    requests: list[GenerateRequest] = [
        request_of(question, max_new_tokens=min(_TOKENS, question.max_new_tokens))
        for question in questions[:QUESTIONS]
    ]
    first, second = (engine.generate_many(requests, concurrency=1) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        at = first_departure(one.output_ids, other.output_ids)
        if at is None:
            continue
        prefix = (*one.prompt_ids, *one.output_ids[:at])
        values = [
            float(scorer.score((*prefix, token), len(prefix)).token_logprobs[-1])
            for token in (one.output_ids[at], other.output_ids[at])
        ]
        gap = abs(values[0] - values[1])
        if gap > 2.0 * CAP_NATS:
            raise MeasurementInvalid(
                f"{label} does not decode greedily: request `{one.request_id}`, asked twice alone, "
                f"got two answers that part at token {at} by {gap:.2f} nats",
                hint="start it without sampling defaults (temperature, penalties); it was asked "
                "for temperature 0",
            )
