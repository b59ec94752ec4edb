"""Recorded trees of sequential drafters: files, prunings and their oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specpilot_cli import main as entry
from specpilot_cli.errors import InputError
from specpilot_cli.io.tree_file import is_tree_file, read_trees, write_trees
from specpilot_cli.replay.anchors import ReplayOptions
from specpilot_cli.replay.run import replay, replay_accept_lengths
from specpilot_cli.replay.sequential import replay_trees
from specpilot_cli.schema.lattice import LatticeRecording
from specpilot_cli.schema.tree_recording import TreeRecording
from specpilot_kernels.trees import best_first_batch

Make = Callable[..., LatticeRecording]


def expanded(rec: LatticeRecording, n_nodes: int) -> TreeRecording:
    """What a sequential drafter would have recorded: the lattice's best-first trees, node scores
    given their parents. Prunings of them are then trees of the lattice itself."""
    trees = best_first_batch(rec.candidate_ids, rec.edge, n_nodes)
    offsets = np.concatenate([[0], np.cumsum(trees.n_nodes)]).astype(np.int64)
    inside = np.arange(n_nodes) < trees.n_nodes[:, None]
    above = np.take_along_axis(trees.score, np.maximum(trees.parent, 0), axis=1)
    own = trees.score - np.where(trees.parent >= 0, above, 0.0)
    metadata = rec.metadata.model_copy(
        update={"drafter_kind": "eagle", "block": int(trees.depth.max()) + 1}
    )
    return TreeRecording(
        metadata, rec.prompt_ids, rec.prompt_offsets, rec.output_ids, rec.output_offsets,
        rec.step_request, rec.step_position, offsets, trees.token[inside], trees.parent[inside],
        np.minimum(own[inside], 0).astype(np.float32),
    )  # fmt: skip


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(seed=st.integers(0, 2**32 - 1))
def test_prunings_of_a_recorded_best_first_tree_are_best_first_trees(
    random_recording: Make, seed: int
) -> None:
    rec = random_recording(seed)
    found = replay_trees(expanded(rec, 40), nodes=[1, 5, 20, 40])
    wanted = replay(rec, ["best-first"], nodes=[1, 5, 20, 40])
    assert found.curve("best-first") == wanted.curve("best-first")
    for n_nodes in (5, 20):
        own, row = found.row("best-first", n_nodes), wanted.row("best-first", n_nodes)
        assert own.expected_tau == pytest.approx(row.expected_tau, rel=1e-5)
        assert own.tokens.tolist() == row.tokens.tolist()
    # The oracle over recorded nodes is the largest pruning.
    assert found.row("oracle", None).tau.value == found.curve("best-first")[40]
    # At every anchor the recorded first path is the chain, cut where the tree did not reach.
    own_mean = replay_trees(expanded(rec, 40), ["chain"], mode="dense-mean").rows[-1]
    assert own_mean.tau.value <= replay(rec, ["chain"], mode="dense-mean").rows[-1].tau.value


def test_the_first_path_is_the_lattices_chain_where_the_tree_holds_it(
    random_recording: Make,
) -> None:
    rec = random_recording(4, n_positions=3, n_candidates=3)
    trees = expanded(rec, 3 + 9 + 27)  # every path
    found = replay_trees(trees, ["chain"], nodes=[1, 2])
    lengths = [replay_accept_lengths(rec, "chain", n) for n in (1, 2, 3)]
    for row, own in zip(found.rows, lengths, strict=True):
        assert row.steps.sum() == sum(map(len, own))
    assert [row.nodes for row in found.rows] == [1, 2, 3]


def test_a_depth_cap_drops_deeper_nodes(random_recording: Make) -> None:
    rec = random_recording(5)
    trees = expanded(rec, 60)
    capped = replay_trees(trees, ["oracle"], options=ReplayOptions(depth=2))
    assert capped.positions == 2
    assert capped.rows[0].tau.value < replay_trees(trees, ["oracle"]).rows[0].tau.value
    assert capped.rows[0].lengths is not None
    assert capped.rows[0].lengths.size == 4  # 0 to 2 drafts and the bonus


def test_a_tree_file_is_written_read_and_replayed_by_the_command(
    random_recording: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trees.safetensors"
    trees = expanded(random_recording(6), 30)
    write_trees(path, trees)
    assert is_tree_file(path)
    back = read_trees(path)
    assert back.metadata == trees.metadata
    for name, array in trees.tensors().items():
        assert back.tensors()[name].tobytes() == array.tobytes(), name
    page = tmp_path / "trees.html"
    assert entry.main(["replay", str(path), "--nodes", "4,16", "-o", str(page)]) == 0
    out = capsys.readouterr().out
    assert "only nodes that the drafter expanded can be chosen" in out
    assert "eagle, trees up to depth" in out
    assert "<svg" in page.read_text(encoding="utf-8")
    assert entry.main(["replay", str(path), "--policy", "sequoia"]) == 2
    assert "needs lattices" in capsys.readouterr().err
    assert entry.main(["lattice", "inspect", str(path)]) == 0
    assert f"nodes\t{trees.node_token.size}" in capsys.readouterr().out
    for command in (["diagnose", str(path)], ["lattice", "pack", str(path), "-o", "x.safetensors"]):
        assert entry.main(command) == 2
        assert "trees of an EAGLE drafter, no lattices" in capsys.readouterr().err


def test_recorded_trees_are_not_calibrated(
    random_recording: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trees.safetensors"
    write_trees(path, expanded(random_recording(6), 30))
    assert entry.main(["replay", str(path), "--calibrate"]) == 2
    told = capsys.readouterr().err
    assert "at --calibrate" in told
    assert "hint: leave --calibrate out" in told


def changed(trees: TreeRecording, name: str, at: int, value: Any) -> TreeRecording:
    array = getattr(trees, name).copy()
    array[at] = value
    return dataclasses.replace(trees, **{name: array})


DAMAGE: dict[str, tuple[str, int, Any, str]] = {
    "nan": ("node_log_prob", 17, np.nan, "node_log_prob`, step 2: NaN"),
    "positive": ("node_log_prob", 5, 0.5, "node_log_prob`, step 0: "),
    "child first": ("node_parent", 9, 3, "node_parent`, step 1: a node precedes"),
    "negative token": ("node_token", 3, -4, "node_token`, step 0: negative"),
    "offsets": ("node_offsets", 1, 9_999, "node_offsets`: must rise"),
    "position": ("step_position", 1, 0, "steps are not sorted"),
}


@pytest.mark.parametrize("case", list(DAMAGE))
def test_a_malformed_tree_names_tensor_and_step(
    random_recording: Make, tmp_path: Path, case: str
) -> None:
    name, at, value, message = DAMAGE[case]
    trees = expanded(random_recording(7), 8)
    with pytest.raises(InputError, match=message) as caught:
        write_trees(tmp_path / "t.safetensors", changed(trees, name, at, value))
    assert caught.value.where == str(tmp_path / "t.safetensors")
    assert not (tmp_path / "t.safetensors").exists()


def test_one_token_twice_under_one_parent_is_refused(
    random_recording: Make, tmp_path: Path
) -> None:
    trees = expanded(random_recording(7), 8)
    children = np.flatnonzero(trees.node_parent[8:16] == -1) + 8
    assert children.size > 1
    twice = changed(trees, "node_token", int(children[1]), trees.node_token[children[0]])
    with pytest.raises(InputError, match="step 1: one parent has the same token twice"):
        write_trees(tmp_path / "t.safetensors", twice)


def test_what_trees_cannot_answer_is_refused(random_recording: Make) -> None:
    trees = expanded(random_recording(8), 8)
    for options in (ReplayOptions(temperature=2.0), ReplayOptions(positions=2)):
        with pytest.raises(InputError, match="not drafted anew"):
            replay_trees(trees, options=options)
    with pytest.raises(InputError, match="--depth 99"):
        replay_trees(trees, options=ReplayOptions(depth=99))
