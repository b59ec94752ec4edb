"""An HTTP client in a process of its own, so that nothing but the client runs beside its clock.

`ProcessEngine` starts a second Python with `main` of this module and speaks with it through a pipe:
length, then a pickle. The child owns the connections and the event loop, stamps every time on
the machine's monotonic clock, which both processes share, and measures its own cost. It ends when
the pipe does.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, BinaryIO, Self

from specpilot_cli.engines.base import ForcedScores, GenerateRequest, Generation
from specpilot_cli.engines.http_client import AsyncHttpEngine
from specpilot_cli.engines.http_parts import checked_url
from specpilot_cli.errors import MachineError, SpecPilotError

_LENGTH = struct.Struct("<Q")
_CALLS = ("health", "server_info", "flush_cache", "generate", "score")
_LAG_EVERY_S = 0.01
_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class _Reply:
    """What a call gave: a value or an error; the child's processor seconds and loop lag."""

    value: Any
    error: Exception | None
    cpu_s: float
    loop_lag_p99_s: float | None


class ProcessEngine:
    """`HttpEngine` in a process of its own; satisfies `EngineClient`. Use as a context manager.

    cpu_s: processor seconds of the client process, as of the last call. loop_lag_p99_s: how late
    its event loop ran what was due while the last `generate_many` went on, the worst one percent.
    """

    def __init__(
        self,
        base_url: str,
        timeout_s: float = 600.0,
        *,
        stall_timeout_s: float = 60.0,
        name: str = "server",
    ) -> None:
        self.base_url = checked_url(base_url)
        self.cpu_s = 0.0
        self.loop_lag_p99_s: float | None = None
        self._settings = (self.base_url, timeout_s, stall_timeout_s, name)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process; may be called twice."""
        self._end(within_s=_CLOSE_S)

    def _end(self, *, within_s: float) -> None:
        """Let the process end by itself within that time."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(within_s)
        process.kill()
        process.wait()
        process.stdout.close()

    def health(self) -> None:
        """Return when the server is up; raise MachineError otherwise."""
        self._call("health")

    def server_info(self) -> Mapping[str, Any]:
        """Return the server's resolved arguments and state."""
        found: Mapping[str, Any] = self._call("server_info")
        return found

    def flush_cache(self) -> None:
        """Empty the prefix cache; MeasurementInvalid when the server refuses."""
        self._call("flush_cache")

    def generate(self, request: GenerateRequest) -> Generation:
        """Stream one greedy answer and check it."""
        answer: Generation = self._call("generate", request)
        return answer

    def generate_many(
        self,
        requests: Sequence[GenerateRequest],
        *,
        concurrency: int,
        on_done: Callable[[Generation], None] | None = None,
    ) -> list[Generation]:
        """Answer all requests with `concurrency` in flight; see AsyncHttpEngine."""
        answers: list[Generation] = self._call("generate_many", list(requests), concurrency)
        if on_done is not None:
            for answer in answers:
                on_done(answer)
        return answers

    def score(self, input_ids: Sequence[int], start: int) -> ForcedScores:
        """Score the tokens `input_ids[start:]`, each given everything before it."""
        scores: ForcedScores = self._call("score", list(input_ids), start)
        return scores

    def _call(self, method: str, *arguments: Any) -> Any:
        if self._process is None:
            self._process = _start()
            self._call("connect", *self._settings)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            _write(self._process.stdin, (method, arguments))
            reply: _Reply = _read(self._process.stdout)
        except (EOFError, OSError) as error:
            self.close()
            raise MachineError(
                "the client process has died", hint="is the machine out of memory?"
            ) from error
        except BaseException:
            # An interrupted call leaves half a reply in the pipe, and a process that would go on
            # with its requests.
            self._end(within_s=0)
            raise
        self.cpu_s, self.loop_lag_p99_s = reply.cpu_s, reply.loop_lag_p99_s
        if reply.error is not None:
            raise reply.error
        return reply.value


def _start() -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C is for the parent, whose end closes the pipe.
    return subprocess.Popen(
        [sys.executable, "-c", "from specpilot_cli.engines.client_process import main; main()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip


def _write(stream: BinaryIO | Any, message: Any) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(_LENGTH.pack(len(data)) + data)
    stream.flush()


def _read(stream: BinaryIO | Any) -> Any:
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(head)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return pickle.loads(data)


class _Child:
    """The client process: one engine, one event loop."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.engine: AsyncHttpEngine | None = None
        self.lag_s: float | None = None

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Run one call to its end."""
        if method == "connect":
            url, timeout_s, stall_s, name = arguments
            self.engine = AsyncHttpEngine(url, timeout_s, stall_timeout_s=stall_s, name=name)
            return None
        if method == "generate_many":
            return self.runner.run(self._many(*arguments))
        assert method in _CALLS
        return self.runner.run(_await(getattr(self.engine, method), *arguments))

    async def _many(self, requests: list[GenerateRequest], concurrency: int) -> list[Generation]:
        assert self.engine is not None
        late: list[float] = []
        gc.collect()
        gc.disable()  # a collection of all that is alive would stop every stream
        watch = asyncio.create_task(_watch_loop(late))
        try:
            return await self.engine.generate_many(requests, concurrency=concurrency)
        finally:
            watch.cancel()
            gc.enable()
            late.sort()
            self.lag_s = late[int(0.99 * (len(late) - 1))] if late else None


async def _watch_loop(late: list[float]) -> None:
    """How much later than asked a timer comes back: what any stream waits for its turn."""
    while True:
        due_s = time.monotonic() + _LAG_EVERY_S
        await asyncio.sleep(_LAG_EVERY_S)
        late.append(max(0.0, time.monotonic() - due_s))


async def _await(method: Callable[..., Any], *arguments: Any) -> Any:
    return await method(*arguments)


def main() -> None:
    """Serve calls from stdin until it ends."""
    reading, writing = sys.stdin.buffer, sys.stdout.buffer
    child = _Child()
    while True:
        try:
            method, arguments = _read(reading)
        except EOFError:
            return
        value, failure = None, None
        try:
            value = child.call(method, arguments)
        except SpecPilotError as error:
            failure = error.with_traceback(None)
            failure.__cause__ = failure.__context__ = None
        _write(writing, _Reply(value, failure, time.process_time(), child.lag_s))
