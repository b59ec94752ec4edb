"""Best-first, marginal and chain builders: what their trees must be, ties included."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specpilot_kernels.trees import (
    Tree,
    best_first,
    best_first_batch,
    best_first_reference,
    chain,
    check_tree,
    edge_log_probs,
    marginal,
    marginal_log_probs,
    temper,
)

FIELDS = ("token", "parent", "depth", "score")
KINDS = st.sampled_from(["smooth", "tied", "saturated"])
SEEDS = st.integers(0, 2**32 - 1)
Make = Callable[..., Any]

fixtures_are_factories = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def same(left: Tree, right: Tree) -> bool:
    return all(np.array_equal(getattr(left, f), getattr(right, f)) for f in FIELDS)


def all_path_scores(edge: Any) -> list[float]:
    """Score of every path of every length, summed from the root as the builders do."""
    n_positions, n_candidates = edge.shape[0], edge.shape[2]
    scores: list[float] = []
    for depth in range(1, n_positions + 1):
        for path in itertools.product(range(n_candidates), repeat=depth):
            total, before = 0.0, 0
            for position, index in enumerate(path):
                total += float(edge[position, before, index])
                before = index
            scores.append(total)
    return scores


@fixtures_are_factories
@given(seed=SEEDS, kind=KINDS, n_positions=st.integers(1, 6), n_candidates=st.integers(1, 6))
def test_compiled_builder_equals_reference_node_for_node(
    lattice: Make, seed: int, kind: str, n_positions: int, n_candidates: int
) -> None:
    ids, edge = lattice(seed, n_positions, n_candidates, kind=kind)
    for n_nodes in (0, 1, 7, 40):
        assert same(best_first(ids, edge, n_nodes), best_first_reference(ids, edge, n_nodes))


@fixtures_are_factories
@given(seed=SEEDS, kind=KINDS)
def test_first_n_pops_are_n_most_probable_paths(lattice: Make, seed: int, kind: str) -> None:
    ids, edge = lattice(seed, 4, 3, kind=kind)
    ranked = sorted(all_path_scores(edge), reverse=True)
    tree = best_first(ids, edge, len(ranked))
    assert tree.score.tolist() == ranked


@fixtures_are_factories
@given(seed=SEEDS, kind=KINDS, small=st.integers(0, 40))
def test_smaller_budget_gives_a_prefix_and_every_prefix_is_a_tree(
    lattice: Make, seed: int, kind: str, small: int
) -> None:
    ids, edge = lattice(seed, 7, 5, kind=kind)
    tree = best_first(ids, edge, 40)
    assert same(tree.prefix(small), best_first(ids, edge, small))
    check_tree(tree.prefix(small))
    assert np.all(np.diff(tree.score[np.isfinite(tree.score)]) <= 0)


@fixtures_are_factories
@given(seed=SEEDS, kind=KINDS)
def test_children_of_one_parent_are_distinct_tokens(lattice: Make, seed: int, kind: str) -> None:
    ids, edge = lattice(seed, 6, 4, kind=kind)
    tree = best_first(ids, edge, 50)
    pairs = list(zip(tree.parent.tolist(), tree.token.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)


@fixtures_are_factories
@given(seed=SEEDS)
def test_order_of_candidates_does_not_matter_without_ties(lattice: Make, seed: int) -> None:
    ids, edge = lattice(seed, 5, 6)
    rng = np.random.default_rng(seed)
    mixed_ids, mixed_edge = ids.copy(), edge.copy()
    before = np.arange(6)
    for position in range(5):
        order = rng.permutation(6)
        mixed_ids[position] = ids[position, order]
        mixed_edge[position] = edge[position][np.ix_(before, order)]
        before = order
    assert same(best_first(ids, edge, 30), best_first(mixed_ids, mixed_edge, 30))


@fixtures_are_factories
@given(seed=SEEDS, kind=KINDS)
def test_marginal_equals_conditional_when_edges_ignore_the_parent(
    lattice: Make, seed: int, kind: str
) -> None:
    ids, edge = lattice(seed, 5, 4, kind=kind)
    unary = edge[:, 0].copy()
    unary[np.isinf(unary)] = -300.0
    norm = np.zeros(5, dtype=np.float32)
    flat = np.broadcast_to(unary[:, None, :], (5, 4, 4))
    assert same(marginal(ids, unary, norm, 30), best_first(ids, flat, 30))


def test_marginal_scores_use_the_full_vocabulary_norm() -> None:
    ids = np.array([[10, 11]], dtype=np.int32)
    unary = np.log(np.array([[6.0, 3.0]], dtype=np.float32))
    norm = np.log(np.array([12.0], dtype=np.float32))  # a quarter of the mass is elsewhere
    tree = marginal(ids, unary, norm, 2)
    np.testing.assert_allclose(np.exp(tree.score), [0.5, 0.25], rtol=1e-6)


def test_hand_worked_tree() -> None:
    # Root: A 0.6, B 0.4. Below A: C 0.9, D 0.1. Below B: C 0.2, D 0.8.
    ids = np.array([[1, 2], [3, 4]], dtype=np.int32)
    edge = np.log(np.array([[[0.6, 0.4], [0.6, 0.4]], [[0.9, 0.1], [0.2, 0.8]]]))
    tree = best_first(ids, edge.astype(np.float32), 6)
    assert tree.token.tolist() == [1, 3, 2, 4, 3, 4]
    assert tree.parent.tolist() == [-1, 0, -1, 2, 2, 0]
    assert tree.depth.tolist() == [1, 2, 1, 2, 2, 2]
    np.testing.assert_allclose(np.exp(tree.score), [0.6, 0.54, 0.4, 0.32, 0.08, 0.06], rtol=1e-6)


def test_ties_go_to_smaller_depth_then_to_the_lower_candidate() -> None:
    ids = np.array([[5, 6], [7, 8]], dtype=np.int32)
    edge = np.zeros((2, 2, 2), dtype=np.float32)  # all paths score zero
    tree = best_first(ids, edge, 6)
    assert tree.depth.tolist() == [1, 1, 2, 2, 2, 2]
    assert tree.token.tolist() == [5, 6, 7, 7, 8, 8]
    assert tree.parent.tolist() == [-1, -1, 0, 1, 0, 1]


@fixtures_are_factories
@given(seed=SEEDS, kind=KINDS, depth=st.integers(0, 7))
def test_depth_cap_equals_a_lattice_cut_to_that_depth(
    lattice: Make, seed: int, kind: str, depth: int
) -> None:
    ids, edge = lattice(seed, 6, 3, kind=kind)
    capped = best_first(ids, edge, 25, max_depth=depth)
    assert same(capped, best_first_reference(ids, edge, 25, max_depth=depth))
    if 1 <= depth <= 6:
        assert same(capped, best_first(ids[:depth], edge[:depth], 25))


@fixtures_are_factories
@given(seed=SEEDS, kind=KINDS)
def test_batch_equals_single_trees_with_a_depth_cap_per_lattice(
    lattice: Make, seed: int, kind: str
) -> None:
    ids, edge = lattice(seed, 5, 4, kind=kind, n_lattices=6)
    caps = np.array([0, 1, 2, 3, 5, 9])
    batch = best_first_batch(ids, edge, 20, max_depth=caps)
    assert len(batch) == 6
    for index, cap in enumerate(caps.tolist()):
        assert same(batch[index], best_first(ids[index], edge[index], 20, max_depth=cap))


def test_exhausted_lattice_gives_all_its_paths(lattice: Make) -> None:
    ids, edge = lattice(0, 3, 2)
    assert best_first(ids, edge, 1000).n_nodes == 2 + 4 + 8
    assert best_first_batch(ids[None], edge[None], 1000).token.shape == (1, 14)


@fixtures_are_factories
@given(seed=SEEDS)
def test_no_other_tree_of_the_size_expects_more(lattice: Make, seed: int) -> None:
    """Among prefix-closed trees of N nodes, best-first maximises the drafter's expectation."""
    ids, edge = lattice(seed, 4, 3)
    best = np.exp(best_first(ids, edge, 8).score).sum()
    rng = np.random.default_rng(seed)
    open_nodes = [(0, index, float(edge[0, 0, index])) for index in range(3)]
    total = 0.0
    for _ in range(8):
        position, index, score = open_nodes.pop(int(rng.integers(len(open_nodes))))
        total += np.exp(score)
        if position + 1 < 4:
            row = edge[position + 1, index]
            open_nodes += [(position + 1, c, score + float(row[c])) for c in range(3)]
    assert total <= best + 1e-12


