"""All builders through one interface: closed, nested, blind to candidate order, thread-safe."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specpilot_kernels.trees import (
    BUILDERS,
    Lattices,
    TreeBatch,
    accepted_counts,
    accepted_nodes,
    build,
    check_tree,
    eagle2,
    opt_tree,
)

KINDS = st.sampled_from(["smooth", "tied", "saturated"])
SEEDS = st.integers(0, 2**32 - 1)
NAMES = st.sampled_from(sorted(BUILDERS))
#: Trees of a smaller budget are prefixes; Sequoia's and the cost-aware choice are made anew.
NESTED = ("chain", "best-first", "marginal", "eagle-2", "oracle")
Make = Callable[..., Any]

fixtures_are_factories = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def lattices(lattice: Make, seed: int, kind: str = "smooth", *, n: int = 5, k: int = 4) -> Lattices:
    """Eight lattices with everything that any builder needs."""
    ids, edge = lattice(seed, n, k, kind=kind, n_lattices=8)
    rng = np.random.default_rng(seed)
    index = np.minimum(rng.geometric(0.6, size=ids.shape[:2]) - 1, k - 1)
    truth = np.take_along_axis(ids, index[..., None], axis=-1)[..., 0]
    truth = np.where(rng.random(truth.shape) < 0.1, np.int32(-1), truth).astype(np.int32)
    return Lattices(
        ids, edge, unary=edge[:, :, 0].copy(), accept=np.array([0.6, 0.2, 0.1, 0.05])[:k],
        step_cost=1.0 + 0.04 * np.arange(64) ** 1.2, truth=truth,
    )  # fmt: skip


def paths(trees: TreeBatch, index: int) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    tree = trees[index]
    for token, parent in zip(tree.token.tolist(), tree.parent.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


def same(left: TreeBatch, right: TreeBatch) -> bool:
    fields = ("token", "parent", "depth", "score", "n_nodes")
    return all(np.array_equal(getattr(left, f), getattr(right, f)) for f in fields)


@fixtures_are_factories
@given(seed=SEEDS, kind=KINDS, name=NAMES, n_nodes=st.integers(0, 40))
def test_every_tree_and_every_prefix_is_closed_whatever_the_ties(
    lattice: Make, seed: int, kind: str, name: str, n_nodes: int
) -> None:
    trees = build(name, lattices(lattice, seed, kind), n_nodes)
    assert len(trees) == 8
    for index in range(8):
        tree = trees[index]
        assert tree.n_nodes <= n_nodes
        for cut in range(tree.n_nodes + 1):
            check_tree(tree.prefix(cut))
        assert len(set(paths(trees, index))) == tree.n_nodes  # no path twice


@fixtures_are_factories
@given(seed=SEEDS, kind=KINDS, name=st.sampled_from(NESTED), small=st.integers(0, 30))
def test_smaller_budgets_are_prefixes_so_one_build_serves_all(
    lattice: Make, seed: int, kind: str, name: str, small: int
) -> None:
    given_lattices = lattices(lattice, seed, kind)
    whole, part = build(name, given_lattices, 30), build(name, given_lattices, small)
    for index in range(8):
        cut, built = whole[index].prefix(small), part[index]
        assert cut.token.tolist() == built.token.tolist()
        assert cut.parent.tolist() == built.parent.tolist()
        assert cut.score.tolist() == built.score.tolist()


@fixtures_are_factories
@given(seed=SEEDS, name=NAMES)
def test_order_of_candidates_does_not_matter_without_ties(
    lattice: Make, seed: int, name: str
) -> None:
    """The same paths; level-by-level builders may list equal scores in another order."""
    before = lattices(lattice, seed)
    rng = np.random.default_rng(seed)
    order = np.argsort(rng.random(before.candidate_ids.shape), axis=-1)
    rows = np.roll(order, 1, axis=1)
    rows[:, 0] = order[:, 0]
    edge = np.take_along_axis(before.edge, rows[..., None], axis=2)
    after = Lattices(
        np.take_along_axis(before.candidate_ids, order, axis=-1),
        np.take_along_axis(edge, order[:, :, None, :], axis=3),
        unary=np.take_along_axis(before.edge[:, :, 0], order, axis=-1),
        accept=before.accept, step_cost=before.step_cost, truth=before.truth,
    )  # fmt: skip
    left, right = build(name, before, 20), build(name, after, 20)
    for index in range(8):
        assert set(paths(left, index)) == set(paths(right, index))


@fixtures_are_factories
@given(seed=SEEDS, kind=KINDS, name=NAMES, n_nodes=st.integers(0, 30))
def test_accepted_counts_walk_each_tree_and_never_beat_the_oracle(
    lattice: Make, seed: int, kind: str, name: str, n_nodes: int
) -> None:
    found = lattices(lattice, seed, kind)
    trees = build(name, found, n_nodes)
    counts = accepted_counts(trees, found.truth)
    assert found.truth is not None
    assert counts.tolist() == [
        len(accepted_nodes(trees[index], found.truth[index])) for index in range(8)
    ]
    assert np.all(counts <= accepted_counts(build("oracle", found, 99), found.truth))


@fixtures_are_factories
@given(seed=SEEDS, kind=KINDS, n_nodes=st.integers(0, 25))
def test_batches_equal_single_lattices(lattice: Make, seed: int, kind: str, n_nodes: int) -> None:
    found = lattices(lattice, seed, kind)
    eagle, optimal = build("eagle-2", found, n_nodes), build("opt-tree", found, n_nodes)
    for index in range(8):
        ids, edge = found.candidate_ids[index], found.edge[index]
        assert eagle[index].token.tolist() == eagle2(ids, edge, n_nodes, top_k=4).token.tolist()
        assert optimal[index].token.tolist() == opt_tree(ids, edge, n_nodes).token.tolist()


@fixtures_are_factories
@given(seed=SEEDS, kind=KINDS)
def test_cost_aware_beats_every_fixed_budget_in_its_own_estimate(
    lattice: Make, seed: int, kind: str
) -> None:
    found = lattices(lattice, seed, kind)
    cost = found.step_cost
    assert cost is not None
    cut, whole = build("cost-aware", found, 30), build("best-first", found, 30)
    for index in range(8):
        own = (1 + np.exp(cut[index].score).sum()) / cost[cut[index].n_nodes]
        fixed = [(1 + np.exp(whole[index].prefix(n).score).sum()) / cost[n] for n in range(31)]
        assert own >= max(fixed) * (1 - 1e-12)


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_threads_build_what_one_thread_builds(lattice: Make, name: str) -> None:
    given_lattices = [lattices(lattice, seed, n=6, k=4) for seed in range(24)]
    alone = [build(name, item, 40) for item in given_lattices]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda item: build(name, item, 40), given_lattices * 4))
    assert all(same(left, right) for left, right in zip(alone * 4, together, strict=True))


def test_a_depth_cap_holds_for_every_builder(lattice: Make) -> None:
    found = lattices(lattice, 7)
    for name in BUILDERS:
        capped = Lattices(
            found.candidate_ids, found.edge, unary=found.unary, max_depth=2, accept=found.accept,
            step_cost=found.step_cost, truth=found.truth,
        )  # fmt: skip
        trees = build(name, capped, 18)
        assert trees.depth.max() == 2, name


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("marginal", "unary"),
        ("sequoia", "accept"),
        ("cost-aware", "step_cost"),
        ("oracle", "truth"),
    ],
)
def test_what_a_builder_lacks_is_named(lattice: Make, name: str, lacks: str) -> None:
    ids, edge = lattice(0, 3, 2, n_lattices=2)
    with pytest.raises(ValueError, match=lacks):
        build(name, Lattices(ids, edge), 4)


def test_unknown_builder_is_a_key_error(lattice: Make) -> None:
    ids, edge = lattice(0, 3, 2, n_lattices=2)
    with pytest.raises(KeyError, match="bestfirst"):
        build("bestfirst", Lattices(ids, edge), 4)


def test_truth_must_fit_the_trees(lattice: Make) -> None:
    ids, edge = lattice(0, 3, 2, n_lattices=2)
    with pytest.raises(ValueError, match="2 trees"):
        accepted_counts(build("best-first", Lattices(ids, edge), 4), ids[:1, :, 0])
