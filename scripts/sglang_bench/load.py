"""Ask a server for many tokens at once and time them as they come.

Requests stream; each event has the time at which it arrived and the tokens so far. A rate is taken
from the part in which all requests decode, so the prefill of none of them and the tail of none of
them are in it.
"""

from __future__ import annotations

import http.client
import json
import random
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 75.0
LEAST_SHARE = 0.2

Ids = tuple[int, ...]


class BadAnswer(RuntimeError):
    """A server answered something that cannot be a measurement."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a stream: seconds on this process's clock, tokens and verify steps so far."""

    at_s: float
    tokens: int
    steps: int


@dataclass(frozen=True, slots=True)
class Stream:
    """One request: when it was sent, its events, its output, and the last `meta_info`."""

    sent_s: float
    events: tuple[Event, ...]
    output_ids: Ids
    meta: Mapping[str, Any]


def prompts_of(count: int, length: int, vocabulary: int, *, seed: int) -> list[Ids]:
    """`count` prompts of `length` random token ids each; the same for the same seed."""
    draw = random.Random(seed)
    return [tuple(draw.randrange(vocabulary) for _ in range(length)) for _ in range(count)]


def post(url: str, path: str, body: Mapping[str, Any]) -> http.client.HTTPResponse:
    """POST JSON; BadAnswer for a status other than 200."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(
        place.hostname or "127.0.0.1", place.port, timeout=TIMEOUT_S
    )
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    reply = connection.getresponse()
    if reply.status != http.client.OK:
        raise BadAnswer(f"{url}{path} answers {reply.status}: {reply.read(2000)!r}")
    return reply


def get_json(url: str, path: str) -> dict[str, Any]:
    """GET a JSON object."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(
        place.hostname or "127.0.0.1", place.port, timeout=TIMEOUT_S
    )
    try:
        connection.request("GET", path)
        reply = connection.getresponse()
        answer = json.loads(reply.read())
    finally:
        connection.close()
    if reply.status != http.client.OK or not isinstance(answer, dict):
        raise BadAnswer(f"{url}{path} answers {reply.status}")
    return answer


def generate(url: str, ids: Ids, new_tokens: int, **options: Any) -> dict[str, Any]:
    """One whole greedy answer of exactly `new_tokens` tokens, as the server words it."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    reply = post(url, "/generate", {"input_ids": ids, "sampling_params": sampling, **options})
    answer: dict[str, Any] = json.loads(reply.read())
    got = answer["meta_info"]["completion_tokens"]
    if got != new_tokens:
        raise BadAnswer(f"{url}: {got} tokens, not {new_tokens}")
    return answer


def stream(url: str, ids: Ids, new_tokens: int, *, every: int) -> Stream:
    """One greedy answer of exactly `new_tokens` tokens, an event about every `every` tokens."""
    sampling = {
        "temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True,
        "stream_interval": every,
    }  # fmt: skip
    sent_s = time.perf_counter()
    reply = post(url, "/generate", {"input_ids": ids, "sampling_params": sampling, "stream": True})
    events: list[Event] = []
    output: list[int] = []
    meta: dict[str, Any] = {}
    for at_s, body in _server_events(reply):
        if "error" in body:
            raise BadAnswer(f"{url}: {body['error']}")
        meta, said = body["meta_info"], body.get("output_ids", [])
        tokens = int(meta["completion_tokens"])
        # a server may send all tokens so far with each event, or the new ones alone
        output = list(said) if len(said) == tokens else output + list(said)
        events.append(Event(at_s, tokens, int(meta.get("spec_verify_ct") or 0)))
    if not events or events[-1].tokens != new_tokens:
        raise BadAnswer(f"{url}: the stream ended after {events[-1:]} of {new_tokens} tokens")
    return Stream(sent_s, tuple(events), tuple(output), meta)


def _server_events(reply: http.client.HTTPResponse) -> Iterator[tuple[float, dict[str, Any]]]:
    while line := reply.readline():
        at_s = time.perf_counter()
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield at_s, json.loads(line[6:])


def together(url: str, prompts: Sequence[Ids], new_tokens: int, *, every: int) -> list[Stream]:
    """All prompts at once, a thread each; the first failure is raised."""
    found: list[Stream | BaseException | None] = [None] * len(prompts)

    def ask(place: int) -> None:
        try:
            found[place] = stream(url, prompts[place], new_tokens, every=every)
        except Exception as error:  # noqa: BLE001 - raised by the caller
            found[place] = error

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers: list[Stream] = []
    for one in found:
        if not isinstance(one, Stream):
            raise one if isinstance(one, BaseException) else BadAnswer(f"{url}: no answer")
        answers.append(one)
    return answers


def steady_ms(streams: Sequence[Stream], *, per: str) -> float:
    """Milliseconds per token ("tokens") or verify step ("steps") while all requests decoded.

    The window begins with the last request's first event and ends with the first one's last event.
    BadAnswer if a request has fewer than two events in it, or if it is less than LEAST_SHARE of the
    whole: then events came in a burst, or prefill took most of the time.
    """
    begin = max(one.events[0].at_s for one in streams)
    end = min(one.events[-1].at_s for one in streams)
    whole_s = max(one.events[-1].at_s for one in streams) - min(one.sent_s for one in streams)
    if end - begin < LEAST_SHARE * whole_s:
        raise BadAnswer(
            f"all {len(streams)} requests decoded in {end - begin:.3f} of {whole_s:.3f} s"
        )
    rates = []
    for one in streams:
        inside = [event for event in one.events if begin <= event.at_s <= end]
        done = getattr(inside[-1], per) - getattr(inside[0], per) if len(inside) > 1 else 0
        if done < 1:
            raise BadAnswer(f"{len(inside)} events while all {len(streams)} requests decoded")
        rates.append(1e3 * (inside[-1].at_s - inside[0].at_s) / done)
    return statistics.median(rates)
