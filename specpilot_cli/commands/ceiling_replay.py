"""Tokens per step for `specpilot ceiling`, from recorded lattices."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specpilot_cli.ceiling.replayed import ReplayedTaus
    from specpilot_cli.schema.step_profile import StepProfile


def replay_taus(
    lattices: Path, nodes: str, step: StepProfile | None, *, quiet: bool
) -> tuple[ReplayedTaus, int]:
    """Best-first trees at every budget, and the policy of `step` at its own budget; the block.

    For plain DFlash the trees are marginal ones.
    """
    from specpilot_cli.ceiling.replayed import ReplayedTaus
    from specpilot_cli.ceiling.speedup import TauPoint
    from specpilot_cli.commands.replay import parse_nodes
    from specpilot_cli.io.lattice_file import LatticeFiles
    from specpilot_cli.replay.policies import best_tree
    from specpilot_cli.replay.run import check_nodes, replay
    from specpilot_cli.schema.deployment import of_recording
    from specpilot_cli.ui import ConsoleReporter

    budgets = check_nodes(parse_nodes(nodes))
    recording = LatticeFiles(lattices)
    tree = best_tree(recording.metadata.drafter_kind)
    own = None if step is None else {"chain": "chain", "tree": tree}.get(step.mode)
    own_nodes = 0 if step is None else step.nodes
    with ConsoleReporter(quiet) as reporter:
        result = replay(
            recording,
            ["chain", tree, "oracle"],
            nodes=sorted({*budgets, max(own_nodes, 1)}),
            reporter=reporter,
        )
    recorded = of_recording(recording.metadata)
    trees = result.curve(tree)
    now = None if own is None else result.curve(own).get(own_nodes)
    found = ReplayedTaus(
        trees=tuple(TauPoint(n, trees[n]) for n in budgets),
        current=None if now is None else TauPoint(own_nodes, now),
        source=f"{result.mode} replay of {lattices} ({recorded.text})",
        recorded=recorded,
        policy=tree,
        oracle=result.row("oracle", None).tau.value,
    )
    return found, recording.metadata.block
