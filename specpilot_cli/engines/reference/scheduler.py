"""Which requests are in flight: admission, prefill, and one ragged decode pass over all of them.

A new prompt is prefilled in chunks between decode steps and then joins the running requests
(continuous batching), so a long prompt delays the others by one chunk at a time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from specpilot_cli.engines.reference.decode import Core, Job, Slot, decode_pass, prefill_pass

DEFAULT_MAX_RUNNING = 48
DEFAULT_PREFILL_ROWS = 512


@dataclass(slots=True)
class Counters:
    """Totals since the start; `verify_steps` counts each request of a pass once."""

    passes: int = 0
    verify_steps: int = 0
    accepted_drafts: int = 0
    output_tokens: int = 0
    finished: int = 0


class Scheduler:
    """Runs jobs on one core. Not thread-safe: one thread submits, aborts and steps."""

    def __init__(
        self,
        core: Core,
        *,
        max_running: int = DEFAULT_MAX_RUNNING,
        prefill_rows: int = DEFAULT_PREFILL_ROWS,
    ) -> None:
        self.core = core
        self.max_running = max_running
        self.prefill_rows = prefill_rows
        self.counters = Counters()
        self._waiting: deque[Job] = deque()
        self._filling: list[Slot] = []
        self._running: list[Slot] = []

    @property
    def n_waiting(self) -> int:
        """Jobs that hold no state yet."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """Requests that hold a state."""
        return len(self._filling) + len(self._running)

    @property
    def running(self) -> tuple[Slot, ...]:
        """Requests that the next decode step will work on."""
        return tuple(self._running)

    @property
    def idle(self) -> bool:
        """Whether there is nothing left to do."""
        return not self._waiting and self.n_running == 0

    @property
    def state_bytes(self) -> int:
        """Bytes of the target states of all requests in flight."""
        return sum(slot.state.n_bytes for slot in (*self._filling, *self._running))

    def submit(self, job: Job) -> None:
        """Queue a job; it starts when one of `max_running` places is free."""
        self._waiting.append(job)

    def abort(self, request_id: str) -> bool:
        """Forget a request and its state; False if it is not in flight (any more)."""
        before = self.n_waiting + self.n_running
        self._waiting = deque(job for job in self._waiting if job.request_id != request_id)
        self._filling = [s for s in self._filling if s.job.request_id != request_id]
        self._running = [s for s in self._running if s.job.request_id != request_id]
        return self.n_waiting + self.n_running < before

    def step(self) -> list[Slot]:
        """Prefill one chunk, then run one decode step; returns the slots with new tokens.

        A slot with a `finish_reason` has left the scheduler.
        """
        while self._waiting and self.n_running < self.max_running:
            self._filling.append(self.core.new_slot(self._waiting.popleft()))
        progressed: list[Slot] = []
        if self._filling:
            progressed = prefill_pass(self.core, self._filling, self.prefill_rows)
            complete = {id(slot) for slot in progressed}
            self._filling = [slot for slot in self._filling if id(slot) not in complete]
            self.counters.output_tokens += sum(len(slot.output_ids) for slot in progressed)
        if self._running:
            self._decode()
            progressed.extend(self._running)
        # prompts that became ready in this step join the others in the next one
        self._running = [slot for slot in progressed if slot.finish_reason is None]
        self.counters.finished += len(progressed) - len(self._running)
        return progressed

    def _decode(self) -> None:
        before = sum(len(slot.output_ids) for slot in self._running)
        decode_pass(self.core, self._running)
        counters = self.counters
        counters.passes += 1
        counters.verify_steps += len(self._running)
        counters.accepted_drafts += sum(slot.accept_lengths[-1] for slot in self._running)
        counters.output_tokens += sum(len(slot.output_ids) for slot in self._running) - before
