"""`trees/gpu.py` on CPU tensors: the builders' trees as verify rows, their tables, acceptance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch
from tree_cases import assert_same, lattice, poisoned, target_choices

from specpilot_kernels.trees import (
    Tree,
    ancestor_mask,
    best_first,
    calibration_table,
    edge_log_probs,
    marginal,
    row_depths,
    row_parents,
    row_tokens,
    walk_accepted,
)
from specpilot_kernels.trees.gpu import AcceptedPaths, DeviceTrees, accept_path, build_trees

B, L, K, N = 3, 6, 5, 70


def assert_rows(trees: DeviceTrees, request: int, tree: Tree, anchor: int) -> None:
    rows = slice(0, tree.n_rows)
    assert trees.token[request, rows].tolist() == row_tokens(tree, anchor).tolist()
    assert trees.parent[request, rows].tolist() == row_parents(tree).tolist()
    assert trees.depth[request, rows].tolist() == row_depths(tree).tolist()
    scores = trees.score[request, rows].numpy()
    assert np.array_equal(scores, np.concatenate([[0.0], tree.score]).astype(np.float32))
    words = trees.ancestors[request].numpy()
    bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little").astype(bool)
    assert np.array_equal(bits[rows, : tree.n_rows], ancestor_mask(tree))
    assert not bits[:, tree.n_rows :].any()


@pytest.mark.parametrize("max_depth", [None, 2])
def test_rows_are_the_builders_nodes(max_depth: int | None) -> None:
    ids, scores, anchor = lattice(0, "smooth", (B, L, K, K))
    prefix_lens = torch.tensor([9, 0, 1 << 40])
    trees = build_trees(ids, scores, anchor, N, max_depth=max_depth, prefix_lens=prefix_lens)
    assert torch.equal(trees.position, prefix_lens[:, None] + trees.depth.clamp_min(0))
    for request in range(B):
        edge = edge_log_probs(scores[request].numpy())
        tree = best_first(ids[request].numpy(), edge, N, max_depth=max_depth)
        assert_rows(trees, request, tree, int(anchor[request]))
        if max_depth:
            assert tree.n_nodes == K + K * K < N
            assert (trees.parent[request, tree.n_rows :] == -2).all()
            assert (trees.depth[request, tree.n_rows :] == -1).all()
            assert (trees.score[request, tree.n_rows :] == -np.inf).all()
            assert (trees.token[request, tree.n_rows :] == anchor[request]).all()
    assert trees.max_depth == (max_depth or L)


def test_unary_scores_with_a_norm_are_marginal_trees() -> None:
    ids, scores, anchor = lattice(1, "smooth", (B, L, 1, K))
    logsumexp = torch.logsumexp(scores[:, :, 0], dim=-1) + 0.2
    trees = build_trees(ids, scores, anchor, N, logsumexp=logsumexp)
    for request in range(B):
        unary, norm = scores[request, :, 0].numpy(), logsumexp[request].numpy()
        tree = marginal(ids[request].numpy(), unary, norm, N)
        assert_rows(trees, request, tree, int(anchor[request]))


def test_taps_are_the_last_four_inputs_of_a_path() -> None:
    trees = build_trees(*lattice(2, "smooth", (B, L, K, K)), N)
    for request in range(B):
        parent = trees.parent[request].tolist()
        for row, taps in enumerate(trees.tap[request].tolist()):
            path = [row]
            while parent[path[0]] >= 0:
                path.insert(0, parent[path[0]])
            assert taps == [-3, -2, -1, *path][-4:]


def test_accepted_rows_are_those_of_the_walk() -> None:
    trees = build_trees(*lattice(3, "smooth", (B, L, K, K)), N)
    target = target_choices(3, trees.token, trees.parent, agree=0.9)
    prefix_lens = torch.tensor([7, 0, 123_456])
    found = accept_path(trees, target, prefix_lens=prefix_lens)
    assert found.path.shape == (B, L + 1)
    for request in range(B):
        tree = Tree(
            trees.token[request, 1:].numpy().astype(np.int32),
            trees.parent[request, 1:].numpy() - 1,
            trees.depth[request, 1:].numpy(),
            trees.score[request, 1:].numpy().astype(np.float64),
        )
        nodes, wanted = walk_accepted(tree, target[request].numpy())
        rest = L - nodes.size
        assert found.n_accepted[request] == nodes.size > 0
        assert found.n_committed[request] == nodes.size + 1
        assert found.length[request] == prefix_lens[request] + nodes.size + 1
        assert found.path[request].tolist() == [0, *(nodes + 1), *[-1] * rest]
        assert found.bonus[request] == wanted
        assert found.committed[request].tolist() == [*tree.token[nodes], wanted, *[0] * rest]
        rows = found.place[request] - request * (N + 1)
        assert rows.tolist() == [0, *(nodes + 1), *[0] * rest]


def test_nothing_is_accepted_where_that_is_switched_off() -> None:
    trees = build_trees(*lattice(3, "smooth", (B, L, K, K)), N)
    target = target_choices(3, trees.token, trees.parent, agree=0.9)
    prefix_lens, off = torch.arange(B), torch.zeros(1, dtype=torch.int32)
    found = accept_path(trees, target, prefix_lens=prefix_lens, enabled=off)
    assert (found.path == -1).all()
    assert (found.committed == 0).all()
    assert found.n_accepted.tolist() == [-1] * B
    assert found.n_committed.tolist() == [0] * B
    assert torch.equal(found.length, prefix_lens)
    on = accept_path(trees, target, prefix_lens=prefix_lens, enabled=off + 1)
    assert all(map(torch.equal, on, accept_path(trees, target, prefix_lens=prefix_lens)))


def test_calibration_divides_and_adds_per_position() -> None:
    ids, scores, anchor = lattice(4, "smooth", (B, L, K, K))
    recall = [0.9, 0.8, 0.7, 0.6, 0.5, 0.4]
    table = torch.from_numpy(calibration_table(1.5, recall))
    trees = build_trees(ids, scores, anchor, N, calibration=table)
    edge = edge_log_probs(scores.numpy().astype(np.float64) / 1.5).astype(np.float64)
    edge += np.log(recall)[:, None, None]
    for request in range(B):
        tree = best_first(ids[request].numpy(), edge[request].astype(np.float32), N)
        found = trees.score[request, 1:].numpy()
        np.testing.assert_allclose(found, tree.score, rtol=1e-6)
        assert trees.token[request, 1:].tolist() == tree.token.tolist()


def test_given_memory_is_filled() -> None:
    given = lattice(5, "smooth", (B, L, K, K))
    fresh = build_trees(*given, N)
    out = poisoned(DeviceTrees.empty(B, N, L, torch.device("cpu")))
    assert build_trees(*given, N, out=out) is out
    assert_same(out, fresh)
    target = target_choices(5, fresh.token, fresh.parent, agree=0.5)
    wanted = accept_path(fresh, target)
    room = AcceptedPaths(*(torch.full_like(tensor, 77) for tensor in wanted))
    accept_path(fresh, target, out=room)
    assert all(map(torch.equal, room, wanted))


def test_operators_can_be_traced() -> None:
    given = lattice(6, "smooth", (B, L, K, K))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(ids: Any, scores: Any, anchor: Any) -> Any:
        trees = build_trees(ids, scores, anchor, N)
        return trees.token, trees.ancestors, *accept_path(trees, trees.token)

    trees = build_trees(*given, N)
    wanted = (trees.token, trees.ancestors, *accept_path(trees, trees.token))
    assert all(map(torch.equal, step(*given), wanted))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"candidate_ids": torch.zeros(B, L, K)}, "candidate_ids is torch.float32"),
        ({"candidate_ids": torch.zeros(B, L, 33, dtype=torch.int32)}, "33 candidates"),
        ({"candidate_ids": torch.zeros(B, 0, K, dtype=torch.int32)}, "0 positions"),
        ({"scores": torch.zeros(B, L, K)}, r"scores \[B, L, P, K\]"),
        ({"scores": torch.zeros(B, L, 2, K)}, "scores is torch.float32"),
        ({"scores": torch.zeros(B, L, K, K).transpose(2, 3)}, "scores is not contiguous"),
        ({"anchor": torch.zeros(B + 1, dtype=torch.int64)}, "anchor is"),
        ({"logsumexp": torch.zeros(B, L, 1)}, "logsumexp is"),
        ({"calibration": torch.ones(L - 1, 2, dtype=torch.float64)}, "calibration is"),
        ({"calibration": torch.zeros(L, 2, dtype=torch.float64)}, "calibration"),
        ({"n_nodes": 129}, "0 to 128"),
        ({"max_depth": -1}, "must not be negative"),
        ({"out": DeviceTrees.empty(B, N + 1, L, torch.device("cpu"))}, "out.token is"),
        ({"out": DeviceTrees.empty(B, N, L - 1, torch.device("cpu"))}, "out has max_depth"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    ids, scores, anchor = lattice(7, "smooth", (B, L, K, K))
    given = {"candidate_ids": ids, "scores": scores, "anchor": anchor, "n_nodes": N}
    with pytest.raises(ValueError, match=message):
        build_trees(**(given | change))


def test_a_target_that_does_not_fit_is_named() -> None:
    trees = build_trees(*lattice(8, "smooth", (B, L, K, K)), N)
    with pytest.raises(ValueError, match="target_argmax is"):
        accept_path(trees, trees.token[:, 1:])
    with pytest.raises(ValueError, match=r"out\.path is"):
        accept_path(replace(trees, max_depth=2), trees.token, out=accept_path(trees, trees.token))
    with pytest.raises(ValueError, match="prefix_lens is"):
        accept_path(trees, trees.token, prefix_lens=torch.zeros(B, dtype=torch.int32))
    with pytest.raises(ValueError, match="enabled is"):
        accept_path(trees, trees.token, enabled=torch.zeros((), dtype=torch.int32))


@pytest.mark.parametrize(("temperature", "recall"), [(0.0, [1.0]), (1.0, [0.0]), (1.0, [1.1])])
def test_a_calibration_out_of_range_is_refused(temperature: float, recall: list[float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        calibration_table(temperature, recall)
