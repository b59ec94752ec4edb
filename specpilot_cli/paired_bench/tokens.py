"""Prompt texts to token ids, once, so that every system is sent the same tokens."""

from __future__ import annotations

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


def _prompt(prompt: Prompt, ids: tuple[int, ...]) -> TokenPrompt:
    return TokenPrompt(prompt.request_id, prompt.benchmark, ids, prompt.max_new_tokens)
