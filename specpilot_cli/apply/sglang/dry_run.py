"""What a run of an SGLang recipe would start, for `--dry-run` and for the run's result."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from specpilot_cli.apply.sglang.preflight import CheckedSglang, PlannedSystem
from specpilot_cli.engines.sglang.memory_plan import MemoryPlan
from specpilot_cli.schema.plugin_config import PluginConfig


@dataclass(frozen=True, slots=True)
class PlannedServer:
    """One server: the exact command and what is set in its environment beside the inherited.

    port is None where a free one will be taken; the command then says PORT.
    """

    name: str
    label: str
    port: int | None
    command: str
    environment: dict[str, str]
    plugin: PluginConfig | None
    memory: MemoryPlan


@dataclass(frozen=True, slots=True)
class PlannedSglangRun:
    """A run before it starts. no_gates: why nothing will be judged, None if both gates run."""

    recipe: str
    engine_versions: str
    folder: str
    target: str
    target_known_from: str
    drafter: str | None
    mechanisms: tuple[str, ...]
    together: bool
    n_timed_prompts: int | None
    no_gates: str | None
    servers: tuple[PlannedServer, ...]


def plan_sglang(checked: CheckedSglang, folder: Path) -> PlannedSglangRun:
    """The run of `checked` in `folder`."""
    recipe, models = checked.loaded.recipe, checked.models
    return PlannedSglangRun(
        recipe=recipe.name,
        engine_versions=str(recipe.engine_versions),
        folder=str(folder),
        target=models.target.source,
        target_known_from=models.target.known_from,
        drafter=None if models.drafter is None else models.drafter.source,
        mechanisms=tuple(mechanism.mechanism for mechanism in recipe.mechanisms),
        together=checked.together,
        n_timed_prompts=None if checked.gates is None else checked.gates.n_timed,
        no_gates=checked.no_gates,
        servers=tuple(
            _server(checked, planned, index) for index, planned in enumerate(checked.systems)
        ),
    )


def _server(checked: CheckedSglang, planned: PlannedSystem, index: int) -> PlannedServer:
    system, first = planned.system, checked.settings.first_port
    # servers that follow each other share the first port
    port = None if first is None else first + (index if checked.together else 0)
    words = system.command(port or 0)
    if port is None:
        words[words.index("--port") + 1] = "PORT"
    return PlannedServer(
        name=system.name,
        label=system.label,
        port=port,
        command=shlex.join(words),
        environment=system.environment(),
        plugin=system.plugin,
        memory=planned.memory,
    )
