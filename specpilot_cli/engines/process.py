"""Start a server for the length of a `with` block; leave none behind, whatever happens.

The server runs in its own session under `guard.py`, which ends it as soon as this process is
gone. `ServerProcess` waits for `/health`, turns an early death into an error that shows the end
of the log, and stops the whole process group on exit.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from specpilot_cli.engines.listeners import listens
from specpilot_cli.errors import MachineError
from specpilot_cli.ui import Reporter, SilentReporter

_GUARD = Path(__file__).with_name("guard.py")
_LOG_LINES, _LOG_WIDTH = 15, 300
_POLL_S = 0.1
_NOTE_EVERY_S = 15.0


class ServerProcess:
    """A server that lives as long as its `with` block.

    `command` is started with its output in `log_path`, and is ready once `GET /health` on
    `host:port` answers 200. Entering raises `MachineError` if the port is taken, if the command
    ends early, or if it is not ready after `ready_timeout_s` seconds.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        port: int,
        log_path: Path,
        name: str = "server",
        host: str = "127.0.0.1",
        env: Mapping[str, str] | None = None,
        ready_timeout_s: float = 600.0,
        stop_timeout_s: float = 10.0,
        reporter: Reporter = SilentReporter(),
    ) -> None:
        self.command = list(command)
        self.port, self.host, self.name = port, host, name
        self.log_path = log_path
        self._env = dict(env or {})
        self._ready_timeout_s, self._stop_timeout_s = ready_timeout_s, stop_timeout_s
        self._reporter = reporter
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: int | None = None
        self._log: IO[bytes] | None = None

    @property
    def base_url(self) -> str:
        """Where the server listens."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def running(self) -> bool:
        """Whether the server's process is alive."""
        return self._process is not None and self._process.poll() is None

    def owns(self, pid: int) -> bool:
        """Whether process `pid` is this server or one of its children: they share a session."""
        if self._process is None:
            return False
        try:
            return os.getsid(pid) == self._process.pid
        except (ProcessLookupError, PermissionError, OverflowError):
            return False

    def listens(self) -> bool | None:
        """Whether this server is the one that listens on its port; None where nothing tells."""
        return None if self._process is None else listens(self.port, self._process.pid)

    def __enter__(self) -> Self:
        check_port_free(self.port, host=self.host)
        try:
            self._start()
            self._wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def check(self) -> None:
        """Raise `MachineError` with the end of the log if the server has died."""
        if self._process is None or self.running:
            return
        raise MachineError(
            f"the {self.name} ended with status {self._process.returncode}{self._log_tail()}",
            hint=f"the whole log is in {self.log_path}",
        )

    def stop(self) -> None:
        """End the server and everything it started; may be called twice."""
        process, self._process = self._process, None
        if process is not None:
            if process.poll() is None:
                self._signal(process, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(self._stop_timeout_s)
            # children of a server may outlive it: the group goes as a whole
            self._signal(process, signal.SIGKILL)
            process.wait()
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def _start(self) -> None:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = self.log_path.open("wb")
        read_end, self._pipe = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_GUARD), str(read_end), "--", *self.command],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._env},
                pass_fds=(read_end,),
                start_new_session=True,
            )
        finally:
            os.close(read_end)

    def _wait_ready(self) -> None:
        started = noted = time.monotonic()
        while True:
            self.check()
            if _healthy(self.host, self.port):
                return
            now = time.monotonic()
            if now - started > self._ready_timeout_s:
                raise MachineError(
                    f"the {self.name} was not ready after {self._ready_timeout_s:g} s"
                    f"{self._log_tail()}",
                    hint=f"the whole log is in {self.log_path}",
                )
            if now - noted > _NOTE_EVERY_S:
                noted = now
                self._reporter.note(f"waiting for the {self.name} ({now - started:.0f} s)")
            time.sleep(_POLL_S)

    def _log_tail(self) -> str:
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        # SGLang prints all its arguments in one line of 12,000 characters
        return "".join(
            f"\n  {line if len(line) <= _LOG_WIDTH else f'{line[:_LOG_WIDTH]}...'}"
            for line in lines[-_LOG_LINES:]
        )

    @staticmethod
    def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)


def check_port_free(port: int, *, host: str = "127.0.0.1") -> None:
    """Raise `MachineError` unless a server can listen on `host:port`."""
    bind_port(port, host=host).close()


def bind_port(port: int, *, host: str = "127.0.0.1") -> socket.socket:
    """A socket bound to `host:port`, not listening yet, so that it refuses connections.

    Port 0 takes any free port. Raises `MachineError` if the port is taken or may not be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns off Nagle's delay (40 ms a reply) only where the protocol is named
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    # without it, connections of the previous server in TIME_WAIT would block the port
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise MachineError(
                f"port {port} on {host} is already in use",
                hint="stop the server that uses it, or choose another --port",
            ) from error
        raise MachineError(
            f"cannot listen on {host}:{port}: {error.strerror}", hint="choose another --port"
        ) from error
    return bound


def _healthy(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=5.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
