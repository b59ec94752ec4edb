"""Launching the systems of a recipe, and making sure that each runs what was asked for."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpilot_cli.engines.http_client import HttpEngine
from specpilot_cli.engines.process import ServerProcess, bind_port
from specpilot_cli.engines.reference.launch import serve_command
from specpilot_cli.engines.reference.spec import LogitFault, SpecConfig
from specpilot_cli.errors import MachineError, SpecPilotError
from specpilot_cli.schema.recipe import RecipeRegime
from specpilot_cli.ui import Reporter

_READY_S = 120.0
_REQUEST_S = 120.0
# A broken connection is seen before the process that broke it is gone.
_DEATH_S = 2.0
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class SystemPlan:
    """One server: what it loads and how it decodes. `name` is its role in the benchmark."""

    name: str
    label: str
    target: Path
    drafter: Path | None
    spec: SpecConfig
    weight_format: str
    fault: LogitFault | None = None

    def command(self, regime: RecipeRegime, port: int) -> list[str]:
        """The `specpilot serve` command line."""
        return serve_command(
            self.target,
            self.drafter,
            self.spec,
            port=port,
            threads=regime.threads,
            dtype=regime.dtype,
            fault=self.fault,
        )

    def describe(self) -> dict[str, Any]:
        """What a server of this plan must say about itself."""
        return {
            **self.spec.describe(),
            "weight_format": self.weight_format,
            "fault": None if self.fault is None else self.fault.describe(),
        }


@dataclass(frozen=True, slots=True)
class Fleet:
    """The servers of one run and a client for each, by system name."""

    servers: Mapping[str, ServerProcess]
    engines: Mapping[str, HttpEngine]

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Work with the servers; if it fails and one of them has died, say that instead."""
        try:
            yield
        except SpecPilotError:
            self.check_after_failure()
            raise

    def check_after_failure(self) -> None:
        """Raise `MachineError` with the end of the log of a server that has died, or dies now."""
        deadline = time.monotonic() + _DEATH_S
        while time.monotonic() < deadline:
            for server in self.servers.values():
                server.check()
            time.sleep(_POLL_S)


@contextmanager
def launch(
    plans: Sequence[SystemPlan],
    regime: RecipeRegime,
    logs: Path,
    *,
    first_port: int | None,
    reporter: Reporter,
) -> Iterator[Fleet]:
    """Start every system, check the handshake, and stop them all at the end.

    All are resident at once; the benchmark lets one work at a time. `first_port` numbers the
    ports upwards, otherwise free ones are taken. Raises `MachineError` for a server that does not
    start or does not run what was asked for.
    """
    servers: dict[str, ServerProcess] = {}
    engines: dict[str, HttpEngine] = {}
    with ExitStack() as stack:
        for index, plan in enumerate(plans):
            wanted = 0 if first_port is None else first_port + index
            with _held_port(wanted) as port:
                reporter.note(f"starting {plan.label} on port {port}")
                server = stack.enter_context(
                    ServerProcess(
                        plan.command(regime, port),
                        port=port,
                        log_path=logs / f"{plan.name}.log",
                        name=f"{plan.label} server",
                        ready_timeout_s=_READY_S,
                        reporter=reporter,
                    )
                )
            name = f"{plan.label} server"
            engine = stack.enter_context(HttpEngine(server.base_url, _REQUEST_S, name=name))
            info = engine.server_info()
            check_owner(plan, server, info)
            check_handshake(plan, info)
            servers[plan.name], engines[plan.name] = server, engine
        yield Fleet(servers, engines)


def check_owner(plan: SystemPlan, server: ServerProcess, info: Mapping[str, Any]) -> None:
    """Raise `MachineError` if a stranger answers on the port that the server was given."""
    pid = info.get("pid")
    if not isinstance(pid, int) or not server.owns(pid):
        raise MachineError(
            f"port {server.port} is answered by a process that is not the {plan.label} server",
            hint="another program took the port; try again, or choose another --port",
        )


def check_handshake(plan: SystemPlan, info: Mapping[str, Any]) -> None:
    """Compare what the server says it runs with what was asked for.

    An engine that silently falls back to stock would make every later number a lie about stock.
    Raises `MachineError` naming the first difference.
    """
    state = info.get("specpilot")
    if not isinstance(state, Mapping):
        raise MachineError(
            f"the {plan.label} server does not say which mechanisms are active",
            hint="is it a server of this version of specpilot?",
        )
    for key, wanted in plan.describe().items():
        if key not in state or state[key] != wanted:
            raise MachineError(
                f"the {plan.label} server runs {key}={state.get(key)!r}, asked for {wanted!r}",
                hint="its log names the reason; no result was written",
            )


@contextmanager
def _held_port(wanted: int) -> Iterator[int]:
    """A free port (`wanted` 0), kept from other runs until the server listens on it; or `wanted`.

    On Linux a bound socket that does not listen keeps the system from giving the port to anyone
    who asks for a free one, and does not hinder a server that asks for this one.
    """
    with bind_port(wanted) as held:
        port = int(held.getsockname()[1])
        if sys.platform != "linux":
            held.close()
        yield port
