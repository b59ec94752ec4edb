"""Launching the servers of a run, whatever engine they run, and making sure each is ours."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from specpilot_cli.engines.base import EngineClient
from specpilot_cli.engines.client_process import ProcessEngine
from specpilot_cli.engines.process import ServerProcess, bind_port
from specpilot_cli.errors import MachineError, SpecPilotError
from specpilot_cli.ui import Reporter

# A broken connection is seen before the process that broke it is gone.
_DEATH_S = 2.0
_POLL_S = 0.05


class ServerPlan(Protocol):
    """One server of a run. `name` is its role in the benchmark, `label` what people call it."""

    @property
    def name(self) -> str:
        """Role: baseline, candidate, ar."""
        ...

    @property
    def label(self) -> str:
        """What errors and tables call it."""
        ...

    @property
    def host(self) -> str:
        """The address that it listens on."""
        ...

    @property
    def ready_timeout_s(self) -> float:
        """How long its start may take."""
        ...

    @property
    def request_timeout_s(self) -> float:
        """How long one request may take."""
        ...

    def command(self, port: int) -> list[str]:
        """Its command line."""
        ...

    def environment(self) -> Mapping[str, str]:
        """Variables that it gets beside the inherited ones."""
        ...

    def check(self, server: ServerProcess, info: Mapping[str, Any]) -> None:
        """The handshake: raise `MachineError` unless it runs what was asked for."""
        ...

    def meaning(self, log_path: Path) -> str | None:
        """What its log says about a failure, or None."""
        ...


class Servers(Protocol):
    """The servers of a run as the gates see them, running at the same time or by turns."""

    @property
    def engines(self) -> Mapping[str, EngineClient]:
        """A client for each, by system name."""
        ...

    def watched(self) -> AbstractContextManager[None]:
        """Work with the servers; if it fails and one of them has died, say that instead."""
        ...

    def check_after_failure(self) -> None:
        """Raise `MachineError` for a server that has died, or is dying right now."""
        ...


@dataclass(frozen=True, slots=True)
class Fleet:
    """The servers of one run and a client for each, by system name.

    infos: what each server said in the handshake.
    """

    servers: Mapping[str, ServerProcess]
    engines: Mapping[str, ProcessEngine]
    infos: Mapping[str, Mapping[str, Any]]
    plans: Mapping[str, ServerPlan]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Work with the servers; if it fails and one of them has died, say that instead."""
        try:
            yield
        except SpecPilotError:
            self.check_after_failure()
            raise

    def check(self) -> None:
        """Raise `MachineError` with the end of the log of a server that has died."""
        for name, server in self.servers.items():
            with explained(self.plans[name], server.log_path):
                server.check()

    def check_after_failure(self) -> None:
        """`check`, and once more for a server that is dying right now."""
        deadline = time.monotonic() + _DEATH_S
        while time.monotonic() < deadline:
            self.check()
            time.sleep(_POLL_S)


@contextmanager
def launch(
    plans: Sequence[ServerPlan], logs: Path, *, first_port: int | None, reporter: Reporter
) -> Iterator[Fleet]:
    """Start every system, check the handshake, and stop them all at the end.

    All are resident at once; the benchmark lets one work at a time. `first_port` numbers the
    ports upwards, otherwise free ones are taken. Raises `MachineError` for a server that does not
    start or does not run what was asked for.
    """
    servers: dict[str, ServerProcess] = {}
    engines: dict[str, ProcessEngine] = {}
    infos: dict[str, Mapping[str, Any]] = {}
    with ExitStack() as stack:
        for index, plan in enumerate(plans):
            wanted = 0 if first_port is None else first_port + index
            server = stack.enter_context(
                started(plan, logs / f"{plan.name}.log", port=wanted, reporter=reporter)
            )
            engine = stack.enter_context(client(plan, server))
            infos[plan.name] = shaken(plan, server, engine)
            servers[plan.name], engines[plan.name] = server, engine
        yield Fleet(servers, engines, infos, {plan.name: plan for plan in plans})


@contextmanager
def started(
    plan: ServerPlan, log_path: Path, *, port: int, reporter: Reporter
) -> Iterator[ServerProcess]:
    """One server that is ready, on `port` (0: a free one); stopped at the end."""
    with ExitStack() as stack:
        with _held_port(port, plan.host) as taken, explained(plan, log_path):
            reporter.note(f"starting {plan.label} on port {taken}")
            server = stack.enter_context(
                ServerProcess(
                    plan.command(taken),
                    port=taken,
                    host=plan.host,
                    log_path=log_path,
                    name=f"{plan.label} server",
                    env=plan.environment(),
                    ready_timeout_s=plan.ready_timeout_s,
                    reporter=reporter,
                )
            )
        yield server


def client(plan: ServerPlan, server: ServerProcess) -> ProcessEngine:
    """A client of a started server."""
    return ProcessEngine(server.base_url, plan.request_timeout_s, name=f"{plan.label} server")


def shaken(plan: ServerPlan, server: ServerProcess, engine: ProcessEngine) -> Mapping[str, Any]:
    """The handshake of a started server; what it says of itself."""
    try:
        info = engine.server_info()
        if server.listens() is False:
            raise not_ours(plan.label, server.port)
        plan.check(server, info)
    except SpecPilotError:
        with explained(plan, server.log_path):
            server.check()  # it may have died meanwhile, which explains the rest
        raise
    return info


def not_ours(label: str, port: int) -> MachineError:
    """That a stranger answers on the port that a server was given."""
    return MachineError(
        f"port {port} is answered by a process that is not the {label} server",
        hint="another program took the port; try again, or choose another --port",
    )


@contextmanager
def explained(plan: ServerPlan, log_path: Path) -> Iterator[None]:
    """Let a `MachineError` about the server say what its log means, where the log is plain."""
    try:
        yield
    except MachineError as error:
        meaning = plan.meaning(log_path)
        if meaning is not None:
            error.hint = f"{meaning}; the whole log is in {log_path}"
        raise


@contextmanager
def _held_port(wanted: int, host: str = "127.0.0.1") -> Iterator[int]:
    """A free port (`wanted` 0), kept from other runs until the server listens on it; or `wanted`.

    On Linux a bound socket that does not listen keeps the system from giving the port to anyone
    who asks for a free one, and does not hinder a server that asks for this one.
    """
    with bind_port(wanted, host=host) as held:
        port = int(held.getsockname()[1])
        if sys.platform != "linux":
            held.close()
        yield port
