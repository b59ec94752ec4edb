"""A server that says nothing: every wait ends at the caller's limit, and the error says whose."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.http_client import HttpEngine
from specpilot_cli.errors import MachineError, MeasurementInvalid

LIMIT_S = 0.3
SILENT_S = 60
REQUEST = GenerateRequest("r-1", (5, 6), 4)
Call = Callable[[HttpEngine], object]

CONTROL: dict[str, Call] = {
    "health": lambda engine: engine.health(),
    "server_info": lambda engine: engine.server_info(),
    "flush_cache": lambda engine: engine.flush_cache(),
}
WORK: dict[str, Call] = {
    "generate": lambda engine: engine.generate(REQUEST),
    "generate_many": lambda engine: engine.generate_many([REQUEST] * 3, concurrency=2),
    "score": lambda engine: engine.score((5, 6, 7), 1),
}


@pytest.fixture(params=["never reads", "never answers", "trickles"])
def silent(request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of a server that accepts connections and gives no answer, in three ways."""
    over = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection:
            if request.param == "never reads":
                over.wait(SILENT_S)
                return
            connection.recv(65536)
            text = b"HTTP/1.1 200 OK\r\nX-Slow: " + b"x" * 200
            for byte in text if request.param == "trickles" else b"":
                if over.wait(0.05):
                    return
                connection.sendall(bytes([byte]))
            over.wait(SILENT_S)

    def accept() -> None:
        while not over.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            threading.Thread(target=_quietly, args=(answer, connection), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        thread = threading.Thread(target=accept)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        over.set()
        thread.join()


def _quietly(answer: Callable[[socket.socket], None], connection: socket.socket) -> None:
    try:
        answer(connection)
    except OSError:
        return  # the client gave up, as it should


def _timed_error(url: str, call: Call) -> tuple[Exception, float]:
    with HttpEngine(url, LIMIT_S, name="baseline server") as engine:
        started = time.monotonic()
        with pytest.raises((MachineError, MeasurementInvalid)) as caught:
            call(engine)
        return caught.value, time.monotonic() - started


@pytest.mark.parametrize("name", CONTROL)
def test_a_question_ends_at_the_limit(silent: str, name: str) -> None:
    error, elapsed_s = _timed_error(silent, CONTROL[name])
    assert isinstance(error, MachineError)
    assert LIMIT_S * 0.9 < elapsed_s < SILENT_S / 2
    assert error.message == f"the baseline server at {silent} did not answer /{name} within 0.3 s"
    assert error.hint


@pytest.mark.parametrize("name", WORK)
def test_a_request_ends_at_the_limit(silent: str, name: str) -> None:
    error, elapsed_s = _timed_error(silent, WORK[name])
    assert isinstance(error, MeasurementInvalid)
    assert LIMIT_S * 0.9 < elapsed_s < SILENT_S / 2
    assert "in 0.3 s" in error.message
    assert error.where is not None
    assert error.where.startswith(f"the baseline server at {silent}, request `")


def test_every_error_says_which_server(make_server: Callable[..., object]) -> None:
    answers = {
        "wants a key": (401, b"{}", "refuses this client: HTTP 401"),
        "is of another kind": (404, b"{}", "has no /generate"),
        "fails": (500, b"boom", "HTTP 500: boom"),
        "lies": (200, b"[]", "the stream ended before [DONE]"),
    }
    for status, body, message in answers.values():
        server = make_server(lambda exchange, s=status, b=body: exchange.reply(b, status=s))
        with (
            HttpEngine(server.url, 5.0, name="AR server") as engine,  # type: ignore[attr-defined]
            pytest.raises((MachineError, MeasurementInvalid)) as caught,
        ):
            engine.generate(REQUEST)
        text = str(caught.value)
        assert message in text
        assert f"the AR server at {engine.base_url}" in text
