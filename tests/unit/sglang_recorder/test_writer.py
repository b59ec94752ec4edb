"""Shards, and everything that can go wrong with them while a server must go on."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from specpilot_cli.engines.sglang.plugin import recorder_writer
from specpilot_cli.engines.sglang.plugin.recorder_layout import RowLayout
from specpilot_cli.engines.sglang.plugin.recorder_writer import ShardWriter
from specpilot_cli.record.shards import collect, read_index
from specpilot_cli.schema.raw_lattice import RecorderIndex
from tests.unit.sglang_recorder.conftest import Start
from tests.unit.sglang_recorder.fake_sglang import Request

LAYOUT = RowLayout(positions=3, candidates=2)


class Rows:
    """A slot that is already filled."""

    def __init__(self, rows: npt.NDArray[np.int32]) -> None:
        self._rows, self.released = rows, 0

    def rows(self, count: int) -> npt.NDArray[np.int32]:
        return self._rows[:count]

    def release(self) -> None:
        self.released += 1


def _writer(folder: Path, *, rows_per_shard: int) -> ShardWriter:
    index = RecorderIndex(
        session="s", mode="dense", algorithm="DFLASH", engine="sglang 0.5.23", block=4,
        positions=3, candidates=2,
    )  # fmt: skip
    return ShardWriter(folder, LAYOUT, index, shard_bytes=4 * LAYOUT.words * rows_per_shard)


def _step(number: int, count: int) -> Rows:
    rng = np.random.default_rng(number)
    rows = rng.integers(0, 1000, (count, LAYOUT.words), dtype=np.int32)
    rows[:, LAYOUT.scores] = rng.standard_normal((count, 12), dtype=np.float32).view(np.int32)
    return Rows(rows)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_rows_come_back_bit_for_bit_across_shards(tmp_path: Path) -> None:
    writer = _writer(tmp_path / "s", rows_per_shard=4)
    writer.start()
    steps = [_step(n, 3) for n in range(7)]
    names = [["a", "b", f"late{n}"] for n in range(7)]
    for step, requests in zip(steps, names, strict=True):
        writer.submit(step, requests)
    writer.close()
    index = read_index(tmp_path / "s")
    assert (index.shards, index.lattices) == (6, 21)
    assert all(step.released == 1 for step in steps)
    assert {path.name[0] for path in (tmp_path / "s").iterdir()} == {"i", "s"}, "left-over files"
    found = collect(tmp_path / "s", index, {"a", "b", "late4"})
    for column, name in enumerate(("a", "b")):
        expected = LAYOUT.unpack(np.stack([step._rows[column] for step in steps]))
        for key, array in found[name].joined().items():
            assert np.array_equal(array, expected[key]), key
    assert found["late4"].joined()["anchor"].tolist() == [steps[4]._rows[2, 0]]


def test_the_columns_of_a_row_do_not_overlap() -> None:
    words = np.arange(LAYOUT.words, dtype=np.int32)[None]
    parts = LAYOUT.unpack(words)
    taken = np.concatenate([part.view(np.int32).ravel() for part in parts.values()])
    assert sorted(taken.tolist()) == list(range(LAYOUT.words))
    assert parts["scores"].dtype == np.float32
    assert RowLayout(7, 16).words * 4 == 8132


def test_rows_are_written_when_the_server_goes_idle(tmp_path: Path) -> None:
    writer = _writer(tmp_path / "s", rows_per_shard=1000)
    writer.start()
    writer.submit(_step(0, 2), ["a", "b"])
    _until(lambda: read_index(tmp_path / "s").lattices == 2)
    writer.close()


def test_rows_are_written_while_the_server_stays_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_writer, "OLDEST_ROW_S", 0.05)
    monkeypatch.setattr(recorder_writer, "IDLE_FLUSH_S", 60.0)
    writer = _writer(tmp_path / "s", rows_per_shard=100_000)
    writer.start()
    deadline = time.monotonic() + 60
    while writer.lattices == 0:
        assert time.monotonic() < deadline
        writer.submit(_step(0, 2), ["a", "b"])
        time.sleep(0.005)
    writer.close()


def test_a_full_disk_ends_the_recording_and_nothing_else(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = start("dense")
    scheduler = recording.scheduler()
    scheduler.waiting = [Request("r", [5, 6, 7], 6)]
    scheduler.run()
    assert recording.facts() is not None

    def no_room(*_args: object, **_kw: object) -> int:
        raise OSError(28, "No space left on device", "shard-000000.safetensors")

    monkeypatch.setattr(recorder_writer, "_write", no_room)
    recorder = recording.state.facts["recorder"].__self__
    _until(lambda: recorder._writer.problem is not None)
    request = Request("again", [8, 9, 10], 40)
    scheduler.waiting = [request]
    scheduler.run()
    assert request.finished
    assert recording.facts() is None
    assert recording.problems() == [
        "recorder: the recorder's writer ended: No space left on device (shard-000000.safetensors)"
    ]
    assert recorder._ring.free.qsize() == recorder._ring.slots


def test_a_folder_that_disappears_is_a_problem(start: Start) -> None:
    recording = start("dense")
    shutil.rmtree(recording.folder)
    scheduler = recording.scheduler()
    scheduler.waiting = [Request("r", [5, 6, 7], 6)]
    scheduler.run()
    _until(lambda: recording.facts() is None)
    assert "No such file or directory" in recording.problems()[0]


def test_a_folder_that_cannot_be_made_is_a_problem_at_once(start: Start, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recording = start("dense", folder=tmp_path / "file")
    assert recording.facts() is None
    assert "could not start" in recording.problems()[0]
    scheduler = recording.scheduler()
    request = Request("r", [5, 6, 7], 6)
    scheduler.waiting = [request]
    scheduler.run()
    assert request.finished


def test_a_writer_that_lags_costs_steps_and_no_memory_and_no_waiting(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    recording = start("dense")
    recorder = recording.state.facts["recorder"].__self__
    slow = recorder._writer._append
    monkeypatch.setattr(recorder._writer, "_append", lambda *a: (gate.wait(10), slow(*a)))
    scheduler = recording.scheduler()
    scheduler.waiting = [Request(f"r{n}", [1 + n % 40, 6, 7], 30) for n in range(100)]
    scheduler.run()
    assert recorder.dropped_steps > 0
    assert recorder.steps == recorder.dropped_steps + recorder._ring.slots
    gate.set()
    recorder.close()
    assert recording.problems() == []


def test_recording_stops_at_its_limit(start: Start) -> None:
    recording = start("dense", max_steps=5)
    scheduler = recording.scheduler()
    scheduler.waiting = [Request("r", [5, 6, 7], 12)]
    scheduler.run()
    facts = recording.facts()
    assert facts is not None
    assert (facts["steps"], facts["full"]) == (5, True)


@pytest.mark.parametrize(
    ("mode", "environ", "said"),
    [
        ("dense", {}, "SGLANG_SIMULATE_ACC_LEN=1, so that the server commits one token a step; "
         "it is not set"),
        ("dense", {"SGLANG_SIMULATE_ACC_LEN": "2.5"}, "it is 2.5"),
        ("dense", {"SGLANG_SIMULATE_ACC_LEN": "1"}, "SGLANG_SIMULATE_ACC_TOKEN_MODE"),
        ("anchored", {"SGLANG_SIMULATE_ACC_LEN": "3"}, "unset it"),
    ],
)  # fmt: skip
def test_a_mode_that_the_server_does_not_run_in_is_refused(
    start: Start, mode: str, environ: dict[str, str], said: str
) -> None:
    recording = start(mode, environ=environ)
    assert recording.facts() is None
    assert said in recording.problems()[0]


def test_a_drafter_without_a_lattice_is_refused(start: Start) -> None:
    recording = start("dense")
    recording = start("dense")
    worker = recording.worker
    worker.selector = None
    recorder = recording.state.facts["recorder"].__self__
    recorder._layout = None
    worker.init_cuda_graphs()
    assert "needs a DFlash2 drafter" in recording.problems()[0]


def test_a_server_without_a_drafter_says_that_nothing_is_recorded(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tests.unit.sglang_recorder.fake_sglang.dflash_worker", lambda **_options: None
    )
    recording = start("dense")
    report = recording.state.report()
    assert report["active"] == {}
    assert report["problems"] == [
        "recorder: nothing to record: the server runs neither DFLASH nor DSPARK"
    ]


def test_a_fault_in_a_lattice_never_reaches_the_server(start: Start) -> None:
    recording = start("dense")
    recording.worker.draft_model._transform_unary_logits = lambda logits: logits / "no"
    recording.worker.draft_model.compute_candidates = _candidates(recording.worker.draft_model)
    scheduler = recording.scheduler()
    request = Request("r", [5, 6, 7], 6)
    scheduler.waiting = [request]
    scheduler.run()
    assert request.finished
    assert recording.facts() is None
    assert "a lattice could not be recorded" in recording.problems()[0]


def _candidates(model: object) -> Callable[..., object]:
    """The model's own candidates, with its logits as they are."""

    def compute(hidden: object) -> object:
        import sys

        import torch

        logits = sys.modules["sglang.srt.models.dflash"]._project_candidate_logits(
            hidden,
            model.head,
            num_org=48,
            use_quant_head=True,  # type: ignore[attr-defined]
        )
        values, ids = torch.topk(logits, 4, dim=-1)
        return ids, values

    return compute
