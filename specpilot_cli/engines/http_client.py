"""HTTP clients for a server with SGLang's endpoints.

`AsyncHttpEngine` does the work; `HttpEngine` runs it on a private event loop for code that
is not async. Requests are never retried: a repeated request would be timed and audited as
if it were the first. One process, no connection limit, no proxies from the environment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from specpilot_cli.engines import replies, wire
from specpilot_cli.engines.base import ForcedScores, GenerateRequest, Generation
from specpilot_cli.engines.http_parts import (
    Reply,
    ReplyTooLarge,
    blamed,
    checked_url,
    closed_loop,
    drain,
    new_loop,
    refusal,
    status_text,
    unreachable,
    whole,
)
from specpilot_cli.engines.lean_transport import Stamped, lean
from specpilot_cli.engines.sse import SseEvent, SseParser
from specpilot_cli.errors import InputError, MachineError, MeasurementInvalid

_T = TypeVar("_T")

_CONTROL_TIMEOUT_S = 60.0  # at most; a shorter limit of requests holds here too
_CONNECT_TIMEOUT_S = 5.0
_IDLE_TIMEOUT_S = 5.0
# Servers drop idle connections after 5 s (uvicorn's default). Dropping ours earlier means that
# no request is ever sent on a connection that is just being closed, and lost without a retry.
_KEEPALIVE_S = 2.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long the client waits, in seconds.

    `request_s` bounds one whole request, queueing included. `stall_s` bounds the gap
    between two events of a stream once its first tokens are there.
    """

    request_s: float = 600.0
    stall_s: float = 60.0


