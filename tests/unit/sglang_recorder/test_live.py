"""`record --url` against a fake server that really records, over HTTP."""

from __future__ import annotations

import json
import threading
import time
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
from specpilot_cli.schema.prompts import Prompt
from tests.unit.sglang_recorder.conftest import Recording, Start
from tests.unit.sglang_recorder.fake_sglang import Request, Scheduler

TEXTS = ["one", "two words", "three more words", "abort this", "put back", "x", "the last one"]


class FakeServer:
    """HTTP around a recording scheduler in a thread of its own."""

    def __init__(self, recording: Recording, models: Path, *, max_running: int = 3) -> None:
        self.recording, self.models = recording, models
        self.scheduler = Scheduler(recording.worker, max_running=max_running, late=True)
        self.fate: dict[str, str] = {}
        self.lock = threading.Lock()
        self.batches: set[int] = set()
        self.stop = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.stop:
            with self.lock:
                busy = bool(self.scheduler.waiting or self.scheduler.running)
                if busy:
                    self.scheduler.step()
                    self.batches.add(len(self.scheduler.running))
                    self._fates()
            time.sleep(0.0 if busy else 0.002)

    def _fates(self) -> None:
        for request in list(self.scheduler.running):
            fate = self.fate.get(request.rid)
            if fate == "abort" and len(request.output) >= 3:
                request.aborted = True
            if fate == "retract" and len(request.output) >= 3 and not request.finished:
                self.scheduler.retract(request)
                del self.fate[request.rid]

    def __call__(self, exchange: Any) -> None:
        if exchange.path == "/server_info":
            exchange.reply(self.info())
            return
        body = exchange.body
        prompt = [1 + ord(letter) % 40 for letter in body["text"]]
        request = Request(body["rid"], prompt, body["sampling_params"]["max_new_tokens"])
        with self.lock:
            if "abort" in body["text"] or "back" in body["text"]:
                self.fate[request.rid] = "abort" if "abort" in body["text"] else "retract"
            self.scheduler.waiting.append(request)
        while not request.finished:
            time.sleep(0.001)
        exchange.stream([self._event(request)])

    def _event(self, request: Request) -> dict[str, Any]:
        ids = request.answer()
        kind = "length" if len(ids) == request.limit else "stop"
        reason = {"type": "abort", "message": "gone"} if request.aborted else {"type": kind}
        return {
            "output_ids": ids,
            "prompt_token_ids": request.prompt,
            "meta_info": {
                "finish_reason": reason,
                "completion_tokens": len(ids),
                "prompt_tokens": len(request.prompt),
            },
        }

    def info(self) -> dict[str, Any]:
        return {
            "model_path": str(self.models / "target"),
            "speculative_draft_model_path": str(self.models / "drafter"),
            "internal_states": [{"specpilot": self.recording.state.report()}],
        }


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"name": name}))
    return tmp_path


@pytest.fixture
def serve(start: Start, models: Path, make_server: Any) -> Any:
    """Start a recording server: `serve(mode) -> (url, FakeServer)`."""
    started: list[FakeServer] = []

    def begin(mode: str = "dense", **options: Any) -> tuple[str, FakeServer]:
        server = FakeServer(start(mode, **options), models)
        started.append(server)
        return make_server(server).url, server

    yield begin
    for server in started:
        server.stop = True
        server.thread.join()


def _prompts(texts: list[str], limit: int = 14) -> list[Prompt]:
    return [
        Prompt(request_id=f"p{n}", benchmark="b", text=text, max_new_tokens=limit)
        for n, text in enumerate(texts)
    ]


@pytest.mark.parametrize("mode", ["dense", "anchored"])
def test_a_busy_server_with_aborts_and_retractions_gives_a_lattice_file(
    serve: Any, models: Path, tmp_path: Path, mode: str
) -> None:
    url, server = serve(mode)
    prompts = _prompts(TEXTS)
    got = record_live(url, prompts, concurrency=4)
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
        p.request_id for p in prompts if p.request_id not in left_out
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
    first = record_live(url, _prompts(["same text"]))
    second = record_live(url, _prompts(["same text"]))
    assert np.array_equal(first.recording.edge, second.recording.edge)
    assert first.recording.n_steps == second.recording.n_steps


def test_nothing_recorded_is_no_recording(serve: Any) -> None:
    url, _ = serve("dense")
    with pytest.raises(MeasurementInvalid, match="none of the 1 requests"):
        record_live(url, _prompts(["abort this"]))


def test_a_recorder_that_stops_meanwhile_ends_the_run(serve: Any) -> None:
    url, server = serve("dense")
    recorder = server.recording.state.facts["recorder"].__self__
    plain = server.scheduler.step

    def step() -> None:
        recorder.fail("the disk is full")
        plain()

    server.scheduler.step = step
    with pytest.raises(MeasurementInvalid, match="the disk is full"):
        record_live(url, _prompts(["some text"]))


def test_a_recorder_that_is_full_is_said_so(serve: Any) -> None:
    url, _ = serve("dense", max_steps=6)
    with pytest.raises(MeasurementInvalid, match="max_steps"):
        record_live(url, _prompts(TEXTS[:3]))
    with pytest.raises(MachineError, match="max_steps"):
        record_live(url, _prompts(TEXTS[:1]))


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
        record_live(url, _prompts(TEXTS[:1]))
    gate.set()


def test_a_folder_on_another_machine_is_said_so(serve: Any) -> None:
    url, server = serve("dense")
    recorder = server.recording.state.facts["recorder"].__self__
    recorder._config = recorder._config.model_copy(update={"folder": "/somewhere/else"})
    with pytest.raises(MachineError, match="not on this machine") as caught:
        record_live(url, _prompts(["some text"]))
    assert "server's machine" in str(caught.value.hint)


def test_a_folder_of_another_process_does_not_pass_for_it(serve: Any) -> None:
    url, server = serve("dense")
    (folder,) = server.recording.folder.iterdir()
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**index, "session": "another"}))
    with pytest.raises(MachineError, match="not on this machine"):
        record_live(url, _prompts(["some text"]))


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
        record_live(server.url, _prompts(["text"]))


def test_models_that_are_elsewhere_need_a_copy(serve: Any, models: Path, tmp_path: Path) -> None:
    url, server = serve("dense")
    server.models = Path("/nowhere")
    with pytest.raises(InputError, match="not a folder on this machine"):
        record_live(url, _prompts(["some text"]))
    got = record_live(
        url, _prompts(["some text"]), target=models / "target", drafter=models / "drafter"
    )
    assert got.recording.metadata.target_sha256 == sha256_folder(models / "target")


def test_the_command_writes_both_files_and_counts(serve: Any, tmp_path: Path) -> None:
    url, _ = serve("anchored")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(p.model_dump_json() + "\n" for p in _prompts(TEXTS)))
    out, answers = tmp_path / "o.safetensors", tmp_path / "a.jsonl"
    command = ["record", "--url", url, "--prompts", str(prompts), "-o", str(out), "--outputs"]
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
