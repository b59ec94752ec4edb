"""Parts of the HTTP clients: URLs, bodies of bounded size, error texts, the loop of requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import httpx

from specpilot_cli.engines import replies
from specpilot_cli.engines.base import GenerateRequest, Generation
from specpilot_cli.errors import InputError, MachineError, MeasurementInvalid

MAX_REPLY_BYTES: Final = 128 << 20
"""Of a whole body, and of one event of a stream. The scores of a million tokens take 90 MB."""

_DRAIN_TIMEOUT_S = 0.5


class ReplyTooLarge(Exception):
    """A server sends more than `MAX_REPLY_BYTES`; what came so far is dropped."""

    def __init__(self) -> None:
        super().__init__(f"the reply is longer than {MAX_REPLY_BYTES >> 20} MiB")


def check_size(n_bytes: int) -> None:
    """Raise `ReplyTooLarge` for a body, or an event of a stream, that is longer than one may be."""
    if n_bytes > MAX_REPLY_BYTES:
        raise ReplyTooLarge


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole answer."""

    status: int
    content: bytes


async def whole(response: httpx.Response) -> Reply:
    """Read a streamed response to its end; `ReplyTooLarge` as soon as it is.

    Raw bytes: the client asks for no compression, and a few bytes of it could become gigabytes.
    """
    content = bytearray()
    async for part in response.aiter_raw():
        content += part
        check_size(len(content))
    return Reply(response.status_code, bytes(content))


def checked_url(base_url: str) -> str:
    """`base_url` without a final slash. Raises `InputError` unless it can be a server's."""
    hint = "write it as http://host:port"
    try:
        url = httpx.URL(base_url)
        host, port = url.host, url.port
    except (httpx.InvalidURL, ValueError) as error:  # IDNA errors are ValueErrors
        raise InputError(f"`{base_url}` is not a valid URL: {error}", hint=hint) from error
    if url.scheme not in ("http", "https"):
        raise InputError(f"`{base_url}` is not a server URL", hint=hint)
    if not host or "%" in host:  # httpx escapes what no host name holds
        raise InputError(f"`{base_url}` names no host", hint=hint)
    if port is not None and not 1 <= port <= 65535:
        raise InputError(f"`{base_url}` names no port between 1 and 65535", hint=hint)
    if url.query or url.fragment:
        raise InputError(f"`{base_url}` has a query or fragment, a server has none", hint=hint)
    return str(url).rstrip("/")


def status_text(reply: Reply) -> str:
    """An HTTP status with the beginning of its body, on one line."""
    shown = " ".join(reply.content[:200].decode("utf-8", "replace").split())
    return f"HTTP {reply.status}: {shown}" if shown else f"HTTP {reply.status}"


def unreachable(who: str, error: Exception) -> MachineError:
    """That a server cannot be reached, or broke off."""
    return MachineError(
        f"{who} does not answer: {str(error) or type(error).__name__}",
        hint="is the server running, and is the port right?",
    )


@contextlib.contextmanager
def blamed(who: str) -> Iterator[None]:
    """Say which server gave a reply that voids the measurement."""
    try:
        yield
    except MeasurementInvalid as error:
        error.where = who if error.where is None else f"{who}, {error.where}"
        raise


def refusal(who: str, reply: Reply, request_id: str) -> MachineError | MeasurementInvalid:
    """What a status of `/generate` other than 200 means."""
    if reply.status in (httpx.codes.NOT_FOUND, httpx.codes.METHOD_NOT_ALLOWED):
        return MachineError(
            f"{who} has no /generate",
            hint="specpilot talks to SGLang's native API: is this an SGLang server?",
        )
    if reply.status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        return MachineError(
            f"{who} refuses this client: HTTP {reply.status}",
            hint="start the server without an API key",
        )
    return replies.invalid(request_id, status_text(reply))


def first_error(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure to report: a broken machine explains the bad replies beside it."""
    flat: list[BaseException] = []

    def walk(group: BaseExceptionGroup[BaseException]) -> None:
        for error in group.exceptions:
            if isinstance(error, BaseExceptionGroup):
                walk(error)
            else:
                flat.append(error)

    walk(errors)
    return next((error for error in flat if isinstance(error, MachineError)), flat[0])


async def closed_loop(
    generate: Callable[[GenerateRequest], Awaitable[Generation]],
    requests: Sequence[GenerateRequest],
    *,
    concurrency: int,
    on_done: Callable[[Generation], None] | None = None,
) -> list[Generation]:
    """Answer all requests with `concurrency` in flight, the next one sent as one completes.

    Results come in the order of `requests`. The first failure cancels the rest: a run with a hole
    in it has no meaning.
    """
    results: dict[int, Generation] = {}
    waiting = iter(enumerate(requests))

    async def worker() -> None:
        for index, request in waiting:
            results[index] = await generate(request)
            if on_done is not None:
                on_done(results[index])

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(requests))):
                group.create_task(worker())
    except BaseExceptionGroup as errors:
        raise first_error(errors) from errors
    return [results[index] for index in range(len(requests))]


async def drain(chunks: AsyncIterator[bytes]) -> None:
    """Read the end of a finished body, so that the connection can serve the next request."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_TIMEOUT_S):
            async for _ in chunks:
                pass


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop that leaves an interruption to the caller, who sees it, and prints nothing."""

    def report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), KeyboardInterrupt):
            loop.default_exception_handler(context)

    loop = asyncio.new_event_loop()
    loop.set_exception_handler(report)
    return loop