class AsyncHttpEngine:
    """A server that speaks SGLang's HTTP API, for asyncio code.

    Use as an async context manager. Raises MachineError when the server cannot be
    reached, MeasurementInvalid when it answers with anything but a complete, consistent
    reply within the time limits. Errors call the server by its role, `name`. `watch` is told the
    request's id and the arrival of every event of a streamed answer, on the monotonic clock.
    """

    def __init__(
        self,
        base_url: str,
        timeout_s: float = 600.0,
        *,
        stall_timeout_s: float = 60.0,
        name: str = "server",
        watch: Callable[[str, float], None] | None = None,
    ) -> None:
        self._watch = watch
        self.base_url = checked_url(base_url)
        self._who = f"the {name} at {self.base_url}"
        self._timeouts = Timeouts(timeout_s, min(stall_timeout_s, timeout_s))
        self._client = httpx.AsyncClient(
            base_url=self.base_url,
            limits=httpx.Limits(
                max_connections=None,
                max_keepalive_connections=None,
                keepalive_expiry=_KEEPALIVE_S,
            ),
            timeout=httpx.Timeout(None, connect=min(_CONNECT_TIMEOUT_S, timeout_s)),
            headers={"Accept-Encoding": "identity"},
            trust_env=False,
            transport=lean(self.base_url, keepalive_s=_KEEPALIVE_S),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()

    async def health(self) -> None:
        """Return when the server is up; raise MachineError otherwise."""
        reply = await self._control("GET", "/health")
        if reply.status != httpx.codes.OK:
            raise MachineError(
                f"{self._who} is not ready: /health answered {reply.status}",
                hint="wait until the model is loaded, then try again",
            )

    async def server_info(self) -> dict[str, Any]:
        """Return the server's resolved arguments and state."""
        reply = await self._control("GET", "/server_info")
        if reply.status == httpx.codes.NOT_FOUND:
            raise MachineError(
                f"{self._who} has no /server_info",
                hint="specpilot talks to SGLang's native API: is this an SGLang server?",
            )
        with blamed(self._who):
            if reply.status != httpx.codes.OK:
                raise replies.invalid("server_info", status_text(reply))
            return replies.decode_description(reply.content, "server_info")

    async def flush_cache(self) -> None:
        """Empty the prefix cache; the server refuses while requests run.

        SGLang takes a request for running until the loop after its last pass: refusals may pass.
        """
        deadline_s = time.monotonic() + min(_IDLE_TIMEOUT_S, self._timeouts.request_s)
        while True:
            reply = await self._control("POST", "/flush_cache")
            if reply.status == httpx.codes.OK:
                return
            if reply.status != httpx.codes.BAD_REQUEST or time.monotonic() > deadline_s:
                raise MeasurementInvalid(
                    f"{self._who} did not flush its cache: {status_text(reply)}",
                    hint="another client may be using the server; measure on an idle one",
                )
            await asyncio.sleep(0.05)

    async def post(self, path: str, body: Mapping[str, Any], *, limit_s: float) -> Reply:
        """The answer to any other request, of any status; MachineError if there is none."""
        return await self._control("POST", path, body, limit_s=limit_s)

    async def generate(self, request: GenerateRequest) -> Generation:
        """Stream one greedy answer and check it."""
        with blamed(self._who):
            return await self._generate(request)

    async def _generate(self, request: GenerateRequest) -> Generation:
        submit_s = time.monotonic()
        assembler = wire.StreamAssembler(request.request_id, request.max_new_tokens)
        first_byte_s = last_byte_s = submit_s
        body = wire.generate_body(request, stream=True)
        try:
            async with asyncio.timeout(self._timeouts.request_s):
                async with self._client.stream("POST", "/generate", json=body) as response:
                    await self._check_status(response, request.request_id)
                    async for event in self._events(response, request.request_id, assembler):
                        had_tokens = assembler.has_tokens
                        assembler.add(event.payload)
                        if assembler.has_tokens and not had_tokens:
                            first_byte_s = event.first_byte_s
                        last_byte_s = event.last_byte_s
                        if self._watch is not None:
                            self._watch(request.request_id, event.last_byte_s)
        except TimeoutError as error:
            raise replies.invalid(
                request.request_id, f"no complete answer in {self._timeouts.request_s:g} s"
            ) from error
        except ReplyTooLarge as error:
            raise replies.invalid(request.request_id, str(error)) from error
        except httpx.HTTPError as error:
            raise self._transport_error(error, request.request_id) from error
        arrival = wire.Arrival(submit_s, first_byte_s, last_byte_s)
        return wire.parse_generation(assembler.finish(), request, arrival)

    async def generate_many(
        self,
        requests: Sequence[GenerateRequest],
        *,
        concurrency: int,
        on_done: Callable[[Generation], None] | None = None,
    ) -> list[Generation]:
        """Closed loop: `concurrency` requests in flight, the next one sent as one completes.

        Results come in the order of `requests`. The first failure cancels the rest: a run
        with a hole in it has no meaning.
        """
        if concurrency < 1:
            raise InputError("concurrency must be at least 1")
        return await closed_loop(self.generate, requests, concurrency=concurrency, on_done=on_done)

    async def score(self, input_ids: Sequence[int], start: int) -> ForcedScores:
        """Score the tokens `input_ids[start:]`, each given everything before it.

        The first scored token needs a predecessor, so `start` is at least 1.
        """
        if not 1 <= start < len(input_ids):
            raise InputError(f"cannot score from token {start} of {len(input_ids)}")
        with blamed(self._who):
            return await self._score(input_ids, start)

    async def _score(self, input_ids: Sequence[int], start: int) -> ForcedScores:
        name = f"score of {len(input_ids)} tokens"
        body = wire.score_body(input_ids, start)
        try:
            reply = await self._whole("POST", "/generate", body, self._timeouts.request_s)
        except TimeoutError as error:
            raise replies.invalid(name, f"no scores in {self._timeouts.request_s:g} s") from error
        except ReplyTooLarge as error:
            raise replies.invalid(name, str(error)) from error
        except httpx.HTTPError as error:
            raise self._transport_error(error, name) from error
        if reply.status != httpx.codes.OK:
            raise refusal(self._who, reply, name)
        scores = replies.decode_json(reply.content, name)
        return wire.parse_scores(scores, input_ids, start, request_id=name)

    async def _events(
        self, response: httpx.Response, request_id: str, assembler: wire.StreamAssembler
    ) -> AsyncIterator[SseEvent]:
        """Yield the `data:` events of a stream until `[DONE]`; early close is an error."""
        parser = SseParser()
        chunks = response.aiter_raw()
        last_event_s = time.monotonic()
        while True:
            deadline_s = last_event_s + self._timeouts.stall_s if assembler.has_tokens else None
            wait_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            try:
                async with asyncio.timeout(wait_s) as limit:
                    raw = await anext(chunks, None)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise replies.invalid(
                    request_id, f"the stream stalled for {self._timeouts.stall_s:g} s"
                ) from error
            if raw is None:
                raise replies.invalid(request_id, "the stream ended before [DONE]")
            arrived_s = raw.at_s if isinstance(raw, Stamped) else time.monotonic()
            for event in parser.feed(raw, arrived_s):
                last_event_s = event.last_byte_s
                if event.payload == b"[DONE]":
                    await drain(chunks)
                    return
                yield event

    async def _check_status(self, response: httpx.Response, request_id: str) -> None:
        if response.status_code != httpx.codes.OK:
            raise refusal(self._who, await whole(response), request_id)

    def _transport_error(
        self, error: httpx.HTTPError, request_id: str
    ) -> MachineError | MeasurementInvalid:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return unreachable(self._who, error)
        detail = str(error) or type(error).__name__
        return replies.invalid(request_id, f"the connection broke: {detail}")

    async def _whole(self, method: str, path: str, body: Any, limit_s: float) -> Reply:
        async with (
            asyncio.timeout(limit_s),
            self._client.stream(method, path, json=body) as response,
        ):
            return await whole(response)

    async def _control(
        self, method: str, path: str, body: Any = None, *, limit_s: float = _CONTROL_TIMEOUT_S
    ) -> Reply:
        limit_s = min(limit_s, self._timeouts.request_s)
        try:
            return await self._whole(method, path, body, limit_s)
        except ReplyTooLarge as error:
            raise MachineError(
                f"{self._who} gives no sensible answer to {path}: {error}",
                hint="specpilot talks to SGLang's native API: is this an SGLang server?",
            ) from error
        except TimeoutError as error:
            raise MachineError(
                f"{self._who} did not answer {path} within {limit_s:g} s",
                hint="is it stuck, or still loading? its log may tell",
            ) from error
        except httpx.HTTPError as error:
            raise unreachable(self._who, error) from error


class HttpEngine:
    """`AsyncHttpEngine` for code that is not async; satisfies `EngineClient`.

    Runs its own event loop, so it cannot be used from inside a running one. Use as a
    context manager, or call `close`.
    """

    def __init__(
        self,
        base_url: str,
        timeout_s: float = 600.0,
        *,
        stall_timeout_s: float = 60.0,
        name: str = "server",
        watch: Callable[[str, float], None] | None = None,
    ) -> None:
        self._engine = AsyncHttpEngine(
            base_url, timeout_s, stall_timeout_s=stall_timeout_s, name=name, watch=watch
        )
        self._runner = asyncio.Runner(loop_factory=new_loop)

    @property
    def base_url(self) -> str:
        """Where the server listens."""
        return self._engine.base_url

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
        """Close the connections and the event loop; may be called twice."""
        self._run(self._engine.close())
        self._runner.close()
        self._runner = asyncio.Runner(loop_factory=new_loop)

    def health(self) -> None:
        """Return when the server is up; raise MachineError otherwise."""
        self._run(self._engine.health())

    def server_info(self) -> dict[str, Any]:
        """Return the server's resolved arguments and state."""
        return self._run(self._engine.server_info())

    def flush_cache(self) -> None:
        """Empty the prefix cache; MeasurementInvalid when the server refuses."""
        self._run(self._engine.flush_cache())

    def post(self, path: str, body: Mapping[str, Any], *, limit_s: float) -> Reply:
        """The answer to any other request, of any status; MachineError if there is none."""
        return self._run(self._engine.post(path, body, limit_s=limit_s))

    def generate(self, request: GenerateRequest) -> Generation:
        """Stream one greedy answer and check it."""
        return self._run(self._engine.generate(request))

    def generate_many(
        self,
        requests: Sequence[GenerateRequest],
        *,
        concurrency: int,
        on_done: Callable[[Generation], None] | None = None,
    ) -> list[Generation]:
        """Answer all requests with `concurrency` in flight; see AsyncHttpEngine."""
        return self._run(
            self._engine.generate_many(requests, concurrency=concurrency, on_done=on_done)
        )

    def score(self, input_ids: Sequence[int], start: int) -> ForcedScores:
        """Score the tokens `input_ids[start:]`, each given everything before it."""
        return self._run(self._engine.score(input_ids, start))

    def _run(self, work: Awaitable[_T]) -> _T:
        async def main() -> _T:
            return await work

        return self._runner.run(main())
