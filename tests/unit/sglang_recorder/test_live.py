"""`record --url` against a fake server that really records, over HTTP."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from specpilot_cli.app import app
from specpilot_cli.errors import InputError, MachineError, MeasurementInvalid
from specpilot_cli.io.hashing import sha256_folder
from specpilot_cli.io.lattice_file import read_lattice, write_lattice
from specpilot_cli.record.live import record_live
from tests.unit.sglang_recorder.live_server import prompts

TEXTS = ["one", "two words", "three more words", "abort this", "put back", "x", "the last one"]


@pytest.mark.parametrize("mode", ["dense", "anchored"])
def test_a_busy_server_with_aborts_and_retractions_gives_a_lattice_file(
    serve: Any, models: Path, tmp_path: Path, mode: str
) -> None:
    url, server = serve(mode)
    asked = prompts(TEXTS)
    got = record_live(url, asked, concurrency=4)
    assert max(server.batches) == 3
    left_out = {loss.request_id: loss.reason for loss in got.dropped}
    assert "aborted" in left_out["p3"]
    # The prefill after the retraction emits one token without a draft.
    assert "is missing" in left_out["p4"]
    assert set(left_out) == {"p3", "p4"}
    path = tmp_path / "got.safetensors"
    write_lattice(path, got.recording)
    again = read_lattice(path)
    assert again.metadata.mode == mode
    assert again.metadata.target_sha256 == sha256_folder(models / "target")
    assert again.metadata.drafter_sha256 == sha256_folder(models / "drafter")
    assert [r.request_id for r in again.metadata.requests] == [
        p.request_id for p in asked if p.request_id not in left_out
    ]
    assert [list(record.output_ids) for record in got.outputs] == [
        again.output(n).tolist() for n in range(again.n_requests)
    ]
    counts = np.bincount(again.step_request, minlength=again.n_requests)
    lengths = np.diff(again.output_offsets)
    if mode == "dense":
        assert counts.tolist() == (lengths - 1).tolist()
    else:
        assert counts.sum() < (lengths - 1).sum()
    assert got.stock_outside_ratio == 0
    assert got.steps > 0
    assert 0 < got.hook_s < got.step_s


def test_a_second_recording_of_the_same_server_is_its_own(serve: Any) -> None:
    url, _ = serve("dense")
    first = record_live(url, prompts(["same text"]))
    second = record_live(url, prompts(["same text"]))
    assert np.array_equal(first.recording.edge, second.recording.edge)
    assert first.recording.n_steps == second.recording.n_steps


def test_nothing_recorded_is_no_recording(serve: Any) -> None:
    url, _ = serve("dense")
    with pytest.raises(MeasurementInvalid, match="none of the 1 requests"):
        record_live(url, prompts(["abort this"]))


def test_a_recorder_that_stops_meanwhile_ends_the_run(serve: Any) -> None:
    url, server = serve("dense")
    recorder = server.recording.state.facts["recorder"].__self__
    plain = server.scheduler.step

    def step() -> None:
        recorder.fail("the disk is full")
        plain()

    server.scheduler.step = step
    with pytest.raises(MeasurementInvalid, match="the disk is full"):
        record_live(url, prompts(["some text"]))


def test_a_recorder_that_is_full_is_said_so(serve: Any) -> None:
    url, _ = serve("dense", max_steps=6)
    with pytest.raises(MeasurementInvalid, match="max_steps"):
        record_live(url, prompts(TEXTS[:3]))
    with pytest.raises(MachineError, match="max_steps"):
        record_live(url, prompts(TEXTS[:1]))


def test_a_writer_that_hangs_does_not_hang_the_client(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, server = serve("dense")
    recorder = server.recording.state.facts["recorder"].__self__
    gate = threading.Event()
    flush = recorder._writer._flush
    monkeypatch.setattr(recorder._writer, "_flush", lambda: (gate.wait(30), flush()))
    monkeypatch.setattr("specpilot_cli.record.server._WRITE_TIMEOUT_S", 0.5)
    with pytest.raises(MeasurementInvalid, match=r"did not write its shards in 0\.5 s"):
        record_live(url, prompts(TEXTS[:1]))
    gate.set()


def test_a_folder_on_another_machine_is_said_so(serve: Any) -> None:
    url, server = serve("dense")
    recorder = server.recording.state.facts["recorder"].__self__
    recorder._config = recorder._config.model_copy(update={"folder": "/somewhere/else"})
    with pytest.raises(MachineError, match="not on this machine") as caught:
        record_live(url, prompts(["some text"]))
    assert "server's machine" in str(caught.value.hint)


def test_a_folder_of_another_process_does_not_pass_for_it(serve: Any) -> None:
    url, server = serve("dense")
    (folder,) = server.recording.folder.iterdir()
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**index, "session": "another"}))
    with pytest.raises(MachineError, match="not on this machine"):
        record_live(url, prompts(["some text"]))


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({}, "no specpilot plugin"),
        ({"active": {}, "problems": []}, "does not ask for it"),
        ({"active": {}, "problems": ["recorder: the disk is full"]}, "the disk is full"),
        ({"active": {"recorder": {"folder": "/x"}}, "problems": []}, "does not say"),
    ],
)
def test_a_server_that_does_not_record_is_refused(
    make_server: Any, state: dict[str, Any], said: str
) -> None:
    whole = {"plugin_version": "0", "sglang_version": "0.5.23", "config_sha256": None, **state}
    internal = {"specpilot": whole} if state else {}
    server = make_server(lambda exchange: exchange.reply({"internal_states": [internal]}))
    with pytest.raises(MachineError, match=said):
        record_live(server.url, prompts(["text"]))


def test_models_that_are_elsewhere_need_a_copy(serve: Any, models: Path, tmp_path: Path) -> None:
    url, server = serve("dense")
    server.models = Path("/nowhere")
    with pytest.raises(InputError, match="not a folder on this machine"):
        record_live(url, prompts(["some text"]))
    got = record_live(
        url, prompts(["some text"]), target=models / "target", drafter=models / "drafter"
    )
    assert got.recording.metadata.target_sha256 == sha256_folder(models / "target")


def test_the_command_writes_both_files_and_counts(serve: Any, tmp_path: Path) -> None:
    url, _ = serve("anchored")
    path = tmp_path / "p.jsonl"
    path.write_text("".join(p.model_dump_json() + "\n" for p in prompts(TEXTS)))
    out, answers = tmp_path / "o.safetensors", tmp_path / "a.jsonl"
    command = ["record", "--url", url, "--prompts", str(path), "-o", str(out), "--outputs"]
    done = CliRunner().invoke(app, [*command, str(answers), "--json"])
    assert done.exit_code == 0, done.output
    results = json.loads(done.stdout)["results"]
    assert results["server"]["mode"] == "anchored"
    assert results["server"]["dropped"][0]["request_id"] == "p3"
    assert results["requests"] == read_lattice(out).n_requests
    assert len(answers.read_text().splitlines()) == results["requests"]
    refused = CliRunner().invoke(app, [*command, str(answers), "--force", "--block", "8"])
    assert refused.exception is not None
    assert "cannot be chosen here" in str(refused.exception)
