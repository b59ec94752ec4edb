"""What a run would do, for `--dry-run`; every check has passed by then."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from specpilot_cli.apply.reference.preflight import CheckedRecipe
from specpilot_cli.apply.reference.run import plan_systems
from specpilot_cli.engines.reference.faults import LogitFault


@dataclass(frozen=True, slots=True)
class PlannedServer:
    """One server of the run; `port` is None where a free one will be taken."""

    name: str
    label: str
    port: int | None
    command: str


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A recipe's run before it starts.

    node_budgets: those to measure. nodes: the fixed budget, None where the run chooses.
    """

    recipe: str
    folder: str
    target: str
    drafter: str
    mechanisms: tuple[str, ...]
    node_budgets: tuple[int, ...]
    nodes: int | None
    n_dev_prompts: int
    n_timed_prompts: int
    runs: int
    aa_sessions: int
    fault: LogitFault | None
    servers: tuple[PlannedServer, ...]


def plan_run(checked: CheckedRecipe, folder: Path) -> PlannedRun:
    """The run of `checked` in `folder`."""
    loaded, recipe, tree = checked.loaded, checked.loaded.recipe, checked.tree
    first = checked.settings.first_port
    fixed = None if tree.nodes == "auto" else tree.nodes
    servers = []
    for index, system in enumerate(plan_systems(checked, folder, fixed or tree.measured_nodes[0])):
        port = None if first is None else first + index
        words = system.command(port or 0)
        if port is None:
            words[words.index("--port") + 1] = "PORT"
        if fixed is None and system.spec.mode == "tree":
            words[words.index("--nodes") + 1] = "NODES"
        servers.append(PlannedServer(system.name, system.label, port, shlex.join(words)))
    return PlannedRun(
        recipe=recipe.name,
        folder=str(folder),
        target=str(loaded.target),
        drafter=str(loaded.drafter),
        mechanisms=tuple(mechanism.mechanism for mechanism in recipe.mechanisms),
        node_budgets=tree.measured_nodes,
        nodes=fixed,
        n_dev_prompts=len(checked.dev),
        n_timed_prompts=checked.gates.n_timed,
        runs=checked.gates.bench.runs,
        aa_sessions=checked.gates.bench.aa_sessions,
        fault=checked.settings.fault,
        servers=tuple(servers),
    )
