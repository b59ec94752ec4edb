"""Servers live exactly as long as their `with` block, however the parent ends."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from specpilot_cli.engines.process import ServerProcess, bind_port, check_port_free
from specpilot_cli.errors import MachineError
from tests.ports import free_port

# A server with a child of its own, as inference servers have; both write their ids to files.
SERVER = """
import http.server, os, pathlib, subprocess, sys, time
folder, port = pathlib.Path(sys.argv[1]), int(sys.argv[2])
if "stubborn" in sys.argv:
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(folder / "child").write_text(str(child.pid))
(folder / "server").write_text(str(os.getpid()))

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass

print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
DEADLINE_S = 15.0


def _server(folder: Path, port: int, *extra: str) -> list[str]:
    return [sys.executable, "-c", SERVER, str(folder), str(port), *extra]


def _process(folder: Path, port: int, *extra: str) -> ServerProcess:
    return ServerProcess(
        _server(folder, port, *extra), port=port, log_path=folder / "log.txt", name="test server",
        stop_timeout_s=1.0,
    )  # fmt: skip


def _alive(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def _pids(folder: Path) -> list[int]:
    return [int((folder / name).read_text()) for name in ("server", "child")]


def _wait(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("extra", [(), ("stubborn",)], ids=["polite", "ignores-sigterm"])
def test_leaving_the_block_ends_server_and_children(tmp_path: Path, extra: tuple[str]) -> None:
    port = free_port()
    with _process(tmp_path, port, *extra) as server:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/anything")
        assert connection.getresponse().status == 200
        connection.close()
        assert server.running
        assert server.base_url == f"http://127.0.0.1:{port}"
        pids = _pids(tmp_path)
        assert all(_alive(pid) for pid in pids)
    assert not server.running
    assert _wait(lambda: not any(_alive(pid) for pid in pids))
    check_port_free(port)
    assert "listening" in (tmp_path / "log.txt").read_text()


def test_an_error_inside_the_block_ends_the_server(tmp_path: Path) -> None:
    def fail() -> None:
        with _process(tmp_path, free_port()):
            assert all(_alive(pid) for pid in _pids(tmp_path))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    pids = _pids(tmp_path)
    assert _wait(lambda: not any(_alive(pid) for pid in pids))


def test_killing_the_parent_leaves_nothing(tmp_path: Path) -> None:
    port = free_port()
    program = f"""
        import pathlib, sys, time
        from specpilot_cli.engines.process import ServerProcess
        command = {_server(tmp_path, port)!r}
        log = pathlib.Path({str(tmp_path)!r}) / "log.txt"
        with ServerProcess(command, port={port}, log_path=log):
            (log.parent / "ready").touch()
            time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)]) as parent:
        assert _wait(lambda: (tmp_path / "ready").exists())
        pids = _pids(tmp_path)
        parent.kill()
    assert _wait(lambda: not any(_alive(pid) for pid in pids))
    check_port_free(port)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel signal is Linux's")
def test_killing_the_guard_ends_the_server(tmp_path: Path) -> None:
    with _process(tmp_path, free_port()) as server:
        pid = _pids(tmp_path)[0]
        guard = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        os.kill(guard, signal.SIGKILL)
        assert _wait(lambda: not _alive(pid))
        assert _wait(lambda: not server.running)


def test_the_server_outlives_the_thread_that_started_it(tmp_path: Path) -> None:
    process = _process(tmp_path, free_port())
    starter = threading.Thread(target=process.__enter__)
    starter.start()
    starter.join()
    try:
        time.sleep(0.5)
        process.check()
        assert _alive(_pids(tmp_path)[0])
    finally:
        process.stop()


def test_occupied_port(tmp_path: Path) -> None:
    with bind_port(0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(MachineError, match=f"port {port} .* already in use") as caught:
            _process(tmp_path, port).__enter__()
    assert caught.value.hint
    assert not (tmp_path / "server").exists()


def test_replies_do_not_wait_for_nagle() -> None:
    """A server on the bound socket sends small packets at once: TCP_NODELAY is set."""

    async def accepted_option() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def accept(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted = writer.get_extra_info("socket")
            found.set_result(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        bound = bind_port(0)
        async with await asyncio.start_server(accept, sock=bound):
            _, writer = await asyncio.open_connection(*bound.getsockname())
            option = await found
            writer.close()
        return option

    assert asyncio.run(accepted_option()) != 0


def test_early_death_shows_the_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('weights are missing'); raise SystemExit(9)"]
    process = ServerProcess(command, port=free_port(), log_path=tmp_path / "log.txt", name="stock")
    with pytest.raises(MachineError, match=r"(?s)stock ended with status 9.*weights are missing"):
        process.__enter__()


def test_a_long_line_of_the_log_is_cut(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('args', 'x' * 5000); raise SystemExit(9)"]
    process = ServerProcess(command, port=free_port(), log_path=tmp_path / "log.txt")
    with pytest.raises(MachineError, match=r"args xxx.*\.\.\.$") as caught:
        process.__enter__()
    assert len(str(caught.value)) < 500


def test_missing_command(tmp_path: Path) -> None:
    command = [str(tmp_path / "no-such-program")]
    process = ServerProcess(command, port=free_port(), log_path=tmp_path / "log.txt")
    with pytest.raises(MachineError, match=r"(?s)status 127.*no-such-program"):
        process.__enter__()


def test_a_server_that_never_gets_ready(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(600)"]
    process = ServerProcess(
        command, port=free_port(), log_path=tmp_path / "log.txt", ready_timeout_s=3.0
    )
    with pytest.raises(MachineError, match=r"(?s)not ready after 3 s.*loading"):
        process.__enter__()
    assert not process.running


def test_a_death_in_use_is_noticed(tmp_path: Path) -> None:
    with _process(tmp_path, free_port()) as server:
        os.kill(_pids(tmp_path)[0], signal.SIGKILL)
        assert _wait(lambda: not server.running)
        with pytest.raises(MachineError, match="status 137"):
            server.check()


def test_an_address_with_colons_is_bracketed_in_the_url(tmp_path: Path) -> None:
    server = ServerProcess(["true"], port=31, host="::1", log_path=tmp_path / "log")
    assert server.base_url == "http://[::1]:31"
