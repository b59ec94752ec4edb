"""Replay of sequential drafters' recorded trees (EAGLE): prunings of what was expanded.

The recorded tree is all that is known, so a policy here can only choose among its nodes: the N most
probable of them, or the drafter's own first path. A tree that the drafter never expanded cannot be
judged; the oracle says what the best choice among the recorded nodes would accept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError
from specpilot_cli.io.tree_file import node_depths
from specpilot_cli.replay.anchors import (
    AS_RECORDED,
    ReplayOptions,
    Steps,
    line_up_steps,
    nothing_to_replay,
)
from specpilot_cli.replay.core import run_policies
from specpilot_cli.replay.modes import MODE_BIAS, Mode, resolve_mode
from specpilot_cli.replay.policy import UNLIMITED, EveryBudget, PolicyTrace, StepPolicy
from specpilot_cli.replay.result import ReplayResult
from specpilot_cli.replay.run import DEFAULT_NODES, check_nodes
from specpilot_cli.schema.tree_recording import TreeRecording

Int64 = npt.NDArray[np.int64]
NEVER = UNLIMITED + 1


@dataclass(frozen=True, slots=True, eq=False)
class TreeSteps(Steps):
    """Steps with their recorded trees, nodes of all of them in one list of M.

    node_step [M]: row among the steps. above [M]: parent in the list, -1 = anchor. depth, token
    [M]; score [M] float64: path log-probability. order [M]: rank of the node among its step's, by
    path score, from 1; a node's rank is above its parent's.
    """

    node_step: Int64
    above: Int64
    depth: Int64
    token: npt.NDArray[np.int32]
    score: npt.NDArray[np.float64]
    order: Int64

    def walk(self, allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Node on the true path at each depth, [A, P], -1 from where it leaves `allowed` [M]."""
        found = np.full(self.truth.shape, -1, dtype=np.int64)
        current = np.full(self.n_anchors, -1, dtype=np.int64)
        alive = np.ones(self.n_anchors, dtype=np.bool_)
        for level in range(self.n_positions):
            node = np.flatnonzero((self.depth == level + 1) & allowed)
            step = self.node_step[node]
            hit = (
                alive[step]
                & (self.above[node] == current[step])
                & (self.token[node] == self.truth[step, level])
            )
            alive = np.zeros_like(alive)
            alive[step[hit]] = True
            current[step[hit]] = node[hit]
            found[alive, level] = current[alive]
        return found


@dataclass(frozen=True, slots=True)
class FirstPath:
    """The drafter's own chain: its best child, that one's best child, and so on."""

    name: str = "chain"
    summary: str = "the drafter's most probable child at every level"

    def budgets(self, requested: Sequence[int], n_positions: int) -> list[int | None]:
        """Shorter chains where asked for, and the full chain."""
        return [*sorted({n for n in requested if n < n_positions}), n_positions]

    def trace(
        self, anchors: TreeSteps, options: ReplayOptions, budgets: Sequence[int]
    ) -> PolicyTrace:
        """Mark each level's best child of the last marked node; ties go to the first recorded."""
        marked = np.zeros(anchors.token.size, dtype=np.bool_)
        current = np.full(anchors.n_anchors, -1, dtype=np.int64)
        for level in range(anchors.n_positions):
            node = np.flatnonzero(anchors.depth == level + 1)
            node = node[anchors.above[node] == current[anchors.node_step[node]]]
            best = node[np.lexsort((node, -anchors.score[node], anchors.node_step[node]))]
            step, first = np.unique(anchors.node_step[best], return_index=True)
            current = np.full(anchors.n_anchors, -2, dtype=np.int64)  # no node has this parent
            current[step] = best[first]
            marked[best[first]] = True
        found = anchors.walk(marked)
        depth = np.arange(1, anchors.n_positions + 1)
        return PolicyTrace(np.where(found >= 0, depth, NEVER).astype(np.int32), None)


@dataclass(frozen=True, slots=True)
class MostProbable(EveryBudget):
    """The N most probable recorded nodes, EAGLE-2's rerank at every budget."""

    name: str = "best-first"
    summary: str = "the N most probable nodes of the recorded tree"

    def trace(
        self, anchors: TreeSteps, options: ReplayOptions, budgets: Sequence[int]
    ) -> PolicyTrace:
        """A node's rank by path score is the smallest budget that holds it."""
        found = anchors.walk(np.ones(anchors.token.size, dtype=np.bool_))
        index = np.where(found >= 0, anchors.order[np.maximum(found, 0)], NEVER)
        counted = anchors.depth < anchors.remaining[anchors.node_step]
        gain = np.where(counted, np.exp(anchors.score), 0.0)
        expected = np.empty((anchors.n_anchors, len(budgets)), dtype=np.float64)
        for slot, budget in enumerate(budgets):
            inside = np.where(anchors.order <= budget, gain, 0.0)
            expected[:, slot] = np.bincount(
                anchors.node_step, weights=inside, minlength=anchors.n_anchors
            )
        return PolicyTrace(index.astype(np.int32), expected)


