"""Is a server right that continues from states its prefix cache kept in the middle of a step?

A request is answered; others then begin with its prompt and most of its answer, so they start from
states that were kept while it decoded. Each of their tokens is judged by another server, which
scores them in one pass: how many nats it prefers its own best token by.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sglang_bench.load import Ids, generate, prompts_of
from specpilot_cli.engines.http_client import HttpEngine

MOST_REGRET_NATS = 0.25
"""A near-tie: logits in BF16 are off by up to 0.06."""
_PROMPT, _NEW, _ENDINGS, _VOCABULARY = 70, 48, 4, 2000


def reuse(url: str, scorer: str, plain: str, *, new_tokens: int) -> dict[str, Any]:
    """What `url` answers beside a server without its cache; BadAnswer for short answers.

    new_tokens: of the first answer. cached: tokens that the later requests did not compute; as
    many as prompt and answer have, up to the last place where states are kept. regrets_nats: the
    largest of each request; right: that all are near-ties and the cache was used beyond the prompt.
    """
    (prompt,) = prompts_of(1, _PROMPT, _VOCABULARY, seed=29)
    first = generate(url, prompt, new_tokens)["output_ids"]
    endings = prompts_of(_ENDINGS, 3, _VOCABULARY, seed=31)
    begun = [(*prompt, *first[: new_tokens - 2 - at], *end) for at, end in enumerate(endings)]
    later = [generate(url, ids, _NEW) for ids in begun[:1]]
    with ThreadPoolExecutor(_ENDINGS) as pool:  # together, from one state
        later += pool.map(lambda ids: generate(url, ids, _NEW), begun[1:])
    outputs = [tuple(answer["output_ids"]) for answer in later]
    regrets = [largest_regret(scorer, prompt, tuple(first))]
    regrets += [largest_regret(scorer, ids, out) for ids, out in zip(begun, outputs, strict=True)]
    cached = [int(answer["meta_info"]["cached_tokens"]) for answer in later]
    same = [
        tuple(generate(plain, ids, _NEW)["output_ids"]) == out
        for ids, out in zip(begun, outputs, strict=True)
    ]
    return {
        "prompt_tokens": _PROMPT,
        "answer_tokens": new_tokens,
        "cached_tokens": cached,
        "regrets_nats": regrets,
        "equal_to_plain": sum(same),
        "requests": len(later),
        "right": max(regrets) <= MOST_REGRET_NATS and min(cached) > _PROMPT,
    }


def largest_regret(scorer: str, prompt: Ids, output: Ids) -> float:
    """The most nats by which `scorer` prefers another token anywhere in an output."""
    with HttpEngine(scorer) as engine:
        scores = engine.score((*prompt, *output), len(prompt))
    return float((scores.argmax_logprobs - scores.token_logprobs).max())
