"""Replay of files in parts, of packed files, and of drafters other than DFlash2."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specpilot_cli.errors import InputError
from specpilot_cli.io.lattice_file import LatticeFiles, read_lattice, write_lattice
from specpilot_cli.replay.anchors import AS_RECORDED, ReplayOptions, StepCost, prepare
from specpilot_cli.replay.calibration import calibrate
from specpilot_cli.replay.document import replay_document
from specpilot_cli.replay.facts import stock_walk
from specpilot_cli.replay.pack import pack, rows_read
from specpilot_cli.replay.policies import POLICIES
from specpilot_cli.replay.run import replay, replay_accept_lengths
from specpilot_cli.schema.lattice import LatticeRecording, Packing
from specpilot_cli.ui import SilentReporter
from specpilot_kernels.trees import (
    BUILDERS,
    Lattices,
    accepted_counts,
    build,
    edge_log_probs,
    marginal_log_probs,
)

Make = Callable[..., LatticeRecording]
EVERY = sorted(POLICIES)
COST = StepCost(tuple(1.0 + 0.02 * n for n in range(64)), 1.0, "made up")
WITH_COST = ReplayOptions(step_cost=COST)
_SUMS = (
    "expected_tokens_per_step", "mean_nodes_per_step", "step_s", "speedup_over_ar_ratio",
)  # fmt: skip
LENGTHS = (40, 1, 35, 2, 50, 38, 44, 27)


class Ear(SilentReporter):
    """Keeps warnings and progress."""

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.done: list[tuple[int, int]] = []

    def warn(self, msg: str) -> None:
        self.warnings.append(msg)

    def progress(self, label: str, done: int, total: int) -> None:
        self.done.append((done, total))


def test_of_two_equal_scores_stock_may_take_either(random_recording: Make) -> None:
    rec = random_recording(23)
    edge, ids = rec.edge.copy(), rec.candidate_ids
    edge[:, 0, :, 1] = edge[:, 0, :, 0] = edge[:, 0].max(axis=-1) + 1
    edge = edge_log_probs(edge)
    for index, expected in ((0, False), (1, False), (2, True)):
        choice = np.empty_like(rec.stock_choice)
        choice[:, 0] = ids[:, 0, index]
        for position in range(1, choice.shape[1]):
            before = (ids[:, position - 1] == choice[:, position - 1, None]).argmax(axis=1)
            best = edge[np.arange(len(ids)), position, before].argmax(axis=1)
            choice[:, position] = ids[np.arange(len(ids)), position, best]
        changed = dataclasses.replace(rec, edge=edge, stock_choice=choice)
        inside, off = stock_walk(prepare(changed, AS_RECORDED))
        assert inside.all()
        assert off.all() == off.any() == expected


def test_every_builder_is_a_policy_and_every_policy_a_builder() -> None:
    assert set(POLICIES) == set(BUILDERS)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("n_nodes", [3, 20])
def test_every_policy_accepts_what_its_builders_trees_accept(
    random_recording: Make, name: str, n_nodes: int
) -> None:
    """The fast traces against trees that are really built, step by step."""
    rec = random_recording(21, lengths=LENGTHS)
    anchors = prepare(rec, WITH_COST)
    trace = POLICIES[name].fitted(rec, WITH_COST, [n_nodes]).trace(anchors, WITH_COST, [n_nodes])
    accept: Any = {None: np.ones(anchors.n_anchors, dtype=np.bool_)}
    if name == "sequoia":
        fitted: Any = POLICIES[name].fitted(rec, WITH_COST, [n_nodes])
        half = np.array([fitted.halves[r.request_id] for r in rec.metadata.requests])
        accept = {
            tuple(plan.accept): half[anchors.request] == judged
            for judged, plan in fitted.plans.items()
        }
    for vector, mine in accept.items():
        steps = anchors.step[mine]
        lattices = Lattices(
            rec.candidate_ids[steps], rec.edge[steps],
            unary=marginal_log_probs(rec.unary[steps], rec.unary_logsumexp[steps]),
            accept=None if vector is None else np.array(vector),
            step_cost=np.array(COST.seconds), truth=anchors.truth[mine],
        )  # fmt: skip
        budget = 99 if name == "oracle" else n_nodes
        found = accepted_counts(build(name, lattices, budget), anchors.truth[mine])
        assert trace.accepted(n_nodes)[mine].tolist() == found.tolist()


@pytest.mark.parametrize("part_steps", [1, 60, 10_000])
def test_files_in_parts_give_the_document_of_the_whole(
    random_recording: Make, tmp_path: Path, part_steps: int
) -> None:
    rec = random_recording(22, lengths=LENGTHS)
    path = tmp_path / "lattice.safetensors"
    write_lattice(path, rec)
    ear = Ear()
    files = LatticeFiles(path, part_steps=part_steps)
    assert len(list(files.parts())) == {1: 8, 60: 6, 10_000: 1}[part_steps]
    found = replay(files, EVERY, nodes=[4, 16], options=WITH_COST, reporter=ear)
    whole = replay(rec, EVERY, nodes=[4, 16], options=WITH_COST)
    left, right = replay_document(found, files), replay_document(whole, rec)
    for own, wanted in zip(left["rows"], right["rows"], strict=True):
        for key in _SUMS:  # added up in another order
            assert (own[key] is None) == (wanted[key] is None)
            if wanted[key] is not None:
                assert own.pop(key) == pytest.approx(wanted.pop(key), rel=1e-12)
    assert left == right
    fitted, alone = calibrate(files, nodes=[8]), calibrate(rec, nodes=[8])
    assert fitted.fit == alone.fit
    assert fitted.after.rows[0].tau == alone.after.rows[0].tau
    assert ear.done[-1] == (8, 8)


def test_lengths_are_a_histogram_of_the_steps(random_recording: Make) -> None:
    rec = random_recording(23)
    row = replay(rec, ["best-first"], nodes=[16]).rows[0]
    steps = np.concatenate(replay_accept_lengths(rec, "best-first", 16))
    assert row.lengths is not None
    assert row.lengths.tolist() == np.bincount(steps, minlength=9).tolist()
    assert (row.lengths * np.arange(9)).sum() / row.lengths.sum() == row.tau.value


def test_packing_keeps_what_every_policy_reads(random_recording: Make, tmp_path: Path) -> None:
    """With dropped rows made absurd instead of rounded away, nothing may change."""
    rec = random_recording(24, lengths=LENGTHS, n_candidates=6)
    kept = rows_read(rec, Packing(exact_nodes=12, top_k=3))
    kept[:, 0] = True
    assert 0.1 < kept.mean() < 0.9
    absurd = rec.edge.copy()
    absurd[~kept] = np.log(np.array([0.9, 0.02, 0.02, 0.02, 0.02, 0.02], dtype=np.float32))
    changed = dataclasses.replace(rec, edge=absurd)
    options = ReplayOptions(step_cost=COST, top_k=3)
    for name in EVERY:
        for n_nodes in (1, 5, 12):
            before = replay_accept_lengths(rec, name, n_nodes, options=options)
            after = replay_accept_lengths(changed, name, n_nodes, options=options)
            assert [a.tolist() for a in after] == [b.tolist() for b in before], name
    assert calibrate(changed, nodes=[8]).fit == calibrate(rec, nodes=[8]).fit
    path = tmp_path / "packed.safetensors"
    pack(path, rec, Packing(exact_nodes=12, top_k=3))
    packed = read_lattice(path)
    found = replay(packed, nodes=[5, 12], options=ReplayOptions(top_k=3))
    wanted = replay(rec, nodes=[5, 12], options=ReplayOptions(top_k=3))
    for own, row in zip(found.rows, wanted.rows, strict=True):
        assert own.tau.value == pytest.approx(row.tau.value, rel=0.01)  # float16 ties
    with pytest.raises(InputError, match="packed already"):
        pack(tmp_path / "again.safetensors", packed, Packing(exact_nodes=12, top_k=3))


@pytest.mark.parametrize(
    ("nodes", "options", "warns"),
    [
        ([12], AS_RECORDED, False),
        ([13], AS_RECORDED, True),
        ([12], ReplayOptions(top_k=9), True),
        ([12], ReplayOptions(temperature=1.5), True),
    ],
)
def test_settings_beyond_the_packing_warn(
    random_recording: Make, tmp_path: Path, nodes: list[int], options: Any, warns: bool
) -> None:
    path, ear = tmp_path / "packed.safetensors", Ear()
    pack(path, random_recording(25), Packing(exact_nodes=12, top_k=4))
    replay(LatticeFiles(path), ["best-first"], nodes=nodes, options=options, reporter=ear)
    assert [("approximate" in warning) for warning in ear.warnings] == ([True] if warns else [])


def dspark(rec: LatticeRecording, outside: float) -> LatticeRecording:
    """The recording as DSpark's: block = positions, some stock tokens not among the candidates."""
    rng = np.random.default_rng(3)
    stock = rec.stock_choice.copy()
    stock[rng.random(stock.shape) < outside] = 9999
    metadata = rec.metadata.model_copy(update={"drafter_kind": "dspark", "block": rec.n_positions})
    return dataclasses.replace(rec, metadata=metadata, stock_choice=stock)


