"""Serving one block on one system, and refusing every answer that cannot be compared.

Closed loop: `batch` requests in flight, the next is submitted as one completes. Nothing is
retried. The client's own cost is measured beside the answers, so that a slow client shows up as
itself.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from specpilot_cli.engines.base import EngineClient, GenerateRequest, Generation
from specpilot_cli.errors import MeasurementInvalid
from specpilot_cli.paired_bench.types import TokenPrompt

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Client times of one block, in seconds (see `ClientCost`)."""

    call_overhead_s: float
    refill_gaps_s: tuple[float, ...]
    cpu_s: float
    served_s: float
    loop_lag_p99_s: float | None = None


@runtime_checkable
class MeasuredClient(Protocol):
    """An engine whose client is a process of its own, which measures itself.

    cpu_s: its processor seconds so far. loop_lag_p99_s: how late its event loop was in the last
    call, the worst one percent; None before the first.
    """

    @property
    def cpu_s(self) -> float: ...

    @property
    def loop_lag_p99_s(self) -> float | None: ...


@dataclass(slots=True)
class Lane:
    """One server and the prompts its prefix cache may hold.

    Two names may share one server (the baseline against itself), and then share the lane.
    """

    engine: EngineClient
    seen: set[str] = field(default_factory=set)

    def flush(self) -> None:
        """Empty the server's prefix cache."""
        self.engine.flush_cache()
        self.seen.clear()

    def prepare(self, prompts: Sequence[TokenPrompt]) -> None:
        """Flush if the cache could answer part of these prompts; outside any timed interval."""
        names = {prompt.request_id for prompt in prompts}
        if names & self.seen:
            self.flush()
        self.seen |= names


def serve_block(
    engine: EngineClient,
    prompts: Sequence[TokenPrompt],
    *,
    batch: int,
    clock: Clock,
    cpu_clock: Clock,
    on_done: Callable[[], None] | None = None,
) -> tuple[list[Generation], BlockCost]:
    """Serve `prompts` with `batch` in flight; answers in their order, each one checked.

    Raises MeasurementInvalid for an answer that cannot be compared, and whatever the engine raises.
    """
    requests = [
        GenerateRequest(prompt.request_id, prompt.input_ids, prompt.max_new_tokens)
        for prompt in prompts
    ]
    own = engine if isinstance(engine, MeasuredClient) else None
    cpu_start, start = _cpu_s(own, cpu_clock), clock()
    answers = engine.generate_many(
        requests, concurrency=batch, on_done=(lambda _: on_done()) if on_done else None
    )
    wall_s, cpu_s = clock() - start, _cpu_s(own, cpu_clock) - cpu_start
    if len(answers) != len(requests):
        raise MeasurementInvalid(f"{len(requests)} requests but {len(answers)} answers")
    for prompt, answer in zip(prompts, answers, strict=True):
        check_answer(prompt, answer)
    served_s = max(a.last_byte_s for a in answers) - min(a.submit_s for a in answers)
    lag_s = None if own is None else own.loop_lag_p99_s
    return answers, BlockCost(
        wall_s - served_s, refill_gaps(answers, batch), cpu_s, served_s, lag_s
    )


def _cpu_s(own: MeasuredClient | None, cpu_clock: Clock) -> float:
    """Processor seconds of whoever times the answers."""
    return cpu_clock() if own is None else own.cpu_s


def check_answer(prompt: TokenPrompt, answer: Generation) -> None:
    """Raise MeasurementInvalid, naming the request, if the answer cannot be compared.

    Engines check their own replies; these are the assumptions of the comparison itself.
    """
    times = (answer.submit_s, answer.first_byte_s, answer.last_byte_s)
    n = answer.completion_tokens
    problem = None
    if answer.request_id != prompt.request_id:
        problem = f"got the answer to `{answer.request_id}`"
    elif answer.finish_reason not in ("stop", "length"):
        problem = f"ended with finish reason `{answer.finish_reason}`"
    elif n < 1 or n != len(answer.output_ids):
        problem = f"reports {n} tokens and {len(answer.output_ids)} token ids"
    elif n > prompt.max_new_tokens:
        problem = f"gave {n} tokens where {prompt.max_new_tokens} were asked for"
    elif answer.finish_reason == "length" and n != prompt.max_new_tokens:
        problem = f"stopped for length after {n} of {prompt.max_new_tokens} tokens"
    elif answer.prompt_tokens != len(prompt.input_ids):
        problem = f"read {answer.prompt_tokens} prompt tokens of {len(prompt.input_ids)} sent"
    elif not all(math.isfinite(t) for t in times) or list(times) != sorted(times):
        problem = "has times that are not finite and in order"
    elif answer.last_byte_s <= answer.submit_s:
        problem = "took no time"
    if problem is not None:
        raise MeasurementInvalid(
            f"request `{prompt.request_id}` {problem}",
            hint="one bad answer voids the benchmark: look at the server's log, then measure again",
            where=prompt.request_id,
        )


def refill_gaps(answers: Sequence[Generation], batch: int) -> tuple[float, ...]:
    """Seconds between a request's end and the submit that takes its place, in submit order.

    With `batch` in flight the k-th submit replaces the earliest of the answers still open.
    """
    gaps: list[float] = []
    busy: list[float] = []
    for answer in sorted(answers, key=lambda a: a.submit_s):
        if len(busy) == batch:
            gaps.append(answer.submit_s - heapq.heappop(busy))
        heapq.heappush(busy, answer.last_byte_s)
    return tuple(gaps)
