"""The engine's own thread, and its connection to the server's event loop.

All torch work happens in one thread, which owns the scheduler. The event loop only puts commands
into its inbox and receives updates through `call_soon_threadsafe`, one call per step.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from specpilot_cli.engines.reference.decode import Job, Slot
from specpilot_cli.engines.reference.reply import Update
from specpilot_cli.engines.reference.scheduler import Scheduler

_log = logging.getLogger(__name__)

Sink = Callable[["Update | EngineFailure"], None]
# Throughput is averaged over the busy seconds of this window.
_WINDOW_S = 5.0
_IDLE_WAIT_S = 0.5


class EngineFailure(Exception):
    """The engine thread stopped on an unexpected error; the server can only be restarted."""


@dataclass(frozen=True, slots=True)
class _Submit:
    job: Job
    sink: Sink
    every_step: bool


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


class EngineThread:
    """Runs a scheduler until `stop`. Create and use it from the event loop's thread.

    pace_s: what every step takes, as long as the processor keeps up with it; None runs freely.
    slow_ratio: by how much of itself every step is made longer.
    """

    def __init__(
        self, scheduler: Scheduler, *, pace_s: float | None = None, slow_ratio: float = 0.0
    ) -> None:
        self.scheduler = scheduler
        self.failure: BaseException | None = None
        self._inbox: queue.SimpleQueue[_Submit | _Abort | None] = queue.SimpleQueue()
        self._requests: dict[str, _Submit] = {}
        self._loop = asyncio.get_running_loop()
        self._pace_s, self._slow_ratio = pace_s, slow_ratio
        self._paced_until_s: float | None = None
        self._rates: deque[tuple[float, float, int]] = deque()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ask the thread to end after its current step, and wait for it."""
        self._inbox.put(None)
        self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        """Whether the thread runs and has met no error."""
        return self.failure is None and self._thread.is_alive()

    @property
    def throughput_tok_per_s(self) -> float:
        """Output tokens per busy second over the last few seconds; 0 when there were none."""
        steps = list(self._rates)
        busy_s = sum(elapsed for _, elapsed, _ in steps)
        return sum(tokens for *_, tokens in steps) / busy_s if busy_s > 0 else 0.0

    def submit(self, job: Job, sink: Sink, *, every_step: bool) -> None:
        """Run `job`; `sink` gets its updates in the event loop, the last one with a result.

        With `every_step` false only that last one is sent.
        """
        self._inbox.put(_Submit(job, sink, every_step))

    def abort(self, request_id: str) -> None:
        """Drop a request; its sink hears nothing more."""
        self._inbox.put(_Abort(request_id))

    def _run(self) -> None:
        try:
            while self._take_commands():
                if not self.scheduler.idle:
                    self._step()
                if self.scheduler.idle:
                    self._paced_until_s = None  # the next request starts its own time
        except BaseException as error:  # noqa: BLE001  (reported to every waiting client)
            self.failure = error
            _log.exception("the engine stopped")
            failure = EngineFailure(f"the engine stopped: {error!r}")
            self._post([(request.sink, failure) for request in self._requests.values()])

    def _take_commands(self) -> bool:
        """Empty the inbox, waiting for work when there is none; False to end."""
        wait = self.scheduler.idle
        while True:
            try:
                command = self._inbox.get(block=wait, timeout=_IDLE_WAIT_S if wait else None)
            except queue.Empty:
                return True
            if command is None:
                return False
            if isinstance(command, _Submit):
                self._requests[command.job.request_id] = command
                self.scheduler.submit(command.job)
            else:
                self._requests.pop(command.request_id, None)
                self.scheduler.abort(command.request_id)
            wait = False

    def _step(self) -> None:
        started = time.monotonic()
        before = self.scheduler.counters.output_tokens
        slots = self.scheduler.step()
        if self._pace_s is not None:
            self._wait(started, self._pace_s * (1 + self._slow_ratio))
        elif self._slow_ratio > 0.0:
            time.sleep(self._slow_ratio * (time.monotonic() - started))
        now = time.monotonic()
        self._rates.append((now, now - started, self.scheduler.counters.output_tokens - before))
        while self._rates and self._rates[0][0] < now - _WINDOW_S:
            self._rates.popleft()
        messages: list[tuple[Sink, Update | EngineFailure]] = []
        for slot in slots:
            request = self._requests.get(slot.job.request_id)
            if request is None:
                continue
            if slot.finish_reason is not None:
                del self._requests[slot.job.request_id]
            if request.every_step or slot.finish_reason is not None:
                messages.append((request.sink, _update(slot)))
        self._post(messages)

    def _wait(self, started_s: float, pace_s: float) -> None:
        """Sleep until the step's time is over, counted from the end of the one before it."""
        begun_s = started_s if self._paced_until_s is None else self._paced_until_s
        self._paced_until_s = max(begun_s + pace_s, time.monotonic())
        time.sleep(max(0.0, self._paced_until_s - time.monotonic()))

    def _post(self, messages: list[tuple[Sink, Update | EngineFailure]]) -> None:
        if not messages:
            return

        def deliver() -> None:
            for sink, message in messages:
                sink(message)

        try:
            self._loop.call_soon_threadsafe(deliver)
        except RuntimeError:
            return  # the loop has closed: nobody is left to hear it


def _update(slot: Slot) -> Update:
    finished = slot.finish_reason is not None
    partial = slot.output_scores if not finished else None
    return Update(
        output_ids=tuple(slot.output_ids),
        accept_lengths=tuple(slot.accept_lengths),
        proposed_drafts=slot.proposed_drafts,
        output_scores=partial.result() if partial else None,
        result=slot.result() if finished else None,
    )
