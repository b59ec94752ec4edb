"""Launching the systems of a recipe, and making sure that each runs what was asked for."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpilot_cli.engines.http_client import HttpEngine
from specpilot_cli.engines.process import ServerProcess
from specpilot_cli.engines.reference.launch import serve_command
from specpilot_cli.engines.reference.spec import LogitFault, SpecConfig
from specpilot_cli.errors import MachineError
from specpilot_cli.schema.recipe import RecipeRegime
from specpilot_cli.ui import Reporter

_READY_S = 120.0


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


def launch(
    plans: list[SystemPlan],
    regime: RecipeRegime,
    logs: Path,
    stack: ExitStack,
    *,
    first_port: int | None,
    reporter: Reporter,
) -> dict[str, HttpEngine]:
    """Start every system, check the handshake, and return clients by system name.

    Servers live until `stack` closes. All are resident at once; the benchmark lets one work at a
    time. `first_port` numbers the ports upwards, otherwise free ones are taken.
    """
    engines = {}
    for index, plan in enumerate(plans):
        port = _free_port() if first_port is None else first_port + index
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
        engine = stack.enter_context(HttpEngine(server.base_url))
        check_handshake(plan, engine.server_info())
        engines[plan.name] = engine
    return engines


def check_handshake(plan: SystemPlan, info: Mapping[str, Any]) -> None:
    """Compare what the server says it runs with what was asked for.

    An engine that silently falls back to stock would make every later number a lie about stock.
    Raises `MachineError` naming the first difference.
    """
    state = info.get("specpilot")
    if not isinstance(state, Mapping):
        raise MachineError(f"the {plan.label} server does not say which mechanisms are active")
    asked: dict[str, Any] = {
        **plan.spec.describe(),
        "weight_format": plan.weight_format,
        "fault": plan.fault.describe() if plan.fault else None,
    }
    for key, wanted in asked.items():
        if state.get(key) != wanted:
            raise MachineError(
                f"the {plan.label} server runs {key}={state.get(key)!r}, asked for {wanted!r}",
                hint="its log names the reason; no result was written",
            )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
