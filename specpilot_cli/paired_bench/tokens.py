"""Prompt texts to token ids, once, so that every system is sent the same tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from specpilot_cli.engines.base import EngineClient, GenerateRequest
from specpilot_cli.errors import MeasurementInvalid
from specpilot_cli.paired_bench.types import TokenPrompt
from specpilot_cli.schema.prompts import Prompt
from specpilot_cli.ui import Reporter, SilentReporter


def tokenize(
    prompts: Sequence[Prompt], encode: Callable[[str], tuple[int, ...]]
) -> list[TokenPrompt]:
    """The prompts as token ids from `encode`."""
    return [_prompt(prompt, encode(prompt.text)) for prompt in prompts]


def tokenize_with_server(
    prompts: Sequence[Prompt], engine: EngineClient, *, reporter: Reporter | None = None
) -> list[TokenPrompt]:
    """Token ids as `engine`'s own tokenizer sees them, learnt from one-token answers.

    Raises MeasurementInvalid if the server does not report the ids it used.
    """
    reporter = reporter or SilentReporter()
    found = []
    for done, prompt in enumerate(prompts):
        reporter.progress("tokenizing", done, len(prompts))
        request = GenerateRequest(prompt.request_id, (), 1, text=prompt.text)
        ids = engine.generate(request).prompt_ids
        if not ids:
            raise MeasurementInvalid(
                "the server does not report the prompt's token ids",
                hint="give the target's folder with --tokenizer",
                where=prompt.request_id,
            )
        found.append(_prompt(prompt, ids))
    reporter.progress("tokenizing", len(prompts), len(prompts))
    return found


def texts_sha256(prompts: Sequence[Prompt]) -> str:
    """SHA-256 over ids, benchmarks, limits and texts, in order."""
    digest = hashlib.sha256()
    for p in prompts:
        head = f"{p.request_id}\0{p.benchmark}\0{p.max_new_tokens}\0"
        digest.update(hashlib.sha256((head + p.text).encode()).digest())
    return digest.hexdigest()


def _prompt(prompt: Prompt, ids: tuple[int, ...]) -> TokenPrompt:
    return TokenPrompt(prompt.request_id, prompt.benchmark, ids, prompt.max_new_tokens)
