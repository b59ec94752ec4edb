"""The benchmark's own transport: bodies in any pieces, connections used again, bad peers named."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpilot_cli.engines.lean_transport import LeanTransport, Stamped, _Body

CHUNKED = [(b"Transfer-Encoding", b"chunked")]
Servers = Callable[[Any], Any]


def chunked(parts: list[bytes]) -> bytes:
    framed = b"".join(b"%x;note=1\r\n%s\r\n" % (len(part), part) for part in parts)
    return framed + b"0\r\ntrailer: yes\r\n\r\n"


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for a, b in pairwise(edges):
        yield data[a:b]


@given(
    st.lists(st.binary(min_size=1, max_size=60), max_size=6),
    st.lists(st.integers(0, 400), max_size=12),
    st.binary(max_size=8),
)
def test_a_chunked_body_reads_the_same_in_any_pieces(
    parts: list[bytes], cuts: list[int], after: bytes
) -> None:
    body = _Body(CHUNKED, empty=False)
    found, extra = b"", b""
    for piece in pieces(chunked(parts) + after, cuts):
        if body.finished:
            extra += piece
            continue
        own, rest = body.feed(piece)
        found, extra = found + own, extra + rest
    assert body.finished
    assert (found, extra) == (b"".join(parts), after)


@pytest.mark.parametrize(
    "raw", [b"xyz\r\n", b"-1\r\n", b"\r\n", b"3\r\nabcdef\r\n", b"a" * 9000, b"fffffffff\r\n"]
)
def test_a_broken_chunk_is_refused(raw: bytes) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        _Body(CHUNKED, empty=False).feed(raw)


@pytest.mark.parametrize("length", [b"many", b"-5", b"", b"9" * 5000])
def test_a_length_that_is_no_number_is_refused(length: bytes) -> None:
    with pytest.raises(httpx.RemoteProtocolError, match="no number"):
        _Body([(b"content-length", length)], empty=False)


def fetch(url: str, count: int = 1, keepalive_s: float = 5.0, pause_s: float = 0.0) -> list[bytes]:
    async def main() -> list[bytes]:
        transport = LeanTransport(keepalive_s=keepalive_s)
        async with httpx.AsyncClient(transport=transport) as client:
            found = []
            for _ in range(count):
                found.append((await client.post(url, json={"n": 1})).content)
                await asyncio.sleep(pause_s)
            return found

    return asyncio.run(main())


async def serve_raw(replies: list[bytes]) -> tuple[asyncio.Server, str, list[int]]:
    """A server that answers its n-th request with the n-th reply; also: connections so far."""
    connections: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(1)
        while replies and await reader.readuntil(b"\r\n\r\n"):
            await reader.readexactly(7)
            reply = replies.pop(0)
            writer.write(reply)
            await writer.drain()
            if reply.endswith(b"CLOSE"):
                break
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/x", connections


def exchange(replies: list[bytes], **options: Any) -> tuple[list[bytes], int]:
    async def main() -> tuple[list[bytes], int]:
        count = len(replies)
        server, url, connections = await serve_raw(replies)
        async with server:
            found = await asyncio.to_thread(fetch, url, count, **options)
        return found, len(connections)

    return asyncio.run(main())


FIXED = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def test_a_connection_serves_many_requests() -> None:
    assert exchange([FIXED, FIXED, FIXED]) == ([b"ok"] * 3, 1)


def test_a_connection_that_idled_too_long_is_left_alone() -> None:
    assert exchange([FIXED, FIXED], keepalive_s=0.0, pause_s=0.01) == ([b"ok"] * 2, 2)


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        FIXED + b"more than promised",
    ],
    ids=["close", "1.0", "more"],
)
def test_a_connection_that_will_not_last_is_not_used_again(reply: bytes) -> None:
    assert exchange([reply, FIXED]) == ([b"ok"] * 2, 2)


def test_interim_answers_are_passed_over() -> None:
    assert exchange([b"HTTP/1.1 100 Continue\r\n\r\n" + FIXED]) == ([b"ok"], 1)


def test_a_body_without_length_ends_with_the_connection() -> None:
    assert exchange([b"HTTP/1.1 200 OK\r\n\r\nall CLOSE"])[0] == [b"all CLOSE"]


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nCLOSE", "peer closed connection without"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nCLOSE", "without sending"),
        (b"CLOSE", "before answering"),
        (b"SSH-2.0-x\r\n\r\nCLOSE", "illegal status line"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 50 + FIXED, "without end"),
        (b"HTTP/1.1 200 OK\r\nno colon\r\n\r\nCLOSE", "illegal header line"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000 + b"CLOSE", "too long"),
    ],
)
def test_an_answer_that_breaks_off_is_named(reply: bytes, words: str) -> None:
    with pytest.raises(httpx.RemoteProtocolError, match=words):
        exchange([reply])


def test_a_refused_connection_says_so() -> None:
    with pytest.raises(httpx.ConnectError, match="Connection refused"):
        fetch("http://127.0.0.1:9/x")


def test_parts_carry_the_time_they_arrived(make_server: Servers) -> None:
    server = make_server(lambda exchange: exchange.stream([{"a": 1}]))

    async def main() -> list[bytes]:
        transport = LeanTransport(keepalive_s=1.0)
        async with (
            httpx.AsyncClient(transport=transport) as client,
            client.stream("POST", f"{server.url}/generate", json={}) as response,
        ):
            return [part async for part in response.aiter_raw()]

    for part in asyncio.run(main()):
        assert isinstance(part, Stamped)
        assert part.at_s > 0.0
