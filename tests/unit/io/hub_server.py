"""A small stand-in for the Hugging Face Hub: model information, file tree and files over HTTP."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "acme/tiny"


class Hub:
    """One repository at one commit. `requests` lists (method, path) of what was asked."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.requests: list[tuple[str, str]] = []
        self.error: tuple[int, dict[str, str]] | None = None
        self.url = ""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for one path."""
        if self.error is not None:
            return self.error[0], self.error[1], b"{}"
        if not path.startswith((f"/api/models/{REPO}/", f"/{REPO}/resolve/")):
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if path.endswith(("/no-such-branch", "/revision/no-such-branch")):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        if "/revision/" in path:
            siblings = [{"rfilename": name} for name in self.files]
            return 200, {}, _json({"id": REPO, "sha": COMMIT, "siblings": siblings})
        if "/tree/" in path:
            return 200, {}, _json([_entry(name, data) for name, data in self.files.items()])
        data = self.files.get(path.partition("/resolve/")[2].partition("/")[2])
        if data is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        return 200, {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": COMMIT}, data


@contextmanager
def serve(files: dict[str, bytes]) -> Iterator[Hub]:
    """Serve `files` as the one repository, at `hub.url`, until the block ends."""
    hub = Hub(files)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(with_body=True)

        def do_HEAD(self) -> None:
            self._reply(with_body=False)

        def _reply(self, *, with_body: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path))
            status, headers, body = hub.answer(path)
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _entry(name: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
