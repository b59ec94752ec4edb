"""Client for a server with OpenAI's completions API and vLLM's token ids, for audits.

`/v1/completions` with `return_token_ids` answers in ids (vLLM 0.10.2 and later); `prompt_logprobs`
scores given tokens. Both are vLLM's extensions: a server that leaves ids out is refused. Replies
are not streamed, so this client audits and does not time. Requests are never retried.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from specpilot_cli.engines import replies, wire
from specpilot_cli.engines.base import ForcedScores, GenerateRequest, Generation
from specpilot_cli.engines.http_parts import (
    Reply,
    ReplyTooLarge,
    blamed,
    checked_url,
    closed_loop,
    new_loop,
    status_text,
    unreachable,
    whole,
)
from specpilot_cli.errors import InputError, MachineError

_CONNECT_TIMEOUT_S = 5.0
_CONTROL_TIMEOUT_S = 60.0
_MOST_DIGITS = 10  # of a token id
_ID_PREFIX = "token_id:"


def is_openai(url: str) -> bool:
    """Whether `url` names an OpenAI-compatible API: it ends in `/v1`."""
    return url.rstrip("/").endswith("/v1")


class OpenAiEngine:
    """A server whose URL ends in `/v1`; use as a context manager.

    Raises MachineError when the server cannot be reached or reports no ids, MeasurementInvalid
    when it answers with anything but a complete, consistent reply within `timeout_s`.
    """

    def __init__(self, base_url: str, timeout_s: float = 600.0, *, name: str = "server") -> None:
        self.base_url = checked_url(base_url)
        self._who = f"the {name} at {self.base_url}"
        self._timeout_s = timeout_s
        self._model: str | None = None
        self._client = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            timeout=httpx.Timeout(timeout_s, connect=min(_CONNECT_TIMEOUT_S, timeout_s)),
            headers={"Accept-Encoding": "identity"},
            trust_env=False,
        )
        self._runner = asyncio.Runner(loop_factory=new_loop)

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
        """Close the connections and the event loop."""
        self._runner.run(self._client.aclose())
        self._runner.close()

    def health(self) -> None:
        """Return when the server names its model; raise MachineError otherwise."""
        self._runner.run(self._find_model())

    def server_info(self) -> dict[str, Any]:
        """What is known of the server: its model and its API."""
        return {"model_path": self._runner.run(self._find_model()), "api": "openai"}

    def flush_cache(self) -> None:
        """Nothing: the API has no such call. Scoring with `prompt_logprobs` reads no cache."""

    def generate_many(
        self,
        requests: Sequence[GenerateRequest],
        *,
        concurrency: int,
        on_done: Callable[[Generation], None] | None = None,
    ) -> list[Generation]:
        """Closed loop: `concurrency` requests in flight; results in the order of `requests`."""
        if concurrency < 1:
            raise InputError("concurrency must be at least 1")
        loop = closed_loop(self._generate, requests, concurrency=concurrency, on_done=on_done)
        with blamed(self._who):
            return self._runner.run(loop)

    def score(self, input_ids: Sequence[int], start: int) -> ForcedScores:
        """Score the tokens `input_ids[start:]`, each given everything before it; start >= 1."""
        if not 1 <= start < len(input_ids):
            raise InputError(f"cannot score from token {start} of {len(input_ids)}")
        with blamed(self._who):
            return self._runner.run(self._score(input_ids, start))

    async def _generate(self, request: GenerateRequest) -> Generation:
        name = request.request_id
        body = {
            **(await self._greedy()),
            "prompt": list(request.input_ids) or request.text,
            "max_tokens": request.max_new_tokens,
            "return_token_ids": True,
        }
        if request.ignore_eos:
            body["ignore_eos"] = True
        if request.top_logprobs:
            body |= {"logprobs": request.top_logprobs, "return_tokens_as_token_ids": True}
        loop = asyncio.get_running_loop()
        submit_s = loop.time()
        reply = await self._post(body, name)
        done_s = loop.time()
        choice = _choice(reply, name)
        if choice.get("token_ids") is None:
            raise replies.without_ids(name, "of its answers")
        usage = reply.get("usage")
        meta = {
            **(usage if isinstance(usage, dict) else {}),
            "finish_reason": choice.get("finish_reason"),
            "output_top_logprobs": _top_rows(choice),
        }
        native = {
            "output_ids": choice["token_ids"],
            "prompt_token_ids": choice.get("prompt_token_ids"),
            "meta_info": meta,
        }
        return wire.parse_generation(native, request, wire.Arrival(submit_s, done_s, done_s))

    async def _score(self, input_ids: Sequence[int], start: int) -> ForcedScores:
        name = f"score of {len(input_ids)} tokens"
        ids = [int(token) for token in input_ids]
        body = {**(await self._greedy()), "prompt": ids, "max_tokens": 1, "prompt_logprobs": 1}
        rows = _choice(await self._post(body, name), name).get("prompt_logprobs")
        if not isinstance(rows, list) or len(rows) != len(ids):
            raise replies.invalid(name, f"the reply has no `prompt_logprobs` of {len(ids)} tokens")
        own: list[Any] = [None]
        top: list[Any] = [None]
        for token, row in zip(ids[start:], rows[start:], strict=True):
            found = _by_id(row, name)
            if token not in found:
                raise replies.invalid(
                    name, f"`prompt_logprobs` leaves out the forced token {token}"
                )
            best = max(found, key=lambda other: (found[other], other == token))
            own.append([found[token], token])
            top.append([[found[best], best]])
        meta = {"input_token_logprobs": own, "input_top_logprobs": top}
        return wire.parse_scores({"meta_info": meta}, ids, start, request_id=name)

    async def _greedy(self) -> dict[str, Any]:
        return {**wire.GREEDY, "model": await self._find_model(), "stream": False}

    async def _find_model(self) -> str:
        if self._model is None:
            limit_s = min(_CONTROL_TIMEOUT_S, self._timeout_s)
            try:
                async with asyncio.timeout(limit_s):
                    reply = await self._whole("GET", "/models")
                name = str(json.loads(reply.content)["data"][0]["id"])
                name.encode("utf-8")  # half characters could not be sent back
                self._model = name
            except TimeoutError as error:
                raise MachineError(
                    f"{self._who} did not answer /models within {limit_s:g} s",
                    hint="is it stuck, or still loading? its log may tell",
                ) from error
            except httpx.HTTPError as error:
                raise unreachable(self._who, error) from error
            except (ReplyTooLarge, ValueError, LookupError, TypeError, RecursionError) as error:
                raise MachineError(
                    f"{self._who} names no model at /models",
                    hint="is it an OpenAI-compatible server, and does its URL end in /v1?",
                ) from error
        return self._model

    async def _post(self, body: dict[str, Any], name: str) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._whole("POST", "/completions", body)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise replies.invalid(name, f"no complete answer in {self._timeout_s:g} s") from error
        except httpx.ConnectError as error:
            raise unreachable(self._who, error) from error
        except httpx.HTTPError as error:
            detail = str(error) or type(error).__name__
            raise replies.invalid(name, f"the connection broke: {detail}") from error
        except ReplyTooLarge as error:
            raise replies.invalid(name, str(error)) from error
        if reply.status != httpx.codes.OK:
            raise replies.invalid(name, status_text(reply))
        return replies.decode_json(reply.content, name)

    async def _whole(self, method: str, path: str, body: Any = None) -> Reply:
        url = f"{self.base_url}{path}"
        async with self._client.stream(method, url, json=body) as response:
            return await whole(response)


def _choice(reply: dict[str, Any], name: str) -> dict[str, Any]:
    choices = reply.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise replies.invalid(name, "the reply has not one choice")
    return choices[0]


def _top_rows(choice: dict[str, Any]) -> list[list[list[Any]]] | None:
    """Best tokens of every output position, as SGLang reports them; None without ids."""
    logprobs = choice.get("logprobs")
    rows = logprobs.get("top_logprobs") if isinstance(logprobs, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return None
    found: list[list[list[Any]]] = []
    for row in rows:
        pairs = [(key.removeprefix(_ID_PREFIX), value) for key, value in row.items()]
        if not all(key.isdecimal() and len(key) <= _MOST_DIGITS for key, _ in pairs):
            return None
        found.append([[value, int(key)] for key, value in pairs])
    return found


def _by_id(row: Any, name: str) -> dict[int, Any]:
    """Log-probabilities of one position by token id."""
    try:
        found = {int(key): float(value["logprob"]) for key, value in row.items()}
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        shown = replies.shown(row)
        raise replies.invalid(name, f"a row of `prompt_logprobs` is `{shown}`") from error
    if not found or any(math.isnan(value) for value in found.values()):
        raise replies.invalid(name, f"a log-probability is not a number: `{replies.shown(row)}`")
    return found
