"""Prompt texts to token ids, once, so that every system is sent the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specpilot_cli.engines.base import EngineClient, GenerateRequest
from specpilot_cli.errors import InputError, MachineError, MeasurementInvalid
from specpilot_cli.paired_bench.types import TokenPrompt
from specpilot_cli.schema.prompts import Prompt
from specpilot_cli.ui import Reporter, SilentReporter


def tokenize_with_folder(prompts: Sequence[Prompt], folder: Path) -> list[TokenPrompt]:
    """Token ids from `folder/tokenizer.json`, special tokens added as the tokenizer says.

    Raises MachineError without the `tokenizers` library, InputError for a folder without a usable
    tokenizer.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InputError(
            f"no `tokenizer.json` in `{folder}`",
            where=str(folder),
            hint="give the folder of the target model, or leave --tokenizer out",
        )
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MachineError(
            "the `tokenizers` library is missing",
            hint="pip install 'specpilot[torch]', or leave --tokenizer out: the server then "
            "turns the prompts into tokens",
        ) from error
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise InputError(f"not a tokenizer: {error}", where=str(path)) from error
    encoded = tokenizer.encode_batch([prompt.text for prompt in prompts])
    return [_prompt(p, tuple(e.ids)) for p, e in zip(prompts, encoded, strict=True)]


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
