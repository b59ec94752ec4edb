"""Draft trees over a drafter's lattice: builders, acceptance, and the arrays a verifier needs."""

from __future__ import annotations

from specpilot_kernels.trees.accept import accepted_counts, accepted_nodes, walk_accepted
from specpilot_kernels.trees.best_first import (
    best_first,
    best_first_batch,
    marginal,
    warm_up,
)
from specpilot_kernels.trees.builders import BUILDERS, Builder, Lattices, build
from specpilot_kernels.trees.chain import chain, chain_batch
from specpilot_kernels.trees.lattice import (
    calibration_table,
    edge_log_probs,
    marginal_log_probs,
    temper,
)
from specpilot_kernels.trees.levels import eagle2, eagle2_batch, opt_tree, opt_tree_batch
from specpilot_kernels.trees.reference import best_first_reference
from specpilot_kernels.trees.sequoia import (
    RankTree,
    SequoiaPlan,
    place,
    place_batch,
    sequoia_plan,
)
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
    "BUILDERS",
    "Builder",
    "Lattices",
    "RankTree",
    "SequoiaPlan",
    "Tree",
    "TreeBatch",
    "accepted_counts",
    "accepted_nodes",
    "ancestor_mask",
    "best_first",
    "best_first_batch",
    "best_first_reference",
    "build",
    "calibration_table",
    "chain",
    "chain_batch",
    "check_tree",
    "eagle2",
    "eagle2_batch",
    "edge_log_probs",
    "marginal",
    "marginal_log_probs",
    "opt_tree",
    "opt_tree_batch",
    "path_to",
    "place",
    "place_batch",
    "row_depths",
    "row_parents",
    "row_tokens",
    "sequoia_plan",
    "temper",
    "walk_accepted",
    "warm_up",
]
