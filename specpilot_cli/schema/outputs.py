"""Recorded answers, one JSON object a line: what a system emitted, as it reported it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field

from specpilot_cli.errors import InputError
from specpilot_cli.schema.base import FileModel, Label

TokenId = Annotated[int, Field(ge=0)]


class OutputRecord(FileModel):
    """One greedy answer. Token ids are the server's own; text is never tokenised again.

    max_new_tokens: the limit that was asked for, so that the request can be repeated.
    verify_steps: exact target passes after prefill, None without speculation.
    submit_s: seconds since the run's first request; time_to_first_token_s and elapsed_s count
    from this request's submission. All three are None when the answer was not timed.
    """

    request_id: Label
    benchmark: Label
    prompt_ids: tuple[TokenId, ...] = Field(min_length=1)
    output_ids: tuple[TokenId, ...] = Field(min_length=1)
    finish_reason: Literal["stop", "length"]
    max_new_tokens: int | None = Field(default=None, ge=1)
    verify_steps: int | None = Field(default=None, ge=0)
    submit_s: float | None = Field(default=None, ge=0)
    time_to_first_token_s: float | None = Field(default=None, ge=0)
    elapsed_s: float | None = Field(default=None, ge=0)


def outputs_by_id(records: Iterable[OutputRecord], *, where: str) -> dict[str, OutputRecord]:
    """Index `records` by request id, in order; InputError when an id occurs twice."""
    found: dict[str, OutputRecord] = {}
    for record in records:
        if record.request_id in found:
            raise InputError(
                f"request id `{record.request_id}` occurs twice",
                where=where,
                hint="answers are paired by request id, so each needs its own",
            )
        found[record.request_id] = record
    return found
