"""Small parts of the HTTP client: a URL, error texts, one error out of many, the rest of a body."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx

from specpilot_cli.errors import InputError, MachineError

_DRAIN_TIMEOUT_S = 0.5


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


def status_text(status: int, content: bytes) -> str:
    """An HTTP status with the beginning of its body, on one line."""
    shown = " ".join(content[:200].decode("utf-8", "replace").split())
    return f"HTTP {status}: {shown}" if shown else f"HTTP {status}"


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


async def drain(chunks: AsyncIterator[bytes]) -> None:
    """Read the end of a finished body, so that the connection can serve the next request."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_TIMEOUT_S):
            async for _ in chunks:
                pass