@dataclass(frozen=True, slots=True)
class RecordedOracle:
    """An upper bound for prunings: accepts while the true token is in the recorded tree."""

    name: str = "oracle"
    summary: str = "upper bound: accepts while the true path is in the recorded tree"

    def budgets(self, requested: Sequence[int], n_positions: int) -> list[int | None]:
        """No budget applies."""
        return [None]

    def trace(
        self, anchors: TreeSteps, options: ReplayOptions, budgets: Sequence[int]
    ) -> PolicyTrace:
        """The true path through all recorded nodes."""
        found = anchors.walk(np.ones(anchors.token.size, dtype=np.bool_))
        return PolicyTrace(np.where(found >= 0, 1, NEVER).astype(np.int32), None)


TREE_POLICIES: dict[str, StepPolicy[TreeSteps]] = {
    policy.name: policy for policy in (FirstPath(), MostProbable(), RecordedOracle())
}


def replay_trees(
    recording: TreeRecording,
    policies: Sequence[str] | None = None,
    *,
    nodes: Sequence[int] = DEFAULT_NODES,
    mode: Mode | None = None,
    options: ReplayOptions = AS_RECORDED,
) -> ReplayResult:
    """Tokens per step of prunings of recorded trees; arguments as for `replay`.

    `options` may change `depth` and `step_cost`. Raises InputError on anything else, on unknown
    policies, or where there is nothing to replay.
    """
    budgets = check_nodes(nodes)
    chosen = _chosen(policies, options)
    used_mode = resolve_mode(recording.metadata, mode)
    steps = tree_steps(recording, options.depth)
    if steps.n_anchors == 0:
        raise nothing_to_replay()
    n_positions, cost = steps.n_positions, options.step_cost
    rows = run_policies(
        [steps],
        [(policy, policy.budgets(budgets, n_positions)) for policy in chosen],
        FirstPath(),
        metadata=recording.metadata,
        n_positions=n_positions,
        mode=used_mode,
        options=options,
    )
    known = (steps.truth >= 0).sum(axis=0)
    inside = (steps.walk(np.ones(steps.token.size, dtype=np.bool_)) >= 0).sum(axis=0)
    return ReplayResult(
        mode=used_mode,
        bias=f"{MODE_BIAS[used_mode]}; only nodes that the drafter expanded can be chosen",
        positions=n_positions,
        temperature=1.0,
        rows=rows,
        n_requests=int(np.count_nonzero(steps.count)),
        n_anchors=steps.n_anchors,
        recall_by_position=np.where(known > 0, inside / np.maximum(known, 1), np.nan),
        chain_mismatch_ratio=0.0,
        projected_because=None if cost is None else cost.projected_because(recording.metadata),
    )


def _chosen(policies: Sequence[str] | None, options: ReplayOptions) -> list[StepPolicy[TreeSteps]]:
    """The policies asked for; InputError on what recorded trees cannot answer."""
    names = list(TREE_POLICIES) if policies is None else list(dict.fromkeys(policies))
    for name in names:
        if name not in TREE_POLICIES:
            raise InputError(
                f"policy `{name}` needs lattices; this recording has sequential trees",
                where="--policy",
                hint=f"use one of {', '.join(TREE_POLICIES)}",
            )
    if options.temperature != 1.0 or options.positions is not None:
        raise InputError(
            "sequential trees can be cut with --depth, but not drafted anew with another "
            "--temperature or fewer --positions",
            where="--temperature" if options.temperature != 1.0 else "--positions",
            hint="leave the option out",
        )
    return [TREE_POLICIES[name] for name in names]


def tree_steps(recording: TreeRecording, depth_limit: int | None) -> TreeSteps:
    """Line up the steps that have something to predict, with the nodes of their trees."""
    depth = node_depths(recording)
    deepest = recording.metadata.block - 1
    if depth_limit is not None and not 1 <= depth_limit <= deepest:
        raise InputError(
            f"--depth {depth_limit} is outside 1 to {deepest}, the depth of these trees",
            where="--depth",
            hint="leave the option out to use all levels",
        )
    base = line_up_steps(recording, min(deepest, depth_limit or deepest))
    row = np.full(recording.n_steps, -1, dtype=np.int64)
    row[base.step] = np.arange(base.n_anchors)
    kept = (row[recording.node_step] >= 0) & (depth <= base.n_positions)
    renamed = np.cumsum(kept) - 1  # a kept node's parent is kept: it is less deep
    above = recording.node_above[kept]
    own = np.minimum(recording.node_log_prob.astype(np.float64), 0.0)
    score = own.copy()
    for at in range(2, deepest + 1):
        node = np.flatnonzero(depth == at)
        score[node] += score[recording.node_above[node]]
    step, level, path = row[recording.node_step][kept], depth[kept], score[kept]
    by_score = np.lexsort((np.arange(step.size), level, -path, step))
    first = np.searchsorted(step[by_score], np.arange(base.n_anchors))
    order = np.empty(step.size, dtype=np.int64)
    order[by_score] = np.arange(step.size) - first[step[by_score]] + 1
    return TreeSteps(
        base.metadata, base.step, base.request, base.remaining, base.truth, base.first,
        base.count, step, np.where(above < 0, -1, renamed[above]), level,
        recording.node_token[kept], path, order,
    )  # fmt: skip
