"""Answers to judge: read from a recording, or asked from a live server.

Every system must see the same prompt ids. Text is made into ids once, by the given tokenizer
or by the first server that is asked, and everyone else gets those ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from specpilot_cli.engines.base import GenerateRequest, Generation
from specpilot_cli.errors import InputError
from specpilot_cli.io.jsonl import read_jsonl
from specpilot_cli.schema.outputs import OutputRecord, outputs_by_id
from specpilot_cli.schema.prompts import Prompt, check_unique_ids
from specpilot_cli.ui import Reporter, SilentReporter


class Generator(Protocol):
    """A live system; `HttpEngine` is one."""

    def generate_many(
        self,
        requests: Sequence[GenerateRequest],
        *,
        concurrency: int,
        on_done: Callable[[Generation], None] | None = None,
    ) -> list[Generation]:
        """Answer all requests in order, `concurrency` in flight."""
        ...


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt to send: as ids, or as text while nobody has tokenised it yet.

    ignore_eos: decode to the limit even past a stop token. answer: what is right, if known.
    """

    request_id: str
    benchmark: str
    max_new_tokens: int
    prompt_ids: tuple[int, ...] = ()
    text: str | None = None
    ignore_eos: bool = False
    answer: str | None = None


def is_url(source: str) -> bool:
    """Whether `source` names a server; anything else is a file of answers."""
    return source.startswith(("http://", "https://"))


def read_outputs(source: str) -> list[OutputRecord]:
    """Recorded answers; InputError with file:line for a bad line or a repeated request id."""
    records = read_jsonl(Path(source), OutputRecord)
    return list(outputs_by_id(records, where=source).values())


def questions_from_prompts(
    path: Path, *, encode: Callable[[str], tuple[int, ...]] | None = None
) -> list[Question]:
    """Questions of a prompt file; tokenised when `encode` is given."""
    prompts = read_jsonl(path, Prompt)
    check_unique_ids(prompts, where=str(path))
    return [
        Question(
            prompt.request_id,
            prompt.benchmark,
            prompt.max_new_tokens,
            prompt_ids=() if encode is None else encode(prompt.text),
            text=prompt.text,
            answer=prompt.answer,
        )
        for prompt in prompts
    ]


def questions_from_outputs(records: Iterable[OutputRecord]) -> list[Question]:
    """The questions that recorded answers belong to.

    Raises InputError when a record does not say how many tokens were asked for.
    """
    questions = []
    for record in records:
        if record.max_new_tokens is None:
            raise InputError(
                f"the recorded answer `{record.request_id}` has no `max_new_tokens`, "
                "so its request cannot be repeated",
                hint="give the prompts with --prompts",
            )
        questions.append(
            Question(record.request_id, record.benchmark, record.max_new_tokens, record.prompt_ids)
        )
    return questions


def with_known_ids(
    questions: Iterable[Question], records: Iterable[OutputRecord]
) -> list[Question]:
    """Take prompt ids from recorded answers: they are what those answers really continued."""
    known = {record.request_id: record.prompt_ids for record in records}
    return [
        replace(question, prompt_ids=known.get(question.request_id, question.prompt_ids))
        for question in questions
    ]


def select(
    records: Sequence[OutputRecord], questions: Sequence[Question], *, where: str
) -> list[OutputRecord]:
    """Those of `records` that answer one of `questions`, in the order of the questions.

    Raises InputError when a question has no recorded answer: a system that leaves out what it
    does badly would look better than it is.
    """
    by_id: Mapping[str, OutputRecord] = {record.request_id: record for record in records}
    missing = [q.request_id for q in questions if q.request_id not in by_id]
    if missing:
        raise InputError(
            f"{len(missing)} requests have no recorded answer (first: `{missing[0]}`)",
            where=where,
            hint="record the answers again, or narrow the prompts with --limit or --prompts",
        )
    return [by_id[q.request_id] for q in questions]


def request_of(question: Question, *, max_new_tokens: int | None = None) -> GenerateRequest:
    """The request that asks a question; `max_new_tokens` replaces its own limit."""
    return GenerateRequest(
        question.request_id,
        question.prompt_ids,
        max_new_tokens or question.max_new_tokens,
        text=None if question.prompt_ids else question.text,
        ignore_eos=question.ignore_eos,
    )


def collect(
    engine: Generator,
    questions: Sequence[Question],
    *,
    concurrency: int,
    label: str,
    reporter: Reporter = SilentReporter(),
) -> list[OutputRecord]:
    """Ask a live system every question, `concurrency` in flight.

    Raises what the engine raises: one bad answer voids the whole collection.
    """
    requests = [request_of(question) for question in questions]
    n_done = 0

    def on_done(_: Generation) -> None:
        nonlocal n_done
        n_done += 1
        reporter.progress(f"asking {label}", n_done, len(requests))

    reporter.progress(f"asking {label}", 0, len(requests))
    answers = engine.generate_many(requests, concurrency=concurrency, on_done=on_done)
    origin_s = min(answer.submit_s for answer in answers)
    return [
        _record(question, answer, origin_s)
        for question, answer in zip(questions, answers, strict=True)
    ]


def _record(question: Question, answer: Generation, origin_s: float) -> OutputRecord:
    return OutputRecord.model_validate(
        {
            "request_id": question.request_id,
            "benchmark": question.benchmark,
            "prompt_ids": answer.prompt_ids,
            "output_ids": answer.output_ids,
            "finish_reason": answer.finish_reason,
            "max_new_tokens": question.max_new_tokens,
            "verify_steps": answer.verify_steps,
            "submit_s": answer.submit_s - origin_s,
            "time_to_first_token_s": answer.time_to_first_token_s,
            "elapsed_s": answer.elapsed_s,
        }
    )
