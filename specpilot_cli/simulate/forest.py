"""Every tree that a policy may need, built once: what budgets accept is then a look-up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError
from specpilot_cli.replay.anchors import AS_RECORDED, Anchors, ReplayOptions, prepare
from specpilot_cli.replay.policy import edge_scores
from specpilot_cli.replay.run import warn_if_packed
from specpilot_cli.schema.lattice import LatticeRecording
from specpilot_cli.simulate.policy import BatchPolicy
from specpilot_cli.ui import Reporter, SilentReporter

MOST_NODES = 128
"""Nodes that one request may get of a shared budget."""

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Trees:
    """Best-first trees of all anchors at one block.

    score [A, N] float64: path log-probabilities in pop order, -inf past the last node. index
    [A, P] int32: the budget from which on the first d + 1 true tokens are in the tree.
    """

    score: Float
    index: npt.NDArray[np.int32]

    def accepted(self, anchors: Int, nodes: Int) -> Int:
        """Accepted drafts of these anchors with `nodes` nodes each, [r] int64."""
        return np.asarray((self.index[anchors] <= nodes[:, None]).sum(axis=1), dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """Trees by block, and how far stock's chain is right, [A] int64."""

    anchors: Anchors
    trees: dict[int, Trees]
    chain: Int


def grow(
    recording: LatticeRecording,
    policies: list[BatchPolicy],
    options: ReplayOptions = AS_RECORDED,
    *,
    where: str = "--policy",
    reporter: Reporter = SilentReporter(),
) -> Forest:
    """Build what the policies need. InputError for a recording that is anchored, or too shallow
    for what `where` asks.
    """
    if recording.metadata.mode != "dense":
        raise InputError(
            "a simulation needs a lattice at every output position, but this recording is anchored",
            hint="make a dense recording with `specpilot record`",
        )
    anchors = prepare(recording, options)
    widest: dict[int, int] = {}
    for policy in policies:
        for block in policy.blocks:
            if block - 1 > anchors.n_positions:
                raise InputError(
                    f"`{policy.text}` drafts {block - 1} positions, the recording has "
                    f"{anchors.n_positions}",
                    where=where,
                    hint=f"record with --block {block}",
                )
            nodes = policy.nodes if policy.mode == "tree" else min(policy.rows, MOST_NODES)
            if policy.mode != "chain":
                widest[block] = max(widest.get(block, 1), nodes)
    if widest:
        warn_if_packed(recording.metadata, sorted(widest.values()), options, reporter)
    hit = recording.stock_choice[anchors.step, : anchors.n_positions] == anchors.truth
    chain = np.logical_and.accumulate(hit, axis=1).sum(axis=1).astype(np.int64)
    trees = {block: _trees(anchors, block - 1, nodes, options) for block, nodes in widest.items()}
    return Forest(anchors, trees, chain)


def _trees(anchors: Anchors, depth: int, nodes: int, options: ReplayOptions) -> Trees:
    from specpilot_kernels.trees.best_first import best_first_batch
    from specpilot_kernels.trees.trace import truth_pop_index

    scores, indices = [], []
    for part in anchors.chunks():
        ids = anchors.candidate_ids[part, :depth]
        edge = edge_scores(anchors, part, options)[:, :depth]
        batch = best_first_batch(ids, edge, nodes)
        index, _ = truth_pop_index(ids, edge, anchors.truth[part, :depth], np.array([nodes]))
        indices.append(index)
        padded = np.full((len(batch), nodes), -np.inf)
        padded[:, : batch.score.shape[1]] = batch.score
        scores.append(padded)
    return Trees(np.concatenate(scores), np.concatenate(indices))
