"""A recording of sequential drafters, EAGLE's kind: per step the tree that was drafted.

Such a drafter scores a token given its whole path, so what it offered is a tree and not a lattice:
nothing is known of paths that it did not expand. Stored like a lattice (`schema/lattice.py`), with
the first six tensors the same, under the metadata key `specpilot_trees`.

`N` nodes of all steps. A node's parent is its index among the nodes of the same step, -1 for a
child of the anchor; parents come before their children.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from specpilot_cli.schema.lattice import TENSORS, Axes, RecordedSteps

TREES_KEY = "specpilot_trees"

TREE_TENSORS: dict[str, tuple[str, Axes]] = {
    **dict(list(TENSORS.items())[:6]),
    "node_offsets": ("int64", ("S + 1",)),
    "node_token": ("int32", ("N",)),
    "node_parent": ("int32", ("N",)),
    "node_log_prob": ("float32", ("N",)),
}


@dataclass(frozen=True, slots=True, eq=False)
class TreeRecording(RecordedSteps):
    """A recording of trees in memory; arrays as in `TREE_TENSORS`.

    metadata: `drafter_kind` is `eagle`, and `block` the depth of the deepest tree plus one.
    node_log_prob: log-probability of a node's token given its path, in nats, at most 0.
    """

    node_offsets: npt.NDArray[np.int64]
    node_token: npt.NDArray[np.int32]
    node_parent: npt.NDArray[np.int32]
    node_log_prob: npt.NDArray[np.float32]

    @property
    def node_step(self) -> npt.NDArray[np.int64]:
        """The step of every node, [N] int64."""
        return np.repeat(np.arange(self.n_steps), np.diff(self.node_offsets))

    @property
    def node_above(self) -> npt.NDArray[np.int64]:
        """Every node's parent counted over all nodes, [N] int64; -1 for a child of the anchor."""
        first = self.node_offsets[:-1][self.node_step]
        return np.where(self.node_parent < 0, -1, first + self.node_parent)

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """All arrays by tensor name, in file order."""
        return {name: getattr(self, name) for name in TREE_TENSORS}