def test_dspark_says_how_often_stock_left_the_candidates(random_recording: Make) -> None:
    rec, ear = dspark(random_recording(26, lengths=LENGTHS), 0.08), Ear()
    result = replay(rec, ["chain", "best-first"], nodes=[8], reporter=ear)
    outside = (rec.stock_choice == 9999)[prepare(rec, AS_RECORDED).step].mean(axis=0)
    assert result.stock_outside_by_position is not None
    assert result.stock_outside_by_position.tolist() == outside.tolist()
    assert 0.04 < outside.mean() < 0.13
    assert ear.warnings == []  # leaving the candidates is what DSpark's stock does
    assert result.chain_mismatch_ratio == 0.0
    assert result.rows[0].tau.value < replay(random_recording(26, lengths=LENGTHS),
                                             ["chain"], nodes=[8]).rows[-1].tau.value  # fmt: skip


def test_plain_dflash_has_marginal_trees_and_refuses_conditional_ones(
    random_recording: Make,
) -> None:
    rec = random_recording(27)
    own = marginal_log_probs(rec.unary, rec.unary_logsumexp)[:, :, None, :]
    metadata = rec.metadata.model_copy(update={"drafter_kind": "dflash"})
    plain = dataclasses.replace(rec, metadata=metadata, edge=own)
    result = replay(plain, nodes=[4, 16])
    policies = {row.policy for row in result.rows}
    assert policies == {"chain", "marginal", "eagle-2", "sequoia", "oracle"}
    assert result.curve("marginal") == replay(rec, ["marginal"], nodes=[4, 16]).curve("marginal")
    wide = ReplayOptions(top_k=16)
    assert replay(plain, ["eagle-2"], nodes=[16], options=wide).curve("eagle-2") == {
        16: result.curve("marginal")[16]
    }
    with pytest.raises(InputError, match="scores given the predecessor") as caught:
        replay(plain, ["best-first"])
    assert "marginal" in (caught.value.hint or "")
    with pytest.raises(InputError, match="a dflash drafter has none"):
        replay(plain, options=ReplayOptions(temperature=2.0))
    with pytest.raises(InputError, match="calibration needs scores"):
        calibrate(plain)
