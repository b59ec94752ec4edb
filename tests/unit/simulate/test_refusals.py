"""Flags, times and step times that cannot be, or that do not belong to the recording."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specpilot_cli.errors import InputError
from specpilot_cli.io.lattice_file import write_lattice
from specpilot_cli.main import main
from specpilot_cli.schema.batch_times import BatchStepTimes
from specpilot_cli.schema.lattice import LatticeRecording
from specpilot_cli.simulate.inputs import read_agreement, read_row_samples
from specpilot_cli.simulate.tlv import _shuffled, two_level

Recorded = Callable[..., LatticeRecording]


@pytest.fixture
def recording(recorded: Recorded) -> LatticeRecording:
    return recorded(n_positions=7)


def _lines(recording: LatticeRecording) -> list[dict[str, str]]:
    return [
        {"request_id": item.request_id, "agrees": "1" * len(recording.output(index))}
        for index, item in enumerate(recording.metadata.requests)
    ]


def _write(path: Path, lines: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_flags_of_one_request_twice(recording: LatticeRecording, tmp_path: Path) -> None:
    lines = _lines(recording)
    other = {**lines[3], "agrees": lines[3]["agrees"].replace("1", "0")}
    with pytest.raises(InputError, match=f"`{other['request_id']}` has two lines"):
        read_agreement(_write(tmp_path / "q.jsonl", [*lines, other]), recording)


def test_flags_of_requests_that_nobody_recorded(
    recording: LatticeRecording, tmp_path: Path
) -> None:
    more = [{"request_id": name, "agrees": "1"} for name in ("zz", "stranger")]
    with pytest.raises(InputError, match="`stranger` is not in the recording, nor are 1 others"):
        read_agreement(_write(tmp_path / "q.jsonl", _lines(recording) + more), recording)


@pytest.fixture
def tlv(
    recording: LatticeRecording, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    lattice = tmp_path / "l.safetensors"
    write_lattice(lattice, recording)
    flags = _write(tmp_path / "q.jsonl", _lines(recording))

    def call(*more: str) -> tuple[int, str]:
        code = main(["simulate", "tlv", str(lattice), "--q-flags", str(flags), *more])
        return code, " ".join(capsys.readouterr().err.split())

    return call


@pytest.mark.parametrize(
    "times",
    ["0,0,0,0,0", "1,1,0,1,1", "0.00105,0.0115,0.0149,0.00055,0.0016", "1,1,1e308,1,1",
     "1,1e9,1,1,1", "1,nan,1,1,1", "1,1,5e-324,1,1"],
)  # fmt: skip
def test_times_that_cannot_be_milliseconds(tlv: Any, times: str) -> None:
    code, told = tlv("--times", times)
    assert code == 2, told
    assert "at --times" in told
    assert "milliseconds" in told


def test_a_block_beyond_the_recording_is_that_options_fault(tlv: Any) -> None:
    code, told = tlv("--block", "12")
    assert (code, "at --block" in told, "record with --block 12" in told) == (2, True, True), told
    assert "--policy" not in told


def test_shuffled_disagreements_stay_where_a_pass_may_meet_them(
    recording: LatticeRecording,
) -> None:
    """The first token comes from prefill: a disagreement moved there would be lost."""
    lengths = [len(recording.output(r)) for r in range(recording.n_requests)]
    flags = [np.arange(length) % 3 != 1 for length in lengths]
    for seed in range(5):
        shuffled = _shuffled(flags, seed)
        assert [len(part) for part in shuffled] == lengths
        assert all(part[0] == own[0] for part, own in zip(shuffled, flags, strict=True))
        later = [sum(int((~part[1:]).sum()) for part in side) for side in (shuffled, flags)]
        assert later[0] == later[1]
    # One disagreement in all, on a token that no pass predicts: shuffling changes nothing.
    only = [np.ones(length, dtype=np.bool_) for length in lengths]
    only[0][0] = False
    found = two_level(recording, only, nodes=16)
    assert found.tau_shuffled == pytest.approx(found.tau_two.value)


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("base", 14.8, "no step takes 14.8 s on a GPU"),
        ("base", 0.0, "a decode step may cost nothing"),
        ("base", 1e308, "no part of a step takes 1e+308 s"),
        ("base", 5e-324, "no part of a step takes"),
        ("base", 10**400, "seconds"),
        ("prefill", 0.0, "a prefill pass costs nothing"),
    ],
)
def test_step_times_that_cannot_be(
    recording: LatticeRecording, times: BatchStepTimes, tmp_path: Path,
    capsys: pytest.CaptureFixture[str], part: str, value: float, message: str,
) -> None:  # fmt: skip
    write_lattice(tmp_path / "l.safetensors", recording)
    document = times.model_dump(mode="json")
    document["decode"] = document["decode"][:2]
    chosen = document["prefill"] if part == "prefill" else document["decode"][0]
    chosen["points"] = [{"amount": 1, "seconds": value}]
    if message.startswith("a decode"):
        document["decode"][1]["points"] = [{"amount": 1, "seconds": value}]
    (tmp_path / "t.json").write_text(json.dumps(document), encoding="utf-8")
    command = ["simulate", "batch", str(tmp_path / "l.safetensors"), "--policy", "ar"]
    assert main([*command, "--step-times", str(tmp_path / "t.json")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "text",
    ["[5]", "[[8, [1, 1, 1]]]", '[{"rows": 8, "seconds": "abc"}]', '{"results": 5}',
     f'[{{"rows": 8, "seconds": [{10**400}, 1, 1]}}]', '[{"rows": 8, "seconds": {"a": 1}}]'],
    ids=["number", "list", "text", "results", "400 digits", "object"],
)  # fmt: skip
def test_timings_that_are_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(InputError, match="no timings by rows"):
        read_row_samples(tmp_path / "t.json")
