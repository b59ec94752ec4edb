"""Published ways to build a tree, replayed beside best-first (paper §6.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError
from specpilot_cli.replay.anchors import Anchors, ReplayOptions, line_up, positions_in_use
from specpilot_cli.replay.policy import (
    BudgetTrace,
    EveryBudget,
    NothingToFit,
    PolicyTrace,
    edge_scores,
    trace_prefixes,
)
from specpilot_cli.replay.split import two_folds
from specpilot_cli.schema.lattice import LatticeSource
from specpilot_cli.ui import Reporter, SilentReporter

if TYPE_CHECKING:
    from specpilot_kernels.trees.sequoia import SequoiaPlan


@dataclass(frozen=True, slots=True)
class LevelPolicy(EveryBudget, NothingToFit):
    """EAGLE-2 (`beam`: `--top-k` paths per level) or OPT-Tree (as many as the budget)."""

    name: str
    summary: str
    beam: bool

    def trace(
        self, anchors: Anchors, options: ReplayOptions, budgets: Sequence[int]
    ) -> PolicyTrace:
        """Build one tree per anchor at the largest budget; its prefixes are the smaller ones."""
        from specpilot_kernels.trees.levels import levels_pop_index

        def walk(
            part: slice, sizes: npt.NDArray[np.int64]
        ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64]]:
            return levels_pop_index(
                anchors.candidate_ids[part],
                edge_scores(anchors, part, options),
                anchors.truth[part],
                sizes,
                top_k=options.top_k if self.beam else None,
                counted_depth=anchors.remaining[part] - 1,
            )

        return trace_prefixes(anchors, budgets, walk)


@dataclass(frozen=True, slots=True)
class SequoiaPolicy(EveryBudget):
    """One fixed tree for all steps, from how often the truth has which rank.

    Cross-fitted: each half of the requests is judged with the tree fitted on the other half, so no
    request helps to choose its own tree.
    """

    name: str = "sequoia"
    summary: str = "Sequoia: one fixed tree by rank, fitted on the other half of the requests"

    def fitted(
        self,
        source: LatticeSource,
        options: ReplayOptions,
        budgets: Sequence[int],
        *,
        reporter: Reporter = SilentReporter(),
    ) -> FittedSequoia:
        """Count ranks in one pass and plan once per half. With one request, warn and use it."""
        from specpilot_kernels.trees.sequoia import sequoia_plan

        hits, tried = rank_counts(source, options)
        fold = two_folds(source.metadata, tried > 0)
        used = [half for half in (0, 1) if tried[fold == half].sum() > 0]
        if len(used) == 1:
            reporter.warn("one request only: sequoia's tree is judged on what it was fitted on")
        plans: dict[int, SequoiaPlan] = {}
        n_positions = positions_in_use(source, options)
        for judged in used:
            learnt = fold != judged if len(used) > 1 else fold == judged
            accept = hits[learnt].sum(axis=0) / tried[learnt].sum()
            plans[judged] = sequoia_plan(accept, max(budgets), max_depth=n_positions)
        names = [request.request_id for request in source.metadata.requests]
        halves = dict(zip(names, fold.tolist(), strict=True))
        return FittedSequoia(self.name, self.summary, plans, halves)

    def trace(
        self, anchors: Anchors, options: ReplayOptions, budgets: Sequence[int]
    ) -> BudgetTrace:
        """Fitted on these anchors alone."""
        return self.fitted(anchors.recording, options, budgets).trace(anchors, options, budgets)


@dataclass(frozen=True, slots=True)
class FittedSequoia(EveryBudget):
    """Sequoia's plans, by the half that each judges, and the half of every request by its id."""

    name: str
    summary: str
    plans: dict[int, SequoiaPlan]
    halves: dict[str, int]

    def trace(
        self, anchors: Anchors, options: ReplayOptions, budgets: Sequence[int]
    ) -> BudgetTrace:
        """Walk each request's fixed tree of every budget by the ranks of its true tokens."""
        from specpilot_kernels.trees.sequoia import accepted_by_rank

        ranks = true_ranks(anchors, options)
        n_ranks, n_positions = anchors.candidate_ids.shape[2], anchors.n_positions
        requests = anchors.metadata.requests
        fold = np.array([self.halves[item.request_id] for item in requests])[anchors.request]
        accepted = {n: np.zeros(anchors.n_anchors, dtype=np.int32) for n in budgets}
        expected = np.zeros((anchors.n_anchors, len(budgets)), dtype=np.float64)
        counted = np.clip(anchors.remaining - 1, 0, n_positions)
        for judged, plan in self.plans.items():
            mine = fold == judged
            for slot, n_nodes in enumerate(budgets):
                tree = plan.tree(n_nodes)
                accepted[n_nodes][mine] = accepted_by_rank(tree, ranks[mine], n_ranks)
                by_depth = tree.reach_by_depth(plan.accept, n_positions)
                expected[mine, slot] = np.cumsum(by_depth)[counted[mine]]
        return BudgetTrace(accepted, expected)


