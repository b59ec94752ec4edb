"""Servers that do not fit on a device together: one runs at a time, started when it is asked.

The gates see one client for each system, as if all were resident. Whoever is asked gets its
server: the one that runs is stopped, this one started, its handshake repeated, and a few tokens
generated before the first request, which would otherwise pay for what a start leaves cold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specpilot_cli.apply.serving import ServerPlan, client, explained, shaken, started
from specpilot_cli.engines.base import ForcedScores, GenerateRequest, Generation
from specpilot_cli.engines.client_process import ProcessEngine
from specpilot_cli.engines.process import ServerProcess
from specpilot_cli.errors import SpecPilotError
from specpilot_cli.ui import Reporter

_WARMUP_PROMPT, _WARMUP_TOKENS, _WARMUPS = tuple(range(1, 65)), 64, 2
_DEATH_S, _POLL_S = 2.0, 0.05


@dataclass(slots=True)
class TurnTaking:
    """The servers of a run, one of which runs at any time. Use as a context manager.

    infos: what each server said at its first handshake. starts: how often each was started.
    """

    plans: Mapping[str, ServerPlan]
    logs: Path
    port: int
    reporter: Reporter
    infos: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    starts: dict[str, int] = field(default_factory=dict)
    _clients: dict[str, TurnEngine] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)
    _name: str | None = None
    _server: ServerProcess | None = None
    _engine: ProcessEngine | None = None
    _ended_cpu_s: float = 0.0

    def __post_init__(self) -> None:
        """Make the clients."""
        self._clients = {name: TurnEngine(self, name) for name in self.plans}

    def __enter__(self) -> TurnTaking:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    @property
    def engines(self) -> Mapping[str, TurnEngine]:
        """A client for each system; the same one every time, as the benchmark tells them apart."""
        return self._clients

    def is_running(self, name: str) -> bool:
        """Whether it is this system's turn."""
        return self._engine is not None and name == self._name

    def running(self, name: str) -> ProcessEngine:
        """A client of the running server of system `name`, which is started if need be."""
        if not self.is_running(name):
            self._stop()
            self._start(name)
        assert self._engine is not None
        return self._engine

    @property
    def client_cpu_s(self) -> float:
        """Processor seconds of all clients so far."""
        running_s = 0.0 if self._engine is None else self._engine.cpu_s
        return self._ended_cpu_s + running_s

    @property
    def client_lag_s(self) -> float | None:
        """See `ProcessEngine`; of the client of the server that runs."""
        return None if self._engine is None else self._engine.loop_lag_p99_s

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Work with the servers; if it fails and the running one has died, say that instead."""
        try:
            yield
        except SpecPilotError:
            self.check_after_failure()
            raise

    def check_after_failure(self) -> None:
        """Raise `MachineError` with the end of the log if the server has died, or dies now."""
        if self._name is None or self._server is None:
            return
        deadline = time.monotonic() + _DEATH_S
        while time.monotonic() < deadline:
            with explained(self.plans[self._name], self._server.log_path):
                self._server.check()
            time.sleep(_POLL_S)

    def _start(self, name: str) -> None:
        plan, count = self.plans[name], self.starts.get(name, 0) + 1
        log = self.logs / f"{name}-{count}.log"
        self.starts[name] = count
        server = self._stack.enter_context(
            started(plan, log, port=self.port, reporter=self.reporter)
        )
        self._name, self._server = name, server
        engine = self._stack.enter_context(client(plan, server))
        self.infos.setdefault(name, shaken(plan, server, engine))
        with self.watched():
            for _ in range(_WARMUPS):
                engine.generate(
                    GenerateRequest("start", _WARMUP_PROMPT, _WARMUP_TOKENS, ignore_eos=True)
                )
            engine.flush_cache()
        self._engine = engine

    def _stop(self) -> None:
        self._ended_cpu_s = self.client_cpu_s
        self._name = self._server = self._engine = None
        self._stack.close()


@dataclass(frozen=True, slots=True, eq=False)
class TurnEngine:
    """The client of one system, an `EngineClient`: whatever it is asked, its server runs first."""

    turns: TurnTaking
    name: str

    def health(self) -> None:
        """Raise `MachineError` unless the server answers; one that waits for its turn did."""
        if self.turns.is_running(self.name) or self.name not in self.turns.infos:
            self.turns.running(self.name).health()

    def server_info(self) -> Mapping[str, Any]:
        """What the server said at its first handshake; later ones are of the same kind."""
        if self.name not in self.turns.infos:
            self.turns.running(self.name)
        return self.turns.infos[self.name]

    def flush_cache(self) -> None:
        """Empty the prefix cache."""
        self.turns.running(self.name).flush_cache()

    def generate(self, request: GenerateRequest) -> Generation:
        """Answer one request."""
        return self.turns.running(self.name).generate(request)

    def generate_many(
        self,
        requests: Sequence[GenerateRequest],
        *,
        concurrency: int,
        on_done: Callable[[Generation], None] | None = None,
    ) -> list[Generation]:
        """Answer all requests with `concurrency` in flight."""
        engine = self.turns.running(self.name)
        return engine.generate_many(requests, concurrency=concurrency, on_done=on_done)

    @property
    def cpu_s(self) -> float:
        """Processor seconds of the client of the server that runs."""
        return self.turns.client_cpu_s

    @property
    def loop_lag_p99_s(self) -> float | None:
        """How late that client's event loop was in the last call."""
        return self.turns.client_lag_s

    def score(self, input_ids: Sequence[int], start: int) -> ForcedScores:
        """Score the tokens `input_ids[start:]`, each given everything before it."""
        return self.turns.running(self.name).score(input_ids, start)
