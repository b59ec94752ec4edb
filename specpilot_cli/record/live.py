"""`specpilot record --url`: prompts through a recording server, into a lattice recording."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specpilot_cli.engines.base import GenerateRequest, Generation
from specpilot_cli.engines.http_client import AsyncHttpEngine, HttpEngine
from specpilot_cli.engines.http_parts import first_error
from specpilot_cli.errors import MeasurementInvalid
from specpilot_cli.record.join import (
    Incomplete,
    check_stock,
    join_request,
    no_steps,
    stock_outside,
)
from specpilot_cli.record.server import LiveRecorder, RecorderFacts, model_sha256
from specpilot_cli.record.shards import Arrays
from specpilot_cli.schema.lattice import (
    LatticeMetadata,
    LatticeRecording,
    LatticeRequest,
    join_ids,
)
from specpilot_cli.schema.outputs import OutputRecord
from specpilot_cli.schema.prompts import Prompt
from specpilot_cli.ui import Reporter, SilentReporter


@dataclass(frozen=True, slots=True)
class Dropped:
    """A request that is not in the recording, and why."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class LiveRecording:
    """What a live recording gave.

    outputs: of the recorded requests, in the order of the prompts. stock_outside_ratio: share of
    drafted positions where stock's token is no candidate. hook_s, step_s, steps, dropped_steps: the
    recorder's own time in the server's thread, the time of the steps around it, and their number
    during this recording.
    """

    recording: LatticeRecording
    outputs: list[OutputRecord]
    dropped: list[Dropped]
    algorithm: str
    stock_outside_ratio: float
    hook_s: float
    step_s: float
    steps: int
    dropped_steps: int


@dataclass(frozen=True, slots=True)
class _Answer:
    prompt: Prompt
    rid: str
    generation: Generation | None
    failure: str = ""


def record_live(
    url: str,
    prompts: Sequence[Prompt],
    *,
    target: Path | None = None,
    drafter: Path | None = None,
    concurrency: int = 8,
    timeout_s: float = 600.0,
    reporter: Reporter = SilentReporter(),
) -> LiveRecording:
    """Answer `prompts` on the server at `url` and join its recorder's lattices with the answers.

    target, drafter: folders to hash where the server's own paths are not on this machine.
    Raises MachineError if the server does not record or its folder is elsewhere, InputError if a
    model cannot be hashed, MeasurementInvalid if no request was recorded completely.
    """
    with HttpEngine(url, timeout_s) as client:
        recorder = LiveRecorder(client, name=f"the server at {client.base_url}")
        reporter.note("hashing the models")
        hashes = (
            model_sha256(recorder.info, "model_path", target, option="--target"),
            model_sha256(
                recorder.info, "speculative_draft_model_path", drafter, option="--drafter"
            ),
        )
        answers = asyncio.run(_answer(url, prompts, concurrency, timeout_s, reporter))
        wanted = {answer.rid for answer in answers if answer.generation is not None}
        recorder.wait()
        end = recorder.facts()
        joined, dropped = _join(recorder, answers, wanted)
    for loss in dropped:
        reporter.warn(f"request `{loss.request_id}` is left out: {loss.reason}")
    if not joined:
        raise MeasurementInvalid(
            f"none of the {len(prompts)} requests was recorded; the first: {dropped[0].reason}",
            hint="the server's log and `recorder` in its /server_info may tell why",
        )
    return _assemble(recorder, joined, dropped, hashes, end)


async def _answer(
    url: str, prompts: Sequence[Prompt], concurrency: int, timeout_s: float, reporter: Reporter
) -> list[_Answer]:
    """Answers in the order of the prompts; one that fails does not end the others."""
    run = secrets.token_hex(4)
    answers: dict[int, _Answer] = {}
    waiting = iter(enumerate(prompts))

    async def worker(engine: AsyncHttpEngine) -> None:
        for index, prompt in waiting:
            rid = f"specpilot-{run}-{index}"
            request = GenerateRequest(
                prompt.request_id, (), prompt.max_new_tokens, text=prompt.text, rid=rid
            )
            try:
                answers[index] = _Answer(prompt, rid, await engine.generate(request))
            except MeasurementInvalid as error:
                answers[index] = _Answer(prompt, rid, None, str(error))
            reporter.progress("greedy outputs", len(answers), len(prompts))

    async with AsyncHttpEngine(url, timeout_s) as engine:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(concurrency, len(prompts))):
                    group.create_task(worker(engine))
        except BaseExceptionGroup as errors:
            raise first_error(errors) from errors
    return [answers[index] for index in range(len(prompts))]


