"""Engines in virtual time: exact rates, no waiting."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from specpilot_cli.engines.base import ForcedScores, GenerateRequest, Generation
from specpilot_cli.errors import MeasurementInvalid
from specpilot_cli.paired_bench.types import TokenPrompt

Rate = Callable[[float, GenerateRequest], float]
Outputs = Callable[[GenerateRequest], tuple[int, ...]]


@dataclass
class FakeClock:
    """Seconds that pass only when an engine works."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def same_outputs(request: GenerateRequest) -> tuple[int, ...]:
    """Tokens that depend on the prompt only, as two lossless systems would give."""
    start = sum(request.input_ids)
    return tuple((start + i) % 997 for i in range(request.max_new_tokens))


@dataclass
class FakeEngine:
    """Serves at `rate(t, request)` tokens per second, where t is when the request is submitted."""

    clock: FakeClock
    rate: Rate
    outputs: Outputs = same_outputs
    prefill_s: float = 0.01
    tokens_per_step: int | None = 3
    info: dict[str, Any] = field(default_factory=lambda: {"version": "fake", "port": 1})
    before: Callable[[GenerateRequest], None] = lambda request: None
    alter: Callable[[Generation], Generation] = lambda answer: answer
    served: list[str] = field(default_factory=list)
    intervals: list[tuple[float, float]] = field(default_factory=list)
    in_flight: int = 0
    flushes: int = 0
    cached: set[tuple[int, ...]] = field(default_factory=set)

    def health(self) -> None:
        return None

    def server_info(self) -> dict[str, Any]:
        return self.info

    def flush_cache(self) -> None:
        self.flushes += 1
        self.cached.clear()

    def score(self, input_ids: Sequence[int], start: int) -> ForcedScores:
        raise NotImplementedError

    def generate(self, request: GenerateRequest) -> Generation:
        return self.generate_many([request], concurrency=1)[0]

    def generate_many(
        self,
        requests: Sequence[GenerateRequest],
        *,
        concurrency: int,
        on_done: Callable[[Generation], None] | None = None,
    ) -> list[Generation]:
        free = [self.clock.now_s] * concurrency
        self.in_flight = concurrency
        answers = []
        for request in requests:
            answers.append(self._answer(request, heapq.heappop(free)))
            heapq.heappush(free, answers[-1].last_byte_s)
            if on_done is not None:
                on_done(answers[-1])
        self.clock.now_s = max(free)
        return answers

    def _answer(self, request: GenerateRequest, submit_s: float) -> Generation:
        self.before(request)
        if request.input_ids in self.cached:
            raise MeasurementInvalid(f"prompt `{request.request_id}` was served from the cache")
        self.cached.add(request.input_ids)
        self.served.append(request.request_id)
        tokens = self.outputs(request)
        elapsed_s = len(tokens) / self.rate(submit_s, request)
        self.intervals.append((submit_s, submit_s + elapsed_s))
        per_step = self.tokens_per_step
        return self.alter(
            Generation(
                request_id=request.request_id,
                output_ids=tokens,
                finish_reason="length",
                prompt_tokens=len(request.input_ids),
                completion_tokens=len(tokens),
                verify_steps=None if per_step is None else -(-(len(tokens) - 1) // per_step),
                submit_s=submit_s,
                first_byte_s=submit_s + min(self.prefill_s, elapsed_s),
                last_byte_s=submit_s + elapsed_s,
                cached_tokens=0,
            )
        )


def constant(tokens_per_s: float) -> Rate:
    return lambda t, request: tokens_per_s


def prompts(
    n: int = 8, benchmarks: Sequence[str] = ("chat", "code"), tokens: int = 31
) -> list[TokenPrompt]:
    """`n` prompts per benchmark, each with its own ids."""
    return [
        TokenPrompt(f"{name}-{i}", name, (b * 1000 + i, 7, i), tokens)
        for b, name in enumerate(benchmarks)
        for i in range(n)
    ]
