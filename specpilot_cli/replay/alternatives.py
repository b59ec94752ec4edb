"""Published ways to build a tree, replayed beside best-first (paper §6.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specpilot_cli.errors import InputError
from specpilot_cli.replay.anchors import Anchors, ReplayOptions
from specpilot_cli.replay.policy import (
    BudgetTrace,
    EveryBudget,
    PolicyTrace,
    edge_scores,
    trace_prefixes,
)
from specpilot_cli.replay.split import two_folds
from specpilot_cli.ui import Reporter, SilentReporter


@dataclass(frozen=True, slots=True)
class LevelPolicy(EveryBudget):
    """EAGLE-2 (`beam`: `--top-k` paths per level) or OPT-Tree (as many as the budget)."""

    name: str
    summary: str
    beam: bool

    def trace(
        self,
        anchors: Anchors,
        options: ReplayOptions,
        budgets: Sequence[int],
        *,
        reporter: Reporter = SilentReporter(),
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

        return trace_prefixes(self.name, anchors, budgets, walk, reporter)


@dataclass(frozen=True, slots=True)
class SequoiaPolicy(EveryBudget):
    """One fixed tree for all steps, from how often the truth has which rank.

    Cross-fitted: each half of the requests is judged with the tree fitted on the other half, so no
    request helps to choose its own tree.
    """

    name: str = "sequoia"
    summary: str = "Sequoia: one fixed tree by rank, fitted on the other half of the requests"

    def trace(
        self,
        anchors: Anchors,
        options: ReplayOptions,
        budgets: Sequence[int],
        *,
        reporter: Reporter = SilentReporter(),
    ) -> BudgetTrace:
        """Fit, plan and walk, once per half. With one request, fit and judge on it, and warn."""
        from specpilot_kernels.trees.sequoia import accepted_by_rank, sequoia_plan

        ranks = true_ranks(anchors, options)
        n_ranks, n_positions = anchors.candidate_ids.shape[2], anchors.n_positions
        fold = two_folds(anchors)[anchors.request]
        if np.unique(fold).size < 2:
            reporter.warn("one request only: sequoia's tree is judged on what it was fitted on")
        accepted = {n: np.zeros(anchors.n_anchors, dtype=np.int32) for n in budgets}
        expected = np.zeros((anchors.n_anchors, len(budgets)), dtype=np.float64)
        counted = np.clip(anchors.remaining - 1, 0, n_positions)
        for judged in np.unique(fold):
            mine, fitted = fold == judged, fold != judged
            accept = rank_acceptance(anchors, ranks, fitted if fitted.any() else mine, n_ranks)
            plan = sequoia_plan(accept, max(budgets), max_depth=n_positions)
            for slot, n_nodes in enumerate(budgets):
                tree = plan.tree(n_nodes)
                accepted[n_nodes][mine] = accepted_by_rank(tree, ranks[mine], n_ranks)
                reach: list[float] = []
                for parent, rank in zip(tree.parent.tolist(), tree.rank.tolist(), strict=True):
                    reach.append(accept[rank] * (reach[parent] if parent >= 0 else 1.0))
                by_depth = np.bincount(tree.depth, weights=reach, minlength=n_positions + 1)
                expected[mine, slot] = np.cumsum(by_depth)[counted[mine]]
        return BudgetTrace(accepted, expected)


@dataclass(frozen=True, slots=True)
class CostAwarePolicy(EveryBudget):
    """As many nodes per step as pay for themselves: argmax of τ(N) / c(N) up to the budget.

    This is CaDDTree's rule on best-first trees with conditional scores; CaDDTree itself scores
    without parents. τ(N) is the drafter's own estimate, c(N) the given step times.
    """

    name: str = "cost-aware"
    summary: str = "best-first, cut per step where expected τ / step time peaks; --step-times"

    def trace(
        self,
        anchors: Anchors,
        options: ReplayOptions,
        budgets: Sequence[int],
        *,
        reporter: Reporter = SilentReporter(),
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
            reporter.progress(f"replay {self.name}", part.stop, n_anchors)
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


def rank_acceptance(
    anchors: Anchors,
    ranks: npt.NDArray[np.int32],
    fitted: npt.NDArray[np.bool_],
    n_ranks: int,
) -> npt.NDArray[np.float64]:
    """Sequoia's acceptance vector over the anchors in `fitted` [A], [n_ranks] float64.

    Counts every position whose true parent is on the true path and whose true token is known.
    """
    on_path = np.ones_like(ranks, dtype=np.bool_)
    on_path[:, 1:] = ranks[:, :-1] >= 0
    tried = on_path & (anchors.truth >= 0) & fitted[:, None]
    hits = np.bincount(ranks[tried & (ranks >= 0)], minlength=n_ranks)
    return np.asarray(hits / tried.sum(), dtype=np.float64)


def _costs(options: ReplayOptions, most: int) -> npt.NDArray[np.float64]:
    if options.step_cost is None:
        raise InputError(
            "policy `cost-aware` needs to know what a step costs",
            where="--policy",
            hint="give step times with --step-times; `specpilot ceiling --list` shows the bundled",
        )
    if most >= len(options.step_cost.seconds):
        raise InputError(
            f"no step time for {most} nodes",
            where="--step-times",
            hint="time that many rows: `specpilot profile --step-times FILE --rows N`",
        )
    return np.asarray(options.step_cost.seconds, dtype=np.float64)
