"""What trees do in this process; for `/server_info`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from specpilot_cli.schema.plugin_config import TREE_ALGORITHM, TreePlugin

REFERENCE: Final = "reference"
"""Of a part that no kernel computes, on a CPU."""


@dataclass(slots=True)
class Facts:
    """One per process.

    asked: SGLang chose the algorithm. settings: None until its worker is complete. kernels: part
    of a step -> what computes it. graphs: parts that run in a captured graph. record_bytes: of one
    request's replay records, 0 without recurrent layers; snapshot_bytes: what states of as many
    rows would take. steps: verify passes of a request.
    """

    asked: bool = False
    settings: TreePlugin | None = None
    kernels: dict[str, str] = field(default_factory=dict)
    graphs: set[str] = field(default_factory=set)
    record_bytes: int = 0
    snapshot_bytes: int = 0
    steps: int = 0

    def report(self) -> dict[str, Any] | str:
        """The facts of `PluginState.active["tree"]`, or why no trees are served."""
        if not self.asked:
            return f"the server runs without it: give `--speculative-algorithm {TREE_ALGORITHM}`"
        if self.settings is None:
            return "its worker is not complete"
        settings = self.settings
        return {
            "drafter": settings.drafter,
            "nodes": settings.nodes,
            "rows": settings.rows,
            "block": settings.block,
            "depth": settings.depth,
            "scoring": settings.scoring,
            "calibrated": settings.calibration is not None,
            "kernels": dict(sorted(self.kernels.items())),
            "graphs": sorted(self.graphs),
            "steps": self.steps,
            "record_bytes": self.record_bytes,
            "snapshot_bytes": self.snapshot_bytes,
        }


FACTS = Facts()
"""Of this process."""
