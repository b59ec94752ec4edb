"""Calibration: what is fitted, on whom, and whether it makes predictions right."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from specpilot_cli import main as entry
from specpilot_cli.errors import InputError
from specpilot_cli.io.lattice_file import read_lattice, write_lattice
from specpilot_cli.replay.anchors import AS_RECORDED
from specpilot_cli.replay.calibration import calibrate, fit_calibration
from specpilot_cli.replay.run import replay
from specpilot_cli.replay.split import requests_of, requests_with_steps, two_folds
from specpilot_cli.schema.lattice import LatticeRecording
from specpilot_kernels.trees.lattice import temper

Make = Callable[..., LatticeRecording]
LENGTHS = (220, 240, 210, 230, 200, 250, 190, 260)


@pytest.fixture
def long_recording(random_recording: Make) -> LatticeRecording:
    return random_recording(11, lengths=LENGTHS, recall=0.85)


def test_recall_and_temperature_of_a_made_up_drafter_are_found(
    long_recording: LatticeRecording,
) -> None:
    # The truth is drawn from the recorded scores and dropped with probability 0.15.
    fit = fit_calibration(long_recording, AS_RECORDED)
    assert fit.temperature == pytest.approx(1.0, abs=0.05)
    assert fit.recall[0] == pytest.approx(0.85, abs=0.03)
    np.testing.assert_allclose(fit.recall[:4], 0.85, atol=0.05)


@pytest.mark.parametrize("wrong", [0.5, 2.0])
def test_scores_that_are_off_by_a_temperature_are_put_right(
    long_recording: LatticeRecording, wrong: float
) -> None:
    bent = dataclasses.replace(long_recording, edge=temper(long_recording.edge, wrong))
    fit = fit_calibration(bent, AS_RECORDED)
    assert fit.temperature == pytest.approx(1.0 / wrong, rel=0.06)


def test_prediction_on_unseen_requests_gets_close_to_what_happens(
    long_recording: LatticeRecording,
) -> None:
    found = calibrate(long_recording, nodes=[8, 32])
    for before, after in zip(found.before.rows, found.after.rows, strict=True):
        assert before.expected_tau is not None
        assert after.expected_tau is not None
        assert before.expected_tau > 1.1 * before.tau.value
        assert after.expected_tau == pytest.approx(after.tau.value, rel=0.06)
    assert found.gain(32).value == pytest.approx(
        found.after.rows[1].tau.value / found.before.rows[1].tau.value
    )


class Heard:
    """A reporter that keeps its warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def note(self, msg: str) -> None: ...
    def progress(self, label: str, done: int, total: int) -> None: ...

    def warn(self, msg: str) -> None:
        self.warnings.append(msg)


def test_a_fit_that_predicts_better_is_not_warned_of(long_recording: LatticeRecording) -> None:
    heard = Heard()
    found = calibrate(long_recording, nodes=[8, 32], reporter=heard)
    rows = zip(found.before.rows, found.after.rows, strict=True)
    errors = [[abs((row.expected_tau or 0.0) / row.tau.value - 1) for row in pair] for pair in rows]
    assert (found.error_before, found.error_after) == pytest.approx(np.mean(errors, axis=0))
    assert found.error_after < found.error_before
    assert found.shared_benchmarks
    assert heard.warnings == []
    assert found.warning is None


def test_a_fit_that_predicts_worse_is_warned_of(repo: Path) -> None:
    """Eight requests of eight kinds of text: what is fitted on four says little of the others."""
    heard = Heard()
    recording = read_lattice(repo / "recipes/demo-cpu/recordings/block-16.safetensors")
    found = calibrate(recording, nodes=[16, 63], reporter=heard)
    assert found.error_after > 3 * found.error_before
    assert not found.shared_benchmarks
    packed, warning = heard.warnings
    assert "packed recording" in packed
    assert warning == found.warning
    assert "makes the prediction worse on the judged half" in warning
    assert "(4 requests fitted, 4 judged, and the halves share no benchmark)" in warning


def test_halves_are_disjoint_and_the_judged_half_is_replayed_alone(
    long_recording: LatticeRecording,
) -> None:
    found = calibrate(long_recording, nodes=[8])
    assert found.fitted.sum() == 4
    alone = replay(requests_of(long_recording, ~found.fitted), ["best-first"], nodes=[8])
    assert found.before.rows[0].tau.value == alone.rows[0].tau.value
    names = [request.benchmark for request in long_recording.metadata.requests]
    for benchmark in set(names):
        own = np.array([name == benchmark for name in names])
        assert found.fitted[own].sum() == 2


def test_a_part_of_a_recording_keeps_steps_and_outputs_together(random_recording: Make) -> None:
    recording = random_recording(3)
    chosen = np.array([False, True, True, False, True, False])
    part = requests_of(recording, chosen)
    whole = replay(recording, ["best-first", "chain"], nodes=[8])
    some = replay(part, ["best-first", "chain"], nodes=[8])
    for row, own in zip(whole.rows, some.rows, strict=True):
        assert row.tokens[chosen].tolist() == own.tokens.tolist()
        assert row.steps[chosen].tolist() == own.steps.tolist()
    assert part.prompt(1).tolist() == recording.prompt(2).tolist()


def test_folds_skip_requests_without_steps(random_recording: Make) -> None:
    recording = random_recording(3, lengths=(9, 1, 9))
    active = requests_with_steps(recording)
    assert active.tolist() == [True, False, True]
    assert sorted(two_folds(recording.metadata, active)[[0, 2]].tolist()) == [0, 1]


def test_one_request_cannot_be_split(random_recording: Make) -> None:
    with pytest.raises(InputError, match="two requests"):
        calibrate(random_recording(3, lengths=(20, 1)))


def test_command_reports_the_fit_and_both_halves(
    long_recording: LatticeRecording, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lattice.safetensors"
    write_lattice(path, long_recording)
    assert entry.main(["replay", str(path), "--calibrate", "--nodes", "8", "--json", "-q"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert not set(results["fitted_requests"]) & set(results["judged_requests"])
    assert len(results["recall_by_position_ratio"]) == 7
    row = results["rows"][0]
    assert row["nodes"] == 8
    assert (
        row["calibrated"]["expected_tokens_per_step"]
        < (row["as_recorded"]["expected_tokens_per_step"])
    )
    assert entry.main(["replay", str(path), "--calibrate", "--nodes", "8"]) == 0
    text = capsys.readouterr().out
    assert "best-first on the half that was not fitted, trajectory replay" in text
    assert "temperature 1.0" in text or "temperature 0.9" in text
    assert "expected τ is off by " in text
    assert results["prediction_error_ratio"]["calibrated"] < 0.1
    assert results["warning"] is None
    assert entry.main(["replay", str(path), "--calibrate", "--temperature", "2"]) == 2
    assert "--calibrate excludes" in capsys.readouterr().err
