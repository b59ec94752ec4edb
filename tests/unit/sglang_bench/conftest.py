"""The measuring scripts find each other as when one of them runs; a scripted SGLang server."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

_SCRIPTS = Path(__file__).parents[3] / "scripts"
sys.path.insert(0, str(_SCRIPTS))  # as for a script that runs there


class Scripted(ThreadingHTTPServer):
    """Streams tokens at `seconds` each; `per_step` tokens are one verify step.

    stop_after: ends streams early after so many tokens. whole: each event has all tokens so far.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seconds, self.per_step = 0.002, 1
        self.stop_after: int | None = None
        self.whole = False
        self.asked: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Scripted

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._send({"internal_states": [{"last_gen_throughput": 123.0}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body)
        sampling = body["sampling_params"]
        if sampling["max_new_tokens"] == 13:
            self.send_error(503)
        elif body.get("stream"):
            self._stream(sampling["max_new_tokens"], sampling["stream_interval"])
        else:
            self._send({"output_ids": [5], "meta_info": {"completion_tokens": 1}})

    def _send(self, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, tokens: int, every: int) -> None:
        self.send_response(200)
        self.end_headers()
        begin, sent = time.perf_counter(), 0
        for count in range(1, min(tokens, self.server.stop_after or tokens) + 1):
            if count != 1 and count - sent < every and count != tokens:
                continue
            time.sleep(max(0.0, begin + count * self.server.seconds - time.perf_counter()))
            new = list(range(0 if self.server.whole else sent, count))
            steps = (count - 1) // self.server.per_step
            meta = {"completion_tokens": count, "spec_verify_ct": steps}
            event = json.dumps({"output_ids": new, "meta_info": meta})
            self.wfile.write(f"data: {event}\n\n".encode())
            self.wfile.flush()
            sent = count
        self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    server = Scripted()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
