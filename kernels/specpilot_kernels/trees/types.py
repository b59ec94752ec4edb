"""The draft tree and the arrays that a verifier needs from it.

Nodes exclude the root. Node `i` is row `i + 1` of a verify pass; row 0 is the root, which carries
the last committed token. So a tree of `n` nodes costs `n + 1` rows (paper §3.1 counts rows).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """A prefix-closed draft tree, nodes in the order in which the builder chose them.

    token [n] int32: drafted token id.
    parent [n] int32: node index of the parent, always smaller than the node's own; -1 = root.
    depth [n] int32: 1 for children of the root, so depth d predicts the d-th token after the root.
    score [n] float64: path log-probability under the drafter, in nats.
    """

    token: Int32
    parent: Int32
    depth: Int32
    score: Float64

    @property
    def n_nodes(self) -> int:
        """Drafted tokens, the root not counted."""
        return int(self.token.shape[0])

    @property
    def n_rows(self) -> int:
        """Rows of the verify pass: nodes plus the root."""
        return self.n_nodes + 1

    def prefix(self, n_nodes: int) -> Tree:
        """The tree of the first `n_nodes` nodes; a best-first tree built with that budget."""
        if n_nodes < 0:
            raise ValueError(f"n_nodes must not be negative: {n_nodes}")
        part = slice(0, n_nodes)
        return Tree(self.token[part], self.parent[part], self.depth[part], self.score[part])


@dataclass(frozen=True, slots=True, eq=False)
class TreeBatch:
    """`s` trees padded to one width; the first `n_nodes[i]` entries of row `i` are tree `i`.

    token, parent, depth [s, n] int32, score [s, n] float64, n_nodes [s] int32; padding holds -1 in
    `token` and `parent`, 0 in `depth`, -inf in `score`.
    """

    token: Int32
    parent: Int32
    depth: Int32
    score: Float64
    n_nodes: Int32

    def __len__(self) -> int:
        return int(self.n_nodes.shape[0])

    def __getitem__(self, index: int) -> Tree:
        part = slice(0, int(self.n_nodes[index]))
        return Tree(
            self.token[index, part],
            self.parent[index, part],
            self.depth[index, part],
            self.score[index, part],
        )

    def cut(self, n_nodes: npt.NDArray[Any]) -> TreeBatch:
        """The first `n_nodes[i]` nodes of each tree, [s] int, or all where it has no more."""
        sizes = np.minimum(n_nodes, self.n_nodes).astype(np.int32)
        inside = np.arange(self.token.shape[1]) < sizes[:, None]
        return TreeBatch(
            np.where(inside, self.token, np.int32(-1)),
            np.where(inside, self.parent, np.int32(-1)),
            np.where(inside, self.depth, np.int32(0)),
            np.where(inside, self.score, -np.inf),
            sizes,
        )


def row_tokens(tree: Tree, root_token: int) -> Int32:
    """Input token of every verify row, [n + 1] int32: the last committed token, then the nodes."""
    return np.concatenate([np.array([root_token], dtype=np.int32), tree.token])


def row_parents(tree: Tree) -> Int32:
    """Parent row of every verify row, [n + 1] int32; the root row's own entry is -1."""
    return np.concatenate([np.array([-1], dtype=np.int32), tree.parent + np.int32(1)])


def row_depths(tree: Tree) -> Int32:
    """Position offset of every verify row from the root's position, [n + 1] int32, root 0."""
    return np.concatenate([np.zeros(1, dtype=np.int32), tree.depth])


def ancestor_mask(tree: Tree) -> Bool:
    """Which row may attend to which, [n + 1, n + 1] bool.

    `mask[i, j]` is true where row `j` is row `i` itself or one of its ancestors, the root row 0
    included. On a chain this is the causal lower triangle.
    """
    parents = row_parents(tree)
    mask = np.eye(tree.n_rows, dtype=np.bool_)
    for row in range(1, tree.n_rows):
        mask[row] |= mask[parents[row]]  # parents come first, so theirs is already complete
    return mask


def path_to(tree: Tree, node: int) -> Int64:
    """Node ids from the root's child down to `node`, [depth] int64."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = int(tree.parent[node])
    return np.array(path[::-1], dtype=np.int64)


def check_tree(tree: Tree) -> None:
    """Raise ValueError unless lengths agree, parents come first and depths follow from them."""
    n_nodes = tree.n_nodes
    arrays: tuple[npt.NDArray[Any], ...] = (tree.token, tree.parent, tree.depth, tree.score)
    if any(array.shape != (n_nodes,) for array in arrays):
        raise ValueError("tree arrays differ in length")
    index = np.arange(n_nodes)
    if np.any(tree.parent < -1) or np.any(tree.parent >= index):
        raise ValueError("a tree node precedes its parent")
    parent_depth = np.where(tree.parent < 0, 0, tree.depth[np.maximum(tree.parent, 0)])
    if np.any(tree.depth != parent_depth + 1):
        raise ValueError("a tree node's depth is not its parent's plus one")
