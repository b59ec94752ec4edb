"""Traces, file names and servers that mean harm: a named error, never an internal one."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.engines.sglang.info import read_facts
from specpilot_cli.errors import MachineError
from specpilot_cli.main import main
from specpilot_cli.record.server import recorder_facts
from specpilot_cli.report.json_out import plain
from specpilot_cli.ui import printable


def _trace(device: str = "NVIDIA H200", ts: str = "10") -> str:
    events = []
    for start in (ts, "110", "210"):
        events.append(f'{{"ph":"X","cat":"kernel","name":"nvjet","ts":{start},"dur":5,"tid":7}}')
        events.append(
            '{"ph":"X","cat":"gpu_user_annotation","name":"step[DECODE bs=1]",'
            f'"ts":{start},"dur":20,"tid":7}}'
        )
    return f'{{"deviceProperties":[{{"name":"{device}"}}],"traceEvents":[{",".join(events)}]}}'


@pytest.mark.parametrize("number", ["9" * 400, "9" * 5000, "1e999", "NaN"])
def test_numbers_beyond_all_bounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: str
) -> None:
    path = tmp_path / "t.json"
    path.write_text(_trace(ts=number))
    assert main(["profile", "--trace", str(path), "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_half_characters_are_spelled_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/t\xff.json"))
    path.write_text(_trace(device="\\ud800"))
    assert main(["profile", "--trace", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["results"]["step_profile"]["device"]["name"] == "\\ud800"
    assert shown["inputs"][0]["path"].endswith("t\\udcff.json")
    assert plain({"a\ud800": "\udfff"}) == {"a\\ud800": "\\udfff"}
    assert printable("\ud800") == "\\ud800"


@pytest.mark.parametrize("option", ["--context", "--tau"])
def test_infinite_options(tmp_path: Path, option: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(_trace())
    assert main(["profile", "--trace", str(path), option, "inf"]) == 2


def test_a_link_to_itself_is_bad_input(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert main(["profile", "--trace", str(loop)]) == 2


def test_no_temporary_folder_stays_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["profile", "--url", "http://127.0.0.1:9"]) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("amount", [1e308, float("nan"), float("inf"), -1, True, "5", 10**400])
def test_amounts_that_are_no_memory_are_not_said(amount: Any) -> None:
    facts = read_facts({"internal_states": [{"memory_usage": {"weight": amount}}]})
    assert facts.weight_bytes is None


def _recorder(active: dict[str, object]) -> dict[str, Any]:
    state = {
        "plugin_version": "1", "sglang_version": None, "config_sha256": None,
        "active": {"recorder": active}, "problems": [],
    }  # fmt: skip
    return {"internal_states": [{"specpilot": state}]}


@pytest.mark.parametrize(
    ("key", "value"),
    [("folder", 5), ("folder", "relative"), ("folder", "/a\0"), ("session", []), ("steps", "3"),
     ("lattices", None), ("written_lattices", True), ("dropped_steps", -1),
     ("seconds", float("nan")), ("step_seconds", float("inf"))],
)  # fmt: skip
def test_a_recorder_that_says_nonsense(key: str, value: object) -> None:
    said: dict[str, object] = {
        "folder": "/r", "session": "s", "steps": 1, "lattices": 1, "written_lattices": 1,
        "dropped_steps": 0, "seconds": 0.5, "step_seconds": 1,
    }  # fmt: skip
    assert len(recorder_facts(_recorder(said), name="it")) == 1
    with pytest.raises(MachineError, match=key):
        recorder_facts(_recorder({**said, key: value}), name="it")