@fixtures_are_factories
@given(seed=SEEDS, kind=KINDS, length=st.integers(0, 6))
def test_chain_is_the_greedy_walk(lattice: Make, seed: int, kind: str, length: int) -> None:
    ids, edge = lattice(seed, 6, 4, kind=kind)
    tree = chain(ids, edge, length=length)
    check_tree(tree)
    before, tokens = 0, []
    for position in range(length):
        before = int(np.argmax(edge[position, before]))
        tokens.append(int(ids[position, before]))
    assert tree.token.tolist() == tokens
    assert tree.parent.tolist() == list(range(-1, length - 1))
    assert same(chain(ids, edge), chain(ids, edge, length=99))


def test_chain_scores_add_up_along_the_path(lattice: Make) -> None:
    ids, edge = lattice(3, 4, 3)
    tree = chain(ids, edge)
    index = [int(np.flatnonzero(ids[p] == tree.token[p])[0]) for p in range(4)]
    steps = [edge[p, index[p - 1] if p else 0, index[p]] for p in range(4)]
    np.testing.assert_allclose(tree.score, np.cumsum(np.array(steps, dtype=np.float64)))


def test_single_candidate_lattice_makes_best_first_a_chain(lattice: Make) -> None:
    ids, edge = lattice(1, 5, 1)
    assert same(best_first(ids, edge, 9), chain(ids, edge))


