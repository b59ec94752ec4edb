"""Which nodes of a verified tree are accepted (paper §2.1, §2.2).

Greedy verification follows the target's own argmax from the root: at each row it descends to the
child that carries the target's token, and stops where no child does. The token it could not
follow is the bonus, which is committed too, so a step commits accepted nodes + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from specpilot_kernels.trees._walks import count_accepted
from specpilot_kernels.trees.types import Int32, Int64, Tree, TreeBatch


def walk_accepted(tree: Tree, target_next: npt.NDArray[Any]) -> tuple[Int64, int]:
    """Follow the target through a verified tree; what the exact pass accepts.

    target_next [n + 1] int: the target's argmax after each row, row 0 the root. Returns the ids of
    the accepted nodes from the root down, [a] int64, and the bonus token. Raises ValueError unless
    there is one entry per row.
    """
    if target_next.shape != (tree.n_rows,):
        raise ValueError(
            f"target_next has shape {target_next.shape}, but the tree has {tree.n_rows} rows"
        )
    wanted = target_next.tolist()
    path = follow(tree.token.tolist(), tree.parent.tolist(), wanted)
    last = path[-1] if path else -1
    return np.array(path, dtype=np.int64), int(wanted[last + 1])


def follow(token: Sequence[int], parent: Sequence[int], target_next: Sequence[int]) -> list[int]:
    """The accepted nodes of a tree given as lists, for callers that have no `Tree`."""
    path: list[int] = []
    current = -1
    # Parents precede children, so one pass over the nodes meets the path in order.
    for node, (drafted, above) in enumerate(zip(token, parent, strict=True)):
        if above == current and drafted == target_next[current + 1]:
            path.append(node)
            current = node
    return path


def accepted_nodes(tree: Tree, truth: npt.NDArray[Any]) -> Int64:
    """Ids of the nodes along which the tree agrees with a known continuation, [a] int64.

    truth [t] int: the tokens that follow the root, as many as are known. This is exact replay of
    `walk_accepted` when the target's greedy output is already recorded (paper §6.4).
    """
    wanted = truth.tolist()
    path: list[int] = []
    current = -1
    for node, (token, parent) in enumerate(
        zip(tree.token.tolist(), tree.parent.tolist(), strict=True)
    ):
        if parent == current and len(path) < len(wanted) and token == wanted[len(path)]:
            path.append(node)
            current = node
    return np.array(path, dtype=np.int64)


def accepted_counts(trees: TreeBatch, truth: npt.NDArray[Any]) -> Int32:
    """How many nodes of each tree `accepted_nodes` finds, [s] int32.

    truth [s, t] int: the tokens that follow each root, -1 from where they are unknown. Raises
    ValueError unless there is one row per tree.
    """
    wanted = np.ascontiguousarray(truth, dtype=np.int32)
    if wanted.ndim != 2 or wanted.shape[0] != len(trees):
        raise ValueError(f"truth has shape {wanted.shape}, but there are {len(trees)} trees")
    return count_accepted(trees.token, trees.parent, trees.n_nodes, wanted)
