"""EAGLE-2, OPT-Tree and Sequoia: closed trees, and the exact relations between builders."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specpilot_kernels.trees import (
    Tree,
    accepted_nodes,
    best_first,
    check_tree,
    eagle2,
    opt_tree,
    place,
    sequoia_plan,
)
from specpilot_kernels.trees.levels import levels_pop_index
from specpilot_kernels.trees.sequoia import accepted_by_rank, truth_ranks
from specpilot_kernels.trees.trace import truth_pop_index

KINDS = st.sampled_from(["smooth", "tied", "saturated"])
SEEDS = st.integers(0, 2**32 - 1)
Make = Callable[..., Any]
BUDGETS = np.array([1, 4, 9, 20])

fixtures_are_factories = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def paths(tree: Tree) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tree.token.tolist(), tree.parent.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert len(set(found)) == len(found)
    return set(found)


def truths(ids: Any, seed: int) -> Any:
    """A continuation per lattice that mostly stays among its first candidates."""
    rng = np.random.default_rng(seed)
    index = np.minimum(rng.geometric(0.6, size=ids.shape[:2]) - 1, ids.shape[2] - 1)
    truth = np.take_along_axis(ids, index[..., None], axis=-1)[..., 0]
    return np.where(rng.random(truth.shape) < 0.1, np.int32(-1), truth).astype(np.int32)


@fixtures_are_factories
@given(seed=SEEDS, kind=KINDS, n_nodes=st.integers(0, 30), depth=st.integers(0, 6))
def test_eagle2_with_a_wide_beam_and_opt_tree_equal_best_first(
    lattice: Make, seed: int, kind: str, n_nodes: int, depth: int
) -> None:
    ids, edge = lattice(seed, 5, 4, kind=kind)
    best = best_first(ids, edge, n_nodes, max_depth=depth)
    wide = eagle2(ids, edge, n_nodes, top_k=max(n_nodes, 1), max_depth=depth)
    optimal = opt_tree(ids, edge, n_nodes, max_depth=depth)
    for tree in (wide, optimal):
        check_tree(tree)
        assert tree.score.tolist() == best.score.tolist()
        if kind == "smooth":  # ties at the budget's edge may keep another of equal paths
            assert paths(tree) == paths(best)


@fixtures_are_factories
@given(seed=SEEDS, kind=KINDS, top_k=st.integers(1, 5))
def test_eagle2_is_closed_nested_and_never_above_best_first(
    lattice: Make, seed: int, kind: str, top_k: int
) -> None:
    ids, edge = lattice(seed, 6, 4, kind=kind)
    tree = eagle2(ids, edge, 25, top_k=top_k)
    check_tree(tree)
    assert len(paths(tree)) == tree.n_nodes
    smaller = eagle2(ids, edge, 9, top_k=top_k)
    assert smaller.token.tolist() == tree.prefix(9).token.tolist()
    best = best_first(ids, edge, tree.n_nodes)
    assert np.exp(tree.score).sum() <= np.exp(best.score).sum() + 1e-12


def test_eagle2_with_one_child_per_level_is_the_chain(lattice: Make) -> None:
    ids, edge = lattice(3, 5, 4)
    tree = eagle2(ids, edge, 20, top_k=1)
    assert tree.parent.tolist() == [-1, 0, 1, 2, 3]


def test_eagle2_misses_what_its_beam_dropped() -> None:
    # A 0.6 and B 0.4; A's children are flat, B's child is sure. A beam of one never sees B's.
    ids = np.array([[1, 2], [3, 4]], dtype=np.int32)
    edge = np.log(np.array([[[0.6, 0.4]] * 2, [[0.5, 0.5], [0.99, 0.01]]], dtype=np.float32))
    assert (2, 3) in paths(best_first(ids, edge, 3))
    assert paths(eagle2(ids, edge, 3, top_k=1)) == {(1,), (1, 3)}


@fixtures_are_factories
@given(seed=SEEDS, kind=KINDS)
def test_one_build_tells_what_each_budget_accepts(lattice: Make, seed: int, kind: str) -> None:
    ids, edge = lattice(seed, 5, 4, kind=kind, n_lattices=8)
    truth = truths(ids, seed)
    pop, expected = levels_pop_index(ids, edge, truth, BUDGETS, top_k=2)
    for s in range(8):
        for slot, budget in enumerate(BUDGETS.tolist()):
            tree = eagle2(ids[s], edge[s], budget, top_k=2)
            assert (pop[s] <= budget).sum() == len(accepted_nodes(tree, truth[s]))
            assert expected[s, slot] == pytest.approx(np.exp(tree.score).sum())
    if kind == "smooth":
        optimal, total = levels_pop_index(ids, edge, truth, BUDGETS, top_k=None)
        wanted, wanted_total = truth_pop_index(ids, edge, truth, BUDGETS)
        assert np.array_equal(optimal, wanted)
        np.testing.assert_allclose(total, wanted_total)


@pytest.mark.parametrize("top_k", [0, -3])
def test_a_beam_needs_a_width(lattice: Make, top_k: int) -> None:
    ids, edge = lattice(0, 2, 2)
    with pytest.raises(ValueError, match="top_k"):
        eagle2(ids, edge, 3, top_k=top_k)


def recursion(accept: tuple[float, ...], n_nodes: int, depth: int) -> float:
    """Sequoia's T(m, l, b) as its paper writes it, with the root as one of m nodes."""

    @functools.cache
    def subtree(size: int, levels: int) -> float:
        options = [branches(size, levels, b) for b in range(min(size - 1, len(accept)) + 1)]
        return max(options)

    @functools.cache
    def branches(size: int, levels: int, b: int) -> float:
        if b == 0:
            return 1.0 if size == 1 else -np.inf
        if levels == 0 or size < 2:
            return -np.inf
        return max(
            branches(size - own, levels, b - 1) + accept[b - 1] * subtree(own, levels - 1)
            for own in range(1, size)
        )

    return subtree(n_nodes + 1, depth) - 1.0


