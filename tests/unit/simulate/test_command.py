"""`specpilot simulate` from the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specpilot_cli.io.lattice_file import write_lattice
from specpilot_cli.main import main
from specpilot_cli.schema.batch_times import BatchStepTimes
from specpilot_cli.schema.lattice import LatticeRecording

Recorded = Callable[..., LatticeRecording]


@pytest.fixture
def files(tmp_path: Path, recorded: Recorded, times: BatchStepTimes) -> dict[str, str]:
    """A lattice file, its step times, and agreement flags."""
    recording = recorded(n_positions=7)
    lattice, steps, flags = (tmp_path / name for name in ("l.safetensors", "t.json", "q.jsonl"))
    write_lattice(lattice, recording)
    steps.write_text(times.model_dump_json())
    lines = [
        json.dumps({"request_id": item.request_id, "agrees": "1" * len(recording.output(index))})
        for index, item in enumerate(recording.metadata.requests)
    ]
    flags.write_text("\n".join(lines) + "\n")
    return {"lattice": str(lattice), "times": str(steps), "flags": str(flags)}


def test_batch_prints_every_run_and_the_fastest(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    command = ["simulate", "batch", files["lattice"], "--step-times", files["times"]]
    assert main([*command, "--concurrency", "1,4"]) == 0
    out = capsys.readouterr().out
    assert "ar\t1\t" in out
    assert "tree:nodes=16,block=8\t4\t" in out
    assert out.strip().splitlines()[-1].startswith("fastest: ")


def test_places_that_stay_empty_are_named(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    command = ["simulate", "batch", files["lattice"], "--step-times", files["times"]]
    assert main([*command, "--policy", "ar", "--concurrency", "2,48"]) == 0
    out = capsys.readouterr().out
    assert "note: at 48 in flight at most" in out
    assert "at 2 in flight at most" not in out
    assert main([*command, "--policy", "ar", "--concurrency", "48", "--repeat", "40"]) == 0
    assert "in flight at most" not in capsys.readouterr().out


def test_batch_as_json_and_as_a_page(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    pytest.importorskip("matplotlib")
    page = tmp_path / "batch.html"
    command = [
        "simulate", "batch", files["lattice"], "--step-times", files["times"], "--policy", "ar",
        "--policy", "shared:rows=32,block=8", "--concurrency", "2,4", "--json", "-o", str(page),
    ]  # fmt: skip
    assert main(command) == 0
    runs = json.loads(capsys.readouterr().out)["results"]["runs"]
    assert [(run["policy"], run["concurrency"]) for run in runs] == [
        ("ar", 2), ("shared:rows=32,block=8", 2), ("ar", 4), ("shared:rows=32,block=8", 4),
    ]  # fmt: skip
    text = page.read_text(encoding="utf-8")
    assert 'id="batch-speedup' in text
    assert "shared:rows=32,block=8" in text


def test_times_of_another_deployment_make_it_a_projection(
    files: dict[str, str], repo: Path, capsys: pytest.CaptureFixture[str]
):
    """As `replay` and `ceiling` say; the demo pair's recordings and times are of one deployment."""
    policies = ["--policy", "ar", "--concurrency", "1"]
    command = ["simulate", "batch", files["lattice"], "--step-times", "demo-cpu", *policies]
    assert main(command) == 0
    assert "note: projected: the step times are of another target" in capsys.readouterr().out
    command[2] = str(repo / "recipes/demo-cpu/recordings/block-8.safetensors")
    assert main(command) == 0
    assert "projected" not in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"]["projected_because"] == []


