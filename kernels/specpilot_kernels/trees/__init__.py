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
from specpilot_kernels.trees.levels import eagle2, opt_tree
from specpilot_kernels.trees.reference import best_first_reference
from specpilot_kernels.trees.sequoia import RankTree, SequoiaPlan, place, sequoia_plan
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
    "RankTree",
    "SequoiaPlan",
    "Tree",
    "TreeBatch",
    "accepted_nodes",
    "ancestor_mask",
    "best_first",
    "best_first_batch",
    "best_first_reference",
    "chain",
    "check_tree",
    "eagle2",
    "edge_log_probs",
    "marginal",
    "marginal_log_probs",
    "opt_tree",
    "path_to",
    "place",
    "row_depths",
    "row_parents",
    "row_tokens",
    "sequoia_plan",
    "temper",
    "walk_accepted",
    "warm_up",
]
