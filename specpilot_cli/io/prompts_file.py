"""Read a prompt set (JSON lines) and check what a single line cannot show."""

from __future__ import annotations

from pathlib import Path

from specpilot_cli.io.jsonl import read_jsonl
from specpilot_cli.schema.prompts import Prompt, check_unique_ids


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts in `path`, in order.

    Raises InputError with `file:line` for a bad line, and for an id that occurs twice.
    """
    prompts = read_jsonl(path, Prompt)
    check_unique_ids(prompts, where=str(path))
    return prompts
