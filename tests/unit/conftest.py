"""A local HTTP server whose every answer a test scripts: kind, hostile, or slow."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest


class Exchange:
    """One request under way; the script answers through it."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        self._handler = handler
        self.path = handler.path
        length = int(handler.headers.get("Content-Length") or 0)
        raw = handler.rfile.read(length)
        self.body: dict[str, Any] = json.loads(raw) if raw else {}

    def reply(
        self, payload: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """A whole answer: JSON, or bytes as they are."""
        raw = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        self._handler.send_response(status)
        for name, value in (headers or {}).items():
            self._handler.send_header(name, value)
        self._handler.send_header("Content-Length", str(len(raw)))
        self._handler.end_headers()
        self._handler.wfile.write(raw)

    def open_stream(self, status: int = 200) -> None:
        self._handler.send_response(status)
        self._handler.send_header("Content-Type", "text/event-stream")
        self._handler.send_header("Transfer-Encoding", "chunked")
        self._handler.end_headers()

    def raw(self, data: bytes) -> None:
        self._handler.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self._handler.wfile.flush()

    def event(self, payload: Any) -> None:
        self.raw(b"data: " + json.dumps(payload).encode() + b"\n\n")

    def done(self) -> None:
        self.raw(b"data: [DONE]\n\n")
        self._handler.wfile.write(b"0\r\n\r\n")

    def stream(self, events: list[Any]) -> None:
        """A whole, well-formed stream."""
        self.open_stream()
        for payload in events:
            self.event(payload)
        self.done()

    def drop(self) -> None:
        """Close the connection in the middle of things."""
        self._handler.close_connection = True
        self._handler.connection.close()


Script = Callable[[Exchange], None]


class ScriptedServer:
    """Runs `script` for every request but `/health`, and `/flush_cache`, first refused N times."""

    def __init__(self) -> None:
        self.script: Script = lambda exchange: exchange.reply({}, status=404)
        self.seen: list[dict[str, Any]] = []
        self.in_flight = 0
        self.peak_in_flight = 0
        self.flush_refusals = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else each answer waits 40 ms for a delayed ACK

            def do_GET(self) -> None:
                outer._serve(self)

            def do_POST(self) -> None:
                outer._serve(self)

            def log_message(self, *args: Any) -> None:
                """Quiet."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 256

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that gives up is part of the tests; anything else is printed."""
                if not isinstance(sys.exc_info()[1], ConnectionError):
                    super().handle_error(request, client_address)

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        exchange = Exchange(handler)
        if exchange.path == "/health":
            exchange.reply(b"")
            return
        if exchange.path == "/flush_cache":
            self.flush_refusals -= 1
            if self.flush_refusals >= 0:
                exchange.reply(b"Flush cache failed.\n", status=400)
            else:
                exchange.reply(b"Cache flushed.\n")
            return
        with self._lock:
            self.seen.append(exchange.body)
            self.in_flight += 1
            self.peak_in_flight = max(self.peak_in_flight, self.in_flight)
        try:
            self.script(exchange)
        except (BrokenPipeError, ConnectionResetError, ValueError):
            handler.close_connection = True  # the client gave up first
        finally:
            with self._lock:
                self.in_flight -= 1

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def make_server() -> Iterator[Callable[[Script], ScriptedServer]]:
    """Start servers with a script each; all are closed at the end of the test."""
    servers: list[ScriptedServer] = []

    def start(script: Script) -> ScriptedServer:
        server = ScriptedServer()
        server.script = script
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()
