"""The reference engine behind HTTP, with SGLang's own request and response shapes.

`/health`, `/server_info`, `/generate`, `/flush_cache` answer as SGLang's do, so every command talks
to both engines through one client. A request whose client goes away is dropped at the next step.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from specpilot_cli import __version__
from specpilot_cli.engines.base import GenerateRequest
from specpilot_cli.engines.reference.bridge import EngineFailure, EngineThread
from specpilot_cli.engines.reference.engine import ReferenceEngine
from specpilot_cli.engines.reference.payload import Call, Item, parse_call
from specpilot_cli.engines.reference.reply import JsonObject, Update, build_reply
from specpilot_cli.engines.reference.scheduler import DEFAULT_MAX_RUNNING
from specpilot_cli.errors import InputError, MachineError
from specpilot_cli.io.json_file import parse_json

ENGINE_NAME = "specpilot-reference"
_CLIENT_LEFT = 499  # nginx's code; nobody is there to read it


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How the server runs around the engine; pace_s and slow_ratio as in `EngineThread`."""

    host: str = "127.0.0.1"
    port: int = 30000
    max_running: int = DEFAULT_MAX_RUNNING
    pace_s: float | None = None
    slow_ratio: float = 0.0


@dataclass(slots=True)
class _InFlight:
    """One prompt being answered: its updates arrive in `updates`."""

    item: Item
    updates: asyncio.Queue[Update | EngineFailure] = field(default_factory=asyncio.Queue)
    finished: bool = False

    async def latest(self) -> Update:
        """The newest update; older ones are contained in it."""
        message = await self.updates.get()
        while not self.updates.empty():
            message = self.updates.get_nowait()
        if isinstance(message, EngineFailure):
            raise message
        self.finished = message.result is not None
        return message


