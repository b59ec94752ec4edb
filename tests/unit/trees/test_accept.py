"""Acceptance, the arrays a verifier needs, and where the truth lies in the pop order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specpilot_kernels.trees import (
    Tree,
    accepted_nodes,
    ancestor_mask,
    best_first,
    chain,
    check_tree,
    path_to,
    row_depths,
    row_parents,
    row_tokens,
    walk_accepted,
)
from specpilot_kernels.trees.trace import NEVER, truth_pop_index, visited_anchors

KINDS = st.sampled_from(["smooth", "tied", "saturated"])
SEEDS = st.integers(0, 2**32 - 1)
Make = Callable[..., Any]

fixtures_are_factories = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def descend(tree: Tree, target_next: Any) -> tuple[list[int], int]:
    """Acceptance by definition: go to the child with the target's token while there is one."""
    children = {
        (int(parent), int(token)): node
        for node, (parent, token) in enumerate(zip(tree.parent, tree.token, strict=True))
    }
    path, current = [], -1
    while (current, int(target_next[current + 1])) in children:
        current = children[current, int(target_next[current + 1])]
        path.append(current)
    return path, int(target_next[current + 1])


@fixtures_are_factories
@given(seed=SEEDS, kind=KINDS)
def test_walk_follows_the_target_and_returns_its_bonus(lattice: Make, seed: int, kind: str) -> None:
    ids, edge = lattice(seed, 6, 4, kind=kind)
    tree = best_first(ids, edge, 24)
    rng = np.random.default_rng(seed)
    target = rng.integers(0, 16, size=tree.n_rows)
    for node in range(tree.n_nodes):  # make acceptance likely: most rows predict some child
        if rng.random() < 0.8:
            target[tree.parent[node] + 1] = tree.token[node]
    path, bonus = walk_accepted(tree, target)
    assert (path.tolist(), bonus) == descend(tree, target)
    if path.size:
        assert path.tolist() == path_to(tree, int(path[-1])).tolist()


@fixtures_are_factories
@given(seed=SEEDS, kind=KINDS, n_known=st.integers(0, 8))
def test_replayed_truth_accepts_what_the_live_walk_accepts(
    lattice: Make, seed: int, kind: str, n_known: int
) -> None:
    """A target that keeps to `truth` on its path, and does anything elsewhere."""
    ids, edge = lattice(seed, 6, 4, kind=kind)
    tree = best_first(ids, edge, 24)
    rng = np.random.default_rng(seed)
    leaf = int(rng.integers(tree.n_nodes))
    truth = np.concatenate([tree.token[path_to(tree, leaf)], rng.integers(0, 16, size=8)])
    target = rng.integers(0, 16, size=tree.n_rows)
    target[0] = truth[0]
    for node in range(tree.n_nodes):
        path = path_to(tree, node)
        if np.array_equal(tree.token[path], truth[: path.size]):
            target[node + 1] = truth[path.size]
    live, bonus = walk_accepted(tree, target)
    replayed = accepted_nodes(tree, truth)
    assert live.tolist() == replayed.tolist()
    assert bonus == truth[live.size]
    assert accepted_nodes(tree, truth[:n_known]).tolist() == live.tolist()[:n_known]


def test_empty_tree_accepts_nothing_and_gives_the_roots_token() -> None:
    empty = Tree(*(np.empty(0, dtype=t) for t in (np.int32, np.int32, np.int32, np.float64)))
    path, bonus = walk_accepted(empty, np.array([42]))
    assert (path.size, bonus) == (0, 42)
    assert accepted_nodes(empty, np.array([42])).size == 0


def test_wrong_number_of_target_rows_is_refused(lattice: Make) -> None:
    ids, edge = lattice(0, 3, 2)
    with pytest.raises(ValueError, match="rows"):
        walk_accepted(best_first(ids, edge, 4), np.zeros(4, dtype=np.int64))