def test_a_packed_recording_warns_beyond_what_it_kept(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    packed = str(tmp_path / "packed.safetensors")
    assert main(["lattice", "pack", files["lattice"], "-o", packed, "--nodes", "16"]) == 0
    command = ["simulate", "batch", packed, "--step-times", files["times"]]
    assert main([*command, "--policy", "ar", "--policy", "tree:nodes=16,block=8"]) == 0
    assert capsys.readouterr().err == ""
    assert main([*command, "--policy", "tree:nodes=17,block=8"]) == 0
    assert "kept the scores that trees of up to 16 nodes" in capsys.readouterr().err
    flags = ["simulate", "tlv", packed, "--q-flags", files["flags"], "--nodes"]
    assert main([*flags, "16"]) == 0
    assert capsys.readouterr().err == ""
    assert main([*flags, "32"]) == 0
    assert "kept the scores that trees of up to 16 nodes" in capsys.readouterr().err


def test_tlv_prints_the_break_even(files: dict[str, str], capsys: pytest.CaptureFixture[str]):
    command = ["simulate", "tlv", files["lattice"], "--q-flags", files["flags"]]
    assert main(command) == 0
    assert "give --times" in capsys.readouterr().out
    assert main([*command, "--times", "1.05,11.5,14.9,0.55,1.6"]) == 0
    assert "breaks even at" in capsys.readouterr().out
    assert main([*command, "--times", "1.05,11.5,14.9,0.55,1.6", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert results["two_level"]["agreement"] == 1.0
    assert results["speedup_ratio"] > 0


def test_plateaus_of_a_list_and_of_doctors_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    rows = [{"rows": n, "seconds": [1e-3 * (1 + (n > 64))] * 5} for n in (16, 32, 64, 96, 128)]
    plain = tmp_path / "rows.json"
    plain.write_text(json.dumps(rows))
    assert main(["simulate", "plateaus", str(plain)]) == 0
    assert "budgets worth trying, in rows: 64, 128" in capsys.readouterr().out
    answer = tmp_path / "doctor.json"
    answer.write_text(json.dumps({"results": {"measured": {"skinny": rows}}}))
    assert main(["simulate", "plateaus", str(answer), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]["plateaus"]
    assert [item["last_rows"] for item in found] == [64, 128]
    faster = [{"rows": n, "seconds": [1e-3 * (1 + (n <= 64))] * 5} for n in (16, 64, 96, 128)]
    plain.write_text(json.dumps(faster))
    assert main(["simulate", "plateaus", str(plain)]) == 0
    out = capsys.readouterr().out
    assert "16\t64\t2.00 ms\t96\t128 rows" in out
    assert "budgets worth trying, in rows: 128\n" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["batch", "{lattice}", "--step-times", "nothing"], "no batch step times"),
        (["batch", "{lattice}", "--step-times", "{times}", "--policy", "tree"], "lacks nodes"),
        (["batch", "{lattice}", "--step-times", "{lattice}"], "l.safetensors"),
        (["batch", "missing", "--step-times", "{times}"], "no such lattice"),
        (["batch", "{lattice}", "--step-times", "{times}", "--concurrency", "1,x"], "`1,x` is no"),
        (["batch", "{lattice}", "--step-times", "{times}", "--concurrency", "0"], "`0` is no"),
        (["tlv", "{lattice}", "--q-flags", "missing.jsonl"], "missing.jsonl"),
        (["tlv", "{lattice}", "--q-flags", "{flags}", "--times", "1,2,3"], "not five times"),
        (["tlv", "{lattice}", "--q-flags", "{flags}", "--times", "1,2,3,4,nan"], "not five times"),
        (["plateaus", "{times}"], "no timings by rows"),
        (["batch", "{lattice}", "--step-times", "h200"], "of `replay` have another form"),
    ],
)
def test_bad_input_exits_2(
    arguments: list[str], words: str, files: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    assert main(["simulate", *(item.format(**files) for item in arguments)]) == 2
    assert words in capsys.readouterr().err


def test_flags_of_other_outputs_name_the_request(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    path = Path(files["flags"])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1].replace('"1', '"'), *lines[2:]]))
    assert main(["simulate", "tlv", files["lattice"], "--q-flags", str(path)]) == 2
    assert "request `r1` has" in capsys.readouterr().err
    path.write_text("\n".join(lines[1:]))
    assert main(["simulate", "tlv", files["lattice"], "--q-flags", str(path)]) == 2
    assert "request `r0` has no line" in capsys.readouterr().err