class ReferenceServer:
    """The HTTP application of one engine."""

    def __init__(self, engine: ReferenceEngine, options: ServerOptions) -> None:
        self.engine, self.options = engine, options
        self.started_s = time.time()
        self._thread: EngineThread | None = None
        self._in_flight: set[str] = set()

    def app(self) -> Starlette:
        """The ASGI application; its lifespan runs the engine's thread."""
        return Starlette(
            routes=[
                Route("/health", self.health, methods=["GET"]),
                Route("/health_generate", self.health, methods=["GET"]),
                Route("/server_info", self.server_info, methods=["GET"]),
                Route("/get_server_info", self.server_info, methods=["GET"]),
                Route("/model_info", self.model_info, methods=["GET"]),
                Route("/generate", self.generate, methods=["POST", "PUT"]),
                Route("/flush_cache", self.flush_cache, methods=["GET", "POST"]),
            ],
            exception_handlers={HTTPException: _http_error},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        scheduler = self.engine.scheduler(max_running=self.options.max_running)
        options = self.options
        self._thread = EngineThread(scheduler, pace_s=options.pace_s, slow_ratio=options.slow_ratio)
        self._thread.start()
        try:
            yield
        finally:
            self._thread.stop()

    @property
    def thread(self) -> EngineThread:
        """The running engine thread."""
        if self._thread is None:
            raise RuntimeError("the application has not started")
        return self._thread

    async def health(self, _request: Request) -> Response:
        """200 while the engine's thread runs, 503 once it has failed."""
        return Response(status_code=200 if self.thread.alive else 503)

    async def server_info(self, _request: Request) -> Response:
        """Resolved arguments, versions, model hashes and the engine's state."""
        return JSONResponse(self._info())

    async def model_info(self, _request: Request) -> Response:
        """Which model is served."""
        return JSONResponse(
            {
                "model_path": str(self.engine.target_path),
                "tokenizer_path": str(self.engine.target_path),
                "is_generation": True,
            }
        )

    async def flush_cache(self, _request: Request) -> Response:
        """Refuses while requests run, as SGLang does; no prefix cache exists to be emptied."""
        if self._in_flight:
            return PlainTextResponse(
                "Flush cache failed: there are running or waiting requests.\n", status_code=400
            )
        return PlainTextResponse("Cache flushed.\n")

    async def generate(self, request: Request) -> Response:
        """Answer one call: a single prompt or a list, streamed or whole."""
        if not self.thread.alive:
            return _error("the engine has stopped; see the server's log", 503)
        try:
            call = parse_call(_decode(await request.body()), self.engine)
            self._reserve(call)
        except ClientDisconnect:
            return Response(status_code=_CLIENT_LEFT)
        except InputError as error:
            hint = f" ({error.hint})" if error.hint else ""
            return _error(f"{error}{hint}", 400)
        received = time.monotonic()
        flights = [_InFlight(item) for item in call.items]
        for flight in flights:
            self.thread.submit(flight.item.job, flight.updates.put_nowait, every_step=call.stream)
        if call.stream:
            events = self._events(call, flights, received)
            return StreamingResponse(events, media_type="text/event-stream")
        return await self._whole(request, call, flights, received)

    def _reserve(self, call: Call) -> None:
        rids = {item.job.request_id for item in call.items}
        taken = rids & self._in_flight
        if taken:
            raise InputError(f"Duplicate request ID detected: {', '.join(sorted(taken))}")
        self._in_flight |= rids

    async def _whole(
        self, request: Request, call: Call, flights: list[_InFlight], received: float
    ) -> Response:
        """Wait for every prompt, or for the client to go away."""
        work = asyncio.create_task(self._answers(flights, received))
        gone = asyncio.create_task(_disconnected(request))
        either: list[asyncio.Task[Any]] = [work, gone]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return Response(status_code=_CLIENT_LEFT)
            replies = work.result()
        except EngineFailure as failure:
            return _error(str(failure), 500)
        finally:
            for task in either:
                task.cancel()
            self._release(flights)
        return JSONResponse(replies[0] if call.single else replies)

    async def _answers(self, flights: list[_InFlight], received: float) -> list[JsonObject]:
        return [await self._one(flight, received) for flight in flights]

    async def _one(self, flight: _InFlight, received: float) -> JsonObject:
        return self._reply(flight, await flight.latest(), None, received)

    async def _events(
        self, call: Call, flights: list[_InFlight], received: float
    ) -> AsyncIterator[bytes]:
        """Server-sent events, cumulative per prompt; a list of prompts interleaves by `index`."""
        waiting = {asyncio.ensure_future(flight.latest()): i for i, flight in enumerate(flights)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index = waiting.pop(task)
                    flight, update = flights[index], task.result()
                    if not flight.finished:
                        waiting[asyncio.ensure_future(flight.latest())] = index
                    shown = None if call.single else index
                    yield _event(self._reply(flight, update, shown, received))
        except EngineFailure as failure:
            yield _event({"error": _error_body(str(failure), 500)})
        finally:
            for task in waiting:
                task.cancel()
                if task.done() and not task.cancelled():
                    task.exception()  # said once is enough: unread, it would be logged too
            self._release(flights)
        yield b"data: [DONE]\n\n"

    def _reply(
        self, flight: _InFlight, update: Update, index: int | None, received: float
    ) -> JsonObject:
        return build_reply(
            flight.item,
            update,
            tokenizer=self.engine.tokenizer if self.engine.has_tokenizer else None,
            speculative=self.engine.spec.mode != "ar",
            e2e_latency_s=time.monotonic() - received,
            index=index,
        )

    def _release(self, flights: list[_InFlight]) -> None:
        """Forget these requests; what has not finished is aborted."""
        for flight in flights:
            rid = flight.item.job.request_id
            self._in_flight.discard(rid)
            if not flight.finished:
                self.thread.abort(rid)

    def _info(self) -> JsonObject:
        engine, spec = self.engine, self.engine.spec
        drafting = spec.mode != "ar"
        return {
            "engine": ENGINE_NAME,
            "version": __version__,
            "pid": os.getpid(),
            "launch_command": shlex.join(sys.argv),
            "startup_time": self.started_s,
            "host": self.options.host,
            "port": self.options.port,
            "model_path": str(engine.target_path),
            "tokenizer_path": str(engine.target_path),
            "dtype": engine.dtype,
            "device": "cpu",
            "context_length": engine.context_length,
            "max_running_requests": self.options.max_running,
            "disable_radix_cache": True,
            "speculative_algorithm": "DFLASH" if drafting else None,
            "speculative_draft_model_path": str(engine.drafter_path) if drafting else None,
            "speculative_dflash_block_size": spec.block if drafting else None,
            "speculative_num_draft_tokens": spec.rows if drafting else None,
            "specpilot": {**engine.describe(), **self._timing()},
            "internal_states": [self._state()],
        }

    def _timing(self) -> JsonObject:
        """What makes step times other than the engine's own; empty where nothing does."""
        found: JsonObject = {}
        if self.options.pace_s is not None:
            found["paced"] = {"step_ms": 1000 * self.options.pace_s}
        if self.options.slow_ratio > 0.0:
            found["slowed_ratio"] = self.options.slow_ratio
        return found

    def _state(self) -> JsonObject:
        scheduler = self.thread.scheduler
        counters = scheduler.counters
        steps = counters.verify_steps
        return {
            "last_gen_throughput": self.thread.throughput_tok_per_s,
            # SGLang's definition: all tokens of verify steps over verify steps
            "avg_spec_accept_length": 1 + counters.accepted_drafts / steps if steps else None,
            "effective_max_running_requests_per_dp": self.options.max_running,
            "memory_usage": {
                "weight": round(self.engine.weight_bytes / 2**30, 4),
                "kvcache": round(scheduler.state_bytes / 2**30, 4),
            },
            "num_running_reqs": scheduler.n_running,
            "num_waiting_reqs": scheduler.n_waiting,
            "verify_passes": counters.passes,
            "output_tokens": counters.output_tokens,
            "finished_requests": counters.finished,
        }


def serve(engine: ReferenceEngine, options: ServerOptions, bound: socket.socket) -> None:
    """Serve until interrupted, on a socket that is bound already.

    Runs one request first, so that nothing is compiled or allocated for the first time once
    `/health` answers.
    """
    warm_up(engine)
    app = ReferenceServer(engine, options).app()
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=2, lifespan="on"
    )
    try:
        uvicorn.Server(config).run(sockets=[bound])
    except OSError as error:
        raise MachineError(
            f"cannot listen on {options.host}:{options.port}: {error.strerror}",
            hint="another server may have taken the port since; choose another --port",
        ) from error


def warm_up(engine: ReferenceEngine) -> None:
    """Generate a few tokens and score them, as requests would."""
    length = min(16, engine.context_length // 2)
    ids = tuple(range(min(length, engine.vocab_size)))
    request = GenerateRequest("warm-up", ids, max_new_tokens=8, ignore_eos=True)
    engine.generate([request])
    engine.score(ids)


async def _disconnected(request: Request) -> None:
    """Return when the client closes the connection; the body has been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _decode(body: bytes) -> Any:
    try:
        return parse_json(body.decode("utf-8"), "request body")
    except (ValueError, InputError) as error:  # also invalid UTF-8
        raise InputError(f"the request body is not valid JSON: {error}") from error


def _event(reply: JsonObject) -> bytes:
    data = json.dumps(reply, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return b"data: " + data.encode() + b"\n\n"


def _error_body(message: str, status: int) -> JsonObject:
    kind = "invalid_request_error" if status < 500 else "internal_error"
    return {"message": message, "type": kind, "code": status}


def _error(message: str, status: int) -> Response:
    return JSONResponse({"error": _error_body(message, status)}, status_code=status)


async def _http_error(_request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = error.detail if isinstance(error, HTTPException) else str(error)
    return _error(detail, status)
