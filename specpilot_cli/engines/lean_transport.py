"""HTTP/1.1 for httpx with little work for each chunk and each request.

A benchmark's client must not be what is measured. httpx's own transport searches its pool and asks
the kernel about every idle connection whenever a request starts: with 48 streams a request waits
200 ms for its turn. This one keeps a stack of idle connections and parses in the event loop's own
callback. Plain http only; no redirects, proxies or upgrades.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator

import httpx

_HEAD_LIMIT = 64 * 1024
_LINE_LIMIT = 4096
_MOST_DIGITS = 18
_MOST_INTERIM = 16
_PAUSE_BYTES, _RESUME_BYTES = 4 << 20, 1 << 20

Origin = tuple[str, int]
Headers = list[tuple[bytes, bytes]]


class Stamped(bytes):
    """Bytes with the moment at which the last of them arrived, on the monotonic clock.

    The event loop hands over what has arrived on all connections before anyone works on it, so this
    time does not contain the work on other streams.
    """

    at_s: float


class _Body:
    """Decodes one body as it arrives: by chunks, by length, or up to the connection's end."""

    def __init__(self, headers: Headers, *, empty: bool) -> None:
        self.finished = False
        self._left: int | None = None  # bytes of the body or of the current chunk still to come
        self._chunked = self._after_data = self._trailers = False
        self._line = bytearray()
        known = {name.lower(): value.strip().lower() for name, value in headers}
        if empty:
            self._left, self.finished = 0, True
        elif known.get(b"transfer-encoding", b"").endswith(b"chunked"):
            self._chunked = True
        elif b"content-length" in known:
            length = known[b"content-length"]
            if not length.isdigit() or len(length) > _MOST_DIGITS:
                raise httpx.RemoteProtocolError("the Content-Length is no number of bytes")
            self._left = int(length)
            self.finished = self._left == 0

    @property
    def ends_with_connection(self) -> bool:
        """Whether only the connection's end ends this body."""
        return not self._chunked and self._left is None

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """The body's bytes in `data`, and what belongs to whatever follows the body."""
        if not self._chunked:
            if self._left is None:
                return data, b""
            own = data[: self._left]
            self._left -= len(own)
            self.finished = self._left == 0
            return own, data[len(own) :]
        found, view = [], memoryview(data)
        while view and not self.finished:
            if self._left:
                part = view[: self._left]
                found.append(part)
                self._left -= len(part)
                view = view[len(part) :]
                self._after_data = self._left == 0
            else:
                view = self._take_line(view)
        return b"".join(found), bytes(view)

    def _take_line(self, view: memoryview) -> memoryview:
        """Consume up to a line's end: the end of a chunk, a size, or a trailer."""
        raw = bytes(view[: _LINE_LIMIT + 2])
        end = raw.find(b"\n")
        self._line += raw if end < 0 else raw[: end + 1]
        if len(self._line) > _LINE_LIMIT:
            raise httpx.RemoteProtocolError("a line of the chunked body is too long")
        if end < 0:
            return view[len(raw) :]
        line = bytes(self._line).strip()
        self._line.clear()
        if self._trailers:
            self.finished = not line
        elif self._after_data:
            if line:
                raise httpx.RemoteProtocolError("a chunk is longer than its size says")
            self._after_data = False
        else:
            self._left = _chunk_size(line)
            self._trailers = self._left == 0
        return view[end + 1 :]


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not digits or digits.strip(b"0123456789abcdefABCDEF") or len(digits) > 8:
        raise httpx.RemoteProtocolError(f"illegal chunk header: {line[:40]!r}")
    return int(digits, 16)


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self.idle_since_s = 0.0
        self.closed = False
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._parts: deque[bytes] = deque()
        self._held = 0
        self._arrived_s = 0.0
        self._paused = False
        self._body: _Body | None = None
        self._keep = True
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    # -- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the socket."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """The peer, or this side, has closed."""
        self.closed = True
        if exc is not None:
            self._error = self._error or httpx.ReadError(str(exc) or type(exc).__name__)
        elif self._body is not None and self._body.ends_with_connection:
            self._body.finished = True
        self._wake()

    def data_received(self, data: bytes) -> None:
        """Bytes of a head or of a body."""
        if self._body is None:
            self._received += data
        else:
            self._take(data)
        self._wake()

    # -- called by the transport

    async def send(self, request: httpx.Request) -> tuple[int, Headers]:
        """Send a request; return the status and the headers of its answer."""
        self._body, self._error = None, None
        self._received.clear()
        body = await request.aread()
        lines = [b"%s %s HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
        lines += [name + b": " + value for name, value in request.headers.raw]
        assert self._transport is not None
        self._transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        interim = 0
        while True:
            head, found, rest = bytes(self._received).partition(b"\r\n\r\n")
            if found:
                status, version, headers = _parse_head(head)
                self._received = bytearray(rest)
                if status >= 200:
                    break
                interim += 1
                if interim > _MOST_INTERIM:  # each copies what came with it: a flood would not end
                    raise httpx.RemoteProtocolError("the server answers `wait` without end")
                continue
            if len(self._received) > _HEAD_LIMIT:
                raise httpx.RemoteProtocolError("the head of the answer is too long")
            self._check_open("before answering")
            await self._wait()
        empty = request.method == "HEAD" or status in (204, 304)
        self._body = _Body(headers, empty=empty)
        known = {name.lower(): value.lower() for name, value in headers}
        self._keep = version == b"HTTP/1.1" and known.get(b"connection") != b"close"
        pending = bytes(self._received)
        self._received.clear()
        if pending:
            self._take(pending)
        if self.closed and self._body.ends_with_connection:
            self._body.finished = True
        return status, headers

    async def parts(self) -> AsyncIterator[Stamped]:
        """The body; each part is everything that has arrived by then."""
        assert self._body is not None
        while True:
            if self._parts:
                part = Stamped(b"".join(self._parts))
                part.at_s = self._arrived_s
                self._parts.clear()
                self._held = 0
                if self._paused and self._transport is not None and not self.closed:
                    self._paused = False
                    self._transport.resume_reading()
                yield part
            elif self._error is not None:
                raise self._error
            elif self._body.finished:
                return
            else:
                self._check_open("without sending the complete message body")
                await self._wait()

    @property
    def reusable(self) -> bool:
        """Whether the answer is complete and the peer keeps the connection."""
        done = (
            self._body is not None and self._body.finished and not self._body.ends_with_connection
        )
        return done and self._keep and not self.closed and self._error is None

    def close(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()
        self.closed = True

    def _take(self, data: bytes) -> None:
        assert self._body is not None
        try:
            own, extra = self._body.feed(data)
        except httpx.RemoteProtocolError as error:
            self._error = error
            return
        if extra or (self._body.finished and not own and data):
            self._keep = self._keep and not extra
        if own:
            self._parts.append(own)
            self._arrived_s = time.monotonic()
            self._held += len(own)
            if self._held > _PAUSE_BYTES and not self._paused and self._transport is not None:
                self._paused = True
                self._transport.pause_reading()

    def _check_open(self, when: str) -> None:
        if self._error is not None:
            raise self._error
        if self.closed:
            raise httpx.RemoteProtocolError(f"peer closed connection {when}")

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _parse_head(head: bytes) -> tuple[int, bytes, Headers]:
    first, *lines = head.split(b"\r\n")
    version, _, rest = first.partition(b" ")
    code = rest[:3]
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or len(code) != 3 or not code.isdigit():
        raise httpx.RemoteProtocolError(f"illegal status line: {first[:60]!r}")
    headers = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name.strip():
            raise httpx.RemoteProtocolError(f"illegal header line: {line[:60]!r}")
        headers.append((name.strip(), value.strip()))
    return int(code), version, headers


class _Stream(httpx.AsyncByteStream):
    """A body that gives its connection back when it is read to the end."""

    def __init__(self, owner: LeanTransport, origin: Origin, connection: _Connection) -> None:
        self._owner, self._origin, self._connection = owner, origin, connection

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._connection.parts():
            yield part

    async def aclose(self) -> None:
        """Keep the connection if the answer is complete, close it otherwise."""
        self._owner.release(self._origin, self._connection)


def lean(base_url: str, *, keepalive_s: float) -> LeanTransport | None:
    """This transport for a server that it can talk to; None leaves the choice to httpx."""
    return LeanTransport(keepalive_s=keepalive_s) if base_url.startswith("http://") else None


class LeanTransport(httpx.AsyncBaseTransport):
    """Plain-http connections to any number of servers, each kept `keepalive_s` while idle."""

    def __init__(self, *, keepalive_s: float) -> None:
        self._keepalive_s = keepalive_s
        self._idle: dict[Origin, list[_Connection]] = {}
        self._busy: set[_Connection] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request; the body of the response is read as it arrives."""
        origin = (request.url.host, request.url.port or 80)
        connection = self._take_idle(origin) or await self._connect(origin, request)
        self._busy.add(connection)
        try:
            status, headers = await connection.send(request)
        except BaseException:
            self._busy.discard(connection)
            connection.close()
            raise
        return httpx.Response(status, headers=headers, stream=_Stream(self, origin, connection))

    def release(self, origin: Origin, connection: _Connection) -> None:
        """Take a connection back."""
        self._busy.discard(connection)
        if connection.reusable:
            connection.idle_since_s = time.monotonic()
            self._idle.setdefault(origin, []).append(connection)
        else:
            connection.close()

    async def aclose(self) -> None:
        """Close every connection."""
        for connection in [*self._busy, *(c for idle in self._idle.values() for c in idle)]:
            connection.close()
        self._busy.clear()
        self._idle.clear()

    def _take_idle(self, origin: Origin) -> _Connection | None:
        idle = self._idle.get(origin, [])
        while idle:
            connection = idle.pop()  # the one used last is the least likely to be closed
            if connection.closed:
                continue
            if time.monotonic() - connection.idle_since_s <= self._keepalive_s:
                return connection
            connection.close()
        return None

    @staticmethod
    async def _connect(origin: Origin, request: httpx.Request) -> _Connection:
        loop = asyncio.get_running_loop()
        limit_s = request.extensions.get("timeout", {}).get("connect")
        try:
            async with asyncio.timeout(limit_s):
                _, connection = await loop.create_connection(_Connection, *origin)
        except TimeoutError as error:
            raise httpx.ConnectTimeout(f"no connection within {limit_s:g} s") from error
        except OSError as error:
            known = error.errno is not None and error.errno > 0  # name errors have others
            reason = os.strerror(error.errno or 0) if known else str(error)
            raise httpx.ConnectError(reason) from error
        return connection