def test_edge_log_probs_are_normalised_and_ordered_as_the_scores() -> None:
    scores = np.random.default_rng(0).normal(size=(3, 5, 5)) * 20
    edge = edge_log_probs(scores)
    assert edge.dtype == np.float32
    assert edge.max() <= 0.0
    np.testing.assert_allclose(np.exp(edge.astype(np.float64)).sum(-1), 1.0, atol=1e-5)
    assert np.array_equal(edge.argmax(-1), scores.argmax(-1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temper_of_log_probs_equals_temper_of_scores(temperature: float) -> None:
    scores = np.random.default_rng(1).normal(size=(2, 4, 4)) * 3
    left = temper(edge_log_probs(scores), temperature)
    np.testing.assert_allclose(left, edge_log_probs(scores / temperature), atol=2e-6)


def test_marginal_log_probs_subtract_the_norm_in_double_precision() -> None:
    unary = np.array([[80.0, 79.0]], dtype=np.float32)
    norm = np.array([80.5], dtype=np.float32)
    assert marginal_log_probs(unary, norm).tolist() == [[-0.5, -1.5]]


@pytest.mark.parametrize(
    ("ids_shape", "edge_shape"),
    [((3,), (3, 2, 2)), ((3, 2), (3, 2)), ((3, 2), (2, 2, 2)), ((3, 4), (3, 2, 4))],
)
def test_shapes_that_do_not_fit_are_refused(ids_shape: Any, edge_shape: Any) -> None:
    with pytest.raises(ValueError, match="shape"):
        best_first(np.zeros(ids_shape, dtype=np.int32), np.zeros(edge_shape, np.float32), 3)


@pytest.mark.parametrize("kwargs", [{"n_nodes": -1}, {"n_nodes": 2, "max_depth": -1}])
def test_negative_budgets_are_refused(lattice: Make, kwargs: dict[str, int]) -> None:
    ids, edge = lattice(0, 2, 2)
    with pytest.raises(ValueError, match="negative"):
        best_first(ids, edge, **kwargs)
