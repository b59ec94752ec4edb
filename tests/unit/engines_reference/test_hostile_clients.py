"""Clients that send nonsense or leave: a clear refusal or silence in the log, never a traceback."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specpilot_cli.engines.process import bind_port
from specpilot_cli.engines.reference.launch import serve_command
from specpilot_cli.engines.reference.payload import parse_call
from specpilot_cli.engines.reference.record import record_dense
from specpilot_cli.engines.reference.spec import SpecConfig
from specpilot_cli.errors import InputError
from specpilot_cli.schema.prompts import Prompt

PROMPT = list(range(3, 20))
GREEDY = {"temperature": 0, "max_new_tokens": 480, "ignore_eos": True}


@pytest.fixture(scope="module")
def plain_engine(pair: Any) -> Any:
    """The pair without speculation."""
    return pair.engine("ar", with_drafter=False)


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ({"sampling_params": {"temperature": -1, "top_k": 1}}, "temperature"),
        ({"sampling_params": {"temperature": -1e-9, "top_k": 1}}, "temperature"),
        ({"sampling_params": {"temperature": float("nan")}}, "temperature"),
        ({"sampling_params": {"temperature": float("inf"), "top_k": 1}}, "temperature"),
        ({"sampling_params": {**GREEDY, "top_p": float("nan")}}, "top_p"),
        ({"rid": "x" * 257}, "rid"),
        ({"rid": ""}, "rid"),
        ({"rid": ["a", "x" * 257], "input_ids": [[1], [2]]}, "rid"),
        ({"rid": 5}, "rid"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_values_out_of_range_are_refused(plain_engine: Any, body: dict[str, Any], key: str) -> None:
    with pytest.raises(InputError, match=key):
        parse_call({"input_ids": PROMPT, "sampling_params": GREEDY, **body}, plain_engine)


def test_the_longest_id_is_taken(plain_engine: Any) -> None:
    body = {"input_ids": PROMPT, "sampling_params": GREEDY, "rid": "x" * 256}
    assert parse_call(body, plain_engine).items[0].job.request_id == "x" * 256


class TestBlock:
    """A draft block longer than the model's context, wherever it is given."""

    def test_serving(self, pair: Any) -> None:
        for mode in ("chain", "tree"):
            assert pair.engine(mode, block=512).spec.block == 512
            with pytest.raises(InputError, match="block of 513 is longer than the model's context"):
                pair.engine(mode, block=513)

    def test_recording(self, pair: Any) -> None:
        prompt = Prompt(request_id="a", benchmark="b", text="c", max_new_tokens=4)
        with pytest.raises(InputError, match="block of 513") as caught:
            record_dense(pair.engine("ar", with_drafter=True), [prompt], 513)
        assert caught.value.where == "--block"

    @pytest.mark.parametrize("option", ["--block", "--tree-block"])
    def test_profiling_refuses_before_it_measures(self, pair: Any, option: str) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "specpilot_cli", "profile", "--target", str(pair.target),
             "--drafter", str(pair.drafter), option, "513"],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 2
        assert "a draft block of 513 is longer" in done.stderr
        assert f"  at {option}\n\nhint: " in done.stderr
        assert "profiling steps" not in done.stderr


@pytest.fixture
def served(pair: Any, tmp_path: Path) -> Iterator[tuple[int, subprocess.Popen[bytes], Path]]:
    """A `specpilot serve` process: its port, itself, its log."""
    with bind_port(0) as bound:
        port = bound.getsockname()[1]
    log = tmp_path / "log"
    command = serve_command(pair.target, None, SpecConfig(), port=port)
    with log.open("wb") as stream, subprocess.Popen(command, stdout=stream, stderr=stream) as child:
        try:
            deadline = time.monotonic() + 60
            while _get(port, "/health") is None:
                assert child.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield port, child, log
        finally:
            child.kill()


def _get(port: int, path: str) -> bytes | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().read()
    except OSError:
        return None
    finally:
        connection.close()


def _message(stream: bool, *, prompts: int = 1, tokens: int = 480, declared: int = 0) -> bytes:
    params = {**GREEDY, "max_new_tokens": tokens}
    ids = PROMPT if prompts == 1 else [PROMPT] * prompts
    body = json.dumps({"input_ids": ids, "sampling_params": params, "stream": stream}).encode()
    head = f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {declared or len(body)}\r\n\r\n"
    return head.encode() + body


def _close(connection: socket.socket) -> None:
    connection.close()


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _leave(port: int, data: bytes, leave: Callable[[socket.socket], None], after_s: float) -> None:
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    connection.sendall(data)
    time.sleep(after_s)
    leave(connection)


def test_clients_that_leave_at_any_moment_leave_no_noise(
    served: tuple[int, subprocess.Popen[bytes], Path],
) -> None:
    port, child, log = served
    for leave in (_close, _reset):
        _leave(port, b"", leave, 0.05)
        _leave(port, b"POST /gen", leave, 0.05)
        for stream in (True, False):
            _leave(port, _message(stream, declared=100_000), leave, 0.1)
            for after_s in (0.0, 0.02, 0.2):
                _leave(port, _message(stream), leave, after_s)
                _leave(port, _message(stream, prompts=3), leave, after_s)
            for after_s in (0.0, 0.005, 0.01, 0.02, 0.04):  # about when a short answer ends
                _leave(port, _message(stream, tokens=2), leave, after_s)
    deadline = time.monotonic() + 60
    while b'"num_running_reqs":0,"num_waiting_reqs":0' not in (_get(port, "/server_info") or b""):
        assert time.monotonic() < deadline, "abandoned requests still run"
        time.sleep(0.1)
    _leave(port, _message(True), _close, 0.1)
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=60) == 130
    text = log.read_text(encoding="utf-8")
    assert text.startswith("serving `")
    assert not re.search("Traceback|Error|Exception|never retrieved|CRITICAL", text), text