@dataclass(frozen=True, slots=True)
class CostAwarePolicy(EveryBudget, NothingToFit):
    """As many nodes per step as pay for themselves: argmax of τ(N) / c(N) up to the budget.

    This is CaDDTree's rule on best-first trees with conditional scores; CaDDTree itself scores
    without parents. τ(N) is the drafter's own estimate, c(N) the given step times.
    """

    name: str = "cost-aware"
    summary: str = "best-first, cut per step where expected τ / step time peaks; --step-times"

    def trace(
        self, anchors: Anchors, options: ReplayOptions, budgets: Sequence[int]
    ) -> BudgetTrace:
        """Choose each anchor's budget before its truth is looked at, as a live engine would."""
        from specpilot_kernels.trees.trace import truth_pop_index

        most, n_anchors = max(budgets), anchors.n_anchors
        cost = _costs(options, most)
        every = np.arange(most + 1, dtype=np.int64)
        accepted = {n: np.empty(n_anchors, dtype=np.int32) for n in budgets}
        used = {n: np.empty(n_anchors, dtype=np.int32) for n in budgets}
        expected = np.empty((n_anchors, len(budgets)), dtype=np.float64)
        candidates = anchors.candidate_ids
        for part in anchors.chunks():
            edge, truth = edge_scores(anchors, part, options), anchors.truth[part]
            pop_index, hoped = truth_pop_index(candidates[part], edge, truth, every)
            counted = anchors.remaining[part] - 1
            _, inside = truth_pop_index(candidates[part], edge, truth, every, counted_depth=counted)
            for slot, cap in enumerate(budgets):
                chosen = ((1.0 + hoped[:, : cap + 1]) / cost[: cap + 1]).argmax(axis=1)
                accepted[cap][part] = (pop_index <= chosen[:, None]).sum(axis=1)
                used[cap][part] = chosen
                expected[part, slot] = inside[np.arange(len(chosen)), chosen]
        return BudgetTrace(accepted, expected, used)


def true_ranks(anchors: Anchors, options: ReplayOptions) -> npt.NDArray[np.int32]:
    """Rank of the true token among the true parent's children, [A, P]; -1 once off the lattice."""
    from specpilot_kernels.trees.sequoia import truth_ranks

    ranks = np.empty((anchors.n_anchors, anchors.n_positions), dtype=np.int32)
    candidates = anchors.candidate_ids
    for part in anchors.chunks():
        edge = edge_scores(anchors, part, options)
        ranks[part] = truth_ranks(candidates[part], edge, anchors.truth[part])
    return ranks


def rank_counts(
    source: LatticeSource, options: ReplayOptions
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """How often the truth had each rank, [R, K], and how often it could have had one, [R].

    Counts every position whose true parent is on the true path and whose true token is known;
    the quotient is Sequoia's acceptance vector.
    """
    hits: list[npt.NDArray[np.int64]] = []
    tried: list[npt.NDArray[np.int64]] = []
    n_ranks = source.n_candidates
    for part in source.parts():
        anchors = line_up(part, options)
        ranks = true_ranks(anchors, options)
        on_path = np.ones_like(ranks, dtype=np.bool_)
        on_path[:, 1:] = ranks[:, :-1] >= 0
        known = on_path & (anchors.truth >= 0)
        request = np.broadcast_to(anchors.request[:, None], ranks.shape)
        cell = (request * n_ranks + ranks)[known & (ranks >= 0)]
        counts = np.bincount(cell, minlength=anchors.n_requests * n_ranks)
        hits.append(counts.reshape(anchors.n_requests, n_ranks).astype(np.int64))
        tried.append(np.bincount(request[known], minlength=anchors.n_requests).astype(np.int64))
    return np.concatenate(hits), np.concatenate(tried)


def _costs(options: ReplayOptions, most: int) -> npt.NDArray[np.float64]:
    if options.step_cost is None:
        raise InputError(
            "policy `cost-aware` needs to know what a step costs",
            where="--policy",
            hint="give step times with --step-times; `specpilot ceiling --list` shows the bundled",
        )
    options.step_cost.check(most)
    return np.asarray(options.step_cost.seconds, dtype=np.float64)