def _join(
    recorder: LiveRecorder, answers: Sequence[_Answer], wanted: set[str]
) -> tuple[list[tuple[Prompt, Generation, Arrays]], list[Dropped]]:
    rows = recorder.rows(wanted)
    index = recorder.index
    empty = no_steps(index.positions, index.candidates)
    joined: list[tuple[Prompt, Generation, Arrays]] = []
    dropped: list[Dropped] = []
    for answer in answers:
        name, generation = answer.prompt.request_id, answer.generation
        if generation is None:
            dropped.append(Dropped(name, answer.failure))
            continue
        try:
            steps = join_request(
                rows.get(answer.rid),
                prompt_len=len(generation.prompt_ids),
                output_ids=generation.output_ids,
                mode=index.mode,
                empty=empty,
            )
        except Incomplete as error:
            dropped.append(Dropped(name, str(error)))
        else:
            joined.append((answer.prompt, generation, steps))
    return joined, dropped


def _assemble(
    recorder: LiveRecorder,
    joined: Sequence[tuple[Prompt, Generation, Arrays]],
    dropped: list[Dropped],
    hashes: tuple[str, str],
    end: Sequence[RecorderFacts],
) -> LiveRecording:
    index = recorder.index
    steps = [part for _, _, part in joined]
    together = {name: np.concatenate([part[name] for part in steps]) for name in steps[0]}
    check_stock(together, index.algorithm)
    counts = [len(part["step_position"]) for part in steps]
    prompt_ids, prompt_offsets = join_ids(generation.prompt_ids for _, generation, _ in joined)
    output_ids, output_offsets = join_ids(generation.output_ids for _, generation, _ in joined)
    recording = LatticeRecording(
        metadata=LatticeMetadata(
            mode=index.mode,
            block=index.block,
            engine=index.engine,
            requests=[
                LatticeRequest(request_id=p.request_id, benchmark=p.benchmark) for p, _, _ in joined
            ],
            target_sha256=hashes[0],
            drafter_sha256=hashes[1],
            drafter_kind="dspark" if index.algorithm == "DSPARK" else "dflash2",
        ),
        prompt_ids=prompt_ids,
        prompt_offsets=prompt_offsets,
        output_ids=output_ids,
        output_offsets=output_offsets,
        step_request=np.repeat(np.arange(len(counts), dtype=np.int32), counts),
        **together,
    )
    outside = stock_outside(together)
    return LiveRecording(
        recording=recording,
        outputs=[_output(prompt, generation) for prompt, generation, _ in joined],
        dropped=dropped,
        algorithm=index.algorithm,
        stock_outside_ratio=float(outside.mean()) if outside.size else 0.0,
        hook_s=_gain(recorder.start, end, "seconds"),
        step_s=_gain(recorder.start, end, "step_seconds"),
        steps=int(_gain(recorder.start, end, "steps")),
        dropped_steps=int(_gain(recorder.start, end, "dropped_steps")),
    )


def _gain(start: Sequence[RecorderFacts], end: Sequence[RecorderFacts], key: str) -> float:
    return float(sum(getattr(b, key) - getattr(a, key) for a, b in zip(start, end, strict=True)))


def _output(prompt: Prompt, generation: Generation) -> OutputRecord:
    values: dict[str, Any] = {"finish_reason": generation.finish_reason}
    return OutputRecord(
        request_id=prompt.request_id,
        benchmark=prompt.benchmark,
        prompt_ids=generation.prompt_ids,
        output_ids=generation.output_ids,
        max_new_tokens=prompt.max_new_tokens,
        verify_steps=generation.verify_steps,
        **values,
    )
