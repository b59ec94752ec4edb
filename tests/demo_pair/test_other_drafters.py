"""Real scores in the forms of other drafters: each replays to what the lattice itself gives.

The recordings are the demo pair's. Its selector scores pairs, which is the form of DSpark's Eq. 1;
without the selector's scores they are plain DFlash's; and the trees that EAGLE-2 would expand over
them are what a sequential drafter would have recorded.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specpilot_cli.io.lattice_file import read_lattice, write_lattice
from specpilot_cli.io.tree_file import read_trees, write_trees
from specpilot_cli.replay.calibration import Calibration, calibrate
from specpilot_cli.replay.run import replay
from specpilot_cli.replay.sequential import replay_trees
from specpilot_cli.schema.lattice import LatticeRecording
from specpilot_cli.schema.tree_recording import TreeRecording
from specpilot_kernels.trees import Lattices, build

NODES = [8, 16, 32, 63]


@pytest.fixture(scope="module")
def lattice(demo: Any) -> LatticeRecording:
    return read_lattice(demo.root / "recordings/block-16.safetensors")


def _as_kind(rec: LatticeRecording, **changes: Any) -> LatticeRecording:
    metadata = rec.metadata.model_copy(update={"packed": None, **changes})
    return dataclasses.replace(rec, metadata=metadata)


def _fits(found: Calibration) -> list[float]:
    return [found.fit.temperature, *found.fit.recall]


def test_dspark_replays_and_calibrates_like_the_same_scores_of_dflash2(
    lattice: LatticeRecording,
) -> None:
    dspark = _as_kind(lattice, drafter_kind="dspark", block=lattice.n_positions)
    own, same = (replay(rec, nodes=NODES) for rec in (dspark, lattice))
    assert [(row.policy, row.nodes, row.tau) for row in own.rows] == [
        (row.policy, row.nodes, row.tau) for row in same.rows
    ]
    fitted, wanted = (calibrate(rec, nodes=NODES) for rec in (dspark, lattice))
    assert _fits(fitted) == _fits(wanted)
    assert 0.5 < fitted.fit.temperature < 2
    assert all(0.5 < recall <= 1 for recall in fitted.fit.recall)


def _expanded(rec: LatticeRecording, n_nodes: int) -> TreeRecording:
    """EAGLE-2's trees of the recorded scores, as an EAGLE engine would have written them."""
    trees = build("eagle-2", Lattices(rec.candidate_ids, rec.edge, top_k=4), n_nodes)
    inside = np.arange(n_nodes) < trees.n_nodes[:, None]
    above = np.take_along_axis(trees.score, np.maximum(trees.parent, 0), axis=1)
    with np.errstate(invalid="ignore"):
        own = trees.score - np.where(trees.parent >= 0, above, 0.0)
    return TreeRecording(
        rec.metadata.model_copy(
            update={"drafter_kind": "eagle", "packed": None, "block": int(trees.depth.max()) + 1}
        ),
        rec.prompt_ids, rec.prompt_offsets, rec.output_ids, rec.output_offsets,
        rec.step_request, rec.step_position,
        np.concatenate([[0], np.cumsum(trees.n_nodes)]).astype(np.int64),
        trees.token[inside], trees.parent[inside], np.minimum(own[inside], 0).astype(np.float32),
    )  # fmt: skip


def test_eagle_trees_prune_to_what_eagle_2_builds(
    lattice: LatticeRecording, tmp_path: Path
) -> None:
    write_trees(tmp_path / "trees.safetensors", _expanded(lattice, max(NODES)))
    found = replay_trees(read_trees(tmp_path / "trees.safetensors"), nodes=NODES)
    assert found.curve("best-first") == replay(lattice, ["eagle-2"], nodes=NODES).curve("eagle-2")


def test_plain_dflash_keeps_the_marginal_trees(lattice: LatticeRecording, tmp_path: Path) -> None:
    path = tmp_path / "plain.safetensors"
    edge = (lattice.unary - lattice.unary_logsumexp[..., None])[:, :, None, :]
    plain = _as_kind(lattice, drafter_kind="dflash")
    write_lattice(path, dataclasses.replace(plain, edge=np.ascontiguousarray(edge)))
    found = replay(read_lattice(path), ["marginal"], nodes=NODES)
    assert found.curve("marginal") == replay(lattice, ["marginal"], nodes=NODES).curve("marginal")
