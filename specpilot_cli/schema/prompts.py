"""Prompt sets: one JSON object a line, plain text that is sent as it stands (no chat template)."""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from specpilot_cli.errors import InputError
from specpilot_cli.schema.base import FileModel, Label


class Prompt(FileModel):
    """One request of a benchmark.

    request_id: unique in its file. benchmark: the cell it counts in; cells weigh the same however
    many prompts they hold. max_new_tokens: where greedy decoding stops at the latest. answer: the
    right final answer, where the benchmark has one (see `token_force/accuracy.py`).
    """

    request_id: Label
    benchmark: Label
    text: str = Field(min_length=1)
    max_new_tokens: int = Field(ge=1)
    answer: str | None = Field(default=None, min_length=1)


def check_unique_ids(prompts: Iterable[Prompt], *, where: str) -> None:
    """Raise InputError naming the first request id that occurs twice in `where`."""
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.request_id in seen:
            raise InputError(
                f"request id `{prompt.request_id}` occurs twice",
                where=where,
                hint="each prompt needs its own `request_id`: pairs are matched by it",
            )
        seen.add(prompt.request_id)
