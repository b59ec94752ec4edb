"""Draft trees over a drafter's lattice: builders, acceptance, and the arrays a verifier needs."""

from __future__ import annotations

from specpilot_kernels.trees.accept import accepted_nodes, walk_accepted
from specpilot_kernels.trees.best_first import (
    best_first,
    best_first_batch,
    marginal,
    warm_up,
)
from specpilot_kernels.trees.chain import chain
from specpilot_kernels.trees.lattice import edge_log_probs, marginal_log_probs, temper
from specpilot_kernels.trees.reference import best_first_reference
from specpilot_kernels.trees.types import (
    Tree,
    TreeBatch,
    ancestor_mask,
    check_tree,
    path_to,
    row_depths,
    row_parents,
    row_tokens,
)

__all__ = [
    "Tree",
    "TreeBatch",
    "accepted_nodes",
    "ancestor_mask",
    "best_first",
    "best_first_batch",
    "best_first_reference",
    "chain",
    "check_tree",
    "edge_log_probs",
    "marginal",
    "marginal_log_probs",
    "path_to",
    "row_depths",
    "row_parents",
    "row_tokens",
    "temper",
    "walk_accepted",
    "warm_up",
]