@fixtures_are_factories
@given(seed=SEEDS, kind=KINDS)
def test_row_arrays_agree_with_the_paths(lattice: Make, seed: int, kind: str) -> None:
    ids, edge = lattice(seed, 5, 3, kind=kind)
    tree = best_first(ids, edge, 20)
    mask, parents, depths = ancestor_mask(tree), row_parents(tree), row_depths(tree)
    assert row_tokens(tree, 7).tolist() == [7, *tree.token.tolist()]
    assert (parents[0], depths[0]) == (-1, 0)
    assert mask[0].tolist() == [True] + [False] * tree.n_nodes
    for node in range(tree.n_nodes):
        path = path_to(tree, node)
        assert np.flatnonzero(mask[node + 1]).tolist() == [0, *(path + 1).tolist()]
        assert depths[node + 1] == path.size
        assert parents[node + 1] == (path[-2] + 1 if path.size > 1 else 0)


def test_mask_of_a_chain_is_causal(lattice: Make) -> None:
    ids, edge = lattice(2, 5, 3)
    assert np.array_equal(ancestor_mask(chain(ids, edge)), np.tri(6, dtype=bool))


@pytest.mark.parametrize(
    ("parent", "depth", "problem"),
    [([0, 0], [1, 2], "precedes"), ([-1, 0], [1, 1], "depth"), ([-2, 0], [1, 2], "precedes")],
)
def test_malformed_trees_are_refused(parent: Any, depth: Any, problem: str) -> None:
    tree = Tree(
        np.zeros(2, np.int32), np.array(parent, np.int32), np.array(depth, np.int32), np.zeros(2)
    )
    with pytest.raises(ValueError, match=problem):
        check_tree(tree)


@fixtures_are_factories
@given(seed=SEEDS, kind=KINDS)
def test_one_build_equals_rebuilding_at_every_budget(lattice: Make, seed: int, kind: str) -> None:
    ids, edge = lattice(seed, 6, 4, kind=kind, n_lattices=3)
    rng = np.random.default_rng(seed)
    truth = np.take_along_axis(ids, rng.integers(0, 2, size=(3, 6, 1)), axis=2)[..., 0].copy()
    truth[2, 3:] = -1  # an output that ends after three more tokens
    budgets = np.arange(1, 30)
    counted = np.array([6, 3, 2])
    index, expected = truth_pop_index(ids, edge, truth, budgets, counted_depth=counted)
    for anchor in range(3):
        for slot, budget in enumerate(budgets.tolist()):
            tree = best_first(ids[anchor], edge[anchor], budget)
            known = truth[anchor][truth[anchor] >= 0]
            assert (index[anchor] <= budget).sum() == accepted_nodes(tree, known).size
            kept = tree.depth <= counted[anchor]
            np.testing.assert_allclose(
                expected[anchor, slot], np.exp(tree.score[kept]).sum(), rtol=1e-12
            )


def test_truth_outside_the_lattice_is_never_reached(lattice: Make) -> None:
    ids, edge = lattice(0, 3, 2, n_lattices=1)
    truth = np.array([[ids[0, 0, 1], 999, ids[0, 2, 0]]], dtype=np.int32)
    index, _ = truth_pop_index(ids, edge, truth, np.array([14]))
    assert index[0, 0] <= 14
    assert index[0, 1:].tolist() == [NEVER, NEVER]


@pytest.mark.parametrize("budgets", [[], [4, 2], [-1, 3]])
def test_budgets_must_ascend(lattice: Make, budgets: list[int]) -> None:
    ids, edge = lattice(0, 3, 2, n_lattices=1)
    with pytest.raises(ValueError, match="ascending"):
        truth_pop_index(ids, edge, np.zeros((1, 3), np.int32), np.array(budgets))


def test_visited_anchors_advance_by_what_is_committed() -> None:
    committed = np.array([2, 9, 3, 1, 1, 1, 4], dtype=np.int32)
    visited = visited_anchors(committed, np.array([0, 5]), np.array([5, 2]))
    # Request 0: 0 -> 2 -> end (5). Request 1: 5 -> 6 -> end.
    assert visited.tolist() == [True, False, True, False, False, True, True]
