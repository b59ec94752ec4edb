"""Sealed finals: requests that nothing was tuned on, used once.

A set of requests that was timed for one candidate is known from then on: the next one could be
chosen by it. So the first use is written beside the prompts, before anything is served, and a set
with such a line is refused. Only the same journal may go on with it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from specpilot_cli.errors import InputError
from specpilot_cli.io.jsonl import iter_jsonl
from specpilot_cli.schema.base import FileModel
from specpilot_cli.schema.prompts import Prompt


class SealUse(FileModel):
    """One use of a sealed set: its texts by hash, when, by which journal, on which candidate."""

    texts_sha256: str
    used_utc: str
    journal: str
    candidate: str


def check_unseen(prompts: Sequence[Prompt], seen: Iterable[Prompt], *, where: str) -> None:
    """Raise InputError for a prompt whose text is among those already seen."""
    known = {" ".join(prompt.text.split()) for prompt in seen}
    for prompt in prompts:
        if " ".join(prompt.text.split()) in known:
            raise InputError(
                f"prompt `{prompt.request_id}` was seen before the final",
                where=where,
                hint="a sealed final takes requests that nothing was tuned or chosen on",
            )


def claim(ledger: Path, texts_sha256: str, *, journal: Path, candidate: str) -> None:
    """Write down that this set is used now; InputError if another comparison has used it."""
    uses = list(iter_jsonl(ledger, SealUse)) if ledger.exists() else []
    mine = str(journal.resolve())
    for use in uses:
        if use.texts_sha256 == texts_sha256 and use.journal != mine:
            raise InputError(
                f"these requests were used in a sealed final on {use.used_utc}",
                where=str(ledger),
                hint="take requests that nobody has timed yet; a set is sealed once",
            )
    if any(use.texts_sha256 == texts_sha256 for use in uses):
        return
    use = SealUse(
        texts_sha256=texts_sha256,
        used_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        journal=mine,
        candidate=candidate,
    )
    _append(ledger, use.model_dump(mode="json"))


def _append(path: Path, row: dict[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
