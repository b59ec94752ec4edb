"""The chain that stock drafts: the best candidate at each position given the one before."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from specpilot_kernels.trees._walks import many_chains
from specpilot_kernels.trees.lattice import as_candidates, as_edges
from specpilot_kernels.trees.types import Tree, TreeBatch


def chain(
    candidate_ids: npt.NDArray[Any], edge: npt.NDArray[Any], *, length: int | None = None
) -> Tree:
    """The greedy walk through one lattice as a tree of one path (paper §2.1, stock).

    candidate_ids [L, K] int32, edge [L, K or 1, K] float32. `length` stops the walk early. Equal
    scores go to the lower candidate index, as argmax does. Raises ValueError on shapes.
    """
    candidates = as_candidates(candidate_ids, 2)
    edges = as_edges(edge, candidates)
    return chain_batch(candidates[None], edges[None], length=length)[0]


def chain_batch(
    candidate_ids: npt.NDArray[Any], edge: npt.NDArray[Any], *, length: int | None = None
) -> TreeBatch:
    """`chain` for `s` lattices: candidate_ids [s, L, K], edge [s, L, K or 1, K]."""
    candidates = as_candidates(candidate_ids, 3)
    edges = as_edges(edge, candidates)
    n_positions = candidates.shape[1]
    n_nodes = n_positions if length is None else min(length, n_positions)
    if n_nodes < 0:
        raise ValueError(f"length must not be negative: {length}")
    return TreeBatch(*many_chains(candidates, edges, n_nodes))
