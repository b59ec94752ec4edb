"""Driving a server's profiler: against a small server that behaves, and ones that do not."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.errors import InputError, MachineError
from specpilot_cli.profile.live import Waits, drafted_block, model_folder, record_trace

FAST = Waits(request_s=20, file_s=5)
SHORT = Waits(request_s=20, file_s=1)


class FakeServer:
    """`/server_info`, `/start_profile`, `/generate`, `/stop_profile`; every call is kept."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace
        self.info: Any = {"version": "0.5.23", "speculative_algorithm": "DFLASH",
                          "speculative_num_draft_tokens": 8}  # fmt: skip
        self.calls: list[tuple[str, Any]] = []
        self.fail: dict[str, tuple[int, str]] = {}
        self.write: Callable[[Path, bytes], Any] = Path.write_bytes
        self.suffix = "-TP-0.trace.json.gz"

    def answer(self, path: str, body: Any) -> tuple[int, str]:
        self.calls.append((path, body))
        if path in self.fail:
            return self.fail[path]
        if path == "/server_info":
            return 200, json.dumps(self.info)
        if path == "/generate":
            start = next(sent for name, sent in self.calls if name == "/start_profile")
            target = Path(start["output_dir"]) / f"{start['profile_id']}{self.suffix}"
            self.write(target, self.trace.read_bytes())
        return 200, "{}"

    def body(self, path: str) -> Any:
        return next(sent for name, sent in self.calls if name == path)


@pytest.fixture
def server(traces: Path) -> Iterator[tuple[FakeServer, str]]:
    fake = FakeServer(traces / "df8.trace.json.gz")

    class Handler(BaseHTTPRequestHandler):
        def _reply(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            sent = json.loads(self.rfile.read(length)) if length else None
            status, text = fake.answer(self.path, sent)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = _reply

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield fake, f"http://127.0.0.1:{http.server_address[1]}"
    http.shutdown()
    http.server_close()


def test_the_request_outlasts_the_profiler(server: tuple[FakeServer, str], tmp_path: Path) -> None:
    fake, url = server
    (path,), facts = record_trace(url, steps=20, folder=tmp_path, waits=FAST)
    assert (facts.version, drafted_block(facts)) == ("0.5.23", 8)
    start = fake.body("/start_profile")
    assert start["with_stack"] is False
    assert start["record_shapes"] is False
    assert start["detailed_annotations"] is True
    assert start["num_steps"] >= 20
    assert Path(start["output_dir"]) == tmp_path
    assert start["profile_id"] in path.name
    sampling = fake.body("/generate")["sampling_params"]
    # Even if every step commits the whole block, the profiler sees all its steps.
    assert sampling["max_new_tokens"] >= 8 * start["num_steps"]
    assert sampling["ignore_eos"] is True
    assert path.read_bytes() == fake.trace.read_bytes()
    assert "/stop_profile" not in [name for name, _ in fake.calls]


def test_prompts_are_sent_as_text(server: tuple[FakeServer, str], tmp_path: Path) -> None:
    fake, url = server
    row = {"request_id": "a", "benchmark": "b", "text": "Why?", "max_new_tokens": 4}
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps(row) + "\n")
    record_trace(url, steps=2, folder=tmp_path, prompts=prompts, waits=FAST)
    assert fake.body("/generate")["text"] == "Why?"


def test_a_model_is_read_where_the_server_has_it_if_that_is_here(tmp_path: Path) -> None:
    assert model_folder(None) is None
    assert model_folder("org/model-on-the-hub") is None
    assert model_folder(str(tmp_path)) is None
    (tmp_path / "config.json").write_text("{}")
    assert model_folder(str(tmp_path)) == tmp_path


def test_a_server_without_speculation_has_no_block(
    server: tuple[FakeServer, str], tmp_path: Path
) -> None:
    fake, url = server
    fake.info = {"version": "0.5.23", "speculative_algorithm": None,
                 "speculative_num_draft_tokens": 8}  # fmt: skip
    _, facts = record_trace(url, steps=2, folder=tmp_path, waits=FAST)
    assert drafted_block(facts) is None


def _nothing(path: Path, data: bytes) -> None:
    """A server on another host: its file is not here."""


def _half(path: Path, data: bytes) -> None:
    path.write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(("write", "seen"), [(_nothing, "nothing"), (_half, "not whole")])
def test_a_trace_that_never_comes_is_said_and_the_profiler_stopped(
    server: tuple[FakeServer, str], tmp_path: Path, write: Callable[[Path, bytes], None], seen: str
) -> None:
    fake, url = server
    fake.write = write
    with pytest.raises(MachineError, match=seen) as caught:
        record_trace(url, steps=2, folder=tmp_path, waits=SHORT)
    assert "--trace" in (caught.value.hint or "")
    assert fake.calls[-1][0] == "/stop_profile"


def test_a_file_that_is_still_written_is_waited_for(
    server: tuple[FakeServer, str], tmp_path: Path
) -> None:
    fake, url = server

    def slowly(path: Path, data: bytes) -> None:
        path.write_bytes(data[:1000])
        threading.Timer(1.2, path.write_bytes, (data,)).start()

    fake.write = slowly
    (path,), _ = record_trace(url, steps=2, folder=tmp_path, waits=FAST)
    assert path.read_bytes() == fake.trace.read_bytes()


@pytest.mark.parametrize(
    ("path", "status", "message", "stopped"),
    [
        ("/server_info", 404, "has no /server_info", False),
        ("/start_profile", 500, "in progress", False),
        ("/generate", 400, "HTTP 400: bad request", True),
    ],
)
def test_refusals_are_errors_of_the_machine(
    server: tuple[FakeServer, str], tmp_path: Path, path: str, status: int, message: str,
    stopped: bool,
) -> None:  # fmt: skip
    fake, url = server
    fake.fail[path] = (status, "already in progress" if "profile" in path else "bad request")
    with pytest.raises(MachineError, match=message):
        record_trace(url, steps=2, folder=tmp_path, waits=FAST)
    assert ("/stop_profile" in [name for name, _ in fake.calls]) is stopped


def test_what_is_no_server(server: tuple[FakeServer, str], tmp_path: Path) -> None:
    fake, url = server
    with pytest.raises(MachineError, match="does not answer"):
        record_trace("http://127.0.0.1:9", steps=2, folder=tmp_path)
    fake.info = ["no", "object"]
    with pytest.raises(MachineError, match="no SGLang server"):
        record_trace(url, steps=2, folder=tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        record_trace(url, steps=2, folder=tmp_path / "none")
    with pytest.raises(InputError, match="not a server URL"):
        record_trace("ftp://x", steps=2)