ACCEPT = st.lists(st.floats(0.01, 1.0) | st.just(0.0), min_size=1, max_size=4)


@settings(max_examples=30, deadline=None)
@given(accept=ACCEPT, n_nodes=st.integers(0, 9), depth=st.integers(1, 4))
def test_sequoia_value_is_its_programme_and_the_trees_own_sum(
    accept: list[float], n_nodes: int, depth: int
) -> None:
    tree = sequoia_plan(np.array(accept), n_nodes, max_depth=depth).tree(n_nodes)
    if tree.n_nodes == n_nodes:
        assert tree.value == pytest.approx(recursion(tuple(accept), n_nodes, depth))
    reach: list[float] = []
    for parent, rank in zip(tree.parent.tolist(), tree.rank.tolist(), strict=True):
        reach.append(accept[rank] * (reach[parent] if parent >= 0 else 1.0))
    assert sum(reach) == pytest.approx(tree.value)
    assert all(d <= depth for d in tree.depth.tolist())


@settings(max_examples=30, deadline=None)
@given(accept=ACCEPT.map(lambda values: sorted(values, reverse=True)), n=st.integers(0, 12))
def test_sequoia_equals_best_first_where_scores_depend_on_rank_alone(
    accept: list[float], n: int
) -> None:
    ids = np.arange(3 * len(accept), dtype=np.int32).reshape(3, -1)
    with np.errstate(divide="ignore"):
        edge = np.broadcast_to(np.log(np.array(accept, np.float32)), (3, 1, len(accept)))
    tree = sequoia_plan(np.array(accept), n, max_depth=3).tree(n)
    best = best_first(ids, edge, n)
    assert tree.n_nodes == best.n_nodes
    assert tree.value == pytest.approx(np.exp(best.score).sum(), rel=1e-5)


@fixtures_are_factories
@given(seed=SEEDS, kind=KINDS)
def test_sequoia_replay_by_rank_equals_its_placed_trees(
    lattice: Make, seed: int, kind: str
) -> None:
    ids, edge = lattice(seed, 5, 4, kind=kind, n_lattices=8)
    truth = truths(ids, seed)
    ranks = truth_ranks(ids, edge, truth)
    plan = sequoia_plan(np.array([0.6, 0.2, 0.1, 0.05]), 14, max_depth=5).tree(14)
    accepted = accepted_by_rank(plan, ranks, 4)
    for s in range(8):
        tree = place(plan, ids[s], edge[s])
        check_tree(tree)
        assert len(paths(tree)) == 14
        assert accepted[s] == len(accepted_nodes(tree, truth[s]))


@pytest.mark.parametrize("accept", [[], [1.2], [-0.1], [float("nan")], [[0.5]]])
def test_sequoia_refuses_what_is_no_probability(accept: Any) -> None:
    with pytest.raises(ValueError, match="probabilities"):
        sequoia_plan(np.array(accept), 4, max_depth=2)
