"""The reference engine's servers of a recipe, and their handshake."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpilot_cli.apply.serving import not_ours
from specpilot_cli.engines.process import ServerProcess
from specpilot_cli.engines.reference.faults import LogitFault
from specpilot_cli.engines.reference.launch import serve_command
from specpilot_cli.engines.reference.spec import SpecConfig
from specpilot_cli.errors import MachineError
from specpilot_cli.schema.recipe import RecipeRegime

_REGIME = RecipeRegime()


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
    regime: RecipeRegime = _REGIME
    ready_timeout_s: float = 120.0
    host: str = "127.0.0.1"
    request_timeout_s: float = 120.0

    def command(self, port: int) -> list[str]:
        """The `specpilot serve` command line."""
        return serve_command(
            self.target,
            self.drafter,
            self.spec,
            port=port,
            threads=self.regime.threads,
            dtype=self.regime.dtype,
            fault=self.fault,
        )

    def environment(self) -> Mapping[str, str]:
        """Nothing beside what is inherited."""
        return {}

    def describe(self) -> dict[str, Any]:
        """What a server of this plan must say about itself."""
        return {
            **self.spec.describe(),
            "weight_format": self.weight_format,
            "fault": None if self.fault is None else self.fault.describe(),
        }

    def check(self, server: ServerProcess, info: Mapping[str, Any]) -> None:
        """Raise `MachineError` for a stranger, or a server that runs something else."""
        check_owner(self, server, info)
        check_handshake(self, info)

    def meaning(self, log_path: Path) -> str | None:
        """Nothing: the end of this engine's log is the message."""
        return None


def check_owner(plan: SystemPlan, server: ServerProcess, info: Mapping[str, Any]) -> None:
    """Raise `MachineError` if a stranger answers on the port that the server was given."""
    pid = info.get("pid")
    if not isinstance(pid, int) or not server.owns(pid):
        raise not_ours(plan.label, server.port)


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
