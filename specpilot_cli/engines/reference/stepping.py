"""Blocks of decode steps under a clock: what profiling and step-time curves are made of."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from specpilot_cli.engines.reference.decode import Job
from specpilot_cli.engines.reference.scheduler import Scheduler
from specpilot_cli.engines.reference.spec import SpecConfig
from specpilot_cli.errors import InputError

if TYPE_CHECKING:
    from specpilot_cli.engines.reference.engine import ReferenceEngine


class Workload(Protocol):
    """The requests that are decoded while the clock runs."""

    @property
    def prompts(self) -> Sequence[Sequence[int]]:
        """Token ids of each prompt."""

    @property
    def concurrency(self) -> int:
        """Requests in flight."""

    @property
    def new_tokens(self) -> int:
        """Output tokens after which a request is replaced by the next one."""


@dataclass(frozen=True, slots=True)
class BlockStats:
    """One block of timed steps; `requests` and `context` are averages over its steps."""

    steps: int
    seconds: float
    tokens: int
    request_steps: int
    requests: float
    context: float

    @property
    def mean_s(self) -> float:
        """Seconds per step."""
        return self.seconds / self.steps

    @property
    def tau(self) -> float:
        """Tokens committed per request and step."""
        return self.tokens / self.request_steps


class StepRunner:
    """Keeps `concurrency` requests decoding and times only the decode steps among them.

    Prompts are taken in turn. A step in which a prompt is prefilled is not timed, and a step in
    which a request ends is timed like any other.
    """

    def __init__(self, engine: ReferenceEngine, spec: SpecConfig, workload: Workload) -> None:
        self.core = engine.core(spec)
        self._scheduler = Scheduler(self.core, max_running=workload.concurrency)
        self._workload = workload
        self._prompts = _fitting(workload, engine.context_length)
        self._submitted = 0

    def block(
        self,
        steps: int,
        *,
        before: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
    ) -> BlockStats:
        """Time `steps` decode steps; `before` and `after` are called around each of them."""
        seconds = 0.0
        tokens = request_steps = contexts = 0
        for _ in range(steps):
            self._refill()
            slots = list(self._scheduler.running)
            committed = sum(len(slot.output_ids) for slot in slots)
            contexts += sum(slot.state.length for slot in slots)
            if before is not None:
                before()
            started = time.perf_counter()
            self._scheduler.step()
            seconds += time.perf_counter() - started
            if after is not None:
                after()
            tokens += sum(len(slot.output_ids) for slot in slots) - committed
            request_steps += len(slots)
        return BlockStats(
            steps, seconds, tokens, request_steps, request_steps / steps, contexts / request_steps
        )

    def _refill(self) -> None:
        """Run prefills until every place is decoding."""
        scheduler = self._scheduler
        while len(scheduler.running) < self._workload.concurrency:
            while scheduler.n_running + scheduler.n_waiting < self._workload.concurrency:
                prompt = self._prompts[self._submitted % len(self._prompts)]
                job = Job(f"step-{self._submitted}", prompt, self._workload.new_tokens)
                self._submitted += 1
                scheduler.submit(job)
            scheduler.step()


def _fitting(workload: Workload, context_length: int) -> list[tuple[int, ...]]:
    room = context_length - workload.new_tokens
    prompts = [tuple(prompt) for prompt in workload.prompts if 0 < len(prompt) <= room]
    if not prompts:
        raise InputError(
            f"no prompt leaves room for {workload.new_tokens} new tokens in the model's context "
            f"of {context_length}",
            hint="give shorter prompts",
        )
    return prompts
